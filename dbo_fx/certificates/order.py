"""Happens-before over streams, events and host order.

One clock per stream: an operation's clock holds, per stream, the position of the last operation
known to be complete before it starts. Streams run in order; a wait takes over the clock of its
event's latest record before it in host order (that is what CUDA does), and a wait for an event
that was never recorded waits for nothing. Source: Fidge and Mattern's vector clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dbo_fx.certificates.execution import Kind, Operation

Clock = dict[str, int]


class HappensBefore:
    """Which operations are complete before which others start, on every legal run.

    Args:
        operations: In host order.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Compute the clocks; time and memory grow with operations times streams."""
        self.operations = operations
        now: defaultdict[str, Clock] = defaultdict(dict)
        recorded: dict[int, Clock] = {}
        self.clocks: list[Clock] = []
        for index, operation in enumerate(operations):
            clock = now[operation.stream]
            if operation.kind is Kind.WAIT and operation.event in recorded:
                for stream, seen in recorded[operation.event].items():
                    clock[stream] = max(clock.get(stream, -1), seen)
            self.clocks.append(dict(clock))
            clock[operation.stream] = index
            if operation.kind is Kind.RECORD:
                assert operation.event is not None
                recorded[operation.event] = dict(clock)

    def before(self, first: int, second: int) -> bool:
        """Whether operation `first` is complete before operation `second` starts."""
        return self.clocks[second].get(self.operations[first].stream, -1) >= first

    def ordered(self, one: int, other: int) -> bool:
        """Whether the two never run at the same time."""
        return self.before(one, other) or self.before(other, one)
