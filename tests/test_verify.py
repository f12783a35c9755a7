"""Every rule of the verifier: whole programs pass, damaged ones are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from dbo_fx import sync
from dbo_fx.errors import VerificationError
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS, stream_of
from dbo_fx.passes.verify import Certificate, Verify
from dbo_fx.pipeline import State
from dbo_fx.tag import Tag, set_tag
from small_moe import (
    Appends,
    CachedMoe,
    H,
    PlainMoe,
    fake_ranks,
    nodes_of,
    rows,
    run_passes,
    traced,
    traced_model,
)


def lowered(model: type[PlainMoe] = PlainMoe, layers: int = 1) -> State:
    return run_passes(traced_model(model, layers).fresh(), "lower")


def refusal(state: State, limit: int | None = None) -> str:
    with pytest.raises(VerificationError) as caught:
        Verify(limit).apply(state)
    return str(caught.value)


def call(state: State, action: str, targets: set[object]) -> Node:
    """The send or recv of an action."""
    for node in state.graph.nodes:
        found = action_of(node)
        if node.target in targets and found is not None and found.bound() == action:
            return node
    raise AssertionError(action)


def wait_before(node: Node) -> Node:
    assert node.prev.target is sync.wait
    return node.prev


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
def test_a_whole_program_has_a_certificate(model: type[PlainMoe], schedule: str) -> None:
    state = run_passes(traced_model(model, 2).fresh(), "verify", schedule)
    certificate = state.certificate
    assert isinstance(certificate, Certificate)
    assert certificate.communications == 8
    assert certificate.max_in_flight == 1
    assert certificate.events == 16
    assert certificate.dependencies > certificate.cross_stream > 0
    assert str(certificate) == (
        f"{certificate.dependencies} dependencies hold, {certificate.cross_stream} of them across "
        "streams; 8 sends have one recv each, at most 1 in flight; 16 events; all streams joined"
    )


def test_the_graph_is_not_changed() -> None:
    state = lowered()
    before = [(n, n.args) for n in state.graph.nodes]
    assert Verify().apply(state)[0].graph is state.graph
    assert [(n, n.args) for n in state.graph.nodes] == before


def test_a_dropped_wait_of_a_recv() -> None:
    state = lowered()
    recv = call(state, "D_m0.recv@0", RECVS)
    state.graph.erase_node(wait_before(recv))
    text = refusal(state)
    assert text.startswith("D_m0_l0_recv of D_m0.recv@0 on comp is not ordered behind D_m0_l0_send")
    assert "of D_m0.send@0 on comm (" in text
    assert text.endswith(
        "Record an event on comm behind D_m0_l0_send and wait for it on comp before D_m0_l0_recv."
    )


def test_a_dropped_wait_of_a_send() -> None:
    state = lowered()
    state.graph.erase_node(wait_before(call(state, "C_m1.send@0", SENDS)))
    assert "C_m1_l0_send of C_m1.send@0 on comm is not ordered behind" in refusal(state)


def test_a_record_moved_before_what_it_is_for() -> None:
    state = lowered()
    send = call(state, "D_m0.send@0", SENDS)
    event = wait_before(send).args[0]
    record = next(n for n in nodes_of(state.graph, sync.record) if n.args[0] == event)
    first = next(n for n in state.graph.nodes if n.op == "call_module")
    first.prepend(record)
    assert "D_m0_l0_send of D_m0.send@0 on comm is not ordered behind A_m0_l0" in refusal(state)


def test_a_record_moved_behind_its_wait() -> None:
    state = lowered()
    record = nodes_of(state.graph, sync.record)[0]
    nodes_of(state.graph, sync.wait)[0].append(record)
    assert refusal(state).startswith("comm waits for e0, which is not recorded before.")


def test_a_dropped_record() -> None:
    state = lowered()
    state.graph.erase_node(nodes_of(state.graph, sync.record)[3])
    assert "comp waits for e3, which is not recorded before" in refusal(state)


def test_an_event_recorded_twice() -> None:
    state = lowered()
    record = nodes_of(state.graph, sync.record)[2]
    with state.graph.inserting_after(record):
        set_tag(state.graph.call_function(sync.record, record.args), Tag("sync", stream="comp"))
    assert refusal(state) == "e2 is recorded twice; give the second its own event"


def test_a_wait_for_another_event() -> None:
    """The wait is there, but for the event of an earlier communication."""
    state = lowered()
    wait = wait_before(call(state, "C_m1.recv@0", RECVS))
    earlier = wait_before(call(state, "D_m0.recv@0", RECVS))
    wait.args = (earlier.args[0], "comp")
    assert "C_m1_l0_recv of C_m1.recv@0 on comp is not ordered behind C_m1_l0_send" in refusal(
        state
    )


def test_a_dropped_recv() -> None:
    state = lowered()
    recv = call(state, "C_m1.recv@0", RECVS)
    state = drop(state, recv)
    assert refusal(state) == "C_m1@0 is sent and never received"


def drop(state: State, node: Node) -> State:
    """The state without a node and its dependencies."""
    kept = tuple(d for d in state.dependencies if node not in (d.before, d.after))
    state.graph.erase_node(node)
    return replace(state, dependencies=kept)


def test_a_dropped_send() -> None:
    state = lowered()
    text = refusal(drop(state, call(state, "D_m1.send@0", SENDS)))
    assert text == "D_m1_l0_recv of D_m1.recv@0 on comp: received, but not in flight"


@pytest.mark.parametrize(
    ("targets", "half", "expected"),
    [(SENDS, "send", "slot 0 is sent twice"), (RECVS, "recv", "received, but not in flight")],
)
def test_a_half_that_runs_twice(targets: set[object], half: str, expected: str) -> None:
    state = lowered()
    node = call(state, f"D_m0.{half}@0", targets)
    with state.graph.inserting_after(node):
        copy = state.graph.node_copy(node, lambda n: n)
    assert f": {expected}" in refusal(state)
    assert copy.name in refusal(state)


def test_a_recv_before_its_send() -> None:
    state = lowered()
    send, recv = call(state, "D_m0.send@0", SENDS), call(state, "D_m0.recv@0", RECVS)
    send.prepend(recv)
    assert "D_m0_l0_recv" in refusal(state)


def test_a_dropped_keepalive() -> None:
    state = lowered()
    state.graph.erase_node(nodes_of(state.graph, sync.keepalive)[0])
    text = refusal(state)
    assert "may be freed while D_m0_l0_send of D_m0.send@0 on comm still uses it" in text
    assert text.endswith("no later use on comp waits for comm. Add a keepalive behind the recv.")


def test_a_keepalive_before_the_wait() -> None:
    state = lowered()
    keepalive = nodes_of(state.graph, sync.keepalive)[0]
    wait_before(call(state, "D_m0.recv@0", RECVS)).prepend(keepalive)
    assert "may be freed while D_m0_l0_send" in refusal(state)


def test_the_last_launch_must_be_waited_for() -> None:
    state = lowered()
    first, *_, output = state.graph.nodes
    with state.graph.inserting_before(output):
        extra = state.graph.call_function(torch.ops.aten.relu.default, (first,))
    set_tag(extra, Tag("compute", stream="comm"))
    text = refusal(state)
    assert text.startswith("comm is not joined at the end: relu")
    assert text.endswith("may still run. Wait for it on comp before the output.")


@pytest.mark.parametrize("limit", [1, 2, None])
def test_programs_within_the_limit_pass(limit: int | None) -> None:
    Verify(limit).apply(lowered(CachedMoe, 2))


def test_more_in_flight_than_the_transport_allows() -> None:
    """Two dispatches are sent before the first is received."""
    state = lowered()
    recv, send = call(state, "D_m0.recv@0", RECVS), call(state, "D_m1.send@0", SENDS)
    nodes = list(state.graph.nodes)
    block = nodes[nodes.index(wait_before(recv)) : nodes.index(nodes_of(state.graph, BUFFERS)[1])]
    behind = send.next
    for node in reversed(block):
        behind.append(node)
    state.graph.lint()
    text = refusal(state, limit=1)
    assert text == (
        "D_m1_l0_send of D_m1.send@0 on comm: 2 communications in flight, the transport allows 1. "
        "Receive D_m0@0 first."
    )
    assert Verify(2).apply(state)[1].count("at most 2 in flight") == 1


def test_two_segments_that_share_a_cache_in_the_wrong_order() -> None:
    with fake_ranks():
        trace = traced(Appends(), (rows(), torch.zeros(16, H)))
    state = run_passes(trace.fresh(), "lower")
    Verify().apply(state)
    first, second = [n for n in state.graph.nodes if n.name.startswith("A_m")]
    assert {d.kind for d in state.dependencies if (d.before, d.after) == (first, second)} == {
        "RAW",
        "WAR",
        "WAW",
    }
    first.prepend(second)
    for item in [u for u in second.users if u.name.endswith("_")]:
        assert stream_of(item) == "comp"
    text = refusal(state)
    assert text.startswith("A_m1_l0 of A1_m1@0 on comp is not ordered behind A_m0_l0 of A1_m0@0")
