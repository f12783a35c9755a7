"""Ranks: one total order of all communication, the same on every rank, and no circle of waits.

Communicators that are consistent one by one can still deadlock together: rank 0 in the combine of
one, rank 1 in the dispatch of the other. So the order is over all communicators at once. Three
proofs, each on its own:

1. on every rank, each launch happens before the next one, whatever streams they are on;
2. the n-th launch over each communicator is the same transfer on all its members, every rank
   retires the same ones, and the ranks' orders together have no circle;
3. run to the end under rendezvous (`rendezvous`), nothing is left waiting.

The ranks may run different programs; those that run the same one are proven once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dbo_fx.certificates.execution import Execution
from dbo_fx.certificates.rank_checks import RankChecks, same_programs

ASSUMPTIONS = (
    "the library starts the operations of a communicator in the order in which each rank launched "
    "them, and finishes one once all its members have come to it",
    "ops that were declared local (register_rule, register_local) do not communicate",
)
SEND_FIRST = "Let every rank launch a communication before it waits for anything behind it."
ONE_VARIANT = "in each step all ranks run the same variant: they agree on it before the step"
ONE_BACKEND = "what runs the unsplit graph launches its collectives in one order on all ranks"


@dataclass(frozen=True)
class RankCertificate:
    """What holds for one variant on all ranks.

    Attributes:
        variant: Which variant of the plan.
        ranks: R.
        launches: Launches of one rank over each communicator; the most of any rank.
        assumptions: What the proof takes for granted.
    """

    variant: str
    ranks: int
    launches: Mapping[str, int]
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def __str__(self) -> str:
        """One line."""
        return f"{self.variant}: {self.proven}"

    @property
    def proven(self) -> str:
        """The line without the variant's name."""
        over = ", ".join(f"{count} over {name}" for name, count in self.launches.items())
        return (
            f"{self.ranks} ranks, {over or 'no communication'}; one order on all ranks, no circle "
            "of waits"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "variant": self.variant,
            "ranks": self.ranks,
            "launches": dict(self.launches),
            "assumptions": list(self.assumptions),
        }


@dataclass(frozen=True)
class PlanCertificate:
    """What holds for every variant that may run.

    Attributes:
        variants: One certificate each.
        assumptions: What the proof takes for granted.
    """

    variants: tuple[RankCertificate, ...]
    assumptions: tuple[str, ...] = (*ASSUMPTIONS, ONE_VARIANT, ONE_BACKEND)

    def __str__(self) -> str:
        """A line per variant; those with the same line share it."""
        names: dict[str, list[str]] = {}
        for certificate in self.variants:
            names.setdefault(certificate.proven, []).append(certificate.variant)
        return "\n".join(f"{', '.join(who)}: {what}" for what, who in names.items())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "variants": [certificate.to_json() for certificate in self.variants],
            "assumptions": list(self.assumptions),
        }


def prove_plan(
    variants: Mapping[str, Execution | Sequence[Execution]],
    *,
    ranks: int | None = None,
    members: Mapping[str, Sequence[int]] | None = None,
) -> PlanCertificate:
    """Prove every variant that may run, each by itself.

    Args:
        variants: By name; one execution for all ranks, or one for each.
        ranks: R, where one execution stands for all ranks.
        members: See `prove_ranks`.

    Returns:
        The certificate. That all ranks run the same variant in a step is an assumption, which the
        agreement of every step keeps.

    Raises:
        VerificationError: see `prove_ranks`.
    """
    proven: dict[tuple[int, ...], RankCertificate] = {}
    found = []
    for name, given in variants.items():
        executions = [given] if isinstance(given, Execution) else list(given)
        key = tuple(map(id, executions))
        if key not in proven:
            one = ranks if len(executions) == 1 else None
            proven[key] = prove_ranks(executions, ranks=one, members=members, variant=name)
        certificate = proven[key]
        found.append(RankCertificate(name, certificate.ranks, certificate.launches))
    return PlanCertificate(tuple(found))


def prove_ranks(
    executions: Sequence[Execution],
    *,
    ranks: int | None = None,
    members: Mapping[str, Sequence[int]] | None = None,
    variant: str = "split",
) -> RankCertificate:
    """Prove that the ranks' programs fit together.

    Args:
        executions: Rank r's at r; or a single one that all ranks run, with `ranks`.
        ranks: R, where one execution stands for all ranks.
        members: Which ranks take part in a communicator, all where it is not named.
        variant: What the programs are, for messages.

    Returns:
        The certificate.

    Raises:
        VerificationError: with a `counterexample` of rule `rank-order` (an order is missing on a
            rank, or differs between ranks), `variant` (ranks run different variants), or
            `deadlock`.
    """
    fits = ranks is None or (ranks >= 1 and len(executions) in (1, ranks))
    if not executions or not fits:
        raise ValueError(
            f"prove_ranks: {len(executions)} executions for {ranks} ranks, wanted one for each "
            "rank, or one that all run"
        )
    count = ranks or len(executions)
    proof = RankChecks(same_programs(executions, count), count, dict(members or {}), variant)
    proof.check_members()
    proof.check_variants()
    for one in proof.classes:
        proof.check_total(one)
    proof.check_same()
    proof.check_common_order()
    if lines := proof.stuck():
        raise proof.error("deadlock", "nothing can go on", lines, SEND_FIRST)
    return RankCertificate(variant, count, proof.counts())
