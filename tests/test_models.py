"""The plain PyTorch decoder: what it computes, on one rank and on two, and how it traces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dbo_fx.errors import OptionError
from dbo_fx.models import MoeConfig, MoeDecoder
from dbo_fx.models.moe import ExpertParallelMoe, Mlp
from rank_pool import RankPool

SMALL = MoeConfig(hidden=32, layers=3, expert_hidden=24, shared_hidden=16, dense_layers=(0,))


def tokens(rank: int, batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 8), generator=torch.Generator().manual_seed(rank))


def naive(moe: ExpertParallelMoe, x: torch.Tensor) -> torch.Tensor:
    """One token, one expert at a time."""
    y = torch.zeros_like(x)
    inner = moe.up.shape[0] // moe.local
    for where in [(b, s) for b in range(x.shape[0]) for s in range(x.shape[1])]:
        scores = F.softmax(moe.gate(x[where]), dim=-1)
        weights, chosen = scores.topk(moe.top_k)
        for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            mine = slice(expert * inner, (expert + 1) * inner)
            y[where] += weight * (F.silu(moe.up[mine] @ x[where]) @ moe.down[mine])
    return y if moe.shared is None else y + moe.shared(x)


@torch.no_grad()
@pytest.mark.parametrize("shared", [0, 16])
def test_experts_equal_a_loop_over_tokens_and_experts(shared: int) -> None:
    model = MoeDecoder(MoeConfig(hidden=32, layers=1, top_k=3, shared_hidden=shared))
    moe = model.layers[0].mlp
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(moe(x), naive(moe, x))


@torch.no_grad()
def test_the_decoder_is_causal_and_knows_positions() -> None:
    model, x = MoeDecoder(SMALL), tokens(0)
    later = x.clone()
    later[:, 5:] = 7
    torch.testing.assert_close(model(later)[:, :5], model(x)[:, :5])
    same = model(torch.full((1, 4), 3))
    assert not torch.allclose(same[0, 0], same[0, 3])


def test_layers_without_experts() -> None:
    model = MoeDecoder(MoeConfig(layers=5, dense_layers={0}, moe_every=2))
    assert [isinstance(layer.mlp, Mlp) for layer in model.layers] == [
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 30, "heads": 4}, "hidden=30 is not a multiple of heads=4"),
        ({"top_k": 9}, "top_k=9 with experts=8"),
        ({"moe_every": 0}, "moe_every=0"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MoeConfig(**sizes)


@torch.no_grad()
def logits(rank: int, config: MoeConfig) -> torch.Tensor:
    return MoeDecoder(config)(tokens(rank))


@torch.no_grad()
@pytest.mark.parametrize("config", [SMALL, MoeConfig(layers=2, top_k=1)], ids=["shared", "plain"])
def test_two_ranks_equal_one(ranks: RankPool, config: MoeConfig) -> None:
    for rank, sharded in enumerate(ranks(logits, config)):
        torch.testing.assert_close(sharded, logits(rank, config))


@torch.no_grad()
def traced(rank: int, config: MoeConfig) -> list[str]:
    model, x = MoeDecoder(config), tokens(rank)
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.mark_dynamic(x, 0)

    def record(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    compiled = torch.compile(model, backend=record, fullgraph=True)
    for batch in (x, tokens(rank, 6), tokens(rank, 3)):
        assert torch.equal(compiled(batch), model(batch))
    (graph,) = graphs
    return [getattr(node.target, "__name__", node.name) for node in graph.graph.nodes]


def test_traces_as_one_graph_for_all_batch_sizes(ranks: RankPool) -> None:
    first, second = ranks(traced, SMALL)
    moe_layers = SMALL.layers - len(SMALL.dense_layers)
    assert first.count("all_to_all_single") == 2 * moe_layers
    assert first == second


def refused(rank: int, config: MoeConfig) -> str:
    with pytest.raises(OptionError) as refusal:
        MoeDecoder(config)
    return str(refusal.value)


def test_experts_that_the_ranks_cannot_share(ranks: RankPool) -> None:
    for message in ranks(refused, MoeConfig(experts=7)):
        assert "7 experts cannot be shared evenly by 2 ranks" in message


@pytest.mark.slow
def test_the_example_finds_no_difference() -> None:
    script = Path(__file__).parent.parent / "examples" / "plain_moe.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "largest difference to microbatched eager: 0.0\n"
