"""The rival that benchmarks compare with, what they measure, and what they make of it."""

from __future__ import annotations

import json
from typing import Any

import on_gpus
import overlap_points
import performance_page
import pytest
import torch

import dbo_fx
from dbo_fx.models import MoeConfig, MoeDecoder
from rank_pool import RankPool

CONFIG = MoeConfig(
    vocab=64, hidden=16, layers=2, heads=2, experts=4, expert_hidden=8, shared_hidden=8
)


def compiled(schedule: str, microbatches: int) -> Any:
    options = {"schedule": schedule, "num_microbatches": microbatches, "verify": "static"}
    return torch.compile(MoeDecoder(CONFIG), backend="dbo_fx", fullgraph=True, options=options)


def ids(rank: int) -> torch.Tensor:
    found = torch.randint(0, 64, (5, 8), generator=torch.Generator().manual_seed(rank))
    torch._dynamo.mark_dynamic(found, 0)
    return found


@torch.no_grad()
def two_threads(rank: int) -> tuple[bool, int, int]:
    from threaded import Threaded, recorded

    torch._dynamo.reset()
    tokens = ids(rank)
    one = compiled("single_batch_overlap", 1)
    one(tokens)
    program = dbo_fx.compilations()[-1]
    threads = Threaded(program)
    args = recorded(program, lambda: one(tokens))
    found = [threads(*args), threads(*args)]
    wanted = compiled("sequential", 2)(tokens)
    parts = [x[0] if isinstance(x, tuple | list) else x for x in found]
    return all(torch.equal(p, wanted) for p in parts), threads.baton.yields, program.program.layers


@pytest.mark.slow
def test_two_threads_compute_what_the_sequential_program_does(ranks: RankPool) -> None:
    for equal, yields, layers in ranks(two_threads, timeout_s=300):
        assert equal
        # Two steps; in each, two threads that wait for a dispatch and a combine in every layer.
        assert yields == 2 * 2 * 2 * layers


@torch.no_grad()
def a_thread_that_fails(rank: int) -> str:
    from threaded import Threaded, recorded

    torch._dynamo.reset()
    tokens = ids(rank)
    one = compiled("sequential", 1)
    one(tokens)
    program = dbo_fx.compilations()[-1]
    threads = Threaded(program)
    args = recorded(program, lambda: one(tokens))

    def fails(*_: Any) -> None:
        raise ValueError("on purpose")

    threads._modules[0].forward = fails
    threads._modules[1].forward = fails
    try:
        threads(*args)
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_an_error_in_a_thread_reaches_the_caller(ranks: RankPool) -> None:
    assert ranks(a_thread_that_fails, timeout_s=300) == ["on purpose", "on purpose"]


def results(**dbo: float) -> dict[str, Any]:
    """Two transports of one case, and a point that was refused."""
    point = next(overlap_points.required()).to_json()
    slow = {"unsplit": 12.0, "sequential": 14.0, "mlp_shared_overlap": 10.0}
    fast = {"unsplit": 10.0, "sequential": 11.0, "mlp_shared_overlap": 9.0} | dbo
    common = {"point": point, "run": 0, "host_us": {}}
    return {
        "runs": [{"device": "d", "torch": "t", "commit": "c", "command": "x"}],
        "points": [
            {"key": "a", "ms": slow, "bound_ms": {"mlp_shared_overlap": 9.0}, **common},
            {"key": "b", "ms": fast, "bound_ms": {"mlp_shared_overlap": 8.5}, **common},
            {"key": "c", "point": point, "run": 0, "refused": "no such link"},
        ],
    }


def test_ratios_compare_with_the_best_unsplit_run_of_all_transports() -> None:
    slow, fast = performance_page.rows_of(results())
    assert slow["ratio"] == pytest.approx(10.0 / 10.0)
    assert fast["ratio"] == pytest.approx(10.0 / 9.0)
    assert slow["efficiency"] == pytest.approx((14 - 10) / (14 - 9))
    assert fast["split_price"] == pytest.approx(1.1)


def test_there_is_no_efficiency_where_nothing_can_be_hidden() -> None:
    found = results()
    found["points"][0]["bound_ms"]["mlp_shared_overlap"] = 14.5
    assert performance_page.rows_of(found)[0]["efficiency"] is None


def test_the_page_keeps_its_text_and_names_what_was_not_measured() -> None:
    page = f"before {performance_page.BEGIN} old {performance_page.END} after"
    new = performance_page.page_with(page, performance_page.tables(results()))
    assert new.startswith("before ")
    assert new.endswith(" after")
    assert "old" not in new
    assert "* c: no such link" in new
    with pytest.raises(ValueError, match="tables: begin"):
        performance_page.page_with("no markers", "x")


def test_a_shape_measured_at_several_sizes_has_a_plot() -> None:
    found = results()
    assert "![" not in performance_page.tables(found)
    found["points"][0]["point"] = found["points"][0]["point"] | {"tokens": 8192, "comm_sms": None}
    shown = performance_page.tables(found)
    assert shown.count("![v2lite, nic, nccl](images/performance_v2lite_nic_nccl.svg)") == 1


def test_the_page_says_what_the_results_say() -> None:
    found = json.loads(performance_page.RESULTS.read_text())
    text = performance_page.PAGE.read_text()
    assert performance_page.page_with(text, performance_page.tables(found)) == text


def test_points_have_keys_of_their_own_and_known_parts() -> None:
    for points in overlap_points.SETS.values():
        found = list(dict.fromkeys(points()))
        assert len({p.key for p in found}) == len(found)
        for point in found:
            assert point.shape in overlap_points.SHAPES
            assert point.link in overlap_points.LINKS


@pytest.mark.parametrize(
    ("gpus", "deep_ep", "left_s", "why"),
    [
        (2, True, 1000.0, None),
        (1, True, 1000.0, "needs 2 GPUs, found 1"),
        (2, False, 1000.0, "needs DeepEP"),
        (2, True, 100.0, "needs 400 s, 100 s are left"),
    ],
)
def test_what_cannot_run_is_named(gpus: int, deep_ep: bool, left_s: float, why: str | None) -> None:
    step = next(s for s in on_gpus.STEPS if s.name == "deep_ep_tests")
    found = on_gpus.obstacle(step, gpus, deep_ep, left_s)
    assert found is None if why is None else why in str(found)


def test_every_step_runs_files_that_exist() -> None:
    for step in on_gpus.STEPS:
        named = [
            word for word in step.command.split() if word.startswith(("tests/", "benchmarks/"))
        ]
        assert all((on_gpus.ROOT / word).exists() for word in named), step.name
