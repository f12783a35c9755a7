"""A Mixture-of-Experts decoder in plain PyTorch, its experts sharded over the ranks of a group.

Nothing in it knows of dbo_fx: dispatch and combine are two functional all-to-alls a layer, which
the compiler finds in the captured graph. Every shape is static, so no token is dropped: dispatch
offers each token's row to every rank, together with the gate's weights for that rank's experts
(zero for the experts that the token did not choose), and combine brings back one partial sum a
rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_fx.errors import OptionError


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of a `MoeDecoder`.

    Attributes:
        vocab: Number of token ids.
        hidden: Width H of the residual stream.
        layers: Number of decoder layers.
        heads: Attention heads; divides `hidden`.
        experts: Number E of routed experts in a MoE layer; the group's size divides it.
        top_k: Number K of experts that each token chooses.
        expert_hidden: Inner width of one routed expert.
        shared_hidden: Inner width of the shared expert; 0 for none.
        dense_hidden: Inner width of a dense layer's MLP.
        dense_layers: Layers without experts.
        moe_every: Only every n-th layer, counted from 0, has experts: 2 leaves layers 1, 3, ...
            dense.
        positions: Length of the position table, the longest sequence.
        seed: Seed of the weights. The same seed gives the same function on any number of ranks.
    """

    vocab: int = 256
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 96
    shared_hidden: int = 0
    dense_hidden: int = 128
    dense_layers: Collection[int] = ()
    moe_every: int = 1
    positions: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together.

        Raises:
            OptionError: A size does not divide another, or K is not in 1..E.
        """
        if self.hidden % self.heads:
            raise OptionError(
                f"MoeConfig: hidden={self.hidden} is not a multiple of heads={self.heads}. "
                "Choose heads that divide hidden."
            )
        if not 1 <= self.top_k <= self.experts:
            raise OptionError(
                f"MoeConfig: top_k={self.top_k} with experts={self.experts}; wanted 1 <= top_k "
                "<= experts."
            )
        if self.moe_every < 1:
            raise OptionError(f"MoeConfig: moe_every={self.moe_every}; wanted 1 or more.")

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has a dense MLP instead of experts."""
        return layer in self.dense_layers or layer % self.moe_every != 0


