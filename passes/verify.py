"""Prove that the program has no race, no use of freed memory, and no deadlock over the ranks.

needs:    the lowered graph with markers, `effects` and `members`
ensures:  `state.certificate`, or a refusal that names the two nodes and the missing order
before -> after: the graph is not changed

The graph is read as an execution (`dbo_fx.certificates.of_graph`); what it must keep is derived
from the captured graph, not from the dependencies that the earlier passes handed on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dbo_fx.certificates.certificate import Certificate
from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.of_graph import execution_of_graph
from dbo_fx.certificates.overlap import overlap_report
from dbo_fx.certificates.variants import prove_variants
from dbo_fx.contracts import Contract
from dbo_fx.pipeline import State


@dataclass(frozen=True, slots=True)
class Verify:
    """See the module's contract.

    Attributes:
        contract: What the transport promises and demands.
    """

    contract: Contract
    name: str = "verify"

    def apply(self, state: State) -> tuple[State, str]:
        """Check; the state stays as it is, the certificate is the report.

        Raises:
            VerificationError: a rule is broken; its `counterexample` says where.
        """
        execution = execution_of_graph(state, self.contract).execution
        hazards = prove(execution)
        ranks = prove_variants(state, execution)
        certificate = Certificate(hazards, ranks, overlap_report(execution))
        return replace(state, certificate=certificate), str(hazards)
