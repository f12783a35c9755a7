"""Exchanges that are more than a collective: a dispatch or combine of rows, as one operation.

Like a collective, an exchange goes by a text, which sends and certificates carry:

| text | inputs of a rank | outputs |
|---|---|---|
| `rows_dispatch E` | x [T, H], (scales,) ids, weights [T, K] | the same with R*T rows |
| `rows_combine` | y [R*T, H] | [T, H] |
| `batched_dispatch M E` (`fp8`) | x [T, H], ids [T, K] | rows [E/R, R*M, H] and what follows |
| `batched_combine M E` | y [E/R, R*M, H], ids, weights [T, K], src, ranges | [T, H] |

`rows`: rows come in any order; those that have no choice on this rank are garbage, whose ids are
no experts of this rank.
`batched`: rows, scales [E/R, R*M, H/128 or 0], counts [E/R], src [E/R, R*M], ranges [E/R, R].
Expert e of this rank has `counts[e]` rows, those behind are garbage. The rows of rank s are `n` of
them from `begin` on, `ranges[e, s] = begin << 32 | n`, and `src` says which of its tokens each was.
With `fp8` rows are float8_e4m3fn with one float32 scale for 128 values; `scales` is empty
without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dbo_fx.errors import CommunicationError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
ROWS_COMBINE = "rows_combine"


@dataclass(frozen=True, slots=True)
class Batched:
    """Sizes of a batched exchange.

    Attributes:
        max_tokens: M, the most tokens of one rank in one operation.
        experts: E, over all ranks.
        fp8: Whether rows travel as float8 with scales.
    """

    max_tokens: int
    experts: int
    fp8: bool = False

    def dispatch(self) -> str:
        """The text of the dispatch."""
        return f"batched_dispatch {self.max_tokens} {self.experts}{' fp8' if self.fp8 else ''}"

    def combine(self) -> str:
        """The text of the combine, the same for either dispatch."""
        return f"batched_combine {self.max_tokens} {self.experts}"

    def slots(self, ranks: int) -> tuple[int, int]:
        """Experts of a rank, and rows that each has room for."""
        return self.experts // ranks, ranks * self.max_tokens


@cache  # Every send and every allocation asks.
def kind_of(exchange: str) -> str:
    """Return what a transport's contract calls it: "collectives", "rows" or "batched"."""
    word = exchange.split("_", 1)[0]
    return word if word in ("rows", "batched") else "collectives"


def batched(exchange: str) -> Batched:
    """Read the text of a batched exchange."""
    _, max_tokens, experts, *more = exchange.split()
    return Batched(int(max_tokens), int(experts), more == ["fp8"])


def rows_dispatch(experts: int) -> str:
    """Return the text of a dispatch of rows."""
    return f"rows_dispatch {experts}"


def experts_of(exchange: str) -> int:
    """Return E of a `rows_dispatch`."""
    return int(exchange.split()[1])


def check_batched(exchange: str, inputs: Sequence[Tensor], group: str, ranks: int) -> None:
    """Refuse sizes that do not fit together, before any rank communicates.

    Raises:
        CommunicationError: R does not divide E, more tokens than M, or rows of another size.
    """
    sizes = batched(exchange)
    found = _misfit(sizes, exchange.split("_")[1].split()[0], inputs, ranks)
    if found:
        raise CommunicationError(f"{exchange.split()[0]} over group {group!r}: {found}")


def _misfit(sizes: Batched, kind: str, inputs: Sequence[Tensor], ranks: int) -> str:
    if sizes.experts % ranks:
        return (
            f"{sizes.experts} experts cannot be shared evenly by {ranks} ranks. Use a group whose "
            "size divides the number of experts."
        )
    tokens = inputs[0 if kind == "dispatch" else 1].shape[0]
    if tokens > sizes.max_tokens:
        return (
            f"found {tokens} tokens, wanted at most max_tokens={sizes.max_tokens}. Raise "
            "max_tokens (the same on every rank), or give the region smaller batches."
        )
    if kind == "dispatch" and sizes.fp8 and inputs[0].shape[1] % BLOCK:
        return f"fp8 needs a hidden size that is a multiple of {BLOCK}, found {inputs[0].shape[1]}."
    wanted = sizes.slots(ranks)
    if kind == "combine" and tuple(inputs[0].shape[:2]) != wanted:
        return (
            f"y is {list(inputs[0].shape)}, wanted [{wanted[0]}, {wanted[1]}, H]: the rows of the "
            "dispatch that this combine belongs to, every one at its place."
        )
    return ""


def outputs_of(exchange: str, inputs: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Allocate what comes out, uninitialised; sizes may be symbolic.

    Args:
        exchange: The text of an exchange.
        inputs: What goes in.
        ranks: R.

    Returns:
        The outputs, on the inputs' device.
    """
    if exchange.startswith("rows_dispatch"):
        return [t.new_empty((t.shape[0] * ranks, *t.shape[1:])) for t in inputs]
    if exchange == ROWS_COMBINE:
        return [inputs[0].new_empty((inputs[0].shape[0] // ranks, *inputs[0].shape[1:]))]
    sizes = batched(exchange)
    local, room = sizes.slots(ranks)
    if exchange.startswith("batched_combine"):
        y, ids = inputs[0], inputs[1]
        return [y.new_empty((ids.shape[0], y.shape[2]))]
    x = inputs[0]
    hidden: Any = x.shape[1]
    rows = x.new_empty((local, room, hidden), dtype=FP8 if sizes.fp8 else x.dtype)
    blocks = hidden // BLOCK if sizes.fp8 else 0
    # The kernels write one row's scales a whole column apart.
    scales = x.new_empty((local, blocks, room), dtype=torch.float32).transpose(1, 2)
    return [
        rows,
        scales,
        x.new_empty((local,), dtype=torch.int32),
        x.new_empty((local, room), dtype=torch.int32),
        x.new_empty((local, ranks), dtype=torch.int64),
    ]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows to float8, with one scale for each 128 values of a row.

    Args:
        x: [..., H], H a multiple of 128.

    Returns:
        [..., H] float8_e4m3fn, and [..., H / 128] float32 scales.

    Source:
        `per_token_cast_to_fp8` in DeepEP's tests, and `internode_ll.cu`.
    """
    blocks = torch.unflatten(x.float(), -1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(1e-4)
    small = (blocks * (FP8_MAX / largest)).to(FP8)
    return small.flatten(-2), (largest / FP8_MAX).squeeze(-1)


def dequantised(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `quantised`, but for rounding.

    Args:
        rows: [..., H] float8_e4m3fn.
        scales: [..., H / 128].
        dtype: What comes out.

    Returns:
        [..., H].
    """
    blocks = torch.unflatten(rows.to(torch.float32), -1, (-1, BLOCK))
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)
