"""Compare two schedules, programs or graphs by what they do, not by their text.

Nodes are matched by structure, so that new names of nodes and new numbers of events are no
difference. What is reported: moved (with what was crossed), added, removed and changed items, and
changes of phases, streams, events and lifetimes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dbo_fx.inspect.changes import KINDS, Change
from dbo_fx.inspect.comparing import compare
from dbo_fx.inspect.facts import Facts
from dbo_fx.inspect.subjects import LAYERS, facts_of_both, read_subject

FORMAT = "dbo_fx diff 1"


@dataclass(frozen=True)
class GraphDiff:
    """The differences of two sides; true if there is one.

    Attributes:
        was: The old side.
        now: The new side.
        changes: The differences, by kind and then in order.
    """

    was: Facts
    now: Facts
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        """Whether there is a difference."""
        return bool(self.changes)

    @property
    def counts(self) -> dict[str, int]:
        """How many entries there are of each kind that occurs."""
        found = Counter(change.kind for change in self.changes)
        return {kind: found[kind] for kind in KINDS if found[kind]}

    @property
    def mirrored(self) -> GraphDiff:
        """The same differences seen from the other side."""
        return GraphDiff(self.now, self.was, tuple(change.mirrored for change in self.changes))

    def __str__(self) -> str:
        """Text: per layer its lanes and its differences, equal layers folded."""
        from dbo_fx.inspect.diff_text import diff_text

        return diff_text(self)

    def to_html(self) -> str:
        """One page that needs nothing else: per layer both sides next to each other."""
        from dbo_fx.inspect.diff_html import diff_html

        return diff_html(self)

    def to_json(self) -> dict[str, object]:
        """Plain values; `dbo_fx/schemas/diff.json` says which."""
        sides = {
            name: {"source": side.source, "kind": side.kind, "items": len(side.items)}
            for name, side in (("was", self.was), ("now", self.now))
        }
        changes = [change.to_json() for change in self.changes]
        return {"format": FORMAT, **sides, "equal": not self, "changes": changes}


def diff(was: object, now: object, *, layers: int = LAYERS) -> GraphDiff:
    """Compare two schedules, programs or graphs.

    Args:
        was: A `Program`, `Schedule`, `CapturedGraph`, `CompiledProgram`, pass `State` or
            `GraphModule`; or the text of a program or schedule, a schedule's name, or the path of a
            `.dbo` or graph file.
        now: The same. A schedule can be compared with a program, and either with what was compiled.
        layers: How many layers two schedules are unrolled over, where only one of them has labels.

    Returns:
        The differences; false if there are none.

    Raises:
        ScheduleError: a text is malformed, or a name unknown.
        GraphFileError: a graph file cannot be read.
        OptionError: the two cannot be compared.
    """
    old, new = facts_of_both(read_subject(was), read_subject(now), layers)
    return GraphDiff(old, new, compare(old, new))
