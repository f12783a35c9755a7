"""Gated experts on the batched layout: of `rows` [E, S, H] expert e has the first `counts[e]`.

What lies behind is garbage and is never used: rows are picked by `where` or by index, not
multiplied by zero, since 0 * NaN is NaN. All shapes are static, nothing depends on values. (Experts
on rows in any order are in `dbo_fx.integrations.transformers`: sorted, then the same grouped matmul
with `offs`.)

Two forms. `dense` multiplies all E * S rows, garbage as zeros: few ops, for CPUs and few rows.
`packed` moves the rows that are there together and runs grouped matmuls over these alone; S is R
times the most tokens of a rank, and most of it is garbage as a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo_fx.comm.expert_layouts import dequantised


@dataclass(frozen=True, slots=True)
class Gated:
    """Weights of gated experts.

    Attributes:
        gate_up: [E, 2I, H].
        down: [E, H, I].
        gate: [N, 2I] -> [N, I], the activation.
    """

    gate_up: Tensor
    down: Tensor
    gate: Callable[[Tensor], Tensor]


def run_batched(experts: Gated, rows: Tensor, scales: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """Run experts on batched rows, as `dispatch_batched` gives them.

    Args:
        experts: The experts.
        rows: [E, S, H], float8 if there are scales.
        scales: [E, S, H / 128], or [E, S, 0].
        counts: [E].
        top_k: K, how many experts a token chooses: at most S * K rows are there.

    Returns:
        [E, S, H]; zeros where no row is.
    """
    use_grouped = rows.is_cuda and experts.down.dtype == torch.bfloat16
    run = packed if use_grouped else dense
    return run(experts, rows, scales, counts, top_k)


def is_there(rows: Tensor, counts: Tensor) -> Tensor:
    """Which rows are no garbage: [E, S, 1]."""
    place = torch.arange(rows.shape[1], device=rows.device)
    return (place < counts.unsqueeze(1)).unsqueeze(-1)


def dense(experts: Gated, rows: Tensor, scales: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """Run every row; see `run_batched`."""
    x = torch.where(is_there(rows, counts), _opened(experts, rows, scales), 0)
    inner = experts.gate(torch.matmul(x, experts.gate_up.transpose(1, 2)))
    return torch.matmul(inner, experts.down.transpose(1, 2))


def packed(experts: Gated, rows: Tensor, scales: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """Run the rows that are there; see `run_batched`."""
    number, room = rows.shape[:2]
    most = min(number * room, room * top_k)
    ends = counts.cumsum(0)
    starts = ends - counts
    # Row p of the packed ones is of expert e; behind the last one, of any.
    place = torch.arange(most, device=rows.device)
    expert = torch.searchsorted(ends, place, right=True)
    first = torch.cat((starts, ends[-1:]))
    source = (expert * room + place - first[expert]) % (number * room)
    x = rows.flatten(0, 1)[source]
    x = _opened(experts, x, scales.flatten(0, 1)[source])
    offs = ends.to(torch.int32)
    inner = F.grouped_mm(x, experts.gate_up.transpose(1, 2), offs=offs)
    out = F.grouped_mm(experts.gate(inner), experts.down.transpose(1, 2), offs=offs)
    target = starts.unsqueeze(1) + torch.arange(room, device=rows.device)
    return torch.where(is_there(rows, counts), out[target % most], 0)


def _opened(experts: Gated, rows: Tensor, scales: Tensor) -> Tensor:
    """Rows in the experts' type."""
    return rows if not scales.shape[-1] else dequantised(rows, scales, experts.down.dtype)
