"""A diff cut by layers for people, equal neighbouring layers folded into one block."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dbo_fx.inspect.changes import Change
from dbo_fx.inspect.diff import GraphDiff
from dbo_fx.inspect.facts import Facts, action_text
from dbo_fx.ir import Column, draw, lanes

_LAYER = re.compile(r"@(\d+)")
_MORE = re.compile(r"and \d+ more")
_NUMBER = re.compile(r"\d+")
Lanes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Layers that differ in the same way.

    Attributes:
        title: `layer 3`, `layers 1-60 (L)`, `outside layers`.
        was: The lanes on the old side; empty if there is nothing to draw.
        now: The same on the new side.
        lines: One for each difference; its kind is the first word.
    """

    title: str
    was: Lanes
    now: Lanes
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer; None for what is outside of layers."""

    layer: int | None
    was: tuple[Column, ...]
    now: tuple[Column, ...]
    changes: tuple[Change, ...]

    def drawn(self, text: Callable[[str], str]) -> tuple[Lanes, Lanes, Lanes]:
        """Both sides' lanes and a line for each change, after a text function."""
        was, now = (_rows(columns, text) for columns in (self.was, self.now))
        return was, now, tuple(text(_line(change)) for change in self.changes)

    def relative(self) -> tuple[Lanes, Lanes, Lanes]:
        """The same with layers counted from this one, and without the names of nodes."""

        def rename(found: re.Match[str]) -> str:
            offset = int(found[1]) - (self.layer or 0)
            return f"@L{offset:+d}" if offset else "@L"

        return self.drawn(
            lambda text: _MORE.sub("and more", _LAYER.sub(rename, text.partition("  [")[0]))
        )


def blocks(found: GraphDiff) -> list[Block]:
    """The blocks, those outside of layers first."""
    by_layer: defaultdict[int | None, list[Change]] = defaultdict(list)
    for change in found.changes:
        by_layer[change.layer].append(change)
    old, new = _columns(found.was), _columns(found.now)
    order = sorted(by_layer, key=lambda layer: -1 if layer is None else layer)
    parts = [_Part(n, old.get(n, ()), new.get(n, ()), tuple(by_layer[n])) for n in order]
    is_steady = bool(old) and set(old) | set(new) == {None}
    result = [_outside(part, is_steady) for part in parts if part.layer is None]
    layers = enumerate(part for part in parts if part.layer is not None)
    for _, group in groupby(layers, key=lambda p: ((p[1].layer or 0) - p[0], p[1].relative())):
        result.append(_folded([part for _, part in group]))
    return result


def _outside(part: _Part, is_steady: bool) -> Block:
    was, now, lines = part.drawn(str)
    return Block("steady state" if is_steady else "outside layers", was, now, tuple(_alike(lines)))


def _folded(parts: Sequence[_Part]) -> Block:
    first, last = parts[0].layer, parts[-1].layer
    if len(parts) == 1:
        return Block(f"layer {first}", *parts[0].drawn(str))
    return Block(f"layers {first}-{last} (L)", *parts[0].relative())


def _line(change: Change) -> str:
    """The entry, and the node's name where that says more."""
    name = change.names[1] or change.names[0]
    known = not name or change.count > 1 or name in " ".join(change.what)
    return str(change) if known else f"{change}  [{name}]"


def _alike(lines: Iterable[str]) -> Iterator[str]:
    """Lines that differ in numbers only are one line."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(_NUMBER.sub("*", line.partition("  [")[0]), []).append(line)
    for first, *others in groups.values():
        yield f"{first}  (and {len(others)} more like it)" if others else first


def _rows(columns: Sequence[Column], text: Callable[[str], str]) -> Lanes:
    if not columns:
        return ()
    return tuple(draw(columns, lambda action: text(action_text(action))).splitlines())


def _columns(facts: Facts) -> dict[int | None, tuple[Column, ...]]:
    """The lanes by layer; nothing for graphs without microbatches."""
    actions = facts.actions
    if facts.kind == "graph" and any(a.microbatch is None for a in actions):
        return {}
    found: defaultdict[int | None, list[Column]] = defaultdict(list)
    for column in lanes(actions):
        layers = [a.layer for a in column.comm or column.comp if a.layer is not None]
        found[min(layers, default=None)].append(column)
    return {layer: tuple(columns) for layer, columns in found.items()}
