"""What a test is about, as a program: programs, schedules, their texts and files, compilations."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dbo_fx.certificates.certificate import Certificate
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import OverlapReport, overlap_report
from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError
from dbo_fx.inspect.subjects import read_subject
from dbo_fx.ir import Program, Schedule
from dbo_fx.ir_bind import bound_program
from dbo_fx.subjects import LAYERS, MICROBATCHES, TRANSPORT


class Scheduled(Protocol):
    """A `CompiledProgram`, or the `State` behind a pass."""

    @property
    def program(self) -> Program | None:
        """The bound program, once there is one."""

    @property
    def certificate(self) -> Certificate | None:
        """What was proven, once it was."""


Subject = Program | Schedule | Scheduled | str | Path


def named(subject: Subject) -> Program | Schedule:
    """Read what is named.

    Args:
        subject: A program, a schedule or something scheduled; the text of a program or schedule; a
            schedule's name; or the path of a `.dbo` file. A program may be wrong.

    Raises:
        ScheduleError: The text cannot be read or is malformed.
        OptionError: It is something else, or nothing has scheduled it yet.
    """
    found = read_subject(subject)
    if isinstance(found, Program | Schedule):
        return found
    program = getattr(found, "program", None)
    if isinstance(program, Program):
        return program
    if hasattr(found, "program"):
        raise OptionError(
            f"this {type(found).__name__} has no program yet: run the passes up to Streams"
        )
    raise OptionError(
        f"found a {type(found).__name__}; wanted a compiled program, an ir.Program, a schedule, "
        "their text, or the path of a .dbo file"
    )


def program_of(
    subject: Subject,
    *,
    layers: int = LAYERS,
    microbatches: int | None = None,
    over: str = TRANSPORT,
) -> Program:
    """The program that a subject is, has or makes.

    Args:
        subject: See `named`.
        layers: How many layers a schedule is laid over.
        microbatches: Of how many microbatches, for schedules that take any number.
        over: The transport that a schedule is bound for.

    Raises:
        ScheduleError: See `named`.
        OptionError: See `named`.
    """
    found = named(subject)
    if isinstance(found, Program):
        return found
    count = microbatches
    if count is None and found.num_microbatches is None:
        count = MICROBATCHES
    return bound_program(found, layers, contract(over), count)


def overlap_of(subject: Subject, program: Program) -> OverlapReport:
    """What can run beside each communication.

    Args:
        subject: See `named`; of something certified the graph's own report is taken, op by op.
        program: What `program_of` made of it.
    """
    certificate = getattr(subject, "certificate", None)
    if isinstance(certificate, Certificate):
        return certificate.overlap
    return overlap_report(execution_of_program(program))
