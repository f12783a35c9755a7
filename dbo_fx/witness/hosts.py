"""From program texts to queues: where the host allocates, frees, sends and receives.

Memory of a rank is one list of words. Every stream has its own pool: what is freed goes on top of
it and is handed out next (last in, first out), to values of that stream only. A free is a task of
the stream that owns the memory and overwrites it at once. Compute results come from the pool of
the stream that computes them; landing buffers from the compute stream's, before the record that
the send's wait refers to. So the addresses are known before anything runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard

from dbo_fx import ir
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMP, Action, Half
from dbo_fx.witness.interleave import Cell, Host, Plan, Task
from dbo_fx.witness.model import (
    NEVER,
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
    start,
)
from dbo_fx.witness.transports import Channel, counts_flights, touched_slots

if TYPE_CHECKING:
    from operator import itemgetter as Getter


@dataclass(frozen=True)
class Region:
    """One call of a program, or a failed one.

    Attributes:
        programs: One per rank, or one for all.
        captured: Under CUDA graph capture, so no step may block the host.
        stop_after: Fail behind this many sends; a captured region that fails has run nothing.
        realign: After a failure the transport goes back to slot 0.
    """

    programs: ir.Program | Sequence[ir.Program]
    captured: bool = False
    stop_after: int | None = None
    realign: bool = True

    def program(self, rank: int) -> ir.Program:
        """The program of a rank."""
        found = self.programs
        return found if isinstance(found, ir.Program) else found[rank]


@dataclass
class World:
    """Memory, transports and results of all ranks in one run."""

    memory: list[list[int]]
    channels: dict[tuple[int, str], Channel]
    results: dict[tuple[int, int], int] = field(default_factory=dict)
    problem: str | None = None
    wrong: str | None = None
    done: list[bool] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or text


@dataclass(slots=True)
class Part:
    """One rank's part of a collective: what it gives, and what it does with what it gets."""

    label: str
    gather: Getter[Any]
    deliver: Callable[[World, Words], None]


def exchange(world: World, parts: Sequence[Task]) -> None:
    """Give every rank what all ranks gave; ranks that mean different collectives are a problem."""
    labels = [task.payload.label for task in parts]
    if len(set(labels)) > 1:
        met = ", ".join(f"rank {t.rank} at {t.payload.label}" for t in parts)
        world.fail(f"ranks meet at different collectives over {parts[0].meets}: {met}")
    words = tuple(w for t in parts for w in t.payload.gather(world.memory[t.rank]))
    for task in parts:
        task.payload.deliver(world, words)


