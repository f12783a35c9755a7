"""One operation by copies into and out of staging memory that all ranks see.

    all_gather, all_to_all    copy the own rows into the own half; barrier; copy what the peers have
                              for this rank out of their halves into the outputs
    reduce_scatter_sum        copy every peer's part into its half; barrier; add up what has come

Which half an operation takes, and why one barrier is enough, is told in `peer_links`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dbo_fx.comm.staging import Staging

ALIGNMENT_BYTES = 256


def needed_bytes(inputs: Sequence[Tensor]) -> int:
    """Bytes of a half that one operation takes."""
    return sum(_aligned(t.numel() * t.element_size()) for t in inputs)


def exchange(
    staging: Staging,
    index: int,
    collective: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rank: int,
    ranks: int,
) -> None:
    """Run one operation on the current stream (CPU: on the host).

    Args:
        staging: Memory of the group; a half holds at least `needed_bytes(inputs)`.
        index: Which half.
        collective: A name in `collectives.COLLECTIVES`.
        inputs: Contiguous tensors of this rank, rows first.
        outputs: One contiguous tensor for each.
        rank: This rank in the group.
        ranks: R, the size of the group.
    """
    peers = [(rank + step) % ranks for step in range(1, ranks)]
    pairs = list(zip(inputs, outputs, _places(inputs), strict=True))

    def staged(peer: int, place: slice, like: Tensor) -> Tensor:
        return staging.half(peer, index)[place].view(like.dtype).view(like.shape)

    if collective == "reduce_scatter_sum":
        for source, _, place in pairs:
            parts = rows_by_rank(source, ranks)
            for peer in peers:
                staged(peer, place, parts)[rank].copy_(parts[peer])
        staging.barrier()
        for source, output, place in pairs:
            parts = rows_by_rank(source, ranks)
            _add_up(parts[rank], staged(rank, place, parts), output, rank)
        return
    for source, _, place in pairs:
        staged(rank, place, source).copy_(source)
    staging.barrier()
    for source, output, place in pairs:
        landing = rows_by_rank(output, ranks)
        shape = (1, *source.shape) if collective == "all_gather" else landing.shape
        part = 0 if collective == "all_gather" else rank
        for peer in peers:
            landing[peer].copy_(staged(peer, place, source).view(shape)[part])
        landing[rank].copy_(source.view(shape)[part])


def rows_by_rank(tensor: Tensor, ranks: int) -> Tensor:
    """[R*n, ...] rows as [R, n, ...]."""
    return tensor.view(ranks, tensor.shape[0] // ranks, *tensor.shape[1:])


def _add_up(own: Tensor, staged: Tensor, output: Tensor, rank: int) -> None:
    """Sum over the ranks in their order; more than two terms are rounded once."""
    if len(staged) == 1:
        output.copy_(own)
    elif len(staged) == 2:
        first, second = (own, staged[1]) if rank == 0 else (staged[0], own)
        torch.add(first, second, out=output)
    else:
        staged[rank].copy_(own)
        torch.sum(staged, 0, dtype=output.dtype, out=output)


def _places(inputs: Sequence[Tensor]) -> Iterator[slice]:
    start = 0
    for tensor in inputs:
        size = tensor.numel() * tensor.element_size()
        yield slice(start, start + size)
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
