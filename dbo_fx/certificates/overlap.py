"""What can run beside each communication, and what keeps the rest of its period away from it.

A communication lasts from its send to where its result is usable. Where an event tells that (the
send's operation on its stream is the transfer), compute runs beside it if nothing orders the two.
Where `recv` is a kernel, compute runs beside it if it is neither before the send nor behind the
recv. Nothing is measured: the report says what the order permits, not how long anything takes.

Equal reports permit the same: they hold actions, never positions or event numbers, so an event
that orders nothing new leaves the report as it is. Time grows with the number of operations.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dbo_fx.certificates.execution import Execution
from dbo_fx.certificates.overlap_periods import Period, Timeline
from dbo_fx.certificates.overlap_reasons import Reason, Reasons
from dbo_fx.ir import Action

_LAYER = re.compile(r"@(\d+)")


@dataclass(frozen=True, slots=True)
class Beside:
    """An action that can run while a communication is under way.

    Attributes:
        action: The compute action.
        operations: How many of its operations can.
        of: How many it has.
    """

    action: Action
    operations: int = 1
    of: int = 1

    def __str__(self) -> str:
        """`A0_m1@3`, or `A0_m1@3 (2 of 3 operations)`."""
        whole = self.operations == self.of
        part = "" if whole else f" ({self.operations} of {self.of} operations)"
        return f"{self.action.bound()}{part}"


@dataclass(frozen=True, slots=True)
class Prevented:
    """A neighbouring action that needs nothing of a communication and cannot run beside it.

    Attributes:
        action: The compute action.
        reason: What prevents it.
        because: The operations concerned, without event numbers.
        event: The event concerned, if one is. Not part of what makes two reports equal.
    """

    action: Action
    reason: Reason
    because: str
    event: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """`not S_m0@3: early wait (...)`."""
        event = "" if self.event is None else f"e{self.event}: "
        return f"not {self.action.bound()}: {self.reason} ({event}{self.because})"


@dataclass(frozen=True, slots=True)
class Overlap:
    """One communication, and what its order permits beside it.

    Attributes:
        communication: The whole communication, such as `D_m0@3`.
        beside: What can run beside it, in host order.
        prevented: What could and cannot, in host order.
    """

    communication: Action
    beside: tuple[Beside, ...]
    prevented: tuple[Prevented, ...]

    def __str__(self) -> str:
        """`D_m0@3  beside A0_m1@3 A1_m1@3`."""
        names = " ".join(map(str, self.beside)) or "nothing"
        parts = [f"{self.communication.bound()}  beside {names}", *map(str, self.prevented)]
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "communication": self.communication.bound(),
            "beside": [
                {"action": b.action.bound(), "operations": b.operations, "of": b.of}
                for b in self.beside
            ],
            "prevented": [
                {"action": p.action.bound(), "reason": p.reason, "because": p.because}
                for p in self.prevented
            ],
        }


@dataclass(frozen=True)
class OverlapReport:
    """What one program's order permits.

    Attributes:
        overlaps: One item for each communication, in the order of the sends.
    """

    overlaps: tuple[Overlap, ...]

    @property
    def alone(self) -> tuple[Action, ...]:
        """Communications that nothing can run beside."""
        return tuple(o.communication for o in self.overlaps if not o.beside)

    def of(self, action: Action) -> Overlap:
        """The item of a communication, named as a whole or by one half.

        Raises:
            KeyError: The program has no such communication.
        """
        for overlap in self.overlaps:
            if overlap.communication == action.communication:
                return overlap
        raise KeyError(f"{action.bound()} is no communication of this program")

    def to_json(self) -> dict[str, Any]:
        """Plain values; equal for equal reports."""
        return {
            "communications": len(self.overlaps),
            "alone": [action.bound() for action in self.alone],
            "overlaps": [overlap.to_json() for overlap in self.overlaps],
        }

    def __str__(self) -> str:
        """A summary, a line for each communication of the steady state, then the exceptions."""
        total = len(self.overlaps)
        lines = [f"{total - len(self.alone)} of {total} communications have compute beside them"]
        by_kind: defaultdict[tuple[str, int | None], list[Overlap]] = defaultdict(list)
        for overlap in self.overlaps:
            action = overlap.communication
            by_kind[action.phase.value, action.microbatch].append(overlap)
        exceptions: list[str] = []
        for overlaps in by_kind.values():
            steady, others = _steady(overlaps)
            lines.append(f"  {steady}")
            exceptions += [f"  except {text}" for text in others]
        return "\n".join(lines + exceptions)


def _steady(overlaps: Sequence[Overlap]) -> tuple[str, list[str]]:
    """The text that most layers share, and one for each layer that differs."""
    texts = [_relative(overlap) for overlap in overlaps]
    if len(texts) == 1:
        return str(overlaps[0]), []
    # Of equally frequent ones the later is the steady state: the first layer is the odd one.
    counts = Counter(reversed(texts))
    common = counts.most_common(1)[0][0]
    others = [str(o) for o, text in zip(overlaps, texts, strict=True) if text != common]
    return common, others


def _relative(overlap: Overlap) -> str:
    """The item's text with layers counted from its own, `@l+1`, and without event numbers."""
    layer = overlap.communication.layer or 0

    def shift(match: re.Match[str]) -> str:
        offset = int(match[1]) - layer
        return "@l" if offset == 0 else f"@l{offset:+d}"

    plain = [Prevented(p.action, p.reason, p.because) for p in overlap.prevented]
    text = str(Overlap(overlap.communication, overlap.beside, tuple(plain)))
    return _LAYER.sub(shift, text)


def overlap_report(execution: Execution) -> OverlapReport:
    """Say for each communication what can run beside it, and what prevents more.

    Looked at are the compute actions of its period: from the communication before it to the one
    after it of the same microbatch, at most one layer away.

    Args:
        execution: One rank's operations, of a program that was proven.
    """
    timeline = Timeline(execution)
    reasons = Reasons(timeline)
    sizes = Counter(map(timeline.action, timeline.computes()))
    return OverlapReport(tuple(_overlap(reasons, p, sizes) for p in timeline.periods()))


def _overlap(reasons: Reasons, period: Period, sizes: Counter[Action]) -> Overlap:
    timeline = reasons.timeline
    beside = Counter(map(timeline.action, timeline.beside(period.flight)))
    prevented = [
        Prevented(timeline.action(index), *found)
        for index in period.candidates
        if (found := reasons.why(period, index)) is not None
    ]
    return Overlap(
        period.flight.action,
        tuple(Beside(action, count, sizes[action]) for action, count in beside.items()),
        tuple(dict.fromkeys(prevented)),
    )
