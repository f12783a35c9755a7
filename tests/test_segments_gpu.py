"""Segments compiled by Inductor on a GPU: one rank over NCCL, eager and in one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dbo_fx
from dbo_fx.errors import VerificationError
from small_moe import H, PlainMoe

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class CachedMoe(PlainMoe):
    """Every layer appends to a cache [N, H] at a counter [1], and reads all of it."""

    def forward(self, x: Tensor, counter: Tensor, caches: Sequence[Tensor]) -> Any:  # type: ignore[override]
        slots = counter + torch.arange(x.shape[0], device=x.device)
        for layer, cache in enumerate(caches):
            q, k, v = torch.nn.functional.linear(x, self.qkv[layer]).chunk(3, -1)
            cache.index_copy_(0, slots, k + v)
            seen = torch.arange(cache.shape[0], device=x.device) <= slots[:, None]
            scores = (q @ cache.T).masked_fill(~seen, float("-inf"))
            h = x + scores.softmax(-1) @ cache
            x = h + self.experts(layer, h)
        counter.add_(x.shape[0])
        return torch.nn.functional.linear(x, self.head)


def both(model: Any) -> tuple[Any, Any]:
    """The split program and the sequential one, with segments as CUDA has them by default."""
    one = torch.compile(model, backend="dbo_fx", fullgraph=True)
    options = {"schedule": "sequential"}
    return one, torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)


def captured(call: Any, *args: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call that has run on these arguments before, and its result."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, call(*args)


@torch.no_grad()
def test_a_hugging_face_model_in_one_graph() -> None:
    """bfloat16 and grouped matmuls; three tokens a sequence begin at odd multiples of 8 bytes."""
    from dbo_fx.demo import build_model
    from dbo_fx.models import DEMO_CONFIG

    model = build_model(DEMO_CONFIG, torch.device("cuda", 0), torch.bfloat16)

    def tokens(batch: int, count: int) -> Tensor:
        ids = torch.randint(0, 256, (batch, count), device="cuda")
        torch._dynamo.mark_dynamic(ids, 0)
        return ids

    for batch, count in ((4, 64), (7, 64), (255, 64), (6, 3), (7, 3)):
        if batch in (4, 6):
            torch._dynamo.reset()
            split, serial = both(model)
        held = tokens(batch, count)
        assert torch.equal(split(held), serial(held)), (batch, count)
        graph, result = captured(split, held)
        for _ in range(5):
            held.copy_(tokens(batch, count))
            graph.replay()
            assert torch.equal(result, serial(held)), (batch, count)
    program = dbo_fx.compilations()[-1]
    assert program.plan.segments == "inductor"
    assert "compiled segments agree" in str(program.checked)
    print(program.checked, *[r for r in program.reports if r.name == "segments"])


def cached(count: int, start: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Rows, counter and caches; caches begin `start` numbers behind an aligned address."""
    generator = torch.Generator("cuda").manual_seed(count)
    x = torch.randn(count, H, generator=generator, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    caches = [torch.zeros(32 * H + 4, device="cuda") for _ in range(2)]
    places = [c[start : start + 32 * H].view(32, H) for c in caches]
    return x, torch.tensor([2], device="cuda"), places


def tensors(given: tuple[Tensor, Tensor, list[Tensor]]) -> list[Tensor]:
    x, counter, caches = given
    return [x, counter, *caches]


@torch.no_grad()
def test_caches_are_written_in_place() -> None:
    """Bit for bit as the sequential program, in a graph, too, and not by copies."""
    model = CachedMoe(2).cuda()
    split, serial = both(model)
    for count in (6, 7):
        one, other = cached(count), cached(count)
        assert torch.equal(split(*one), serial(*other))
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(a, b)
        graph, result = captured(split, *one)
        graph.replay()
        assert torch.equal(result, serial(*other))
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(VerificationError, match=r"written in place, and does not begin"):
        split(*cached(6, start=1))
