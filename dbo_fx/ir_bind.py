"""Give a schedule's actions streams, events, lifetimes and slots; needs no model and no torch.

What the streams pass does with a graph, for the phase model of a program text. So a schedule can
be checked, printed and compared as a program before any model exists.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.contracts import Contract
from dbo_fx.ir import (
    COMP,
    Action,
    Half,
    Keepalive,
    Merge,
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
    steps = _with_slots([*_unsynchronised(actions, contract)], contract.slots)
    if microbatches > 1:
        steps.append(Merge(COMP))
    bare = Program(name, microbatches, layers, contract.name, tuple(steps))
    return replace(bare, steps=tuple(_Events(bare, contract).steps()))


def _unsynchronised(actions: Iterable[Action], contract: Contract) -> Iterator[Run | Keepalive]:
    streams = {None: COMP, Half.SEND: contract.send_stream, Half.RECV: contract.recv_stream}
    for action in actions:
        yield Run(streams[action.half], action)
        if action.half is Half.RECV:
            yield Keepalive(COMP, action.communication)


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
