"""What DeepEP's CUDA transports have in common: Buffers by group, and checks before any kernel."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.buffers import compute_stream
from dbo_fx.comm.expert_layouts import FP8
from dbo_fx.errors import CommunicationError

TIMEOUT_S = 60.0
_OPEN: list[Any] = []


def open_buffer(transport: str, group: str, sizes: str, make: Callable[[], Any]) -> Any:
    """Make a Buffer, together with the other ranks.

    Args:
        transport: For messages.
        group: Name of the process group.
        sizes: What it is made for; must be equal on all ranks.
        make: Makes it.

    Returns:
        The Buffer; destroyed at the end of the process, or by `close_buffers`.

    Raises:
        CommunicationError: Under capture, or the ranks' sizes differ.
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
    buffer = make()
    _OPEN.append(buffer)
    return buffer


def close_buffers() -> None:
    """Destroy all Buffers, newest first. Graphs that were captured with them must not run again."""
    if _OPEN and torch.cuda.is_available():
        torch.cuda.synchronize()
    while _OPEN:
        _OPEN.pop().destroy()


def check_rows(name: str, x: Tensor, ids: Tensor, weights: Tensor | None) -> None:
    """Refuse types that DeepEP's kernels do not take; they would abort the process.

    Args:
        name: The operation, for messages.
        x: [T, H].
        ids: [T, K].
        weights: [T, K], if they travel.

    Raises:
        CommunicationError: Names what was found and what is wanted.
    """
    wanted = [
        (x.dtype in (torch.bfloat16, FP8), f"rows of {x.dtype}", "bfloat16 or float8_e4m3fn"),
        (ids.dtype == torch.int64, f"ids of {ids.dtype}", "int64"),
        (weights is None or weights.dtype == torch.float32, "other weights", "float32"),
        (x.shape[-1] % 128 == 0, f"hidden size {x.shape[-1]}", "a multiple of 128"),
    ]
    for right, found, want in wanted:
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
