"""An independent witness: executes programs and graphs under any legal interleaving, on CPU.

It shares no code with the verifier. `ProgramWitness` runs program texts for several ranks, without
torch; `GraphWitness` runs an emitted graph on real tensors. Both say whether a run, many runs, or
one run of every equivalence class give what the reference gives. `docs/certificates.md` says what
that is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbo_fx.witness.explore import TooManyClasses, classes
from dbo_fx.witness.hosts import Region
from dbo_fx.witness.programs import ProgramWitness
from dbo_fx.witness.runs import Outcome, Verdict, Witness

if TYPE_CHECKING:
    from dbo_fx.witness.graphs import GraphWitness

__all__ = [
    "GraphWitness",
    "Outcome",
    "ProgramWitness",
    "Region",
    "TooManyClasses",
    "Verdict",
    "Witness",
    "classes",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name == "GraphWitness":
        from dbo_fx.witness.graphs import GraphWitness

        return GraphWitness
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