class RankHost:
    """Walks one rank's programs and enqueues what they say."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shape: Shape,
        contract: Contract,
        expected: Expected,
        communicator_of: Communicators,
        exclusive: bool,
    ) -> None:
        """Nothing is enqueued yet."""
        self.host = Host(plan, rank, exclusive)
        self.rank, self.shape, self.contract, self.expected = rank, shape, contract, expected
        self.communicator_of = communicator_of
        self.memory = list(NEVER)
        self.problems: list[str] = []
        self.communicators: set[str] = set()
        self.index: defaultdict[str, int] = defaultdict(int)  # The transport's own slot counter.
        self.calls = 0
        self._blocks: dict[Value, int] = {}
        self._owner: dict[int, str] = {}
        self._pools: defaultdict[str, list[int]] = defaultdict(list)
        self._in_flight: dict[tuple[str, object, int | None], tuple[Action, int, int | None]] = {}
        self._flights = 0
        self._ended: Task | None = None

    def call(self, region: Region) -> None:
        """Enqueue a region, from the caller's inputs to what the caller reads."""
        program = region.program(self.rank)
        if region.captured and region.stop_after is not None:
            self._count_only(program, region)
            return
        steps = program.steps
        if region.stop_after is not None:
            steps = steps[: _behind_sends(steps, region.stop_after)]
        self._begin()
        walk = _Walk(self, steps, region.captured)
        walk.run()
        if region.stop_after is None:
            self._end()
        else:
            self._abandon(region.realign)

    def address(self, value: Value) -> int:
        """Where a value lies; values that nobody wrote lie where nobody writes."""
        return self._blocks.get(value, 0)

    def cells(self, values: Iterable[Value]) -> list[Cell]:
        """The memory of values, as cells."""
        found = (self.address(v) for v in values)
        return [(self.rank, a) for a in found if a]

    def gather(self, values: Iterable[Value]) -> Getter[Any]:
        """Reads all words of some values from a memory."""
        bases = [self.address(v) for v in values] or [0]
        return itemgetter(*(b + i for b in bases for i in range(WORDS)))

    def allocate(self, value: Value, stream: str) -> int:
        """Give a value memory of a stream, unless it has some."""
        if value in self._blocks:
            return self._blocks[value]
        pool = self._pools[stream]
        if pool:
            base = pool.pop()
        else:
            base = len(self.memory)
            self.memory += POISON
        self._blocks[value] = base
        self._owner[base] = stream
        return base

    def poison(self, value: Value, why: str) -> None:
        """Overwrite a value's memory, in the order of the stream that owns it."""
        base, rank = self._blocks[value], self.rank

        def act(world: World) -> None:
            world.memory[rank][base : base + WORDS] = POISON

        self.host.run(self._owner[base], f"{why} {text(value)}", act, (), [(rank, base)])

    def free(self, value: Value) -> None:
        """Give a value's memory back; the next allocation of its stream gets it."""
        if value in self._blocks:
            self.poison(value, "free")
            base = self._blocks.pop(value)
            self._pools[self._owner[base]].append(base)

    def send_slot(self, communicator: str, said: int | None, number: int, name: str) -> int | None:
        """The slot that a send uses, which must be the transport's own next one."""
        slots = self.contract.slots
        if slots is None:
            return None
        real = self.index[communicator] % slots
        self.index[communicator] += 1
        slot = number % slots if said is None else said
        if slot != real:
            self.problems.append(
                f"{name} on rank {self.rank} takes slot {slot}, the transport is at slot {real}"
            )
        return slot

    def launch(self, communicator: str, action: Action, slot: int | None) -> int:
        """Enter a send into the table of what is in flight; its identity."""
        key = (communicator, action.phase, action.microbatch)
        if key in self._in_flight:
            self.problems.append(f"{action.bound()} is sent with {key[1]} of m{key[2]} in flight")
        self._flights += 1
        self._in_flight[key] = (action.communication, self._flights, slot)
        return self._flights

    def retire(self, communicator: str, action: Action) -> tuple[int, int | None]:
        """Take a recv's send off the table: its identity and slot."""
        found = self._in_flight.pop((communicator, action.phase, action.microbatch), None)
        if found is None:
            self.problems.append(f"{action.bound()} without a send before it on the host")
            return 0, None
        sent, identity, slot = found
        if sent != action.communication:
            self.problems.append(f"{action.bound()} receives {sent.bound()}")
        return identity, slot

    def _count_only(self, program: ir.Program, region: Region) -> None:
        """A failed capture runs nothing, but the transport has counted its operations."""
        behind = _behind_sends(program.steps, region.stop_after or 0)
        for step in program.steps[:behind]:
            if is_send(step):
                self.index[self.communicator_of(step.action) or ""] += 1
        if region.realign:
            self.index.clear()

    def _begin(self) -> None:
        rank, written = self.rank, []
        for value in self._live_in():
            base = self.allocate(value, "caller")
            written.append((base, start(value, rank)))

        def act(world: World) -> None:
            memory = world.memory[rank]
            for base, words in written:
                memory[base : base + WORDS] = words

        self.host.run(COMP, "begin", act, (), [(rank, base) for base, _ in written])

    def _live_in(self) -> list[Value]:
        inputs = [("input", m, -1) for m in range(self.shape.microbatches)]
        return inputs + [("cache", -1, layer) for layer in range(self.shape.layers)]

    def _end(self) -> None:
        for action, _, _ in self._in_flight.values():
            self.problems.append(f"{action.bound()} is sent and never received")
        self._in_flight.clear()
        rank, call, results = self.rank, self.calls, self.shape.results()
        gather, tails, plan = self.gather(results), self.host.tails(COMP), self.host.plan
        inputs = [self.address(v) for v in self._live_in() if v[0] == "input"]

        def act(world: World) -> None:
            pending = next((i for i in tails if not world.done[i]), None)
            if pending is not None:
                world.fail(f"the caller goes on while {plan.text(pending)} has not run")
            memory = world.memory[rank]
            world.results[call, rank] = hash(gather(memory))
            for base in inputs:
                memory[base : base + WORDS] = POISON

        # What must be done before the caller goes on conflicts with the end.
        for index in tails:
            task = plan.tasks[index]
            task.reads |= {("end", rank, call)}
        cells: list[Cell] = [(rank, base) for base in inputs]
        self.host.run(COMP, "end", act, self.cells(results), [*cells, ("end", rank, call)])
        self._free_all()
        self.calls += 1
        for communicator, count in self.index.items():
            if count % self.contract.parity == 0:  # A whole region: the next starts at slot 0.
                self.index[communicator] = 0

    def _abandon(self, realign: bool) -> None:
        """An exception unwinds: references go, the device is waited for."""
        self._in_flight.clear()
        for stream in {self.host.plan.names[t.queue][1] for t in self.host.plan.tasks}:
            if stream != COMP:
                self.host.record(stream, -1)
                self.host.wait(COMP, -1)
        self._free_all()
        if realign:
            self.index.clear()

    def _free_all(self) -> None:
        persistent = set(self._live_in())
        for value in [v for v in self._blocks if v not in persistent]:
            self.free(value)


