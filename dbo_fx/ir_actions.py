"""Actions, the items of every schedule and program, and the two-lane picture of a list of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dbo_fx.errors import ScheduleError

COMP, COMM = "comp", "comm"

_NUMBER = "0|[1-9][0-9]{0,8}"
_ACTION = re.compile(
    rf"(?P<phase>[^\W_]+)_(?P<microbatch>\w+)(?:\.(?P<half>\w+))?(?:@(?P<layer>{_NUMBER}))?"
)


class Phase(Enum):
    """One part of an MoE layer; the value is the letter that texts use."""

    A0 = "A0"
    A1 = "A1"
    D = "D"
    MLP = "MLP"
    C = "C"
    S = "S"
    TAIL = "TAIL"

    @property
    def is_communication(self) -> bool:
        """Whether this phase is carried by a transport: dispatch or combine."""
        return self in (Phase.D, Phase.C)


class Half(Enum):
    """The two halves of a communication: `send` launches, `recv` makes the result usable."""

    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, slots=True)
class Action:
    """One phase of one microbatch, in one layer once the schedule is unrolled.

    Args:
        phase: The part of the layer.
        microbatch: A label in schedules, an index (0 holds the earlier tokens) in programs. None
            stands for each microbatch in turn and prints as `i`.
        half: Which half of a communication; None names the communication as a whole.
        layer: The MoE layer, counted from 0; None in a steady state. TAIL never has one.

    Raises:
        ScheduleError: The parts do not go together.
    """

    phase: Phase
    microbatch: int | None
    half: Half | None = None
    layer: int | None = None

    def __post_init__(self) -> None:
        """Refuse parts that do not go together, so that every action prints and parses back."""
        if self.half is not None and not self.phase.is_communication:
            raise ScheduleError(f"{self}: only D and C have halves, {self.phase.value} does not")
        if self.layer is not None and self.phase is Phase.TAIL:
            raise ScheduleError(f"{self}: TAIL follows the last layer; write it without @layer")
        if (self.microbatch or 0) < 0 or (self.layer or 0) < 0:
            raise ScheduleError(f"{self}: microbatches and layers count from 0")

    def __str__(self) -> str:
        """The schedule form: `D_1.send`, `A0_0@3`, `A0_i`, `TAIL_1`."""
        return self._text("i" if self.microbatch is None else str(self.microbatch))

    def bound(self) -> str:
        """The bound form, which names a microbatch index: `D_m0.send@3`, `TAIL_m1`."""
        if self.microbatch is None:
            raise ScheduleError(f"{self}: stands for every microbatch; bind the schedule first")
        return self._text(f"m{self.microbatch}")

    def _text(self, microbatch: str) -> str:
        half = "" if self.half is None else f".{self.half.value}"
        layer = "" if self.layer is None else f"@{self.layer}"
        return f"{self.phase.value}_{microbatch}{half}{layer}"

    @property
    def lane(self) -> str:
        """The row of the picture it is drawn in: `comp` or `comm` (not a stream)."""
        return COMM if self.phase.is_communication else COMP

    @property
    def communication(self) -> Action:
        """The communication of which this is a half."""
        return replace(self, half=None)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the schedule form, `D_1.send` or `A0_i@3`.

        Raises:
            ScheduleError: The text is not an action in this form.
        """
        return _parse_action(text, rf"(?P<index>{_NUMBER})|i", "D_1.send or A0_0@3")

    @classmethod
    def parse_bound(cls, text: str) -> Action:
        """Read the bound form, `D_m0.send@3`.

        Raises:
            ScheduleError: The text is not an action in this form.
        """
        return _parse_action(text, rf"m(?P<index>{_NUMBER})", "D_m0.send@3")


def _parse_action(text: str, microbatch_form: str, example: str) -> Action:
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ScheduleError(f"{text!r} is not an action; write it like {example}")
    phases = [phase.value for phase in Phase]
    if found["phase"] not in phases:
        raise ScheduleError(
            f"{text!r}: unknown phase {found['phase']!r}; wanted one of {' '.join(phases)}"
        )
    microbatch = re.fullmatch(microbatch_form, found["microbatch"])
    if microbatch is None:
        raise ScheduleError(
            f"{text!r}: {found['microbatch']!r} is no microbatch here; write it like {example}"
        )
    if found["half"] not in (None, "send", "recv"):
        raise ScheduleError(f"{text!r}: unknown half {found['half']!r}; wanted send or recv")
    return Action(
        Phase(found["phase"]),
        None if microbatch["index"] is None else int(microbatch["index"]),
        None if found["half"] is None else Half(found["half"]),
        None if found["layer"] is None else int(found["layer"]),
    )


@dataclass(frozen=True, slots=True)
class Column:
    """What computes (`comp`) while the same communications (`comm`, whole) are in flight."""

    comp: tuple[Action, ...]
    comm: tuple[Action, ...]


def lanes(actions: Iterable[Action]) -> tuple[Column, ...]:
    """Cut a list of actions into the columns of the two-lane picture.

    A column spans the time in which the set of communications in flight stays the same. Columns
    without compute are left out, unless a communication would then appear in none.

    Args:
        actions: Actions of a period, an unrolled or a bound program, in order.

    Returns:
        The columns, left to right.
    """
    columns: list[Column] = []
    comp: list[Action] = []
    in_flight: list[Action] = []
    shown: set[Action] = set()

    def close(ending: Sequence[Action]) -> None:
        if comp or not shown.issuperset(ending):
            columns.append(Column(tuple(comp), tuple(in_flight)))
            shown.update(in_flight)
            comp.clear()

    for action in actions:
        if not action.phase.is_communication:
            comp.append(action)
        elif action.half is Half.SEND:
            close(())
            in_flight.append(action.communication)
            shown.discard(action.communication)
        elif action.communication in in_flight:
            close((action.communication,))
            in_flight.remove(action.communication)
    close(in_flight)
    return tuple(columns)


def draw(columns: Sequence[Column], text: Callable[[Action], str] = str) -> str:
    """Draw columns as a `comp` row over a `comm` row, with aligned `|` between the cells.

    Args:
        columns: What `lanes` returned.
        text: How to print an action: `str`, or `Action.bound` for programs.

    Returns:
        Two lines without trailing spaces.
    """
    cells = [
        (" ".join(map(text, column.comp)), " ".join(map(text, column.comm))) for column in columns
    ]
    widths = [max(map(len, pair)) for pair in cells]
    rows = [
        " | ".join(pair[row].ljust(width) for pair, width in zip(cells, widths, strict=True))
        for row in (0, 1)
    ]
    return "\n".join(
        f"{lane}  {row}".rstrip() for lane, row in zip((COMP, COMM), rows, strict=True)
    )


def mark(
    before: Iterable[Action], here: str, lane: str, text: Callable[[Action], str] = str
) -> str:
    """Draw for an error message what ran before a step, and the step itself with `<-- here`.

    Args:
        before: The actions before the step.
        here: The step as text.
        lane: The row of the step, `comp` or `comm`.
        text: How to print an action.

    Returns:
        Two indented lines.
    """
    rows: dict[str, list[str]] = {COMP: [COMP, ""], COMM: [COMM, ""]}
    for action in before:
        rows[action.lane].append(text(action))
    rows[lane] += [here, "  <-- here"]
    return "\n".join("  " + " ".join(row).rstrip() for row in rows.values())
