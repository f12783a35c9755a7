"""The witness for emitted graphs: whole ones, and damaged ones, on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Node

from dbo_fx import sync
from dbo_fx.comm import in_flight
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS
from dbo_fx.pipeline import State
from dbo_fx.tag import Tag, set_tag
from dbo_fx.witness import GraphWitness, Verdict, choosers
from small_moe import (
    CachedMoe,
    PlainMoe,
    Traced,
    TwoLaunches,
    nodes_of,
    one_rank,
    run_passes,
    traced_model,
)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


def trace_of(model: type[PlainMoe] = CachedMoe, layers: int = 1) -> Traced:
    return traced_model(model, layers, ranks=1)


def lowered(transport: str = "gloo", model: type[PlainMoe] = CachedMoe) -> State:
    return run_passes(trace_of(model).fresh(), "lower", transport=transport)


@pytest.mark.parametrize("transport", ["gloo", "deepep_ll"])
@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
@pytest.mark.parametrize(
    ("schedule", "count"), [("mlp_shared_overlap", 2), ("sequential", 1), ("sequential", 3)]
)
def test_every_shipped_schedule_is_safe_in_every_interleaving(
    schedule: str, count: int, model: type[PlainMoe], transport: str
) -> None:
    trace = trace_of(model, 2)
    state = run_passes(trace.fresh(), "emit", schedule, count, transport)
    witness = GraphWitness(state, trace.args(7))
    assert witness.confirm(12) == Verdict(True, 12)
    assert witness.exhaustive() == Verdict(True, 1)
    assert in_flight() == ()


def test_several_launches_of_one_communication() -> None:
    trace = trace_of(TwoLaunches)
    witness = GraphWitness(run_passes(trace.fresh()), trace.args())
    assert witness.confirm(20).safe
    assert witness.exhaustive() == Verdict(True, 1)


def test_the_results_are_those_of_the_emitted_module() -> None:
    trace = trace_of()
    module = run_passes(trace.fresh()).module
    assert module is not None
    witness = GraphWitness(module, trace.args())
    ours, theirs = trace.args(), trace.args()
    module(*ours)
    assert witness.run(choosers.late("comp")).ok
    kept = [a for a in witness.first.inputs if isinstance(a, torch.Tensor)]
    real = [a for a in ours if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(kept, real, strict=True))
    before = [a for a in theirs if isinstance(a, torch.Tensor)]
    assert not all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def call(state: State, action: str, targets: set[object]) -> Node:
    for node in state.graph.nodes:
        found = action_of(node)
        if node.target in targets and found is not None and found.bound() == action:
            return node
    raise AssertionError(action)


Damage = Callable[[State], None]


def unsafe(damage: Damage, transport: str = "gloo", runs: int = 40) -> str:
    """What is wrong with the damaged graph; the first run in host order may or may not show it."""
    state = lowered(transport)
    damage(state)
    witness = GraphWitness(state, trace_of().args(), reference=lowered(transport))
    verdict = witness.confirm(runs)
    assert not verdict.safe
    assert not witness.exhaustive(500).safe
    assert verdict.interleaving
    assert in_flight() == ()
    return verdict.problem


def host_order_is_fine(damage: Damage) -> bool:
    state = lowered()
    damage(state)
    return GraphWitness(state, trace_of().args(), reference=lowered()).run().ok


def erase(find: Callable[[State], Node]) -> Damage:
    return lambda state: state.graph.erase_node(find(state))


def before(action: str, targets: set[object]) -> Callable[[State], Node]:
    """The wait right before a send or recv."""

    def find(state: State) -> Node:
        found = call(state, action, targets).prev
        assert found.target is sync.wait
        return found

    return find


SENT = "D_m1.send@0"
RECEIVED = "C_m0.recv@0"


def test_every_wait_record_and_keepalive_is_needed() -> None:
    for kind, count in ((sync.wait, 8), (sync.record, 8), (sync.keepalive, 4)):
        assert len(nodes_of(lowered().graph, kind)) == count
        for index in range(count):
            damage = erase(lambda s, kind=kind, index=index: nodes_of(s.graph, kind)[index])
            assert unsafe(damage), (kind, index)


def test_what_only_some_interleavings_show() -> None:
    for damage in (
        erase(before(SENT, SENDS)),
        erase(before(RECEIVED, RECVS)),
        erase(lambda s: nodes_of(s.graph, sync.keepalive)[0]),
    ):
        assert host_order_is_fine(damage)


def test_a_recv_that_does_not_wait_for_its_send() -> None:
    text = unsafe(erase(before(RECEIVED, RECVS)))
    assert "C_m0_l0_recv: combine, flight 0" in text
    assert "received without a send" in text


def test_a_send_that_does_not_wait_for_its_inputs() -> None:
    assert unsafe(erase(before(SENT, SENDS))).startswith("differs from the reference: ")


def test_a_value_that_is_freed_early() -> None:
    def early(state: State) -> None:
        keepalive = nodes_of(state.graph, sync.keepalive)[0]
        before("D_m0.recv@0", RECVS)(state).prepend(keepalive)

    assert unsafe(early).startswith("differs from the reference: ")


def test_a_dropped_recv_leaves_its_operation_in_flight() -> None:
    text = unsafe(erase(lambda s: call(s, "C_m1.recv@0", RECVS)))
    assert text == "combine, flight 1, group '0': sent and never received"


def test_a_recv_that_runs_twice() -> None:
    def twice(state: State) -> None:
        recv = call(state, RECEIVED, RECVS)
        with state.graph.inserting_after(recv):
            state.graph.node_copy(recv)

    assert "received without a send" in unsafe(twice)


def test_a_send_that_runs_twice() -> None:
    def twice(state: State) -> None:
        send = call(state, SENT, SENDS)
        with state.graph.inserting_after(send):
            state.graph.node_copy(send)

    assert "sent twice without a receive" in unsafe(twice)


def test_work_that_is_not_joined() -> None:
    def stray(state: State) -> None:
        *_, weight = [n for n in state.graph.nodes if n.op == "placeholder"]
        with state.graph.inserting_before(next(iter(reversed(state.graph.nodes)))):
            extra = state.graph.call_function(torch.ops.aten.relu.default, (weight,))
        set_tag(extra, Tag("compute", stream="comm"))

    text = unsafe(stray)
    assert text == "the caller goes on while rank 0 comm  free relu_default has not run"


def test_segments_that_share_a_cache_in_the_wrong_order() -> None:
    def swap(state: State) -> None:
        first, second = [n for n in state.graph.nodes if n.name in ("A_m0_l0", "A_m1_l0")]
        first.prepend(second)

    assert not host_order_is_fine(swap)
    assert unsafe(swap).startswith("differs from the reference: ")


def second_send_in_flight(state: State) -> None:
    recv, send = call(state, "D_m0.recv@0", RECVS), call(state, SENT, SENDS)
    nodes = list(state.graph.nodes)
    for node in nodes[nodes.index(recv) : nodes.index(send)]:
        if node.target in RECVS or node.target is sync.keepalive or "out" in node.name:
            send.append(node)
            send = node


def test_a_second_low_latency_send_in_flight() -> None:
    text = unsafe(second_send_in_flight, "deepep_ll")
    assert "destroyed by" in text


def test_low_latency_operations_that_start_at_the_odd_slot() -> None:
    def shift(state: State) -> None:
        for node in state.graph.nodes:
            if node.target in SENDS | RECVS:
                node.args = (*node.args[:-1], 1 - node.args[-1])

    assert "the program sends in slot 1" in unsafe(shift, "deepep_ll")


def test_an_odd_number_of_low_latency_operations() -> None:
    def shorten(state: State) -> None:
        for targets in (RECVS, SENDS):
            node: Any = call(state, f"C_m1.{'recv' if targets is RECVS else 'send'}@0", targets)
            state.graph.erase_node(node)

    text = unsafe(shorten, "deepep_ll")
    assert text.startswith("the next region may not start: ")


def test_streams_are_read_from_the_runtime_calls_alone() -> None:
    """Tags that say something else change nothing; a `use` that is gone does."""
    trace = trace_of()
    good = run_passes(trace.fresh()).module
    assert good is not None
    for node in good.graph.nodes:
        set_tag(node, Tag("compute", stream="comm"))
    assert GraphWitness(good, trace.args()).confirm(12).safe
    uses = nodes_of(good.graph, "use")
    good.graph.erase_node(uses[1])  # Back to comp behind the first send.
    good.recompile()
    assert not GraphWitness(good, trace.args()).confirm(40).safe


def test_an_interleaving_reads_like_a_program() -> None:
    state = lowered()
    erase(before(RECEIVED, RECVS))(state)
    verdict = GraphWitness(state, trace_of().args()).confirm()
    lines = verdict.interleaving.splitlines()
    assert "rank 0 comm  D_m0_l0_send" in lines
    assert "rank 0 comp  free A_m0_l0" in lines
    assert lines.index("rank 0 comp  C_m0_l0_recv") < lines.index("rank 0 comm  C_m0_l0_send")
