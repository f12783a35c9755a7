"""What `test_two_gpus.py` runs on GPUs, on two CPU ranks: with the twins of all that is used."""

from __future__ import annotations

import pytest

from rank_pool import RankPool
from two_ranks import Case, check_case, check_overflow, run_case, run_overflow

CASES = [Case("copy_engine", 1.9)]
SLOW = [
    Case("gloo"),
    Case("copy_engine", schedule="single_batch_overlap"),
    Case("gloo", 1.9, "single_batch_overlap", (("matmul_carveout", 8),)),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_bit_equal_to_sequential_eager_captured_and_poisoned(ranks: RankPool, case: Case) -> None:
    check_case(ranks(run_case, case, "cpu"), case)


def test_overflow_is_counted_eager_and_in_replays(ranks: RankPool) -> None:
    check_overflow(ranks(run_overflow, Case("gloo", 3), "cpu"))
