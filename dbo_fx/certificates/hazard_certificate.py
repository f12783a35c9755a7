"""What was proven about one rank's program."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HazardCertificate:
    """No race, no use of freed memory, no broken contract.

    Attributes:
        dependencies: Orders that the reference needs, over values and storages; all hold.
        cross_stream: How many of them cross streams.
        storages: Storages whose accesses were all compared.
        lifetimes: Storages that are let go of only once every reader on any stream is done.
        communications: Communications whose sends have one recv each.
        max_in_flight: Most communications sent and not yet received at once.
        events: Events, each recorded once and before its waits.
        capturable: It may run under CUDA graph capture.
        reason: Why not.
    """

    dependencies: int
    cross_stream: int
    storages: int
    lifetimes: int
    communications: int
    max_in_flight: int
    events: int
    capturable: bool
    reason: str = ""

    def __str__(self) -> str:
        """One paragraph."""
        capture = "capturable" if self.capturable else f"not capturable: {self.reason}"
        return (
            f"{self.dependencies} dependencies hold, {self.cross_stream} of them across streams; "
            f"{self.storages} storages without a race, {self.lifetimes} lifetimes cover their "
            f"readers; {self.communications} sends have one recv each, at most "
            f"{self.max_in_flight} in flight; {self.events} events; all streams joined; {capture}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
