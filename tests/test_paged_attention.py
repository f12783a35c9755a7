"""Whatever the mix of requests and wherever it is cut, every query reads what it read unsplit."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paged_attention
from dbo_fx import batch_metadata, split
from dbo_fx.batch_metadata import BatchTensors
from dbo_fx.split_points import RULES, BatchShape, Slice, cut
from paged_attention import EARLIER, STRIDE, Case, differences, make_case, run_whole

SOURCES = {"compact", "tensor points", "rows in place", "tight", "spec"}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make_case(lambda low, high: draw(st.integers(low, high)))


def property_of(examples: int):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 1000,
        suppress_health_check=checks,
    )


@property_of(200)
@given(cases())
def test_split_attention_equals_unsplit(case: Case):
    assert differences(case) == []


@pytest.mark.slow
@property_of(2000)
@given(cases())
def test_split_attention_equals_unsplit_for_long(case: Case):
    assert differences(case) == []


def numbered(count: int) -> list[Case]:
    return [make_case(Random(number).randint) for number in range(count)]


def caught(count: int = 60) -> set[str]:
    """What differs in any of the first cases."""
    return {name for case in numbered(count) for name in differences(case)}


def test_cases_reach_every_rule_source_and_kind_of_split():
    found = numbered(400)
    assert {case.rule for case in found} >= {*RULES, "random"}
    assert {case.source for case in found} == SOURCES
    assert {len(case.slices) for case in found} == {2, 3, 4}
    assert {case.writes_ahead for case in found} == {False, True}
    assert {case.batch.positions.dim() for case in found} == {1, 2}
    ends = [(case, piece) for case in found for piece in case.slices[1:]]
    assert any(piece.start not in case.shape.query_start_loc for case, piece in ends)
    assert any(piece.num_tokens == 0 for _, piece in ends)
    # One request in three microbatches, and a page that the same step fills for another request.
    assert any(
        sum(piece.request_start <= r < piece.request_stop for piece in case.slices) > 2
        for case in found
        for r in range(case.shape.num_requests)
    )
    assert any(reads_page_of_this_step(case) for case in found)


def reads_page_of_this_step(case: Case) -> bool:
    seen = run_whole(case)[1].seen
    starts = case.shape.query_start_loc
    for request in range(1, case.shape.num_requests):
        writers = seen[starts[request]] % STRIDE
        if bool(((seen[starts[request]] > 0) & (writers < starts[request])).any()):
            return True
    return False


def small_case() -> Case:
    """Two requests, pages of two: 3 tokens after 2 computed ones, and a decode after 1."""
    batch = BatchTensors(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([5, 2], dtype=torch.int32),
        block_table=torch.tensor([[3, 0, 2], [1, 0, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1, 4, 3, -1, -1]),
        positions=torch.tensor([2, 3, 4, 1, 0, 0]),
    )
    shape = BatchShape((3, 1), (5, 2), 6)
    pieces = cut(shape, [2, 4])
    return Case(shape, batch, 2, (2, 6, 7), 8, "random", pieces, "compact", False)


def test_unsplit_reads_are_those_worked_out_by_hand():
    # Per query: slot -> (position counted from 1, the token that wrote the slot).
    before = {6: (1, EARLIER + 6), 7: (2, EARLIER + 7)}
    expected = [
        {**before, 0: (3, 0)},
        {**before, 0: (3, 0), 1: (4, 1)},
        {**before, 0: (3, 0), 1: (4, 1), 4: (5, 2)},
        {2: (1, EARLIER + 2), 3: (2, 3)},
        {},
        {},
    ]
    _, reads = run_whole(small_case())
    found = [
        {slot: divmod(code, STRIDE) for slot, code in enumerate(row) if code}
        for row in reads.seen.tolist()
    ]
    assert found == expected
    assert differences(small_case()) == []
    assert small_case().slices[2] == Slice(4, 6, 2, 2, 0)


def test_without_the_tail_rule_the_check_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_metadata, "clip_seq_lens", lambda seq_lens, loc, stop: seq_lens)
    assert {"seen", "position"} <= caught()


def test_a_sequence_cut_at_its_head_fails(monkeypatch: pytest.MonkeyPatch):
    right = batch_metadata.clip_seq_lens

    def head_too(seq_lens: torch.Tensor, loc: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        clipped = right(seq_lens, loc, stop)
        # As if the microbatch began a new sequence: only its own query is left.
        return torch.minimum(clipped, loc[1:].clamp(max=stop) - loc[:-1])

    monkeypatch.setattr(batch_metadata, "clip_seq_lens", head_too)
    assert {"seen", "position"} <= caught()


@pytest.mark.parametrize("side", ["start", "stop"])
def test_without_clamping_the_query_the_check_fails(monkeypatch: pytest.MonkeyPatch, side: str):
    def unclamped(loc: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        return (loc.clamp(max=stop) if side == "start" else loc.clamp(min=start)) - start

    monkeypatch.setattr(batch_metadata, "clip_query_start_loc", unclamped)
    monkeypatch.setattr(batch_metadata.torch, "_assert_async", lambda *_: None)
    assert "lengths" in caught()


def test_in_another_order_the_check_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        paged_attention,
        "order",
        lambda case: [
            (step, m) for m in reversed(range(len(case.slices))) for step in ("write", "attend")
        ],
    )
    assert {"seen", "output"} <= caught()


def test_wrong_lengths_in_a_spec_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        split,
        "_lengths",
        lambda kind, value, batch, piece: value[piece.request_start : piece.request_stop].clone(),
    )
    assert {"seen", "position"} <= caught()
