"""Communication ops on two gloo ranks, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_fx.comm import abandon_in_flight, groups, in_flight
from dbo_fx.errors import CommunicationError
from rank_pool import RankPool

T, H, K, R = 3, 4, 2, 2
OPS = torch.ops.dbo_fx


def world() -> str:
    """Name of the default group."""
    name = groups.name_of(None)
    assert name is not None
    return name


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's x [T, H], ids [T, K], weights [T, K]: made from whole numbers, rank visible."""
    x = torch.arange(T * H, dtype=torch.float32).view(T, H) + 100 * rank
    ids = torch.arange(T * K).view(T, K) + 10 * rank
    return x, ids, ids / 2


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """Message of the CommunicationError that a call raises."""
    with pytest.raises(CommunicationError) as caught:
        call(*args)
    return str(caught.value)


def run_dispatch(rank: int) -> list[torch.Tensor]:
    """The fused op."""
    return list(OPS.dispatch(*tokens(rank), world()))


def test_dispatch_gathers_every_rank_in_order(ranks: RankPool) -> None:
    want = [torch.cat(pair) for pair in zip(tokens(0), tokens(1), strict=True)]
    for outputs in ranks(run_dispatch):
        for got, wanted in zip(outputs, want, strict=True):
            assert torch.equal(got, wanted)
            assert got.dtype == wanted.dtype


def run_combine(rank: int) -> torch.Tensor:
    """Each rank contributes its row numbers, times its rank + 1."""
    y = (torch.arange(R * T, dtype=torch.float32)[:, None] * (rank + 1)).expand(R * T, H)
    return OPS.combine(y, T, world())


def test_combine_sums_and_keeps_own_rows(ranks: RankPool) -> None:
    for rank, got in enumerate(ranks(run_combine)):
        rows = torch.arange(rank * T, rank * T + T, dtype=torch.float32) * 3
        assert torch.equal(got, rows[:, None].expand(T, H))


def run_halves(rank: int) -> dict[str, Any]:
    """Dispatch and combine in halves, two flights at once, received in another order."""
    group, seen = world(), {}
    inputs = {s: [t + s for t in tokens(rank)] for s in (0, 1)}
    got = {s: OPS.comm_buffers(inputs[s], "all_gather", group) for s in (0, 1)}
    for s in (1, 0):
        OPS.dispatch_send(inputs[s], got[s], "all_gather", group, "gloo", s)
    seen["in_flight"] = [str(key) for key in in_flight()]
    seen["early"] = [t.clone() for t in got[0]]
    for s in (0, 1):
        OPS.dispatch_recv(got[s], group, "gloo", s)
        want = OPS.dispatch(*inputs[s], group)
        seen[f"dispatch {s}"] = all(map(torch.equal, got[s], want))
    sums = OPS.comm_buffers([got[0][0]], "reduce_scatter_sum", group)
    OPS.combine_send([got[0][0]], sums, "reduce_scatter_sum", group, "gloo", 0)
    seen["early sums"] = sums[0].clone()
    OPS.combine_recv(sums, group, "gloo", 0)
    seen["combine"] = torch.equal(sums[0], OPS.combine(got[0][0], T, group))
    seen["left"] = in_flight()
    return seen


def run_overwritten(rank: int) -> bool:
    """Rank 1 sends only when rank 0 has overwritten what it has sent."""
    group, store = world(), dist.distributed_c10d._get_default_store()
    x = tokens(rank)[0]
    want = [tokens(r)[0] for r in range(R)]
    if rank:
        store.wait(["overwritten"])
    got = OPS.comm_buffers([x], "all_gather", group)
    OPS.dispatch_send([x], got, "all_gather", group, "gloo", 0)
    x.fill_(-1)
    if not rank:
        store.set("overwritten", "yes")
    OPS.dispatch_recv(got, group, "gloo", 0)
    return torch.equal(got[0], torch.cat(want))


def test_a_send_has_read_its_inputs(ranks: RankPool) -> None:
    """Behind the send they may be overwritten, or their memory handed out again."""
    assert ranks(run_overwritten) == [True, True]


def test_halves_equal_the_fused_ops_and_are_poisoned_until_received(ranks: RankPool) -> None:
    for seen in ranks(run_halves):
        assert seen["in_flight"] == [
            "dispatch, flight 1, group '0'",
            "dispatch, flight 0, group '0'",
        ]
        x, ids, weights = seen["early"]
        assert x.isnan().all()
        assert (ids == -7).all()
        assert weights.isnan().all()
        assert seen["early sums"].isnan().all()
        assert seen["dispatch 0"]
        assert seen["dispatch 1"]
        assert seen["combine"]
        assert seen["left"] == ()


