"""The clock of a diagnostic module: when every action starts and stops, on its own stream.

A module that is emitted with stamps calls `start` and `finish` around every action. On CUDA both
record a timing event on the action's stream; the events are external, so a CUDA graph captures the
records and every replay stamps them anew. On CPU the host itself runs the actions and reads its
clock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from dbo_fx.ir import COMP
from dbo_fx.progress import Place
from dbo_fx.runtime import Runtime

Span = tuple[float, float]


def timing_event() -> torch.cuda.Event:
    """A timing event that may be recorded inside a CUDA graph and read after a replay."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


class StampedRuntime(Runtime):
    """Streams and events of a diagnostic module, and its clock.

    Args:
        device: Where the module's tensors live.
        order: Every stamped action, in the order in which the host starts them.
    """

    def __init__(self, device: torch.device, order: Sequence[Place]) -> None:
        """Create no event yet."""
        super().__init__(device)
        self.order = tuple(order)
        self._host_s: dict[tuple[str, int], list[float]] = {}
        self._began_s = 0.0
        self._began: torch.cuda.Event | None = None
        self._stamps: dict[tuple[str, int], tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def begin(self) -> None:
        """Start a call: its times count from here, on the compute stream."""
        super().begin()
        if self.is_cuda:
            self._began = self._began or timing_event()
            self._began.record(self._streams[COMP])
        else:
            self._host_s.clear()
            self._began_s = time.perf_counter()

    def start(self, index: int, stream: str) -> None:
        """Stamp the start of action number `index` of a stream."""
        if not self.is_cuda:
            self._host_s[stream, index] = [time.perf_counter()]
            return
        if (stream, index) not in self._stamps:
            self._stamps[stream, index] = timing_event(), timing_event()
        self._stamps[stream, index][0].record(self._streams[stream])

    def finish(self, index: int, stream: str) -> None:
        """Stamp its end."""
        if self.is_cuda:
            self._stamps[stream, index][1].record(self._streams[stream])
        else:
            self._host_s[stream, index].append(time.perf_counter())

    def spans_us(self) -> list[Span]:
        """Start and stop of every action of `order` since the last call began, in microseconds.

        On CUDA the call, or the replay, must be over: synchronise first.
        """
        numbers: defaultdict[str, int] = defaultdict(int)
        spans = []
        for place in self.order:
            numbers[place.stream] += 1
            spans.append(self._span_us((place.stream, numbers[place.stream])))
        return spans

    def _span_us(self, key: tuple[str, int]) -> Span:
        if not self.is_cuda:
            start_s, stop_s = self._host_s[key]
            return (start_s - self._began_s) * 1e6, (stop_s - self._began_s) * 1e6
        assert self._began is not None
        start, stop = self._stamps[key]
        return self._began.elapsed_time(start) * 1e3, self._began.elapsed_time(stop) * 1e3
