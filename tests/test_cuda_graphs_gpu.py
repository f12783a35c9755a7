"""Real CUDA graphs, with NCCL on one GPU: what the CPU twin stands for elsewhere."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dbo_fx
from dbo_fx import AgreementPolicy, CudaGraphs, sync, wrap
from dbo_fx.capturing import what_captures
from dbo_fx.comm import in_flight
from dbo_fx.launch import Ranks
from dbo_fx.poison_on_free import poison_on_free
from small_moe import PlainMoe, rows

pytestmark = pytest.mark.gpu
BUCKETS = (4, 8)
SLOW_CYCLES = 2_000_000


@pytest.fixture(scope="module")
def rank() -> Iterator[Callable[..., Any]]:
    """One NCCL rank: `rank(fn)` runs `fn(0)` there."""
    ranks = Ranks(1, backend="nccl")
    yield lambda fn, *args: ranks.call(fn, args)[0]
    ranks.close()


def on_gpu(count: int, seed: int = 0) -> Tensor:
    return rows(count, seed=seed).cuda()


def compiled(**options: Any) -> tuple[Any, Any]:
    """The compiled model, and the sequential one."""
    torch._dynamo.reset()
    model = PlainMoe(2).cuda()
    given = {"verify": "static", "segment_backend": "eager", **options}
    return tuple(
        torch.compile(model, backend="dbo_fx", fullgraph=True, options={**given, **more})
        for more in ({}, {"schedule": "sequential"})
    )


def used(*, settled: bool = False) -> tuple[int, int]:
    """Bytes allocated and reserved; settled: with garbage gone and what is free given back."""
    torch.cuda.synchronize()
    if settled:
        gc.collect()
        torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@torch.no_grad()
def run_replays(rank: int) -> tuple[list[bool], list[tuple[int, int]], int, bool]:
    split, serial = compiled(verify="numeric")
    graphs, serials = CudaGraphs(split), CudaGraphs(serial)
    for each in (graphs, serials):
        each.capture(BUCKETS, on_gpu(3))
    equal, memory = [], []
    stream = torch.cuda.current_stream()
    for step in range(20):
        x = on_gpu(step % 9, seed=step)
        torch.cuda.set_sync_debug_mode("error")
        out = graphs(x)
        torch.cuda.set_sync_debug_mode("default")
        equal.append(torch.equal(out, serials(x)))
        del x, out
        memory.append(used())
    return equal, memory[1:], len(in_flight()), stream == torch.cuda.current_stream()


def test_replays_equal_the_sequential_ones_without_a_host_sync(rank: Callable[..., Any]) -> None:
    equal, memory, left, same_stream = rank(run_replays)
    assert all(equal)
    assert len(set(memory)) == 1
    assert left == 0
    assert same_stream


@torch.no_grad()
def run_failures(rank: int, where: str) -> tuple[list[tuple[int, int]], list[str], list[bool]]:
    """Memory before four failures, behind each, and with a later graph released.

    A good graph is released before: what libraries keep from then on is no failure's.
    """
    split, serial = compiled()
    state = {"broken": False}

    def call(x: Tensor) -> Tensor:
        out: Tensor = split(x)
        if state["broken"] and what_captures():
            if where == "a host sync":
                out.sum().item()
            raise ZeroDivisionError(where)
        return out

    graphs = CudaGraphs(call)
    x = on_gpu(8)
    torch._dynamo.mark_dynamic(x, 0)
    equal = [torch.equal(split(x), serial(x))]
    runtime = dbo_fx.compilations()[-2].runtime

    def breaks(event: int, stream: str) -> None:
        if what_captures() and event > 1:
            raise ZeroDivisionError(where)
        type(runtime).record(runtime, event, stream)

    graphs.capture([8], x)
    equal.append(torch.equal(graphs(x), serial(x)))
    graphs.reset()
    memory, errors = [used(settled=True)], []
    state["broken"] = True
    if where == "half-way":
        runtime.record = breaks  # type: ignore[method-assign]
    for _ in range(4):
        try:
            graphs.capture([8], x)
        except Exception as error:
            errors.append(type(error).__name__)
        memory.append(used(settled=True))
    vars(runtime).pop("record", None)
    state["broken"] = False
    equal.append(torch.equal(split(x), serial(x)))
    graphs.capture([8], x)
    equal.append(torch.equal(graphs(x), serial(x)))
    graphs.reset()
    memory.append(used(settled=True))
    return memory, errors, equal


@pytest.mark.parametrize("where", ["half-way", "behind", "a host sync"])
def test_failed_captures_leave_nothing_behind(rank: Callable[..., Any], where: str) -> None:
    memory, errors, equal = rank(run_failures, where)
    assert len(errors) == 4
    assert len(set(memory)) == 1, memory
    assert all(equal)


@torch.no_grad()
def run_own_capture(rank: int) -> tuple[bool, str, str]:
    split, serial = compiled()
    step = wrap(split, policy=AgreementPolicy(0, 0, buckets=BUCKETS))
    held = on_gpu(3)
    decision = step.decide(held)
    texts = []
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.run(decision, held)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        out = step.run(decision, held)
        try:
            step(held)
        except Exception as error:
            texts.append(str(error))
    held.copy_(on_gpu(3, seed=5))
    graph.replay()
    padded = torch.cat([on_gpu(3, seed=5), torch.zeros(1, held.shape[1], device="cuda")])
    torch._dynamo.mark_dynamic(padded, 0)
    return torch.equal(out, serial(padded)[:3]), texts[0], str(step.statistics.graphs.eager)


def test_a_callers_own_capture_takes_the_decision_from_outside(rank: Callable[..., Any]) -> None:
    equal, refused, eager = rank(run_own_capture)
    assert equal
    assert "agree_batch was called while a CUDA graph is being captured" in refused
    assert "captured by the caller" in eager


@torch.no_grad()
def run_poison(rank: int) -> dict[str, int]:
    """How many replays differ: as it is, and without what keeps values alive."""
    split, serial = compiled()
    x = on_gpu(8)
    torch._dynamo.mark_dynamic(x, 0)
    split(x), serial(x)
    program = dbo_fx.compilations()[-2]
    plain = program.module

    def slow(stream: str) -> None:
        if stream == "comm":
            torch.cuda._sleep(SLOW_CYCLES)

    def differing() -> int:
        with poison_on_free(program, slow):
            graphs = CudaGraphs(split)
            graphs.capture([8], x)
        inputs = [on_gpu(8, seed=seed) for seed in range(5)]
        return sum(not torch.equal(graphs(x), serial(x)) for x in map(marked, inputs))

    found = {"clean": differing()}
    graph = copy.deepcopy(plain.graph)
    for node in list(graph.nodes):
        if node.target is sync.keepalive:
            graph.erase_node(node)
    program.module = GraphModule(plain, graph)
    found["without keepalives"] = differing()
    program.module = plain
    return found


def marked(x: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_poisoned_memory_shows_a_missing_keepalive_and_nothing_else(
    rank: Callable[..., Any],
) -> None:
    found = rank(run_poison)
    assert found["clean"] == 0
    assert found["without keepalives"] > 0
