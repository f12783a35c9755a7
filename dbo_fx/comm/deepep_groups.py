"""What DeepEP's CUDA transports have in common: Buffers by group, and checks before any kernel."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.buffers import compute_stream
from dbo_fx.errors import CommunicationError
from dbo_fx.runtime import comm_stream

TIMEOUT_S = 60.0
# More than torch's ring of streams has.
MOST_STREAMS = 64


@dataclass(slots=True)
class Opened:
    """A Buffer of DeepEP's.

    Attributes:
        buffer: DeepEP's own.
        what: Whose it is, for messages.
        forget: Makes its transport forget it when it is destroyed.
        failed: Why it must not be used any more; empty if nothing failed.
    """

    buffer: Any
    what: str
    forget: Callable[[], object]
    failed: str = ""

    def require(self) -> None:
        """Refuse a Buffer that is closed, or that nobody knows the state of.

        Raises:
            CommunicationError: It is closed, or a launch of its kernels failed before.
        """
        if self.failed:
            raise CommunicationError(
                f"{self.what}: the Buffer cannot be used any more: {self.failed}. Call "
                "dbo_fx.comm.deepep_groups.close_buffers() on every rank: the next eager call "
                "makes a new one, and graphs must be captured anew."
            )

    @contextmanager
    def launching(self, name: str) -> Iterator[Any]:
        """Give the Buffer for a launch; one that fails makes it unusable.

        Args:
            name: What to call the operation in errors.

        Raises:
            CommunicationError: The launch failed, or one before it.
        """
        self.require()
        try:
            yield self.buffer
        except BaseException as error:
            self.failed = (
                f"{name} failed with {type(error).__name__}: {error}. DeepEP may have changed its "
                "state before, and the other ranks' Buffers may be elsewhere"
            )
            if not isinstance(error, Exception):
                raise
            try:
                self.require()
            except CommunicationError as told:
                raise told from error


_OPEN: list[Opened] = []


def open_buffer(
    transport: str,
    group: str,
    sizes: str,
    make: Callable[[], Any],
    forget: Callable[[], object],
) -> Opened:
    """Make a Buffer, together with the other ranks.

    Args:
        transport: For messages.
        group: Name of the process group.
        sizes: What it is made for; must be equal on all ranks.
        make: Makes it.
        forget: Makes the transport forget it when it is destroyed.

    Returns:
        The Buffer; destroyed at the end of the process, or by `close_buffers`.

    Raises:
        CommunicationError: Under capture, the ranks' sizes differ, or its stream is a program's.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CommunicationError(
            f"{transport}, group {group!r}: a Buffer for {sizes} does not exist yet, and making "
            "one is a rendezvous of all ranks, which cannot be captured. Run the program once with "
            "these sizes before the capture."
        )
    from dbo_fx.agree import compare_over_store  # It imports `comm`.
    from dbo_fx.errors import AgreementError

    try:
        compare_over_store(group, f"{transport} buffer", sizes, TIMEOUT_S)
    except AgreementError as error:
        raise CommunicationError(f"{transport}: {error}") from error
    if not _OPEN:
        atexit.register(close_buffers)
    what = f"{transport}, group {group!r}"
    taken = _streams_of_programs()
    if taken:
        pass_by(taken, _next_stream)
    opened = Opened(make(), what, forget)
    _OPEN.append(opened)
    if taken and opened.buffer.get_comm_stream() in taken:
        raise CommunicationError(
            f"{what}: DeepEP took the stream that this program runs on for its own, and would "
            "abort. Call the model on another stream, or start the process anew."
        )
    return opened


def _streams_of_programs() -> list[torch.cuda.Stream]:
    """What DeepEP must not take for its own: it asserts that its stream is another one."""
    if not torch.cuda.is_available():
        return []
    device = torch.device("cuda", torch.cuda.current_device())
    return [torch.cuda.current_stream(device), comm_stream(device)]


def _next_stream() -> torch.cuda.Stream:
    """The next one of the ring that DeepEP takes its stream from."""
    greatest = torch.cuda.Stream.priority_range()[1]  # type: ignore[call-arg]  # static
    return torch.cuda.Stream(priority=greatest)  # type: ignore[no-untyped-call]


def pass_by(taken: Sequence[torch.cuda.Stream], draw: Callable[[], torch.cuda.Stream]) -> None:
    """Turn torch's ring of streams until the next one is none of `taken`.

    Args:
        taken: Streams.
        draw: Takes the next stream of the ring.
    """
    ring = [draw()]
    while (stream := draw()) != ring[0] and len(ring) < MOST_STREAMS:
        ring.append(stream)
    for stream in ring[1:]:  # The first one was drawn again: behind it comes the second.
        if stream not in taken:
            return
        draw()


def close_buffers() -> None:
    """Destroy all Buffers, newest first, on all ranks together; the next eager call makes new ones.

    Graphs that were captured with them must not run again. Call it before
    `torch.distributed.destroy_process_group`: V2 meets the other ranks over the group's
    communicator.
    """
    if _OPEN and torch.cuda.is_available():
        torch.cuda.synchronize()
    while _OPEN:
        opened = _OPEN.pop()
        opened.forget()
        opened.failed = "it was closed"
        opened.buffer.destroy()


def check_rows(
    name: str,
    x: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    wanted: torch.dtype = torch.bfloat16,
) -> None:
    """Refuse types that DeepEP's kernels do not take; they would abort the process.

    Args:
        name: The operation, for messages.
        x: [T, H].
        ids: [T, K].
        weights: [T, K], if they travel.
        wanted: What x must be.

    Raises:
        CommunicationError: Names what was found and what is wanted.
    """
    checks = [
        (x.dtype == wanted, f"rows of {x.dtype}", str(wanted).removeprefix("torch.")),
        (ids.dtype == torch.int64, f"ids of {ids.dtype}", "int64"),
        (weights is None or weights.dtype == torch.float32, "other weights", "float32"),
        (x.shape[-1] % 128 == 0, f"hidden size {x.shape[-1]}", "a multiple of 128"),
    ]
    for right, found, want in checks:
        if not right:
            raise CommunicationError(f"{name}: found {found}, DeepEP wants {want}.")


def check_ranks(name: str, group: str, allowed: Sequence[int] | None) -> int:
    """Return R, or refuse a number of ranks that the kernels are not made for."""
    ranks = groups.world_size(group)
    if allowed is not None and ranks not in allowed:
        raise CommunicationError(
            f"{name}: group {group!r} has {ranks} ranks, DeepEP's kernels for one node are made "
            f"for {', '.join(map(str, allowed))}."
        )
    return ranks


def wait_for_compute(device: torch.device) -> None:
    """Let the current stream wait for all that was launched on the compute stream.

    DeepEP allocates what arrives on the current stream, whose allocator hands blocks out again as
    soon as the last reference is gone. Who read them ran on the compute stream.
    """
    compute = compute_stream(device)
    current = torch.cuda.current_stream(device)
    if compute is not None and compute != current:
        current.wait_stream(compute)


def show(outputs: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
    """Make the program's tensors be what arrived, without copying it."""
    for output, value in zip(outputs, arrived, strict=True):
        assert output.shape == value.shape, f"{output.shape} is not {value.shape}"
        output.set_(value)  # type: ignore[call-overload]
