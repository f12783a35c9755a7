"""Recvs sink to the first use of what they bring, where a contract allows it, and no further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from dbo_fx import schedules, sync
from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import overlap_report
from dbo_fx.contracts import CONTRACTS, COPY_ENGINE, GLOO, NCCL, Contract
from dbo_fx.inspect.diff import diff
from dbo_fx.ir import COMM, Half, Keepalive, Program, Run, parse_program
from dbo_fx.ir_bind import bound_program, sunk_actions
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.sinking import sink_recvs
from dbo_fx.passes.streams import RECVS, SENDS
from small_moe import (
    CachedMoe,
    PlainMoe,
    TwoLaunches,
    fake_ranks,
    nodes_of,
    run_passes,
    traced_model,
)

SHIPPED = "mlp_shared_overlap"
STAYS = replace(NCCL, name="stays", recv_is="kernel")
LIMITED = replace(NCCL, name="limited", max_in_flight=1)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """What the ranks enqueue is compared, so their group must be known."""
    with fake_ranks():
        yield


def order_of(program: Program | None) -> str:
    """The actions as text."""
    assert program is not None
    return " ".join(action.bound() for action in program.actions)


def bound(contract: Contract = NCCL, layers: int = 2, schedule: str = SHIPPED) -> Program:
    return bound_program(schedules.load(schedule), layers, contract, 2)


def test_a_wait_moves_behind_what_does_not_need_it() -> None:
    assert " C_m0.recv@0 C_m1.send@0 S_m1@0 A0_m0@1 " in order_of(bound(STAYS))
    assert " C_m1.send@0 S_m1@0 C_m0.recv@0 A0_m0@1 " in order_of(bound())


def test_the_program_says_where_it_waits(golden: Any) -> None:
    program = bound(layers=1)
    golden("sinking_nccl.dbo", str(program))
    assert parse_program(str(program)) == program


@pytest.mark.parametrize("transport", sorted(CONTRACTS))
def test_only_a_wait_of_the_compute_stream_sinks(transport: str) -> None:
    contract = CONTRACTS[transport]
    stays = bound(replace(contract, recv_is="kernel"))
    sinks = contract.sinks and contract.slots is None  # Slots: at most to the next send.
    assert (order_of(bound(contract)) != order_of(stays)) == sinks
    assert not GLOO.sinks
    assert NCCL.sinks
    assert COPY_ENGINE.sinks
    assert not replace(NCCL, recv_stream=COMM).sinks


def test_it_lets_more_run_beside() -> None:
    """The shared expert runs beside the dispatch of the other microbatch, and its own combine."""

    def beside(contract: Contract, name: str) -> set[str]:
        report = overlap_report(execution_of_program(bound(contract), contract))
        found = [o for o in report.overlaps if o.communication.bound() == name]
        return {b.action.bound() for o in found for b in o.beside}

    assert beside(NCCL, "C_m0@0") >= beside(STAYS, "C_m0@0") | {"S_m1@0"}
    assert beside(NCCL, "D_m1@0") >= beside(STAYS, "D_m1@0") | {"S_m0@0"}


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
@pytest.mark.parametrize("layers", [2])
@pytest.mark.parametrize("schedule", [SHIPPED, "sequential"])
def test_a_graph_is_certified_and_nothing_else_moves(
    model: type[PlainMoe], layers: int, schedule: str
) -> None:
    sunk = run_passes(traced_model(model, layers).fresh(), "verify", schedule, transport="nccl")
    stays = run_passes(traced_model(model, layers).fresh(), "verify", schedule, transport=STAYS)

    def others(graph: Any) -> list[str]:
        nodes = [n for n in graph.nodes if n.target not in (sync.record, sync.wait)]
        return [n.name for n in nodes if _is_no_arrival(n) and n.target is not sync.keepalive]

    assert others(sunk.graph) == others(stays.graph)
    assert len(sunk.segments) == len(stays.segments)  # No segment is cut.
    calls = [n.op for n in sunk.graph.nodes].count("call_module")
    assert calls == [n.op for n in stays.graph.nodes].count("call_module")
    assert sunk.certificate is not None
    assert sunk.program is not None
    assert set(sunk.actions) == set(stays.actions)
    assert list(sunk.actions) == list(sunk.program.actions)


def _is_no_arrival(node: Node) -> bool:
    action = action_of(node)
    return action is None or action.half is not Half.RECV


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
def test_each_recv_stands_right_before_a_use(model: type[PlainMoe]) -> None:
    """Without markers, what follows a run of recvs with their items uses one of them."""
    state = run_passes(traced_model(model, 2).fresh(), "schedule")
    graph = sink_recvs(state, NCCL).graph
    arrived: list[Node] = []
    for node in graph.nodes:
        if not _is_no_arrival(node):
            arrived.append(node)
        elif arrived:
            action = action_of(node)
            users = {u for n in arrived for u in n.users if _is_no_arrival(u)}
            wanted = {u if (a := action_of(u)) is None else _whole(a) for u in users}
            here = node if action is None else _whole(action)
            assert here in wanted or node.target is torch.ops.aten.cat.default, node
            arrived = []


def _whole(action: Any) -> tuple[str, Any, Any, Any]:
    """A0 and A1 are one segment."""
    return action.phase.value[:1], action.microbatch, action.layer, action.half


def test_never_behind_the_next_send_of_its_flight() -> None:
    """A flight is received before it is sent again."""
    state = run_passes(traced_model(PlainMoe, 2).fresh(), "schedule")
    graph = sink_recvs(state, NCCL).graph
    open_: dict[object, Node] = {}
    for node in graph.nodes:
        if node.target in SENDS:
            key = (node.target, node.args[5])
            assert key not in open_
            open_[key] = node
        elif node.target in RECVS:
            action = action_of(node)
            assert action is not None
            send = next(k for k in open_ if open_[k].args[1] is node.args[0])
            del open_[send]
    assert not open_


def test_a_limit_on_what_is_in_flight_is_kept() -> None:
    program = bound(LIMITED)
    assert prove(execution_of_program(program, LIMITED)).max_in_flight == 1
    assert prove(execution_of_program(bound(), NCCL)).max_in_flight == 2
    state = run_passes(traced_model(PlainMoe, 2).fresh(), "verify", transport=LIMITED)
    assert order_of(state.program) == order_of(program)


def test_what_nobody_uses_stays() -> None:
    program = bound()
    actions = [a for a in program.actions if a.phase.value not in ("MLP", "TAIL", "A0")]
    kept = sunk_actions(actions, 2, 2, NCCL)
    assert sorted(map(str, kept)) == sorted(map(str, actions))


def test_a_program_is_what_its_schedule_says() -> None:
    assert not diff(bound(), SHIPPED)
    assert not diff(bound(STAYS), bound(STAYS))
    assert not diff(replace(bound(STAYS), transport="nccl"), SHIPPED)


def test_a_keepalive_stays_behind_its_recv() -> None:
    steps = bound().steps
    for index, step in enumerate(steps):
        if isinstance(step, Keepalive):
            before = steps[index - 1]
            assert isinstance(before, Run)
            assert before.action == replace(step.action, half=Half.RECV)


def test_the_events_follow() -> None:
    """One wait for each recv, right before it unless one stands there already."""
    state = run_passes(traced_model(PlainMoe, 2).fresh(), "streams", transport="nccl")
    recorded = {n.args[0]: n for n in nodes_of(state.graph, sync.record)}
    for node in state.graph.nodes:
        if node.target in RECVS:
            wait = node.prev
            assert wait.target is sync.wait
            assert recorded[wait.args[0]].prev.target in SENDS
