"""Programs: bound actions on streams, with events and lifetimes, as text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dbo_fx.errors import ScheduleError
from dbo_fx.ir_actions import COMM, COMP, Action, Half, Phase
from dbo_fx.ir_schedule import is_name, significant_lines
from dbo_fx.sm_sharing import SmSharing, parse_sm_sharing

STREAMS = (COMP, COMM)
_HEADER = ("schedule", "microbatches", "layers", "transport")


@dataclass(frozen=True, slots=True)
class Run:
    """Run an action on a stream: `comp  A0_m0@0`, `comp  D_m0.send@0 slot 0`.

    Attributes:
        stream: Where it runs.
        action: What runs.
        slot: Which of its transport's own buffers a half uses; None for compute, and where the
            transport has no slots.
    """

    stream: str
    action: Action
    slot: int | None = None

    def __str__(self) -> str:
        """The line of the program text."""
        slot = "" if self.slot is None else f" slot {self.slot}"
        return f"{self.stream}  {self.action.bound()}{slot}"


@dataclass(frozen=True, slots=True)
class Record:
    """Record an event on a stream: `comp  record e0`."""

    stream: str
    event: int

    def __str__(self) -> str:
        """The line of the program text."""
        return f"{self.stream}  record e{self.event}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Let a stream wait for an event: `comm  wait e0`."""

    stream: str
    event: int

    def __str__(self) -> str:
        """The line of the program text."""
        return f"{self.stream}  wait e{self.event}"


@dataclass(frozen=True, slots=True)
class Keepalive:
    """End the lifetime of a communication's inputs and outputs: `comp  keepalive D_m0@0`."""

    stream: str
    action: Action

    def __str__(self) -> str:
        """The line of the program text."""
        return f"{self.stream}  keepalive {self.action.bound()}"


@dataclass(frozen=True, slots=True)
class Merge:
    """Join the outputs of all microbatches: `comp  merge`."""

    stream: str

    def __str__(self) -> str:
        """The line of the program text."""
        return f"{self.stream}  merge"


Step = Run | Record | Wait | Keepalive | Merge


@dataclass(frozen=True, slots=True)
class Program:
    """Everything one rank executes, in order.

    Built in memory it may be wrong: proving it right is the verifier's work. `parse_program`
    refuses texts that cannot be right.

    Args:
        schedule: Name of the schedule it came from.
        microbatches: How many microbatches its actions name.
        layers: How many MoE layers.
        transport: Name of what carries D and C.
        steps: The steps in order.
        sms: How communication and matmuls share the GPU's SMs, where the program says so.
    """

    schedule: str
    microbatches: int
    layers: int
    transport: str
    steps: tuple[Step, ...]
    sms: SmSharing = field(default=SmSharing(), kw_only=True)

    def __str__(self) -> str:
        """The program text; `parse_program` reads it back."""
        header = [f"{key} {getattr(self, key)}" for key in _HEADER]
        header += [str(self.sms)] if self.sms else []
        return "\n".join(["program 1", *header, *map(str, self.steps)]) + "\n"

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions it runs, in order."""
        return tuple(step.action for step in self.steps if isinstance(step, Run))

    @property
    def digest(self) -> str:
        """A short name for the program's content: 16 hex digits of its text's SHA-256."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def parse_program(text: str, source: str = "program text", *, allow_wrong: bool = False) -> Program:
    """Read a program text: `program 1`, four or five header lines, then one step a line.

    Args:
        text: The text; `#` starts a comment, blank lines are skipped.
        source: What to call the text in errors, usually its path.
        allow_wrong: Read a program that cannot be right too, for the verifier to refuse.

    Returns:
        The program. Its halves, events and indices fit together unless `allow_wrong`; hazards are
        for the verifier.

    Raises:
        ScheduleError: The text is malformed or cannot be right; the message marks the line.
    """
    lines = significant_lines(text)
    if not lines or lines[0][1].split() != ["program", "1"]:
        found = repr(lines[0][1]) if lines else "no text"
        where = f"{source}, line {lines[0][0]}" if lines else source
        raise ScheduleError(f"{where}: {found}; wanted 'program 1' first")
    header = _read_header(lines[1 : 1 + len(_HEADER)], source)
    body = lines[1 + len(_HEADER) :]
    sms = SmSharing()
    if body and body[0][1].split()[0] == "sms":
        sms, body = _read_sms(body[0], source), body[1:]
    steps: list[Step] = []
    for index, (_, line) in enumerate(body):
        try:
            steps.append(_read_step(line))
        except ScheduleError as error:
            raise _line_error(source, body, index, str(error)) from error
    program = Program(
        header["schedule"],
        int(header["microbatches"]),
        int(header["layers"]),
        header["transport"],
        tuple(steps),
        sms=sms,
    )
    if not allow_wrong:
        _check_program(program, source, body)
    return program


def check_form(program: Program, source: str, lines: Sequence[int]) -> None:
    """Refuse what `parse_program` refuses, of a program that was read with `allow_wrong`.

    Args:
        program: The program.
        source: What to call its text in errors.
        lines: The number of every step's line.

    Raises:
        ScheduleError: The program cannot be right; the message marks the line.
    """
    body = [(number, str(step)) for number, step in zip(lines, program.steps, strict=True)]
    _check_program(program, source, body)


