"""Assertions for tests of your own models, schedules and passes; `docs/testing.md` shows them.

Plain functions for any test runner. Where they take a *subject*, it may be a `CompiledProgram`, the
`State` behind a pass, an `ir.Program` or `ir.Schedule`, the text of one, a schedule's name, or the
path of a `.dbo` file. Only what needs torch imports it.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from dbo_fx.certificates.certificate import Certificate
from dbo_fx.certificates.overlap import Overlap
from dbo_fx.check import Checked, check, check_program
from dbo_fx.errors import OptionError, Refutation
from dbo_fx.golden_files import shortened
from dbo_fx.inspect.action_names import pairs
from dbo_fx.inspect.diff import diff
from dbo_fx.inspect.marked_lanes import marked_lanes
from dbo_fx.inspect.scheduled import Subject, named, overlap_of, program_of
from dbo_fx.ir import Action, Program, Record, Run, Wait
from dbo_fx.subjects import RANKS, Bound, Request
from dbo_fx.testing_models import CompiledPrograms, capture, compile_model, pretended_ranks

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram

__all__ = [
    "CompiledPrograms",
    "assert_certified",
    "assert_not_overlaps",
    "assert_overlaps",
    "assert_peak_below",
    "assert_refused",
    "assert_same_schedule",
    "assert_unchanged",
    "capture",
    "compile_model",
    "pretended_ranks",
]


def assert_overlaps(
    subject: Subject, *, comm: str, compute: str, layer: int | None = None, partly: bool = False
) -> None:
    """The order permits that a compute action runs while a communication is under way.

    Args:
        subject: See the module. A schedule is laid over enough layers.
        comm: A dispatch or combine: `D m0`, `D_m0` or `D_m0@3`.
        compute: An action of the same layer, `A1 m1`; of another one, `A1_m1@4`; or of a layer
            counted from the communication's, `A0 m0 @+1`.
        layer: The communication's layer; None means every layer in which the program has both.
        partly: Be content if some of the action's operations can run beside it.

    Raises:
        AssertionError: It cannot, or not all of it; the message has the lanes and the reason.
        OptionError: A name is none.
    """
    __tracebackhide__ = True
    program = _laid_out(subject, layer)
    report = overlap_of(subject, program)
    for overlap, action in pairs(report, program, comm, compute, layer):
        beside = next((b for b in overlap.beside if b.action == action), None)
        if beside is None:
            _fail_overlap(program, overlap, action, "does not run beside")
        elif beside.operations < beside.of and not partly:
            part = f"runs only partly ({beside.operations} of {beside.of} operations) beside"
            _fail_overlap(program, overlap, action, part)


def assert_not_overlaps(
    subject: Subject, *, comm: str, compute: str, layer: int | None = None
) -> None:
    """No operation of a compute action can run while a communication is under way.

    Args:
        subject: See the module.
        comm: As in `assert_overlaps`.
        compute: As in `assert_overlaps`.
        layer: As in `assert_overlaps`.

    Raises:
        AssertionError: One can, or the program has no such pair.
        OptionError: A name is none.
    """
    __tracebackhide__ = True
    program = _laid_out(subject, layer)
    report = overlap_of(subject, program)
    for overlap, action in pairs(report, program, comm, compute, layer):
        if any(beside.action == action for beside in overlap.beside):
            _fail_overlap(program, overlap, action, "runs beside")


def _laid_out(subject: Subject, layer: int | None) -> Program:
    """A program in which the layer is not the last one, if there is a choice."""
    if layer is not None and layer < 0:
        raise OptionError(f"layer={layer}: layers count from 0")
    return program_of(subject, layers=2 if layer is None else layer + 2)


def _fail_overlap(program: Program, overlap: Overlap, action: Action, what: str) -> None:
    __tracebackhide__ = True
    comm = overlap.communication
    beside = " ".join(map(str, overlap.beside)) or "nothing"
    lines = [
        f"{action.bound()} {what} {comm.bound()} in {_title(program)}",
        marked_lanes(program, comm.layer, (comm, action)),
        f"  beside {comm.bound()}: {beside}",
    ]
    if what != "runs beside":
        lines += [f"  {why}" for why in _why_not(overlap, action)]
    raise AssertionError("\n".join(lines))


def _why_not(overlap: Overlap, action: Action) -> list[str]:
    found = [str(prevented) for prevented in overlap.prevented if prevented.action == action]
    return found or [
        f"not {action.bound()}: a value passes between the two, or another communication of "
        f"microbatch {overlap.communication.microbatch} stands between them"
    ]


def _title(program: Program) -> str:
    return (
        f"program {program.schedule} (layers {program.layers}, microbatches "
        f"{program.microbatches}, {program.transport})"
    )


def assert_same_schedule(first: Subject, second: Subject, *, events: bool = True) -> None:
    """Two programs run the same actions in the same order on the same streams.

    Args:
        first: See the module. A schedule is laid over the other one's layers and transport.
        second: Likewise.
        events: Events and lifetimes have to stand at the same places too. What number an event has
            never matters.

    Raises:
        AssertionError: They differ; the message has both lanes and what moved.
    """
    __tracebackhide__ = True
    one, other = _alike(first, second)
    left, right = _steps(one, events), _steps(other, events)
    if left == right:
        return
    found = diff(one, other)
    text = str(found) if found else "\n".join(unified_diff(left, right, lineterm=""))
    raise AssertionError(
        f"{_title(one)} and {_title(other)} differ\n{indent(shortened(text), '  ')}"
    )


def _alike(first: Subject, second: Subject) -> tuple[Program, Program]:
    one, other = named(first), named(second)
    model = next((p for p in (one, other) if isinstance(p, Program)), None)
    if model is None:
        return program_of(one), program_of(other)
    a, b = (
        program_of(p, layers=model.layers, microbatches=model.microbatches, over=model.transport)
        for p in (one, other)
    )
    return a, b


def _steps(program: Program, events: bool) -> list[str]:
    """Its steps as lines, events numbered in the order in which they come."""
    numbers: dict[int, int] = {}
    lines = [f"microbatches {program.microbatches}", f"layers {program.layers}"]
    for step in program.steps:
        if isinstance(step, Record | Wait):
            step = replace(step, event=numbers.setdefault(step.event, len(numbers)))
        if events or isinstance(step, Run):
            lines.append(str(step))
    return lines


def assert_certified(
    subject: Subject, *, ranks: int | None = None, captured: bool = False
) -> Certificate:
    """The program has no race, no use of freed memory, no broken contract and no deadlock.

    Args:
        subject: See the module. Compiled programs have been certified for the ranks of their
            process group; others are certified here, in the phase model.
        ranks: How many ranks run it; None means the group's, or 2.
        captured: It may also be captured in a CUDA graph.

    Returns:
        The certificate.

    Raises:
        AssertionError: It is refused; the message is the shortest counterexample.
    """
    __tracebackhide__ = True
    proven = getattr(subject, "certificate", None)
    if isinstance(proven, Certificate):
        found = proven.ranks.variants[0].ranks
        if ranks not in (None, found):
            raise AssertionError(
                f"certified for {found} ranks, wanted {ranks}: compile it for them"
            )
    else:
        checked = _checked(subject, RANKS if ranks is None else ranks)
        if checked.certificate is None:
            raise AssertionError(f"{checked.summary}\n{checked}")
        proven = checked.certificate
    if captured and not proven.hazards.capturable:
        raise AssertionError(f"certified, but not for CUDA graphs: {proven.hazards.reason}")
    return proven


def assert_refused(
    subject: Subject, *, rule: str | None = None, ranks: int = RANKS
) -> Refutation | None:
    """The verifier refuses a program.

    Args:
        subject: See the module; not something compiled, since what is refused does not compile.
        rule: The rule that the shortest counterexample breaks, such as `lifetime`.
        ranks: How many ranks run it.

    Returns:
        The counterexample.

    Raises:
        AssertionError: It is certified, or refused for another rule; the message has the
            certificate or the counterexample.
    """
    __tracebackhide__ = True
    checked = _checked(subject, ranks)
    if checked.certified:
        wanted = f"a refusal for {rule}" if rule else "a refusal"
        raise AssertionError(f"{checked.summary}, wanted {wanted}\n{indent(str(checked), '  ')}")
    found = checked.counterexample
    if rule is not None and (found is None or found.rule != rule):
        raise AssertionError(f"{checked.summary}, wanted {rule}\n{checked}")
    return found


def _checked(subject: Subject, ranks: int) -> Checked:
    """Check in the phase model; a file by its path, so that messages have its lines."""
    if not isinstance(ranks, int) or ranks < 1:
        raise OptionError(f"ranks={ranks!r}: wanted a number from 1 up")
    if isinstance(subject, Path) or (isinstance(subject, str) and "\n" not in subject):
        return check(Request(str(subject), ranks=ranks))
    program = program_of(subject)
    return check_program(Bound(program), Request(program.schedule, ranks=ranks))


def assert_peak_below(
    compiled: CompiledProgram,
    *,
    ratio: float | None = None,
    peak_bytes: int | None = None,
    tokens: int | None = None,
) -> None:
    """The predicted peak of memory stays below a limit.

    Args:
        compiled: A compiled program.
        ratio: Limit as a multiple of what the unsplit graph needs.
        peak_bytes: Limit in bytes.
        tokens: Size of the whole batch along the dim that is split; the traced one if None.

    Raises:
        AssertionError: It does not; the message says who is alive at the peak.
        OptionError: No limit is given, or no size is known.
    """
    __tracebackhide__ = True
    if ratio is None and peak_bytes is None:
        raise OptionError("assert_peak_below: give ratio=, peak_bytes=, or both")
    if not hasattr(compiled, "memory"):
        raise OptionError(f"assert_peak_below: {type(compiled).__name__} is no compiled program")
    report = compiled.memory(tokens)
    if ratio is not None and not report.ratio < ratio:
        raise AssertionError(f"{report.ratio:.2f} times unsplit, wanted below {ratio}\n{report}")
    if peak_bytes is not None and not report.peak_bytes < peak_bytes:
        raise AssertionError(f"{report.peak_bytes} bytes, wanted below {peak_bytes}\n{report}")


def assert_unchanged(before: Any, after: Any) -> None:
    """Two graphs or programs do the same: the semantic diff finds nothing.

    Args:
        before: Whatever `dbo_fx.diff` takes. As passes change graphs in place, capture twice.
        after: Likewise.

    Raises:
        AssertionError: They differ; the message is the diff.
    """
    __tracebackhide__ = True
    found = diff(before, after)
    if found:
        raise AssertionError(f"wanted no change, found:\n{found}")
