"""What the ranks decide together.

`compare_over_store` runs after a compilation and must never be a collective: a rank that did not
compile would never come. `agree_batch` runs once per step, outside any capture: one small
all-reduce on the CPU, and nothing else as long as all ranks come and bring the same plan. Only when
one does not do the ranks turn to the rendezvous store, to tell each other who is missing or
differs, and in what.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

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

# How long a rank whose step failed waits for the others' word, if its policy has no shorter limit.
_GRACE_S = 5.0
_CELLS = 4


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
        AgreementError: A rank did not write its value in time, or wrote another one.
    """
    ranks, mine = groups.world_size(group_name), groups.rank(group_name)
    if ranks == 1 or groups.is_fake(group_name):
        return
    # The counter lives in the store, so it starts anew with the process group that owns it.
    step = groups.store(group_name).add(f"dbo_fx/{what}/steps of {mine}", 1)
    values = _tell(group_name, f"dbo_fx/{what}/{step}", value, timeout_s)
    missing = [rank for rank in range(ranks) if rank not in values]
    if missing:
        raise AgreementError(
            f"{what}, comparison {step} in group {group_name!r}: {_named(missing)} of {ranks} "
            f"wrote nothing within {timeout_s:g} s; rank {mine} has {value!r}. {advice.missing}"
        )
    others = {rank: other for rank, other in values.items() if other != value}
    if others:
        told = "; ".join(f"rank {rank} has {other!r}" for rank, other in others.items())
        raise AgreementError(
            f"{what}, comparison {step} in group {group_name!r}: rank {mine} has {value!r}, but "
            f"{told}. {advice.different}"
        )


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
        plan: What this rank is about to run, for example the hash of its plan; must be the same on
            every rank.
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
        _leave_word(name, f"called agree_batch while {captured}")
        raise AgreementError(
            f"agree_batch was called while {captured}, wanted before it: a captured decision would "
            "be replayed for every later batch. Decide first, capture then."
        )
    consent = Consent.ALLOWS if allowed else Consent.REFUSES
    vote = Vote(rows, Consent.FAILS if failed or rows < 0 else consent, kind)
    votes = [vote] if name is None else _exchange(name, vote, plan, policy)
    if rows < 0:
        raise OptionError(f"agree_batch: rows is {rows}, wanted 0 or more.")
    return decide(votes, policy)


@dataclass(slots=True)
class _Channel:
    """How the ranks of one group exchange their votes.

    Attributes:
        group: The group, to notice when another one takes its name.
        carrier: The group itself or a gloo group of the same ranks; None if nothing is sent.
        ranks: R, the number of ranks.
        mine: This process's rank.
        steps: How many exchanges this rank began.
    """

    group: dist.ProcessGroup
    carrier: dist.ProcessGroup | None
    ranks: int
    mine: int
    steps: int = 0


_CHANNELS: dict[str, _Channel] = {}


def _exchange(name: str, vote: Vote, plan: str, policy: AgreementPolicy) -> list[Vote]:
    """Return the votes of all ranks, by rank."""
    group = groups.process_group(name)
    try:
        channel = _channel(name, group, policy)
        channel.steps += 1
        if channel.carrier is None:
            votes = [Vote(vote.rows, kind=vote.kind)] * channel.ranks
            votes[channel.mine] = vote
            return votes
        fingerprint = _fingerprint(plan, policy)
        cells = [0] * (_CELLS * channel.ranks)
        own = slice(_CELLS * channel.mine, _CELLS * (channel.mine + 1))
        cells[own] = [vote.rows, vote.consent, vote.kind, fingerprint]
        # Everybody else's cells are zero, so the sum is the table of all ranks.
        table = torch.tensor(cells, dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=policy.timeout_s)
        channel.carrier.allreduce([table], options).wait()
    except RuntimeError as error:
        raise AgreementError(_who_is_missing(name, error, policy.timeout_s)) from error
    told = table.view(channel.ranks, _CELLS).tolist()
    if any(row[3] != fingerprint for row in told):
        compare_over_store(name, "plan", plan, policy.timeout_s, advice=_IN_A_STEP)
        compare_over_store(name, "policy", str(policy), policy.timeout_s, advice=_IN_A_STEP)
    return [Vote(rows, Consent(consent), BatchKind(kind)) for rows, consent, kind, _ in told]


