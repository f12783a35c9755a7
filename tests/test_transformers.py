"""Hugging Face models with sharded experts against the same models whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_fx.errors import DboError, OptionError, UnsupportedGraphError
from rank_pool import RankPool

transformers = pytest.importorskip("transformers", minversion="5.17")

from dbo_fx.integrations import transformers as integration  # noqa: E402 (needs transformers)

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUPED = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": SIZES | GROUPED | MLA | {"n_routed_experts": 8},
    "Mixtral": SIZES | {"num_local_experts": 8},
    "Qwen3Moe": SIZES | {"num_experts": 8},
    "Glm4Moe": SIZES | GROUPED | {"n_routed_experts": 8},
}
SEQUENCE = 8


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES.get(family, SIZES) | changes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(rank: int, batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 128, (batch, SEQUENCE), generator=torch.Generator().manual_seed(rank))


def forward(model: Any, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return model(input_ids=x, use_cache=False, **arguments).logits


@torch.no_grad()
def compare_whole(rank: int, family: str) -> None:
    whole, sharded = build(family), integration.expert_parallel(build(family))
    x = tokens(rank)
    torch.testing.assert_close(forward(sharded, x), forward(whole, x))
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(len(x), -1)
    expected = forward(whole, x, position_ids=packed)
    torch.testing.assert_close(forward(sharded, x, position_ids=packed), expected)


@torch.no_grad()
def trace_once(rank: int, family: str) -> str:
    torch._dynamo.reset()
    model, x = integration.expert_parallel(build(family)), tokens(rank)
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.mark_dynamic(x, 0)

    def record(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    compiled = torch.compile(model, backend=record, fullgraph=True)
    for batch in (x, tokens(rank, 6), tokens(rank, 3)):
        assert torch.equal(forward(compiled, batch), forward(model, batch))
    (graph,) = graphs
    return graph.code


def decode(step: Any, prefill: Any, x: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt of five tokens and three decoded ones."""
    cache = transformers.StaticCache(config=prefill.config, max_cache_len=SEQUENCE + 3)
    parts = [prefill(input_ids=x[:, :5], past_key_values=cache, use_cache=True).logits]
    for at in range(5, SEQUENCE):
        token = x[:, at : at + 1].clone()
        parts.append(step(input_ids=token, past_key_values=cache, use_cache=True).logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def compare_decoding(rank: int, family: str) -> None:
    torch._dynamo.reset()
    model, x = integration.expert_parallel(build(family)), tokens(rank)
    eager = decode(model, model, x)
    torch.testing.assert_close(eager, forward(build(family), x))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(decode(compiled, model, x), eager)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_equals_whole(ranks: RankPool, family: str) -> None:
    ranks(compare_whole, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_traces_as_one_graph_that_is_the_same_on_both_ranks(ranks: RankPool, family: str) -> None:
    first, second = ranks(trace_once, family)
    assert first == second


@pytest.mark.parametrize("family", FAMILIES)
def test_static_cache_decodes_eagerly_and_as_one_graph(ranks: RankPool, family: str) -> None:
    ranks(compare_decoding, family)


def refusal(rank: int, fn: Callable[..., Any], *args: Any) -> Exception:
    """What `fn` raises; raising it out of the rank would cost the pool a restart."""
    with pytest.raises((DboError, torch._dynamo.exc.Unsupported)) as refused:
        fn(rank, *args)
    return type(refused.value)(str(refused.value))


def check_refusal(found: list[Exception], error: type[Exception], message: str) -> None:
    for each in found:
        with pytest.raises(error, match=message):
            raise each


def shard(rank: int, family: str, changes: dict[str, Any], times: int = 1) -> None:
    model = build(family, **changes)
    for _ in range(times):
        model = integration.expert_parallel(model)


@torch.no_grad()
def masked(rank: int, ones: int, compiled: bool) -> torch.Tensor:
    torch._dynamo.reset()
    model, x = integration.expert_parallel(build("Mixtral")), tokens(rank)
    step = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    mask = torch.ones_like(x)
    mask[:, ones:] = 0
    return forward(step, x, attention_mask=mask) - forward(model, x)


def test_padding_is_refused(ranks: RankPool) -> None:
    check_refusal(ranks(refusal, masked, 5, False), UnsupportedGraphError, "cannot hide padding")


def test_a_mask_that_hides_nothing_is_ignored(ranks: RankPool) -> None:
    assert all(not difference.any() for difference in ranks(masked, SEQUENCE, False))


def test_any_mask_is_refused_in_a_trace(ranks: RankPool) -> None:
    found = ranks(refusal, masked, SEQUENCE, True)
    check_refusal(found, torch._dynamo.exc.Unsupported, "cannot hide padding")


@torch.no_grad()
def positional_mask(rank: int) -> None:
    model = integration.expert_parallel(build("Mixtral"))
    model.model(tokens(rank), torch.zeros(4, SEQUENCE))


def test_positional_arguments_are_refused(ranks: RankPool) -> None:
    found = ranks(refusal, positional_mask)
    check_refusal(found, UnsupportedGraphError, "everything after input_ids by keyword")


@torch.no_grad()
def slide(rank: int) -> None:
    model = integration.expert_parallel(build("Mixtral", sliding_window=4))
    forward(model, tokens(rank))


def test_a_sliding_window_is_refused(ranks: RankPool) -> None:
    check_refusal(ranks(refusal, slide), UnsupportedGraphError, "asks for sliding_window")


@pytest.mark.parametrize(
    ("family", "changes", "times", "error", "message"),
    [
        ("Mixtral", {"num_local_experts": 7}, 1, OptionError, "7 experts, which 2 ranks cannot"),
        ("Mixtral", {}, 2, OptionError, "is sharded already"),
        ("GptOss", {"num_local_experts": 8}, 1, UnsupportedGraphError, "has has_bias=True"),
        ("Llama", {}, 1, UnsupportedGraphError, "LlamaForCausalLM has no module with"),
    ],
)
def test_models_that_cannot_be_sharded(
    ranks: RankPool,
    family: str,
    changes: dict[str, Any],
    times: int,
    error: type[Exception],
    message: str,
) -> None:
    check_refusal(ranks(refusal, shard, family, changes, times), error, message)


@torch.no_grad()
def shared_config(rank: int) -> None:
    whole = build("Mixtral")
    before = forward(whole, tokens(rank))
    sharded = integration.expert_parallel(type(whole)(whole.config).eval())
    assert sharded.config._experts_implementation == integration.NAME
    assert torch.equal(forward(whole, tokens(rank)), before)


def test_a_model_of_the_same_config_object_is_left_alone(ranks: RankPool) -> None:
    ranks(shared_config)


def one_rank_group(rank: int) -> None:
    groups = [dist.new_group([member]) for member in range(2)]
    whole, alone = build("Mixtral"), integration.expert_parallel(build("Mixtral"), groups[rank])
    with torch.no_grad():
        torch.testing.assert_close(forward(alone, tokens(rank)), forward(whole, tokens(rank)))


def test_the_group_may_be_smaller_than_the_world(ranks: RankPool) -> None:
    ranks(one_rank_group)


def test_needs_an_initialised_process_group() -> None:
    with pytest.raises(DboError, match=r"torch\.distributed is not initialised"):
        integration.expert_parallel(build("Mixtral"))


def test_needs_a_new_enough_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Mixtral")
    # By name, because transformers replaces its module object while it loads a model's code.
    monkeypatch.setattr("transformers.__version__", "5.16.3")
    with pytest.raises(DboError, match=r"needs transformers>=5\.17; found 5\.16\.3"):
        integration.expert_parallel(model)


def test_says_when_transformers_moved_its_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import moe

    model = build("Mixtral")
    monkeypatch.delattr(moe, "ALL_EXPERTS_FUNCTIONS")
    with pytest.raises(DboError, match="has no ALL_EXPERTS_FUNCTIONS"):
        integration.expert_parallel(model)


def routed(dtype: torch.dtype, device: str) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    module = build("Mixtral").model.layers[0].mlp.experts.to(device, dtype)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 32, generator=generator)
    # Ids of 8 stand for experts of other ranks; no row chose expert 3.
    ids = torch.stack([torch.randperm(9, generator=generator)[:2] for _ in rows])
    ids = torch.where(ids == 3, 8, ids)
    weights = torch.rand(20, 2, generator=generator)
    return module, rows.to(device, dtype), ids.to(device), weights.to(device)


def check_grouped(device: str) -> None:
    inputs = routed(torch.bfloat16, device)
    dense, grouped = integration._dense_experts(*inputs), integration._grouped_experts(*inputs)
    torch.testing.assert_close(grouped, dense, rtol=0.03, atol=0.03)


@torch.no_grad()
def test_grouped_and_dense_experts_agree() -> None:
    check_grouped("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_grouped_and_dense_experts_agree_on_the_gpu() -> None:
    check_grouped("cuda")


def test_an_unsharded_module_says_so() -> None:
    inputs = routed(torch.float32, "cpu")
    with pytest.raises(UnsupportedGraphError, match="is not sharded"):
        integration.experts_forward(*inputs)
