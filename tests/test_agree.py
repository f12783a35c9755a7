"""What ranks agree on: values over the store, one decision per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbo_fx.agree import BatchDecision, agree_batch, compare_over_store
from dbo_fx.comm import groups
from dbo_fx.errors import AgreementError
from rank_pool import RankPool


def world() -> str:
    """Name of the default group."""
    name = groups.name_of(None)
    assert name is not None
    return name


def refusal(call: Callable[..., Any], *args: Any) -> str:
    """Message of the AgreementError that a call raises."""
    with pytest.raises(AgreementError) as caught:
        call(*args)
    return str(caught.value)


def run_equal(rank: int) -> None:
    """Three comparisons in a row, the last one of another thing."""
    compare_over_store(world(), "equal", "a", 30)
    compare_over_store(world(), "equal", "b", 30)
    compare_over_store(world(), "equal too", "a", 30)


def test_equal_values_pass_step_by_step(ranks: RankPool) -> None:
    assert ranks(run_equal) == [None, None]


def run_different(rank: int) -> str:
    """Each rank brings its own value."""
    return refusal(compare_over_store, world(), "digest", f"value of {rank}", 30)


def test_different_values_name_the_rank_and_both_values(ranks: RankPool) -> None:
    first, second = ranks(run_different)
    assert "digest, comparison 1 in group '0': rank 0 has 'value of 0'" in first
    assert "rank 1 has 'value of 1'" in first
    assert "rank 1 has 'value of 1', but rank 0 has 'value of 0'" in second
    assert "All ranks must compile the same program" in first


def run_missing(rank: int) -> str:
    """Only rank 0 compares."""
    return refusal(compare_over_store, world(), "lonely", "x", 0.5) if rank == 0 else ""


def test_a_missing_rank_is_named_after_the_timeout(ranks: RankPool) -> None:
    said, _ = ranks(run_missing, timeout_s=30)
    assert "lonely, comparison 1 in group '0': rank 1 of 2 wrote nothing within 0.5 s" in said
    assert "rank 0 has 'x'" in said


def run_subgroups(rank: int) -> None:
    """Groups of one rank have nothing to compare."""
    mine = [dist.new_group([r]) for r in range(2)][rank]
    name = groups.name_of(mine)
    assert name is not None
    compare_over_store(name, "alone", str(rank), 0.5)


def test_a_group_of_one_agrees_at_once(ranks: RankPool) -> None:
    ranks(run_subgroups)


def test_fake_groups_agree_at_once() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        compare_over_store(world(), "pretended", "x", 0.5)
        assert agree_batch(5, True).ranks == 8
        assert agree_batch(5, False).refusing == (3,)
    finally:
        dist.destroy_process_group()


def run_batch(rank: int, rows: list[int], allowed: list[bool], failed: list[bool]) -> Any:
    """One decision."""
    return agree_batch(rows[rank], allowed[rank], failed=failed[rank])


@pytest.mark.parametrize(
    ("rows", "allowed", "failed", "want"),
    [
        ([3, 0], [True, True], [False, False], BatchDecision(3, 0, True, 2)),
        ([0, 0], [True, True], [False, False], BatchDecision(0, 0, True, 2)),
        ([2, 5], [True, False], [False, False], BatchDecision(5, 2, False, 2, (1,))),
        ([2, 5], [False, True], [False, True], BatchDecision(5, 2, False, 2, (0,), (1,))),
    ],
)
def test_every_rank_gets_the_same_decision(
    ranks: RankPool, rows: Any, allowed: Any, failed: Any, want: BatchDecision
) -> None:
    assert ranks(run_batch, rows, allowed, failed) == [want, want]


def test_without_torch_distributed_a_rank_decides_alone() -> None:
    assert agree_batch(4, True) == BatchDecision(4, 4, True, 1)
    assert agree_batch(4, False) == BatchDecision(4, 4, False, 1, (0,))


@pytest.mark.gpu
def test_no_decision_under_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = refusal(agree_batch, 4, True)
    assert "while a CUDA graph is being captured" in said
