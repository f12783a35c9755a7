"""A MoE model for DeepEP's kernels: real sizes, gated experts, routing given as inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_fx.comm import groups
from dbo_fx.comm.expert_layouts import dequantised, quantised
from dbo_fx.experts import Gated, run_batched

OPS = torch.ops.dbo_fx
H, INNER, EXPERTS, TOP_K, HEADS = 2048, 256, 8, 4, 16


def gate(x: Tensor) -> Tensor:
    """[N, 2I] -> [N, I]."""
    one, two = x.chunk(2, -1)
    return F.silu(one) * two


class GpuMoe(nn.Module):
    """Layers of attention within a token, routed experts and a shared one, in bfloat16."""

    def __init__(self, layout: str, layers: int = 2, most: int = 512, fp8: bool = False) -> None:
        """The same weights on every rank; a rank keeps its experts."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return values.bfloat16().cuda()

        name = groups.name_of(None)
        assert name is not None
        self.layout, self.most, self.fp8, self.group = layout, most, fp8, name
        self.local = EXPERTS // groups.world_size(name)
        here = slice(self.local * groups.rank(name), self.local * (groups.rank(name) + 1))
        self.register_buffer("first", torch.tensor(here.start).cuda())
        self.layers = layers
        for layer in range(layers):
            self.register_buffer(f"qkv{layer}", weight(3 * H, H))
            self.register_buffer(f"shared{layer}", weight(H, H))
            up, down = weight(EXPERTS, 2 * INNER, H), weight(EXPERTS, H, INNER)
            self.register_buffer(f"up{layer}", up[here].clone())
            self.register_buffer(f"down{layer}", down[here].clone())
            self.whole = getattr(self, "whole", [])
            self.whole.append((up, down))

    def get(self, name: str, layer: int) -> Tensor:
        """A layer's weight."""
        return self.get_buffer(f"{name}{layer}")

    def attend(self, layer: int, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]; only the heads of one token see each other."""
        q, k, v = F.linear(x, self.get("qkv", layer)).view(-1, 3, HEADS, H // HEADS).unbind(1)
        return x + F.scaled_dot_product_attention(q, k, v).flatten(1)

    def experts(self, layer: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        run = self.batched if self.layout == "batched" else self.rows
        return run(layer, h, ids, weights)

    def batched(self, layer: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows by expert."""
        sizes = self.group, self.most, EXPERTS
        rows, scales, counts, src, ranges = OPS.dispatch_batched(h, ids, *sizes, self.fp8)
        held = Gated(self.get("up", layer), self.get("down", layer), gate)
        y = run_batched(held, rows, scales, counts, TOP_K)
        return OPS.combine_batched(y, ids, weights, src, ranges, *sizes)

    def rows(self, layer: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows in any order: sorted by expert, those of no expert here last."""
        if self.fp8:
            small, scales = quantised(h)
            sent = OPS.dispatch_fp8(small, scales, ids, weights, self.group, EXPERTS)
            rows, ids, weights = dequantised(sent[0], sent[1], h.dtype), sent[2], sent[3]
        else:
            rows, ids, weights = OPS.dispatch(h, ids, weights, self.group, EXPERTS)
        ids = ids - self.first
        here = (ids >= 0) & (ids < self.local)
        ids = torch.where(here, ids, self.local)
        by_expert, order = torch.sort(ids.flatten(), stable=True)
        experts = torch.arange(self.local, device=h.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        x = rows[order // TOP_K]
        inner = gate(F.grouped_mm(x, self.get("up", layer).transpose(1, 2), offs=ends))
        out = F.grouped_mm(inner, self.get("down", layer).transpose(1, 2), offs=ends)
        out = out * weights.flatten()[order].unsqueeze(-1)
        out = torch.where((by_expert < self.local).unsqueeze(-1), out, 0)
        y = torch.unflatten(out[torch.argsort(order)], 0, (-1, TOP_K)).sum(1)
        return OPS.combine(y.to(h.dtype), h.shape[0], self.group)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids and weights [T, K] -> [T, H]."""
        for layer in range(self.layers):
            h = self.attend(layer, x)
            h2 = h / h.float().square().mean(-1, keepdim=True).sqrt().to(h.dtype)
            shared = F.silu(F.linear(h2, self.get("shared", layer)))
            x = h + self.experts(layer, h2, ids, weights) + shared
        return x

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same in float32 with all experts here; the rows as they travel."""
        for layer in range(self.layers):
            q, k, v = (
                F.linear(x.float(), self.get("qkv", layer).float())
                .view(-1, 3, HEADS, H // HEADS)
                .unbind(1)
            )
            h = x.float() + F.scaled_dot_product_attention(q, k, v).flatten(1)
            h2 = h / h.square().mean(-1, keepdim=True).sqrt()
            sent = h2.bfloat16()
            if self.fp8:
                sent = dequantised(*quantised(sent), torch.bfloat16)
            y = torch.zeros_like(h)
            up, down = self.whole[layer]
            for expert in range(EXPERTS):
                factor = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
                inner = gate(F.linear(sent.float(), up[expert].float()))
                y += F.linear(inner, down[expert].float()) * factor
            shared = F.silu(F.linear(h2, self.get("shared", layer).float()))
            x = h + y + shared
        return x


def inputs(rank: int, tokens: int, routing: str = "random", seed: int = 0) -> tuple[Any, ...]:
    """x, ids, weights of a rank; their dim 0 is marked."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * tokens + rank)
    x = torch.randn(tokens, H, generator=generator).bfloat16().cuda()
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if routing == "one rank":  # All choices on rank 0; the others receive nothing.
        scores[:, EXPERTS // 2 :] -= 2
    elif routing == "one expert":
        scores[:, 1] += 2
    weights, ids = scores.softmax(-1).topk(TOP_K, -1)
    if routing == "one expert":  # The other choices are none.
        weights, ids = torch.where(ids == 1, weights, 0), torch.where(ids == 1, ids, -1)
    found = x, ids.cuda(), weights.cuda()
    for tensor in found:
        torch._dynamo.mark_dynamic(tensor, 0)
    return found
