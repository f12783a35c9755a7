"""How ranks tell each other what they know: one all-reduce a step, the store when it fails.

`exchange` is the healthy path: a single small all-reduce on the CPU. When it fails, because a rank
ended or did not come in time, every rank leaves word in the rendezvous store and reads the others';
who left none is missing.
"""

from __future__ import annotations

import atexit
import re
from array import array
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.decision import BatchKind, Consent, Vote
from dbo_fx.errors import AgreementError

# How long a rank whose step failed waits for the others' word, if its own limit is not shorter.
_GRACE_S = 5.0
_CELLS = 4
_CONSENTS, _KINDS = tuple(Consent), tuple(BatchKind)


@dataclass(slots=True)
class _Channel:
    """How the ranks of one group exchange their votes.

    Attributes:
        group: The group, to notice when another one takes its name.
        carrier: The group itself or a gloo group of the same ranks; None if nothing is sent.
        ranks: R, the number of ranks.
        mine: This process's rank.
        cells: What each rank says in a step, four integers a rank.
        table: The same memory as a tensor [4 R].
        steps: How many exchanges this rank began.
    """

    group: dist.ProcessGroup
    carrier: dist.ProcessGroup | None
    ranks: int
    mine: int
    cells: array[int]
    table: Tensor
    steps: int = 0


_CHANNELS: dict[str, _Channel] = {}
# A gloo group that outlives the interpreter aborts the process: its threads are still running.
atexit.register(_CHANNELS.clear)


def exchange(name: str, vote: Vote, fingerprint: int, timeout_s: float) -> tuple[list[Vote], bool]:
    """Give this rank's vote and take everybody's.

    Args:
        name: Name of the process group.
        vote: This rank's vote.
        fingerprint: 64 bits that must be the same on every rank.
        timeout_s: How long to wait for the other ranks.

    Returns:
        The votes of all ranks, by rank; and whether all fingerprints are the same. A group that
        only pretends to communicate pretends that the others say what this rank says, and allow
        the split.

    Raises:
        AgreementError: A rank ended or did not come in time; names the rank.
    """
    group = groups.process_group(name)
    try:
        channel = _channel(name, group, timeout_s)
        channel.steps += 1
        if channel.carrier is None:
            votes = [Vote(vote.rows, kind=vote.kind)] * channel.ranks
            votes[channel.mine] = vote
            return votes, True
        # Everybody else's cells are zero, so the sum is what all ranks say.
        cells = [0] * (_CELLS * channel.ranks)
        first = _CELLS * channel.mine
        cells[first : first + _CELLS] = (vote.rows, vote.consent, vote.kind, fingerprint)
        channel.cells[:] = array("q", cells)
        channel.carrier.allreduce([channel.table], _options(timeout_s)).wait()
    except RuntimeError as error:
        raise AgreementError(_who_is_missing(name, error, timeout_s)) from error
    told = channel.cells.tolist()
    said = zip(told[::_CELLS], told[1::_CELLS], told[2::_CELLS], strict=True)
    votes = [Vote(rows, _CONSENTS[consent], _KINDS[kind]) for rows, consent, kind in said]
    return votes, told[3::_CELLS] == [fingerprint] * channel.ranks


@lru_cache(maxsize=16)
def _options(timeout_s: float) -> dist.AllreduceOptions:
    """Return the options of a sum that waits only so long."""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _channel(name: str, group: dist.ProcessGroup, timeout_s: float) -> _Channel:
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
                timeout=timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )
        cells = array("q", bytes(8 * _CELLS * ranks))
        # Made in inference mode, it could not be written outside of it.
        with torch.inference_mode(False):
            table = torch.frombuffer(cells, dtype=torch.int64)
        channel = _Channel(group, carrier, ranks, groups.rank(name), cells, table)
        _CHANNELS[name] = channel
    return channel


def _who_is_missing(name: str, error: RuntimeError, timeout_s: float) -> str:
    """Leave word of a failed step, read the others' word, and say who left none."""
    ranks, mine = groups.world_size(name), groups.rank(name)
    # gloo begins with the place in its own source.
    here = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition("\n")[0]
    headline = f"agree_batch, step {_step(name)} in group {name!r}, rank {mine} of {ranks}: {here}"
    grace_s = min(timeout_s, _GRACE_S)
    try:
        words = tell(name, _word_key(_step(name)), f"got no answer: {here}", grace_s)
    except RuntimeError as silence:
        return (
            f"{headline}. The rendezvous store does not answer either ({silence}), so who is "
            "missing is unknown: the process that hosts the store, rank 0 or torchrun's agent, "
            "has probably ended. Look for the first error there."
        )
    missing = [rank for rank in range(ranks) if rank not in words]
    told = "; ".join(f"rank {rank}: {word}" for rank, word in words.items() if rank != mine)
    who = (
        f"{named(missing)} of {ranks} left no word within {grace_s:g} s after that: ended, "
        "hanging, or not yet at this step. Look for the first error there."
        if missing
        else "No rank is missing now: one came too late or gave up before this one came."
    )
    return f"{headline}\n  {who}" + (f"\n  {told}" if told else "")


def leave_word(name: str | None, word: str) -> None:
    """Let the ranks that will wait for this one know why it does not come to the next step.

    Args:
        name: Name of the process group, None if there is none.
        word: What happened.
    """
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


def tell(name: str, key: str, value: str, timeout_s: float) -> dict[int, str]:
    """Write this rank's value into the group's store and read the others'.

    Args:
        name: Name of the process group.
        key: Start of the keys, the same on every rank.
        value: This rank's value.
        timeout_s: How long to wait for the other ranks.

    Returns:
        What each rank wrote in time, by rank.
    """
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


def named(ranks: list[int]) -> str:
    """Return ranks in words: "rank 1" or "ranks [1, 2]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
