"""From the steps of a program to tasks: what the host does at every step of one call.

Compute results come from the pool of the stream that computes them; landing buffers from the
compute stream's, before the record that the send waits for. A value is given back behind the last
step that names it. What is wrong on every run is noted while walking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard

from dbo_fx import ir
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMP, Half
from dbo_fx.witness.interleave import Cell, Host
from dbo_fx.witness.memory import Part, RankMemory, World
from dbo_fx.witness.model import (
    POISON,
    RESULT,
    WORDS,
    Communicators,
    Expected,
    Shape,
    Value,
    Words,
    computed,
    mix,
    salt,
    value_text,
)
from dbo_fx.witness.tables import Table
from dbo_fx.witness.transports import counts_flights, touched_slots


class Site(Protocol):
    """What a walk needs of the rank it runs on."""

    host: Host
    rank: int
    shape: Shape
    contract: Contract
    expected: Expected
    communicator_of: Communicators
    memory: RankMemory
    table: Table
    problems: list[str]


@dataclass
class Walk:
    """One walk over the steps of a program."""

    site: Site
    steps: Sequence[ir.Step]
    captured: bool

    def __post_init__(self) -> None:
        """Stand before the first step."""
        self.host, self.rank = self.site.host, self.site.rank
        self.shape, self.contract = self.site.shape, self.site.contract
        self.capturing = {COMP}
        self.captured_events: set[int] = set()
        self.sends: defaultdict[str, int] = defaultdict(int)

    def run(self) -> None:
        """Enqueue all steps, and the allocations and frees between them."""
        landings = self._landings()
        ends = self._last_uses()
        for index, step in enumerate(self.steps):
            for value in landings[index]:
                self.site.memory.allocate(value, COMP)
                self.site.memory.poison(value, "allocate")
            self._step(step)
            for value in ends[index]:
                self.site.memory.free(value)

    def _step(self, step: ir.Step) -> None:
        match step:
            case ir.Record(stream, event):
                self.host.record(stream, event)
                if stream in self.capturing:
                    self.captured_events.add(event)
                else:
                    self.captured_events.discard(event)
            case ir.Wait(stream, event):
                self.host.wait(stream, event)
                if event in self.captured_events:
                    self.capturing.add(stream)
            case ir.Merge(stream):
                self._in_capture(stream, "merge")
                self._merge(stream)
            case ir.Run():
                self._in_capture(step.stream, step.action.bound())
                self._action(step)

    def _in_capture(self, stream: str, name: str) -> None:
        if self.captured and stream not in self.capturing:
            self.site.problems.append(
                f"{name} on {stream} runs outside the capture: {stream} has not waited for an "
                "event of a captured stream"
            )

    def _action(self, step: ir.Run) -> None:
        action = step.action
        communicator = self.site.communicator_of(action)
        if action.phase.is_communication:
            self._check_stream(step)
            if self.captured and not self.contract.capturable:
                self.site.problems.append(
                    f"{action.bound()}: {self.contract.name} may not run under capture"
                )
            if action.half is Half.RECV:
                self._recv(step, communicator or "")
            else:
                self._send(step, communicator or "")
        else:
            self._compute(step, communicator)

    def _check_stream(self, step: ir.Run) -> None:
        contract, is_recv = self.contract, step.action.half is Half.RECV
        wanted = contract.recv_stream if is_recv else contract.send_stream
        if step.stream != wanted:
            self.site.problems.append(
                f"{step.action.bound()} on {step.stream}; {contract.name} wants it on {wanted}"
            )

    def _compute(self, step: ir.Run, communicator: str | None) -> None:
        action, rank, owner = step.action, self.rank, self.site
        reads, writes = self.shape.reads(action), self.shape.writes(action)
        gather, cells = owner.memory.gather(reads), owner.memory.cells(reads)
        seed, name, where = salt(action, rank), action.bound(), step.stream
        targets = []
        for index, value in enumerate(writes):
            base = owner.memory.allocate(value, where)
            targets.append((index, value, base, owner.expected.written.get((rank, action, value))))

        def deliver(world: World, words: Words) -> None:
            memory = world.memory[rank]
            for index, value, base, wanted in targets:
                found = computed(seed, index, words)
                memory[base : base + WORDS] = found
                if found != wanted and world.wrong is None:
                    world.wrong = f"{name} on rank {rank} makes a wrong {value_text(value)}"

        def act(world: World) -> None:
            deliver(world, gather(world.memory[rank]))

        written = owner.memory.cells(writes)
        if communicator is None:
            self.host.run(where, name, act, cells, written)
        else:
            part = Part(name, gather, deliver)
            self.host.meet(where, name, communicator, part, cells, written)

    def _send(self, step: ir.Run, communicator: str) -> None:
        action, rank, owner = step.action, self.rank, self.site
        reads, (landing,) = self.shape.reads(action), self.shape.writes(action)
        gather, seed, name = owner.memory.gather(reads), salt(action, rank), action.bound()
        base, number = owner.memory.allocate(landing, COMP), self.sends[communicator]
        self.sends[communicator] += 1
        slot = owner.table.send_slot(communicator, getattr(step, "slot", None), number, name)
        identity = owner.table.launch(communicator, action, slot)
        key = (rank, communicator)

        def deliver(world: World, words: Words) -> None:
            channel, data = world.channels[key], computed(seed, 0, words)
            channel.send(identity, name, slot, data)
            shown = POISON if channel.is_hidden else data
            world.memory[rank][base : base + WORDS] = shown

        touched = self._transport_cells(communicator, identity, touched_slots(self.contract, slot))
        written = [*owner.memory.cells([landing]), *touched]
        part = Part(name, gather, deliver)
        self.host.meet(step.stream, name, communicator, part, owner.memory.cells(reads), written)

    def _recv(self, step: ir.Run, communicator: str) -> None:
        action, rank, owner = step.action, self.rank, self.site
        (landing,) = self.shape.writes(action)
        gather, base = owner.memory.gather([landing]), owner.memory.address(landing)
        seed, name, key = salt(action, rank), action.bound(), (rank, communicator)
        identity, slot = owner.table.retire(communicator, action)
        said = getattr(step, "slot", None)
        slot = slot if said is None else said
        if self.captured and self.contract.blocks_host:
            owner.problems.append(f"{name} blocks the host under capture")

        def act(world: World) -> None:
            channel, memory = world.channels[key], world.memory[rank]
            data = channel.recv(identity, f"{name} on rank {rank}", slot)
            if isinstance(data, str):
                world.fail(data)
            elif channel.is_hidden:
                memory[base : base + WORDS] = computed(seed, 0, data)
            if not channel.is_hidden:
                memory[base : base + WORDS] = computed(seed, 0, gather(memory))

        if not base:  # Nothing lands: the problem is noted already.
            self.host.run(step.stream, name, lambda world: None)
            return
        cells = owner.memory.cells([landing])
        held = () if slot is None else (slot,)
        written = [*cells, *self._transport_cells(communicator, identity, held)]
        self.host.run(step.stream, name, act, cells, written, self.contract.blocks_host)

    def _merge(self, stream: str) -> None:
        owner, rank = self.site, self.rank
        reads = self.shape.outputs()
        gather, cells = owner.memory.gather(reads), owner.memory.cells(reads)
        base = owner.memory.allocate(RESULT, stream)

        def act(world: World) -> None:
            memory = world.memory[rank]
            memory[base : base + WORDS] = mix(rank, *gather(memory))

        self.host.run(stream, "merge", act, cells, [(rank, base)])

    def _transport_cells(
        self, communicator: str, identity: int, slots: Iterable[int]
    ) -> list[Cell]:
        rank = self.rank
        cells: list[Cell] = [("flight", rank, identity)]
        cells += [("slot", rank, communicator, slot) for slot in slots]
        if counts_flights(self.contract):
            cells.append(("channel", rank, communicator))
        return cells

    def _landings(self) -> defaultdict[int, list[Value]]:
        """Landing buffers by the step before which the host allocates them.

        That is before the latest of the compute stream's records that the sending stream has
        waited for: what stands before it, the send may use.
        """
        recorded: dict[int, tuple[str, int]] = {}
        behind: dict[str, int] = {}
        found: defaultdict[int, list[Value]] = defaultdict(list)
        for index, step in enumerate(self.steps):
            if isinstance(step, ir.Record):
                recorded[step.event] = (step.stream, index)
            elif isinstance(step, ir.Wait):
                stream, at = recorded.get(step.event, ("", -1))
                if stream == COMP:
                    behind[step.stream] = max(at, behind.get(step.stream, -1))
            elif is_send(step):
                here = index if step.stream == COMP else behind.get(step.stream, index)
                found[here] += self.shape.writes(step.action)
        return found

    def _last_uses(self) -> defaultdict[int, list[Value]]:
        """Values by the step behind which the host lets go of them."""
        last: dict[Value, int] = {}
        for index, step in enumerate(self.steps):
            for value in self._named(step):
                last[value] = index
        kept = {RESULT, *self.shape.results()}
        found: defaultdict[int, list[Value]] = defaultdict(list)
        for value, index in last.items():
            if value not in kept and value[0] not in ("input", "cache"):
                found[index].append(value)
        return found

    def _named(self, step: ir.Step) -> Iterable[Value]:
        match step:
            case ir.Run():
                return (*self.shape.reads(step.action), *self.shape.writes(step.action))
            case ir.Keepalive(_, action):
                return self.shape.kept(replace(action, half=None))
            case ir.Merge():
                return self.shape.outputs()
        return ()


def is_send(step: ir.Step) -> TypeGuard[ir.Run]:
    """Whether a step launches a communication."""
    if not isinstance(step, ir.Run):
        return False
    return step.action.phase.is_communication and step.action.half is not Half.RECV
