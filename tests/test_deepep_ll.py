"""DeepEP's low-latency discipline on its CPU twin: two slots, one un-received operation, parity."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import dbo_fx
from dbo_fx.backend import _transport_name, compile_captured
from dbo_fx.comm import abandon_in_flight, deepep_package, groups, in_flight, transport_for
from dbo_fx.comm.deepep_ll import LowLatencyTwin
from dbo_fx.comm.protocol import begin_region
from dbo_fx.errors import CommunicationError, OptionError, UnsupportedGraphError
from dbo_fx.ir import Half, Keepalive, Program, Record, Run, Wait, parse_program
from dbo_fx.options import Options
from dbo_fx.passes.halves import argument
from dbo_fx.passes.streams import RECVS, SENDS, stream_of
from rank_pool import RankPool
from small_moe import CachedMoe, PlainMoe, TwoLaunches, one_rank, run_passes, traced_model

OPS = torch.ops.dbo_fx
LL = "deepep_ll"


@pytest.fixture
def group() -> Any:
    """A gloo group of this process alone, and its Buffer at slot 0."""
    with one_rank() as name:
        yield name
        abandon_in_flight()


def send(x: Tensor, group: str, flight: int, slot: int | None, kind: str = "dispatch") -> Any:
    """Send `x`; return the outputs."""
    out = OPS.comm_buffers([x], "all_gather", group)
    getattr(OPS, f"{kind}_send")([x], out, "all_gather", group, LL, flight, slot)
    return out


def test_outputs_hold_poison_until_the_recv_and_slots_take_turns(group: str) -> None:
    for turn in range(5):
        x = torch.full((2, 3), float(turn))
        kind = ("dispatch", "combine")[turn % 2]
        out = send(x, group, 0, turn % 2, kind)
        assert out[0].isnan().all()
        getattr(OPS, f"{kind}_recv")(out, group, LL, 0, turn % 2)
        assert torch.equal(out[0], x)


def test_a_region_does_not_start_over_what_is_not_received(group: str) -> None:
    x = torch.ones(2, 3)
    OPS.dispatch_recv(send(x, group, 0, 0), group, LL, 0, 0)
    out = send(x, group, 1, 1)  # The index is at slot 0 again.
    with pytest.raises(CommunicationError, match=r"dispatch, flight 1.*\(slot 1\) is not received"):
        begin_region(LL, [group])
    OPS.dispatch_recv(out, group, LL, 1, 1)
    begin_region(LL, [group])


def test_several_tensors_in_one_op_are_one_operation(group: str) -> None:
    inputs = [torch.ones(2, 3), torch.ones(2, 1, dtype=torch.int64)]
    for slot in (0, 1):
        out = OPS.comm_buffers(inputs, "all_gather", group)
        OPS.dispatch_send(inputs, out, "all_gather", group, LL, 0, slot)
        assert (out[1] == -7).all()
        OPS.dispatch_recv(out, group, LL, 0, slot)
        assert all(map(torch.equal, out, inputs))


def test_a_second_send_destroys_the_first_operation(group: str) -> None:
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0)
    lost = send(first, group, 0, 0)
    kept = send(second, group, 0, 1, "combine")
    with pytest.raises(CommunicationError) as caught:
        OPS.dispatch_recv(lost, group, LL, 0, 0)
    said = str(caught.value)
    assert said.startswith(f"dispatch, flight 0, group {group!r} (slot 0): destroyed by combine, ")
    assert f"combine, flight 0, group {group!r} (slot 1)" in said
    assert "spin until the trap" in said
    assert lost[0].isnan().all()
    OPS.combine_recv(kept, group, LL, 0, 1)
    assert torch.equal(kept[0], second)


def test_the_first_destroyer_is_named_when_the_slot_is_used_again(group: str) -> None:
    lost = send(torch.ones(2, 3), group, 0, 0)
    OPS.dispatch_recv(send(torch.ones(2, 3), group, 1, 1), group, LL, 1, 1)
    OPS.dispatch_recv(send(torch.ones(2, 3), group, 2, 0), group, LL, 2, 0)
    with pytest.raises(CommunicationError, match="destroyed by dispatch, flight 1"):
        OPS.dispatch_recv(lost, group, LL, 0, 0)


def test_a_send_in_another_slot_is_refused_and_changes_nothing(group: str) -> None:
    with pytest.raises(CommunicationError) as caught:
        send(torch.ones(2, 3), group, 0, 1)
    said = str(caught.value)
    assert "the program sends in slot 1" in said
    assert "is at slot 0" in said
    assert "abandon_in_flight() on every rank" in said
    assert in_flight() == ()
    OPS.dispatch_recv(send(torch.ones(2, 3), group, 0, 0), group, LL, 0, 0)


@pytest.mark.parametrize("slot", [None, 2, -1])
def test_a_slot_must_be_one_of_the_transports(group: str, slot: int | None) -> None:
    with pytest.raises(CommunicationError, match=rf"found slot {slot}, wanted one of 0\.\.1"):
        send(torch.ones(2, 3), group, 0, slot)


def test_a_transport_without_slots_takes_none(group: str) -> None:
    out = OPS.comm_buffers([torch.ones(2)], "all_gather", group)
    with pytest.raises(CommunicationError, match="found slot 0, but gloo has no slots"):
        OPS.dispatch_send([torch.ones(2)], out, "all_gather", group, "gloo", 0, 0)


@pytest.mark.parametrize(("transport", "slot"), [("gloo", None), (LL, 1)])
def test_both_halves_name_the_same(group: str, transport: str, slot: int | None) -> None:
    out = send(torch.ones(2), group, 0, 0)
    with pytest.raises(CommunicationError, match="Both halves name the same"):
        OPS.dispatch_recv(out, group, transport, 0, slot)
    OPS.dispatch_recv(out, group, LL, 0, 0)


def test_a_region_starts_at_slot_0_or_is_refused(group: str) -> None:
    begin_region(LL, [group])
    send(torch.ones(2), group, 0, 0)
    with pytest.raises(CommunicationError) as caught:
        begin_region(LL, [group])
    assert f"the Buffer of group {group!r} is at slot 1" in str(caught.value)
    assert "starts at slot 0" in str(caught.value)
    begin_region(LL, ["another group"])
    abandon_in_flight("another group")
    assert len(in_flight()) == 1
    abandon_in_flight(group)
    assert in_flight() == ()
    begin_region(LL, [group])


def program_of(model: type[PlainMoe], schedule: str, layers: int = 2, count: int = 2) -> Program:
    """The program for the twin, verified."""
    trace = traced_model(model, layers)
    program = run_passes(trace.fresh(), "verify", schedule, count, LL).program
    assert program is not None
    return program


def test_the_program_of_the_plain_layer(golden: Callable[[str, str], None]) -> None:
    program = program_of(PlainMoe, "mlp_shared_overlap", layers=1)
    golden("streams_deepep_ll.dbo", str(program))
    assert parse_program(str(program)) == program
    assert program.transport == LL


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
@pytest.mark.parametrize(
    ("schedule", "count"), [("mlp_shared_overlap", 2), ("sequential", 1), ("sequential", 3)]
)
def test_one_stream_no_events_and_slots_in_turn(
    model: type[PlainMoe], schedule: str, count: int
) -> None:
    program = program_of(model, schedule, count=count)
    assert {step.stream for step in program.steps} == {"comp"}
    assert not [step for step in program.steps if isinstance(step, Record | Wait)]
    runs = [s for s in program.steps if isinstance(s, Run) and s.action.half is not None]
    sends = [s for s in runs if s.action.half is Half.SEND]
    recvs = {s.action.communication: s.slot for s in runs if s.action.half is Half.RECV}
    assert [s.slot for s in sends] == [n % 2 for n in range(len(sends))]
    assert len(sends) % 2 == 0
    assert recvs == {s.action.communication: s.slot for s in sends}
    assert len([s for s in program.steps if isinstance(s, Keepalive)]) == len(sends)


def test_emitted_halves_carry_transport_flight_and_slot() -> None:
    graph = run_passes(traced_model().fresh(), "emit", transport=LL).graph
    halves = [n for n in graph.nodes if n.target in SENDS | RECVS]
    assert len(halves) == 8
    assert {argument(n, "transport") for n in halves} == {LL}
    assert {argument(n, "flight") for n in halves} == {0, 1}
    assert [argument(n, "slot") for n in halves if n.target in SENDS] == [0, 1, 0, 1]
    assert {stream_of(n) for n in halves} == {"comp"}


def test_launches_that_travel_together_are_refused() -> None:
    captured = traced_model(TwoLaunches).fresh()
    with pytest.raises(UnsupportedGraphError) as refused:
        compile_captured(captured, Options(transport=LL))
    said = str(refused.value)
    assert said.startswith("all_gather_into_tensor_1 ")
    assert "is 2 operations, all un-received at once" in said
    assert "'deepep_ll' allows 1" in said


def test_on_cuda_the_option_is_refused_with_the_reason() -> None:
    graph = Graph()
    with FakeTensorMode():
        graph.placeholder("x").meta["val"] = torch.empty(4, 3, device="cuda")
    token = SimpleNamespace(index=0)
    captured: Any = SimpleNamespace(token_inputs=[token], placeholders=list(graph.nodes))
    assert _transport_name(captured, None) == "nccl"
    if deepep_package.reason(LL) is None:
        pytest.skip("DeepEP is here")
    with pytest.raises(OptionError) as refused:
        _transport_name(captured, LL)
    said = str(refused.value)
    assert said.startswith("option transport='deepep_ll' cannot be used: ")
    assert "transport 'deepep_ll' cannot run here: " in said
    assert str(deepep_package.reason(LL)) in said


def decoder() -> Any:
    """A seeded decoder with experts on every rank."""
    from dbo_fx.models.moe import MoeConfig, MoeDecoder

    torch.manual_seed(0)
    return MoeDecoder(MoeConfig(layers=3, shared_hidden=64, dense_layers=(0,))).eval()


def tokens(rank: int, batch: int) -> Tensor:
    """[B, 5] ids."""
    ids = torch.randint(0, 256, (batch, 5), generator=torch.Generator().manual_seed(rank))
    torch._dynamo.mark_dynamic(ids, 0)
    return ids


def halves_of(net: Any, ids: Tensor, count: int) -> Tensor:
    """Each microbatch through the unmodified model, in order."""
    bounds = [len(ids) * i // count for i in range(count + 1)]
    return torch.cat([net(ids[low:high]) for low, high in itertools.pairwise(bounds)])


def compiled_for(net: Any, **options: Any) -> Any:
    """The model, compiled for the twin."""
    torch._dynamo.reset()
    return torch.compile(net, backend="dbo_fx", fullgraph=True, options={"transport": LL} | options)


def run_schedule(rank: int, options: dict[str, Any]) -> list[bool]:
    """Two calls of every size, against the microbatched reference."""
    net = decoder()
    compiled = compiled_for(net, **options)
    same = []
    with torch.no_grad():
        for batch in (8, 8, 13, 6):
            ids = tokens(rank, batch)
            reference = halves_of(net, ids, options.get("num_microbatches", 2))
            same.append(torch.equal(compiled(ids), reference))
    same.append(dbo_fx.compilations()[-1].program.transport == LL)
    return same


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "sequential"},
        pytest.param({"schedule": "sequential", "num_microbatches": 3}, marks=pytest.mark.slow),
    ],
    ids=["mlp_shared_overlap", "sequential", "sequential of 3"],
)
def test_bit_identical_to_the_microbatched_reference(
    ranks: RankPool, options: dict[str, Any]
) -> None:
    assert ranks(run_schedule, options, timeout_s=300) == [[True] * 5] * 2


class Boom(RuntimeError):
    """What a step fails with."""


def break_at_slot_1(module: GraphModule) -> list[Any]:
    """Let the first segment that finds its group's Buffer at slot 1 raise."""
    twin = transport_for("cpu", LL)
    assert isinstance(twin, LowLatencyTwin)
    name = groups.name_of(None)
    assert name is not None

    def hook(*_: Any) -> None:
        if twin._buffers[name].index == 1:
            raise Boom

    segments = [m for m in module.children() if isinstance(m, GraphModule)]
    return [segment.register_forward_pre_hook(hook) for segment in segments]


