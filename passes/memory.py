"""Predict how much memory the program holds, and refuse one that holds too much.

needs:    the lowered graph, its effects, the captured graph, `state.certificate`
ensures:  `state.certificate.memory`; for the traced size, the peak is within `max_ratio` of the
          unsplit graph's
before -> after: the graph is not changed

Other sizes are checked when they come (`dbo_fx.compiled`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dbo_fx.certificates.memory import memory_certificate
from dbo_fx.pipeline import State


@dataclass(frozen=True, slots=True)
class Memory:
    """See the module's contract.

    Attributes:
        max_ratio: The most that the program's peak may be, over the unsplit graph's.
    """

    max_ratio: float | None = None
    name: str = "memory"

    def apply(self, state: State) -> tuple[State, str]:
        """Walk the graphs; the state gets the certificate.

        Raises:
            VerificationError: the peak is too high; the message names who is alive then.
        """
        assert state.certificate is not None
        memory = memory_certificate(state)
        for report in memory.reports:
            report.check(self.max_ratio)
        certificate = replace(state.certificate, memory=memory)
        return replace(state, certificate=certificate), str(memory).splitlines()[0]
