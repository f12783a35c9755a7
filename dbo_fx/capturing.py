"""Says whether a CUDA graph, or its CPU twin, is being captured; cleans up behind a failure."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_TWIN: ContextVar[bool] = ContextVar("dbo_fx_twin_captures", default=False)


def what_captures() -> str:
    """Return what is being captured, in words; nothing if nothing is."""
    if _TWIN.get():
        return "the CPU twin of a CUDA graph is being captured"
    # A capture needs an initialised CUDA; is_available() would ask the driver at every step.
    if (
        torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
        and torch.cuda.is_current_stream_capturing()
    ):
        return "a CUDA graph is being captured"
    return ""


@contextmanager
def twin_capture() -> Iterator[None]:
    """Let `what_captures` say so within the body."""
    token = _TWIN.set(True)
    try:
        yield
    finally:
        _TWIN.reset(token)


def let_go(error: BaseException) -> None:
    """Clear an error's frames, which hold tensors of the pool; lines and messages stay."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
