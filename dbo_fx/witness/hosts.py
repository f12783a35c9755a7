"""From calls of programs to queues: the caller's side, and the transport's state between calls.

What the caller reads at the end is compared with the reference; at that moment it also overwrites
its inputs, and everything that the call has enqueued must have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbo_fx import ir
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMP
from dbo_fx.witness.interleave import Cell, Host, Plan
from dbo_fx.witness.memory import RankMemory, World
from dbo_fx.witness.model import POISON, WORDS, Communicators, Expected, Shape, Value, start
from dbo_fx.witness.steps import Walk, is_send
from dbo_fx.witness.tables import Table


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


class RankHost:
    """One rank's host: calls programs one after the other.

    Args:
        plan: Where tasks go.
        rank: The rank.
        shape: What the programs compute.
        contract: The transport's contract.
        expected: What the reference computes.
        communicator_of: The communicator of an action.
        exclusive: Whether a device runs one collective at a time.
    """

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
        self.problems: list[str] = []
        self.memory = RankMemory(self.host, rank)
        self.table = Table(contract, rank, self.problems)
        self.calls = 0

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
        Walk(self, steps, region.captured).run()
        if region.stop_after is None:
            self._end()
        else:
            self._abandon(region.realign)

    def _count_only(self, program: ir.Program, region: Region) -> None:
        """A failed capture runs nothing, but the transport has counted its operations."""
        behind = _behind_sends(program.steps, region.stop_after or 0)
        for step in program.steps[:behind]:
            if is_send(step):
                self.table.count(self.communicator_of(step.action) or "")
        self.table.abandon(region.realign)

    def _begin(self) -> None:
        rank, written = self.rank, []
        for value in self._live_in():
            base = self.memory.allocate(value, "caller")
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
        self.table.end()
        rank, call, results = self.rank, self.calls, self.shape.results()
        gather, tails, plan = self.memory.gather(results), self.host.tails(COMP), self.host.plan
        inputs = [self.memory.address(v) for v in self._live_in() if v[0] == "input"]

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
        self.host.run(COMP, "end", act, self.memory.cells(results), [*cells, ("end", rank, call)])
        self._free_all()
        self.calls += 1

    def _abandon(self, realign: bool) -> None:
        """An exception unwinds: references go, the device is waited for."""
        for stream in {self.host.plan.names[t.queue][1] for t in self.host.plan.tasks}:
            if stream != COMP:
                self.host.record(stream, -1)
                self.host.wait(COMP, -1)
        self._free_all()
        self.table.abandon(realign)

    def _free_all(self) -> None:
        persistent = set(self._live_in())
        for value in [v for v in self.memory.blocks if v not in persistent]:
            self.memory.free(value)


def _behind_sends(steps: Sequence[ir.Step], count: int) -> int:
    """Number of steps up to and with the given send, counted from 1; 0 steps for 0 sends."""
    places = [index for index, step in enumerate(steps) if is_send(step)]
    if count <= 0:
        return 0
    return places[count - 1] + 1 if count <= len(places) else len(steps)
