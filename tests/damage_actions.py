"""Operators on actions: order, pairing, streams, slots, and what regions leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from damage import Damage, classed, moved, only, operator, substituted, unsafe, without
from damage_events import OTHER, runs
from damage_order import Shape, needed
from dbo_fx.ir import COMP, Action, Half, Keepalive, Phase, Program, Run, Step
from generated import Case, complete
from generated_binding import program_of


def halves(program: Program, half: Half) -> list[tuple[int, Run]]:
    """Every send or every recv with its index."""
    return [(i, s) for i, s in runs(program) if s.action.half is half]


def _place(program: Program, action: Action) -> int:
    return next(i for i, s in runs(program) if s.action == action)


def _swapped(steps: tuple[Step, ...], one: int, other: int) -> list[Step]:
    return substituted(steps, {one: steps[other], other: steps[one]})


@operator("dependent actions swapped")
def dependent_swapped(base: Case) -> Iterator[Damage]:
    """Two actions that follow each other in the data flow of a microbatch."""
    program = base.program
    pairs = needed(program)
    for one, other in pairwise(complete(Shape.of(program))):
        if (("run", one), ("run", other)) in pairs:
            steps = _swapped(program.steps, _place(program, one), _place(program, other))
            note = f"{one.bound()} and {other.bound()} exchanged"
            yield from only([classed(base, steps, note)], "unsafe")


@operator("independent neighbours swapped", serious=False)
def independent_swapped(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, (one, other) in enumerate(pairwise(program.steps)):
        if isinstance(one, Run) and isinstance(other, Run):
            steps = _swapped(program.steps, index, index + 1)
            note = f"{one} and {other} exchanged"
            if not one.action.half and not other.action.half:
                yield from only([classed(base, steps, note)], "redundant", "slower")


@operator("later microbatch first")
def later_first(base: Case) -> Iterator[Damage]:
    """Attention of two microbatches of one layer in the wrong order: the cache's order is lost."""
    program = base.program
    shape = Shape.of(program)
    for layer in range(shape.layers):
        for m in range(shape.microbatches - 1):
            for phase in (Phase.A0, Phase.A1):
                one = _place(program, Action(phase, m, None, layer))
                other = _place(program, Action(phase, m + 1, None, layer))
                steps = _swapped(program.steps, one, other)
                note = f"{phase.value} of m{m} and m{m + 1} exchanged in layer {layer}"
                yield from only([classed(base, steps, note)], "unsafe")


@operator("microbatches exchanged")
def microbatches_exchanged(base: Case) -> Iterator[Damage]:
    """The same program with two indices exchanged: only the cache knows which one is earlier."""
    program = base.program
    for m in range(program.microbatches - 1):
        other = {m: m + 1, m + 1: m}
        steps: list[Step] = []
        for step in program.steps:
            if isinstance(step, Run | Keepalive):
                index = step.action.microbatch
                assert index is not None
                action = replace(step.action, microbatch=other.get(index, index))
                step = replace(step, action=action)
            steps.append(step)
        note = f"m{m} and m{m + 1} exchanged everywhere"
        yield from only([classed(base, steps, note)], "unsafe")


@operator("recv dropped")
def recv_dropped(base: Case) -> Iterator[Damage]:
    return _dropped(base, Half.RECV)


@operator("recv doubled")
def recv_doubled(base: Case) -> Iterator[Damage]:
    return _doubled(base, Half.RECV)


@operator("send dropped")
def send_dropped(base: Case) -> Iterator[Damage]:
    return _dropped(base, Half.SEND)


@operator("send doubled")
def send_doubled(base: Case) -> Iterator[Damage]:
    return _doubled(base, Half.SEND)


