"""A diff cut by layers for people, equal neighbouring layers folded into one block."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from dbo_fx.inspect.changes import Change
from dbo_fx.inspect.diff import GraphDiff
from dbo_fx.inspect.facts import Facts
from dbo_fx.ir import Action, Column, draw, lanes

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


def blocks(found: GraphDiff) -> list[Block]:
    """The blocks, those outside of layers first."""
    by_layer: defaultdict[int | None, list[Change]] = defaultdict(list)
    for change in found.changes:
        by_layer[change.layer].append(change)
    old, new = _lanes_by_layer(found.was), _lanes_by_layer(found.now)
    none = by_layer.pop(None, [])
    result = [_outside(none, old, new)] if none else []
    parts = [
        (n, old.get(n, ()), new.get(n, ()), [_line(c) for c in by_layer[n]])
        for n in sorted(layer for layer in by_layer if layer is not None)
    ]
    for _, group in groupby(enumerate(parts), key=lambda p: (p[1][0] - p[0], _relative(*p[1]))):
        result.append(_folded([part for _, part in group]))
    return result


def _outside(
    changes: list[Change], old: dict[int | None, Lanes], new: dict[int | None, Lanes]
) -> Block:
    lines = tuple(_alike(_line(change) for change in changes))
    is_steady = all(set(x) <= {None} for x in (old, new))
    title = "steady state" if is_steady and old else "outside layers"
    return Block(title, old.get(None, ()), new.get(None, ()), lines)


def _folded(parts: list[tuple[int, Lanes, Lanes, list[str]]]) -> Block:
    first, last = parts[0][0], parts[-1][0]
    if len(parts) == 1:
        return Block(f"layer {first}", parts[0][1], parts[0][2], tuple(parts[0][3]))
    was, now, lines = _relative(*parts[0])
    return Block(f"layers {first}-{last} (L)", was, now, lines)


def _relative(
    layer: int, was: Lanes, now: Lanes, lines: Iterable[str]
) -> tuple[Lanes, Lanes, Lanes]:
    """The same text with layers counted from this one, and without the names of nodes."""

    def rename(found: re.Match[str]) -> str:
        offset = int(found[1]) - layer
        return f"@L{offset:+d}" if offset else "@L"

    def general(text: str) -> str:
        return _MORE.sub("and more", _LAYER.sub(rename, text.partition("  [")[0]))

    one, other, rest = (tuple(general(t) for t in texts) for texts in (was, now, lines))
    return one, other, rest


def _line(change: Change) -> str:
    """The entry, and the node's name where that says more."""
    name = change.names[1] or change.names[0]
    known = not name or change.count > 1 or name in " ".join(change.what)
    return str(change) if known else f"{change}  [{name}]"


def _alike(lines: Iterable[str]) -> Iterator[str]:
    """Lines that differ in numbers only are one line."""
    for _, group in groupby(lines, key=lambda line: _NUMBER.sub("*", line.partition("  [")[0])):
        first, *others = group
        yield f"{first}  (and {len(others)} more like it)" if others else first


def _lanes_by_layer(facts: Facts) -> dict[int | None, Lanes]:
    """Per layer its two rows; nothing for graphs without microbatches."""
    actions = facts.actions
    if facts.kind == "graph" and any(a.microbatch is None for a in actions):
        return {}
    columns: defaultdict[int | None, list[Column]] = defaultdict(list)
    for column in lanes(actions):
        layers = [a.layer for a in column.comm or column.comp if a.layer is not None]
        columns[min(layers, default=None)].append(column)
    text = str if any(a.microbatch is None for a in actions) else Action.bound
    is_order = facts.kind == "schedule" and set(columns) == {None}
    return {
        layer: tuple(draw(found, str if is_order else text).splitlines())
        for layer, found in columns.items()
    }
