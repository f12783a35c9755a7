"""Small programs and edits of their text, for tests of what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dbo_fx import schedules
from dbo_fx.certificates.counterexample import Counterexample, shortest
from dbo_fx.certificates.hazards import violations
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.contracts import Contract
from dbo_fx.contracts import contract as contract_of
from dbo_fx.ir import Program, Step
from dbo_fx.ir_bind import bound_program


def bound(
    transport: str = "nccl", layers: int = 1, schedule: str = "mlp_shared_overlap", count: int = 2
) -> Program:
    """A shipped schedule over a transport, with the recvs where the schedule has them."""
    return bound_program(schedules.load(schedule), layers, unsunk(transport), count)


def unsunk(transport: str) -> Contract:
    """A contract under which no recv sinks, for programs that are right and not the compiler's."""
    carrier = contract_of(transport)
    return replace(carrier, recv_is="host") if carrier.sinks else carrier


def with_steps(program: Program, steps: Sequence[Step]) -> Program:
    """The program with other steps."""
    return replace(program, steps=tuple(steps))


def at(program: Program, line: str) -> int:
    """Index of the one step with this text; its two spaces may be one."""
    found = [i for i, s in enumerate(program.steps) if " ".join(str(s).split()) == line]
    assert len(found) == 1, (line, found)
    return found[0]


def without(program: Program, *lines: str) -> Program:
    """The program without steps."""
    gone = {at(program, line) for line in lines}
    return with_steps(program, [s for i, s in enumerate(program.steps) if i not in gone])


def doubled(program: Program, line: str) -> Program:
    """The program with one step twice in a row."""
    index = at(program, line)
    return with_steps(program, [*program.steps[: index + 1], *program.steps[index:]])


def moved(program: Program, line: str, before: str) -> Program:
    """The program with one step moved to directly before another."""
    index, to = at(program, line), at(program, before)
    steps = [s for i, s in enumerate(program.steps) if i != index]
    steps.insert(to - (index < to), program.steps[index])
    return with_steps(program, steps)


def changed(program: Program, line: str, step: Step) -> Program:
    """The program with another step in place of one."""
    index = at(program, line)
    return with_steps(program, [*program.steps[:index], step, *program.steps[index + 1 :]])


def rules_of(
    program: Program, contract: Contract | None = None, captured: bool = False
) -> set[str]:
    """Names of all rules that a program breaks."""
    found = violations(execution_of_program(program, contract), captured)
    return {violation.rule for violation in found}


def refusal(
    program: Program, contract: Contract | None = None, captured: bool = False
) -> Counterexample:
    """The counterexample that is shown."""
    execution = execution_of_program(program, contract)
    found = shortest(execution, violations(execution, captured))
    assert found is not None, "certified"
    return found
