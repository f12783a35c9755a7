"""Captured steps on two ranks: one decision a step, the same graphs everywhere or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx import AgreementPolicy, BatchKind, Bucket, CudaGraphs, GraphOptions, wrap, wrapping
from dbo_fx import graphs as graphs_module
from dbo_fx.capturing import twin_capture, what_captures
from dbo_fx.comm import in_flight
from dbo_fx.errors import OptionError
from rank_pool import RankPool
from small_moe import CachedMoe, H, PlainMoe, arguments, rows

POLICY = AgreementPolicy(0, 0, buckets=(4, 8))
SIZES = [(3, 8), (4, 4), (1, 0), (5, 2), (9, 3), (8, 8)]


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)


@torch.no_grad()
def run_steps(rank: int) -> dict[str, Any]:
    """Steps of many sizes, by graph where there is one, against the sequential program."""
    model = PlainMoe()
    serial = wrap(compiled(model, schedule="sequential", verify="static"), policy=POLICY)
    step = wrap(compiled(model), policy=POLICY)
    step.capture([8, 4], rows(5))
    program = dbo_fx.compilations()[-1]
    equal, agreed = [], []
    for n, sizes in enumerate(SIZES):
        x = rows(sizes[rank], seed=n)
        with mock.patch.object(wrapping, "agree_batch", wraps=wrapping.agree_batch) as agree:
            out = step(x).clone()
        agreed.append(agree.call_count)
        equal.append(torch.equal(out, serial(x)))
    return {
        "equal": equal,
        "agreed": agreed,
        "statistics": str(step.statistics),
        "checked": program.checked,
        "in_flight": len(in_flight()),
    }


def test_steps_by_graph_equal_the_sequential_program(ranks: RankPool) -> None:
    for rank, result in enumerate(ranks(run_steps)):
        assert result["equal"] == [True] * len(SIZES)
        assert result["agreed"] == [1] * len(SIZES)
        assert result["in_flight"] == 0
        # The first call's test ran: in the warm-up, since inside a capture it refuses to.
        assert result["checked"].startswith("agrees")
        total = sum(pair[rank] for pair in SIZES)
        padding = 8 + 4 + 4 + 8 + 9 + 8 - total
        assert result["statistics"] == (
            f"6 steps split, 0 not split; {total} rows, {padding} rows of padding\n"
            "5 replays, 1 eager runs\n"
            "  3 replays: 8 rows, with prefill, split\n"
            "  2 replays: 4 rows, with prefill, split\n"
            "  1 eager: no graph for 9 rows, with prefill, split"
        )


@torch.no_grad()
def run_kinds(rank: int) -> dict[str, Any]:
    """Graphs for decode steps that are split, and for those that are not."""
    model = PlainMoe()
    step = wrap(
        compiled(model, verify="static"),
        policy=AgreementPolicy(4, 0, buckets=(4, 8)),
        unsplit=model,
        kind=lambda n: BatchKind.DECODE if n < 9 else BatchKind.PREFILL,
    )
    unsplit = Bucket(4, BatchKind.DECODE, "unsplit")
    step.capture([8, unsplit], rows(5))
    for count in (8, 3, 5, 4):
        step(rows(count))
    return {"hits": dict(step.graphs.statistics.hits), "eager": step.graphs.statistics.eager}


def test_graphs_are_found_by_kind_and_plan(ranks: RankPool) -> None:
    for result in ranks(run_kinds):
        split, unsplit = Bucket(8, BatchKind.DECODE), Bucket(4, BatchKind.DECODE, "unsplit")
        assert result["hits"] == {split: 2, unsplit: 1}
        assert result["eager"] == {"no graph for 4 rows, decode-only, split": 1}


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_other_buckets(rank: int) -> tuple[str, int]:
    step = wrap(torch.compile(PlainMoe(), backend="eager"), policy=POLICY)
    graphs = GraphOptions(timeout_s=20.0)
    step.graphs.options = graphs
    return error_of(step.capture, [4, 8] if rank else [8], rows(4)), len(step.graphs.buckets)


def test_ranks_that_capture_other_buckets_are_named(ranks: RankPool) -> None:
    for text, count in ranks(run_other_buckets):
        assert "AgreementError: CUDA graph buckets" in text
        assert "8 rows, with prefill, split; 4 rows" in text
        assert count == 0


def run_one_fails(rank: int, where: str) -> dict[str, Any]:
    """Rank 1 fails behind its last communication, or before its first.

    There its arguments are wrong, or it has no memory.
    """
    model = PlainMoe()
    original = model.experts

    def experts(layer: int, h: Tensor) -> Tensor:
        out = original(layer, h)
        if rank and what_captures():
            raise ZeroDivisionError("broken")
        return out

    graphs = CudaGraphs(model, options=GraphOptions(timeout_s=20.0))
    graphs.capture([8], rows(4))
    if where == "behind":
        model.experts = experts  # type: ignore[method-assign]
        text = error_of(graphs.capture, [4], rows(4))
        model.experts = original  # type: ignore[method-assign]
    elif where == "memory":
        no_room = mock.patch.object(graphs_module, "kept_state", side_effect=OptionError("no room"))
        with no_room if rank else nullcontext():
            text = error_of(graphs.capture, [4], rows(4))
    else:
        text = error_of(graphs.capture, [4], rows(4) if not rank else None)
    buckets = [b.rows for b in graphs.buckets]
    eager = graphs(rows(3)).shape[0]
    graphs.capture([4], rows(4))
    return {"text": text, "buckets": buckets, "eager": eager, "now": len(graphs.buckets)}


@pytest.mark.parametrize("where", ["behind", "arguments", "memory"])
def test_a_rank_that_fails_to_capture_keeps_all_from_having_the_graph(
    ranks: RankPool, where: str
) -> None:
    zero, one = ranks(run_one_fails, where)
    assert "AgreementError: CUDA graph" in zero["text"]
    assert "rank 1 has 'failed: " in zero["text"]
    assert ("ZeroDivisionError" if where == "behind" else "TypeError") in one["text"] or (
        "OptionError" in one["text"]
    )
    for result in (zero, one):
        assert result["buckets"] == [8]
        assert result["eager"] == 3
        assert result["now"] == 2


@torch.no_grad()
def run_moved_cache(rank: int) -> dict[str, Any]:
    """Rank 1 brings other caches once."""
    model = CachedMoe(2)
    step = wrap(
        compiled(model, verify="static"), policy=POLICY, token_args=["x"], pad=None, unsplit=model
    )
    x, counter, caches = arguments(model, 4)
    step.capture([4], x, counter, caches)
    before = int(counter)
    step(x, counter, caches)
    moved = [c.clone() for c in caches] if rank else caches
    texts = [error_of(step, x, counter, moved), error_of(step, x[: 4 - rank], counter, caches)]
    step(x, counter, caches)
    return {"before": before, "texts": texts, "counter": int(counter)}


def test_a_moved_cache_stops_all_ranks_before_the_step(ranks: RankPool) -> None:
    zero, one = ranks(run_moved_cache)
    assert "ranks [1] of 2 could not prepare their arguments" in zero["texts"][0]
    assert "SoundnessError: CUDA graph: static argument 'caches[0]' lies at" in one["texts"][0]
    for result in (zero, one):
        # Rank 1 has 3 rows: its caches would take the padding for a token.
        assert "pads this step" in result["texts"][1]
        assert result["before"] == 2
        assert result["counter"] == 2 + 2 * 4


@torch.no_grad()
def run_own_capture(rank: int) -> dict[str, Any]:
    """The caller captures the step: the decision is made before."""
    model = PlainMoe()
    step = wrap(compiled(model, verify="static"), policy=POLICY)
    step.capture([4], rows(4))
    x = rows(3)
    wanted = step(x).clone()
    decision = step.decide(x)
    with twin_capture():
        with mock.patch.object(wrapping, "agree_batch") as agree:
            inside = step.run(decision, x)
        refused = error_of(step, x)
    return {
        "equal": torch.equal(inside, wanted),
        "agreed": agree.call_count,
        "refused": refused,
        "more": error_of(step.run, decision, rows(5)),
        "eager": dict(step.graphs.statistics.eager),
    }


def test_a_callers_own_capture_takes_the_decision_from_outside(ranks: RankPool) -> None:
    for result in ranks(run_own_capture):
        assert result["equal"]
        assert result["agreed"] == 0
        assert "AgreementError: agree_batch was called while" in result["refused"]
        assert "found 5 rows, the decision has room for 4" in result["more"]
        assert result["eager"] == {"captured by the caller": 1}


def run_uncompiled(rank: int) -> str:
    """A program that would be compiled, and compared, during a capture."""
    run = compiled(PlainMoe(), verify="static")
    x = rows(4)
    torch._dynamo.mark_dynamic(x, 0)
    with twin_capture():
        return error_of(run, x)


def test_compiling_inside_a_capture_is_refused(ranks: RankPool) -> None:
    for text in ranks(run_uncompiled):
        assert "program digest: the ranks would have to compare it while" in text


def test_a_bucket_that_no_step_is_padded_to_is_refused() -> None:
    model = torch.nn.Linear(H, H)
    step = wrap(model, unsplit=model, policy=AgreementPolicy(0, 0, buckets=(2, 8)))
    for size in (2, 7):
        with pytest.raises(OptionError, match=rf"no step is padded to {size} rows"):
            step.capture([size], rows(3))


@torch.no_grad()
def run_half_way(rank: int) -> dict[str, Any]:
    """A capture that fails with operations in flight, over a transport with slots."""
    model = PlainMoe()
    run = compiled(model, verify="static", transport="copy_engine")
    serial = compiled(model, verify="static", schedule="sequential")
    x = marked(rows(4, seed=rank))
    wanted = serial(x)
    graphs = CudaGraphs(run)
    run(x)
    program = dbo_fx.compilations()[-1]
    record = program.runtime.record

    def breaks(event: int, stream: str) -> None:
        record(event, stream)
        if what_captures() and in_flight():
            raise ZeroDivisionError("half-way")

    program.runtime.record = breaks  # type: ignore[method-assign]
    text = error_of(graphs.capture, [4], x)
    left = len(in_flight())
    program.runtime.record = record  # type: ignore[method-assign]
    eager = torch.equal(run(x), wanted)
    graphs.capture([4], x)
    return {"text": text, "left": left, "eager": eager, "replay": torch.equal(graphs(x), wanted)}


def marked(x: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_a_capture_that_fails_half_way_leaves_nothing_in_flight(ranks: RankPool) -> None:
    for result in ranks(run_half_way):
        assert result == {
            "text": "ZeroDivisionError: half-way",
            "left": 0,
            "eager": True,
            "replay": True,
        }
