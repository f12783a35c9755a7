"""Events of two sides: which orderings are the same, and which markers moved."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from dbo_fx.inspect.changes import Change
from dbo_fx.inspect.facts import Edge, Facts, Item, Marker, stream_positions
from dbo_fx.inspect.matching import Matching
from dbo_fx.inspect.order import Stable

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Anchored:
    """An edge with the items that it connects.

    Attributes:
        edge: The edge.
        after: Index of the last item before the record on its stream; None for none.
        before: Index of the first item behind the wait on its stream; None for none.
    """

    edge: Edge
    after: int | None
    before: int | None


def anchored(facts: Facts) -> list[Anchored]:
    """All edges of one side with what they connect."""
    indices = stream_positions(facts.items)
    positions = {s: [facts.items[i].at for i in found] for s, found in indices.items()}

    def near(marker: Marker | None, step: int) -> int | None:
        if marker is None or marker.stream not in indices:
            return None
        at = bisect_left(positions[marker.stream], marker.at) + step
        return indices[marker.stream][at] if 0 <= at < len(indices[marker.stream]) else None

    return [Anchored(edge, near(edge.record, -1), near(edge.wait, 0)) for edge in facts.edges]


@dataclass
class Events:
    """The edges of two sides, matched by what they connect, never by number.

    Attributes:
        same: Old and new edge with the same record and wait.
        altered: Old and new edge of which one end is the same.
        gone: Old edges without a new one.
        fresh: New edges without an old one.
    """

    old: Facts
    new: Facts
    matching: Matching
    same: list[tuple[Anchored, Anchored]] = field(default_factory=list)
    altered: list[tuple[Anchored, Anchored]] = field(default_factory=list)
    gone: list[Anchored] = field(default_factory=list)
    fresh: list[Anchored] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Match."""
        self.gone, self.fresh = anchored(self.old), anchored(self.new)
        self.same = self._match(lambda e, one: (*self._record(e, one), *self._wait(e, one)))
        for key in (
            lambda e, one: e.edge.wait and (self._wait(e, one), _stream(e.edge.record)),
            lambda e, one: e.edge.record and (self._record(e, one), _stream(e.edge.wait)),
            lambda e, one: e.edge.wait and self._wait(e, one),
            lambda e, one: e.edge.record and self._record(e, one),
        ):
            self.altered += self._match(key)

    def _match(self, key: Callable[[Anchored, bool], Hashable]) -> list[tuple[Anchored, Anchored]]:
        waiting: defaultdict[Hashable, deque[Anchored]] = defaultdict(deque)
        for edge in self.fresh:
            waiting[key(edge, False)].append(edge)
        waiting.pop(None, None)
        found: list[tuple[Anchored, Anchored]] = []
        left: list[Anchored] = []
        for edge in self.gone:
            others = waiting.get(key(edge, True))
            if others:
                found.append((edge, others.popleft()))
            else:
                left.append(edge)
        taken = {id(new) for _, new in found}
        self.gone, self.fresh = left, [e for e in self.fresh if id(e) not in taken]
        return found

    def _record(self, edge: Anchored, is_old: bool) -> tuple[Hashable, ...]:
        return (_stream(edge.edge.record), self._anchor(edge.after, is_old))

    def _wait(self, edge: Anchored, is_old: bool) -> tuple[Hashable, ...]:
        return (_stream(edge.edge.wait), self._anchor(edge.before, is_old))

    def _anchor(self, index: int | None, is_old: bool) -> Hashable:
        """A new item's index for what is matched; what is not matched equals nothing."""
        if index is None:
            return None
        if is_old:
            new = self.matching.now[index]
            return new if new >= 0 else ("old", index)
        return index if self.matching.was[index] >= 0 else ("new", index)

    def markers(self) -> dict[tuple[str, int], tuple[Marker, Marker, str]]:
        """Matched records and waits with what to call them, by side and old position."""
        found: dict[tuple[str, int], tuple[Marker, Marker, str]] = {}
        taken: set[tuple[str, int]] = set()
        for old, new in (*self.same, *self.altered):
            ends = {"record": (old.edge.record, new.edge.record)}
            ends["wait"] = (old.edge.wait, new.edge.wait)
            for side, (was, now) in ends.items():
                if was is None or now is None or (side, was.at) in found:
                    continue
                if (side, now.at) not in taken:
                    found[side, was.at] = was, now, f"{side} of {edge_name(old, self.old)}"
                    taken.add((side, now.at))
        return found


def _stream(marker: Marker | None) -> str | None:
    return None if marker is None else marker.stream


Kept = Sequence[tuple[int, int, str]]


class Crossed:
    """What keeps its order on one stream: positions on both sides, and names."""

    def __init__(self, kept: Kept) -> None:
        """Take them by position, ascending on both sides."""
        self.stable = Stable([was for was, _, _ in kept], [now for _, now, _ in kept])
        self.names = [name for _, _, name in kept]

    def between(self, was: Marker, now: Marker) -> tuple[list[str], bool]:
        """Names of what a marker crossed, and whether it came earlier."""
        crossing = self.stable.crossing(was.at, now.at)
        return self.names[crossing.low : crossing.high], crossing.is_earlier


