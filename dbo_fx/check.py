"""What `dbo-fx check` does: certify a program, a schedule or a model, or say why not.

Programs and schedules are checked in the phase model, without torch. Models are compiled for
pretended ranks, and their own certificate is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dbo_fx.certificates import hazards
from dbo_fx.certificates.certificate import Certificate
from dbo_fx.certificates.counterexample import Counterexample
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import overlap_report
from dbo_fx.certificates.ranks import prove_plan
from dbo_fx.errors import DboError, GraphFileError, OptionError, Refutation, VerificationError
from dbo_fx.ir_program import check_form
from dbo_fx.subjects import RANKS, Bound, Request, read_program


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
            "what": self.what,
            "certified": self.certified,
            "refusal": self.refusal or None,
            "certificate": None if proven is None else proven.to_json(),
            "counterexample": None if shown is None else shown.to_json(),
        }


def check(
    request: Request, *, captured: bool = False, say: Callable[[str], None] | None = None
) -> Checked:
    """Certify what is asked for, or refuse it with the shortest counterexample.

    Args:
        request: What to check, and for what.
        captured: It is to run under CUDA graph capture.
        say: Called with what is being done.

    Returns:
        The certificate or the counterexample.

    Raises:
        ScheduleError: The text cannot be read or is malformed.
        OptionError: The options do not fit what is checked, or a model cannot be loaded.
        GraphFileError: A saved graph is damaged.
    """
    if request.kind == "text":
        return check_program(read_program(request, allow_wrong=True), request, captured)
    return check_graph(request, captured, say)


def check_program(bound: Bound, request: Request, captured: bool = False) -> Checked:
    """Certify a program in the phase model.

    Args:
        bound: Any program, also a wrong one.
        request: Name and ranks.
        captured: It is to run under CUDA graph capture.

    Raises:
        OptionError: No transport has the name in the program's header.
        ScheduleError: Nothing is unsafe, but no command would run the text: `parse_program`
            refuses it.
    """
    execution = execution_of_program(bound.program)
    execution = replace(execution, source=Path(request.what).name, lines=bound.lines)
    try:
        proven = hazards.prove(execution, captured)
        count = RANKS if request.ranks is None else request.ranks
        ranks = prove_plan({"split": execution}, ranks=count)
        certificate = Certificate(proven, ranks, overlap_report(execution))
    except VerificationError as error:
        return _refused(request, error)
    if bound.lines:
        check_form(bound.program, request.what, bound.lines)
    return Checked(request.what, certificate)


def check_graph(
    request: Request, captured: bool, say: Callable[[str], None] | None = None
) -> Checked:
    """Compile a graph, a model or a config for pretended ranks and take its certificate.

    Raises:
        OptionError: It cannot be loaded, or the options do not fit.
        GraphFileError: A saved graph is damaged.
    """
    from dbo_fx.subject_graphs import compiled_subject  # Texts are checked without torch.

    try:
        with compiled_subject(request, say or (lambda text: None)) as compiled:
            proven = compiled.certificate
    except (OptionError, GraphFileError):
        raise
    except DboError as error:
        return _refused(request, error)
    if captured and not proven.hazards.capturable:
        return _not_capturable(request, proven.hazards.reason)
    return Checked(request.what, proven)


def _not_capturable(request: Request, reason: str) -> Checked:
    fix = "run it eagerly, or over another transport"
    shown = Counterexample("capture", request.what, None, None, None, reason, fix, "")
    return Checked(request.what, None, str(shown), shown)


def _refused(request: Request, error: DboError) -> Checked:
    shown = error.counterexample if isinstance(error, VerificationError) else None
    return Checked(request.what, None, str(error), shown)
