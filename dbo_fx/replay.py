"""Capture a whole compiled call in one CUDA graph and replay it with new inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Call = Callable[[Tensor], Tensor]


def capture(call: Call, tokens: Tensor, warmup: int = 3) -> Call:
    """Capture a call, communication included, in one CUDA graph.

    Every rank of the group must capture, and later replay, at the same point.

    Args:
        call: A model, compiled or not; it must have run on these sizes before.
        tokens: [B, S] token ids on this rank's device; the graph is good for this shape alone.
        warmup: Calls on a side stream before the capture.

    Returns:
        A function that copies its argument into the graph's input, replays, and returns a copy of
        the graph's output. Its attribute `graph` is the `torch.cuda.CUDAGraph`.
    """
    held = tokens.clone()
    torch._dynamo.mark_dynamic(held, 0)
    side = torch.cuda.Stream(tokens.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            call(held)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize(tokens.device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread calls CUDA meanwhile, which a stricter mode takes for an error.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call(held)

    def replay(new: Tensor) -> Tensor:
        held.copy_(new)
        graph.replay()
        return result.clone()

    replay.graph = graph  # type: ignore[attr-defined]
    return replay
