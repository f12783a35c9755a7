"""Streams, events and lifetimes: as many as needed, in the right places, and none more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbo_fx import sync
from dbo_fx.contracts import GLOO
from dbo_fx.errors import VerificationError
from dbo_fx.ir import COMM, COMP, Half, Keepalive, Merge, Record, Run, Wait, parse_program
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS, stream_of
from dbo_fx.passes.verify import Verify
from dbo_fx.pipeline import State
from small_moe import (
    CachedMoe,
    PlainMoe,
    TwoLaunches,
    fake_ranks,
    markers,
    nodes_of,
    rows,
    run_passes,
    traced,
    traced_model,
)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """What the ranks enqueue is compared, so their group must be known."""
    with fake_ranks():
        yield


def streamed(
    model: type[PlainMoe] = PlainMoe, layers: int = 1, schedule: str = "mlp_shared_overlap"
) -> State:
    return run_passes(traced_model(model, layers).fresh(), "streams", schedule)


def test_the_program_of_the_plain_layer(golden: Callable[[str, str], None]) -> None:
    program = streamed().program
    golden("streams_plain.dbo", str(program))
    assert parse_program(str(program)) == program


def test_launches_that_travel_together_stand_side_by_side() -> None:
    program = streamed(TwoLaunches, 2).program
    assert program is not None
    assert parse_program(str(program)) == program  # No action runs twice.


def test_only_sends_run_on_the_comm_stream() -> None:
    for node in streamed(CachedMoe, 2).graph.nodes:
        if node.target in (sync.record, sync.wait):
            continue
        assert stream_of(node) == (COMM if node.target in SENDS else COMP)


def test_a_send_waits_for_the_compute_stream_and_a_recv_for_the_send() -> None:
    graph = streamed(CachedMoe, 2).graph
    recorded = {n.args[0]: n for n in nodes_of(graph, sync.record)}
    for node in graph.nodes:
        if node.target in SENDS:
            wait = node.prev
            assert wait.target is sync.wait
            assert stream_of(wait) == COMM
            record = recorded[wait.args[0]]
            assert stream_of(record) == COMP
            assert record.prev.target is BUFFERS
            assert stream_of(node.next) == COMM
            assert node.next.target is sync.record
        if node.target in RECVS:
            wait = node.prev
            assert wait.target is sync.wait
            assert stream_of(wait) == COMP
            assert recorded[wait.args[0]].prev.target in SENDS


@pytest.mark.parametrize("send_stream", [COMP, COMM])
@pytest.mark.parametrize("schedule", ["sequential", "mlp_shared_overlap"])
def test_streams_are_those_of_the_contract(send_stream: str, schedule: str) -> None:
    """A recv that is a kernel of the comm stream: its readers and the keepalive wait for it."""
    carrier = replace(
        GLOO, name="other", send_stream=send_stream, recv_stream=COMM, recv_is="kernel"
    )
    trace = traced_model(CachedMoe, 2)
    graph = run_passes(trace.fresh(), "verify", schedule, transport=carrier).graph
    assert {stream_of(n) for n in graph.nodes if n.target in SENDS} == {send_stream}
    assert {stream_of(n) for n in graph.nodes if n.target in RECVS} == {COMM}
    recorded = {n.args[0]: n for n in nodes_of(graph, sync.record)}
    for node in nodes_of(graph, sync.keepalive):
        assert stream_of(node) == COMP
        wait = node.prev
        while wait.target is not sync.wait:
            wait = wait.prev
        recv, kept = action_of(recorded[wait.args[0]].prev), action_of(node)
        assert recv is not None
        assert kept is not None
        assert (recv.half, recv.communication) == (Half.RECV, kept.communication)


def test_a_keepalive_stands_behind_the_recv_and_names_inputs_and_buffers() -> None:
    graph = streamed().graph
    sends = {a.communication: n for n in graph.nodes if n.target in SENDS and (a := action_of(n))}
    kept = nodes_of(graph, sync.keepalive)
    assert len(kept) == len(sends) == 4
    for node in kept:
        action = action_of(node)
        assert action is not None
        send = sends[action.communication]
        inputs, buffers = send.args[:2]
        assert isinstance(inputs, list | tuple)
        assert node.args == (*inputs, buffers)
        before = node.prev
        while before.target not in RECVS:
            assert action_of(before) == action
            before = before.prev
        assert action_of(before) == action


def test_steps_are_runs_markers_keepalives_and_one_merge() -> None:
    program = streamed(PlainMoe, 2).program
    assert program is not None
    kinds = [type(step) for step in program.steps]
    assert kinds.count(Keepalive) == 8
    assert kinds.count(Record) == kinds.count(Wait) == 16
    assert kinds.count(Merge) == 1
    assert kinds.count(Run) == len(program.actions)
    assert (program.schedule, program.transport) == ("mlp_shared_overlap", "gloo")
    events = [s.event for s in program.steps if isinstance(s, Record)]
    assert events == list(range(16))


@pytest.mark.parametrize("schedule", ["sequential", "mlp_shared_overlap"])
def test_no_event_and_no_keepalive_is_redundant(schedule: str) -> None:
    """Without any one of them the verifier refuses."""
    total = len(markers(run_passes(traced_model().fresh(), "lower", schedule).graph))
    assert total == 20
    for index in range(total):
        state = run_passes(traced_model().fresh(), "lower", schedule)
        Verify(GLOO).apply(state)
        state.graph.erase_node(markers(state.graph)[index])
        with pytest.raises(VerificationError):
            Verify(GLOO).apply(state)


class Overwrites(PlainMoe):
    """Changes in place what its dispatch has sent, before the dispatch is received."""

    def forward(self, x: Tensor) -> Any:
        h = self.attend(0, x)
        y = self.experts(0, h)
        return h.mul_(2) + y


def test_one_event_serves_several_dependencies() -> None:
    trace = traced(Overwrites(), (rows(),))
    state = run_passes(trace.fresh(), "streams")
    assert any(d.kind == "WAR" for d in state.dependencies)
    assert len(nodes_of(state.graph, sync.record)) == 8
    Verify(GLOO).apply(run_passes(trace.fresh(), "lower"))


def test_one_microbatch_has_a_program_too() -> None:
    state = run_passes(traced_model().fresh(), "verify", "sequential", 1)
    assert state.program is not None
    assert state.program.microbatches == 1
    assert "merge" not in str(state.program)
    assert parse_program(str(state.program)) == state.program


def test_the_graph_is_not_reordered() -> None:
    before = [n.name for n in run_passes(traced_model().fresh(), "schedule").graph.nodes]
    after = [n.name for n in streamed().graph.nodes if n.target not in vars(sync).values()]
    assert after == before


def test_markers_cannot_run() -> None:
    for marker in (sync.record, sync.wait):
        with pytest.raises(AssertionError, match=r"e3 on comm: a marker ran; emit the graph first"):
            marker(3, "comm")
    sync.keepalive(torch.ones(1))
