"""What the device part of a graph asks of CUDA, in which order; a recorder stands for CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dbo_fx import graph_device, runtime
from dbo_fx.errors import CommunicationError
from dbo_fx.graph_device import CudaDevice, TwinDevice
from dbo_fx.graph_device import graph_device as device_for
from dbo_fx.ir import COMM, COMP
from dbo_fx.runtime import Runtime

DEVICE = torch.device("cuda", 0)


class Cuda:
    """Records calls; knows the current stream and which streams are captured."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current: Any = Stream(self, "caller")
        self.capturing: set[str] = set()
        self.names = iter(["first", "second", "third"])
        self.end_fails = False
        for name in ("current_stream", "set_stream", "stream", "Stream", "synchronize", "CUDAGraph",
                     "empty_cache", "graph_pool_handle", "is_current_stream_capturing",
                     "current_device"):  # fmt: skip
            patch.setattr(torch.cuda, name, getattr(self, name, self.noted(name)))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patch.setattr(torch._C, name, self.noted(name), raising=False)
        patch.setattr(graph_device, "make_handles", lambda device: self.note("handles"))

    def note(self, what: str) -> None:
        self.log.append(f"{self.current}: {what}")

    def noted(self, what: str) -> Any:
        return lambda *args, **kwargs: self.note(what)

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def Stream(self, device: Any, priority: int = 0) -> Any:
        return Stream(self, next(self.names) + ("" if not priority else f" of priority {priority}"))

    def CUDAGraph(self) -> Any:
        return Graph(self)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.note("new pool")
        return (0, len(self.log))

    def is_current_stream_capturing(self) -> bool:
        return str(self.current) in self.capturing

    def current_device(self) -> int:
        return 0


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def __str__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self} waits for {other}")
        if other.name in self.cuda.capturing:
            self.cuda.capturing.add(self.name)

    def wait_event(self, event: Any) -> None:
        self.cuda.log.append(f"{self} waits for an event")


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.cuda.note(f"begin, {capture_error_mode}")
        self.cuda.capturing.add(str(self.cuda.current))

    def capture_end(self) -> None:
        self.cuda.note("end")
        self.cuda.capturing.clear()
        if self.cuda.end_fails:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.cuda.note("replay")

    def reset(self) -> None:
        self.cuda.note("reset")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    graph_device._capture_stream.cache_clear()
    monkeypatch.setattr(runtime, "_COMM_STREAMS", runtime._CommStreams())
    yield Cuda(monkeypatch)
    graph_device._capture_stream.cache_clear()


def test_warm_up_runs_where_the_capture_runs_with_handles_made_first(cuda: Cuda) -> None:
    CudaDevice(DEVICE).warm(lambda: cuda.note("call"))
    assert cuda.log == [
        "first waits for caller",
        "first: handles",
        "first: call",
        "caller waits for first",
    ]


def test_a_capture_and_a_replay(cuda: Cuda) -> None:
    device = CudaDevice(DEVICE)
    graph = device.capture(lambda: cuda.note("call") or 7, set())
    device.replay(graph)
    assert graph.outputs == 7
    assert cuda.log == [
        "caller: synchronize",
        "caller: empty_cache",
        "caller: new pool",
        "first: begin, thread_local",
        "first: call",
        "first: end",
        "caller: replay",
    ]


def test_all_captures_share_a_stream(cuda: Cuda) -> None:
    assert CudaDevice(DEVICE).stream is CudaDevice(DEVICE).stream


def test_all_graphs_share_a_pool_which_goes_with_the_last_one(cuda: Cuda) -> None:
    device = CudaDevice(DEVICE)
    one, two = (device.capture(lambda: None, set()) for _ in range(2))
    assert sum("new pool" in line for line in cuda.log) == 1
    device.release(one)
    assert device.pool is not None
    device.release(two)
    assert device.pool is None
    device.capture(lambda: None, set())
    assert sum("new pool" in line for line in cuda.log) == 2


def fails() -> None:
    raise ZeroDivisionError


def test_a_failed_capture_is_ended_and_forgotten(cuda: Cuda) -> None:
    device = CudaDevice(DEVICE)
    with pytest.raises(ZeroDivisionError):
        device.capture(fails, set())
    assert cuda.log[-4:] == [
        "first: begin, thread_local",
        "first: end",
        "first: reset",
        "first: empty_cache",
    ]
    assert str(cuda.current) == "caller"
    assert device.pool is None
    assert not cuda.capturing


@pytest.mark.parametrize("call", [fails, lambda: None])
def test_a_spoilt_capture_lets_go_of_the_pool(cuda: Cuda, call: Any) -> None:
    cuda.end_fails = True
    device = CudaDevice(DEVICE)
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        device.capture(call, set())
    assert [line.partition(": ")[2] for line in cuda.log[-4:]] == [
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
        "reset",
        "empty_cache",
    ]
    assert str(cuda.current) == "caller"


def program(cuda: Cuda) -> Runtime:
    found = Runtime(DEVICE)
    found.begin()
    return found


def test_the_communication_stream_is_made_once(cuda: Cuda) -> None:
    found = program(cuda)
    found.begin()
    found.use(COMM)
    assert str(cuda.current) == "first of priority -1"
    found.use(COMP)
    assert str(cuda.current) == "caller"


def test_programs_of_a_thread_share_the_communication_stream(cuda: Cuda) -> None:
    one, other = program(cuda), program(cuda)
    assert one._streams[COMM] is other._streams[COMM]
    with ThreadPoolExecutor(1) as pool:
        apart = pool.submit(program, cuda).result()
    assert apart._streams[COMM] is not one._streams[COMM]


def test_a_first_call_under_capture_is_refused(cuda: Cuda) -> None:
    cuda.capturing.add("caller")
    with pytest.raises(CommunicationError, match="before it ever ran"):
        program(cuda)


def test_a_call_that_fails_joins_its_streams(cuda: Cuda) -> None:
    """Its memory is free then, and a communication may still write it."""
    found = program(cuda)
    found.use(COMM)
    found.abandon()
    assert cuda.log == ["caller waits for first of priority -1"]
    assert str(cuda.current) == "caller"


def test_a_call_that_fails_under_capture_joins_what_has_forked(cuda: Cuda) -> None:
    found = program(cuda)
    cuda.capturing.add("caller")
    found.abandon()
    assert cuda.log == []
    cuda.capturing.add("first of priority -1")
    found.use(COMM)
    found.abandon()
    assert cuda.log == ["caller waits for first of priority -1"]
    assert str(cuda.current) == "caller"


def test_the_twin_stands_for_all_but_cuda() -> None:
    assert isinstance(device_for(torch.device("cpu")), TwinDevice)
