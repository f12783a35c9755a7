"""What an emitted module calls while it runs: streams, events, and a trace of both on CPU.

Python order is the schedule. On CUDA every event is a real event and `comm` a real stream; the
compute stream is the one that is current when the call starts, so a Full CUDA graph captures the
whole call. On CPU there are no streams: everything runs in program order, and the trace says which
order a device would have been told.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

from dbo_fx.counters import Counters
from dbo_fx.errors import CommunicationError
from dbo_fx.ir import COMM, COMP
from dbo_fx.sm_limits import SmLimits


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One thing that happened: `kind` is `use`, `record` or `wait`."""

    kind: str
    stream: str
    event: int | None = None

    def __str__(self) -> str:
        """`comm wait e3`."""
        return f"{self.stream} {self.kind}" + ("" if self.event is None else f" e{self.event}")


_entry = cache(TraceEntry)  # A program makes the same ones in every call.


class _CommStreams(threading.local):
    """The communication streams of one thread, by index of the device."""

    def __init__(self) -> None:
        """None yet."""
        self.by_device: dict[int, torch.cuda.Stream] = {}


_COMM_STREAMS = _CommStreams()


def comm_stream(device: torch.device) -> torch.cuda.Stream:
    """The communication stream of a device, of high priority: one for all programs of a thread.

    torch hands streams out of a ring, so a stream for each program would sooner or later be the one
    that a library took from there. Threads have streams of their own: their programs are not
    ordered among each other, and one may be captured while another runs.

    Args:
        device: The device.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    known = _COMM_STREAMS.by_device
    if index not in known:
        known[index] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return known[index]


def has_comm_stream(device: torch.device) -> bool:
    """Whether this thread has its communication stream on a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return index in _COMM_STREAMS.by_device


class StreamPool:
    """The streams of one module on CUDA, by name.

    The compute stream is the caller's current one, so a capture of the caller's stream captures the
    call. There is one communication stream (`comm_stream`): it orders all communication.

    Args:
        device: Where the streams are.
    """

    def __init__(self, device: torch.device) -> None:
        """Create no stream yet: that happens on first use, on the device of the rank."""
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def __getitem__(self, name: str) -> torch.cuda.Stream:
        """The stream with this name, once `begin` has been called."""
        return self._streams[name]

    def begin(self) -> None:
        """Start a call: the current stream becomes the compute stream.

        Raises:
            CommunicationError: The first call is captured, when libraries cannot make what they
                need on these streams (communicators, handles, workspaces); the call before it does.
        """
        is_first = COMM not in self._streams or not has_comm_stream(self.device)
        if is_first and torch.cuda.is_current_stream_capturing():
            raise CommunicationError(
                "this program is captured in a CUDA graph before it ever ran in this thread: the "
                "communicators and handles of its streams cannot be made during a capture. Run the "
                "model once on such inputs, then capture."
            )
        stream, before = comm_stream(self.device), self._streams.get(COMM)
        if before not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(before)  # Another thread ran it last.
        self._streams[COMM] = stream
        self._streams[COMP] = torch.cuda.current_stream(self.device)

    def abandon(self) -> None:
        """Return to the compute stream after a call that raised half-way, and join the other one.

        What the program allocated is about to be free for the compute stream, and a communication
        may still read or write it. And a capture with a loose end cannot be ended.
        """
        if COMP not in self._streams:
            return
        is_captured = {name: self._is_captured(name) for name in (COMP, COMM)}
        torch.cuda.set_stream(self._streams[COMP])
        # A capture that has not forked to the communication stream may not wait for it.
        if is_captured[COMP] == is_captured[COMM]:
            with suppress(RuntimeError):  # A spoilt capture takes no more work.
                self._streams[COMP].wait_stream(self._streams[COMM])

    def _is_captured(self, name: str) -> bool:
        with torch.cuda.stream(self._streams[name]):
            return torch.cuda.is_current_stream_capturing()


class Runtime(torch.nn.Module):
    """Streams and events of one emitted module.

    Args:
        device: Where the module's tensors live.
        counters: Progress counters, if the module calls `start` and `finish`.

    Attributes:
        trace: On CPU, what the last call did; on CUDA empty, there the streams themselves did it.
    """

    def __init__(self, device: torch.device, counters: Counters | None = None) -> None:
        """Create no stream and no event yet."""
        super().__init__()
        self.device = device
        self._is_cuda = device.type == "cuda"
        self.counters = counters
        self.trace: list[TraceEntry] = []
        self._streams = StreamPool(device)
        self._events: dict[int, torch.cuda.Event] = {}
        self.limits = SmLimits(device)

    @property
    def is_cuda(self) -> bool:
        """Whether streams and events are real."""
        return self._is_cuda

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a CUDA graph."""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """Start a call: the current stream becomes the compute stream."""
        self.trace.clear()
        self.limits.enter()
        if self.is_cuda:
            self._streams.begin()
        if self.counters is not None:
            self.counters.begin()

    def end(self) -> None:
        """End a call of a program that shares SMs: put back what held before it."""
        self.limits.leave()

    def use(self, stream: str) -> None:
        """Launch what follows on this stream."""
        if self.is_cuda:
            torch.cuda.set_stream(self._streams[stream])
        else:
            self.trace.append(_entry("use", stream))

    def record(self, event: int, stream: str) -> None:
        """Record an event on a stream."""
        if not self.is_cuda:
            self.trace.append(_entry("record", stream, event))
            return
        if event not in self._events:
            self._events[event] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._events[event].record(self._streams[stream])

    def wait(self, event: int, stream: str) -> None:
        """Let a stream wait for an event."""
        if self.is_cuda:
            self._streams[stream].wait_event(self._events[event])
        else:
            self.trace.append(_entry("wait", stream, event))

    def start(self, index: int, stream: str) -> None:
        """Count that action number `index` of a stream starts."""
        self.counters.started[stream] = index  # type: ignore[union-attr]

    def finish(self, index: int, stream: str) -> None:
        """Count, on that stream, that action number `index` is finished."""
        self.counters.finish(index, stream)  # type: ignore[union-attr]

    def abandon(self) -> None:
        """Return to the compute stream after a call that raised half-way."""
        self.limits.leave()
        if self.is_cuda:
            self._streams.abandon()
