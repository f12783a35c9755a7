"""A plain PyTorch MoE on two CPU ranks, split by dbo_fx: python examples/plain_moe.py."""

from __future__ import annotations

import torch

from dbo_fx.launch import run_ranks
from dbo_fx.models import MoeConfig, MoeDecoder


@torch.no_grad()
def difference(rank: int) -> float:
    """Compile the model on one rank and compare with its microbatches run one by one."""
    model = MoeDecoder(MoeConfig(layers=4, shared_hidden=64))  # this rank holds half the experts
    tokens = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(rank))
    torch._dynamo.mark_dynamic(tokens, 0)  # the dim to split
    split = torch.compile(model, backend="dbo_fx", fullgraph=True)
    reference = torch.cat([model(tokens[:4]), model(tokens[4:])])
    return (split(tokens) - reference).abs().max().item()


if __name__ == "__main__":
    print(f"largest difference to microbatched eager: {max(run_ranks(difference, 2))}")
