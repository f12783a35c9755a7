"""Actions as people name them, such as `D m0` or `A1_m1@3`, and the pairs that two names mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dbo_fx.certificates.overlap import Overlap, OverlapReport
from dbo_fx.errors import OptionError
from dbo_fx.ir import Action, Phase, Program

_NAME = re.compile(
    r"(?P<phase>[A-Z][A-Z0-9]*)[ _]m(?P<microbatch>\d+)(?: ?@(?P<sign>[+-]?)(?P<layer>\d+))?"
)
_FORMS = "write it like 'D m0', 'D_m0' or 'D_m0@3'"


@dataclass(frozen=True, slots=True)
class ActionName:
    """A phase of a microbatch, in all layers or in one.

    Attributes:
        phase: The phase.
        microbatch: Its index.
        layer: The layer, or its distance from the communication's; None for no layer.
        is_relative: Whether it is a distance: `A0 m1 @+1`.
    """

    phase: Phase
    microbatch: int
    layer: int | None = None
    is_relative: bool = False

    @classmethod
    def parse(cls, text: str) -> ActionName:
        """Read a name.

        Raises:
            OptionError: It is no name of an action.
        """
        found = _NAME.fullmatch(text.strip())
        phases = {phase.value: phase for phase in Phase}
        if found is None or found["phase"] not in phases:
            known = " ".join(phases)
            raise OptionError(f"{text!r} names no action; {_FORMS}; the phases are {known}")
        layer = None if found["layer"] is None else int(found["sign"] + found["layer"])
        return cls(
            phases[found["phase"]], int(found["microbatch"]), layer, is_relative=bool(found["sign"])
        )

    def at(self, layer: int) -> Action | None:
        """The action beside a communication of a layer; None if it would stand before layer 0."""
        if self.phase is Phase.TAIL:
            return Action(self.phase, self.microbatch)
        if self.is_relative:
            assert self.layer is not None
            layer += self.layer
        elif self.layer is not None:
            layer = self.layer
        return None if layer < 0 else Action(self.phase, self.microbatch, None, layer)


def pairs(
    report: OverlapReport, program: Program, comm: str, compute: str, layer: int | None
) -> list[tuple[Overlap, Action]]:
    """The communications and compute actions that two names mean.

    Args:
        report: What can run beside each communication.
        program: The program it is about.
        comm: A dispatch or combine.
        compute: An action in the same layer, unless it names its own: `@4`, or `@+1` for the next.
        layer: The communication's layer; None means all layers in which the program has both, for
            TAIL the last one.

    Returns:
        At least one pair.

    Raises:
        OptionError: A name is none, or names the wrong kind of action.
        AssertionError: The program has no such pair.
    """
    sent, ran = ActionName.parse(comm), ActionName.parse(compute)
    if not sent.phase.is_communication or sent.is_relative:
        raise OptionError(f"comm={comm!r}: wanted a dispatch or combine; {_FORMS}")
    if ran.phase.is_communication:
        raise OptionError(f"compute={compute!r} is a communication; wanted A0, A1, MLP, S or TAIL")
    if None not in (layer, sent.layer) and layer != sent.layer:
        raise OptionError(f"layer={layer} does not fit comm={comm!r}; leave one of them out")
    found = list(_pairs(report, program, sent, ran, sent.layer if layer is None else layer))
    if not found:
        raise AssertionError(_missing(report, program, comm, compute, layer))
    return found


def _pairs(
    report: OverlapReport, program: Program, sent: ActionName, ran: ActionName, layer: int | None
) -> Iterator[tuple[Overlap, Action]]:
    present = set(program.actions)
    for overlap in report.overlaps:
        action = overlap.communication
        if (action.phase, action.microbatch) != (sent.phase, sent.microbatch):
            continue
        assert action.layer is not None
        beside = ran.at(action.layer)
        if beside is None or beside not in present or layer not in (None, action.layer):
            continue
        if beside.layer is not None or layer is not None or action.layer == program.layers - 1:
            yield overlap, beside


def _missing(
    report: OverlapReport, program: Program, comm: str, compute: str, layer: int | None
) -> str:
    place = "in one layer" if layer is None else f"at layer {layer}"
    first = report.overlaps[:4]
    names = " ".join(overlap.communication.bound() for overlap in first) or "no communication"
    more = " ..." if len(report.overlaps) > len(first) else ""
    return (
        f"program {program.schedule} has no {comm} and {compute} {place}: it has "
        f"{program.layers} layers, {program.microbatches} microbatches, {names}{more}"
    )
