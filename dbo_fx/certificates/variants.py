"""The variants of a plan: everything that may run over its communicators.

A program has no branches. So an empty microbatch (its rows are padding) and every batch size that
the graph was traced for run the very operations of the split program. What remains is the unsplit
graph: the step that is not split, the tests of the first call, the fallback after a refusal.
"""

from __future__ import annotations

from dbo_fx.certificates.execution import Execution, Kind, Operation
from dbo_fx.certificates.ranks import PlanCertificate, prove_plan
from dbo_fx.comm import groups
from dbo_fx.communication import is_launch, launch_of
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMP
from dbo_fx.pipeline import State


def unsplit_execution(state: State, contract: Contract) -> Execution:
    """The captured graph's communication: every launch in one piece, in graph order.

    Args:
        state: Any state after the regions are known.
        contract: The transport's.
    """
    operations = [Operation("begin", Kind.BEGIN, COMP)]
    for node in state.captured.graph.nodes:
        if is_launch(node):
            launch = launch_of(node)
            operations.append(
                Operation(
                    node.name,
                    Kind.COLLECTIVE,
                    COMP,
                    communicator=launch.group,
                    transfer=f"{launch.collective} x{len(launch.inputs)}",
                    blocks_host=contract.blocks_host,
                )
            )
    operations.append(Operation("end", Kind.END, COMP))
    return Execution(tuple(operations), (), contract, "captured graph")


def variants_of(state: State, split: Execution) -> dict[str, Execution]:
    """Every variant that may run, by name.

    Args:
        state: The pipeline's state.
        split: The split program's execution.
    """
    unsplit = unsplit_execution(state, split.contract)
    return {
        "split": split,
        "empty microbatch": split,
        "other batch sizes": split,
        "unsplit": unsplit,
        "tests of the first call": unsplit,
        "fallback": unsplit,
    }


def prove_variants(state: State, split: Execution) -> PlanCertificate:
    """Prove all variants of a compiled graph for all ranks of its groups.

    Args:
        state: The pipeline's state.
        split: The split program's execution.

    Raises:
        VerificationError: see `ranks.prove_ranks`.
    """
    names = {launch.group for c in state.communications for launch in c.launches}
    ranks = max(groups.world_size(name) for name in names)
    return prove_plan(variants_of(state, split), ranks=ranks)
