"""Segments: runs of compute nodes, one submodule for each distinct structure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, symbolic_trace

from dbo_fx.capture import value_of
from dbo_fx.passes.lower import is_segment_node, segment_runs, structure
from dbo_fx.passes.schedule import action_of
from dbo_fx.pipeline import State
from dbo_fx.tag import tag_of
from small_moe import (
    CachedMoe,
    H,
    PlainMoe,
    fake_ranks,
    one_rank,
    rows,
    run_passes,
    text_of,
    traced,
    traced_model,
)


def lowered(
    model: type[PlainMoe] = PlainMoe,
    layers: int = 1,
    schedule: str = "mlp_shared_overlap",
    count: int = 2,
) -> State:
    return run_passes(traced_model(model, layers).fresh(), "lower", schedule, count)


def test_the_plain_layer_is_lowered(golden: Callable[[str, str], None]) -> None:
    state = lowered()
    parts = [text_of(state.graph)]
    parts += [f"{name}\n{text_of(module.graph)}" for name, module in state.segments.items()]
    golden("lower_plain.txt", "\n".join(parts))


def test_nothing_computes_outside_segments() -> None:
    state = lowered(CachedMoe, 2)
    roles = {t.role for n in state.graph.nodes if n.op == "call_function" and (t := tag_of(n))}
    outside = [n for n in state.graph.nodes if is_segment_node(n)]
    assert "compute" in roles
    assert all(n.target.__name__ == "getitem" for n in outside)
    for module in state.segments.values():
        assert any(n.op == "call_function" for n in module.graph.nodes)


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
def test_the_number_of_distinct_segments_does_not_grow(model: type[PlainMoe]) -> None:
    """A of the first layer, A of a later one, MLP, S, TAIL; not more, however many are called."""
    counts = {len(lowered(model, layers).segments) for layers in (2, 3, 4)}
    assert len(counts) == 1
    counts |= {len(lowered(model, 3, "sequential", count).segments) for count in (2, 3)}
    assert len(counts) == 1
    if model is PlainMoe:
        assert counts == {5}
        assert len(lowered(model, 3, "sequential", 1).segments) == 5


def test_schedules_share_segments() -> None:
    one = {structure(m.graph) for m in lowered(PlainMoe, 2).segments.values()}
    other = {structure(m.graph) for m in lowered(PlainMoe, 2, "sequential").segments.values()}
    assert one == other


def test_a_segment_stays_within_one_microbatch_and_phase() -> None:
    state = run_passes(traced_model(CachedMoe, 2).fresh(), "streams")
    for run in segment_runs(state.graph.nodes):
        actions = {action_of(n) for n in run}
        places = {(a.microbatch, a.layer) for a in actions if a is not None}
        assert len(places) <= 1
        assert {a.phase.value for a in actions if a is not None} <= {"A0", "A1"} or len(
            actions
        ) == 1


def test_names_say_phase_microbatch_and_layer() -> None:
    state = lowered(PlainMoe, 2)
    calls = [n.name for n in state.graph.nodes if n.op == "call_module"]
    assert len(calls) == len(set(calls)) == 14
    assert {"A_m0_l0", "A_m1_l1", "MLP_m0_l1", "S_m1_l0", "TAIL_m0"} <= set(calls)


class Shared(PlainMoe):
    """A table that all microbatches share, needed by the first action and by the tail."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return self.body(x * table.cos()) + table.sin()


def test_shared_nodes_have_segments_of_their_own() -> None:
    with fake_ranks():
        trace = traced(Shared(), (rows(), torch.ones(H)))
    state = run_passes(trace.fresh(), "lower")
    calls = [n for n in state.graph.nodes if n.op == "call_module"]
    assert [n.name for n in calls if "shared" in n.name] == ["shared_0", "shared_1"]
    for name in ("cos", "sin"):
        held = [m for m in state.segments.values() if f"aten.{name}" in text_of(m.graph)]
        assert len(held) == 1


def test_dependencies_speak_of_the_lowered_graph() -> None:
    state = lowered(CachedMoe, 2)
    nodes = set(state.graph.nodes)
    assert all(d.before in nodes and d.after in nodes for d in state.dependencies)
    assert all(d.before is not d.after for d in state.dependencies)
    assert {d.kind for d in state.dependencies} == {"data", "RAW", "WAR", "WAW"}
    assert set(state.effects.access) <= nodes
    writes = [n for n in nodes if state.effects.of(n).writes & state.effects.live_in]
    assert {n.op for n in writes} == {"call_module"}


def test_items_carry_the_values_of_what_they_replace() -> None:
    state = lowered()
    for node in state.graph.nodes:
        if node.op == "call_module":
            for user in node.users:
                value = value_of(node)[user.args[1]]
                assert value_of(user) is value


def graph_of(function: Callable[..., Tensor]) -> Graph:
    module: GraphModule = symbolic_trace(function)
    return module.graph


def test_structure_sees_ops_constants_and_argument_positions() -> None:
    first = structure(graph_of(lambda x, y: torch.sub(x, y) * 2))
    assert first == structure(graph_of(lambda a, b: torch.sub(a, b) * 2))
    assert first != structure(graph_of(lambda x, y: torch.sub(x, y) * 3))
    assert first != structure(graph_of(lambda x, y: torch.sub(y, x) * 2))
    assert first != structure(graph_of(lambda x, y: torch.add(x, y) * 2))
    assert structure(graph_of(lambda x: torch.sum(x, 0))) != structure(
        graph_of(lambda x: torch.sum(x, dim=0, keepdim=True))
    )


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 3).half(), torch.ones(3, 2), torch.ones(3, 2).T, torch.ones(2, 3).long()],
)
def test_structure_sees_dtype_shape_and_stride(other: Tensor) -> None:
    def with_value(value: Tensor) -> str:
        graph = graph_of(lambda x: x * 2)
        next(iter(graph.nodes)).meta["val"] = value
        return structure(graph)

    assert with_value(torch.ones(2, 3)) == with_value(torch.zeros(2, 3))
    assert with_value(torch.ones(2, 3)) != with_value(other)


class ConstantPerLayer(PlainMoe):
    """Layers that differ in one number only."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        return super().experts(layer, h * (layer + 1.5))


def test_layers_that_differ_in_a_constant_do_not_share_a_segment() -> None:
    trace = traced_model(ConstantPerLayer, 3, ranks=1)
    assert len(run_passes(trace.fresh(), "lower").segments) == 6
    with one_rank():
        module = run_passes(trace.fresh(), "emit").module
        assert module is not None
        torch.testing.assert_close(
            module(*trace.args(7)), trace.captured.module(*trace.args(7)), rtol=1e-4, atol=1e-4
        )


PRINT_HASHES = """
import sys
sys.modules["torchvision"] = None
sys.path.insert(0, {tests!r})
from dbo_fx.backend import compile_captured, graph_digest
from dbo_fx.options import Options
from dbo_fx.passes.lower import structure
from small_moe import CachedMoe, fake_ranks, traced_model

with fake_ranks():
    compiled = compile_captured(traced_model(CachedMoe, 2).fresh(), Options())
print([structure(m.graph) for _, m in sorted(compiled._state.segments.items())])
print(compiled.program.digest, graph_digest(compiled))
"""


@pytest.mark.slow
def test_hashes_are_the_same_in_every_process() -> None:
    script = PRINT_HASHES.format(tests=str(Path(__file__).parent))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in running)
    assert len(first.splitlines()) == 2
    assert first == second
