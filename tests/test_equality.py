"""The central promise: bit-identical to the microbatched reference, for every batch size.

Reference: every rank pads to the largest batch, as `wrap` does, and runs each half through the
unmodified model, one after the other.
"""

from __future__ import annotations

import functools
import itertools
import json
from importlib import resources
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import dbo_fx
from dbo_fx.errors import SoundnessError

SIZES = (4, 7, 16, 17, 64, 255, 256)
UNEQUAL = ((4, 9), (17, 64), (256, 1), (5, 255))
TINY = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (2, 3), (3, 3), (0, 3))
SLOW = pytest.mark.slow
CASES = [  # model, tokens of a sequence
    ("deepseek_v3", 6),
    pytest.param("mixtral", 1, marks=SLOW),
    ("plain", 1),
    pytest.param("deepseek_v3", 1, marks=SLOW),
    pytest.param("mixtral", 6, marks=SLOW),
    pytest.param("plain", 6, marks=SLOW),
]


@functools.cache
def model(name: str) -> Any:
    """A small seeded model, sharded over the ranks, as a function of token ids."""
    torch.manual_seed(0)
    if name == "plain":
        from dbo_fx.models.moe import MoeConfig, MoeDecoder

        return MoeDecoder(MoeConfig(layers=3, shared_hidden=64, dense_layers=(0,))).eval()
    import transformers

    from dbo_fx.integrations.transformers import expert_parallel

    if name == "deepseek_v3":
        text = resources.files("dbo_fx.models").joinpath("deepseek_v3_demo.json").read_text()
        built = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**json.loads(text))
        )
    else:
        config = transformers.MixtralConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=256,
        )
        built = transformers.MixtralForCausalLM(config)
    return Logits(expert_parallel(built.eval()))


class Logits(torch.nn.Module):
    """A Hugging Face causal model without cache, as ids -> logits."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, S] ids -> [B, S, V] logits."""
        return self.inner(input_ids=ids, use_cache=False).logits


