"""Which of the matched items moved: all that are not in the heaviest increasing subsequence.

So the fewest items count as moved. Weights decide between equals: a communication moves rather than
compute, and what only marks or holds something moves rather than either. Time grows as n log n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


def heaviest_increasing(values: Sequence[int], weights: Sequence[int]) -> set[int]:
    """Indices of a strictly increasing subsequence of the greatest weight.

    Args:
        values: All different.
        weights: Above zero, one for each value.
    """
    rank = {value: n + 1 for n, value in enumerate(sorted(values))}
    tree: list[tuple[int, int]] = [(0, -1)] * (len(values) + 1)  # A Fenwick tree of maxima.
    before: list[int] = []
    for index, (value, weight) in enumerate(zip(values, weights, strict=True)):
        at = rank[value]
        found = _most(tree, at - 1)
        before.append(found[1])
        while at < len(tree):
            tree[at] = max(tree[at], (found[0] + weight, index))
            at += at & -at
    last = _most(tree, len(values))[1]
    chosen: set[int] = set()
    while last != -1:
        chosen.add(last)
        last = before[last]
    return chosen


def _most(tree: Sequence[tuple[int, int]], at: int) -> tuple[int, int]:
    """The greatest entry up to a position."""
    found = (0, -1)
    while at > 0:
        found = max(found, tree[at])
        at -= at & -at
    return found


@dataclass(frozen=True, slots=True)
class Crossing:
    """What something moved across: stable items `low` up to, not including, `high`."""

    low: int
    high: int
    is_earlier: bool

    @property
    def is_empty(self) -> bool:
        """Whether nothing was crossed."""
        return self.low >= self.high


@dataclass(frozen=True)
class Stable:
    """The items that keep their order, by their positions on both sides, ascending."""

    was: Sequence[int]
    now: Sequence[int]

    def crossing(self, was: float, now: float) -> Crossing:
        """What lies between two positions.

        Args:
            was: A position on the old side; of no stable item.
            now: The same on the new side.
        """
        old, new = bisect_left(self.was, was), bisect_left(self.now, now)
        return Crossing(min(old, new), max(old, new), new < old)
