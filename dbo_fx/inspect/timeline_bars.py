"""The bars of a timeline page: colours, labels, and what hovering over them shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dbo_fx.certificates.memory_report import readable
from dbo_fx.inspect.timeline import Timeline
from dbo_fx.inspect.timeline_items import Inside, Item

# Okabe and Ito's colours, told apart by people with any kind of colour vision.
_HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_GREY = "#6b7280"
# Phases of one microbatch differ in lightness: white (positive) or black mixed in.
_SHADES = {
    "A0": 0.30, "A1": 0.15, "D": 0.0, "MLP": -0.22, "C": 0.42, "S": 0.58, "TAIL": 0.70,
}  # fmt: skip
HALF_BAR = 0.36
_ROWS_IN_HOVER = 14


def bar_traces(timeline: Timeline, lane: Mapping[str, int]) -> Iterable[dict[str, Any]]:
    """One trace of bars for each microbatch, and one for what belongs to none.

    Args:
        timeline: What to draw.
        lane: The height of each lane's middle.
    """
    known = {item.microbatch for item in timeline.items}
    for microbatch in sorted(known, key=lambda m: (m is None, m)):
        mine = [(n, i) for n, i in enumerate(timeline.items) if i.microbatch == microbatch]
        yield _bar_trace(microbatch, mine, lane, timeline.unit)


def _bar_trace(
    microbatch: int | None, items: Sequence[tuple[int, Item]], lane: Mapping[str, int], unit: str
) -> dict[str, Any]:
    hue = _GREY if microbatch is None else _HUES[microbatch % len(_HUES)]
    shades = [_shade(hue, _SHADES.get(item.phase, 0.0)) for _, item in items]
    return {
        "type": "bar",
        "orientation": "h",
        "name": "merge" if microbatch is None else f"microbatch {microbatch}",
        "base": [i.start_us for _, i in items],
        "x": [i.duration_us for _, i in items],
        "y": [lane[i.stream] for _, i in items],
        "width": [2 * HALF_BAR] * len(items),
        "marker": {"color": shades, "line": {"color": hue, "width": 1}},
        "text": [""] * len(items),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "insidetextfont": {"size": 12, "color": [_ink(s) for s in shades]},
        "customdata": [n for n, _ in items],
        "hovertext": [hover_text(i, unit) for _, i in items],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverlabel": {"bordercolor": hue},
        "meta": {"role": "bars", "labels": [_labels(i) for _, i in items]},
    }


def hover_text(item: Item, unit: str) -> str:
    """What hovering over an item shows, with `<br>` between lines.

    Args:
        item: The item.
        unit: Of its times.
    """
    word = "measured" if item.is_measured else "predicted" if unit == "us" else "order only"
    span = f"{item.start_us:,.6g} to {item.end_us:,.6g} {unit}"
    lines = [
        f"<b>{escape(item.name)}</b>  on {item.stream}",
        f"{span}  ({item.duration_us:,.6g} {unit}, {word})",
    ]
    if item.bytes is not None:
        word = "carries" if item.action and item.action.half else "writes"
        lines.append(f"{len(item.nodes)} nodes, {word} {readable(item.bytes)}")
    rows = [node_row(node) for node in item.nodes[:_ROWS_IN_HOVER]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        escape("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]
    if more := len(item.nodes) - _ROWS_IN_HOVER:
        lines += [f"... {more} more: click for all of them"] if more > 0 else []
    return "<br>".join(lines)


def node_row(node: Inside) -> tuple[str, str, str, str]:
    """A node as cells: name, op, shapes, bytes."""
    return node.name, node.op, node.shape, "" if node.bytes is None else readable(node.bytes)


def _labels(item: Item) -> list[str]:
    """An item's labels, the longest first: `A0_m0@3`, `A0`."""
    return [item.name, item.phase] if item.duration_us else []


def _shade(colour: str, amount: float) -> str:
    """Mix white (positive) or black (negative) into a colour."""
    towards = 255 if amount > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    mixed = (round(part + (towards - part) * abs(amount)) for part in parts)
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111827" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
