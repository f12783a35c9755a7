"""The options of `torch.compile(model, backend="dbo_fx", options={...})`, validated by hand.

torch passes options through as they are: an unknown key or a silly value must be caught here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dbo_fx import schedules
from dbo_fx.contracts import CONTRACTS
from dbo_fx.errors import OptionError
from dbo_fx.ir import Schedule
from dbo_fx.sm_sharing import SmSharing

LONGEST_S = 10_000_000  # about 115 days: what a store's timeout can hold with room to spare
CHOICES = {
    "on_unsupported": ("raise", "fallback"),
    "verify": ("numeric", "static"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to split and schedule.

    Attributes:
        schedule: Name of a shipped schedule, a path ending in `.dbo`, or an `ir.Schedule`.
        num_microbatches: How many microbatches; None takes the schedule's own number (2 where the
            schedule leaves it open).
        split_dim: The dim of the marked inputs that is split; None takes the only marked one.
        inner_backend: The torch.compile backend for graphs without MoE communication.
        on_unsupported: `raise`, or `fallback`: log the reason once and use `inner_backend`.
        verify: `static`: dependencies, streams, lifetimes, guards and ranges. `numeric`: these and,
            on the first call, the split program against the unsplit graph on the real inputs.
        dump_dir: Folder for graphs as runnable Python, the program and what was proven; each in a
            folder `rankR/N` for the N-th compilation of rank R. None writes nothing.
        agree_timeout_s: How long to wait for the other ranks' program hash after a compile, in
            seconds.
        progress: Whether the program counts the actions it has finished (see docs/hangs.md); None
            takes True on CPU, where it costs next to nothing, and False on CUDA.
        hang_timeout_s: Report the progress of a call that takes longer, in seconds; None watches
            nothing. Needs the counters, and turns them on.
        max_memory_ratio: Refuse a program whose predicted peak is more than this many times the
            unsplit graph's; None refuses none.
        segment_backend: What compiles the segments between communications: `inductor`, `eager` (run
            them as they were traced) or another torch.compile backend; None takes inductor on CUDA
            and eager elsewhere.
        transport: Name of what carries dispatch and combine; None takes gloo on CPU and NCCL on
            CUDA.
        comm_sms: The most SMs that communication may take, for transports that can limit
            themselves; None leaves it to the transport.
        matmul_carveout: How many SMs matmuls leave free while the program runs; None: none. Sets
            nothing on CPU.
    """

    schedule: str | Schedule = "mlp_shared_overlap"
    num_microbatches: int | None = None
    split_dim: int | None = None
    inner_backend: str = "inductor"
    on_unsupported: str = "raise"
    verify: str = "numeric"
    dump_dir: str | os.PathLike[str] | None = None
    agree_timeout_s: float = 120.0
    progress: bool | None = None
    hang_timeout_s: float | None = None
    segment_backend: str | None = None
    transport: str | None = None
    max_memory_ratio: float | None = None
    comm_sms: int | None = None
    matmul_carveout: int | None = None

    def __post_init__(self) -> None:
        """Validate every value.

        Raises:
            OptionError: names the key, the value and what is allowed.
        """
        if not isinstance(self.schedule, str | Schedule):
            raise _bad("schedule", self.schedule, "a name, a path ending in .dbo, or a Schedule")
        _check_int("num_microbatches", self.num_microbatches, 1)
        _check_int("split_dim", self.split_dim, 0)
        for key in ("comm_sms", "matmul_carveout"):
            _check_int(key, getattr(self, key), 1)
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise _bad(key, getattr(self, key), " or ".join(map(repr, allowed)))
        if not isinstance(self.inner_backend, str) or self.inner_backend == "dbo_fx":
            raise _bad("inner_backend", self.inner_backend, "the name of another backend")
        if self.dump_dir is not None and not isinstance(self.dump_dir, str | os.PathLike):
            raise _bad("dump_dir", self.dump_dir, "a path or None")
        _check_seconds("agree_timeout_s", self.agree_timeout_s)
        self._check_progress()
        if self.segment_backend is not None and not isinstance(self.segment_backend, str):
            raise _bad("segment_backend", self.segment_backend, "a backend's name, or None")
        name = self.transport
        if name is not None and not (isinstance(name, str) and name in CONTRACTS):
            raise _bad("transport", name, f"one of {', '.join(CONTRACTS)}, or None")
        ratio = self.max_memory_ratio
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if ratio is not None and not (number and ratio > 0):
            raise _bad("max_memory_ratio", ratio, "a number above 0, or None")
        own = self.resolved_schedule().num_microbatches
        if own is not None and self.num_microbatches not in (None, own):
            raise OptionError(
                f"num_microbatches={self.num_microbatches} does not fit schedule "
                f"{self.resolved_schedule().name!r}, which is written for {own}. "
                f"Leave num_microbatches out, or choose one of: {_fitting(self.num_microbatches)}."
            )

    def _check_progress(self) -> None:
        if self.progress is not None and not isinstance(self.progress, bool):
            raise _bad("progress", self.progress, "True, False or None")
        if self.hang_timeout_s is None:
            return
        _check_seconds("hang_timeout_s", self.hang_timeout_s)
        if self.progress is False:
            raise OptionError(
                f"hang_timeout_s={self.hang_timeout_s} reports the progress counters, but "
                "progress=False turns them off. Leave progress out."
            )

    @property
    def counts_progress(self) -> bool | None:
        """Whether the program has counters; None: on CPU only."""
        return True if self.hang_timeout_s is not None else self.progress

    @property
    def sms(self) -> SmSharing:
        """How the program shares SMs, as its text says it."""
        return SmSharing(self.comm_sms, self.matmul_carveout)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from a user's mapping.

        Raises:
            OptionError: unknown key, wrong type, or a combination that cannot work.
        """
        given = dict(options or {})
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise OptionError(f"unknown option {key!r}.{hint} Known: {', '.join(known)}.")
        return cls(**given)

    def resolved_schedule(self) -> Schedule:
        """The schedule itself.

        Raises:
            ScheduleError: no such name or file, or its text is wrong.
        """
        if isinstance(self.schedule, Schedule):
            return self.schedule
        return schedules.load(self.schedule)

    def microbatches(self) -> int:
        """How many microbatches the program will have."""
        return self.num_microbatches or self.resolved_schedule().num_microbatches or 2


def _fitting(microbatches: int | None) -> str:
    """The shipped schedules for a number of microbatches, among them those for any."""
    shipped = {name: schedules.load(name).num_microbatches for name in schedules.names()}
    return ", ".join(name for name, own in shipped.items() if own in (None, microbatches))


def _bad(key: str, value: object, wanted: str) -> OptionError:
    return OptionError(f"option {key}={value!r} is not allowed: want {wanted}.")


def _check_seconds(key: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LONGEST_S:  # type: ignore[operator]
        raise _bad(key, value, f"a positive number of seconds below {LONGEST_S}")


def _check_int(key: str, value: object, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(key, value, f"an integer >= {least}, or None")
