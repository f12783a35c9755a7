"""An independent witness: executes programs and graphs under any legal interleaving, on CPU.

It shares no code with the verifier. `ProgramWitness` runs program texts for several ranks,
`dbo_fx.witness.graphs.GraphWitness` an emitted graph on real tensors (it needs torch, so it is not
imported here). `docs/certificates.md` says what the two are for.
"""

from __future__ import annotations

from dbo_fx.witness.explore import TooManyClasses, classes
from dbo_fx.witness.hosts import Region
from dbo_fx.witness.programs import ProgramWitness
from dbo_fx.witness.runs import Outcome, Verdict, Witness

__all__ = ["Outcome", "ProgramWitness", "Region", "TooManyClasses", "Verdict", "Witness", "classes"]
