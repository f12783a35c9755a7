"""DeepEP's kernels on two GPUs: numbers, captures, thousands of steps, refusals.

Two ranks; rank r uses device r modulo the number of devices. With one device the ranks share it
where DBO_FX_SHARED_GPU=1 says so (slow: they take turns). V2's ranks share one by NCCL 2.30, where
NCCL_MULTI_RANK_GPU_ENABLE=1 allows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dbo_fx
from dbo_fx.comm import abandon_in_flight
from dbo_fx.comm.deepep_groups import close_buffers
from dbo_fx.errors import CommunicationError
from deepep_steps import Subject, errors, expected, run_padded, run_steps
from rank_pool import RankPool

SHARED = os.environ.get("DBO_FX_SHARED_GPU") == "1"
pytestmark = [pytest.mark.deep_ep, pytest.mark.gpu if SHARED else pytest.mark.multi_gpu]

SMALL, FP8 = (4, 7, 64, 128, 511), (7, 128)
KINDS = {
    "deepep_ll": ("batched", False, SMALL),
    "deepep_ll fp8": ("batched", True, FP8),
    "deepep_ll_async": ("batched", False, SMALL),
    "deepep_ht": ("rows", False, (*SMALL, 8192)),
    "deepep_ht fp8": ("rows", True, FP8),
    "deepep_v2": ("rows", False, (*SMALL, 8192)),
}
ROUTINGS = ("random", "one expert", "one rank")
STEPS = int(os.environ.get("DBO_FX_DEEPEP_STEPS", "1000"))
MOST_ERROR, MOST_ROW_ERROR = 2e-2, 3e-2


def kinds(*names: str) -> list[Any]:
    """Parameters; V2 is left out where NCCL does not let ranks share a GPU."""
    alone = SHARED and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"
    why = "V2 needs a GPU for each rank, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
    shared = pytest.mark.skipif(alone, reason=why)
    return [pytest.param(name, marks=shared if "v2" in name else ()) for name in names]


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[..., list[Any]]]:
    """Two ranks of their own, as Buffers stay in them; others for V2, which takes NCCL's group."""
    pools = {backend: RankPool(2, backend) for backend in ("gloo", "nccl")}

    def call(fn: Callable[..., Any], kind: str, *args: Any, timeout_s: float) -> list[Any]:
        return pools["nccl" if "v2" in kind else "gloo"](fn, kind, *args, timeout_s=timeout_s)

    yield call
    for pool in pools.values():
        pool.close()


def use_device(rank: int) -> None:
    """Rank r on device r, or shared."""
    torch.cuda.set_device(rank % torch.cuda.device_count())


def program(model: Any, kind: str, **options: Any) -> Any:
    """A program of the model; segments are not compiled, which is what takes long."""
    chosen = {
        "transport": kind.split()[0],
        "verify": "static",
        "segment_backend": "eager",
    } | options
    return torch.compile(model, backend="dbo_fx", fullgraph=True, options=chosen)


def programs(kind: str, **options: Any) -> tuple[Any, Any, Any]:
    """The model, its program, and the one that runs the microbatches in turn."""
    from deepep_gpu_model import GpuMoe

    layout, fp8, _ = KINDS[kind]
    model = GpuMoe(layout, fp8=fp8)
    torch._dynamo.reset()
    return (
        model,
        program(model, kind, **options),
        program(model, kind, schedule="sequential", **options),
    )


def subject_of(rank: int, kind: str) -> Subject:
    """A model in two microbatches and in one, and its inputs; no row of padding has an expert."""
    from deepep_gpu_model import inputs

    model, split, _ = programs(kind)
    whole = program(model, kind, schedule="sequential", num_microbatches=1)

    def given(tokens: int, seed: int) -> Any:
        return inputs(rank, tokens, ROUTINGS[seed % 3], seed)

    return Subject(split, whole, given, model.reference, {"ids": -1})


