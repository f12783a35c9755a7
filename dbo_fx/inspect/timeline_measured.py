"""Put what was measured on lanes of its own below a program's plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dbo_fx.inspect.measured import Measured, stamped_actions
from dbo_fx.inspect.timeline import Timeline
from dbo_fx.inspect.timeline_items import Arrow, Item
from dbo_fx.ir import COMP, Keepalive, Merge, Program, Record, Run, Wait

SUFFIX = " measured"


def beside(plan: Timeline, measured: Measured) -> Timeline:
    """Add a lane for each stream of a measurement to the timeline of the program that it is of.

    Args:
        plan: The timeline of `measured.program`.
        measured: The measurement.
    """
    items = _items(measured)
    arrows = _Arrows(items, first=len(plan.items)).of(measured.program)
    lanes = sorted({i.stream for i in items}, key=lambda lane: lane.removesuffix(SUFFIX) != COMP)
    return replace(
        plan,
        items=(*plan.items, *items),
        arrows=(*plan.arrows, *arrows),
        streams=(*plan.streams, *lanes),
    )


def _items(measured: Measured) -> tuple[Item, ...]:
    actions = stamped_actions(measured.stamps, measured.program)
    return tuple(
        Item(
            stamp.stream + SUFFIX,
            stamp.start_us,
            stamp.stop_us,
            stamp.name,
            action,
            is_measured=True,
        )
        for stamp, action in zip(measured.stamps, actions, strict=True)
    )


@dataclass
class _Arrows:
    """Walks a program and says between which measured items its events lie.

    A stream's neighbouring steps of one action were measured as one item, and an action in
    another's segment has none.
    """

    items: tuple[Item, ...]
    first: int
    last: dict[str, int] = field(default_factory=dict)
    records: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    pending: defaultdict[str, list[Wait]] = field(default_factory=lambda: defaultdict(list))

    def of(self, program: Program) -> Iterator[Arrow]:
        """Every wait whose event has items on both sides."""
        self.by_name: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for index, item in reversed(list(enumerate(self.items))):
            self.by_name[item.stream, item.name].append(index)
        for step in program.steps:
            match step:
                case Record(stream, event):
                    self.records[event] = stream + SUFFIX, self.last.get(stream)
                case Wait(stream, _):
                    self.pending[stream].append(step)
                case Run(stream, action, _):
                    yield from self._reach(stream, action.bound())
                case Merge(stream):
                    yield from self._reach(stream, "merge")
                case Keepalive():
                    pass

    def _reach(self, stream: str, name: str) -> Iterator[Arrow]:
        found = self.by_name[stream + SUFFIX, name]
        previous = self.last.get(stream)
        if not found or (previous is not None and self.items[previous].name == name):
            return
        target = found.pop()
        for wait in self.pending.pop(stream, ()):
            lane, source = self.records.get(wait.event, ("", None))
            if source is not None:
                yield self._arrow(wait.event, lane, source, target, previous)
        self.last[stream] = target

    def _arrow(
        self, event: int, lane: str, source: int, target: int, previous: int | None
    ) -> Arrow:
        before, after = self.items[source], self.items[target]
        free_us = 0.0 if previous is None else self.items[previous].end_us
        held = after.start_us - free_us if before.end_us > free_us else 0.0
        return Arrow(
            event,
            lane,
            before.end_us,
            after.stream,
            after.start_us,
            max(held, 0.0),
            before.name,
            after.name,
            self.first + source,
            self.first + target,
        )
