"""The models that `overlap.py` runs, and the inputs they get."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from overlap_points import SHAPES, Point
from torch import Tensor, nn

from dbo_fx.comm.plain import plain_ops_over

LONGEST = 1024
CACHE = 512
FILLED = 448
# At most three microbatches of at least two rows; smaller decode steps are padded, as `wrap` does.
LEAST_ROWS = 8


class Prefill(nn.Module):
    """Token ids to logits, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model of transformers."""
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] ids to [B, S, vocab] logits."""
        return self.model(input_ids=tokens, use_cache=False).logits


class Decode(nn.Module):
    """One token of each sequence to its logits, against a static cache."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model of transformers; `cache` is set for each batch size."""
        super().__init__()
        self.model = model
        self.cache: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, 1] ids to [B, 1, vocab] logits."""
        return self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True).logits


def build(point: Point, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model of a point, its experts shared among the ranks."""
    import transformers

    from dbo_fx.integrations.transformers import expert_parallel

    shape = SHAPES[point.shape]
    config = getattr(transformers, f"{shape.family}Config")(
        num_hidden_layers=shape.layers, **shape.config
    )
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = getattr(transformers, f"{shape.family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(default)
    if point.routing == "skewed":
        skew(model)
    if point.experts == "all_to_all":
        model = expert_parallel(
            model, routing="all_to_all", copies="expert", capacity=point.capacity
        )
    elif point.max_tokens is not None:
        model = expert_parallel(model, layout="batched", max_tokens=point.max_tokens, fp8=point.fp8)
    else:
        model = expert_parallel(model, fp8=point.fp8)
    return (Decode if point.kind == "decode" else Prefill)(model)


@torch.no_grad()
def skew(model: nn.Module) -> None:
    """Let a few experts get most tokens: the scores of expert e grow with a Zipf-like weight.

    Gates without a bias get longer weight rows for the favoured experts, which are then far from
    the middle more often.
    """
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        weight = getattr(module, "weight", None)
        if bias is not None:
            bias.copy_(1.0 / torch.arange(1, len(bias) + 1, device=bias.device))
        elif type(module).__name__.endswith(("TopKRouter", "Gate")) and weight is not None:
            rank = torch.arange(1, len(weight) + 1, device=weight.device, dtype=torch.float32)
            weight.mul_((3.0 / rank.sqrt()).clamp(min=0.5).unsqueeze(-1).to(weight.dtype))


class Inputs:
    """Token ids of a point, and the state that a step leaves behind.

    Args:
        point: What is measured.
        model: What `build` returned.
        seed: Differs from rank to rank.
    """

    def __init__(self, point: Point, model: nn.Module, device: torch.device, seed: int) -> None:
        """Allocate the ids, and for decode the cache."""
        self.point, self.model = point, model
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab = SHAPES[point.shape].config["vocab_size"]
        if point.kind == "decode":
            rows, columns = max(point.tokens, LEAST_ROWS), 1
        else:
            columns = max(1, min(LONGEST, point.tokens // LEAST_ROWS))
            rows = point.tokens // columns
        self._shape = (rows, columns)
        self.device = device
        self.ids = self.fresh()
        torch._dynamo.mark_dynamic(self.ids, 0)
        self._cache = self._make_cache() if point.kind == "decode" else None

    def fresh(self) -> Tensor:
        """New ids, [B, S]."""
        ids = torch.randint(0, self._vocab, self._shape, generator=self._generator)
        return ids.to(self.device)

    def reset(self) -> None:
        """Bring the cache back to where every step starts."""
        if self._cache is None:
            return
        self.model.cache = self._cache
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(FILLED)

    def _make_cache(self) -> Any:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.model.config, max_cache_len=CACHE)
        self.model.cache = cache
        over = plain_ops_over("loopback") if self.point.link == "host" else nullcontext()
        with torch.no_grad(), over:
            self.model(self.ids)  # The first step allocates the cache.
        for layer in cache.layers:
            torch._dynamo.mark_dynamic(layer.keys, 0)
            torch._dynamo.mark_dynamic(layer.values, 0)
        return cache
