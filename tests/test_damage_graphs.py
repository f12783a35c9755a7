"""Damaged graphs of real models, on real tensors: what operators declare, both must see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from damage_graphs import (
    GRAPH_OPERATORS,
    LOST_EDGE,
    GraphJudgement,
    graph_refusal,
    graph_witness,
    judge_graph,
)
from dbo_fx import schedules
from dbo_fx.contracts import Contract
from generated_graphs import TRANSPORTS, TWO_LAUNCHES, Cached, GraphCase, fits, graph_case
from small_moe import PlainMoe, TwoLaunches, one_rank

KINDS = (PlainMoe, Cached, TwoLaunches)
NAMES = (LOST_EDGE, *sorted(GRAPH_OPERATORS))
WANTED = 100


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with one_rank():
        yield


def judged(name: str, rng: Random, tally: Counter[str], layers: tuple[int, ...]) -> None:
    """Count one mutant, or fail with all that is known of it."""
    kinds = (Cached,) if name == LOST_EDGE and rng.random() < 0.8 else KINDS
    found: GraphJudgement | None = judge_graph(name, graph_case(rng, kinds, layers, 0.4), rng)
    if found is None:
        return
    assert found.disagrees is None, str(found)
    tally[found.expected] += 1


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_graph_is_what_it_is_declared_to_be(name: str) -> None:
    tally: Counter[str] = Counter()
    rng = Random(name)
    for _ in range(20):
        judged(name, rng, tally, (1,))
        if tally["unsafe"] >= 2:
            break
    assert tally["unsafe"], f"{name} found nothing to damage"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_damaged_graphs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tally: Counter[str] = Counter()
    rng = Random(name)
    for _ in range(6 * WANTED):
        judged(name, rng, tally, (1, 1, 2))
        if tally["unsafe"] >= WANTED:
            break
    with capsys.disabled():
        counts = tally["unsafe"], tally["redundant"], tally["slower"]
        print("\n{:<46}{:>8}{:>11}{:>8}".format(name, *counts), end="")
    assert tally["unsafe"] >= WANTED


@pytest.mark.parametrize("seed", range(12))
def test_a_graph_in_any_valid_order_is_certified_and_right(seed: int) -> None:
    case = graph_case(Random(seed), KINDS, (1,), named=0)
    state = case.lowered()
    assert graph_refusal(state, case) is None, str(case)
    verdict = graph_witness(state, case).confirm(8)
    assert verdict.safe, f"{case}: {verdict}"


@pytest.mark.parametrize("schedule", schedules.names())
@pytest.mark.parametrize(
    ("kind", "contract"),
    [(k, c) for k in KINDS for c in TRANSPORTS if k not in TWO_LAUNCHES or c.slots is None],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")),
)
def test_every_schedule_of_every_kind_is_certified(
    kind: type[PlainMoe], contract: Contract, schedule: str
) -> None:
    count = schedules.load(schedule).num_microbatches or 2
    case = GraphCase(kind, 1, count, contract, schedule)
    refusal = graph_refusal(case.lowered(), case)
    if fits(schedule, contract):
        assert refusal is None
    else:
        assert refusal is not None
        assert "in-flight" in refusal
