"""Dispatch and combine become buffers, a send and a recv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from dbo_fx.capture import value_of
from dbo_fx.ir import Half, Phase
from dbo_fx.passes.halves import BUFFERS, OPS, argument
from dbo_fx.passes.schedule import action_of
from dbo_fx.pipeline import State
from small_moe import (
    CachedMoe,
    PlainMoe,
    Traced,
    TwoLaunches,
    fake_ranks,
    module_of,
    nodes_of,
    one_rank,
    rows,
    run_passes,
    traced,
    traced_model,
)

SEND_D, RECV_D = OPS[Phase.D, Half.SEND], OPS[Phase.D, Half.RECV]
SEND_C, RECV_C = OPS[Phase.C, Half.SEND], OPS[Phase.C, Half.RECV]
ORIGINAL = (torch.ops.dbo_fx.dispatch.default, torch.ops.dbo_fx.combine.default)


def halved(trace: Traced, count: int = 2) -> State:
    return run_passes(trace.fresh(), "halves", count=count)


def is_before(graph: Graph, one: Node, other: Node) -> bool:
    order = list(graph.nodes)
    return order.index(one) < order.index(other)


def test_the_plain_layer_has_four_communications_in_halves() -> None:
    graph = halved(traced_model()).graph
    assert not any(nodes_of(graph, target) for target in ORIGINAL)
    for target in (SEND_D, RECV_D, SEND_C, RECV_C):
        assert len(nodes_of(graph, target)) == 2
    assert len(nodes_of(graph, BUFFERS)) == 4
    for send, recv in zip(nodes_of(graph, SEND_D), nodes_of(graph, RECV_D), strict=True):
        inputs, buffers, collective, group, transport, flight = send.args
        assert recv.args == (buffers, group, transport, flight)
        assert transport == "gloo"
        assert (collective, group) == ("all_gather", "0")
        assert isinstance(buffers, Node)
        assert buffers.args == (inputs, collective, group)
        assert [n.target for n in (buffers.next, send.next)] == [SEND_D, RECV_D]
    assert [n.args[2] for n in nodes_of(graph, SEND_C)] == ["reduce_scatter_sum"] * 2


def test_actions_have_microbatch_layer_and_half() -> None:
    graph = halved(traced_model(PlainMoe, 2)).graph
    found = [action.bound() for n in nodes_of(graph, SEND_D) if (action := action_of(n))]
    assert found == ["D_m0.send@0", "D_m0.send@1", "D_m1.send@0", "D_m1.send@1"]
    found = [action.bound() for n in nodes_of(graph, RECV_C) if (action := action_of(n))]
    assert found == ["C_m0.recv@0", "C_m0.recv@1", "C_m1.recv@0", "C_m1.recv@1"]
    half = {n: a.half for n in nodes_of(graph, BUFFERS) if (a := action_of(n))}
    assert set(half.values()) == {Half.SEND}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_microbatch_has_its_own_flight(count: int) -> None:
    graph = halved(traced_model(), count).graph
    for target in (SEND_D, RECV_D, SEND_C, RECV_C):
        assert [argument(n, "flight") for n in nodes_of(graph, target)] == list(range(count))


def test_what_arrives_has_the_shape_of_what_it_replaces() -> None:
    trace = traced_model()
    graph = halved(trace).graph
    before = nodes_of(trace.captured.graph, ORIGINAL[0])[0]
    for buffers in nodes_of(graph, BUFFERS)[::2]:
        shapes = [tuple(map(str, v.shape)) for v in value_of(buffers)]
        assert shapes == [tuple(map(str, v.shape)) for v in value_of(before)]
    items = [u for u in nodes_of(graph, BUFFERS)[0].users if u not in set(nodes_of(graph, SEND_D))]
    assert {action.bound() for n in items if (action := action_of(n))} == {"D_m0.recv@0"}


def test_readers_depend_on_the_recv_and_the_recv_on_the_send() -> None:
    state = halved(traced_model())
    for send_op, recv_op, phase in ((SEND_D, RECV_D, "MLP"), (SEND_C, RECV_C, "TAIL")):
        for send, recv in zip(
            nodes_of(state.graph, send_op), nodes_of(state.graph, recv_op), strict=True
        ):
            behind = [d.after for d in state.dependencies if d.before is recv]
            actions = {a.phase.value for n in behind if (a := action_of(n))}
            assert phase in actions
            assert recv in {d.after for d in state.dependencies if d.before is send}


def test_an_overwritten_input_waits_for_the_send() -> None:
    """What is sent may be changed in place only after the send: a WAR edge says so."""

    class Overwrites(PlainMoe):
        def forward(self, x: Tensor) -> Any:
            h = self.attend(0, x)
            y = self.experts(0, h)
            return h.mul_(2) + y

    with fake_ranks():
        trace = traced(Overwrites(), (rows(),))
    state = halved(trace)
    sends = set(nodes_of(state.graph, SEND_D))
    writes = nodes_of(state.graph, torch.ops.aten.mul_.Tensor)
    found = {(d.before, d.after) for d in state.dependencies if d.kind == "WAR"}
    assert {after for before, after in found if before in sends} == set(writes)
    assert len(writes) == 2


def test_unused_results_still_travel() -> None:
    class Ignores(PlainMoe):
        def forward(self, x: Tensor) -> Any:
            h = self.attend(0, x)
            got, _, _ = torch.ops.dbo_fx.dispatch(h, x, x, self.group)
            return h + torch.ops.dbo_fx.combine(got * 2, h.shape[0], self.group)

    with one_rank():
        trace = traced(Ignores(), (rows(),))
        state = halved(trace)
        assert [len(n.args[0]) for n in nodes_of(state.graph, SEND_D)] == [3, 3]
        out = module_of(state)(*trace.args(7))
        torch.testing.assert_close(out, trace.captured.module(*trace.args(7)))


def test_functional_collectives_that_travel_together_have_flights_of_their_own() -> None:
    with fake_ranks():
        trace = traced(TwoLaunches(1), (rows(),))
    state = halved(trace)
    assert [argument(n, "flight") for n in nodes_of(state.graph, SEND_D)] == [0, 2, 1, 3]
    assert [argument(n, "flight") for n in nodes_of(state.graph, SEND_C)] == [0, 1]
    names = [n.name for n in state.graph.nodes]
    assert len(names) == len(set(names))
    assert not [n for n in state.graph.nodes if "c10d_functional" in str(n.target)]
    assert not set(state.effects.access) - set(state.graph.nodes)


@pytest.mark.parametrize("until", ["halves", "emit"])
@pytest.mark.parametrize("model", [PlainMoe, TwoLaunches, CachedMoe])
def test_results_are_those_of_the_whole_graph(model: type[PlainMoe], until: str) -> None:
    run: Callable[[State], Any] = module_of if until == "halves" else lambda s: s.module
    trace = traced_model(model, 2, ranks=1)
    with one_rank():
        split_args, whole_args = trace.args(7), trace.args(7)
        split = run(run_passes(trace.fresh(), until))(*split_args)
        whole = trace.captured.module(*whole_args)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(split_args, whole_args, rtol=1e-4, atol=1e-4)
