"""The collectives that a dispatch or combine may be made of, all with even splits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.errors import CommunicationError

COLLECTIVES = ("all_gather", "reduce_scatter_sum", "all_to_all")


def output_rows(collective: str, rows: int, ranks: int) -> int:
    """Return the number of rows that comes out of a collective.

    Args:
        collective: A name in `COLLECTIVES`.
        rows: Rows of this rank's input, possibly symbolic.
        ranks: R, the size of the group.

    Returns:
        R times the rows, a 1/R-th of them, or as many.

    Raises:
        CommunicationError: Unknown collective.
    """
    match collective:
        case "all_gather":
            return rows * ranks
        case "reduce_scatter_sum":
            return rows // ranks
        case "all_to_all":
            return rows
        case _:
            raise _unknown(collective)


def check(collective: str, tensor: Tensor, group: str, ranks: int) -> None:
    """Refuse what the collective cannot carry, before any rank communicates.

    Args:
        collective: A name in `COLLECTIVES`.
        tensor: This rank's input.
        group: Name of the process group.
        ranks: R, its size.

    Raises:
        CommunicationError: Unknown collective, a tensor without dimensions, or rows that R does
            not divide where every rank gets an equal part.
    """
    if collective not in COLLECTIVES:
        raise _unknown(collective)
    if tensor.dim() == 0:
        raise CommunicationError(
            f"{collective} over group {group!r}: found a tensor without dimensions, wanted rows "
            "along dimension 0. Unsqueeze it first."
        )
    if collective != "all_gather" and tensor.shape[0] % ranks:
        raise CommunicationError(
            f"{collective} over group {group!r}: {tensor.shape[0]} rows do not divide evenly "
            f"among {ranks} ranks. Pad the input to a multiple of {ranks} rows."
        )


# torch 2.13 renamed these two and warns about the old names, which 2.11 still has.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def as_moved(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes: backends do not know float8, and what is moved may be bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def start(
    collective: str, output: Tensor, source: Tensor, group: str, *, asynchronous: bool
) -> Any:
    """Launch one collective.

    Args:
        collective: A name in `COLLECTIVES`.
        output: Contiguous tensor that receives the result.
        source: Contiguous input of this rank.
        group: Name of the process group.
        asynchronous: Return at once with a work to wait for. Otherwise the collective is ordered
            on the current stream (CUDA), or done on return (CPU).

    Returns:
        The work, or None if not asynchronous.

    Raises:
        CommunicationError: Unknown collective.
    """
    pg = groups.process_group(group)
    if collective != "reduce_scatter_sum":
        output, source = as_moved(output), as_moved(source)
    match collective:
        case "all_gather":
            return _ALL_GATHER(output, source, group=pg, async_op=asynchronous)
        case "reduce_scatter_sum":
            return _REDUCE_SCATTER(output, source, group=pg, async_op=asynchronous)
        case "all_to_all":
            return dist.all_to_all_single(output, source, group=pg, async_op=asynchronous)
        case _:
            raise _unknown(collective)


def _unknown(collective: str) -> CommunicationError:
    names = ", ".join(COLLECTIVES)
    return CommunicationError(f"unknown collective {collective!r}: use one of {names}")