@dataclass(frozen=True)
class EventChanges:
    """What became of the events, as entries.

    A record covers what stands before it on its stream, waits among it, and a wait holds up what
    stands behind it, records among it. So a marker that crosses an item or a marker of the other
    kind on its own stream orders other things than before; what else it crosses says nothing.

    Attributes:
        events: The matched edges.
        items: Per stream the items that keep their order.
        markers: Per stream and side the markers that keep it.
        settled: New indices of the items that keep their order.
    """

    events: Events
    items: Mapping[str, Kept]
    markers: Mapping[tuple[str, str], Kept]
    settled: Set[int]

    def all(self) -> Iterator[Change]:
        """The entries."""
        told: set[tuple[str, int]] = set()
        for old, new in self.events.same:
            yield from self._among_markers(old, new, told)
        for old, new in self.events.altered:
            yield from self._altered(old, new, told)
        for edge in self.events.gone:
            yield self._entry(edge, self.events.old, was=self._text(edge))
        for edge in self.events.fresh:
            yield self._entry(edge, self.events.new, now=self._text(edge))

    @cached_property
    def _crossed(self) -> dict[tuple[str, str, bool], Crossed]:
        """By stream, side of the marker that moves, and whether items count."""
        streams = {*self.items, *(stream for stream, _ in self.markers)}
        found = {}
        for stream in streams:
            for side, other in (("record", "wait"), ("wait", "record")):
                kept = self.markers.get((stream, other), ())
                found[stream, side, False] = Crossed(kept)
                found[stream, side, True] = Crossed(sorted((*self.items.get(stream, ()), *kept)))
        return found

    def _among_markers(
        self, old: Anchored, new: Anchored, told: set[tuple[str, int]]
    ) -> Iterator[Change]:
        """Between the same items a record and a wait may have changed places."""
        sides = (
            ("record", old.edge.record, new.edge.record, new.after),
            ("wait", old.edge.wait, new.edge.wait, new.before),
        )
        for side, was, now, anchor in sides:
            is_settled = anchor is None or anchor in self.settled
            if was is not None and now is not None and is_settled and (side, was.at) not in told:
                told.add((side, was.at))
                yield from self._moved(old, side, was, now, with_items=False)

    def _altered(
        self, old: Anchored, new: Anchored, told: set[tuple[str, int]]
    ) -> Iterator[Change]:
        ends = {"record": (old.edge.record, new.edge.record)}
        ends["wait"] = (old.edge.wait, new.edge.wait)
        for side, (was, now) in ends.items():
            if was is None and now is None:
                continue
            edge, facts = (old, self.events.old) if was else (new, self.events.new)
            what = edge_name(edge, facts)
            if was is None or now is None:
                gone = f"{side} on {(was or now).stream}"  # type: ignore[union-attr]
                yield self._entry(edge, facts, what, gone if was else None, gone if now else None)
            elif was.stream != now.stream:
                texts = (f"{side} on {was.stream}", f"{side} on {now.stream}")
                yield self._entry(edge, facts, what, *texts)
            elif (side, was.at) not in told:
                told.add((side, was.at))
                yield from self._moved(edge, side, was, now, with_items=True)

    def _moved(
        self, edge: Anchored, side: str, was: Marker, now: Marker, *, with_items: bool
    ) -> Iterator[Change]:
        crossed = self._crossed.get((was.stream, side, with_items))
        names, is_earlier = crossed.between(was, now) if crossed else ([], False)
        if not names:
            return
        names = list(dict.fromkeys(names))
        entry = self._entry(edge, self.events.old, f"{side} of {edge_name(edge, self.events.old)}")
        yield replace(
            entry,
            direction="earlier" if is_earlier else "later",
            across=tuple(names[:_SHOWN]),
            crossed=len(names),
        )

    def _entry(
        self,
        edge: Anchored,
        facts: Facts,
        what: str = "",
        was: str | None = None,
        now: str | None = None,
    ) -> Change:
        item = _first(facts, edge.before, edge.after)
        layer = None if item is None else item.place.layer
        return Change("event", (what or edge_name(edge, facts),), was, now, layer=layer)

    @staticmethod
    def _text(edge: Anchored) -> str:
        parts = []
        if edge.edge.record is not None:
            parts.append(f"record on {edge.edge.record.stream}")
        if edge.edge.wait is not None:
            parts.append(f"wait on {edge.edge.wait.stream}")
        return ", ".join(parts)


def edge_name(edge: Anchored, facts: Facts) -> str:
    """`D_m0.send@0 after A1_m0@0`: what waits for what."""
    before, after = (_first(facts, i) for i in (edge.before, edge.after))
    waits = "end" if before is None else before.short
    for_what = "begin" if after is None else after.short
    if edge.edge.record is None:
        return f"{waits} after nothing"
    return f"{waits} after {for_what}" if edge.edge.wait else f"nothing after {for_what}"


def _first(facts: Facts, *indices: int | None) -> Item | None:
    found = [facts.items[i] for i in indices if i is not None]
    return found[0] if found else None
