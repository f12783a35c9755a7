"""Give a schedule's actions streams, events, lifetimes and slots; needs no model and no torch.

What the streams pass does with a graph, for the phase model of a program text. So a schedule can
be checked, printed and compared as a program before any model exists.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.phase_model import PhaseModel
from dbo_fx.contracts import Contract
from dbo_fx.ir import (
    COMP,
    Action,
    Half,
    Keepalive,
    Merge,
    Phase,
    Program,
    Record,
    Run,
    Schedule,
    Step,
    Wait,
    bind,
)


def bound_program(
    schedule: Schedule, layers: int, contract: Contract, num_microbatches: int | None = None
) -> Program:
    """Bind a schedule to streams as a transport's contract wants it.

    Args:
        schedule: The steady state.
        layers: The number of MoE layers, at least 1.
        contract: The transport's.
        num_microbatches: How many microbatches; needed in the `i` form, else the number of labels.

    Returns:
        The program that the compiler makes of a model of that many layers, all of which have a
        shared expert.

    Raises:
        ScheduleError: The numbers do not fit the schedule.
    """
    actions = bind(schedule, layers, num_microbatches)
    count = 1 + max(a.microbatch for a in actions if a.microbatch is not None)
    return program_of_actions(actions, layers, count, contract, schedule.name)


def program_of_actions(
    actions: Iterable[Action], layers: int, microbatches: int, contract: Contract, name: str
) -> Program:
    """Bind actions in the order in which they stand.

    Args:
        actions: Bound actions, halves in order.
        layers: How many MoE layers they name.
        microbatches: How many microbatches they name.
        contract: The transport's.
        name: Of the schedule, for the program's header.

    Returns:
        The program; the order of the actions is not checked.
    """
    steps: list[Step] = [*_unsynchronised(actions, contract)]
    if microbatches > 1:
        steps.append(Merge(COMP))
    bare = Program(name, microbatches, layers, contract.name, tuple(steps))
    steps = _with_slots(_sunk(bare, contract), contract.slots)
    bare = Program(name, microbatches, layers, contract.name, tuple(steps))
    return replace(bare, steps=tuple(_Events(bare, contract).steps()))


def _unsynchronised(actions: Iterable[Action], contract: Contract) -> Iterator[Run | Keepalive]:
    streams = {None: COMP, Half.SEND: contract.send_stream, Half.RECV: contract.recv_stream}
    for action in actions:
        yield Run(streams[action.half], action)
        if action.half is Half.RECV:
            yield Keepalive(COMP, action.communication)


def sunk_actions(
    actions: Iterable[Action], layers: int, microbatches: int, contract: Contract
) -> tuple[Action, ...]:
    """Actions with the recvs where they stand in a program over a transport.

    Args:
        actions: Bound actions, halves in order.
        layers: How many MoE layers they name.
        microbatches: How many microbatches they name.
        contract: The transport's.
    """
    steps = [*_unsynchronised(actions, contract), Merge(COMP)]
    bare = Program("actions", microbatches, layers, contract.name, tuple(steps))
    return tuple(step.action for step in _sunk(bare, contract) if isinstance(step, Run))


def _sunk(program: Program, contract: Contract) -> list[Step]:
    """Every recv and its keepalive right before the first use of what it brings.

    What the pass `sinking` does: at most to the next send of its flight, and to the next send at
    all where the contract limits what is in flight; never between A0 and A1 that stand together.
    """
    if not contract.sinks:
        return list(program.steps)
    steps, model = program.steps, PhaseModel(program)
    is_limited = contract.max_in_flight is not None or contract.slots is not None
    sunk: defaultdict[int, list[Step]] = defaultdict(list)
    moved: set[int] = set()
    for index, step in enumerate(steps):
        if not isinstance(step, Run) or step.action.half is not Half.RECV:
            continue
        _, landing = model.buffers(step.action)
        for place in range(index + 2, len(steps)):
            if _must_follow(steps[place], step.action, landing, model, is_limited):
                sunk[_start(steps, place)] += steps[index : index + 2]
                moved |= {index, index + 1}
                break
    result: list[Step] = []
    for index, step in enumerate(steps):
        result += [*sunk[index], *([] if index in moved else [step])]
    return result


def _must_follow(
    step: Step, recv: Action, landing: str, model: PhaseModel, is_limited: bool
) -> bool:
    if isinstance(step, Merge):
        return landing in model.outputs
    if not isinstance(step, Run) or step.action.half is Half.RECV:
        return False
    same = (step.action.phase, step.action.microbatch) == (recv.phase, recv.microbatch)
    ends = step.action.half is Half.SEND and (is_limited or same)
    return ends or landing in model.of(step.action).reads


def _start(steps: Sequence[Step], place: int) -> int:
    """Where the segment of a step starts: A0 and A1 that stand together are one."""
    before, here = steps[place - 1], steps[place]
    if not isinstance(before, Run) or not isinstance(here, Run):
        return place
    one, other = before.action, here.action
    attention = (one.phase, other.phase) == (Phase.A0, Phase.A1)
    together = (one.microbatch, one.layer) == (other.microbatch, other.layer)
    return place - 1 if attention and together else place


def _with_slots(steps: Sequence[Step], slots: int | None) -> list[Step]:
    if slots is None:
        return list(steps)
    taken: dict[Action, int] = {}
    given: list[Step] = []
    for step in steps:
        if isinstance(step, Run) and step.action.half is not None:
            key = step.action.communication
            step = replace(step, slot=taken.setdefault(key, len(taken) % slots))
        given.append(step)
    return given


@dataclass
class _Events:
    """One event behind the last needed step of another stream, unless a wait covers it already."""

    program: Program
    contract: Contract
    count: int = 0
    known: Counter[tuple[str, str]] = field(default_factory=Counter)

    def steps(self) -> Iterator[Step]:
        """The program's steps with records and waits."""
        steps = self.program.steps
        needs = self._needs()
        records: defaultdict[int, list[Step]] = defaultdict(list)
        waits: defaultdict[int, list[Step]] = defaultdict(list)
        for index, step in enumerate(steps):
            for stream, needed in sorted(needs[index].items()):
                if self.known[step.stream, stream] > needed:
                    continue
                self.known[step.stream, stream] = needed + 1
                records[needed].append(Record(stream, self.count))
                waits[index].append(Wait(step.stream, self.count))
                self.count += 1
        for index, step in enumerate(steps):
            yield from waits[index]
            yield step
            yield from records[index]

    def _needs(self) -> list[dict[str, int]]:
        """Per step and other stream the last step it needs, or that stands before its buffers."""
        steps = self.program.steps
        needs: list[dict[str, int]] = [{} for _ in steps]
        recvs: dict[Action, int] = {}

        def need(before: int, after: int) -> None:
            stream = steps[before].stream
            if stream != steps[after].stream:
                needs[after][stream] = max(needs[after].get(stream, -1), before)

        execution = execution_of_program(self.program, self.contract)
        for required in execution.required:
            before, after = execution.steps[required.before], execution.steps[required.after]
            assert before is not None
            assert after is not None
            need(before - 1, after - 1)
        last_on_comp = 0
        for index, step in enumerate(steps):
            if isinstance(step, Run) and step.action.half is Half.SEND:
                need(last_on_comp, index)  # Behind it the landing buffer is allocated.
            elif isinstance(step, Run) and step.action.half is Half.RECV:
                recvs[step.action.communication] = index
            elif isinstance(step, Keepalive) and step.action in recvs:
                need(recvs[step.action], index)
            if step.stream == COMP:
                last_on_comp = index
        return needs
