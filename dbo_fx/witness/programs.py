"""The witness for program texts: run them, under any legal interleaving, and compare.

`ProgramWitness` shares no code with the verifier. It proves nothing by argument: it enqueues what
the hosts of R ranks would enqueue (`hosts`), runs the queues in some legal order (`interleave`,
`explore`) on real memory in which freed and in-flight data is overwritten, and compares what the
caller reads with the reference (`model`).

A `recv` that blocks the host on CPU narrows the legal interleavings by accident. Programs must not
rely on that, so hosts run ahead; one extra run has them wait, because waiting can deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbo_fx import ir
from dbo_fx.contracts import Contract
from dbo_fx.contracts import contract as contract_of
from dbo_fx.witness.explore import Run
from dbo_fx.witness.hosts import RankHost, Region
from dbo_fx.witness.interleave import Machine, Plan
from dbo_fx.witness.memory import World, exchange
from dbo_fx.witness.model import (
    Communicators,
    Expected,
    Shape,
    expert_communicator,
    reference,
)
from dbo_fx.witness.runs import Outcome, Witness
from dbo_fx.witness.transports import Channel


class ProgramWitness(Witness):
    """Executes program texts.

    Args:
        program: The program of every rank, or one per rank.
        contract: The transport's contract; by default that of the name in the program's header.
        ranks: How many ranks; a sequence of programs says it itself.
        capture: Whether the program runs under CUDA graph capture.
        reference: The undamaged program, which says what should be computed; by default whatever
            any microbatch of any rank does.
        communicator_of: The communicator of an action, None for one that does not communicate.
        calls: How often the program runs, one call after the other; by default twice for
            transports with slots, where the first call must leave the second its start slot.
    """

    def __init__(
        self,
        program: ir.Program | Sequence[ir.Program],
        contract: Contract | None = None,
        ranks: int = 2,
        capture: bool = False,
        *,
        reference: ir.Program | None = None,
        communicator_of: Communicators = expert_communicator,
        calls: int | None = None,
    ) -> None:
        """Enqueue everything; nothing runs yet."""
        first = program if isinstance(program, ir.Program) else program[0]
        self.contract = contract or contract_of(first.transport)
        if calls is None:
            calls = 1 if self.contract.slots is None else 2
        if not isinstance(program, ir.Program):
            ranks = len(program)
        regions = [Region(program, captured=capture)] * calls
        self._build(regions, ranks, reference, communicator_of)

    @classmethod
    def run_regions(
        cls,
        regions: Sequence[Region],
        contract: Contract | None = None,
        ranks: int = 2,
        *,
        reference: ir.Program | None = None,
        communicator_of: Communicators = expert_communicator,
    ) -> ProgramWitness:
        """A witness for several regions in a row; the transport's state lives on.

        Args:
            regions: In order; those that are to fail say after how many sends.
            contract: The transport's contract.
            ranks: How many ranks.
            reference: The undamaged program.
            communicator_of: The communicator of an action.
        """
        witness = cls.__new__(cls)
        witness.contract = contract or contract_of(regions[0].program(0).transport)
        witness._build(regions, ranks, reference, communicator_of)
        return witness

    def _build(
        self,
        regions: Sequence[Region],
        ranks: int,
        undamaged: ir.Program | None,
        communicator_of: Communicators,
    ) -> None:
        programs = [r.program(rank) for r in regions for rank in range(ranks)]
        programs = list({id(p): p for p in programs}.values())
        self.host_blocks = self.contract.blocks_host
        shape = Shape.of([undamaged] if undamaged else programs)
        self.expected: Expected = reference(shape, ranks, communicator_of)
        over = {communicator_of(a) for p in programs for a in p.actions}
        self.communicators = {c or "" for c in over}
        self.plan = Plan(ranks, exchange)
        self.hosts = [
            RankHost(
                self.plan,
                r,
                shape,
                self.contract,
                self.expected,
                communicator_of,
                len(over - {None}) > 1,
            )
            for r in range(ranks)
        ]
        for host in self.hosts:
            for region in regions:
                host.call(region)
        self.problems = [p for host in self.hosts for p in host.problems]

    def fresh(self, blocking: bool = False) -> Machine:
        """A machine at the start, with memory of its own."""
        channels = {
            (h.rank, c): Channel(self.contract) for h in self.hosts for c in self.communicators
        }
        world = World([list(h.memory.words) for h in self.hosts], channels)
        machine = Machine(self.plan, world, blocking)
        world.done = machine.done
        return machine

    def outcome(self, run: Run) -> Outcome:
        """Compare what a run left with the reference."""
        world, wanted = run.machine.world, self.expected.results
        digest = hash(tuple(sorted(world.results.items())))
        problem = self.problems[0] if self.problems else run.stuck or world.problem or ""
        if not problem:
            for (call, rank), found in sorted(world.results.items()):
                if found != wanted[rank]:
                    reason = world.wrong or "a value was damaged after it was made"
                    problem = f"wrong result of call {call} on rank {rank}: {reason}"
                    break
        return Outcome(not problem, digest, problem, tuple(run.machine.trace))
