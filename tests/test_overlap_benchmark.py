"""The rival that benchmarks compare with, what they measure, and what they make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import on_gpus
import overlap_points
import overlap_rank
import performance_page
import pytest
import torch
from overlap_points import Point

import dbo_fx
from dbo_fx.contracts import DEEPEP_LL
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


class Logs:
    """A transport that only tells what it is told."""

    contract = DEEPEP_LL

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def begin(self, group: str) -> None:
        self.log.append(("begin", group))

    def launch(self, inputs: Any, outputs: Any, exchange: str, *rest: Any) -> str:
        self.log.append(("send", rest[2], rest[1]))
        return str(rest[2])

    def finish(self, flight: str, outputs: Any) -> None:
        self.log.append(("receive", flight))


def test_threads_receive_each_others_operations_where_one_may_be_in_flight() -> None:
    from threaded import OneInFlight

    carrier = Logs()
    shared = OneInFlight(carrier)
    for _ in range(2):
        carrier.log.clear()
        shared.begin("g")
        first = shared.launch([], [], "batched_dispatch", "g", 0, "first")
        second = shared.launch([], [], "batched_dispatch", "g", 0, "second")
        shared.finish(first, [])  # The other thread has done it.
        shared.finish(second, [])
        assert carrier.log == [
            ("begin", "g"),
            ("send", "first", 0),
            ("receive", "first"),
            ("send", "second", 1),
            ("receive", "second"),
        ]


RUN = {"device": "d", "torch": "t", "commit": "c", "command": "x"}
MS = {"unsplit": 10.0, "sequential": 11.0, "mlp_shared_overlap": 9.0}
POINT = Point("v2lite", 16384, "copy_engine", "nvlink")


def row(point: Point, ms: dict[str, float] | None = None, run: int = 0, **more: Any) -> Any:
    """A point of the results, measured unless `more` says why not."""
    measured = {} if {"refused", "failed"} & more.keys() and ms is None else {"ms": dict(ms or MS)}
    common = {"key": point.key, "point": point.to_json(), "run": run, "host_us": {}}
    return common | measured | more


def results(*rows: Any, runs: int = 1) -> Any:
    return {"runs": [RUN] * runs, "points": list(rows)}


def two_transports() -> Any:
    """Two transports of one case, and a point that was refused."""
    slow = {"unsplit": 12.0, "sequential": 14.0, "mlp_shared_overlap": 10.0}
    return results(
        row(replace(POINT, transport="nccl"), slow, bound_ms={"mlp_shared_overlap": 9.0}),
        row(POINT, bound_ms={"mlp_shared_overlap": 8.5}),
        row(replace(POINT, link="no_p2p"), refused="no such link"),
    )


def shown(found: Any) -> list[list[str]]:
    """The cells of all tables of the page, a line each."""
    lines = performance_page.tables(found).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return [line for line in cells if not set(line[0]) <= {"-"}]


def column(found: Any, head: str) -> dict[str, str]:
    """A column by point."""
    at, values = 0, dict[str, str]()
    for line in shown(found):
        if line[0] == "point":
            at = line.index(head) if head in line else 0
        elif at:
            values[line[0]] = line[at]
    return values


def test_ratios_compare_with_the_best_unsplit_run_of_all_transports() -> None:
    slow, fast = performance_page.rows_of(two_transports())
    assert slow["ratio"] == pytest.approx(10.0 / 10.0)
    assert fast["ratio"] == pytest.approx(10.0 / 9.0)
    assert slow["efficiency"] == pytest.approx((14 - 10) / (14 - 9))
    assert fast["split_price"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    "other",
    [
        row(replace(POINT, transport="nccl"), MS | {"unsplit": 5.0}, run=1),
        row(replace(POINT, transport="nccl", fp8=True), MS | {"unsplit": 5.0}),
        row(replace(POINT, transport="nccl", routing="skewed"), MS | {"unsplit": 5.0}),
    ],
    ids=["of another run", "in float8", "of other routing"],
)
def test_a_case_is_compared_with_itself_only(other: Any) -> None:
    found = performance_page.rows_of(results(row(POINT), other, runs=2))
    assert [r["best_unsplit_ms"] for r in found] == [10.0, 5.0]


def test_points_of_old_results_have_fewer_fields() -> None:
    old = row(POINT)
    for name in ("max_tokens", "fp8", "capacity"):
        del old["point"][name]
    new = row(replace(POINT, transport="nccl"), MS | {"unsplit": 8.0})
    assert [r["best_unsplit_ms"] for r in performance_page.rows_of(results(old, new))] == [8.0] * 2


def test_there_is_no_efficiency_where_nothing_can_be_hidden() -> None:
    found = two_transports()
    found["points"][0]["bound_ms"]["mlp_shared_overlap"] = 14.5
    assert performance_page.rows_of(found)[0]["efficiency"] is None


@pytest.mark.parametrize("name", MS)
def test_a_refused_schedule_leaves_holes_and_its_reason(name: str) -> None:
    ms = {n: t for n, t in MS.items() if n != name}
    found = results(
        row(POINT, ms, refused={name: "first\nneeds more slots"}, bound_ms={"unsplit": 1.0})
    )
    (only,) = performance_page.rows_of(found)
    assert (only["ratio"] is None) == (name != "sequential")
    assert (only["split_price"] is None) == (name != "mlp_shared_overlap")
    assert f"* {name}: needs more slots ({POINT.key})" in performance_page.tables(found)


def test_a_point_with_no_schedule_at_all_has_a_line() -> None:
    found = results(row(POINT, {"unsplit": 10.0}))
    (only,) = performance_page.rows_of(found)
    assert (only["best_schedule"], only["best_ratio"]) == (None, None)
    assert shown(found) == [["point", "unsplit"], [POINT.key, "10.000"]]


def test_every_schedule_that_is_measured_has_a_column() -> None:
    columns = [name for group in performance_page.COLUMNS.values() for name in group]
    assert sorted(columns) == sorted([*overlap_rank.SCHEDULES, "threaded"])
    found = results(row(POINT, {name: float(i) for i, name in enumerate(columns, 1)}))
    for index, name in enumerate(columns, 1):
        assert column(found, name) == {POINT.key: f"{index:.3f}"}
    assert max(map(len, shown(found))) <= 8
    assert column(found, "sequential_3 / unsplit") == {POINT.key: "8.000"}


def test_eager_times_have_columns_where_they_were_taken() -> None:
    other = replace(POINT, tokens=64)
    found = results(
        row(POINT, eager_ms={"mlp_shared_overlap": 21.5, "threaded": 150.0, "unsplit": 12.0}),
        row(other, host_us={"mlp_shared_overlap": 900.0}),
    )
    assert column(found, "eager DBO, ms") == {POINT.key: "21.50", other.key: "-"}
    assert column(found, "eager threads, ms") == {POINT.key: "150.00", other.key: "-"}
    assert column(found, "host: DBO") == {POINT.key: "-", other.key: "0.90"}


def test_sustained_times_have_a_table_of_their_own() -> None:
    found = results(row(POINT, sustained_ms={"unsplit": 12.0, "mlp_shared_overlap": 8.0}))
    line = [POINT.key, "12.000", "8.000", "1.500"]
    assert ["point", "unsplit", "mlp_shared_overlap", "unsplit / DBO"] in shown(found)
    assert line in shown(found)


def test_the_price_of_the_split_is_shown_by_phase_where_phases_were_measured() -> None:
    phases = {
        "unsplit": {"A": 4.0, "MLP": 3.0, "D": 1.0, "C": 1.0, "TAIL": 0.5},
        "sequential": {"A": 4.5, "MLP": 4.0, "S": 0.25, "D": 0.75, "C": 1.5, "TAIL": 0.75},
    }
    heads = ("A", "MLP", "S", "D", "C", "others", "all")
    found = results(row(POINT, phases_ms=phases), row(replace(POINT, tokens=64)))
    wanted = ("0.500", "1.000", "0.250", "-0.250", "0.500", "0.250", "2.250")
    assert [column(found, head) for head in heads] == [{POINT.key: text} for text in wanted]
    del phases["unsplit"]
    assert column(found, "all") == {}


def test_every_run_shows_its_command_and_start() -> None:
    found = results(row(POINT), row(replace(POINT, tokens=64), run=1), runs=2)
    found["runs"] = [RUN | {"started": "2026-01-01T10:00:00"}, RUN | {"command": "y"}]
    page = performance_page.tables(found)
    assert "`x --output FILE`, started 2026-01-01T10:00:00\n" in page
    assert "`y --output FILE`\n" in page
    assert page.count("### d, torch t, commit c") == 2


def test_results_that_are_not_equal_are_named() -> None:
    found = results(row(POINT, equal={"threaded": False, "mlp_shared_overlap": True}))
    assert f"bit for bit:\n\n* {POINT.key}: threaded" in performance_page.tables(found)
    assert "bit for bit" not in performance_page.tables(two_transports())


def test_the_page_keeps_its_text_and_names_what_was_not_measured() -> None:
    page = f"before {performance_page.BEGIN} old {performance_page.END} after"
    new = performance_page.page_with(page, performance_page.tables(two_transports()))
    assert new.startswith("before ")
    assert new.endswith(" after")
    assert "old" not in new
    assert "/no_p2p/copy_engine: no such link" in new
    with pytest.raises(ValueError, match="tables: begin"):
        performance_page.page_with("no markers", "x")


def sizes(*points: Point, run: int = 0) -> list[Any]:
    """Every point at two sizes."""
    return [row(replace(p, tokens=tokens), run=run) for p in points for tokens in (1024, 8192)]


def test_a_shape_measured_at_several_sizes_has_a_plot() -> None:
    assert "![" not in performance_page.tables(two_transports())
    shown = performance_page.tables(results(*sizes(POINT)))
    name = "performance_v2lite_nvlink_copy_engine.svg"
    assert shown.count(f"![v2lite, nvlink, copy_engine](images/{name})") == 1


def test_a_plot_holds_points_that_differ_in_size_alone() -> None:
    nic = Point("v2lite", 1, "nccl", "nic", comm_sms=4)
    others = (
        replace(nic, carveout=8),
        replace(nic, carveout=16),
        replace(nic, comm_sms=8),
        replace(nic, kind="decode"),
        replace(nic, fp8=True),
        replace(nic, max_tokens=256),
    )
    found = performance_page.curves(results(*sizes(nic, *others)))
    assert len(found) == 1 + len(others)
    assert all(len(curve.rows) == 2 for curve in found.values())
    assert "performance_v2lite_nic_nccl_comm4_left8.svg" in found


def test_a_plot_goes_on_in_a_later_run_of_the_same_commit_only() -> None:
    first, second = sizes(POINT), sizes(POINT, run=1)
    parts = results(first[0], second[1], runs=2)
    assert [len(c.rows) for c in performance_page.curves(parts).values()] == [2]
    parts["runs"] = [RUN, RUN | {"commit": "other"}]
    assert not performance_page.curves(parts)
    parts["points"] = [*first, *second]
    found = performance_page.curves(parts)
    assert list(found) == [
        "performance_v2lite_nvlink_copy_engine.svg",
        "performance_v2lite_nvlink_copy_engine__2.svg",
    ]
    assert [c.title.endswith("commit other") for c in found.values()] == [False, True]


def test_a_curve_leaves_out_the_sizes_where_its_schedule_is_missing() -> None:
    found = results(*sizes(POINT), row(replace(POINT, tokens=64)))
    found["points"][0]["ms"] = {"unsplit": 10.0, "sequential": 11.0}
    found["points"][1]["ms"] = MS | {"threaded": 8.0}
    (curve,) = performance_page.curves(found).values()
    assert curve.line("mlp_shared_overlap") == [(64, 10 / 9), (8192, 10 / 9)]
    assert curve.line("threaded") == [(8192, 10 / 8)]
    assert curve.line("vllm_high_throughput") == []


def test_plots_are_drawn_and_old_ones_removed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(*sizes(POINT))
    del found["points"][0]["ms"]["unsplit"]
    found["points"] += [row(replace(POINT, tokens=64), MS | {"threaded": 8.0})]
    old = tmp_path / "performance_old.svg"
    old.touch()
    (written,) = performance_page.plot(found, tmp_path)
    assert written == tmp_path / "performance_v2lite_nvlink_copy_engine.svg"
    assert not old.exists()
    before = written.read_text()
    assert "<svg" in before
    performance_page.plot(found, tmp_path)
    assert written.read_text() == before


def test_the_page_says_what_the_results_say() -> None:
    found = json.loads(performance_page.RESULTS.read_text())
    text = performance_page.PAGE.read_text()
    assert performance_page.page_with(text, performance_page.tables(found)) == text
    plots = {p.name for p in performance_page.PLOTS.glob("performance_*.svg")}
    assert plots == set(performance_page.curves(found))


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


class CountedInputs:
    """Inputs that only count."""

    def __init__(self) -> None:
        self.ids = torch.zeros(1)

    def fresh(self) -> torch.Tensor:
        return self.ids + 1

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("steady", [True, False])
def test_a_serial_run_that_differs_from_itself_is_named(steady: bool) -> None:
    inputs, runs = CountedInputs(), []

    def serial() -> torch.Tensor:
        runs.append(1)
        return inputs.ids + (0 if steady else len(runs))

    candidates = {
        "unsplit": overlap_rank.Candidate(serial),
        "single_batch_overlap": overlap_rank.Candidate(lambda: inputs.ids * 1),
        "sequential": overlap_rank.Candidate(lambda: inputs.ids * 2),
        "mlp_shared_overlap": overlap_rank.Candidate(lambda: inputs.ids * 3),
    }
    equal, unsteady = overlap_rank._compare(candidates, inputs)  # type: ignore[arg-type]
    assert equal == {"single_batch_overlap": steady, "mlp_shared_overlap": False}
    assert unsteady == ([] if steady else ["unsplit"])
    row = {"ms": {}, "sustained_ms": {}, "host_us": {}, "eager_ms": {}, "equal": equal}
    whole = overlap_rank._merge([row | {"unsteady": []}, row | {"unsteady": unsteady}])
    assert whole["unsteady"] == unsteady
    assert ("single_batch_overlap" in whole["equal"]) is steady
    assert whole["equal"]["mlp_shared_overlap"] is False
