"""One entry of a diff, and how neighbouring entries become one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

KINDS = ("header", "moved", "added", "removed", "changed", "phase", "stream", "event", "lifetime")
_SHOWN = 8
_OPPOSITE = {"earlier": "later", "later": "earlier", "": ""}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        kind: One of `KINDS`.
        what: The items or nodes, an event, a storage; no names of nodes in it.
        was: How it was; None for what was not there.
        now: How it is; None for what is gone.
        direction: `earlier` or `later`: of something moved, an event or a lifetime.
        across: What it crossed, the first of it.
        crossed: How much it crossed.
        layer: The layer it belongs to, if one.
        names: The nodes' names on both sides, for looking them up in dumps.
        count: How many neighbouring items it stands for.
    """

    kind: str
    what: tuple[str, ...]
    was: str | None = None
    now: str | None = None
    direction: str = ""
    across: tuple[str, ...] = ()
    crossed: int = 0
    layer: int | None = None
    names: tuple[str, str] = ("", "")
    count: int = 1

    @property
    def mirrored(self) -> Change:
        """The same difference seen from the other side."""
        kind = {"added": "removed", "removed": "added"}.get(self.kind, self.kind)
        return replace(
            self,
            kind=kind,
            was=self.now,
            now=self.was,
            direction=_OPPOSITE[self.direction],
            names=self.names[::-1],
        )

    def to_json(self) -> dict[str, object]:
        """Plain values; see `dbo_fx/schemas/diff.json`."""
        return {
            "kind": self.kind,
            "what": list(self.what),
            "was": self.was,
            "now": self.now,
            "direction": self.direction or None,
            "across": list(self.across),
            "crossed": self.crossed,
            "layer": self.layer,
            "names": list(self.names),
            "count": self.count,
        }

    def __str__(self) -> str:
        """One line: `moved D_m0.recv@3 earlier, across MLP_m1@3 S_m1@3`."""
        count = f" ({self.count} items)" if self.count > len(self.what) else ""
        return f"{self.kind} {' '.join(self.what)}{count}{self._detail()}"

    def _detail(self) -> str:
        parts = []
        if self.direction:
            more = self.crossed - len(self.across)
            shown = " ".join(self.across) + (f" and {more} more" if more else "")
            parts.append(f" {self.direction}, across {shown}")
        if self.was is not None and self.now is not None:
            parts.append(f": {self.was} -> {self.now}")
        elif self.was is not None:
            parts.append(f": {self.was} removed")
        elif self.now is not None:
            parts.append(f": {self.now} added")
        return "".join(parts)


def joined(changes: Iterable[tuple[Change, int, int]]) -> Iterator[Change]:
    """Make one entry of neighbours that differ in the same way.

    Args:
        changes: Each with its position on the old and the new side; -1 where it is not.

    Yields:
        Entries with the first few items by name and the number of all.
    """
    group: list[Change] = []
    last = (-2, -2)
    for change, old, new in changes:
        follows = _after(last[0], old) and _after(last[1], new)
        if group and not (follows and _alike(group[0], change)):
            yield _one(group)
            group = []
        group.append(change)
        last = old, new
    if group:
        yield _one(group)


def _after(last: int, here: int) -> bool:
    return here == -1 == last or here == last + 1 != 0


def _alike(one: Change, other: Change) -> bool:
    fields = ("kind", "was", "now", "direction", "across", "crossed")
    same = all(getattr(one, f) == getattr(other, f) for f in fields)
    return same and (one.layer == other.layer or one.kind == "moved")


def _one(group: Sequence[Change]) -> Change:
    first = group[0]
    if len(group) == 1:
        return first
    what = tuple(dict.fromkeys(w for change in group for w in change.what))
    return replace(first, what=what[:_SHOWN], count=max(len(what), len(group)))
