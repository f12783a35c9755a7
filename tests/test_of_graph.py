"""A lowered graph as an execution: operations, lifetimes, and the order that it must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from dbo_fx import sync
from dbo_fx.certificates.execution import Kind, Operation, Required
from dbo_fx.certificates.host import is_blocking
from dbo_fx.certificates.of_graph import GraphExecution, execution_of_graph
from dbo_fx.certificates.reference import Reference, Step
from dbo_fx.contracts import DEEPEP_LL, GLOO, NCCL, Contract
from dbo_fx.effects import Access, Member
from small_moe import CachedMoe, PlainMoe, TwoLaunches, run_passes, traced_model

aten = torch.ops.aten
COMMUNICATES = (Kind.SEND, Kind.RECV)


def read(
    model: type[PlainMoe] = PlainMoe, layers: int = 1, contract: Contract = GLOO
) -> GraphExecution:
    state = run_passes(traced_model(model, layers).fresh(), "lower", transport=contract.name)
    return execution_of_graph(state, contract)


def named(graph: GraphExecution, name: str) -> tuple[int, Operation]:
    found = [(i, o) for i, o in enumerate(graph.execution.operations) if o.name == name]
    assert len(found) == 1, name
    return found[0]


def test_operations_stand_in_host_order() -> None:
    graph = read()
    names = [o.name for o in graph.execution.operations]
    assert names[:12] == [
        "begin",
        "A_m0_l0",
        "D_m0_l0_buffers",
        "record e0",
        "wait e0",
        "D_m0_l0_send",
        "record e1",
        "A_m1_l0",
        "wait e1",
        "D_m0_l0_recv",
        "free getitem_3_m0",
        "free getitem_4_m0",
    ]
    assert names[-4:] == ["cat_default", "free linear_4_m0", "free linear_4_m1", "end"]
    assert len(graph.nodes) == len(names)
    for node, operation in zip(graph.nodes, graph.execution.operations, strict=True):
        marker = operation.kind in (Kind.BEGIN, Kind.END, Kind.FREE, Kind.RECORD, Kind.WAIT)
        assert marker or (node is not None and node.name == operation.name)


def test_what_operations_touch() -> None:
    graph = read(CachedMoe)
    _, attention = named(graph, "A_m0_l0")
    assert {"l_x_", "l_caches_0_", "l_counter_"} <= attention.reads
    assert {"l_caches_0_", "l_counter_", "add_2_m0", "getitem_3_m0"} <= attention.writes
    assert attention.writes.isdisjoint({"softmax_m0", "add_2_m1"})
    _, buffers = named(graph, "D_m0_l0_buffers")
    landing = {"D_m0_l0_out0", "D_m0_l0_out1", "D_m0_l0_out2"}
    assert (buffers.kind, buffers.stream, buffers.writes) == (Kind.ALLOCATE, "comp", landing)
    _, send = named(graph, "D_m0_l0_send")
    assert (send.stream, send.writes) == ("comm", landing)
    assert send.reads == {"add_2_m0", "getitem_3_m0", "getitem_4_m0"}
    _, end = named(graph, "end")
    assert end.reads == {"cat_default"}
    assert {"l_x_", "l_caches_0_", "l_self_parameters_head_"} <= end.writes
    assert named(graph, "begin")[1].writes == end.writes


def test_communications_know_their_group_and_flight() -> None:
    graph = read(TwoLaunches)
    halves = [o for o in graph.execution.operations if o.kind in COMMUNICATES]
    flights = {(o.communicator, o.flight) for o in halves if o.kind is Kind.SEND}
    assert len(flights) == 6
    for flight in flights:
        pair = [o for o in halves if (o.communicator, o.flight) == flight]
        assert [o.kind for o in pair] == [Kind.SEND, Kind.RECV]
        assert pair[0].transfer == pair[1].transfer
    assert {o.transfer for o in halves} == {"all_gather x1", "reduce_scatter_sum x1"}
    dispatched = [o for o in read().execution.operations if o.kind is Kind.SEND]
    assert dispatched[0].transfer == "all_gather x3"


@pytest.mark.parametrize(("contract", "blocks"), [(GLOO, True), (NCCL, False)])
def test_a_recv_blocks_the_host_if_its_transport_does(contract: Contract, blocks: bool) -> None:
    graph = read(contract=contract)
    for operation in graph.execution.operations:
        assert operation.blocks_host == (blocks and operation.kind is Kind.RECV)


def test_slots_are_read_off_the_nodes() -> None:
    sends = [o for o in read(contract=DEEPEP_LL).execution.operations if o.kind is Kind.SEND]
    assert [o.slot for o in sends] == [0, 1, 0, 1]
    assert {o.slot for o in read().execution.operations} == {None}


def test_a_storage_is_freed_once_behind_the_last_node_that_names_it() -> None:
    state = run_passes(traced_model(CachedMoe, 2).fresh(), "lower")
    graph = execution_of_graph(state, GLOO)
    order = {n: i for i, n in enumerate(state.graph.nodes)}
    freed: dict[Any, int] = {}
    for index, operation in enumerate(graph.execution.operations):
        if operation.kind is Kind.FREE:
            for storage in operation.writes:
                assert freed.setdefault(storage, index) == index
    for index, operation in enumerate(graph.execution.operations):
        for storage in (operation.reads | operation.writes) & freed.keys():
            assert index <= freed[storage]
    live_in = named(graph, "begin")[1].writes
    assert freed.keys().isdisjoint(live_in | {"cat_default"})
    keepalive = next(n for n in state.graph.nodes if n.target is sync.keepalive)
    held = graph.nodes[freed["getitem_3_m0"]]
    assert held is keepalive
    assert order[held] > order[next(n for n in order if n.name == "D_m0_l0_recv")]


def test_the_required_order_of_caches_and_counters() -> None:
    graph = read(CachedMoe)
    first, second = named(graph, "A_m0_l0")[0], named(graph, "A_m1_l0")[0]
    between = {
        (r.kind, r.storage)
        for r in graph.execution.required
        if (r.before, r.after) == (first, second)
    }
    assert between == {
        ("RAW", "l_caches_0_"),
        ("WAR", "l_caches_0_"),
        ("WAW", "l_caches_0_"),
        ("RAW", "l_counter_"),
        ("WAW", "l_counter_"),
    }


def test_every_requirement_is_stated_once() -> None:
    required = read(CachedMoe, 2).execution.required
    assert len(set(required)) == len(required)
    assert all(r.before != r.after for r in required)


def step(at: int, position: int, microbatch: int | None, role: str, access: Access) -> Step:
    return Step(at, Kind.COMPUTE, role, Member(position, microbatch, access))


def test_a_shared_write_stays_behind_every_microbatch_that_reads_before_it() -> None:
    """Also behind the later ones, although shared nodes run once, with microbatch 0."""
    table = frozenset({"table"})
    early, write = Access(reads=table), Access(reads=table, writes=table)
    steps = [
        step(0, 1, 0, "compute", early),
        step(1, 1, 1, "compute", early),
        step(2, 5, None, "shared", write),
        step(3, 7, 0, "compute", early),
        step(4, 7, 1, "compute", early),
    ]
    found = Reference(steps, table).required([Graph().placeholder("x")] * 0)
    assert Required(0, 2, "WAR", "table") in found
    assert Required(1, 2, "WAR", "table") in found
    assert Required(2, 3, "RAW", "table") in found
    assert Required(2, 4, "RAW", "table") in found


def blocking(target: Any, *values: Any, result: Any = None, **kwargs: Any) -> bool:
    graph = Graph()

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node: Node = graph.call_function(target, tuple(given(v) for v in values), kwargs)
    node.meta["val"] = result
    return is_blocking(node)


X, MASK, IDS = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
META = torch.ones(3, device="meta")


def test_ops_that_make_the_host_wait() -> None:
    assert blocking(aten._local_scalar_dense.default, X)
    assert blocking(aten.nonzero.default, X)
    assert blocking(aten.where.default, X)
    assert blocking(aten.masked_select.default, X, MASK)
    assert blocking(aten.unique_consecutive.default, X)
    assert blocking(aten.index.Tensor, X, [MASK])
    assert blocking(aten.index_put_.default, X, [MASK], X)
    assert blocking(aten.repeat_interleave.Tensor, IDS)


def test_ops_that_do_not() -> None:
    assert not blocking(aten.where.self, MASK, X, X)
    assert not blocking(aten.index.Tensor, X, [IDS])
    assert not blocking(aten.index_put_.default, X, [MASK], torch.tensor(0.0))
    assert not blocking(aten.repeat_interleave.Tensor, IDS, output_size=3)
    assert not blocking(aten.repeat_interleave.self_int, X, 2)
    assert not blocking(aten.masked_fill.Scalar, X, MASK, 0.0)
    assert not blocking(aten.relu.default, X, result=X)


def test_copies_between_devices_make_the_host_wait() -> None:
    """The meta device stands for a real one here and has no memory, so it does not count."""
    cuda = torch._subclasses.FakeTensorMode()
    with cuda:
        there, here = torch.empty(3, device="cuda"), torch.empty(3)
    assert blocking(aten._to_copy.default, there, result=here)
    assert blocking(aten._to_copy.default, here, result=there)
    assert not blocking(aten.add.Tensor, there, here.sum(), result=there)
    assert not blocking(aten._to_copy.default, META, result=here)


def test_a_send_writes_the_buffers_that_it_is_given() -> None:
    state = run_passes(traced_model(PlainMoe).fresh(), "lower")
    nodes = {n.name: n for n in state.graph.nodes}
    send = nodes["D_m1_l0_send"]  # A pass that shared buffers, and forgot to say so.
    send.replace_input_with(nodes["D_m1_l0_buffers"], nodes["D_m0_l0_buffers"])
    _, operation = named(execution_of_graph(state, GLOO), "D_m1_l0_send")
    assert {"D_m0_l0_out0", "D_m1_l0_out0"} <= operation.writes
