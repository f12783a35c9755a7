"""Compare two sides whose items are matched: what moved, and what else differs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dbo_fx.inspect.changes import KINDS, Change, joined
from dbo_fx.inspect.events import EventChanges, Events
from dbo_fx.inspect.facts import CONSTANT, RUN, Facts, Item, Life
from dbo_fx.inspect.matching import Matching, match
from dbo_fx.inspect.order import Crossing, Stable, heaviest_increasing

_SHOWN = 8
# The fewest items move; then the fewest that only hold something; then the fewest markers.
_MARKER, _LIGHT, _ITEM = 1, 1 << 20, 1 << 40
Placed = tuple[Change, int, int]
Kept = tuple[int, int, str]


def compare(old: Facts, new: Facts) -> tuple[Change, ...]:
    """All differences, by kind and then in order.

    From which side one looks decides nothing: `compare(new, old)` gives the same, mirrored.
    """
    if _text(new) < _text(old):
        return tuple(change.mirrored for change in _Comparison(new, old).all())
    return _Comparison(old, new).all()


def _text(facts: Facts) -> str:
    return repr((facts.items, facts.edges, facts.lives, sorted(facts.header.items())))


@dataclass
class _Comparison:
    old: Facts
    new: Facts
    matching: Matching = field(init=False)
    stable: Stable = field(init=False)
    kept: list[Item] = field(init=False)
    runs: list[int] = field(init=False)
    markers: defaultdict[tuple[str, str], list[Kept]] = field(
        default_factory=lambda: defaultdict(list)
    )
    differing: set[int] = field(default_factory=set)

    def all(self) -> tuple[Change, ...]:
        self.matching = match(self.old, self.new)
        events = Events(self.old, self.new, self.matching)
        pairs = self._keep_order(events)
        settled = {n for _, n in pairs}
        placed = [*self._moved(pairs), *self._alone(), *self._changed()]
        order = {kind: n for n, kind in enumerate(KINDS)}
        placed.sort(key=lambda p: order[p[0].kind])  # Stable: the order within a kind remains.
        rest = [
            *EventChanges(events, self._by_stream(pairs), self.markers, settled).all(),
            *self._lifetimes(),
        ]
        return (*self._header(), *joined(placed), *rest)

    def _header(self) -> Iterator[Change]:
        for key in sorted({*self.old.header, *self.new.header}):
            was, now = self.old.header.get(key), self.new.header.get(key)
            if was != now:
                yield Change("header", (key,), was, now)

    def _keep_order(self, events: Events) -> list[tuple[int, int]]:
        """Fill `stable`; the pairs of items in it are returned."""
        elements = [
            (self.old.items[o].at, self.new.items[n].at, _weight(self.old.items[o]), o)
            for o, n in self.matching.pairs
            if self.old.items[o].what != CONSTANT
        ]
        markers = events.markers()
        elements += [(was.at, now.at, _MARKER, -1) for was, now, _ in markers.values()]
        elements.sort()
        chosen = heaviest_increasing([e[1] for e in elements], [e[2] for e in elements])
        indices = [elements[i][3] for i in sorted(chosen)]
        places = {elements[i][0] for i in chosen}
        for (side, at), (was, now, name) in sorted(markers.items(), key=lambda m: m[0][1]):
            if at in places and was.stream == now.stream:
                self.markers[was.stream, side].append((at, now.at, name))
        pairs = [(o, self.matching.now[o]) for o in indices if o >= 0]
        self.stable = self._positions(pairs)
        self.kept = [self.old.items[o] for o, _ in pairs]
        names = [item.short for item in self.kept]
        self.runs = [i for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
        return pairs

    def _positions(self, pairs: Iterable[tuple[int, int]]) -> Stable:
        both = [(self.old.items[o].at, self.new.items[n].at) for o, n in pairs]
        return Stable([was for was, _ in both], [now for _, now in both])

    def _by_stream(self, pairs: Iterable[tuple[int, int]]) -> dict[str, list[Kept]]:
        """Positions and names of what keeps its order, for each stream."""
        found: defaultdict[str, list[Kept]] = defaultdict(list)
        for o, n in pairs:
            item, other = self.old.items[o], self.new.items[n]
            if item.stream is not None and item.stream == other.stream:
                found[item.stream].append((item.at, other.at, item.short))
        return found

    def _crossed(self, crossing: Crossing) -> tuple[tuple[str, ...], int]:
        """Names of what was crossed, neighbours of one name once, and how many there are."""
        first = bisect_right(self.runs, crossing.low) - 1
        last = bisect_left(self.runs, crossing.high)
        shown = (self.kept[self.runs[i]].short for i in range(first, min(last, first + _SHOWN)))
        return tuple(shown), last - first

    def _moved(self, stable: Sequence[tuple[int, int]]) -> Iterator[Placed]:
        in_order = {o for o, _ in stable}
        for o, n in self.matching.pairs:
            item = self.old.items[o]
            if o in in_order or item.what == CONSTANT:
                continue
            crossing = self.stable.crossing(item.at, self.new.items[n].at)
            across, count = self._crossed(crossing)
            direction = "earlier" if crossing.is_earlier else "later"
            change = _change("moved", _short(item), item, self.new.items[n])
            yield replace(change, direction=direction, across=across, crossed=count), o, n

    def _alone(self) -> Iterator[Placed]:
        for o, n in enumerate(self.matching.now):
            if n < 0:
                item = self.old.items[o]
                yield _change("removed", item.label, item, None), o, -1
        for n, o in enumerate(self.matching.was):
            if o < 0:
                item = self.new.items[n]
                yield _change("added", item.label, None, item), -1, n

    def _changed(self) -> Iterator[Placed]:
        for o, n in self.matching.pairs:
            item, other = self.old.items[o], self.new.items[n]
            was, now = self._attributes(o, n)
            if was or now:
                self.differing.add(o)
                label = item.label if item.what == other.what else _where(item)
                yield _change("changed", label, item, other, ", ".join(was), ", ".join(now)), o, n
            elif item.value != other.value:
                if not self.differing.intersection(item.inputs):
                    yield _change("changed", item.label, item, other, item.value, other.value), o, n
                self.differing.add(o)
            if item.place != other.place:
                texts = [str(p) or "no phase" for p in (item.place, other.place)]
                if texts[0] == texts[1]:
                    texts = [p.role or "no role" for p in (item.place, other.place)]
                what = item.what if item.place.phase else item.label
                yield _change("phase", what, item, other, texts[0], texts[1]), o, n
            if item.stream != other.stream:
                label = _short(item)
                yield _change("stream", label, item, other, item.stream, other.stream), o, n

    def _attributes(self, o: int, n: int) -> tuple[list[str], list[str]]:
        """What is called with what, as far as it differs."""
        item, other = self.old.items[o], self.new.items[n]
        was, now = [], []
        if item.what != other.what or item.args != other.args:
            was.append(_call(item))
            now.append(_call(other))
            if item.what != other.what and len(item.inputs) != len(other.inputs):
                return was, now
        for slot, (one, two) in enumerate(zip(item.inputs, other.inputs, strict=False)):
            if self.matching.now[one] != two:
                was.append(f"input {slot}: {self.old.items[one].label}")
                now.append(f"input {slot}: {self.new.items[two].label}")
        return was, now

    def _lifetimes(self) -> Iterator[Change]:
        for old, new in self._same_lives():
            if old.last is None or new.last is None:
                if old.last != new.last:
                    yield self._life(old, self._end(old, self.old), self._end(new, self.new))
                continue
            if self.matching.now[old.last] == new.last:
                continue
            was, now = self.old.items[old.last].at, self.new.items[new.last].at
            crossing = self.stable.crossing(was + 0.5, now + 0.5)
            if crossing.is_empty:
                continue
            across, count = self._crossed(crossing)
            yield Change(
                "lifetime",
                (old.name,),
                self._end(old, self.old),
                self._end(new, self.new),
                "earlier" if crossing.is_earlier else "later",
                across,
                count,
                self.old.items[old.last].place.layer,
            )

    def _same_lives(self) -> Iterator[tuple[Life, Life]]:
        waiting = {(life.born, life.key): life for life in self.new.lives}
        for life in self.old.lives:
            born = None if life.born is None else self.matching.now[life.born]
            other = waiting.get((born, life.key))
            if other is not None:
                yield life, other

    def _life(self, life: Life, was: str, now: str) -> Change:
        layer = None if life.born is None else self.old.items[life.born].place.layer
        return Change("lifetime", (life.name,), was, now, layer=layer)

    @staticmethod
    def _end(life: Life, facts: Facts) -> str:
        return "returned" if life.last is None else f"until {facts.items[life.last].label}"


def _weight(item: Item) -> int:
    if item.is_light:
        return _LIGHT
    return _ITEM + (0 if item.place.half else _LIGHT >> 1)


def _change(
    kind: str,
    what: str,
    old: Item | None,
    new: Item | None,
    was: str | None = None,
    now: str | None = None,
) -> Change:
    item = new if old is None else old
    assert item is not None
    names = "" if old is None else old.name, "" if new is None else new.name
    return Change(kind, (what,), was, now, layer=item.place.layer, names=names)


def _short(item: Item) -> str:
    """The action that a node belongs to; without one, the node."""
    return item.short if item.place.phase else item.label


def _where(item: Item) -> str:
    return (str(item.place) if item.place.phase else item.path) or "call"


def _call(item: Item) -> str:
    if item.what == RUN:
        return item.args or "no slot"
    return f"{item.what}({item.args})"
