"""A small Mixture-of-Experts model in plain PyTorch, expert-parallel through dbo_fx's ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbo_fx.comm  # noqa: F401 (registers torch.ops.dbo_fx)

H, EXPERTS, TOP_K = 16, 8, 2  # hidden size, experts, experts per token


class MoeLayer(nn.Module):
    """Attention over the channels of one token, then routed experts beside a shared one."""

    def __init__(self, group: str, scale: float) -> None:
        """The weights of a layer whose experts are spread over the ranks of a group."""
        super().__init__()
        self.qkv = nn.Linear(H, 3 * H, bias=False)
        self.gate = nn.Linear(H, EXPERTS, bias=False)
        self.expert = nn.Linear(H, H, bias=False)
        self.shared = nn.Linear(H, H, bias=False)
        self.group, self.scale = group, scale

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        q, k, v = self.qkv(x).view(-1, 3, 2, H // 2).unbind(1)
        h = x + F.scaled_dot_product_attention(q, k, v).flatten(1)
        weights, ids = self.gate(h).softmax(-1).topk(TOP_K)
        rows, ids, weights = torch.ops.dbo_fx.dispatch(h, ids, weights, self.group)
        y = self.expert(rows) * (weights * (ids + 1)).sum(-1, keepdim=True)
        routed = torch.ops.dbo_fx.combine(y, h.shape[0], self.group)
        return h + routed * self.scale + F.silu(self.shared(h))


def moe_model(group: str, layers: int = 2, scale: float = 1.0) -> nn.Module:
    """A stack of layers, for inference.

    Args:
        group: Name of the process group that the experts are spread over.
        layers: How many layers.
        scale: What the routed experts' sum is multiplied by.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[MoeLayer(group, scale) for _ in range(layers)])
    return model.eval().requires_grad_(False)


def example_tokens() -> Tensor:
    """[T, H] tokens; T is the dim that is split."""
    return torch.zeros(8, H)
