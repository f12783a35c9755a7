"""What the ranks decide together.

`compare_over_store` runs after a compilation and must never be a collective: a rank that did not
compile would never come. `agree_batch` runs once per step, outside any capture: one small
all-reduce on the CPU, and nothing else as long as all ranks come and bring the same plan. Only when
one does not do the ranks turn to the rendezvous store, to tell each other who is missing or
differs, and in what.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from dbo_fx.capturing import what_captures
from dbo_fx.comm import groups
from dbo_fx.decision import (
    NO_THRESHOLDS,
    AgreementPolicy,
    BatchDecision,
    BatchKind,
    Consent,
    Vote,
    decide,
)
from dbo_fx.errors import AgreementError, OptionError
from dbo_fx.exchange import exchange, leave_word, named, tell


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do after a comparison failed, for the message.

    Attributes:
        missing: When a rank wrote nothing.
        different: When a rank wrote another value.
    """

    missing: str
    different: str


_AFTER_COMPILE = Advice(
    "All ranks must compile together: look for an error there, or for an input size or option that "
    "only some ranks saw (TORCH_LOGS=recompiles shows why a rank compiled).",
    "All ranks must compile the same program: compare their options, versions and input sizes, and "
    "keep rank numbers out of the graph.",
)
_IN_A_STEP = Advice(
    "Look for the first error there.",
    "All ranks must run a step with the same one: compare how they were started, their versions "
    "and their configuration.",
)


def compare_over_store(
    group_name: str, what: str, value: str, timeout_s: float, *, advice: Advice = _AFTER_COMPILE
) -> None:
    """Raise unless every rank of the group brings the same value to its n-th comparison.

    Args:
        group_name: Name of the process group.
        what: What is compared, for the message and the key, for example "program digest".
        value: This rank's value.
        timeout_s: How long to wait for the other ranks.
        advice: How the message ends.

    Raises:
        AgreementError: A rank did not write its value in time, or wrote another one; or something
            is being captured.
    """
    if captured := what_captures():
        raise AgreementError(
            f"{what}: the ranks would have to compare it while {captured}. Run the model once on "
            "such inputs before the capture: then it is compiled and tested."
        )
    ranks, mine = groups.world_size(group_name), groups.rank(group_name)
    if ranks == 1 or groups.is_fake(group_name):
        return
    step = _next_step(group_name, what)
    values = tell(group_name, f"dbo_fx/{what}/{step}", value, timeout_s)
    missing = [rank for rank in range(ranks) if rank not in values]
    if missing:
        raise AgreementError(
            f"{what}, comparison {step} in group {group_name!r}: {named(missing)} of {ranks} "
            f"wrote nothing within {timeout_s:g} s; rank {mine} has {value!r}. {advice.missing}"
        )
    others = {rank: other for rank, other in values.items() if other != value}
    if others:
        told = "; ".join(f"rank {rank} has {other!r}" for rank, other in others.items())
        raise AgreementError(
            f"{what}, comparison {step} in group {group_name!r}: rank {mine} has {value!r}, but "
            f"{told}. {advice.different}"
        )


def announce_over_store(group_name: str, what: str, value: str) -> None:
    """Bring a value to the next comparison without waiting for it: this rank is about to raise.

    The other ranks then stop at once and say what this one said, instead of waiting for it.

    Args:
        group_name: Name of the process group.
        what: What the others compare.
        value: What they are to read.
    """
    if groups.world_size(group_name) == 1 or groups.is_fake(group_name):
        return
    step = _next_step(group_name, what)
    groups.store(group_name).set(f"dbo_fx/{what}/{step}/{groups.rank(group_name)}", value)


def _next_step(group_name: str, what: str) -> int:
    """Count this rank's comparisons; in the store, so that a new process group starts anew."""
    mine = groups.rank(group_name)
    return int(groups.store(group_name).add(f"dbo_fx/{what}/steps of {mine}", 1))


def agree_batch(
    rows: int,
    allowed: bool,
    group: dist.ProcessGroup | str | None = None,
    *,
    failed: bool = False,
    kind: BatchKind = BatchKind.PREFILL,
    plan: str = "",
    policy: AgreementPolicy = NO_THRESHOLDS,
) -> BatchDecision:
    """Decide with all ranks, by one all-reduce of 4 R integers on the CPU, whether to split.

    Every rank of the group calls this once per step, an idle one with 0 rows.

    Args:
        rows: Rows that this rank has.
        allowed: Whether this rank allows the batch to be split.
        group: The process group, its name, or None for the default group; without an initialised
            torch.distributed this rank decides alone. A group that carries no CPU tensors gets a
            gloo group beside it at its first step.
        failed: This rank cannot run the step; it takes part so that the others learn of it.
        kind: What the rows are; of no effect for a rank without rows.
        plan: What this rank is about to run, for example `str(compiled.plan)` of its compiled
            program; must be the same on every rank.
        policy: Thresholds and buckets; must be the same on every rank.

    Returns:
        The same decision on every rank.

    Raises:
        AgreementError: Called under a capture (at once on this rank; the others learn why when
            their time is up); or a rank ended, did not come in time, or brought another plan or
            policy. Then every rank that waits raises, and the message names the rank. After a
            missing rank the group cannot be used any more.
        OptionError: `rows` is negative; the other ranks learn that this one failed.
    """
    name = groups.name_of(group)
    if captured := _capture():
        leave_word(name, f"called agree_batch while {captured}")
        raise AgreementError(
            f"agree_batch was called while {captured}, wanted before it: a captured decision would "
            "be replayed for every later batch. Decide first, capture then."
        )
    consent = Consent.ALLOWS if allowed else Consent.REFUSES
    vote = Vote(rows, Consent.FAILS if failed or rows < 0 else consent, kind)
    votes = [vote]
    if name is not None:
        votes, same = exchange(name, vote, _fingerprint(plan, policy), policy.timeout_s)
        if not same:
            compare_over_store(name, "plan", plan, policy.timeout_s, advice=_IN_A_STEP)
            compare_over_store(name, "policy", str(policy), policy.timeout_s, advice=_IN_A_STEP)
    if rows < 0:
        raise OptionError(f"agree_batch: rows is {rows}, wanted 0 or more.")
    return decide(votes, policy)


def _capture() -> str:
    """Return what is being captured, in words; nothing if nothing is."""
    if torch.compiler.is_compiling():
        return "a model is being traced by torch.compile or torch.export"
    return what_captures()


@lru_cache(maxsize=256)
def _fingerprint(plan: str, policy: AgreementPolicy) -> int:
    """Return 64 bits that stand for what must be the same on every rank."""
    digest = hashlib.sha256(f"{policy}\n{plan}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
