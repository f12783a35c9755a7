"""All that was proven about one program, in one object that prints and becomes JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dbo_fx.certificates.hazard_certificate import HazardCertificate
from dbo_fx.certificates.overlap import OverlapReport
from dbo_fx.certificates.ranks import PlanCertificate

ASSUMPTIONS = (
    "a kernel touches what its op's schema says, and a transport keeps its contract",
    "memory goes back to the stream that it was allocated on, in the host's order",
)


class Part(Protocol):
    """One of the things that a certificate consists of."""

    def to_json(self) -> Any:
        """Plain values."""


@dataclass(frozen=True)
class Certificate:
    """What holds before the program runs; `docs/certificates.md` tells what each part proves.

    Attributes:
        hazards: No race, no use of freed memory, no broken contract on one rank.
        ranks: One order of all communication on all ranks, and no circle of waits.
        overlap: What can run beside each communication, and what prevents more.
        memory: Predicted peaks (`MemoryCertificate`); None for a program text, whose sizes nobody
            knows.
    """

    hazards: HazardCertificate
    ranks: PlanCertificate
    overlap: OverlapReport
    memory: Part | None = None

    @property
    def parts(self) -> Mapping[str, Part]:
        """The parts that there are, by name."""
        found: dict[str, Part] = {
            "hazards": self.hazards,
            "ranks": self.ranks,
            "overlap": self.overlap,
        }
        return found if self.memory is None else {**found, "memory": self.memory}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the proofs take for granted."""
        return (*ASSUMPTIONS, *self.ranks.assumptions)

    def __str__(self) -> str:
        """Each part under its name."""
        return "\n".join(f"{name}: {part}" for name, part in self.parts.items())

    def to_json(self) -> dict[str, Any]:
        """Plain values, the assumptions with them."""
        parts = {name: part.to_json() for name, part in self.parts.items()}
        return {**parts, "assumptions": list(self.assumptions)}
