"""Real ranks on two GPUs: overlapped programs are bit-equal to their sequential form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rank_pool import RankPool
from two_ranks import Case, check_case, check_overflow, run_case, run_overflow

pytestmark = pytest.mark.multi_gpu
UNSPLIT = "single_batch_overlap"
SMS = (("comm_sms", 4), ("matmul_carveout", 8))
CASES = [
    *(
        Case(transport, capacity, schedule)
        for transport in ("nccl", "copy_engine")
        for capacity in (None, 1.9)
        for schedule in ("mlp_shared_overlap", UNSPLIT)
    ),
    Case("nccl", options=SMS),
    Case("nccl", schedule=UNSPLIT, options=SMS),
    Case("copy_engine", options=(("matmul_carveout", 8),)),
    Case("nccl", 1.9, options=(("segment_backend", "inductor"),)),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks over NCCL: rank r has GPU r."""
    pool = RankPool(2, "nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_equal_to_sequential_eager_captured_and_poisoned(pair: RankPool, case: Case) -> None:
    check_case(pair(run_case, case, "cuda"), case)


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_overflow_is_counted_eager_and_in_replays(pair: RankPool, transport: str) -> None:
    check_overflow(pair(run_overflow, Case(transport, 3), "cuda"))
