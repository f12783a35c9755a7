"""Progress counters of one emitted module: plain numbers on CPU, pinned host memory on CUDA.

On CUDA the end of an action is a copy on its own stream: a device constant into pinned host memory.
The host waits for nothing, and a CUDA graph captures the copies, so the counters move in a replay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo_fx.errors import CommunicationError
from dbo_fx.progress import Place


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment.

    Attributes:
        call: Calls begun.
        finished: Finished actions by stream.
        started: Actions that the host started (launched, on CUDA), by stream.
        since_start_ms: Time since the host began the last call; None before the first.
    """

    call: int
    finished: dict[str, int]
    started: dict[str, int]
    since_start_ms: float | None


class Counters:
    """Counts where the host itself executes the actions, in order.

    Args:
        order: Every counted action, in the order in which the host starts them.

    Attributes:
        started: By stream, the number of the last action that the host started, counted from 1;
            the emitted module writes it.
        finished: The same for the end; on CUDA, for the launch.
    """

    def __init__(self, order: Sequence[Place]) -> None:
        """Start at zero."""
        self.order = tuple(order)
        self.streams = tuple(dict.fromkeys(place.stream for place in self.order))
        self.call = 0
        self.began_s: float | None = None
        self.started = dict.fromkeys(self.streams, 0)
        self.finished = dict.fromkeys(self.streams, 0)

    @property
    def is_half_way(self) -> bool:
        """Whether the host has begun a call, and not come to its last action's end."""
        return any(self.started.values()) and sum(self.finished.values()) < len(self.order)

    def begin(self) -> None:
        """Start a call."""
        self.began_s = time.monotonic()
        self.started.update(dict.fromkeys(self.streams, 0))
        self.finished.update(dict.fromkeys(self.streams, 0))
        self.call += 1

    def finish(self, index: int, stream: str) -> None:
        """The action has run; on CUDA: it has been launched on the current stream."""
        self.finished[stream] = index

    def read(self) -> Reading:
        """Read everything, from any thread, without waiting for anything."""
        return Reading(self.call, dict(self.finished), dict(self.started), self._since_start_ms())

    def end(self, serial: int) -> bool:
        """The call that the host numbered `serial` is launched.

        Returns:
            Whether it has finished with that. If not, `ended` says when it has.
        """
        return True

    def ended(self, serial: int) -> bool:
        """Whether call `serial` has finished."""
        return True

    def _since_start_ms(self) -> float | None:
        return None if self.began_s is None else (time.monotonic() - self.began_s) * 1e3


class DeviceCounters(Counters):
    """Counts where streams execute the actions.

    Args:
        order: As for `Counters`.
        device: Where the streams are. On another device than CUDA the host memory is not pinned
            and the copies happen at once.
    """

    def __init__(self, order: Sequence[Place], device: torch.device) -> None:
        """Allocate nothing yet: at the first call the device is the rank's own."""
        super().__init__(order)
        self.device = device
        self._host: Tensor | None = None

    def begin(self) -> None:
        """Count the call and reset its streams, on the caller's stream."""
        super().begin()
        if self._host is None:
            self._allocate()
        assert self._host is not None
        self._calls.add_(1)
        self._host_head.copy_(self._head, non_blocking=True)

    def finish(self, index: int, stream: str) -> None:
        """Let the current stream write the number when it gets there."""
        self.finished[stream] = index
        self._slots[stream].copy_(self._numbers[index], non_blocking=True)

    def read(self) -> Reading:
        """Read the pinned memory: no call into CUDA, so that a hung device does not matter."""
        call, finished = 0, dict.fromkeys(self.streams, 0)
        if self._host is not None:
            call, *counts = self._host_head.tolist()
            finished = dict(zip(self.streams, counts, strict=True))
        return Reading(call, finished, dict(self.started), self._since_start_ms())

    def end(self, serial: int) -> bool:
        """Let the caller's stream write the serial number when the call is over."""
        if self._host is None:
            return True
        self._last.clamp_(min=serial)
        self._host_last.copy_(self._last, non_blocking=True)
        return self.ended(serial)

    def ended(self, serial: int) -> bool:
        """Read the serial number of the last call that is over."""
        return self._host is None or int(self._host_last.item()) >= serial

    def _allocate(self) -> None:
        is_cuda = self.device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            raise CommunicationError(
                "the progress counters cannot be allocated while a CUDA graph is captured. Call "
                "the compiled model once before the capture, or set option progress=False."
            )
        width = 1 + len(self.streams)
        with torch.inference_mode(False), torch.no_grad():
            # One row of counters, one of the calls that are over; a row is one copy.
            host = torch.zeros(width + 1, dtype=torch.int64, pin_memory=is_cuda)
            self._head = torch.zeros(width, dtype=torch.int64, device=self.device)
            self._last = torch.zeros(1, dtype=torch.int64, device=self.device)
            numbers = torch.arange(len(self.order) + 1, device=self.device)
            self._calls = self._head[:1]
            # Views are made once: making one costs more host time than the copy.
            self._numbers = [numbers[n : n + 1] for n in range(len(self.order) + 1)]
            self._slots = {s: host[i + 1 : i + 2] for i, s in enumerate(self.streams)}
            self._host_head, self._host_last = host[:width], host[width:]
        self._host = host
