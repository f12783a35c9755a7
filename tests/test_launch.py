"""Ranks that work, raise, die, hang."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_fx.comm import groups
from dbo_fx.errors import CommunicationError, OptionError
from dbo_fx.launch import RankError, Ranks, run_ranks
from rank_pool import RankPool

OPS = torch.ops.dbo_fx


def run_sum(rank: int, add: int) -> tuple[int, int, int, str]:
    """A collective, and what the rank sees of its surroundings."""
    total = torch.tensor([rank + add])
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), torch.get_num_threads(), os.environ["LOCAL_RANK"]


def test_results_come_back_by_rank() -> None:
    assert run_ranks(run_sum, 2, (10,), timeout_s=60) == [(21, 2, 1, "0"), (21, 2, 1, "1")]


def test_one_rank_is_enough() -> None:
    assert run_ranks(run_sum, 1, (10,), timeout_s=60) == [(10, 1, 1, "0")]


def test_no_rank_is_refused() -> None:
    with pytest.raises(OptionError, match="world_size is 0"):
        run_ranks(run_sum, 0)


def run_large(rank: int, x: torch.Tensor) -> torch.Tensor:
    """More than a pipe buffers, both ways."""
    return x + rank


def test_large_tensors_travel(ranks: RankPool) -> None:
    x = torch.zeros(300_000)
    for rank, got in enumerate(ranks(run_large, x)):
        assert torch.equal(got, x + rank)


def fail_with_peer_waiting(rank: int) -> None:
    """Rank 1 raises while rank 0 waits for it in a collective."""
    if rank == 1:
        raise ValueError("the real reason")
    dist.all_reduce(torch.zeros(1))


def fail_after_leaving(rank: int) -> None:
    """Rank 1 breaks its connections before it raises, so rank 0 complains first."""
    name = groups.name_of(None)
    assert name is not None
    store = groups.store(name)
    if rank == 0:
        try:
            dist.all_reduce(torch.zeros(1))
        finally:
            store.set("rank 0 complains", "")
    dist.destroy_process_group()
    store.wait(["rank 0 complains"])
    raise ValueError("the real reason")


@pytest.mark.parametrize("fn", [fail_with_peer_waiting, fail_after_leaving])
def test_the_rank_that_raised_is_shown_first(fn: Any) -> None:
    group = Ranks(2, timeout_s=60)
    group.call(run_sum, (0,))
    with pytest.raises(RankError) as caught:
        group.call(fn, timeout_s=30)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 raised ValueError: the real reason (of 2 ranks)"
    assert lines[1] == "--- traceback of rank 1 ---"
    assert fn.__name__ in caught.value.trace
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert not group.alive
    with pytest.raises(RankError, match="the ranks have been ended"):
        group.call(fn)


def die_between_halves(rank: int) -> None:
    """Rank 1 is killed after both have sent once; rank 0 then waits for its data."""
    name = groups.name_of(None)
    assert name is not None
    x = torch.ones(1 << 20)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out = OPS.comm_buffers([x], "all_gather", name)
    OPS.dispatch_send([x], out, "all_gather", name, "gloo", 0)
    OPS.dispatch_recv(out, name, "gloo", 0)


def test_a_killed_rank_ends_the_run_and_is_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(die_between_halves, 2, timeout_s=60)
    assert str(caught.value).startswith("rank 1 was killed by signal 9")
    assert caught.value.rank == 1


def leave_without_peer(rank: int) -> str:
    """Rank 1 leaves the group; rank 0's receive says which operation failed."""
    name = groups.name_of(None)
    assert name is not None
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return ""
    x = torch.ones(1 << 20)
    out = OPS.comm_buffers([x], "all_gather", name)
    OPS.dispatch_send([x], out, "all_gather", name, "gloo", 3)
    with pytest.raises(CommunicationError) as caught:
        OPS.dispatch_recv(out, name, "gloo", 3)
    return str(caught.value)


def test_a_lost_peer_is_reported_by_the_operation_that_waited() -> None:
    said = run_ranks(leave_without_peer, 2, timeout_s=60)[0]
    assert "dispatch, flight 3, group '0': the gloo transport failed" in said
    assert "A rank of the group has probably ended" in said


def exit_quietly(rank: int) -> None:
    """Rank 0 leaves without a word."""
    if rank == 0:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def test_a_rank_that_exits_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 0 exited with code 3 and no traceback"):
        run_ranks(exit_quietly, 2, timeout_s=120)


def hang(rank: int) -> None:
    """Rank 1 waits for a collective that rank 0 never calls."""
    if rank == 1:
        dist.all_reduce(torch.zeros(1))


def test_time_runs_out_and_names_who_is_late(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not finish within 2 s") as caught:
        ranks(hang, timeout_s=2)
    assert caught.value.rank is None


class Unpicklable(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, first: str, second: str) -> None:
        """Pass on fewer arguments than are needed."""
        super().__init__(first + second)


def raise_unpicklable(rank: int) -> None:
    """Both ranks raise."""
    raise Unpicklable("a", "b")


def return_unpicklable(rank: int) -> Any:
    """A result that cannot travel."""
    return lambda: rank


@pytest.mark.slow
def test_unpicklable_errors_and_results_are_still_shown(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="raised Unpicklable: ab") as caught:
        ranks(raise_unpicklable)
    assert caught.value.error is None
    with pytest.raises((AttributeError, TypeError, RankError), match=r"pickle"):
        ranks(return_unpicklable)


def raise_key_error(rank: int) -> None:
    """Both ranks raise."""
    raise KeyError("missing")


def test_the_pool_raises_the_ranks_error_and_starts_again(ranks: RankPool) -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        ranks(raise_key_error)
    assert isinstance(caught.value.__cause__, RankError)
    assert ranks(run_sum, 0)[0][0] == 1
