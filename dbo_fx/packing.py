"""Experts over an all-to-all: how rows are packed, and what happens to those without room.

Every rank gets a block of static capacity. Where a block holds the worst case, nothing can be lost.
A smaller one may be too small for a batch: then the tokens whose rows found no room come back as
NaN, and a counter on the device counts them, in captured graphs too; `overflow` reads the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb, inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dbo_fx.errors import OptionError
from dbo_fx.packing_ops import UNIT, wide_type, words_of

Copies = Literal["rank", "expert"]
COPIES = ("rank", "expert")
COUNTER = "dbo_fx_overflow"


@dataclass(frozen=True, slots=True)
class Packing:
    """How the experts of one layer get their rows over an all-to-all.

    Attributes:
        ranks: R, the ranks that share the experts.
        experts: E, experts over all ranks.
        copies: "rank": a token goes once to each rank that holds one of its experts, and comes
            back as one weighted sum a rank. "expert": it goes once for each choice, and its own
            rank weighs what comes back.
        capacity: Rows of a block: None for the worst case, a number of rows, or a factor over
            what a uniformly random choice of experts needs on average.
    """

    ranks: int
    experts: int
    copies: Copies = "rank"
    capacity: float | int | None = None

    def __post_init__(self) -> None:
        """Refuse what no block could be made of.

        Raises:
            OptionError: Unknown copies, or a capacity that is too small or no number.
        """
        if self.copies not in COPIES:
            raise OptionError(f"copies={self.copies!r}: use one of {list(COPIES)}.")
        number = self.capacity
        if number is None:
            return
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 1 <= number < inf:
            raise OptionError(
                f"capacity={number!r}; wanted None (the worst case), a whole number of rows, or a "
                "factor of at least 1.0 over the mean."
            )

    def may_overflow(self, top_k: int) -> bool:
        """Whether a batch exists that does not fit. K is `top_k`."""
        return self._share(top_k) < self._worst(top_k) * UNIT

    def _worst(self, top_k: int) -> int:
        """Rows per token that one block may need."""
        return 1 if self.copies == "rank" else top_k

    def _share(self, top_k: int) -> int:
        """Capacity in 1/1024 rows per token; 0 where it is a number of rows."""
        worst = self._worst(top_k) * UNIT
        if self.capacity is None:
            return worst
        if isinstance(self.capacity, int):
            return 0
        others = self.experts - self.experts // self.ranks
        mean = top_k / self.ranks
        if self.copies == "rank":
            mean = 1 - comb(others, top_k) / comb(self.experts, top_k)
        return min(worst, ceil(self.capacity * mean * UNIT))

    def pack(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fill one block for every rank; see `pack`."""
        share = self._share(ids.shape[1])
        rows = self.capacity if isinstance(self.capacity, int) else 0
        once = self.copies == "rank"
        packed: tuple[Tensor, Tensor, Tensor] = torch.ops.dbo_fx.pack(
            x, ids, weights, once, self.ranks, self.experts, share, rows
        )
        return packed

    def open(
        self, arrived: Tensor, x: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take packed rows apart, as views where types allow.

        Args:
            arrived: [R, C, W] words from every rank.
            x: [T, H] what this rank packed; for H and the type.
            weights: [T, K] the weights that this rank packed; for K and the type.

        Returns:
            Rows [R*C, H]; the experts [R*C, J] that each chose, counted on this rank, -1 for none,
            with J = K or, for copies "expert", 1; and their weights [R*C, J] or None.
        """
        words = arrived.flatten(0, 1)
        hidden = words_of(x.shape[1], x.dtype)
        rows = words[:, :hidden].view(x.dtype)
        if self.copies == "expert":
            return rows, words[:, hidden : hidden + 1], None
        top_k, dtype = weights.shape[1], wide_type(weights.dtype, x.dtype)
        behind = hidden + words_of(top_k, dtype)
        given = words[:, hidden:behind].view(dtype).to(weights.dtype)
        return rows, words[:, behind : behind + top_k], given

    def unpack(self, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Add up what came back for every token; see `unpack`."""
        given = weights if self.copies == "expert" else None
        total: Tensor = torch.ops.dbo_fx.unpack(y, places, given)
        return total


@dataclass(frozen=True, slots=True)
class Overflow:
    """Rows that found no room, since the counters were last set to zero. False if there are none.

    Attributes:
        lost: How many, by the name of the module with the experts.
    """

    lost: dict[str, int]

    @property
    def total(self) -> int:
        """Rows over all layers."""
        return sum(self.lost.values())

    def __bool__(self) -> bool:
        """Whether anything was lost."""
        return self.total > 0

    def __str__(self) -> str:
        """One line, and one more for each layer that lost rows."""
        if not self:
            return "no overflow"
        lines = [
            f"{self.total} rows found no room in their block; the outputs of their tokens, and of "
            "what attended to them, are NaN. Repeat the step with a larger capacity, or with "
            "capacity=None."
        ]
        return "\n".join(lines + [f"  {name}: {n}" for name, n in self.lost.items() if n])


def overflow(model: nn.Module, *, reset: bool = False) -> Overflow:
    """Read this rank's overflow counters; the host waits for the device once.

    Args:
        model: What `expert_parallel` returned, or a module that holds it.
        reset: Set the counters to zero.

    Returns:
        What was lost by this rank's own tokens.
    """
    named = [(n, m) for n, m in model.named_modules() if isinstance(_counter(m), Tensor)]
    counters = [_counter(m) for _, m in named]
    if not counters:
        return Overflow({})
    counts = torch.cat(counters).tolist()
    if reset:
        for counter in counters:
            counter.zero_()
    return Overflow({name: int(n) for (name, _), n in zip(named, counts, strict=True)})


def _counter(module: nn.Module) -> Any:
    return getattr(module, COUNTER, None)
