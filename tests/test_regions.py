"""Phases come out exactly as the terms of `docs/how_it_works.md` say, whatever the model is called.

In these models sin, cos, tan project queries, keys, values; sigmoid is the gate, exp the routed
expert, silu the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.communication import communicating_groups
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.ir import Phase
from dbo_fx.models import MoeConfig, MoeDecoder
from dbo_fx.passes.regions import Regions
from dbo_fx.tag import tag_of
from graphs import (
    GROUP,
    OPS,
    B,
    H,
    Model,
    S,
    attention,
    captured,
    experts,
    find,
    hidden,
    hugging_face,
    layer,
    phases,
    place,
    plain_attention,
    run,
    table,
)

pytestmark = pytest.mark.usefixtures("fake_group")
Golden = Callable[[str, str], None]


def marked(*shape: int) -> Tensor:
    x = hidden(*shape)
    torch._dynamo.mark_dynamic(x, 0)
    return x


# One layer, phase by phase.

LAYER = {
    "A0@0": ["sin", "cos", "tan"],
    "A1@0": ["scaled_dot_product_attention", "add", "sigmoid", "topk"],
    "D@0": ["dispatch"],
    "MLP@0": ["exp", "mul", "sum", "mul"],
    "C@0": ["combine"],
    "S@0": ["silu"],
    "TAIL": ["add", "add"],
}


def test_one_layer() -> None:
    assert phases(run(layer, hidden())) == LAYER


def test_without_a_shared_expert_there_is_no_s() -> None:
    expected = LAYER | {"TAIL": ["add"]}
    del expected["S@0"]
    assert phases(run(lambda x: layer(x, shared=False), hidden())) == expected


def test_the_join_opens_the_next_layer_and_after_the_last_one_the_tail() -> None:
    found = phases(run(lambda x: layer(layer(x)).neg(), hidden()))
    assert found["A0@1"] == ["add", "add", "sin", "cos", "tan"]
    assert found["A1@1"] == LAYER["A1@0"]
    assert found["S@1"] == ["silu"]
    assert found["TAIL"] == ["add", "add", "neg"]


def test_dense_layers_and_what_stands_in_front_belong_to_the_a0_that_follows() -> None:
    def dense(x: Tensor) -> Tensor:
        h = x + attention(x)
        return h + h.tanh()

    found = phases(run(lambda x: layer(dense(layer(dense(x.neg())))), hidden()))
    one = ["sin", "cos", "tan", "scaled_dot_product_attention", "add", "tanh", "add"]
    assert found["A0@0"] == ["neg", *one, "sin", "cos", "tan"]
    assert found["A0@1"] == ["add", "add", *one, "sin", "cos", "tan"]
    assert found["A1@0"] == found["A1@1"] == LAYER["A1@0"]


def test_dense_layers_at_the_end_belong_to_the_tail() -> None:
    found = phases(run(lambda x: attention(layer(x)).tanh(), hidden()))
    attended = ["sin", "cos", "tan", "scaled_dot_product_attention", "tanh"]
    assert found["TAIL"] == ["add", "add", *attended]


def test_attention_in_plain_ops_is_wholly_in_a1_and_its_projections_and_mask_in_a0() -> None:
    found = phases(run(lambda x: layer(x, plain_attention), hidden()))
    assert sorted(found["A0@0"]) == ["cos", "gt", "sin", "sum", "tan"]
    core = ["matmul", "mul", "masked_fill", "softmax", "matmul"]
    assert found["A1@0"] == [*core, "add", "sigmoid", "topk"]
    assert {key: found[key] for key in ("MLP@0", "S@0", "TAIL")} == {
        key: LAYER[key] for key in ("MLP@0", "S@0", "TAIL")
    }


def test_attention_with_scores_in_two_parts_is_wholly_in_a1() -> None:
    def attend(x: Tensor) -> Tensor:
        scores = x.sin() @ x.cos().transpose(1, 2) + x.erf() @ x.erfc().transpose(1, 2)
        return torch.einsum("bij,bjh->bih", scores.softmax(-1), x.tan())

    found = phases(run(lambda x: layer(x, attend), hidden()))
    assert sorted(found["A0@0"]) == ["cos", "erf", "erfc", "sin", "tan"]
    assert found["A1@0"][:5] == ["matmul", "matmul", "add", "softmax", "einsum"]


def test_of_two_attentions_in_a_layer_the_last_one_starts_a1() -> None:
    found = phases(run(lambda x: layer(attention(x)), hidden()))
    assert found["A0@0"] == ["sin", "cos", "tan", "scaled_dot_product_attention"] + LAYER["A0@0"]
    assert found["A1@0"] == LAYER["A1@0"]


def test_without_attention_all_of_it_is_a0() -> None:
    found = phases(run(lambda x: layer(layer(x, torch.cos), torch.cos), hidden()))
    assert found["A0@0"] == ["cos", "add", "sigmoid", "topk"]
    assert found["A0@1"] == ["add", "add", "cos", "add", "sigmoid", "topk"]
    assert found["S@0"] == found["S@1"] == ["silu"]
    assert not {"A1@0", "A1@1"} & set(found)


def test_a_router_softmax_before_a_matmul_is_no_attention() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        h = x + attention(x)
        mixed = F.linear(h, w).softmax(-1) @ w
        return h + experts(h + mixed)

    x = marked(B, S, H)
    found = phases(run(model, x, hidden(H, H), mark=None))
    assert found["A0@0"] == LAYER["A0@0"]
    assert found["A1@0"][:5] == [
        "scaled_dot_product_attention",
        "add",
        "linear",
        "softmax",
        "matmul",
    ]


def test_a_shared_expert_that_joins_the_routed_output_first() -> None:
    def model(x: Tensor) -> Tensor:
        h = x + attention(x)
        routed = experts(h)
        return h + (routed + F.silu(h).exp2() * h.sinh())

    found = phases(run(model, hidden()))
    assert found["S@0"] == ["silu", "exp2", "sinh", "mul"]
    assert found["TAIL"] == ["add", "add"]


def test_what_does_not_follow_the_attention_core_goes_as_late_as_possible() -> None:
    def model(x: Tensor) -> Tensor:
        return layer(layer(x), lambda y: attention(y) + x.tanh()) + x.erf()

    found = phases(run(model, hidden()))
    assert "tanh" in found["A1@1"]
    assert found["TAIL"] == ["add", "add", "erf", "add"]
    assert found["S@0"] == found["S@1"] == ["silu"]


def test_what_two_layers_later_needs_of_a_layer_is_no_part_of_its_mlp() -> None:
    def model(x: Tensor) -> Tensor:
        h = layer(x)
        return layer(layer(h)) + h.erf()

    assert phases(run(model, hidden()))["TAIL"] == ["add", "add", "erf", "add"]


# Shared nodes, sizes.


def test_what_no_token_reaches_is_shared() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        rope = table.cos().exp()
        return layer(layer(x * rope[0]) * rope[0], torch.sin)

    state = run(model, marked(B, S, H), hidden(S, H), mark=None)
    assert phases(state)["shared"] == ["cos", "exp"]


def test_a_token_free_buffer_that_tokens_are_written_into_is_not_shared() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        buffer = table.tanh()
        buffer.add_(x[0])
        return layer(x + buffer)

    found = phases(run(model, marked(B, S, H), hidden(S, H), mark=None))
    assert "shared" not in found
    assert found["A0@0"][:3] == ["tanh", "add_", "add"]


def test_an_input_that_the_graph_writes_is_not_shared() -> None:
    def model(x: Tensor, counter: Tensor) -> Tensor:
        at = counter.neg()
        counter.add_(x.shape[0])
        return layer(x * at)

    found = phases(run(model, marked(B, S, H), hidden(1), mark=None))
    assert "shared" not in found
    assert sorted(found["A0@0"][:3]) == ["add_", "mul", "neg"]


# State: caches and counters.


def cached_layer(x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    """[T, H]: keys go into the cache, then every token attends to all of it."""
    cache.index_copy_(0, at, x.cos())
    return layer(x, lambda y: F.scaled_dot_product_attention(y.sin(), cache, cache))


def with_cache(x: Tensor, first: Tensor, second: Tensor, counter: Tensor) -> Tensor:
    at = counter + torch.arange(x.shape[0])
    counter.add_(x.shape[0])
    return cached_layer(cached_layer(x, first, at), second, at)


def with_counters(x: Tensor, first: Tensor, second: Tensor, *counters: Tensor) -> Tensor:
    for cache, counter in zip((first, second), counters, strict=True):
        x = cached_layer(x, cache, counter + torch.arange(x.shape[0]))
        counter.add_(x.shape[0])
    return x


def test_cache_writes_and_the_position_counter_are_in_a0() -> None:
    arguments = (hidden(16, H), hidden(16, H), torch.tensor([3]))
    state = run(with_cache, marked(B, H), *arguments, mark=None)
    assert place(find(state, "add_")) == "A0@0"
    assert place(find(state, "index_copy_")) == "A0@0"
    assert place(find(state, "index_copy_", 1)) == "A0@1"
    assert phases(state)["A1@1"] == LAYER["A1@0"]


def test_a_counter_of_each_layer_is_in_that_layers_a0() -> None:
    arguments = (hidden(16, H), hidden(16, H), torch.tensor([3]), torch.tensor([3]))
    state = run(with_counters, marked(B, H), *arguments, mark=None)
    assert [place(find(state, "add_", i)) for i in range(2)] == ["A0@0", "A0@1"]


def test_a_counter_that_the_attention_core_reads_moves_after_it() -> None:
    def model(x: Tensor, cache: Tensor, counter: Tensor) -> Tensor:
        cache.index_copy_(0, counter + torch.arange(x.shape[0]), x.cos())
        y = layer(x, lambda y: F.scaled_dot_product_attention(y.sin(), cache, cache) * counter)
        counter.add_(x.shape[0])
        return y

    state = run(model, marked(B, H), hidden(16, H), torch.tensor([3]), mark=None)
    assert place(find(state, "add_")) == "A1@0"


def test_a_counter_that_is_also_an_output_stays_in_a0() -> None:
    def model(x: Tensor, cache: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
        y = cached_layer(x, cache, counter + torch.arange(x.shape[0]))
        return y, counter.add_(x.shape[0])

    state = run(model, marked(B, H), hidden(16, H), torch.tensor([3]), mark=None)
    assert place(find(state, "add_")) == "A0@0"


# Communication.


def all_to_all(x: Tensor) -> Tensor:
    return funcol.all_to_all_single(x, None, None, GROUP)


def gathered(x: Tensor) -> Tensor:
    """[T, H] -> [T, H]: two all-gathers dispatch, a reduce-scatter combines."""
    rows = funcol.all_gather_tensor(x, 0, GROUP)
    weights = funcol.all_gather_tensor(x.sigmoid(), 0, GROUP)
    return funcol.reduce_scatter_tensor(rows.exp() * weights, "sum", 0, GROUP)


def test_two_collectives_may_carry_one_dispatch() -> None:
    state = run(lambda x: gathered(x.cos()), hidden(B, H))
    dispatch, combine = state.communications
    assert str(dispatch) == "D@0: all_gather x1, all_gather x1 over group 0"
    assert str(combine) == "C@0: reduce_scatter_sum x1 over group 0"
    assert len(dispatch.nodes) == 4
    assert phases(state) == {
        "A0@0": ["cos", "sigmoid"],
        "D@0": ["all_gather_into_tensor", "all_gather_into_tensor"],
        "MLP@0": ["exp", "mul"],
        "C@0": ["reduce_scatter_tensor"],
    }


def test_the_ops_of_dbo_fx_carry_three_tensors_at_once() -> None:
    state = run(lambda x: layer(layer(x)), hidden())
    assert list(map(str, state.communications)) == [
        "D@0: all_gather x3 over group 0",
        "C@0: reduce_scatter_sum x1 over group 0",
        "D@1: all_gather x3 over group 0",
        "C@1: reduce_scatter_sum x1 over group 0",
    ]
    assert state.layers == 2


def test_every_node_is_tagged_and_phases_follow_each_other() -> None:
    state = run(lambda x: layer(layer(x)), hidden())
    order = {p: i for i, p in enumerate([Phase.A0, Phase.A1, Phase.D, Phase.MLP, Phase.C])}
    for node in state.graph.nodes:
        tag = tag_of(node)
        assert node.op != "call_function" or tag is not None
        for before in node.all_input_nodes:
            one = tag_of(before)
            if tag and one and tag.phase in order and one.phase in order:
                assert (one.layer, order[one.phase]) <= (tag.layer, order[tag.phase])


def test_the_report_counts_what_was_found() -> None:
    _, text = Regions().apply(run(layer, hidden()))
    assert text.startswith("1 MoE layers; nodes A0 3, A1 ")
    assert text.endswith("; 0 shared by the microbatches")


def by_keyword(x: Tensor) -> Tensor:
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int64)
    rows, _, _ = torch.ops.dbo_fx.dispatch(x, ids, x[:, :1], group=GROUP)
    return torch.ops.dbo_fx.combine(rows.exp(), num_tokens=x.shape[0], group=GROUP)


def test_groups_of_a_dynamo_graph() -> None:
    assert communicating_groups(captured(by_keyword, hidden(B, H)).dynamo.graph) == {GROUP}
    assert communicating_groups(captured(layer, hidden()).dynamo.graph) == {GROUP}
    assert communicating_groups(captured(gathered, marked(B, H), mark=None).dynamo.graph) == {GROUP}
    assert communicating_groups(captured(torch.sin, hidden()).dynamo.graph) == set()


# Refusals.


def reduces(x: Tensor) -> Tensor:
    return funcol.all_reduce(layer(x), "sum", GROUP)


def never_combines(x: Tensor) -> Tensor:
    return all_to_all(layer(x).expand(2, *x.shape).contiguous())


def combines_first(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", 0, GROUP)


def dispatches_twice(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(funcol.all_gather_tensor(x, 0, GROUP) + 1, 0, GROUP)


def takes_the_largest(x: Tensor) -> Tensor:
    rows = funcol.all_gather_tensor(x, 0, GROUP)
    return funcol.reduce_scatter_tensor(rows, "max", 0, GROUP)


def splits_unevenly(x: Tensor) -> Tensor:
    sizes = [x.shape[0] - 1, 1]
    return all_to_all(funcol.all_to_all_single(x, sizes, sizes, GROUP).exp())


def flattens_the_ranks(x: Tensor) -> Tensor:
    return all_to_all(all_to_all(x.flatten(0, 1)).exp())


REFUSED = [
    (reduces, r"all_reduce.* communicates, but is neither dispatch nor combine"),
    (never_combines, r"D@1: all_to_all x1 over group 0: the last dispatch has no combine"),
    (combines_first, r"reduce_scatter.* would be the D of MoE layer 0"),
    (dispatches_twice, r"all_gather.* would be the C of MoE layer 0"),
    (takes_the_largest, r"reduce_scatter.*: reduction 'max', want 'sum'"),
    (flattens_the_ranks, r"all_to_all.* are not even, or not for every batch size"),
    (splits_unevenly, r"all_to_all.*splits \[.*\] of .* rows over 2 ranks are not even"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[m.__name__ for m, _ in REFUSED])
def test_communication_that_cannot_be_scheduled(model: Model, message: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=message):
        run(model, hidden())


def test_a_collective_that_nobody_waits_for_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        raw = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, GROUP)
        return torch.ops._c10d_functional.reduce_scatter_tensor(raw + 1, "sum", 2, GROUP)

    with pytest.raises(UnsupportedGraphError, match="must be used through exactly one wait_tensor"):
        run(model, hidden())


def test_even_splits_that_are_written_out_are_accepted() -> None:
    def model(x: Tensor) -> Tensor:
        sizes = [x.shape[0] // 2] * 2
        torch._check(x.shape[0] % 2 == 0)
        return all_to_all(funcol.all_to_all_single(x, sizes, sizes, GROUP).exp())

    assert run(model, hidden()).layers == 1


# Whole models.

PLAIN = {"vocab": 32, "hidden": 16, "expert_hidden": 16, "dense_hidden": 16}
PLAIN_MODELS = {
    "plain": {"layers": 2},
    "plain_shared": {"layers": 2, "shared_hidden": 16},
    "plain_dense_first": {"layers": 3, "shared_hidden": 16, "dense_layers": (0,)},
    "plain_dense_between": {"layers": 3, "dense_layers": (1,)},
    "plain_every_second": {"layers": 4, "moe_every": 2},
}


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_plain_models(name: str, golden: Golden) -> None:
    model = MoeDecoder(MoeConfig(**PLAIN, **PLAIN_MODELS[name]))
    state = run(model, torch.zeros(B, S, dtype=torch.long))
    golden(f"phases_{name}.txt", table(state))


@pytest.mark.parametrize("family", ["DeepseekV3", "Mixtral"])
def test_models_of_transformers(family: str, golden: Golden) -> None:
    version = pytest.importorskip("transformers").__version__
    if not version.startswith("5.19."):
        pytest.skip(f"the golden holds the ops of transformers 5.19, this is {version}")
    state, _ = Regions().apply(hugging_face(family, num_hidden_layers=3))
    golden(f"phases_{family.lower()}.txt", table(state))


def test_the_group_of_these_models_is_the_default_one() -> None:
    assert groups.name_of(None) == GROUP
    assert OPS.dispatch.default._schema.arguments[3].name == "group"
