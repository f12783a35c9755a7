"""What the verifier and the witness say of a mutant, and whether that is what it was declared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from damage import Mutant
from dbo_fx.certificates.execution import Execution
from dbo_fx.certificates.hazards import violations
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import OverlapReport, overlap_report
from dbo_fx.certificates.ranks import prove_ranks
from dbo_fx.certificates.rules import Region as ProvenRegion
from dbo_fx.certificates.rules import check_regions
from dbo_fx.contracts import Contract
from dbo_fx.errors import VerificationError
from dbo_fx.ir import Action, Phase, Program
from dbo_fx.witness import ProgramWitness, Region, Verdict
from dbo_fx.witness.model import expert_communicator


def refusal(
    programs: tuple[Program, ...],
    contract: Contract,
    *,
    captured: bool = False,
    completed: int | None = None,
    communicators: int = 1,
) -> str | None:
    """Why the verifier refuses, None if it certifies."""
    executions: dict[int, Execution] = {}
    for program in programs:
        if id(program) not in executions:
            executions[id(program)] = execution_of_program(program, contract)
    for execution in executions.values():
        found = next(violations(execution, captured), None)
        if found is not None:
            return f"{found.rule}: {found.missing}; {found.fix}"
        if completed is not None:
            failed = ProvenRegion(execution, completed, realigned=False)
            history = [failed, ProvenRegion(execution)]
            for found in check_regions(history):
                return f"{found.rule}: {found.missing}; {found.fix}"
    ranks = [_over(executions[id(p)], communicators) for p in programs]
    try:
        prove_ranks(ranks)
    except VerificationError as error:
        return str(error)
    return None


def _over(execution: Execution, communicators: int) -> Execution:
    if communicators == 1:
        return execution
    operations = tuple(
        replace(o, communicator="combines")
        if o.communicates and o.action is not None and o.action.phase is Phase.C
        else o
        for o in execution.operations
    )
    return replace(execution, operations=operations)


def two_communicators(action: Action) -> str | None:
    """Combines go over a communicator of their own."""
    return "combines" if action.phase is Phase.C else expert_communicator(action)


def witness_of(
    programs: tuple[Program, ...],
    contract: Contract,
    reference: Program,
    *,
    captured: bool = False,
    completed: int | None = None,
    communicators: int = 1,
) -> ProgramWitness:
    """The witness that runs the programs, each on a rank of its own."""
    over = two_communicators if communicators == 2 else expert_communicator
    if completed is None:
        return ProgramWitness(
            programs, contract, capture=captured, reference=reference, communicator_of=over
        )
    failed = Region(programs, captured, stop_after=completed, realign=False)
    regions = [failed, Region(programs, captured)] if completed else [Region(programs, captured)]
    return ProgramWitness.run_regions(
        regions, contract, len(programs), reference=reference, communicator_of=over
    )


@dataclass(frozen=True)
class Judgement:
    """What was said of a mutant.

    Attributes:
        mutant: The mutant.
        refusal: Why the verifier refuses, None if it certifies.
        verdict: What the witness saw.
        slower: Whether the overlap report changed; None where it was not asked.
    """

    mutant: Mutant
    refusal: str | None
    verdict: Verdict
    slower: bool | None = None

    @property
    def disagrees(self) -> str | None:
        """Who does not see what the operator declared."""
        wrong = []
        is_unsafe = self.mutant.damage.expected == "unsafe"
        if (self.refusal is not None) != is_unsafe:
            wrong.append("the verifier")
        if self.verdict.safe == is_unsafe:
            wrong.append("the witness")
        if self.slower is False:
            wrong.append("the overlap report")
        return " and ".join(wrong) or None

    def __str__(self) -> str:
        """A report that can be read without running anything again."""
        return (
            f"{self.disagrees or 'nobody'} disagrees\n{self.mutant}\n"
            f"verifier: {self.refusal or 'certified'}\nwitness: {self.verdict}\n"
            f"overlap report changed: {self.slower}"
        )


def judge(mutant: Mutant, runs: int = 40, more: int = 400) -> Judgement:
    """Ask the verifier and the witness.

    Args:
        mutant: The mutant.
        runs: Interleavings to run.
        more: Interleavings to run where the first ones show nothing wrong with an unsafe mutant.
    """
    damage, contract = mutant.damage, mutant.base.contract
    said = refusal(
        mutant.programs,
        contract,
        captured=damage.captured,
        completed=damage.completed,
        communicators=damage.communicators,
    )
    witness = witness_of(
        mutant.programs,
        contract,
        mutant.base.program,
        captured=damage.captured,
        completed=damage.completed,
        communicators=damage.communicators,
    )
    verdict = witness.confirm(more if damage.expected == "unsafe" else runs)
    slower = None
    if damage.expected == "slower":
        slower = report(damage.programs[0], contract) != report(mutant.base.program, contract)
    return Judgement(mutant, said, verdict, slower)


@lru_cache(maxsize=64)
def report(program: Program, contract: Contract) -> OverlapReport:
    """What can run beside communication."""
    return overlap_report(execution_of_program(program, contract))
