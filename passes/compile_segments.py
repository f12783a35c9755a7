"""Compile every distinct segment.

needs:    `state.segments`
ensures:  `state.compiled` holds what `emit` calls in their place; empty where they run as traced
before -> after: the graph is not changed, and `segments` still says what every segment computes
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.nn import Module

from dbo_fx.pipeline import State
from dbo_fx.segment_compilers import EAGER
from dbo_fx.segments import CompiledSegment, artifacts


@dataclass(frozen=True, slots=True)
class CompileSegments:
    """See the module's contract.

    Attributes:
        backend: `eager`, `inductor`, or another backend that torch.compile knows.
    """

    backend: str = EAGER
    name: str = "segments"

    def apply(self, state: State) -> tuple[State, str]:
        """Compile what this process has not compiled yet.

        Raises:
            UnsupportedGraphError: the backend does not compile a segment, or could not keep up who
                shares memory with whom.
        """
        if self.backend == EAGER:
            return state, "eager"
        known = len(artifacts())
        compiled: dict[str, Module] = {
            name: CompiledSegment(name, body, self.backend) for name, body in state.segments.items()
        }
        new = len(artifacts()) - known
        text = f"{len(compiled)} segments by {self.backend}, {new} compiled now"
        return replace(state, compiled=compiled), text
