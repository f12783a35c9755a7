"""Packed rows over an all-to-all: nothing is lost unseen, in one process and on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import dbo_fx
from dbo_fx.errors import OptionError, SoundnessError, UnsupportedGraphError
from dbo_fx.guards import overflow_counters, written_inputs
from dbo_fx.integrations.transformers import GROUP
from dbo_fx.layouts import Inside, Split
from dbo_fx.packing import Packing
from dbo_fx.packing_ops import LOST, NOWHERE, SPOILT
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.passes.sharding import finding_of
from dbo_fx.passes.sharding_packing import PACK, UNPACK
from dbo_fx.passes.soundness import Soundness
from dbo_fx.pipeline import State
from graphs import find, op, place, run
from rank_pool import RankPool
from small_moe import one_rank

PASSES = (Normalize(), Regions(), Soundness())
OPS = ("pack", "note_overflow", "unpack")
R, E, H = 4, 8, 6
ROUTINGS = ("random", "one expert", "one rank gets nothing", "outside")
DROPLESS = [Packing(R, E, "rank"), Packing(R, E, "expert"), Packing(R, E, "expert", 100)]
SMALL = [
    Packing(R, E, "rank", 1.0),
    Packing(R, E, "expert", 1.0),
    Packing(R, E, "rank", 3),
    Packing(R, E, "expert", 3),
]


def routing(name: str, tokens: int, top_k: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :top_k]
    if name == "one expert":
        return torch.tensor([5, 1, 0]).expand(tokens, -1).clone()
    if name == "one rank gets nothing":
        return torch.rand(tokens, E - 2, generator=generator).argsort(1)[:, :top_k] + 2
    if name == "outside":
        ids[::2, 1] = -1
        ids[1::3] = E
    return ids


def exchanged(blocks: list[Tensor]) -> list[Tensor]:
    """What an all-to-all makes of every rank's [R, C, ...] blocks."""
    return list(torch.stack(blocks).transpose(0, 1).unbind(0))


def expert(rows: Tensor, number: int) -> Tensor:
    return rows * (number + 2) + number