def reference(net: torch.nn.Module, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Both halves of the padded batch through the unmodified model, in order."""
    padded = torch.cat([ids, ids.new_zeros(rows - len(ids), ids.shape[1])])
    half = rows // 2
    return torch.cat([net(padded[:half]), net(padded[half:])])[: len(ids)]


def compare(rank: int, name: str, tokens: int, batches: list[tuple[int, int]]) -> list[str]:
    """Run all batches through one compiled model; return what went wrong."""
    torch._dynamo.reset()
    net = model(name)
    before = len(dbo_fx.compilations())
    compiled = torch.compile(net, backend="dbo_fx", fullgraph=True)
    wrapped = dbo_fx.wrap(compiled)
    wrong = []
    with torch.no_grad():
        for index, batch in enumerate(batches):
            generator = torch.Generator().manual_seed(100 * index + rank)
            ids = torch.randint(0, 256, (batch[rank], tokens), generator=generator)
            result = wrapped(ids)
            wanted = reference(net, ids, max(4, *batch))
            if not torch.equal(result, wanted):
                wrong.append(
                    f"{name} tokens {tokens} batch {batch}: {(result - wanted).abs().max()}"
                )
    if len(dbo_fx.compilations()) != before + 1:
        wrong.append(f"{len(dbo_fx.compilations()) - before} compilations instead of 1")
    if wrapped.statistics.split_steps != len(batches):
        wrong.append(str(wrapped.statistics))
    return wrong


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_bit_identical_to_the_microbatched_reference(ranks: Any, name: str, tokens: int) -> None:
    """Equal and unequal batches over the ranks, one compilation for all of them."""
    batches = [(b, b) for b in SIZES] + list(UNEQUAL) + list(TINY)
    assert ranks(compare, name, tokens, batches, timeout_s=300) == [[], []]


def schedules(rank: int, options: dict[str, Any]) -> bool:
    """Another schedule, more microbatches: against its own microbatched reference."""
    torch._dynamo.reset()
    net = model("deepseek_v3")
    count = options.get("num_microbatches", 2)
    ids = torch.randint(0, 256, (13, 5), generator=torch.Generator().manual_seed(rank))
    torch._dynamo.mark_dynamic(ids, 0)
    with torch.no_grad():
        result = torch.compile(net, backend="dbo_fx", fullgraph=True, options=options)(ids)
        bounds = [13 * i // count for i in range(count + 1)]
        pieces = [net(ids[low:high]) for low, high in itertools.pairwise(bounds)]
    return torch.equal(result, torch.cat(pieces))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sequential_schedule_with_any_number_of_microbatches(ranks: Any, count: int) -> None:
    """One microbatch is the unsplit graph."""
    options = {"schedule": "sequential", "num_microbatches": count}
    assert ranks(schedules, options, timeout_s=300) == [True, True]


def static_cache(rank: int) -> dict[str, bool]:
    """One sequence split along its tokens, keys and values in a static cache written in place."""
    from transformers import StaticCache

    torch._dynamo.reset()
    net = model("deepseek_v3").inner
    cache = StaticCache(config=net.config, max_cache_len=32)

    def run(function: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.reset()
        out = function(input_ids=ids, past_key_values=cache, use_cache=True).logits
        slots = [t.flatten() for layer in cache.layers for t in (layer.keys, layer.values)]
        return out, torch.cat(slots).clone()

    def halves(function: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.reset()
        call = functools.partial(function, past_key_values=cache, use_cache=True)
        out = torch.cat([call(input_ids=part).logits for part in (ids[:, :5], ids[:, 5:])], 1)
        slots = [t.flatten() for layer in cache.layers for t in (layer.keys, layer.values)]
        return out, torch.cat(slots).clone()

    ids = torch.randint(0, 256, (1, 11), generator=torch.Generator().manual_seed(rank))
    compiled = torch.compile(net, backend="dbo_fx", fullgraph=True)
    with torch.no_grad():
        run(net, ids[:, :2])  # a first run allocates the cache outside the graph
        whole = run(net, ids)
        reference = halves(net, ids)
        torch._dynamo.mark_dynamic(ids, 1)
        split, again = run(compiled, ids), run(compiled, ids)
    return {
        "identical to microbatched": all(map(torch.equal, split, reference)),
        "same every time": all(map(torch.equal, split, again)),
        "same slots as unsplit": torch.equal(split[1] != 0, whole[1] != 0) and bool(split[1].any()),
        "same values as unsplit": all(
            map(functools.partial(torch.allclose, atol=1e-5), split, whole)
        ),
    }


def test_sequence_split_with_static_cache_writes_the_same_slots(ranks: Any) -> None:
    """The earlier tokens run first in every layer, so the later ones read what they wrote."""
    for result in ranks(static_cache, timeout_s=300):
        assert all(result.values()), result


def decode(rank: int) -> dict[str, Any]:
    """One token per sequence and step, sequences split along B, each with rows of its own cache."""
    from transformers import StaticCache

    torch._dynamo.reset()
    net = model("deepseek_v3").inner

    def ids(tokens: int, seed: int) -> torch.Tensor:
        return torch.randint(0, 256, (6, tokens), generator=torch.Generator().manual_seed(seed))

    def filled() -> StaticCache:
        cache = StaticCache(config=net.config, max_cache_len=16)
        net(input_ids=ids(5, rank), past_key_values=cache, use_cache=True)
        return cache

    def step(function: Any, cache: StaticCache, tokens: torch.Tensor) -> torch.Tensor:
        return function(input_ids=tokens, past_key_values=cache, use_cache=True).logits

    compiled = torch.compile(net, backend="dbo_fx", fullgraph=True)
    before = len(dbo_fx.compilations())
    with torch.no_grad():
        whole, split = filled(), filled()
        for layer in split.layers:
            torch._dynamo.mark_dynamic(layer.keys, 0)
            torch._dynamo.mark_dynamic(layer.values, 0)
        close = []
        for seed in range(10, 14):
            tokens = ids(1, seed + rank)
            wanted = step(net, whole, tokens.clone())
            torch._dynamo.mark_dynamic(tokens, 0)
            close.append(torch.allclose(step(compiled, split, tokens), wanted, atol=1e-4))
    layers = list(zip(whole.layers, split.layers, strict=True))
    return {
        "close": close,
        "counters": all(torch.equal(a.cumulative_length, b.cumulative_length) for a, b in layers),
        "slots": all(torch.equal(a.keys != 0, b.keys != 0) for a, b in layers),
        "compilations": len(dbo_fx.compilations()) - before,
    }


def test_decode_along_the_batch_with_a_static_cache(ranks: Any) -> None:
    """Counters that no token reaches advance once per step, not once per microbatch."""
    for result in ranks(decode, timeout_s=300):
        wanted = {"close": [True] * 4, "counters": True, "slots": True, "compilations": 1}
        assert result == wanted


def no_cache(rank: int) -> str:
    """Without a cache the later half cannot see the earlier one."""
    torch._dynamo.reset()
    ids = torch.randint(0, 256, (1, 11), generator=torch.Generator().manual_seed(rank))
    torch._dynamo.mark_dynamic(ids, 1)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as refused:
        torch.compile(model("deepseek_v3"), backend="dbo_fx", fullgraph=True)(ids)
    assert isinstance(refused.value.inner_exception, SoundnessError)
    return str(refused.value)


def test_sequence_split_without_a_cache_is_refused(ranks: Any) -> None:
    """A wrong result is worse than a refusal."""
    for message in ranks(no_cache, timeout_s=300):
        assert "splitting this batch changes results" in message
