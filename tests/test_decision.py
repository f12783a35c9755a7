"""The rule by which ranks decide to split, without any rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_fx.decision import (
    NO_THRESHOLDS,
    AgreementPolicy,
    BatchKind,
    Consent,
    Vote,
    decide,
)
from dbo_fx.errors import OptionError

DECODE, PREFILL = BatchKind.DECODE, BatchKind.PREFILL
POLICY = AgreementPolicy(buckets=(64, 512, 1024))


def votes(*ranks: tuple[int, BatchKind]) -> list[Vote]:
    """Votes of ranks that allow the split."""
    return [Vote(rows, kind=kind) for rows, kind in ranks]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [(32, DECODE), (40, DECODE)],
            "split; 32 to 40 rows on 2 ranks, padded to 64 (bucket 64)",
        ),
        (
            [(31, DECODE), (40, DECODE)],
            "not split: ranks [0] have fewer than 32 rows (decode-only); "
            "31 to 40 rows on 2 ranks, padded to 64 (bucket 64)",
        ),
        (
            [(511, DECODE), (900, PREFILL), (600, DECODE)],
            "not split: ranks [0] have fewer than 512 rows (with prefill); "
            "511 to 900 rows on 3 ranks, padded to 1024 (bucket 1024)",
        ),
        (
            [(512, DECODE), (2000, PREFILL)],
            "split; 512 to 2000 rows on 2 ranks, padded to 2000 (no bucket)",
        ),
        (
            [(0, PREFILL), (40, DECODE)],
            "not split: ranks [0] have fewer than 32 rows (decode-only); "
            "0 to 40 rows on 2 ranks, padded to 64 (bucket 64)",
        ),
    ],
)
def test_examples(ranks: Any, said: str) -> None:
    assert str(decide(votes(*ranks), POLICY)) == said


def test_every_reason_is_given() -> None:
    found = decide([Vote(5, Consent.REFUSES), Vote(0, Consent.FAILS), Vote(600)], POLICY)
    assert not found.split
    assert found.reason == (
        "ranks [1] cannot run the step; ranks [0] did not allow it; "
        "ranks [0, 1] have fewer than 512 rows (with prefill)"
    )


def test_idle_ranks_split_too_without_thresholds() -> None:
    found = decide(votes((0, PREFILL), (7, DECODE)), NO_THRESHOLDS)
    assert found.split
    assert (found.kind, found.padded_rows, found.bucket, found.reason) == (DECODE, 7, None, "")


def test_the_least_rows_choose_the_bucket() -> None:
    policy = AgreementPolicy(buckets=(2, 8), least_rows=4)
    assert decide(votes((1, DECODE)), policy).padded_rows == 8
    assert decide(votes((1, DECODE)), AgreementPolicy(least_rows=4)).padded_rows == 4


def test_the_strictest_kind_is_the_one_with_the_higher_threshold() -> None:
    policy = AgreementPolicy(decode_threshold=100, prefill_threshold=10)
    assert decide(votes((50, DECODE), (50, PREFILL)), policy).kind is DECODE
    assert decide(votes((50, PREFILL), (50, PREFILL)), policy).split


@given(
    st.lists(
        st.builds(
            Vote,
            st.integers(0, 700),
            st.sampled_from(Consent),
            st.sampled_from(BatchKind),
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(1, 800), unique=True, max_size=4).map(sorted),
    st.integers(0, 8),
)
def test_the_decision_follows_from_its_definition(
    ranks: list[Vote], buckets: list[int], least: int
) -> None:
    policy = AgreementPolicy(buckets=tuple(buckets), least_rows=least)
    found = decide(ranks, policy)
    prefill = any(vote.kind is PREFILL for vote in ranks if vote.rows)
    idle = all(vote.rows == 0 for vote in ranks)
    enough = not idle and all(vote.rows >= (512 if prefill else 32) for vote in ranks)
    assert found.split == (enough and all(vote.consent is Consent.ALLOWS for vote in ranks))
    assert found.split == (found.reason == "")
    needed = max(least, *(vote.rows for vote in ranks))
    assert found.padded_rows == min((b for b in buckets if b >= needed), default=needed)
    assert found.bucket in (None, found.padded_rows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decode_threshold": -1}, "decode_threshold=-1, wanted an integer >= 0"),
        ({"prefill_threshold": True}, "prefill_threshold=True, wanted an integer >= 0"),
        ({"least_rows": 2.0}, r"least_rows=2\.0, wanted an integer >= 0"),
        ({"buckets": (8, 4)}, r"buckets=\(8, 4\), wanted row counts from 1 on"),
        ({"buckets": (0, 4)}, r"buckets=\(0, 4\), wanted row counts from 1 on"),
        ({"timeout_s": 0}, "timeout_s=0, wanted seconds above 0"),
    ],
)
def test_policies_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        AgreementPolicy(**options)


def test_a_list_of_buckets_is_kept_as_a_tuple() -> None:
    buckets: Any = [4, 8]
    assert hash(AgreementPolicy(buckets=buckets)) == hash(AgreementPolicy(buckets=(4, 8)))
