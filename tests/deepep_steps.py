"""Steps through `wrap` over a transport: replays and eager runs, split and not, and failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx import AgreementPolicy, Bucket, GraphOptions
from dbo_fx.buckets import SPLIT, UNSPLIT
from dbo_fx.capturing import what_captures
from dbo_fx.comm import abandon_in_flight, in_flight, ops
from dbo_fx.decision import BatchKind

LAYERS = 2
SENDS = {SPLIT: 4 * LAYERS, UNSPLIT: 2 * LAYERS}
FAIL_EVERY = 20


@dataclass(frozen=True)
class Subject:
    """A model of two layers in two programs.

    Attributes:
        split: Two microbatches.
        whole: One.
        given: Arguments of this rank, from the number of tokens and a seed.
        reference: What the model is, from the arguments.
        pad: As for `wrap`.
    """

    split: Any
    whole: Any
    given: Callable[[int, int], tuple[Tensor, ...]]
    reference: Callable[..., Tensor]
    pad: Mapping[str, float] | None = None

    def wrapped(self, **options: Any) -> Any:
        """Both in one."""
        return dbo_fx.wrap(self.split, unsplit=self.whole, pad=self.pad, **options)


def errors(found: Tensor, want: Tensor) -> tuple[float, float]:
    """Relative error of all, and of the worst row."""
    if not found.numel():
        return 0.0, 0.0
    lost, size = (found.float() - want.float()).norm(dim=1), want.float().norm(dim=1)
    return float(lost.norm() / size.norm()), float((lost / size).max())


@torch.no_grad()
def run_padded(rank: int, subject: Subject, few: int, many: int) -> list[float]:
    """Worst rows of steps in which rank 0 has few rows and the others many, split and not."""
    state = {"split": True}
    wrapped = subject.wrapped(allow=lambda rows: state["split"])
    found = []
    for state["split"] in (True, False):
        given = subject.given(few if rank == 0 else many, 5)
        out = wrapped(*given)
        assert len(out) == len(given[0])
        found.append(errors(out, subject.reference(*given))[1])
    assert (wrapped.statistics.split_steps, wrapped.statistics.unsplit_steps.total()) == (1, 1)
    return found


@torch.no_grad()
def run_steps(subject: Subject, sizes: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Take turns; all but the largest size are captured.

    Every `FAIL_EVERY` steps a step fails at one of its sends, eager and captured ones in turn.
    """
    given = {(n, seed): subject.given(n, seed) for n in sizes for seed in (0, 1)}
    programs = {SPLIT: subject.split, UNSPLIT: subject.whole}
    want = {
        (n, seed, plan): program(*given[n, seed]).clone()
        for (n, seed), (plan, program) in itertools.product(given, programs.items())
    }
    state = {"plan": SPLIT}
    wrapped = subject.wrapped(
        allow=lambda rows: state["plan"] == SPLIT,
        policy=AgreementPolicy(0, 0, buckets=sizes),
        graphs=GraphOptions(warmup=1),
    )
    small = [Bucket(n, BatchKind.PREFILL, plan) for n in sizes[:-1] for plan in programs]
    wrapped.capture(small, *given[sizes[0], 0])
    wrong, failed = [], 0
    for step in range(steps):
        count, plan, seed = sizes[step % 3], (SPLIT, UNSPLIT)[step // 3 % 2], step // 6 % 2
        state["plan"] = plan
        if step % FAIL_EVERY == FAIL_EVERY - 1:
            failed += fail(wrapped, programs, given[sizes[-1], 0], step // FAIL_EVERY)
        if not torch.equal(wrapped(*given[count, seed]), want[count, seed, plan]):
            wrong.append(step)
    replays = wrapped.statistics.graphs.hits.total()
    wrapped.graphs.reset()
    return {"wrong": wrong, "failed": failed, "replays": replays, "left": in_flight()}


def expected(steps: int) -> dict[str, Any]:
    """What `run_steps` of three sizes returns."""
    replays = sum(step % 3 < 2 for step in range(steps))
    return {"wrong": [], "failed": steps // FAIL_EVERY, "replays": replays, "left": ()}


def fail(wrapped: Any, programs: Mapping[str, Any], given: Any, number: int) -> int:
    """Fail on all ranks alike; 1 if it did. Numbers walk through sends, programs and captures."""
    plan, captured = (SPLIT, UNSPLIT)[number % 2], number // 2 % 2 == 1
    at = (1 + captured + number // 4) % SENDS[plan]
    calls, before, hit = itertools.count(), ops._check_slot, []

    def boom(*args: Any) -> None:
        if bool(what_captures()) == captured and next(calls) == at:
            hit.append(True)
            raise ZeroDivisionError("boom")
        before(*args)

    with pytest.MonkeyPatch.context() as patch, suppress(ZeroDivisionError):
        patch.setattr(ops, "_check_slot", boom)
        if captured:
            wrapped.graphs.capture([Bucket(len(given[0]), plan=plan)], *given)
        else:
            programs[plan](*given)
    abandon_in_flight()
    return len(hit)
