"""What `dbo-fx check` does: certify a program, a schedule or a model, or say why not.

Programs and schedules are checked in the phase model, without torch. Models are compiled for
pretended ranks, and their own certificate is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dbo_fx import schedules
from dbo_fx.certificates import hazards
from dbo_fx.certificates.certificate import Certificate
from dbo_fx.certificates.counterexample import Counterexample
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import overlap_report
from dbo_fx.certificates.ranks import prove_plan
from dbo_fx.contracts import contract
from dbo_fx.errors import DboError, OptionError, Refutation, VerificationError
from dbo_fx.ir import Program, Schedule, parse_program, parse_schedule
from dbo_fx.ir_bind import bound_program
from dbo_fx.ir_schedule import significant_lines

LAYERS = 2
MICROBATCHES = 2
TRANSPORT = "nccl"
RANKS = 2
_HEADER_LINES = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What to check.

    Attributes:
        what: A program file, a schedule's name or file, or `module:callable`.
        ranks: R, how many ranks run it.
        captured: It is to run under CUDA graph capture.
        layers: How many layers to lay a schedule over.
        microbatches: For schedules that take any number of them.
        transport: What carries a schedule's communication.
        schedule: For a model, by name.
        dim: For a model: dim of the tensor arguments that is split; None where it marks them.
    """

    what: str
    ranks: int = RANKS
    captured: bool = False
    layers: int | None = None
    microbatches: int | None = None
    transport: str | None = None
    schedule: str | None = None
    dim: int | None = 0

    @property
    def is_model(self) -> bool:
        """Whether it names a callable and not a text."""
        return ":" in self.what and not self.what.endswith(schedules.SUFFIX)

    def refuse(self, why: str, *names: str) -> None:
        """Refuse options that mean nothing for what is checked.

        Raises:
            OptionError: One of the named options is given.
        """
        given = [f"--{name}" for name in names if getattr(self, name) is not None]
        if given:
            raise OptionError(f"{self.what} is {why}; leave {' and '.join(given)} out")


@dataclass(frozen=True, slots=True)
class Checked:
    """What came out.

    Attributes:
        what: What was checked.
        certificate: What was proven; None if it is refused.
        refusal: Why it is refused.
        counterexample: The same as a value, where the verifier found one.
    """

    what: str
    certificate: Certificate | None
    refusal: str = ""
    counterexample: Refutation | None = None

    @property
    def certified(self) -> bool:
        """Whether everything was proven."""
        return self.certificate is not None

    def __str__(self) -> str:
        """The certificate part by part, or the counterexample."""
        if self.certificate is None:
            return self.refusal
        return str(self.certificate)

    @property
    def summary(self) -> str:
        """One line."""
        if self.certified:
            return f"{self.what} is certified"
        if self.counterexample is not None:
            return f"{self.what} is refused: {self.counterexample.rule}"
        return f"{self.what} is refused: {self.refusal.splitlines()[0]}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        proven, shown = self.certificate, self.counterexample
        return {
            "certified": self.certified,
            "certificate": None if proven is None else proven.to_json(),
            "counterexample": None if shown is None else shown.to_json(),
        }


def check(request: Request) -> Checked:
    """Certify what is asked for, or refuse it with the shortest counterexample.

    Args:
        request: What to check, and for what.

    Returns:
        The certificate or the counterexample.

    Raises:
        ScheduleError: The text cannot be read or is malformed.
        OptionError: The options do not fit what is checked, or a model cannot be loaded.
    """
    if request.is_model:
        return check_model(request)
    request.refuse("no model", "schedule")
    text = schedules.read(request.what)
    subject = _parsed(text, request.what)
    if not isinstance(subject, Program):
        transport = contract(request.transport or TRANSPORT)
        count = request.microbatches
        if count is None and subject.num_microbatches is None:
            count = MICROBATCHES
        layers = LAYERS if request.layers is None else request.layers
        return check_program(bound_program(subject, layers, transport, count), request)
    request.refuse("a program already", "layers", "microbatches", "transport")
    lines = tuple(number for number, _ in significant_lines(text)[_HEADER_LINES:])
    return check_program(subject, request, lines)


def _parsed(text: str, source: str) -> Schedule | Program:
    """Wrong programs too: to say why they are wrong is what this command is for."""
    lines = significant_lines(text)
    if lines and lines[0][1].split()[0] == "program":
        return parse_program(text, source, allow_wrong=True)
    return parse_schedule(text, source)


def check_program(program: Program, request: Request, lines: tuple[int, ...] = ()) -> Checked:
    """Certify a program in the phase model.

    Args:
        program: Any program, also a wrong one.
        request: Name, ranks and capture.
        lines: Per step the number of its line in the text.

    Raises:
        OptionError: No transport has the name in the program's header.
    """
    execution = execution_of_program(program)
    execution = replace(execution, source=Path(request.what).name, lines=lines)
    try:
        proven = hazards.prove(execution, request.captured)
        ranks = prove_plan({"split": execution}, ranks=request.ranks)
        return Checked(request.what, Certificate(proven, ranks, overlap_report(execution)))
    except VerificationError as error:
        return _refused(request, error)


def check_model(request: Request) -> Checked:
    """Compile a model for pretended ranks and take the certificate of its program.

    Raises:
        OptionError: The model cannot be loaded, or the options do not fit.
    """
    request.refuse("a model", "layers", "microbatches", "transport")
    # Programs and schedules are checked without torch.
    from dbo_fx.backend import compile_captured
    from dbo_fx.capture import trace
    from dbo_fx.explain import load, pretended_ranks
    from dbo_fx.options import Options

    options = Options() if request.schedule is None else Options(schedule=request.schedule)
    with pretended_ranks(request.ranks):
        try:
            model, args, kwargs = load(request.what)
            captured = trace(model, args, kwargs, mark=request.dim)
        except OptionError:
            raise
        except DboError as error:
            return _refused(request, error)
        except Exception as error:  # The user's code may fail in any way.
            raise OptionError(f"{request.what} fails: {type(error).__name__}: {error}") from error
        try:
            compiled = compile_captured(captured, options)
        except OptionError:
            raise
        except DboError as error:
            return _refused(request, error)
    proven = compiled.certificate
    if request.captured and not proven.hazards.capturable:
        return _not_capturable(request, proven.hazards.reason)
    return Checked(request.what, proven)


def _not_capturable(request: Request, reason: str) -> Checked:
    fix = "run it eagerly, or over another transport"
    shown = Counterexample("capture", request.what, None, None, None, reason, fix, "")
    return Checked(request.what, None, str(shown), shown)


def _refused(request: Request, error: DboError) -> Checked:
    shown = error.counterexample if isinstance(error, VerificationError) else None
    return Checked(request.what, None, str(error), shown)