def capture(call: Any, held: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """One graph of a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(*held)
    return graph, out


@torch.no_grad()
def run_kind(rank: int, kind: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """Eager and captured, for every number of tokens and routing."""
    from deepep_gpu_model import inputs

    use_device(rank)
    model, overlapped, serial = programs(kind)
    seen: dict[str, Any] = {}
    for tokens in counts:
        for routing in ROUTINGS:
            given = inputs(rank, tokens, routing)
            want = serial(*given).clone()
            far = errors(want, model.reference(*given))
            seen[f"{tokens} {routing}"] = torch.equal(overlapped(*given), want), *far
        held = tuple(t.clone() for t in inputs(rank, tokens))
        for tensor in held:
            torch._dynamo.mark_dynamic(tensor, 0)
        overlapped(*held)
        torch.cuda.synchronize()
        graph, out = capture(overlapped, held)
        for seed, routing in enumerate(ROUTINGS, 1):
            given = inputs(rank, tokens, routing, seed)
            for place, value in zip(held, given, strict=True):
                place.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            found = out.clone()
            want = serial(*given)
            far = errors(want, model.reference(*given))
            seen[f"{tokens} {routing} captured"] = torch.equal(found, want), *far
    return seen


@pytest.mark.parametrize("kind", kinds(*KINDS))
def test_bit_equal_to_serial_and_close_to_float32(
    pair: Callable[..., list[Any]], kind: str
) -> None:
    for seen in pair(run_kind, kind, KINDS[kind][2], timeout_s=500):
        assert all(same for same, _, _ in seen.values()), seen
        assert all(error < MOST_ERROR for _, error, _ in seen.values()), seen
        assert all(worst < MOST_ROW_ERROR for _, _, worst in seen.values()), seen


@torch.no_grad()
def run_few(rank: int, kind: str) -> list[float]:
    """Ranks of 0 and n, then of 1 and n rows."""
    use_device(rank)
    subject = subject_of(rank, kind)
    subject.split(*subject.given(64, 0)), subject.whole(*subject.given(64, 0))
    return [e for few in (0, 1) for n in (7, 64) for e in run_padded(rank, subject, few, n)]


@pytest.mark.parametrize("kind", ["deepep_ll", "deepep_ht"])
def test_ranks_with_few_rows_are_padded(pair: Callable[..., list[Any]], kind: str) -> None:
    for worst in pair(run_few, kind, timeout_s=300):
        assert all(error < MOST_ROW_ERROR for error in worst), worst


@torch.no_grad()
def run_turns(rank: int, kind: str, steps: int) -> dict[str, Any]:
    """Split and unsplit steps, captured sizes and others, and failures take turns."""
    use_device(rank)
    return run_steps(subject_of(rank, kind), (8, 64, 128), steps)


@pytest.mark.parametrize("kind", kinds("deepep_ll", "deepep_ll_async", "deepep_ht", "deepep_v2"))
@pytest.mark.slow
def test_a_thousand_steps_with_failures(pair: Callable[..., list[Any]], kind: str) -> None:
    for seen in pair(run_turns, kind, STEPS, timeout_s=550):
        assert seen == expected(STEPS)


@torch.no_grad()
def run_refusals(rank: int) -> dict[str, str]:
    """What is refused before a kernel runs."""
    from deepep_gpu_model import inputs

    use_device(rank)
    said: dict[str, str] = {}
    _, program, _ = programs("deepep_ll")
    for name, tokens in (("tokens", 1025), ("fits", 64)):
        try:
            program(*inputs(rank, tokens))
        except CommunicationError as error:
            said[name] = str(error)
            abandon_in_flight()
    dbo_fx.compilations()
    close_buffers()
    return said


def test_too_many_tokens_are_refused_and_buffers_close() -> None:
    pool = RankPool(2)
    try:
        for said in pool(run_refusals, timeout_s=300):
            assert list(said) == ["tokens"]
            assert "wanted at most max_tokens=512" in said["tokens"]
    finally:
        pool.close()