class _Init:
    """Makes weights from one seed, always in full: a rank slices what it holds afterwards."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int, fan_in: int | None = None) -> Tensor:
        scale = (fan_in if fan_in is not None else shape[-1]) ** -0.5
        return torch.randn(shape, generator=self._generator).mul_(scale)

    def linear(self, fan_in: int, fan_out: int) -> nn.Linear:
        linear = nn.Linear(fan_in, fan_out, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight(fan_out, fan_in))
        return linear


class CausalAttention(nn.Module):
    """Multi-head causal self-attention without a cache."""

    def __init__(self, config: MoeConfig, init: _Init) -> None:
        """Create the projections."""
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.qkv = init.linear(config.hidden, 3 * config.hidden)
        self.out = init.linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [B, S, H].

        Returns:
            [B, S, H].
        """
        qkv = torch.unflatten(self.qkv(x), -1, (3, -1, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """The MLP of dense layers and of the shared expert."""

    def __init__(self, hidden: int, inner: int, init: _Init) -> None:
        """Create both projections."""
        super().__init__()
        self.up = init.linear(hidden, inner)
        self.down = init.linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        y: Tensor = self.down(F.silu(self.up(x)))
        return y


class ExpertParallelMoe(nn.Module):
    """Routed experts sharded over the ranks, beside an optional shared expert on every rank."""

    def __init__(self, config: MoeConfig, init: _Init, group: dist.ProcessGroup | None) -> None:
        """Create all experts' weights, then keep this rank's slice of them."""
        super().__init__()
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        if config.experts % ranks:
            raise OptionError(
                f"MoeDecoder: {config.experts} experts cannot be shared evenly by {ranks} ranks. "
                "Choose a number of experts that is a multiple of the group's size."
            )
        self.group_name = group.group_name if group is not None else None
        self.ranks, self.local, self.top_k = ranks, config.experts // ranks, config.top_k
        hidden, inner = config.hidden, config.expert_hidden
        mine = slice(rank * self.local, (rank + 1) * self.local)
        self.gate = init.linear(hidden, config.experts)
        # The experts of a rank lie side by side in one matrix, so that one matmul runs them all.
        up = init.weight(config.experts, inner, hidden)[mine]
        down = init.weight(config.experts, inner, hidden, fan_in=inner)[mine]
        self.up = nn.Parameter(up.flatten(0, 1).clone())
        self.down = nn.Parameter(down.flatten(0, 1).clone())
        self.shared = Mlp(hidden, config.shared_hidden, init) if config.shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        """Send each token to its experts and add up what they return.

        Args:
            x: [B, S, H], this rank's tokens; B and S are the same on every rank.

        Returns:
            [B, S, H].
        """
        hidden = x.shape[-1]
        rows = x.expand(self.ranks, *x.shape)
        arrived = self._exchange(torch.cat((rows, self._route(x)), dim=-1))
        partial = self._experts(arrived[..., :hidden], arrived[..., hidden:])
        y = self._exchange(partial).sum(0)
        return y if self.shared is None else y + self.shared(x)

    def _route(self, x: Tensor) -> Tensor:
        """The gate's weight of every expert for every token, by rank: [R, B, S, E / R]."""
        scores = F.softmax(self.gate(x), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        dense = torch.zeros_like(scores).scatter(-1, chosen, weights)
        return torch.unflatten(dense, -1, (self.ranks, self.local)).movedim(-2, 0)

    def _experts(self, x: Tensor, weights: Tensor) -> Tensor:
        """This rank's experts on the rows of all ranks: [R, B, S, H], [R, B, S, E / R] -> like x.

        The down projection is linear, so the gate's weight may go before it; the matmul then also
        sums over the experts.
        """
        inner = torch.unflatten(F.silu(F.linear(x, self.up)), -1, (self.local, -1))
        return torch.matmul((inner * weights.unsqueeze(-1)).flatten(-2), self.down)

    def _exchange(self, x: Tensor) -> Tensor:
        """All-to-all over the leading rank dim: x[r] goes to rank r."""
        if self.group_name is None:
            return x
        return funcol.all_to_all_single(x.contiguous(), None, None, self.group_name)


class DecoderLayer(nn.Module):
    """Attention, then experts or a dense MLP, each behind a norm and added to the residual."""

    def __init__(
        self, config: MoeConfig, layer: int, init: _Init, group: dist.ProcessGroup | None
    ) -> None:
        """Create the layer with the given index."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attention = CausalAttention(config, init)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp: nn.Module = (
            Mlp(config.hidden, config.dense_hidden, init)
            if config.is_dense(layer)
            else ExpertParallelMoe(config, init, group)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class MoeDecoder(nn.Module):
    """A causal language model whose MoE layers are expert-parallel."""

    def __init__(self, config: MoeConfig, group: dist.ProcessGroup | None = None) -> None:
        """Create the weights from the config's seed and keep this rank's experts.

        Args:
            config: Sizes and seed.
            group: The ranks that share the experts. Default: all of them where
                `torch.distributed` is initialised, otherwise this process alone, without any
                communication.

        Raises:
            OptionError: The group's size does not divide the number of experts.
        """
        super().__init__()
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        init = _Init(config.seed)
        self.embed = nn.Embedding(config.vocab, config.hidden, device="meta")
        self.embed.weight = nn.Parameter(init.weight(config.vocab, config.hidden, fan_in=1))
        self.position = nn.Parameter(init.weight(config.positions, config.hidden, fan_in=1))
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, init, group) for layer in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = init.linear(config.hidden, config.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the next token's logits at every position.

        Args:
            tokens: [B, S] token ids.

        Returns:
            [B, S, vocab] logits.
        """
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position[where]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
