"""The shortest proof that a program is wrong: two accesses, the missing order, lanes, the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dbo_fx.certificates.execution import Execution, Kind, Operation
from dbo_fx.certificates.of_program import ProgramExecution
from dbo_fx.certificates.violation import Violation, label
from dbo_fx.ir import COMM, COMP

_SHOWN = 8
_CONTEXT = 3


@dataclass(frozen=True, slots=True)
class Place:
    """One of the two accesses.

    Attributes:
        name: The operation.
        stream: Where it runs.
        operation: Its index in host order.
        access: What it does with the storage: `reads`, `writes`, `frees`, ...; or nothing.
        step: The program's step, counted from 1; None for graphs and for begin and end.
        line: The step's line, where the program was read from a text.
    """

    name: str
    stream: str
    operation: int
    access: str = ""
    step: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        """`A1_m0@0 on comp (step 2) writes`."""
        where = f" ({self.where})" if self.where else ""
        return f"{self.name} on {self.stream}{where} {self.access}".rstrip()

    @property
    def where(self) -> str:
        """`line 7` of a text that was read, else `step 2`."""
        if self.line is not None:
            return f"line {self.line}"
        return "" if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class Counterexample:
    """What a refusal shows.

    Attributes:
        rule: The broken rule, one of `violation.RULES` or one of another certificate.
        source: What was checked.
        first: The access that should be complete; None if only one takes part.
        second: The access that cannot run where it stands.
        storage: What both touch.
        missing: The order or partner that is missing.
        fix: The edge or move that would help.
        picture: What runs around them, on two lanes, in host order.
    """

    rule: str
    source: str
    first: Place | None
    second: Place | None
    storage: str | None
    missing: str
    fix: str
    picture: str

    def __str__(self) -> str:
        """The refusal, for a terminal."""
        place = self.second or self.first
        where = f", {place.where}" if place is not None and place.where else ""
        if where and place is not None and place.line is None:
            where += " (counted from 1)"
        lines = [f"{self.source}{where}: {self.missing}"]
        if self.picture:
            lines.append(self.picture)
        lines += [f"  {text}" for text in self._accesses()]
        lines.append(f"  rule {self.rule}; fix: {self.fix}")
        return "\n".join(lines)

    def _accesses(self) -> list[str]:
        found = [p for p in (self.first, self.second) if p is not None and p.access]
        return [f"{place} {self.storage}" for place in found]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "picture": self.picture.splitlines()}


def shortest(execution: Execution, found: Iterable[Violation]) -> Counterexample | None:
    """Pick the violation that is easiest to follow.

    Args:
        execution: What was checked.
        found: Its violations.

    Returns:
        The one with the fewest operations between its two accesses, the earliest of them if there
        are several; None if there is none.
    """
    chosen = min(found, key=_length, default=None)
    return None if chosen is None else counterexample(execution, chosen)


def counterexample(execution: Execution, violation: Violation) -> Counterexample:
    """Put a violation in words and pictures."""
    storage = violation.storage
    return Counterexample(
        violation.rule,
        execution.source,
        _place(execution, violation.first, violation),
        _place(execution, violation.second, violation),
        None if storage is None else execution.label(storage),
        violation.missing,
        violation.fix,
        picture(execution, violation.first, violation.second),
    )


def _length(violation: Violation) -> tuple[int, int]:
    places = [p for p in (violation.first, violation.second) if p is not None]
    return max(places, default=0) - min(places, default=0), max(places, default=0)


def _place(execution: Execution, index: int | None, violation: Violation) -> Place | None:
    if index is None:
        return None
    operation = execution.operations[index]
    step, line = None, None
    if isinstance(execution, ProgramExecution):
        step = execution.steps[index]
        line = execution.lines[step - 1] if step is not None and execution.lines else None
    verb = _verb(operation, violation)
    return Place(label(operation), operation.stream, index, verb, step, line)


def _verb(operation: Operation, violation: Violation) -> str:
    storage = violation.storage
    if storage is None:
        return ""
    if operation.kind in (Kind.ALLOCATE, Kind.FREE):
        return f"{operation.kind.value}s"
    does = [
        word
        for word, touched in (("reads", operation.reads), ("writes", operation.writes))
        if storage in touched
    ]
    return " and ".join(does)


def picture(execution: Execution, first: int | None, second: int | None) -> str:
    """Draw what the host enqueues around two operations, on the lanes of its actions.

    Args:
        execution: What is drawn.
        first: One operation; shown in brackets.
        second: The other; the later one of the two is marked and ends the picture.

    Returns:
        Two indented lines of about eight items, each under the other row's gap; empty if there is
        nothing to mark.
    """
    marked = sorted({i for i in (first, second) if i is not None})
    if not marked:
        return ""
    items = [(i, text) for i, text in _items(execution, marked) if i <= marked[-1]]
    at = [n for n, (i, _) in enumerate(items) if i in marked]
    shown = _excerpt(at, len(items))
    cells: list[tuple[str, str]] = []
    previous = -1
    for n in shown:
        index, text = items[n]
        if n != previous + 1:
            cells.append(("...", "..."))
        if index == marked[0] and len(marked) > 1:
            text = f"[{text}]"
        elif index == marked[-1]:
            text = f"{text}   <-- here"
        on_comp = _lane(execution.operations[index]) == COMP
        cells.append((text, "") if on_comp else ("", text))
        previous = n
    widths = [max(map(len, pair)) for pair in cells]
    rows = [
        f"  {lane}  " + " ".join(p[n].ljust(w) for p, w in zip(cells, widths, strict=True))
        for n, lane in enumerate((COMP, COMM))
    ]
    return "\n".join(row.rstrip() for row in rows)


def _lane(operation: Operation) -> str:
    """An action's lane; for what has none the stream, where every other stream is drawn as comm."""
    if operation.action is not None:
        return operation.action.lane
    return COMP if operation.stream == COMP else COMM


def _items(execution: Execution, marked: Sequence[int]) -> list[tuple[int, str]]:
    """Actions, several operations of one in a row taken together; and what is marked anyway."""
    items: list[tuple[int, str]] = []
    last = None
    for index, operation in enumerate(execution.operations):
        action = operation.action
        text = operation.name
        if action is not None and action.microbatch is not None:
            text = action.bound()
        if index in marked:
            if items and items[-1][1] == text and items[-1][0] not in marked:
                items.pop()
            items.append((index, text))
        elif action is not None and action != last:
            items.append((index, text))
        last = action if action is not None else last
    return items


def _excerpt(at: Sequence[int], count: int) -> list[int]:
    """All from a little before the first mark to the last one, or both ends of it."""
    start = max(0, at[0] - _CONTEXT)
    if count - start <= _SHOWN:
        return list(range(start, count))
    head = range(start, at[0] + _CONTEXT)
    return [*head, *range(max(head.stop, count - (_SHOWN - len(head))), count)]