def fail_once(compiled: Any, ids: Tensor) -> None:
    """One call that fails between a send and its recv."""
    hooks = break_at_slot_1(dbo_fx.compilations()[-1].module)
    with pytest.raises(Boom):
        compiled(ids)
    for handle in hooks:
        handle.remove()


def run_failed_step(rank: int) -> dict[str, bool]:
    """A step fails half-way on every rank; the next one finds the Buffers aligned."""
    net, ids = decoder(), tokens(rank, 8)
    compiled = compiled_for(net)
    with torch.no_grad():
        reference = halves_of(net, ids, 2)
        before = torch.equal(compiled(ids), reference)
        fail_once(compiled, ids)
        nothing = in_flight() == ()
        return {
            "before": before,
            "nothing left": nothing,
            "after": torch.equal(compiled(ids), reference),
        }


def test_the_step_after_a_failed_one_works(ranks: RankPool) -> None:
    for seen in ranks(run_failed_step, timeout_s=300):
        assert all(seen.values()), seen


def run_without_realign(rank: int) -> dict[str, Any]:
    """The same, but nobody re-aligns: the next call is refused, until somebody does."""
    net, ids = decoder(), tokens(rank, 8)
    compiled = compiled_for(net)
    with torch.no_grad():
        reference = halves_of(net, ids, 2)
        compiled(ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LowLatencyTwin, "realign", lambda *_: None)
            fail_once(compiled, ids)
            said = []
            for _ in range(2):  # A refused call does not repair one rank alone.
                with pytest.raises(CommunicationError) as refused:
                    compiled(ids)
                said.append(str(refused.value))
        with pytest.raises(CommunicationError):
            compiled(ids)
        abandon_in_flight()
        return {"said": said, "after": torch.equal(compiled(ids), reference)}


def test_a_buffer_that_was_not_realigned_is_refused(ranks: RankPool) -> None:
    for seen in ranks(run_without_realign, timeout_s=300):
        for said in seen["said"]:
            assert "is at slot 1" in said
            assert "every region of a deepep_ll program starts at slot 0" in said
        assert seen["after"]