@operator("recv before send")
def recv_before_send(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in halves(program, Half.SEND):
        recv = _place(program, replace(step.action, half=Half.RECV))
        steps = moved(program.steps, recv, index)
        yield unsafe(base, steps, f"{program.steps[recv]} directly before {step}")


@operator("action dropped")
def action_dropped(base: Case) -> Iterator[Damage]:
    """A computation of one microbatch that others still have, so that the model is known."""
    program = base.program
    for index, step in runs(program):
        others = {replace(a, microbatch=0) for a in program.actions if a != step.action}
        if step.action.half is None and replace(step.action, microbatch=0) in others:
            yield unsafe(base, without(program.steps, index), f"without {step}")


@operator("action on the wrong stream")
def action_on_wrong_stream(base: Case) -> Iterator[Damage]:
    program = base.program
    for index, step in runs(program):
        if step.action.half is None:
            steps = substituted(program.steps, {index: replace(step, stream=OTHER[COMP])})
            yield from only([classed(base, steps, f"{step} on comm")], "unsafe")


@operator("one more in flight")
def one_more_in_flight(base: Case) -> Iterator[Damage]:
    """A send before the recv that stands before it; only some contracts allow that."""
    program = base.program
    actions = list(program.actions)
    shape = Shape.of(program)
    pairs = needed(program)
    for index, action in enumerate(actions):
        if action.half is not Half.SEND:
            continue
        before = [i for i, a in enumerate(actions[:index]) if a.half is Half.RECV]
        if not before:
            continue
        between = actions[before[-1] : index]
        if any((("run", a), ("run", action)) in pairs for a in between):
            continue
        order = [*actions[: before[-1]], action, *between, *actions[index + 1 :]]
        mutant = program_of(order, shape, base.contract, program.schedule)
        note = f"{action.bound()} before {between[0].bound()}"
        yield classed(base, mutant.steps, note)


@operator("recv too early", serious=False)
def recv_too_early(base: Case) -> Iterator[Damage]:
    """Directly behind its send, so that nothing runs between them."""
    program = base.program
    shape = Shape.of(program)
    for action in program.actions:
        if action.half is Half.RECV:
            order = [a for a in program.actions if a != action]
            send = order.index(replace(action, half=Half.SEND))
            order.insert(send + 1, action)
            mutant = program_of(order, shape, base.contract, program.schedule)
            note = f"{action.bound()} directly behind its send"
            yield from only([classed(base, mutant.steps, note)], "slower")


@operator("wrong slot")
def wrong_slot(base: Case) -> Iterator[Damage]:
    """One half, or both halves, of a communication name another slot."""
    program, slots = base.program, base.contract.slots
    if slots is None or slots < 2:
        return
    for index, step in halves(program, Half.SEND):
        assert step.slot is not None
        other = (step.slot + 1) % slots
        recv = _place(program, replace(step.action, half=Half.RECV))
        for chosen in ((index,), (recv,), (index, recv)):
            changes: dict[int, Step] = {}
            for i in chosen:
                run = program.steps[i]
                assert isinstance(run, Run)
                changes[i] = replace(run, slot=other)
            note = f"slot {other} in " + " and ".join(str(program.steps[i]) for i in chosen)
            yield unsafe(base, substituted(program.steps, changes), note)


@operator("slot used again")
def slot_used_again(base: Case) -> Iterator[Damage]:
    """A communication takes the slot of the one before it, and all later ones shift."""
    program, slots = base.program, base.contract.slots
    if slots is None or slots < 2:
        return
    sends = [s.action.communication for _, s in halves(program, Half.SEND)]
    for n in range(1, len(sends)):
        number = {a: i - (i >= n) for i, a in enumerate(sends)}
        steps: list[Step] = []
        for step in program.steps:
            if isinstance(step, Run) and step.action.half:
                step = replace(step, slot=number[step.action.communication] % slots)
            steps.append(step)
        yield unsafe(base, steps, f"{sends[n].bound()} takes the slot of {sends[n - 1].bound()}")


@operator("wrong start slot")
def wrong_start_slot(base: Case) -> Iterator[Damage]:
    """A region that failed leaves the slots where they were, and nobody sets them back."""
    slots = base.contract.slots
    if slots is None:
        return
    sends = len(halves(base.program, Half.SEND))
    for completed in range(min(sends, 2 * slots)):
        expected = "unsafe" if completed % slots else "redundant"
        note = f"behind a region that failed after {completed} sends"
        yield Damage((base.program,), expected, note, completed=completed)


@operator("odd parity")
def odd_parity(base: Case) -> Iterator[Damage]:
    """A number of communications that leaves the next region at another slot."""
    program, parity = base.program, base.contract.parity
    if parity < 2:
        return
    for index, step in halves(program, Half.SEND)[-2:]:
        recv = _place(program, replace(step.action, half=Half.RECV))
        steps = without(program.steps, index, recv)
        yield unsafe(base, steps, f"without {step.action.communication.bound()}")
    for layers, microbatches in ((1, 1), (1, 3), (3, 1), (3, 3)):
        if 2 * layers * microbatches % parity:
            shape = Shape(layers, microbatches, frozenset(), tail=True)
            odd = program_of(complete(shape), shape, base.contract, program.schedule)
            note = f"{2 * layers * microbatches} communications"
            yield Damage((odd,), "unsafe", note)


@operator("captured over a transport that blocks")
def captured_and_blocking(base: Case) -> Iterator[Damage]:
    contract = base.contract
    blocks = contract.blocks_host or not contract.capturable
    expected = "unsafe" if blocks else "redundant"
    yield Damage((base.program,), expected, "under capture", captured=True)


def _dropped(base: Case, half: Half) -> Iterator[Damage]:
    for index, step in halves(base.program, half):
        yield unsafe(base, without(base.program.steps, index), f"without {step}")


def _doubled(base: Case, half: Half) -> Iterator[Damage]:
    for index, step in halves(base.program, half):
        steps = list(base.program.steps)
        steps.insert(index + 1, step)
        yield unsafe(base, steps, f"{step} twice")
