"""Stretches of time: where something runs, in order and apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dbo_fx.inspect.timeline_items import Item

Span = tuple[float, float]


def union(items: Iterable[Item]) -> list[Span]:
    """The stretches in which at least one item runs, in order and apart."""
    found: list[Span] = []
    for start, end in sorted((i.start_us, i.end_us) for i in items if i.duration_us > 0):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """What is left of stretches in order when others, in order, are taken out."""
    left: list[Span] = []
    for start, end in spans:
        for low, high in taken:
            if high <= start or low >= end:
                continue
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left


def inside(spans: Iterable[Span], window: Span) -> list[Span]:
    """What of stretches lies in a window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in cut if start < end]


def length(spans: Iterable[Span]) -> float:
    """How long stretches are together."""
    return sum(end - start for start, end in spans)
