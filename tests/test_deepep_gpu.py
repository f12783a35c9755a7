"""DeepEP's kernels on two GPUs: numbers, captures, thousands of steps, refusals.

Two ranks; rank r uses device r modulo the number of devices. With one device the ranks share it
where DBO_FX_SHARED_GPU=1 says so (slow: they take turns).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx.comm import abandon_in_flight, in_flight, protocol
from dbo_fx.comm.deepep_groups import close_buffers
from dbo_fx.comm.gloo import GlooReference
from dbo_fx.contracts import NCCL
from dbo_fx.errors import CommunicationError
from rank_pool import RankPool

SHARED = os.environ.get("DBO_FX_SHARED_GPU") == "1"
pytestmark = [pytest.mark.deep_ep, pytest.mark.gpu if SHARED else pytest.mark.multi_gpu]

KINDS = {
    "deepep_ll": ("batched", False, (4, 7, 64, 128, 511)),
    "deepep_ll fp8": ("batched", True, (7, 128)),
    "deepep_ll_async": ("batched", False, (64, 511)),
    "deepep_ht": ("rows", False, (4, 7, 64, 511, 8192)),
    "deepep_ht fp8": ("rows", True, (64, 4096)),
    "deepep_v2": ("rows", False, (64, 511, 8192)),
}
ROUTINGS = ("random", "one expert", "one rank")
STEPS = int(os.environ.get("DBO_FX_DEEPEP_STEPS", "1000"))


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: Buffers stay in them."""
    pool = RankPool(2)
    yield pool
    pool.close()


class ThroughHost:
    """What the first call's tests communicate over, as the ranks' group is gloo: by way of CPUs."""

    contract = NCCL

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> None:
        """Copy, exchange, copy."""
        carrier = GlooReference()
        sent, got = [t.cpu() for t in inputs], [t.cpu() for t in outputs]
        carrier.finish(carrier.launch(sent, got, collective, group, None, name), got)
        for output, value in zip(outputs, got, strict=True):
            output.copy_(value)

    def finish(self, flight: None, outputs: Sequence[Tensor]) -> None:
        """Nothing is left to do."""

    def begin(self, group: str) -> None:
        """Nothing depends on what was before."""

    def realign(self, group: str | None) -> None:
        """Nothing is left."""


def use_device(rank: int) -> None:
    """Rank r on device r, or shared."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    protocol._TRANSPORTS["cuda", "nccl"] = ThroughHost()


def programs(kind: str, **options: Any) -> tuple[Any, Any, Any]:
    """The model, its program, and the one that runs the microbatches in turn."""
    from deepep_gpu_model import GpuMoe

    layout, fp8, _ = KINDS[kind]
    model = GpuMoe(layout, fp8=fp8)
    torch._dynamo.reset()
    made = []
    for schedule in ("mlp_shared_overlap", "sequential"):
        chosen = {
            "transport": kind.split()[0],
            "schedule": schedule,
            "verify": "static",
            "segment_backend": "eager",
        } | options
        made.append(torch.compile(model, backend="dbo_fx", fullgraph=True, options=chosen))
    return model, made[0], made[1]


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
            error = (want.float() - model.reference(*given)).norm() / want.float().norm()
            seen[f"{tokens} {routing}"] = torch.equal(overlapped(*given), want), float(error)
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
            error = (want.float() - model.reference(*given)).norm() / want.float().norm()
            seen[f"{tokens} {routing} captured"] = torch.equal(found, want), float(error)
    return seen


@pytest.mark.parametrize("kind", list(KINDS))
def test_bit_equal_to_serial_and_close_to_float32(pair: RankPool, kind: str) -> None:
    for seen in pair(run_kind, kind, KINDS[kind][2], timeout_s=500):
        assert all(same for same, _ in seen.values()), seen
        assert max(error for _, error in seen.values()) < 2e-2, seen


@torch.no_grad()
def run_steps(rank: int, kind: str, steps: int) -> dict[str, Any]:
    """Split and unsplit runs, other sizes and failed captures take turns."""
    from deepep_gpu_model import inputs

    use_device(rank)
    _, overlapped, serial = programs(kind)
    _, whole, _ = programs(kind, schedule="sequential", num_microbatches=1)
    sizes = (4, 64, 128)
    want = {n: [p(*inputs(rank, n)).clone() for p in (serial, whole)] for n in sizes}
    wrong, failed = [], 0
    for step in range(steps):
        tokens = sizes[step % 3]
        given = inputs(rank, tokens)
        if step % 50 == 49:
            failed += fail_capture(overlapped, given)
        program, right = ((overlapped, 0), (whole, 1))[step // 3 % 2]
        if not torch.equal(program(*given), want[tokens][right]):
            wrong.append(step)
    return {"wrong": wrong, "failed": failed, "left": in_flight()}


def fail_capture(program: Any, given: Any) -> int:
    """A capture that fails behind the first send; 1 if it did."""
    from dbo_fx.comm import ops

    before = ops._check_slot
    calls = 0

    def boom(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("boom")
        before(*args)

    ops._check_slot = boom  # type: ignore[assignment]
    try:
        capture(program, given)
    except RuntimeError:
        abandon_in_flight()
        torch.cuda.synchronize()
        return 1
    finally:
        ops._check_slot = before
    return 0


@pytest.mark.parametrize("kind", ["deepep_ll", "deepep_ht", "deepep_v2"])
@pytest.mark.slow
def test_a_thousand_steps_with_failed_captures(pair: RankPool, kind: str) -> None:
    for seen in pair(run_steps, kind, STEPS, timeout_s=550):
        assert seen == {"wrong": [], "failed": STEPS // 50, "left": ()}


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
