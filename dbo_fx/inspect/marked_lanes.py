"""The two-lane picture of a layer with some of its actions underlined, for messages."""

from __future__ import annotations

import re
from collections.abc import Collection
from textwrap import indent

from dbo_fx.ir import Action, Column, Program, draw, lanes
from dbo_fx.show import by_layer, layer_title


def lanes_text(program: Program, layer: int | None = None) -> str:
    """The lanes of every layer, or of one, under the layer's name.

    Args:
        program: A bound program.
        layer: The layer; None for all, and the tail.
    """
    parts = [
        f"{title}\n{draw(columns, Action.bound)}\n"
        for title, columns in by_layer(program.actions)
        if layer is None or title == f"layer {layer}"
    ]
    return "\n".join(parts)


def marked_lanes(program: Program, layer: int | None, marked: Collection[Action]) -> str:
    """Draw what stands from a layer's first column, or a marked action, to the last.

    Args:
        program: A bound program.
        layer: The layer, None for the tail; drawn whole.
        marked: Actions to underline; communications as a whole.

    Returns:
        Indented lines; a line of `^` under each lane that has a marked action.
    """
    columns = lanes(program.actions)
    title = "tail" if layer is None else f"layer {layer}"
    chosen = [i for i, c in enumerate(columns) if layer_title(c) == title or _has(c, marked)]
    if not chosen:
        return ""
    lines = []
    for row in draw(columns[chosen[0] : chosen[-1] + 1], Action.bound).splitlines():
        lines.append(row)
        if underline := _underline(row, marked):
            lines.append(underline)
    return indent("\n".join(lines), "  ")


def _has(column: Column, marked: Collection[Action]) -> bool:
    return any(action in marked for action in (*column.comp, *column.comm))


def _underline(row: str, marked: Collection[Action]) -> str:
    below = [" "] * len(row)
    for action in marked:
        for match in re.finditer(rf"(?<!\S){re.escape(action.bound())}(?!\S)", row):
            below[match.start() : match.end()] = "^" * len(match[0])
    return "".join(below).rstrip()
