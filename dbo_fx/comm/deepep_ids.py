"""V2's ids made those of all ranks' experts, by one kernel: a decode step has no time for three.

Imported where the first of them runs on a GPU, since it needs Triton, which torch brings for CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _renumber(ids, count, first, size, top_k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(ids + at, mask=inside, other=-1)
    is_row = at // top_k < tl.load(count)
    tl.store(ids + at, tl.where(is_row, found, -1) + first, mask=inside)


def renumber(ids: Tensor, count: Tensor, first: int) -> None:
    """Write `where(row < count, ids, -1) + first` over ids.

    Args:
        ids: [N, K], contiguous, on a GPU.
        count: How many rows there are; one whole number, there too.
        first: The rank's first expert.
    """
    size = ids.numel()
    if not size:
        return
    _renumber[(triton.cdiv(size, BLOCK),)](ids, count, first, size, ids.shape[1], BLOCK=BLOCK)
