"""DeepEP's layouts on CPU: batched rows, rows in any order, and programs on the twins."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import dbo_fx
from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.pairs import broken_pairs
from dbo_fx.comm import abandon_in_flight, groups, in_flight
from dbo_fx.comm.expert_layouts import dequantised, quantised
from dbo_fx.comm.protocol import begin_region
from dbo_fx.errors import AgreementError, CommunicationError, UnsupportedGraphError
from dbo_fx.experts import Gated, dense, packed
from dbo_fx.ir import Half, Program, Run
from dbo_fx.witness import GraphWitness, Verdict
from deepep_models import BatchedMoe, RowsFp8Moe, RowsMoe, reference
from deepep_steps import LAYERS, Subject, run_padded, run_steps
from deepep_steps import expected as wanted
from program_edits import bound, moved, refusal, without
from rank_pool import RankPool
from small_moe import EXPERTS, PlainMoe, one_rank, rows, run_passes, traced_model

OPS = torch.ops.dbo_fx
H, MOST, E = 4, 6, 4
ROUTINGS = ("random", "one expert", "one rank", "nowhere")


def world() -> str:
    """Name of the default group."""
    name = groups.name_of(None)
    assert name is not None
    return name


def tokens(rank: int, count: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], ids [T, 2], weights [T, 2] of a rank."""
    generator = torch.Generator().manual_seed(10 * count + rank)
    x = torch.randn(count, H, generator=generator)
    scores = torch.rand(count, E, generator=generator)
    if routing == "one rank":
        scores[:, E // 2 :] -= 2
    weights, ids = scores.topk(2)
    if routing == "one expert":
        ids = torch.stack((torch.full((count,), 3), torch.full((count,), -1)), 1)
    if routing == "nowhere":
        ids = torch.full_like(ids, -1)
    return x, ids, weights


def expected(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Expert e multiplies by e + 1."""
    factor = torch.where(ids >= 0, weights * (ids + 1), 0).sum(-1, keepdim=True)
    return x * factor


@torch.no_grad()
def run_batched(rank: int, count: int, routing: str) -> dict[str, Any]:
    """Dispatch, scale, combine in the batched layout, over plain gloo and over the twin."""
    group, seen = world(), {}
    x, ids, weights = tokens(rank, count, routing)
    got = OPS.dispatch_batched(x, ids, group, MOST, E)
    found, scales, counts, src, ranges = got
    local = E // groups.world_size(group)
    seen["scales"] = list(scales.shape)
    seen["tails"] = all(found[e, int(counts[e]) :].isnan().all() for e in range(local))
    everyone = [tokens(r, count, routing) for r in range(2)]
    right = True
    for e, s in itertools.product(range(local), range(2)):
        begin, number = int(ranges[e, s]) >> 32, int(ranges[e, s]) & 0xFFFFFFFF
        part = src[e, begin : begin + number].long()
        chose = (everyone[s][1] == rank * local + e).any(1).nonzero()[:, 0]
        right &= torch.equal(part.sort().values, chose)
        right &= torch.equal(found[e, begin : begin + number], everyone[s][0][part])
    seen["rows"] = right
    number = (torch.arange(local) + rank * local + 1).view(-1, 1, 1)
    y = found * number
    out = OPS.combine_batched(y, ids, weights, src, ranges, group, MOST, E)
    torch.testing.assert_close(out, expected(x, ids, weights))
    for transport, slots in (("gloo", (None, None)), ("deepep_ll", (0, 1))):
        name = f"batched_dispatch {MOST} {E}"
        buffers = OPS.comm_buffers([x, ids], name, group)
        OPS.dispatch_send([x, ids], buffers, name, group, transport, 0, slots[0])
        seen[f"{transport} hidden"] = bool(buffers[0].isnan().all() and (buffers[2] == -7).all())
        OPS.dispatch_recv(buffers, group, transport, 0, slots[0])
        seen[f"{transport} rows"] = all(
            map(torch.equal, map(torch.nan_to_num, buffers), map(torch.nan_to_num, got))
        )
        sent, name = [y, ids, weights, src, ranges], f"batched_combine {MOST} {E}"
        back = OPS.comm_buffers(sent, name, group)
        OPS.combine_send(sent, back, name, group, transport, 0, slots[1])
        seen[f"{transport} sums hidden"] = bool(back[0].isnan().all())
        OPS.combine_recv(back, group, transport, 0, slots[1])
        seen[f"{transport} sums"] = torch.equal(back[0], out)
    return seen


@pytest.mark.parametrize(
    ("count", "routing"), [(6, "random"), (1, "one expert"), (5, "one rank"), (2, "nowhere")]
)
def test_batched_rows(ranks: RankPool, count: int, routing: str) -> None:
    for seen in ranks(run_batched, count, routing):
        assert seen.pop("scales") == [E // 2, 2 * MOST, 0]
        assert all(seen.values()), seen


@torch.no_grad()
def run_fp8(rank: int) -> float:
    """Float8 rows of the batched layout are the quantised ones, bit for bit."""
    group = world()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 256, generator=generator)
    ids = torch.tensor([[0, 2], [1, 3], [0, 3], [1, 2]])
    weights = torch.ones(4, 2)
    found, scales, _, src, ranges = OPS.dispatch_batched(x, ids, group, MOST, E, True)
    assert found.dtype == torch.float8_e4m3fn
    y = dequantised(found, scales, x.dtype)
    out = OPS.combine_batched(y, ids, weights, src, ranges, group, MOST, E)
    return float((out - 2 * dequantised(*quantised(x), x.dtype)).abs().max())


def test_float8_rows_are_those_that_were_sent(ranks: RankPool) -> None:
    assert ranks(run_fp8) == [0.0, 0.0]


def test_quantised_rows_come_back() -> None:
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(0)) * 100
    small, scales = quantised(x)
    assert (small.shape, scales.shape) == (x.shape, (5, 3))
    assert float((dequantised(small, scales, x.dtype) - x).abs().max() / x.abs().max()) < 0.04
    assert dequantised(*quantised(torch.zeros(2, 128)), x.dtype).eq(0).all()


@torch.no_grad()
def run_rows(rank: int, transport: str, routing: str) -> dict[str, Any]:
    """The row twins: compact rows, garbage behind, choices of experts elsewhere left out."""
    group, local = world(), E // 2
    sent = tokens(rank, 5, routing)
    name = f"rows_dispatch {E}"
    got = OPS.comm_buffers(list(sent), name, group)
    OPS.dispatch_send(list(sent), got, name, group, transport, 0)
    seen: dict[str, Any] = {"hidden": bool(got[0].isnan().all() and (got[1] == -7).all())}
    OPS.dispatch_recv(got, group, transport, 0)
    x, ids, weights = got
    everyone = [tokens(r, 5, routing) for r in range(2)]
    all_x, all_ids = (torch.cat([e[i] for e in everyone]) for i in (0, 1))
    here = (all_ids >= rank * local) & (all_ids < (rank + 1) * local)
    mine = here.any(1)
    number = int(mine.sum())
    seen["rows"] = torch.equal(x[:number], all_x[mine])
    none = rank * local - 1  # Of the rank before, or of no rank.
    seen["tail"] = bool(x[number:].isnan().all() and (ids[number:] == none).all())
    seen["ids"] = torch.equal(ids[:number], torch.where(here, all_ids, none)[mine])
    seen["shapes"] = x.shape == (10, H)
    chosen = (ids >= rank * local) & (ids < rank * local + local)
    factor = torch.where(chosen, weights * (ids + 1), 0).sum(-1, keepdim=True)
    y = x * factor  # Garbage stays garbage: a combine must not read it.
    back = OPS.comm_buffers([y], "rows_combine", group)
    OPS.combine_send([y], back, "rows_combine", group, transport, 0)
    seen["sums hidden"] = bool(back[0].isnan().all())
    OPS.combine_recv(back, group, transport, 0)
    torch.testing.assert_close(back[0], expected(*sent))
    return seen


@pytest.mark.parametrize(
    ("transport", "routing"),
    [("deepep_ht", "random"), ("deepep_ht", "one rank"), ("deepep_v2", "one expert")],
)
def test_rows_are_compact_with_garbage_behind(
    ranks: RankPool, transport: str, routing: str
) -> None:
    for seen in ranks(run_rows, transport, routing):
        assert all(seen.values()), seen


@pytest.fixture
def group() -> Any:
    """A gloo group of this process alone."""
    with one_rank() as name:
        yield name
        abandon_in_flight()


def send_rows(group: str, flight: int = 0) -> Any:
    """Dispatch two rows over the high-throughput twin."""
    sent = [torch.ones(2, H), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)]
    got = OPS.comm_buffers(sent, "rows_dispatch 1", group)
    OPS.dispatch_send(sent, got, "rows_dispatch 1", group, "deepep_ht", flight)
    return got


def combine_rows(group: str, flight: int = 0) -> Any:
    """Combine two rows."""
    back = OPS.comm_buffers([torch.ones(2, H)], "rows_combine", group)
    OPS.combine_send([torch.ones(2, H)], back, "rows_combine", group, "deepep_ht", flight)
    return back


def test_a_combine_needs_its_dispatch(group: str) -> None:
    with pytest.raises(CommunicationError, match="found no dispatch of this flight"):
        combine_rows(group)
    got = send_rows(group)
    with pytest.raises(CommunicationError, match="found a dispatch that is not received"):
        combine_rows(group)
    OPS.dispatch_recv(got, group, "deepep_ht", 0)
    with pytest.raises(CommunicationError, match="no dispatch of this flight"):
        combine_rows(group, flight=1)
    with pytest.raises(CommunicationError, match="last dispatch has had no combine"):
        send_rows(group)
    with pytest.raises(CommunicationError, match="dispatch of flight 0 has had no combine"):
        begin_region("deepep_ht", [group])
    OPS.combine_recv(combine_rows(group), group, "deepep_ht", 0)
    begin_region("deepep_ht", [group])


def test_what_a_failed_step_left_is_forgotten(group: str) -> None:
    OPS.dispatch_recv(send_rows(group), group, "deepep_ht", 0)
    abandon_in_flight("another group")
    with pytest.raises(CommunicationError, match="has had no combine"):
        begin_region("deepep_ht", [group])
    abandon_in_flight(group)
    begin_region("deepep_ht", [group])


def test_another_layout_is_refused(group: str) -> None:
    x = torch.ones(2, H)
    out = OPS.comm_buffers([x], "all_gather", group)
    with pytest.raises(CommunicationError, match="carries the dispatch and combine ops of rows"):
        OPS.dispatch_send([x], out, "all_gather", group, "deepep_ht", 0)
    with pytest.raises(CommunicationError, match="deepep_ll carries no rows_combine"):
        OPS.combine_send([x], out, "rows_combine", group, "deepep_ll", 0, 0)
    assert in_flight() == ()


def test_sizes_are_refused_before_anything_is_sent(group: str) -> None:
    x, ids = torch.ones(9, H), torch.zeros(9, 1, dtype=torch.int64)
    with pytest.raises(CommunicationError, match="found 9 tokens, wanted at most max_tokens=6"):
        OPS.dispatch_batched(x, ids, group, MOST, E)
    with pytest.raises(CommunicationError, match=r"multiple of 128, found 4"):
        OPS.dispatch_batched(x[:2], ids[:2], group, MOST, E, True)
    y = torch.ones(E, 3, H)
    rest = ids[:2], torch.ones(2, 1), torch.zeros(E, 6), torch.zeros(E, 1)
    with pytest.raises(CommunicationError, match=r"y is \[4, 3, 4\], wanted \[4, 6, H\]"):
        OPS.combine_batched(y, *rest, group, MOST, E)


def test_fakes_have_the_shapes_and_strides(group: str) -> None:
    x, ids = torch.ones(3, 128), torch.zeros(3, 2, dtype=torch.int64)
    for fp8 in (False, True):
        args = (x, ids, group, MOST, E, fp8)
        torch.library.opcheck(
            OPS.dispatch_batched.default, args, test_utils=("test_schema", "test_faketensor")
        )
    found = OPS.dispatch_batched(x, ids, group, MOST, E)
    rest = (found[0], ids, torch.ones(3, 2), found[3], found[4], group, MOST, E)
    torch.library.opcheck(OPS.combine_batched.default, rest, test_utils=("test_faketensor",))


# Experts.


def gate(x: Tensor) -> Tensor:
    """[N, 2I] -> [N, I]."""
    one, two = x.chunk(2, -1)
    return F.silu(one) * two


@pytest.mark.parametrize("run", [dense, packed])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (8, 8, 0)])
def test_experts_on_batched_rows_never_use_garbage(
    run: Callable[..., Tensor], counts: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    number, room, hidden, inner = 3, 8, 16, 16

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 4).bfloat16()

    experts = Gated(weight(number, 2 * inner, hidden), weight(number, hidden, inner), gate)
    x = weight(number, room, hidden)
    want = torch.zeros_like(x)
    for e, count in enumerate(counts):
        want[e, :count] = gate(x[e, :count] @ experts.gate_up[e].T) @ experts.down[e].T
        x[e, count:] = float("nan")
    scales = torch.empty(number, room, 0)
    found = run(experts, x, scales, torch.tensor(counts, dtype=torch.int32), 2)
    torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
    for e, count in enumerate(counts):
        assert found[e, count:].eq(0).all()


# Programs.


def program_of(model: type[PlainMoe], transport: str) -> Program:
    """The program of two layers, verified."""
    program = run_passes(traced_model(model, 2).fresh(), "verify", transport=transport).program
    assert program is not None
    return program


def test_a_batched_program_has_the_slots_of_its_rules() -> None:
    program = program_of(BatchedMoe, "deepep_ll")
    assert {step.stream for step in program.steps} == {"comp"}
    runs = [s for s in program.steps if isinstance(s, Run) and s.action.half is Half.SEND]
    assert [s.slot for s in runs] == [0, 1] * 4
    apart = program_of(BatchedMoe, "deepep_ll_async")
    assert {s.stream for s in apart.steps if isinstance(s, Run) and s.action.half} == {
        "comm",
        "comp",
    }


def test_slots_that_are_all_the_other_one_are_refused() -> None:
    """Taking turns is not enough: every region starts at slot 0."""
    program = program_of(BatchedMoe, "deepep_ll")
    flipped = [
        replace(s, slot=s.slot ^ 1) if isinstance(s, Run) and s.slot is not None else s
        for s in program.steps
    ]
    found = refusal(replace(program, steps=tuple(flipped)))
    assert found.rule == "slot"
    assert "slot 0" in found.missing


def pairing(program: Program) -> list[str]:
    """What the rule about pairs says of a program."""
    found = broken_pairs(execution_of_program(program))
    return [v.missing for v in found]


def test_dispatch_and_combine_of_a_microbatch_take_turns() -> None:
    program = bound("deepep_ht", 2)
    assert pairing(program) == []
    assert prove(execution_of_program(program))
    (early,) = pairing(without(program, "comm C_m0.send@0"))
    assert "D_m0.send@1" in early
    assert "D_m0.send@0 has had no combine; deepep_ht keeps what a combine needs" in early
    (late,) = pairing(without(program, "comm C_m1.send@1"))
    assert "D_m1.send@1" in late
    assert "never combined; deepep_ht waits for it" in late
    alone = pairing(moved(program, "comm C_m0.send@0", "comm D_m0.send@0"))
    assert "C_m0.send@0 on comm follows no dispatch of its layer and microbatch" in alone
    assert pairing(without(bound("nccl", 2), "comm C_m0.send@0")) == []


@pytest.mark.parametrize(
    ("model", "transport", "said"),
    [
        (BatchedMoe, "deepep_ht", "'deepep_ht' does not carry batched_dispatch 16 4"),
        (BatchedMoe, "copy_engine", "'copy_engine' does not carry batched_dispatch"),
        (PlainMoe, "deepep_ht", "Pass num_experts=E to torch.ops.dbo_fx.dispatch"),
    ],
)
def test_a_model_of_another_layout_is_refused(
    model: type[PlainMoe], transport: str, said: str
) -> None:
    with pytest.raises(UnsupportedGraphError) as refused:
        program_of(model, transport)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("model", "transport"),
    [(RowsMoe, "deepep_ht"), (BatchedMoe, "deepep_ll"), (BatchedMoe, "deepep_ll_async")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_interleaving_is_safe(model: type[PlainMoe], transport: str) -> None:
    with one_rank():
        trace = traced_model(model, 2, 1)
        witness = GraphWitness(run_passes(trace.fresh(), transport=transport), trace.args(7))
        assert witness.confirm(6) == Verdict(True, 6)
        assert witness.exhaustive() == Verdict(True, 1)


def test_a_batched_graph_comes_back_from_a_file(tmp_path: Path) -> None:
    with one_rank():
        captured = traced_model(BatchedMoe, 2, 1).fresh()
        dbo_fx.save_graph(captured, tmp_path / "moe.dbograph.json")
        loaded = dbo_fx.load_graph(tmp_path / "moe.dbograph.json")
        program = run_passes(loaded, "verify", transport="deepep_ll").program
        again = run_passes(captured, "verify", transport="deepep_ll").program
        assert str(program) == str(again)


def compiled_for(net: Any, transport: str, **options: Any) -> Any:
    """The model, compiled."""
    torch._dynamo.reset()
    chosen = {"transport": transport} | options
    return torch.compile(net, backend="dbo_fx", fullgraph=True, options=chosen)


@torch.no_grad()
def run_program(rank: int, model: type[RowsMoe], transport: str) -> dict[str, Any]:
    """Overlapped is serial bit for bit, and both are what the experts compute."""
    net = model(2)
    serial = compiled_for(net, transport, schedule="sequential", verify="static")
    given = []
    for count in (6, 13, 4):
        x = rows(count, seed=rank)
        torch._dynamo.mark_dynamic(x, 0)
        given.append(x)
    want = [serial(x).clone() for x in given]
    overlapped = compiled_for(net, transport)
    same = [torch.equal(overlapped(x), w) for x, w in zip(given, want, strict=True)]
    plain = net.body
    net.experts = lambda layer, h: reference(net, layer, h)  # type: ignore[method-assign]
    for x, w in zip(given, want, strict=True):
        torch.testing.assert_close(F.linear(plain(x), net.head), w, atol=1e-4, rtol=1e-4)
    return {"same": same, "transport": dbo_fx.compilations()[-1].program.transport}


@pytest.mark.parametrize(
    ("model", "transport"),
    [
        (RowsMoe, "deepep_ht"),
        (BatchedMoe, "deepep_ll"),
        pytest.param(RowsMoe, "deepep_v2", marks=pytest.mark.slow),
        pytest.param(RowsFp8Moe, "deepep_ht", marks=pytest.mark.slow),
        pytest.param(BatchedMoe, "deepep_ll_async", marks=pytest.mark.slow),
        pytest.param(BatchedMoe, "gloo", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_overlapped_is_serial_bit_for_bit(
    ranks: RankPool, model: type[RowsMoe], transport: str
) -> None:
    for seen in ranks(run_program, model, transport, timeout_s=300):
        assert seen == {"same": [True] * 3, "transport": transport}


def subject_of(rank: int, model: type[RowsMoe], transport: str) -> Subject:
    """A model's programs on the twin."""
    net, plain = model(LAYERS), model(LAYERS)
    plain.experts = lambda layer, h: reference(plain, layer, h)  # type: ignore[method-assign]

    def given(count: int, seed: int) -> tuple[Tensor]:
        x = rows(count, seed=10 * seed + rank)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    split = compiled_for(net, transport, verify="static")
    whole = torch.compile(
        net,
        backend="dbo_fx",
        fullgraph=True,
        options={
            "transport": transport,
            "schedule": "sequential",
            "num_microbatches": 1,
            "verify": "static",
        },
    )
    return Subject(split, whole, given, plain)


@torch.no_grad()
def run_turns(rank: int, model: type[RowsMoe], transport: str, steps: int) -> dict[str, Any]:
    """Steps of three sizes."""
    return run_steps(subject_of(rank, model, transport), (4, 8, 13), steps)


TWINS = [
    (BatchedMoe, "deepep_ll"),
    (BatchedMoe, "deepep_ll_async"),
    (RowsMoe, "deepep_ht"),
    (RowsMoe, "deepep_v2"),
]


@pytest.mark.parametrize(("model", "transport"), TWINS, ids=[name for _, name in TWINS])
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_steps_after_failed_ones_are_right(
    ranks: RankPool, model: type[RowsMoe], transport: str, steps: int
) -> None:
    for seen in ranks(run_turns, model, transport, steps, timeout_s=500):
        assert seen == wanted(steps)


@torch.no_grad()
def run_few(rank: int, model: type[RowsMoe], transport: str) -> list[float]:
    """Ranks of 0 and 7, then of 1 and 7 rows."""
    subject = subject_of(rank, model, transport)
    subject.split(*subject.given(6, 0)), subject.whole(*subject.given(6, 0))
    return [e for few in (0, 1) for e in run_padded(rank, subject, few, 7)]


@pytest.mark.parametrize(("model", "transport"), TWINS[::2], ids=[name for _, name in TWINS[::2]])
def test_ranks_with_few_rows_are_padded(
    ranks: RankPool, model: type[RowsMoe], transport: str
) -> None:
    for worst in ranks(run_few, model, transport, timeout_s=300):
        assert all(error < 1e-4 for error in worst), worst


@torch.no_grad()
def run_two_orders(rank: int) -> str:
    """One rank has another order: no rank runs anything."""
    schedule = ("mlp_shared_overlap", "sequential")[rank]
    net = BatchedMoe(1)
    x = rows(6, seed=rank)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(BackendCompilerFailed) as refused:
        compiled_for(net, "deepep_ll", schedule=schedule)(x)
    assert in_flight() == ()
    assert isinstance(refused.value.inner_exception, AgreementError)
    return str(refused.value)


def test_another_order_on_one_rank_is_refused_before_it_runs(ranks: RankPool) -> None:
    for said in ranks(run_two_orders):
        assert "program digest" in said


def test_one_rank_is_enough_for_the_layouts() -> None:
    with one_rank() as group, torch.no_grad():
        net = BatchedMoe(1)
        h = rows(5)
        torch.testing.assert_close(net.experts(0, h), reference(net, 0, h))
        torch.testing.assert_close(RowsMoe(1).experts(0, h), reference(net, 0, h))
        assert groups.world_size(group) == 1
        assert net.local == EXPERTS