def _line_error(
    source: str, body: Sequence[tuple[int, str]], index: int, reason: str
) -> ScheduleError:
    shown = body[max(0, index - 2) : index + 1]
    context = "\n".join(f"  line {number}  {line}" for number, line in shown)
    return ScheduleError(f"{source}, line {body[index][0]}: {reason}\n{context}   <-- here")


def _read_header(lines: Sequence[tuple[int, str]], source: str) -> dict[str, str]:
    header: dict[str, str] = {}
    for index, key in enumerate(_HEADER):
        number, line = lines[index] if index < len(lines) else (0, "")
        found, _, value = line.partition(" ")
        value = value.strip()
        is_count = key in ("microbatches", "layers")
        right = re.fullmatch("[1-9][0-9]{0,3}", value) if is_count else is_name(value)
        if found != key or not right:
            where = f"{source}, line {number}" if number else source
            wanted = f"'{key} {'2' if is_count else 'NAME'}'"
            wanted += ", at most 9999" if is_count and value.isdecimal() else ""
            raise ScheduleError(f"{where}: found {line!r}; wanted a line like {wanted}")
        header[key] = value
    return header


def _read_sms(line: tuple[int, str], source: str) -> SmSharing:
    try:
        return parse_sm_sharing(line[1])
    except ScheduleError as error:
        raise ScheduleError(f"{source}, line {line[0]}: {error}") from error


def _read_step(line: str) -> Step:
    stream, *words = line.split()
    if stream not in STREAMS:
        raise ScheduleError(f"unknown stream {stream!r}; wanted one of {' '.join(STREAMS)}")
    match words:
        case ["merge"]:
            return Merge(stream)
        case ["record", event]:
            return Record(stream, _read_event(event))
        case ["wait", event]:
            return Wait(stream, _read_event(event))
        case ["keepalive", text]:
            return Keepalive(stream, Action.parse_bound(text))
        case [text, "slot", slot]:
            return Run(stream, Action.parse_bound(text), _read_slot(slot))
        case [text]:
            return Run(stream, Action.parse_bound(text))
    raise ScheduleError(
        "unknown step; wanted an action, 'ACTION slot N', 'record eN', 'wait eN', "
        "'keepalive ACTION' or 'merge' after the stream"
    )


def _read_slot(text: str) -> int:
    if re.fullmatch("0|[1-9][0-9]{0,8}", text) is None:
        raise ScheduleError(f"{text!r} is not a slot; write it like slot 0")
    return int(text)


def _read_event(text: str) -> int:
    if re.fullmatch("e(0|[1-9][0-9]{0,8})", text) is None:
        raise ScheduleError(f"{text!r} is not an event; write it like e0")
    return int(text[1:])


def _check_program(program: Program, source: str, body: Sequence[tuple[int, str]]) -> None:
    ran: set[Action] = set()
    released: set[Action] = set()
    recorded: set[int] = set()
    for index, step in enumerate(program.steps):
        match step:
            case Run(_, action, slot):
                reason = _action_form(program, action, whole=False) or _run_order(action, ran)
                if slot is not None and action.half is None:
                    reason = reason or f"{action.bound()} has a slot; only sends and recvs use one"
                ran.add(action)
            case Keepalive(_, action):
                reason = _action_form(program, action, whole=True)
                reason = reason or _keepalive_order(action, ran, released)
                released.add(action)
            case Record(_, event):
                reason = f"e{event} is recorded twice" if event in recorded else None
                recorded.add(event)
            case Wait(_, event):
                reason = None if event in recorded else f"e{event} is waited for before recorded"
            case Merge():
                reason = None
        if reason is not None:
            raise _line_error(source, body, index, reason)


def _action_form(program: Program, action: Action, *, whole: bool) -> str | None:
    """What is wrong with an action by itself; `whole`: it names a communication, not a half."""
    text = action.bound()
    if action.microbatch is not None and action.microbatch >= program.microbatches:
        return f"{text} in a program of {program.microbatches} microbatches, counted from 0"
    if action.layer is None and action.phase is not Phase.TAIL:
        return f"{text} has no layer; write it like {text}@0"
    if action.layer is not None and action.layer >= program.layers:
        return f"{text} in a program of {program.layers} layers, counted from 0"
    if whole and (action.half is not None or not action.phase.is_communication):
        return f"{text} is no communication; keepalive wants one, like D_m0@0"
    if not whole and action.phase.is_communication and action.half is None:
        return f"{text} has no half; wanted .send or .recv before the @"
    return None


def _run_order(action: Action, ran: set[Action]) -> str | None:
    if action in ran:
        return f"{action.bound()} runs twice"
    if action.half is Half.RECV and (send := replace(action, half=Half.SEND)) not in ran:
        return f"{action.bound()} runs before {send.bound()}"
    return None


def _keepalive_order(action: Action, ran: set[Action], released: set[Action]) -> str | None:
    if action in released:
        return f"{action.bound()} is released twice"
    if (recv := replace(action, half=Half.RECV)) not in ran:
        return f"{action.bound()} is released before {recv.bound()}"
    return None
