"""How the rows of a Hugging Face model's experts travel: in any order, or batched by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dbo_fx.comm  # noqa: F401  (registers torch.ops.dbo_fx)
from dbo_fx.comm.expert_layouts import BLOCK, dequantised, quantised
from dbo_fx.errors import OptionError
from dbo_fx.experts import Gated, run_batched

LAYOUTS = ("rows", "batched")
# (module, rows, ids counted on this rank, weights) -> contributions.
Experts = Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How rows travel.

    Attributes:
        group: Name of the process group.
        experts: E, over all ranks.
        max_tokens: M of the batched layout; None for rows in any order.
        fp8: Whether rows travel as float8 with scales.
    """

    group: str
    experts: int
    max_tokens: int | None = None
    fp8: bool = False

    def forward(
        self, module: Any, hidden: Tensor, ids: Tensor, weights: Tensor, local: Experts
    ) -> Tensor:
        """Dispatch, this rank's experts, combine.

        Args:
            module: The experts module, sharded.
            hidden: [T, H].
            ids: [T, K].
            weights: [T, K].
            local: Runs experts on rows in any order.

        Returns:
            [T, H].
        """
        if weights.dtype in (torch.bfloat16, torch.float16):
            weights = weights.float()  # What DeepEP carries; exact.
        if self.max_tokens is not None:
            return self._batched(module, hidden, ids, weights, self.max_tokens)
        ops, group = torch.ops.dbo_fx, self.group
        tokens = hidden.shape[0]
        if self.fp8:
            small, scales = quantised(hidden)
            rows, scales, ids, weights = ops.dispatch_fp8(
                small, scales, ids, weights, group, self.experts
            )
            rows = dequantised(rows, scales, hidden.dtype)
        else:
            rows, ids, weights = ops.dispatch(hidden, ids, weights, group, self.experts)
        y = local(module, rows, ids - module.dbo_fx_first_expert, weights)
        combined: Tensor = ops.combine(y, tokens, group)
        return combined

    def _batched(
        self, module: Any, hidden: Tensor, ids: Tensor, weights: Tensor, most: int
    ) -> Tensor:
        ops, sizes = torch.ops.dbo_fx, (self.group, most, self.experts)
        rows, scales, counts, src, ranges = ops.dispatch_batched(hidden, ids, *sizes, self.fp8)
        experts = Gated(module.gate_up_proj, module.down_proj, module._apply_gate)
        y = run_batched(experts, rows, scales, counts, ids.shape[1])
        combined: Tensor = ops.combine_batched(y, ids, weights, src, ranges, *sizes)
        return combined


def check_layout(
    layout: str, max_tokens: int | None, fp8: bool, routing: str, hidden: int | None
) -> None:
    """Refuse options of `expert_parallel` that mean nothing together.

    Args:
        layout: "rows" or "batched".
        max_tokens: M, for "batched".
        fp8: Whether rows travel as float8.
        routing: The option of that name.
        hidden: H, if it is known.

    Raises:
        OptionError: Names what was found and what is wanted.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"expert_parallel: layout={layout!r}: use one of {list(LAYOUTS)}.")
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if layout == "batched" and not (whole and max_tokens is not None and max_tokens > 0):
        raise OptionError(
            f"expert_parallel: layout='batched' with max_tokens={max_tokens!r}: wanted the most "
            "tokens that a rank has in one microbatch, or in the whole batch where it is not split."
        )
    if layout == "rows" and max_tokens is not None:
        raise OptionError(
            f"expert_parallel: max_tokens={max_tokens} belongs to layout='batched'. Add it, or "
            "leave max_tokens out."
        )
    if routing == "all_to_all" and (layout != "rows" or fp8):
        raise OptionError(
            f"expert_parallel: layout={layout!r} and fp8={fp8} do not go with "
            "routing='all_to_all', which packs rows its own way. Leave routing out."
        )
    if fp8 and hidden is not None and hidden % BLOCK:
        raise OptionError(
            f"expert_parallel: fp8 needs a hidden size that is a multiple of {BLOCK}, found "
            f"{hidden}."
        )
