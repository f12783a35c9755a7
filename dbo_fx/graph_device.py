"""The device's part of a CUDA graph: warm up, capture, replay, release. On CPU a twin.

Everything else (buckets, buffers, checks, agreement, statistics) is the same on both. The twin is
as strict as a device may be: it runs the call again at every replay, and whatever a device may
overwrite it does overwrite, with poison.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dbo_fx.capturing import twin_capture
from dbo_fx.comm.poison import poison

Call = Callable[[], Any]


@dataclass(eq=False, slots=True)
class Captured:
    """One captured call.

    Attributes:
        outputs: What it returned: the memory that every replay writes.
        handle: The device's own.
    """

    outputs: Any
    handle: Any


class GraphDevice(Protocol):
    """Captures calls that take no arguments, all in one memory pool."""

    def warm(self, call: Call) -> None:
        """Run the call on the streams on which it will be captured."""

    def capture(self, call: Call, held: set[int]) -> Captured:
        """Capture the call; a failure leaves nothing behind and raises what the call raised.

        Args:
            call: What to capture.
            held: Addresses of the storages of its inputs; outputs in them are no new memory.
        """

    def replay(self, graph: Captured) -> None:
        """Run it again, ordered on the current stream; the host does not wait."""

    def release(self, graph: Captured) -> None:
        """Give its memory back to the pool, and the pool's to the device with the last graph."""


class CudaDevice:
    """Real graphs.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture nothing yet."""
        self.device = device
        self.stream = _capture_stream(device)
        self._pool: Any = None  # What torch.cuda.graph_pool_handle returned.
        self._live: list[Captured] = []

    @property
    def pool(self) -> Any:
        """The pool's id, None while there is no graph."""
        return self._pool

    def warm(self, call: Call) -> None:
        """See the protocol.

        What the call uses on its other streams it uses here first, too: libraries make their
        handles and workspaces for them. Those of cuBLAS are made in any case.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                make_handles(self.device)
                call()
        finally:
            torch.cuda.set_stream(current)
            current.wait_stream(self.stream)

    def capture(self, call: Call, held: set[int]) -> Captured:
        """See the protocol."""
        current = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        gc.collect()  # A graph or group collected during the capture would spoil it.
        torch.cuda.empty_cache()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            torch.cuda.set_stream(self.stream)
            # NCCL's watchdog thread calls CUDA meanwhile, which a stricter mode takes for an error.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = call()
                torch.cuda.set_stream(self.stream)
                graph.capture_end()
            except BaseException:
                torch.cuda.set_stream(self.stream)
                self._abandon(graph)
                raise
        finally:
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
        captured = Captured(outputs, graph)
        self._live.append(captured)
        return captured

    def replay(self, graph: Captured) -> None:
        """See the protocol."""
        graph.handle.replay()

    def release(self, graph: Captured) -> None:
        """See the protocol."""
        torch.cuda.synchronize(self.device)
        self._live.remove(graph)
        graph.outputs = None
        graph.handle.reset()
        self._forget_pool()

    def _abandon(self, graph: Any) -> None:
        """End a capture half-way."""
        ended = False
        if torch.cuda.is_current_stream_capturing():
            with suppress(RuntimeError):  # The first error is the one that counts.
                graph.capture_end()
                ended = True
        if not ended:
            end_spoilt_capture(self.device, self._pool)
        graph.reset()
        self._forget_pool()

    def _forget_pool(self) -> None:
        """An id whose last graph is gone must not be used again."""
        if not self._live:
            self._pool = None
            torch.cuda.empty_cache()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that all captures of a device share.

    A pool's free memory belongs to the stream that used it, and cuBLAS keeps a workspace for every
    stream that it was ever used on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_handles(device: torch.device) -> None:
    """Let cuBLAS make its handle and workspaces for the current stream: a capture may not."""
    one = torch.ones(16, 16, device=device)
    torch.addmm(one[0], one, one)
    torch.mm(one, one)


def end_spoilt_capture(device: torch.device, pool: Any) -> None:
    """Do what `CUDAGraph.capture_end` leaves undone if the capture was spoilt.

    Allocations stop going to the pool, and the failed graph's hold on it is dropped. Private:
    `torch._C._cuda_endAllocateToPool` and `_cuda_releasePool`.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # It came that far: then `CUDAGraph.reset` does the rest.
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


@dataclass(eq=False, slots=True)
class _Recorded:
    """What the twin keeps of a call: itself, and the static memory of its outputs."""

    call: Call
    own: list[Tensor | None]


class TwinDevice:
    """The CPU twin: a replay runs the call again and copies its outputs to where they always are.

    Outputs hold poison before the first replay and, in every graph of the pool, from the start of
    any replay: reading an output late gives NaN (or -7) instead of luck.
    """

    def __init__(self) -> None:
        """No graphs."""
        self._live: list[Captured] = []

    def warm(self, call: Call) -> None:
        """See the protocol."""
        call()

    def capture(self, call: Call, held: set[int]) -> Captured:
        """See the protocol. The call runs, to see what it returns."""
        with twin_capture():
            results = call()
        flat, spec = pytree.tree_flatten(results)
        own = [_own(leaf, held) for leaf in flat]
        outputs = [leaf if mine is None else mine for leaf, mine in zip(flat, own, strict=True)]
        captured = Captured(pytree.tree_unflatten(outputs, spec), _Recorded(call, own))
        _poison(captured)
        self._live.append(captured)
        return captured

    def replay(self, graph: Captured) -> None:
        """See the protocol."""
        for other in self._live:
            _poison(other)
        recorded: _Recorded = graph.handle
        with torch.no_grad():
            results = pytree.tree_leaves(recorded.call())
            for mine, result in zip(recorded.own, results, strict=True):
                if mine is not None:
                    mine.copy_(result)

    def release(self, graph: Captured) -> None:
        """See the protocol."""
        _poison(graph)
        self._live.remove(graph)
        graph.outputs = None


def _own(leaf: Any, held: set[int]) -> Tensor | None:
    """Static memory for an output; None for one that is no new memory."""
    if not isinstance(leaf, Tensor) or leaf.untyped_storage().data_ptr() in held:
        return None
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


def _poison(graph: Captured) -> None:
    recorded: _Recorded = graph.handle
    with torch.no_grad():
        for mine in recorded.own:
            if mine is not None:
                mine.fill_(poison(mine.dtype))


def graph_device(device: torch.device) -> GraphDevice:
    """The graphs of a device: real on CUDA, the twin elsewhere."""
    return CudaDevice(device) if device.type == "cuda" else TwinDevice()