def on_rank(rank: int, rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """The experts of a rank on opened rows; NaN for rows that chose none."""
    y = torch.full_like(rows, torch.nan)
    for n, j in (ids >= 0).nonzero().tolist():
        out = expert(rows[n], rank * E // R + int(ids[n, j]))
        out = out if weights is None else out * weights[n, j]
        y[n] = out if j == 0 or y[n].isnan().any() else y[n] + out
    return y


def moved(
    packing: Packing, ids: list[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """All ranks' rows, weights, results and packed places, through pack, experts and unpack."""
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(len(i), H, generator=generator).to(dtype) for i in ids]
    weights = [torch.rand(i.shape, generator=generator) for i in ids]
    packed = [packing.pack(*each) for each in zip(x, ids, weights, strict=True)]
    for _, places, lost in packed:
        assert lost == (places == LOST).sum()
        assert packing.may_overflow(ids[0].shape[1]) or lost == 0
    y = []
    for rank, arrived in enumerate(exchanged([p[0] for p in packed])):
        rows, chosen, given = packing.open(arrived, x[0], weights[0])
        y.append(on_rank(rank, rows, chosen, given).unflatten(0, (R, -1)))
    back = exchanged(y)
    places = [p[1] for p in packed]
    results = [packing.unpack(*each) for each in zip(back, places, weights, strict=True)]
    return x, weights, results, places


def whole(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x, dtype=torch.float64)
    for t, k in ((ids >= 0) & (ids < E)).nonzero().tolist():
        y[t] += expert(x[t].double(), int(ids[t, k])) * weights[t, k].double()
    return y


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("packing", [*DROPLESS, *SMALL], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_every_choice_comes_back_or_its_token_is_nan(
    packing: Packing, name: str, tokens: int
) -> None:
    ids = [routing(name, tokens, seed=rank) for rank in range(R)]
    x, weights, results, places = moved(packing, ids, torch.float64)
    for rank in range(R):
        lost = (places[rank] == LOST).any(1)
        assert torch.equal(results[rank].isnan().any(1), lost)
        wanted = whole(x[rank], ids[rank], weights[rank])
        kept = ~lost
        torch.testing.assert_close(results[rank][kept], wanted[kept], rtol=1e-12, atol=1e-12)


def test_every_token_meets_exactly_its_experts() -> None:
    ids = [routing("random", 7, seed=rank) for rank in range(R)]
    for copies in ("rank", "expert"):
        packing = Packing(R, E, copies)
        rows = [torch.full((7, H), 0.0) + 10 * r + torch.arange(7).unsqueeze(1) for r in range(R)]
        weights = torch.ones(7, 3)
        packed = [packing.pack(x, i, weights)[0] for x, i in zip(rows, ids, strict=True)]
        met = []
        for rank, arrived in enumerate(exchanged(packed)):
            opened, chosen, _ = packing.open(arrived, rows[0], weights)
            for n, j in (chosen >= 0).nonzero().tolist():
                met.append((int(opened[n, 0]), rank * E // R + int(chosen[n, j])))
        wanted = {(10 * r + t, int(e)) for r in range(R) for t in range(7) for e in ids[r][t]}
        assert sorted(met) == sorted(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_rows_and_weights_travel_bit_for_bit(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    packing = Packing(2, 4)
    x, weights = torch.randn(5, H).to(dtype), torch.rand(5, 1).to(weight_dtype)
    ids = torch.tensor([[0], [3], [2], [-1], [1]])
    packed, places, lost = packing.pack(x, ids, weights)
    assert packed.shape[2] % 4 == 0
    assert places.flatten().tolist() == [0, 6, 7, NOWHERE, 4]
    assert lost == 0
    rows, chosen, given = packing.open(packed, x, weights)
    assert given is not None
    assert given.dtype == weight_dtype
    kept = ids[:, 0] >= 0
    assert torch.equal(rows[places[kept, 0]], x[kept])
    assert torch.equal(given[places[kept, 0]], weights[kept])
    assert chosen.flatten().tolist() == [0, -1, -1, -1, 1, -1, 1, 0, -1, -1]
    assert rows[chosen[:, 0] < 0].isnan().all()


def test_a_token_that_is_nan_already_takes_no_room() -> None:
    packing = Packing(1, 2, "expert", 2)
    weights = torch.tensor([[torch.nan], [1.0], [1.0], [1.0]])
    x = torch.ones(4, H)
    packed, places, lost = packing.pack(x, torch.zeros(4, 1, dtype=torch.int64), weights)
    assert places.flatten().tolist() == [SPOILT, 0, 1, LOST]
    assert lost == 1
    rows = packing.open(packed, x, weights)[0].unflatten(0, (1, -1))
    assert packing.unpack(rows, places, weights).isnan().all(1).tolist() == [
        True,
        False,
        False,
        True,
    ]


def test_capacities() -> None:
    x, ids, weights = torch.zeros(64, H), torch.zeros(64, 2, dtype=torch.int64), torch.ones(64, 2)
    rows = {
        Packing(4, 8): 64,
        Packing(4, 8, "expert"): 128,
        Packing(4, 8, "expert", 1.0): 32,
        Packing(4, 8, "expert", 1.25): 40,
        Packing(4, 8, "expert", 100.0): 128,
        Packing(4, 8, "rank", 1.0): 30,  # 1 - (6 over 2) / (8 over 2) = 13/28 of 64
        Packing(4, 8, "rank", 7): 7,
    }
    assert {p: p.pack(x, ids, weights)[0].shape[1] for p in rows} == rows
    loose = [Packing(4, 8), Packing(4, 8, "expert"), Packing(4, 8, "expert", 100.0)]
    assert [p for p in rows if not p.may_overflow(2)] == loose


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": "all"}, "copies='all': use one of"),
        ({"capacity": 0.9}, "capacity=0.9; wanted None"),
        ({"capacity": True}, "capacity=True; wanted None"),
        ({"capacity": float("nan")}, "capacity=nan; wanted None"),
        ({"capacity": float("inf")}, "capacity=inf; wanted None"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Packing(4, 8, **options)


@pytest.mark.parametrize("cause", ["capacity", "parts"])
def test_a_refused_model_is_not_half_sharded(cause: str) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    from dbo_fx.integrations.transformers import expert_parallel
    from test_transformers import build

    model = build("Mixtral")
    wanted = {name: weight.shape for name, weight in model.named_parameters()}
    if cause == "parts":
        model.config.sub_configs = {"text_config": None}
    with one_rank(), pytest.raises((OptionError, UnsupportedGraphError)):
        expert_parallel(model, routing="all_to_all", capacity=0.5 if cause == "capacity" else None)
    assert {name: weight.shape for name, weight in model.named_parameters()} == wanted
    assert not any(hasattr(module, GROUP) for module in model.modules())


def test_rows_that_fill_no_words() -> None:
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedGraphError, match="Use an even hidden size"):
        Packing(1, 1).pack(torch.zeros(2, 3, dtype=torch.bfloat16), ids, ids.float())


# Two ranks: Hugging Face models whose experts exchange packed rows.

CHOICES: list[dict[str, Any]] = [
    {},
    {"copies": "expert"},
    {"capacity": 1.3},
    {"copies": "expert", "capacity": 1.9},
]


def sharded(family: str, **options: Any) -> Any:
    from dbo_fx.integrations.transformers import expert_parallel
    from test_transformers import build

    return expert_parallel(build(family).double(), **options)


def tokens(rank: int, batch: int, length: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(100 * batch + rank)
    return torch.randint(0, 128, (batch, length), generator=generator)


def logits(model: Any, x: Tensor) -> Tensor:
    return model(input_ids=x, use_cache=False).logits


def ignore_tokens(model: Any) -> None:
    """Let all tokens of this rank choose the same two experts."""
    for name, weight in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            weight.data.zero_()


@torch.no_grad()
def compare_routings(rank: int, family: str) -> list[str]:
    """Eager models over both routings, with random and with skewed choices."""
    wrong = []
    gathered = sharded(family)
    models = [sharded(family, routing="all_to_all", **options) for options in CHOICES[:2]]
    for skewed in (False, True):
        for model in (gathered, *models) if skewed else ():
            ignore_tokens(model)
        for batch, length in ((1, 1), (1, 3), (3, 7)):
            x = tokens(rank, batch, length)
            wanted = logits(gathered, x)
            for options, model in zip(CHOICES, models, strict=False):
                difference = (logits(model, x) - wanted).abs().max()
                if not difference <= 1e-12 * wanted.abs().max():
                    wrong.append(f"{options}, skewed {skewed}, {batch} x {length}: {difference}")
    return wrong


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("DeepseekV3", marks=pytest.mark.slow),
        pytest.param("Mixtral", marks=pytest.mark.slow),
        "Qwen3Moe",
    ],
)
def test_both_routings_compute_the_same(ranks: RankPool, family: str) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    assert ranks(compare_routings, family) == [[], []]


def halves(model: Any, x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([logits(model, x[:half]), logits(model, x[half:])])


@torch.no_grad()
def compiled(rank: int, family: str, options: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    model = sharded(family, routing="all_to_all", **options)
    x = tokens(rank, 6)
    torch._dynamo.mark_dynamic(x, 0)
    before = len(dbo_fx.compilations())
    settings = {"verify": "numeric"}
    split = torch.compile(model, backend="dbo_fx", fullgraph=True, options=settings)
    batches = [x, *(tokens(rank, batch) for batch in (5, 7, 16))]
    equal = [torch.equal(logits(split, b), halves(model, b)) for b in batches]
    programs = dbo_fx.compilations()[before:]
    return {
        "equal": equal,
        "programs": len(programs),
        "overflow": str(dbo_fx.overflow(model)),
        "checked": str(programs[0].checked).split(":")[0],
        "communication": str(programs[0].summary).split("communication per layer: ")[1],
        "digest": programs[0].program.digest,
    }


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Mixtral", CHOICES[0]),
        pytest.param("Qwen3Moe", CHOICES[3], marks=pytest.mark.slow),
        pytest.param("DeepseekV3", CHOICES[1], marks=pytest.mark.slow),
        pytest.param("DeepseekV3", CHOICES[2], marks=pytest.mark.slow),
    ],
)
def test_split_programs_are_bit_equal_to_both_halves(
    ranks: RankPool, family: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    first, second = ranks(compiled, family, options)
    assert first == second
    assert first.pop("digest")
    assert first == {
        "equal": [True] * 4,
        "programs": 1,
        "overflow": "no overflow",
        "checked": "agrees",
        "communication": "D all_to_all x1 over group 0; C all_to_all x1 over group 0",
    }


@torch.no_grad()
def overflowing(rank: int, padded: bool) -> dict[str, Any]:
    """Rank 0's tokens all choose the same experts, for which a block of few rows has no room."""
    torch._dynamo.reset()
    model = sharded("Mixtral", routing="all_to_all", copies="expert", capacity=40)
    if rank == 0:
        ignore_tokens(model)
    x = tokens(rank, 6)
    torch._dynamo.mark_dynamic(x, 0)
    split = torch.compile(model, backend="dbo_fx", fullgraph=True, options={"verify": "numeric"})
    step = dbo_fx.wrap(lambda x: logits(split, x), unsplit=lambda x: logits(model, x))
    if padded:
        x = x[: 5 + rank]
    result = step(x) if padded else logits(split, x)
    first = dbo_fx.overflow(model, reset=True)
    again = step(x) if padded else logits(split, x)
    second = dbo_fx.overflow(model)
    return {
        "poisoned": bool(result.isnan().any()),
        "same again": torch.equal(result.nan_to_num(7.0), again.nan_to_num(7.0)),
        "counted": first == second and bool(first),
        "as halves": padded or torch.equal(halves(model, x).isnan(), result.isnan()),
        "layers": list(first.lost),
        "text": str(first).splitlines()[0].split(" ", 1)[1][:19],
    }


def test_overflow_is_reported_where_it_happens_and_poisons_its_tokens(ranks: RankPool) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    layers = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    always = {"same again": True, "as halves": True, "layers": layers}
    lost, kept = ranks(overflowing, False)
    assert lost == always | {"poisoned": True, "counted": True, "text": "rows found no room "}
    assert kept == always | {"poisoned": False, "counted": False, "text": "overflow"}


@pytest.mark.slow
def test_a_counter_does_not_keep_wrap_from_padding(ranks: RankPool) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    lost, kept = ranks(overflowing, True)
    assert (lost["poisoned"], kept["poisoned"]) == (True, False)


@torch.no_grad()
def cached(rank: int) -> dict[str, Any]:
    """One sequence split along its tokens, for which the row-dependence test runs noise."""
    from transformers import StaticCache

    torch._dynamo.reset()
    model = sharded("Mixtral", routing="all_to_all", copies="expert", capacity=1.9)
    cache = StaticCache(config=model.config, max_cache_len=64)
    x = tokens(rank, 1, 32)

    def once(function: Any, parts: list[Tensor]) -> Tensor:
        cache.reset()
        calls = [function(input_ids=p, past_key_values=cache, use_cache=True) for p in parts]
        return torch.cat([c.logits for c in calls], 1)

    once(model, [x[:, :2]])  # A first run makes the cache outside the graph.
    wanted = once(model, [x[:, :16], x[:, 16:]])
    torch._dynamo.mark_dynamic(x, 1)
    result = once(torch.compile(model, backend="dbo_fx", fullgraph=True), [x])
    tested = dbo_fx.compilations()[-1].tested
    return {
        "equal": torch.equal(result, wanted),
        "tested": tested,
        "lost": bool(wanted.isnan().any()),
    }


@pytest.mark.slow
def test_noise_of_the_row_test_finds_the_room_that_the_tokens_found(ranks: RankPool) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    for found in ranks(cached):
        print(found)
        assert found["equal"]


# What the passes make of it: pretended ranks, no values.


def packed_experts(x: Tensor, counter: Tensor | None = None, **damage: Any) -> Tensor:
    """[T, H] -> [T, H] through gate, pack, one expert a rank, and unpack."""
    packing = Packing(2, H, "expert", None if counter is None else 1.5)
    weights, ids = x.sigmoid().topk(2)
    packed, places, lost = packing.pack(x, damage.get("ids", lambda i: i)(ids), weights)
    if counter is not None:
        torch.ops.dbo_fx.note_overflow(counter, lost)
    rows, chosen, _ = packing.open(funcol.all_to_all_single(packed, None, None, "0"), x, weights)
    y = torch.where(chosen >= 0, rows.exp(), 0).unflatten(0, (2, -1))
    back = funcol.all_to_all_single(y, None, None, "0")
    return packing.unpack(damage.get("back", lambda b: b)(back), places, weights)


def attended(x: Tensor) -> Tensor:
    return x + F.scaled_dot_product_attention(x.sin(), x.cos(), x.tan(), is_causal=True)


def model(x: Tensor, counter: Tensor | None = None, **damage: Any) -> Tensor:
    h = attended(x)
    y = packed_experts(h.flatten(0, 1), counter, **damage)
    return (h + y.view_as(h)).neg()


def sound(*args: Tensor, **damage: Any) -> State:
    return run(lambda *a: model(*a, **damage), *args, passes=PASSES, mark=None)


def inputs(counter: bool = False) -> list[Tensor]:
    x = torch.zeros(4, 3, H)
    torch._dynamo.mark_dynamic(x, 0)
    return [x, torch.zeros(1, dtype=torch.int64)] if counter else [x]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("counter", [False, True])
def test_packing_leaves_the_rest_split_and_asks_for_a_test(counter: bool) -> None:
    state = sound(*inputs(counter))
    assert [(o.node.target, o.kind) for o in state.obligations] == [(PACK, "region")]
    found = {n.target: finding_of(n) for n in state.graph.nodes if n.target in (PACK, UNPACK)}
    rows = Split(0, 1, 3)
    assert found[PACK].layout == (Inside(), rows, Inside(place=True))
    assert found[UNPACK].layout == rows
    assert written_inputs(state) == []
    assert len(overflow_counters(state)) == counter


@pytest.mark.usefixtures("fake_group")
def test_packing_ends_the_attention_and_unpacking_opens_the_next_phase() -> None:
    state = sound(*inputs(counter=True))
    where = {name: {place(n) for n in state.graph.nodes if op(n) == name} for name in OPS}
    assert where == {"pack": {"A1@0"}, "note_overflow": {"A1@0"}, "unpack": {"TAIL"}}
    items = [n for n in state.graph.nodes if n.args and n.args[0] is find(state, "pack")]
    assert {place(n) for n in items} == {"A1@0"}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"ids": lambda i: i[:1].expand_as(i)}, "takes some rows"),
        ({"back": lambda b: torch.zeros_like(b)}, "unpacks rows that were not packed"),
    ],
)
def test_what_is_packed_or_unpacked_must_be_rows_of_the_batch(
    damage: dict[str, Any], message: str
) -> None:
    with pytest.raises(SoundnessError, match=message):
        sound(*inputs(), **damage)


@torch.no_grad()
@pytest.mark.parametrize("grouped", [False, True])
def test_experts_never_use_rows_that_chose_none_of_them(grouped: bool) -> None:
    integration = pytest.importorskip("dbo_fx.integrations.transformers")
    from test_transformers import routed

    module, rows, ids, weights = routed(torch.bfloat16, "cpu")
    run_experts = integration._grouped_experts if grouped else integration._dense_experts
    nobody = torch.arange(len(rows)) % 3 == 0
    ids = torch.where(nobody.unsqueeze(1), 8, ids)
    clean = run_experts(module, rows, ids, weights)
    assert not clean.isnan().any()
    rows = torch.where(nobody.unsqueeze(1), torch.nan, rows)
    weights = torch.where(nobody.unsqueeze(1), torch.nan, weights)
    assert torch.equal(run_experts(module, rows, ids, weights), clean)
    unweighted = run_experts(module, rows, ids[:, :1], None)
    assert not unweighted.isnan().any()


@torch.no_grad()
def blocks_of_any_size(rank: int) -> list[bool]:
    torch._dynamo.reset()
    settings = {"segment_backend": "aot_eager", "verify": "static"}
    split = torch.compile(model, backend="dbo_fx", fullgraph=True, options=settings)
    counter = torch.zeros(1, dtype=torch.int64)
    good = []
    for batch in (16, 9, 5):
        x = torch.randn(batch, 3, H, generator=torch.Generator().manual_seed(rank))
        torch._dynamo.mark_dynamic(x, 0)
        good.append(split(x, counter).shape == x.shape)
    return good


@pytest.mark.slow
def test_compiled_segments_learn_the_size_of_a_block(ranks: RankPool) -> None:
    """A block's rows are no multiple of the batch's, and the experts' segment sees nothing else."""
    assert ranks(blocks_of_any_size) == [[True] * 3] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
@pytest.mark.parametrize("packing", [Packing(8, 64, "expert", 1.25), Packing(8, 64)], ids=str)
def test_packing_on_the_gpu_gives_the_same_bits_eager_compiled_and_captured(
    packing: Packing,
) -> None:
    torch._dynamo.reset()
    x, (weights, ids) = torch.randn(777, 256).bfloat16(), torch.rand(777, 64).topk(6)
    wanted = packing.pack(x, ids, weights)
    y = torch.randn(8, wanted[0].shape[1], 256).bfloat16()
    total = packing.unpack(y, wanted[1], weights)
    given = [t.cuda() for t in (x, ids, weights, y)]
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step(x: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        packed, places, lost = packing.pack(x, ids, weights)
        torch.ops.dbo_fx.note_overflow(counter, lost)
        return packed, places, lost, packing.unpack(y, places, weights)

    compiled = torch.compile(step, fullgraph=True)
    runs = [step(*given), compiled(*given)]
    for function in (step, compiled):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runs.append(function(*given))
        for _ in range(2):
            graph.replay()
    torch.cuda.synchronize()
    for run_ in runs:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(run_[:3], wanted, strict=True))
        torch.testing.assert_close(run_[3].cpu(), total, equal_nan=True)
    assert counter.item() == 6 * wanted[2].item()
