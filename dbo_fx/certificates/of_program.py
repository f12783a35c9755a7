"""Read an `Execution` off a program text: what its steps enqueue, allocate and free.

What actions read and write tells `phase_model`; the required order comes from the reference over
the actions that the program has. A damaged program is read as it stands: what it lacks becomes a
read of something that nobody wrote, what it runs twice makes the same value a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dbo_fx.certificates.execution import Execution, Kind, Operation, Storage
from dbo_fx.certificates.phase_model import (
    RESULT,
    Access,
    PhaseModel,
    reference_key,
    required_order,
    text_of,
)
from dbo_fx.contracts import Contract, check_sms
from dbo_fx.contracts import contract as contract_of
from dbo_fx.ir import COMP, Action, Half, Keepalive, Merge, Program, Record, Run, Wait

COMMUNICATOR = "experts"
_KINDS = {Half.SEND: Kind.SEND, Half.RECV: Kind.RECV, None: Kind.COMPUTE}


@dataclass(frozen=True)
class ProgramExecution(Execution):
    """An execution that knows the program's steps.

    Attributes:
        steps: Per operation the step it belongs to, counted from 1; None for BEGIN and END.
        lines: Per step the number of its line in the text it was read from; empty if there is
            none.
    """

    steps: tuple[int | None, ...] = ()
    lines: tuple[int, ...] = ()


def execution_of_program(program: Program, contract: Contract | None = None) -> ProgramExecution:
    """Read what one rank's host enqueues off a program.

    Args:
        program: Any program, also a wrong one.
        contract: The transport's; the one that the program's header names if left out.

    Returns:
        The operations with their lifetimes, and the order that the reference requires.

    Raises:
        OptionError: No transport has the name in the program's header, or it cannot keep to the
            number of SMs there.
    """
    contract = contract_of(program.transport) if contract is None else contract
    if contract.name == program.transport:
        check_sms(contract, program.sms)
    walk = _Walk(program, contract, PhaseModel(program))
    walk.all()
    required = tuple(required_order(walk.in_reference_order()))
    return ProgramExecution(
        tuple(walk.operations),
        required,
        contract,
        program.schedule,
        steps=tuple(walk.steps),
    )


@dataclass
class _Walk:
    """The host's walk over the steps: it allocates, enqueues and frees."""

    program: Program
    contract: Contract
    values: PhaseModel
    operations: list[Operation] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    first: dict[Action, int] = field(default_factory=dict)
    merged: int | None = None
    owner: dict[str, str] = field(default_factory=dict)

    def all(self) -> None:
        """Fill the lists."""
        landings = _landing_places(self.program, self.values)
        dying = self._last_names()
        self._add(None, "begin", Kind.BEGIN, COMP, writes=self.values.inputs)
        for index, step in enumerate(self.program.steps):
            for name in landings.get(index, ()):
                self._allocate(index, name, COMP)
            match step:
                case Run(stream, action, slot):
                    self._run(index, stream, action, slot)
                case Record(stream, event):
                    self._add(index, f"record e{event}", Kind.RECORD, stream, event=event)
                case Wait(stream, event):
                    self._add(index, f"wait e{event}", Kind.WAIT, stream, event=event)
                case Merge(stream):
                    access = self.access_of(step)
                    self._compute(index, "merge", stream, access)
                    self.merged = len(self.operations) - 1
                case Keepalive():
                    pass
            for name in dying.get(index, ()):
                if name in self.owner:
                    self._add(index, f"free {name}", Kind.FREE, self.owner[name], writes=[name])
        results, inputs = self.values.results, self.values.inputs
        self._add(None, "end", Kind.END, COMP, reads=results, writes=inputs)

    def in_reference_order(self) -> Iterator[tuple[int, Access]]:
        """Where the reference's actions stand, microbatch after microbatch, and the merge."""
        for action in sorted(self.first, key=reference_key):
            yield self.first[action], self.values.of(action)
        if self.merged is not None:
            yield self.merged, self.access_of(Merge(COMP))

    def access_of(self, step: object) -> Access:
        """What a step touches."""
        match step:
            case Run(_, action, _):
                return self.values.of(action)
            case Merge():
                return Access(tuple(self.values.outputs), (RESULT,))
        return Access()

    def _last_names(self) -> dict[int, list[str]]:
        """Per step the values that no later step names."""
        last: dict[str, int] = {}
        for index, step in enumerate(self.program.steps):
            access = self.access_of(step)
            held: Sequence[str] = ()
            if isinstance(step, Keepalive) and step.action.phase.is_communication:
                held = self.values.buffers(step.action)
            for name in (*access.reads, *access.writes, *held):
                last[name] = index
        kept = {*self.values.inputs, *self.values.results}
        dying: defaultdict[int, list[str]] = defaultdict(list)
        for name, index in last.items():
            if name not in kept:
                dying[index].append(name)
        return dying

    def _run(self, index: int, stream: str, action: Action, slot: int | None) -> None:
        access, name = self.values.of(action), text_of(action)
        kind = _KINDS[action.half]
        if kind is Kind.COMPUTE:
            self._compute(index, name, stream, access, action)
            return
        communication = text_of(action.communication)
        operation = Operation(
            name,
            kind,
            stream,
            frozenset(access.reads),
            frozenset(access.writes),
            action=action,
            communicator=COMMUNICATOR,
            transfer=communication,
            flight=communication,
            slot=slot,
            blocks_host=self.contract.blocks_host and kind is Kind.RECV,
        )
        self._enqueue(index, operation)

    def _compute(
        self, index: int, name: str, stream: str, access: Access, action: Action | None = None
    ) -> None:
        for written in access.writes:
            if written not in access.reads:
                self._allocate(index, written, stream)
        reads, writes = access.reads, access.writes
        self._add(index, name, Kind.COMPUTE, stream, action, reads=reads, writes=writes)

    def _allocate(self, index: int, name: str, stream: str) -> None:
        self.owner[name] = stream
        self._add(index, f"allocate {name}", Kind.ALLOCATE, stream, writes=[name])

    def _add(
        self,
        index: int | None,
        name: str,
        kind: Kind,
        stream: str,
        action: Action | None = None,
        *,
        reads: Iterable[Storage] = (),
        writes: Iterable[Storage] = (),
        event: int | None = None,
    ) -> None:
        operation = Operation(
            name, kind, stream, frozenset(reads), frozenset(writes), event, action
        )
        self._enqueue(index, operation)

    def _enqueue(self, index: int | None, operation: Operation) -> None:
        if operation.action is not None:
            self.first.setdefault(operation.action, len(self.operations))
        self.steps.append(None if index is None else index + 1)
        self.operations.append(operation)


def _landing_places(program: Program, values: PhaseModel) -> dict[int, list[str]]:
    """Per step the landing buffers that the host allocates before it.

    A buffer is the compute stream's, so the host allocates it before the record that the sending
    stream waits for; without such a wait, directly before the send.
    """
    recorded: dict[int, tuple[int, str]] = {}
    waited: dict[str, int] = {}
    places: defaultdict[int, list[str]] = defaultdict(list)
    for index, step in enumerate(program.steps):
        match step:
            case Record(stream, event):
                recorded[event] = index, stream
            case Wait(stream, event):
                if event in recorded and recorded[event][1] == COMP:
                    waited[stream] = max(waited.get(stream, -1), recorded[event][0])
            case Run(stream, action, _) if action.half is Half.SEND:
                _, landing = values.buffers(action)
                if landing in values.of(action).writes:
                    place = index if stream == COMP else waited.get(stream, index)
                    if landing not in places[place]:
                        places[place].append(landing)
    return places