def run_all_to_all(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors in one operation; row j of rank r goes to rank j."""
    first = torch.tensor([[10 * rank], [10 * rank + 1]]).to(dtype)
    second = torch.tensor([rank, rank]) > 0
    outputs = OPS.comm_buffers([first, second], "all_to_all", world())
    OPS.dispatch_send([first, second], outputs, "all_to_all", world(), "gloo", 5)
    OPS.dispatch_recv(outputs, world(), "gloo", 5)
    return outputs[0], outputs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_to_all_exchanges_equal_parts(ranks: RankPool, dtype: torch.dtype) -> None:
    for rank, (first, second) in enumerate(ranks(run_all_to_all, dtype)):
        assert first.tolist() == [[rank], [10 + rank]]
        assert second.tolist() == [False, True]


def run_non_contiguous(rank: int) -> torch.Tensor:
    """Inputs that are transposed views."""
    x, ids, weights = tokens(rank)
    return OPS.dispatch(x.t(), ids.t(), weights.t(), world())[0]


def test_non_contiguous_inputs(ranks: RankPool) -> None:
    want = torch.cat([tokens(0)[0].t(), tokens(1)[0].t()])
    assert all(torch.equal(got, want) for got in ranks(run_non_contiguous))


def run_misuse(rank: int) -> dict[str, str]:
    """Every refusal; all of them come before any communication, so ranks stay in step."""
    group, x = world(), tokens(rank)[0]
    out = OPS.comm_buffers([x], "all_gather", group)
    sent = ([x], out, "all_gather", group, "gloo", 1)
    said = {"no send": error_of(OPS.dispatch_recv, out, group, "gloo", 1)}
    OPS.dispatch_send(*sent)
    said["double send"] = error_of(OPS.dispatch_send, *sent)
    said["wrong kind"] = error_of(OPS.combine_recv, out, group, "gloo", 1)
    said["other outputs"] = error_of(OPS.dispatch_recv, [out[0].clone()], group, "gloo", 1)
    OPS.dispatch_recv(out, group, "gloo", 1)
    said["received twice"] = error_of(OPS.dispatch_recv, out, group, "gloo", 1)
    said["counts"] = error_of(OPS.dispatch_send, [x, x], out, "all_gather", group, "gloo", 2)
    said["uneven"] = error_of(OPS.comm_buffers, [x], "reduce_scatter_sum", group)
    said["scalar"] = error_of(OPS.comm_buffers, [x.sum()], "all_gather", group)
    said["collective"] = error_of(OPS.comm_buffers, [x], "all_reduce", group)
    said["rows"] = error_of(OPS.combine, x, T, group)
    said["group"] = error_of(OPS.dispatch, x, x, x, "no such group")
    return said


def test_misuse_is_refused_and_named(ranks: RankPool) -> None:
    for said in ranks(run_misuse):
        for key in ("no send", "double send", "other outputs", "received twice"):
            assert said[key].startswith("dispatch, flight 1, group '0': ")
        assert "received without a send. In flight: nothing" in said["no send"]
        assert "sent twice" in said["double send"]
        assert "combine, flight 1" in said["wrong kind"]
        assert "In flight: dispatch, flight 1, group '0'" in said["wrong kind"]
        assert "other outputs" in said["other outputs"]
        assert "2 inputs and 1 outputs" in said["counts"]
        assert "3 rows do not divide evenly among 2 ranks" in said["uneven"]
        assert "without dimensions" in said["scalar"]
        assert "all_gather, reduce_scatter_sum, all_to_all" in said["collective"]
        assert "y has 3 rows, wanted 6" in said["rows"]
        assert "'no such group' is unknown" in said["group"]


def run_abandon(rank: int) -> bool:
    """A step that fails between the halves leaves nothing behind after abandon_in_flight."""
    x = tokens(rank)[0]
    out = OPS.comm_buffers([x], "all_gather", world())
    OPS.dispatch_send([x], out, "all_gather", world(), "gloo", 0)
    abandon_in_flight()
    OPS.dispatch_send([x], out, "all_gather", world(), "gloo", 0)
    OPS.dispatch_recv(out, world(), "gloo", 0)
    return torch.equal(out[0], torch.cat([tokens(0)[0], tokens(1)[0]]))


def test_abandon_in_flight_allows_the_next_step(ranks: RankPool) -> None:
    assert ranks(run_abandon) == [True, True]


def run_subgroup(rank: int) -> list[torch.Tensor]:
    """A group of one rank each, by its own name."""
    mine = [dist.new_group([r]) for r in range(R)][rank]
    name = groups.name_of(mine)
    assert name is not None
    return [OPS.dispatch(*tokens(rank), name)[0], OPS.combine(tokens(rank)[0], T, name)]


def test_a_group_is_found_by_its_name(ranks: RankPool) -> None:
    for rank, (gathered, combined) in enumerate(ranks(run_subgroup)):
        assert torch.equal(gathered, tokens(rank)[0])
        assert torch.equal(combined, tokens(rank)[0])


def run_opcheck(rank: int) -> None:
    """torch's own checks of schema, fake and tracing; every rank runs the same collectives."""
    group, inputs = world(), tokens(rank)
    functional = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.dispatch.default, (*inputs, group), test_utils=functional)
    y = torch.ones(R * T, H)
    torch.library.opcheck(OPS.combine.default, (y, T, group), test_utils=functional)
    # comm_buffers has no values to compare, and a half leaves or needs an entry in the table.
    shapes = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        OPS.comm_buffers.default, (list(inputs), "all_gather", group), test_utils=shapes
    )
    out = OPS.comm_buffers(list(inputs), "all_gather", group)
    for check in shapes:
        arguments = (list(inputs), out, "all_gather", group, "gloo", 0)
        torch.library.opcheck(OPS.dispatch_send.default, arguments, test_utils=check)
        abandon_in_flight()


@pytest.mark.slow
def test_opcheck(ranks: RankPool) -> None:
    ranks(run_opcheck)


def run_traced(rank: int) -> tuple[int, bool]:
    """A compiled function whose number of tokens changes; both ranks see the same sizes."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    group = world()

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, _ = OPS.dispatch(x, ids, weights, group)
        return OPS.combine(rows * 2, x.shape[0], group)

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    same = True
    for repeat in (1, 2, 3):
        inputs = [t.repeat(repeat, 1) for t in tokens(rank)]
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        same &= torch.equal(compiled(*inputs), inputs[0] * 2 * R)
    return len(graphs), same


def test_dynamo_traces_one_graph_for_all_sizes(ranks: RankPool) -> None:
    assert ranks(run_traced) == [(1, True), (1, True)]
