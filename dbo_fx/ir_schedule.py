"""Schedules: the steady state of one layer as an order of actions, its checks and its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dbo_fx.errors import ScheduleError
from dbo_fx.ir_actions import COMM, COMP, Action, Column, Half, Phase, draw, lanes, mark

Slot = tuple[Phase, Half | None]

# The data flow of one microbatch through one layer. S hangs beside it: after A1, before the join
# that opens the next layer's A0.
CHAIN: tuple[Slot, ...] = (
    (Phase.A0, None),
    (Phase.A1, None),
    (Phase.D, Half.SEND),
    (Phase.D, Half.RECV),
    (Phase.MLP, None),
    (Phase.C, Half.SEND),
    (Phase.C, Half.RECV),
)
_SHARED: Slot = (Phase.S, None)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def is_name(text: str) -> bool:
    """Whether a text can name a schedule or a transport: one word without spaces or `#`."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steady state of a layer: an order of actions that repeats once a layer.

    Args:
        name: The schedule's name.
        order: Every action of a layer once for each label, without layers; or once for the label
            `i` (microbatch None), which runs the microbatches one after the other.
        lead: The label that becomes microbatch 0; None in the `i` form.

    Raises:
        ScheduleError: The order is incomplete or breaks a dependency; the message marks the step.
    """

    name: str
    order: tuple[Action, ...]
    lead: int | None

    def __post_init__(self) -> None:
        """Check the order; an invalid schedule does not exist."""
        if not is_name(self.name):
            raise ScheduleError(f"{self.name!r} cannot name a schedule; use letters, digits, _ . -")
        _check_steps(self)
        _check_lead(self)
        for label in _labels(self.order):
            _check_label(self, label)

    @property
    def labels(self) -> tuple[int, ...]:
        """The microbatch labels in ascending order; empty in the `i` form."""
        return tuple(label for label in _labels(self.order) if label is not None)

    @property
    def num_microbatches(self) -> int | None:
        """How many microbatches it schedules; None if any number (the `i` form)."""
        return len(self.labels) or None

    def __str__(self) -> str:
        """The text of the schedule; `parse_schedule` reads it back."""
        lead = [] if self.lead is None else [f"lead {self.lead}"]
        order = f"order {' '.join(map(str, self.order))}"
        rows = ["schedule 1", f"name {self.name}", *lead, draw(lanes(self.order)), order]
        return "\n".join(rows) + "\n"


def _labels(order: Sequence[Action]) -> list[int | None]:
    """The labels in ascending order; `_check_steps` has refused `i` beside numbers."""
    return sorted({action.microbatch for action in order}, key=lambda label: label or 0)


def _error(schedule: Schedule, step: int, reason: str, needs: str) -> ScheduleError:
    action = schedule.order[step]
    return ScheduleError(
        f"{schedule.name}, step {step + 1} (counted from 1): {reason}\n"
        f"{mark(schedule.order[:step], str(action), action.lane)}\n"
        f"  {needs} See the lanes: dbo-fx show mlp_shared_overlap"
    )


def _check_steps(schedule: Schedule) -> None:
    """Each step alone, and against those before it: form, label kind, seen before."""
    if not schedule.order:
        raise ScheduleError(f"{schedule.name}: the order is empty; write the steps of one layer")
    seen: set[Action] = set()
    for step, action in enumerate(schedule.order):
        if action.phase is Phase.TAIL or action.layer is not None:
            reason = f"{action} does not belong in a steady state"
            raise _error(schedule, step, reason, "Layers and TAIL come from unrolling.")
        if action.phase.is_communication and action.half is None:
            reason = f"{action} has no half"
            raise _error(schedule, step, reason, f"Write {action}.send or {action}.recv.")
        if (action.microbatch is None) != (schedule.order[0].microbatch is None):
            reason = f"{action} mixes the label i with numbered labels"
            raise _error(schedule, step, reason, "Use i alone, or numbers only.")
        if action in seen:
            raise _error(schedule, step, f"{action} runs twice", "Every action runs once a layer.")
        seen.add(action)


def _check_lead(schedule: Schedule) -> None:
    labels = schedule.labels
    if labels and schedule.lead not in labels:
        raise ScheduleError(
            f"{schedule.name}: lead is {schedule.lead}, the labels are {' '.join(map(str, labels))}"
            "; name the label whose microbatch holds the earlier tokens, e.g. "
            f"'lead {labels[-1]}'"
        )
    if not labels and schedule.lead is not None:
        raise ScheduleError(
            f"{schedule.name}: lead {schedule.lead} beside the label i, under which microbatch 0 "
            "always leads; leave lead out"
        )


def _check_label(schedule: Schedule, label: int | None) -> None:
    """One microbatch: nothing missing, halves in order, a rotation of the chain, S in its place."""
    at = {(a.phase, a.half): n for n, a in enumerate(schedule.order) if a.microbatch == label}
    for slot in (*CHAIN, _SHARED):
        if slot not in at:
            missing = Action(slot[0], label, slot[1])
            raise ScheduleError(
                f"{schedule.name}: {missing} is missing\n"
                f"{mark(schedule.order, f'no {missing}', missing.lane)}\n"
                f"  Every label needs A0 A1 D.send D.recv MLP C.send C.recv S once. "
                "See the lanes: dbo-fx show mlp_shared_overlap"
            )
    for needed, slot in pairwise(CHAIN[2:]):
        if at[slot] < at[needed]:
            action, before = schedule.order[at[slot]], schedule.order[at[needed]]
            reason = f"{action} runs before {before}"
            raise _error(schedule, at[slot], reason, f"{action} needs {before} first.")
    _check_rotation(schedule, at)
    _check_shared(schedule, at)


def _check_rotation(schedule: Schedule, at: dict[Slot, int]) -> None:
    in_text = sorted(CHAIN, key=at.__getitem__)
    start = CHAIN.index(in_text[0])
    for slot, wanted in zip(in_text, CHAIN[start:] + CHAIN[:start], strict=True):
        if slot != wanted:
            action, due = schedule.order[at[slot]], schedule.order[at[wanted]]
            raise _error(
                schedule,
                at[slot],
                f"{action} runs before {due}",
                "A label's A0 A1 D.send D.recv MLP C.send C.recv may start anywhere in this "
                "cycle, but keep its order.",
            )
    if start and schedule.lead is None:
        first = schedule.order[at[in_text[0]]]
        reason = f"{first} runs before A0_i"
        raise _error(schedule, at[in_text[0]], reason, "Under the label i a layer begins with A0.")


def _check_shared(schedule: Schedule, at: dict[Slot, int]) -> None:
    shared, core, proj = at[_SHARED], at[Phase.A1, None], at[Phase.A0, None]
    length = len(schedule.order)
    # Cyclic: going on from A1, S has to come before the A0 whose join adds it.
    if (shared - core) % length > (proj - core) % length:
        action, join = schedule.order[shared], schedule.order[proj]
        raise _error(
            schedule,
            shared,
            f"{action} runs between {join} and {schedule.order[core]}",
            f"S follows its layer's A1 and comes before the next layer's A0 ({join}), which joins "
            "it.",
        )
    if schedule.lead is None and shared < core:
        reason = "S_i runs before A1_i"
        raise _error(schedule, shared, reason, "Under the label i a layer's S follows its A1.")


def parse_schedule(text: str, source: str = "schedule text") -> Schedule:
    """Read a schedule text (`schedule 1`, name, lead, comp, comm, order).

    Args:
        text: The text; `#` starts a comment, blank lines are skipped, `comp` and `comm` optional.
        source: What to call the text in errors, usually its path.

    Returns:
        The checked schedule.

    Raises:
        ScheduleError: The text is malformed, or its order breaks a rule.
    """
    fields = _read_fields(text, source)
    name = fields.get("name", "")
    if not is_name(name):
        raise ScheduleError(
            f"{source}: {name!r} cannot name a schedule; add a line like 'name my_schedule'"
        )
    lead = fields.get("lead")
    if lead is not None and re.fullmatch("[0-9]+", lead) is None:
        raise ScheduleError(f"{source}: lead {lead!r} is no label; write a number, e.g. 'lead 1'")
    order = _read_order(name, fields.get("order", ""))
    schedule = Schedule(name, order, None if lead is None else int(lead))
    _check_rows(schedule, fields)
    return schedule


def _read_fields(text: str, source: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for number, line in significant_lines(text):
        key, *rest = line.split(maxsplit=1)
        value = rest[0] if rest else ""
        if not fields and (key, value) != ("schedule", "1"):
            raise ScheduleError(f"{source}, line {number}: {line!r}; wanted 'schedule 1' first")
        if key not in ("schedule", "name", "lead", COMP, COMM, "order"):
            raise ScheduleError(
                f"{source}, line {number}: unknown line {line!r}; a schedule text has the lines "
                "schedule, name, lead, comp, comm, order"
            )
        if key in fields:
            raise ScheduleError(f"{source}, line {number}: a second {key!r} line; keep one")
        fields[key] = value
    if not fields:
        raise ScheduleError(f"{source}: no text; it begins with the line 'schedule 1'")
    return fields


def _read_order(name: str, text: str) -> tuple[Action, ...]:
    order: list[Action] = []
    for step, item in enumerate(text.split(), 1):
        try:
            order.append(Action.parse(item))
        except ScheduleError as error:
            raise ScheduleError(
                f"{name}, step {step} (counted from 1): {error}\n{mark(order, item, COMP)}"
            ) from error
    return tuple(order)


def _check_rows(schedule: Schedule, fields: dict[str, str]) -> None:
    """Rows in the text are for readers; wrong ones mislead them, so they must fit the order."""
    columns = lanes(schedule.order)
    for lane in (COMP, COMM):
        if lane in fields and _cells(fields[lane]) != _row(columns, lane):
            raise ScheduleError(
                f"{schedule.name}: the {lane} row is not what the order says\n"
                f"  found   {fields[lane]}\n"
                + "\n".join(f"  wanted  {row}" for row in draw(columns).splitlines())
                + "\n  Correct the row or leave it out: the order decides."
            )


def _cells(row: str) -> list[list[str]]:
    return [cell.split() for cell in row.split("|")]


def _row(columns: Sequence[Column], lane: str) -> list[list[str]]:
    return [[str(a) for a in (c.comp if lane == COMP else c.comm)] for c in columns]


def significant_lines(text: str) -> list[tuple[int, str]]:
    """The lines that say something, without comments, with their numbers counted from 1."""
    stripped = (line.partition("#")[0].strip() for line in text.splitlines())
    return [(number, line) for number, line in enumerate(stripped, 1) if line]