def _channel(name: str, group: dist.ProcessGroup, policy: AgreementPolicy) -> _Channel:
    """Return the channel of a group; the first call for a group may be collective."""
    channel = _CHANNELS.get(name)
    if channel is None or channel.group is not group:
        ranks = groups.world_size(name)
        carrier: dist.ProcessGroup | None = group
        if ranks == 1 or groups.is_fake(name):
            carrier = None
        elif groups.backend_name(name, "cpu") is None:
            carrier = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=policy.timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )
        channel = _CHANNELS[name] = _Channel(group, carrier, ranks, groups.rank(name))
    return channel


def _capture() -> str:
    """Return what is being captured, in words; nothing if nothing is."""
    if torch.compiler.is_compiling():
        return "a model is being traced by torch.compile or torch.export"
    # A capture needs an initialised CUDA; is_available() would ask the driver at every step.
    if (
        torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
        and torch.cuda.is_current_stream_capturing()
    ):
        return "a CUDA graph is being captured"
    return ""


@lru_cache(maxsize=256)
def _fingerprint(plan: str, policy: AgreementPolicy) -> int:
    """Return 64 bits that stand for what must be the same on every rank."""
    digest = hashlib.sha256(f"{policy}\n{plan}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _who_is_missing(name: str, error: RuntimeError, timeout_s: float) -> str:
    """Leave word of a failed step, read the others' word, and say who left none."""
    ranks, mine = groups.world_size(name), groups.rank(name)
    # gloo begins with the place in its own source.
    here = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition("\n")[0]
    headline = f"agree_batch, step {_step(name)} in group {name!r}, rank {mine} of {ranks}: {here}"
    grace_s = min(timeout_s, _GRACE_S)
    try:
        words = _tell(name, _word_key(_step(name)), f"got no answer: {here}", grace_s)
    except RuntimeError as silence:
        return (
            f"{headline}. The rendezvous store does not answer either ({silence}), so who is "
            "missing is unknown: the process that hosts the store, rank 0 or torchrun's agent, "
            "has probably ended. Look for the first error there."
        )
    missing = [rank for rank in range(ranks) if rank not in words]
    told = "; ".join(f"rank {rank}: {word}" for rank, word in words.items() if rank != mine)
    who = (
        f"{_named(missing)} of {ranks} left no word within {grace_s:g} s after that: ended, "
        "hanging, or not yet at this step. Look for the first error there."
        if missing
        else "No rank is missing now: one came too late or gave up before this one came."
    )
    return f"{headline}\n  {who}" + (f"\n  {told}" if told else "")


def _leave_word(name: str | None, word: str) -> None:
    """Let the ranks that will wait for this one know why it does not come to the next step."""
    if name is None or groups.world_size(name) == 1 or groups.is_fake(name):
        return
    key = f"{_word_key(_step(name) + 1)}/{groups.rank(name)}"
    groups.store(name).set(key, word)


def _step(name: str) -> int:
    """Return how many exchanges this rank began in the group."""
    return _CHANNELS[name].steps if name in _CHANNELS else 0


def _word_key(step: int) -> str:
    """Return the start of the keys under which ranks leave word about a step."""
    return f"dbo_fx/agree/{step}"


def _tell(name: str, key: str, value: str, timeout_s: float) -> dict[int, str]:
    """Write this rank's value into the group's store and return what the ranks wrote in time."""
    store = groups.store(name)
    keys = [f"{key}/{rank}" for rank in range(groups.world_size(name))]
    store.set(keys[groups.rank(name)], value)
    present = range(len(keys))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        return {
            rank: store.get(keys[rank]).decode() for rank in present if store.check([keys[rank]])
        }
    return {rank: store.get(keys[rank]).decode() for rank in present}


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