@dataclass
class _Walk:
    """One walk over the steps of a program."""

    rank_host: RankHost
    steps: Sequence[ir.Step]
    captured: bool

    def __post_init__(self) -> None:
        self.host, self.rank = self.rank_host.host, self.rank_host.rank
        self.shape, self.contract = self.rank_host.shape, self.rank_host.contract
        self.capturing = {COMP}
        self.captured_events: set[int] = set()
        self.sends: defaultdict[str, int] = defaultdict(int)

    def run(self) -> None:
        landings = self._landings()
        ends = self._last_uses()
        for index, step in enumerate(self.steps):
            for value in landings[index]:
                self.rank_host.allocate(value, COMP)
                self.rank_host.poison(value, "allocate")
            self._step(step)
            for value in ends[index]:
                self.rank_host.free(value)

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
            self.rank_host.problems.append(
                f"{name} on {stream} runs outside the capture: {stream} has not waited for an "
                "event of a captured stream"
            )

    def _action(self, step: ir.Run) -> None:
        action = step.action
        communicator = self.rank_host.communicator_of(action)
        if action.phase.is_communication:
            self._check_stream(step)
            if self.captured and not self.contract.capturable:
                self.rank_host.problems.append(
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
            self.rank_host.problems.append(
                f"{step.action.bound()} on {step.stream}; {contract.name} wants it on {wanted}"
            )

    def _compute(self, step: ir.Run, communicator: str | None) -> None:
        action, rank, owner = step.action, self.rank, self.rank_host
        reads, writes = self.shape.reads(action), self.shape.writes(action)
        gather, cells = owner.gather(reads), owner.cells(reads)
        seed, name, where = salt(action, rank), action.bound(), step.stream
        targets = []
        for index, value in enumerate(writes):
            base = owner.allocate(value, where)
            targets.append((index, value, base, owner.expected.written.get((rank, action, value))))

        def deliver(world: World, words: Words) -> None:
            memory = world.memory[rank]
            for index, value, base, wanted in targets:
                found = computed(seed, index, words)
                memory[base : base + WORDS] = found
                if found != wanted and world.wrong is None:
                    world.wrong = f"{name} on rank {rank} makes a wrong {text(value)}"

        def act(world: World) -> None:
            deliver(world, gather(world.memory[rank]))

        written = owner.cells(writes)
        if communicator is None:
            self.host.run(where, name, act, cells, written)
        else:
            owner.communicators.add(communicator)
            part = Part(name, gather, deliver)
            self.host.meet(where, name, communicator, part, cells, written)

    def _send(self, step: ir.Run, communicator: str) -> None:
        action, rank, owner = step.action, self.rank, self.rank_host
        reads, (landing,) = self.shape.reads(action), self.shape.writes(action)
        gather, seed, name = owner.gather(reads), salt(action, rank), action.bound()
        base, number = owner.allocate(landing, COMP), self.sends[communicator]
        self.sends[communicator] += 1
        owner.communicators.add(communicator)
        slot = owner.send_slot(communicator, getattr(step, "slot", None), number, name)
        identity = owner.launch(communicator, action, slot)
        key = (rank, communicator)

        def deliver(world: World, words: Words) -> None:
            channel, data = world.channels[key], computed(seed, 0, words)
            channel.send(identity, name, slot, data)
            shown = POISON if channel.is_hidden else data
            world.memory[rank][base : base + WORDS] = shown

        touched = self._transport_cells(communicator, identity, touched_slots(self.contract, slot))
        written = [*owner.cells([landing]), *touched]
        part = Part(name, gather, deliver)
        self.host.meet(step.stream, name, communicator, part, owner.cells(reads), written)

    def _recv(self, step: ir.Run, communicator: str) -> None:
        action, rank, owner = step.action, self.rank, self.rank_host
        (landing,) = self.shape.writes(action)
        gather, base = owner.gather([landing]), owner.address(landing)
        seed, name, key = salt(action, rank), action.bound(), (rank, communicator)
        identity, slot = owner.retire(communicator, action)
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
        cells = owner.cells([landing])
        held = () if slot is None else (slot,)
        written = [*cells, *self._transport_cells(communicator, identity, held)]
        self.host.run(step.stream, name, act, cells, written, self.contract.blocks_host)

    def _merge(self, stream: str) -> None:
        owner, rank = self.rank_host, self.rank
        reads = self.shape.outputs()
        gather, cells = owner.gather(reads), owner.cells(reads)
        base = owner.allocate(RESULT, stream)

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


def _behind_sends(steps: Sequence[ir.Step], count: int) -> int:
    """Number of steps up to and with the given send, counted from 1; 0 steps for 0 sends."""
    places = [index for index, step in enumerate(steps) if is_send(step)]
    if count <= 0:
        return 0
    return places[count - 1] + 1 if count <= len(places) else len(steps)


def text(value: Value) -> str:
    """`h_m0@3`."""
    name, m, layer = value
    return name + ("" if m < 0 else f"_m{m}") + ("" if layer < 0 else f"@{layer}")
