"""Operators on records, waits and keepalives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from damage import Damage, classed, moved, only, operator, substituted, without
from dbo_fx.ir import COMM, COMP, Keepalive, Program, Record, Run, Step, Wait
from generated import Case

OTHER = {COMP: COMM, COMM: COMP}


def records(program: Program) -> list[tuple[int, Record]]:
    """Every record with its index."""
    return [(i, s) for i, s in enumerate(program.steps) if isinstance(s, Record)]


def waits(program: Program, event: int | None = None) -> list[tuple[int, Wait]]:
    """Every wait, or those for one event, with its index."""
    found = [(i, s) for i, s in enumerate(program.steps) if isinstance(s, Wait)]
    return [(i, s) for i, s in found if event in (None, s.event)]


def runs(program: Program, stream: str | None = None) -> list[tuple[int, Run]]:
    """Every action, or those of a stream, with its index."""
    found = [(i, s) for i, s in enumerate(program.steps) if isinstance(s, Run)]
    return [(i, s) for i, s in found if stream in (None, s.stream)]


def _next_run(program: Program, index: int, stream: str) -> int | None:
    return next((i for i, _ in runs(program, stream) if i > index), None)


def _last_run(program: Program, index: int, stream: str) -> int | None:
    return next((i for i, _ in reversed(runs(program, stream)) if i < index), None)


@operator("record dropped")
def record_dropped(base: Case) -> Iterator[Damage]:
    """The wait waits for nothing; only where it is needed, since the text is refused anyway."""
    program = base.program
    yield from only(
        (classed(base, without(program.steps, i), f"without {s}") for i, s in records(program)),
        "unsafe",
    )


@operator("wait dropped")
def wait_dropped(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in waits(program):
        yield classed(base, without(program.steps, index), f"without {step}")


@operator("record and wait dropped")
def record_and_wait_dropped(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in records(program):
        gone = [index, *(i for i, _ in waits(program, step.event))]
        yield classed(base, without(program.steps, *gone), f"without e{step.event}")


@operator("record too early")
def record_too_early(base: Case) -> Iterator[Damage]:
    """Before the action that it is for."""
    program = base.program
    for index, step in records(program):
        before = _last_run(program, index, step.stream)
        if before is not None:
            note = f"{step} before {program.steps[before]}"
            yield classed(base, moved(program.steps, index, before), note)


@operator("record too late", serious=False)
def record_too_late(base: Case) -> Iterator[Damage]:
    """Behind further actions of its stream, but before its wait."""
    program = base.program
    for index, step in records(program):
        until = min((i for i, _ in waits(program, step.event)), default=index)
        if any(index < i < until for i, _ in runs(program, step.stream)):
            note = f"{step} directly before its wait"
            damage = classed(base, moved(program.steps, index, until), note)
            yield from only([damage], "slower", "redundant")


@operator("wait too late")
def wait_too_late(base: Case) -> Iterator[Damage]:
    """Behind the action that needs it."""
    program = base.program
    for index, step in waits(program):
        after = _next_run(program, index, step.stream)
        if after is not None:
            note = f"{step} behind {program.steps[after]}"
            yield classed(base, moved(program.steps, index, after + 1), note)


@operator("wait too early", serious=False)
def wait_too_early(base: Case) -> Iterator[Damage]:
    """Before actions that do not need it, directly behind its record."""
    program = base.program
    first = {step.event: index for index, step in records(program)}
    for index, step in waits(program):
        if any(first[step.event] < i < index for i, _ in runs(program, step.stream)):
            note = f"{step} directly behind its record"
            damage = classed(base, moved(program.steps, index, first[step.event] + 1), note)
            yield from only([damage], "slower", "redundant")


@operator("wait before its record")
def wait_before_record(base: Case) -> Iterator[Damage]:
    program = base.program
    first = {step.event: index for index, step in records(program)}
    for index, step in waits(program):
        steps = moved(program.steps, index, first[step.event])
        yield from only([classed(base, steps, f"{step} before its record")], "unsafe")


@operator("wait on the wrong stream")
def wait_on_wrong_stream(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in waits(program):
        steps = substituted(program.steps, {index: replace(step, stream=OTHER[step.stream])})
        yield from only([classed(base, steps, f"{step} on the other stream")], "unsafe")


@operator("record on the wrong stream")
def record_on_wrong_stream(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in records(program):
        steps = substituted(program.steps, {index: replace(step, stream=OTHER[step.stream])})
        yield from only([classed(base, steps, f"{step} on the other stream")], "unsafe")


@operator("wait for another event")
def wait_for_another(base: Case) -> Iterator[Damage]:
    """For the event before it on the recording stream."""
    program = base.program
    of = dict((s.event, s) for _, s in records(program))
    for index, step in waits(program):
        before = [s for i, s in records(program) if i < index and s.event != step.event]
        same = [s for s in before if s.stream == of[step.event].stream]
        for other in same[-1:]:
            steps = substituted(program.steps, {index: replace(step, event=other.event)})
            note = f"{step} waits for e{other.event}"
            yield from only([classed(base, steps, note)], "unsafe")


@operator("event used again")
def event_used_again(base: Case) -> Iterator[Damage]:
    """Two events become one, and the second record replaces what the first wait waits for."""
    program = base.program
    for one, first in records(program):
        for other, second in records(program):
            if other <= one or not any(i > other for i, _ in waits(program, first.event)):
                continue
            changes: dict[int, Step] = {other: replace(second, event=first.event)}
            for index, wait in waits(program, second.event):
                changes[index] = replace(wait, event=first.event)
            note = f"e{second.event} becomes e{first.event}"
            steps = substituted(program.steps, changes)
            yield from only([classed(base, steps, note)], "unsafe")


@operator("join dropped")
def join_dropped(base: Case) -> Iterator[Damage]:
    """The compute stream never waits for the last communications."""
    program = base.program
    comm = runs(program, COMM)
    if not comm:
        return
    for last, run in comm[-2:]:
        gone = [i for i, s in waits(program) if s.stream == COMP and i > last]
        steps = without(program.steps, *gone)
        yield from only([classed(base, steps, f"no wait behind {run}")], "unsafe")


@operator("fork missing")
def fork_missing(base: Case) -> Iterator[Damage]:
    """The communication stream starts without the compute stream."""
    program = base.program
    comm = [i for i, s in waits(program) if s.stream == COMM]
    for count in {1, len(comm)} if comm else ():
        gone = comm[:count]
        events = {program.steps[i].event for i in gone}  # type: ignore[union-attr]
        gone += [i for i, s in records(program) if s.event in events]
        steps = without(program.steps, *gone)
        note = f"without the first {count} forks"
        yield from only([classed(base, steps, note)], "unsafe")


@operator("needless event", serious=False)
def needless_event(base: Case) -> Iterator[Damage]:
    """A second event for an order that an event keeps already."""
    program = base.program
    new = 1 + max((s.event for _, s in records(program)), default=-1)
    for index, step in records(program):
        for wait, target in waits(program, step.event)[:1]:
            steps = list(program.steps)
            steps.insert(wait + 1, Wait(target.stream, new))
            steps.insert(index + 1, Record(step.stream, new))
            damage = classed(base, steps, f"e{new} beside e{step.event}")
            yield from only([damage], "redundant", "slower")


@operator("keepalive dropped")
def keepalive_dropped(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in enumerate(program.steps):
        if isinstance(step, Keepalive):
            yield classed(base, without(program.steps, index), f"without {step}")


@operator("keepalive too early")
def keepalive_too_early(base: Case) -> Iterator[Damage]:
    """Directly behind the send, before the compute stream has waited for it."""
    program = base.program
    at = {s.action: i for i, s in runs(program)}
    for index, step in enumerate(program.steps):
        if isinstance(step, Keepalive):
            for run, place in at.items():
                if run.communication == step.action and program.steps[place].stream == COMM:
                    steps = moved(program.steps, index, place + 1)
                    damage = classed(base, steps, f"{step} directly behind {run.bound()}")
                    yield from only([damage], "unsafe")
