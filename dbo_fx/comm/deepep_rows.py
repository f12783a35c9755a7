"""CPU twin of DeepEP's high-throughput mode and of V2: gloo carries the data, the layout is theirs.

What a model can get wrong about them is here exactly as there:

* A rank gets the rows that have an expert on it, one after the other by source; the place of a row
  says nothing of the rank and token that it came from.
* Behind them is garbage up to R*T rows: NaN. Its ids, and those of experts elsewhere, are all one
  that is not here: the last one of the rank before, -1 on rank 0. Choices of experts elsewhere have
  weight 0, garbage has any.
* A combine reads the rows that were received, and nothing behind them. It is unweighted.
* A combine needs what its dispatch left with the transport.

DeepEP counts ids on the rank and writes -1 for the others; the transport adds the rank's first
expert. V2 leaves the ids of garbage uninitialised; the transport overwrites them.

Source: `Buffer.dispatch` with `num_worst_tokens` and `intranode.cu`; `ElasticBuffer.dispatch` with
`do_cpu_sync=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.expert_layouts import experts_of
from dbo_fx.comm.gloo import GlooReference
from dbo_fx.comm.pairing import Pair, PairingTransport
from dbo_fx.comm.poison import poison


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Where the received rows stand among all ranks' rows."""

    rows: Tensor
    total: int


@dataclass(frozen=True, slots=True)
class _Gathering:
    """A dispatch under way: every rank's tensors, hidden."""

    carried: Any
    hidden: tuple[Tensor, ...]
    first: int
    local: int


@dataclass
class RowsTwin(PairingTransport):
    """DeepEP's row layout for CPU tensors."""

    carrier: GlooReference = field(default_factory=GlooReference)

    def dispatch(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pair: Pair, group: str, name: str
    ) -> _Gathering:
        """Gather all rows behind poison.

        Args:
            inputs: x, scales where x is float8, ids, weights.
            outputs: Visible outputs, one for each.
            pair: Gets the arrival when it is received.
            group: Name of the process group.
            name: What to call the operation in errors.

        Returns:
            What `finish_work` needs.
        """
        local = experts_of(pair.exchange) // groups.world_size(group)
        hidden = tuple(torch.empty_like(t) for t in outputs)
        carried = self.carrier.launch(inputs, hidden, "all_gather", group, None, name)
        for visible in outputs:
            visible.fill_(poison(visible.dtype))
        return _Gathering(carried, hidden, local * groups.rank(group), local)

    def combine(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pair: Pair, group: str, name: str
    ) -> Any:
        """Send every received row's contribution to where the row came from.

        Args:
            inputs: y, with a row for each that the dispatch returned.
            outputs: The visible output.
            pair: Its dispatch.
            group: Name of the process group.
            name: What to call the operation in errors.

        Returns:
            What `finish_work` needs.
        """
        arrival = pair.handle
        assert isinstance(arrival, _Arrival)
        y = inputs[0]
        everyone = y.new_zeros((arrival.total, *y.shape[1:]))
        everyone[arrival.rows] = y[: len(arrival.rows)]
        return self.carrier.launch([everyone], outputs, "reduce_scatter_sum", group, None, name)

    def finish_work(self, work: Any, outputs: Sequence[Tensor], pair: Pair) -> None:
        """Show what has arrived.

        Args:
            work: What the launch returned.
            outputs: The visible outputs.
            pair: The pair.
        """
        if not isinstance(work, _Gathering):
            self.carrier.finish(work, outputs)
            return
        self.carrier.finish(work.carried, work.hidden)
        ids = work.hidden[-2]
        here = (ids >= work.first) & (ids < work.first + work.local)
        rows = here.any(1).nonzero()[:, 0]
        for visible, everyone in zip(outputs, work.hidden, strict=True):
            visible.fill_(poison(visible.dtype))
            visible[: len(rows)] = everyone[rows]
        outputs[-2][len(rows) :] = work.first - 1
        outputs[-2][: len(rows)].masked_fill_(~here[rows], work.first - 1)
        outputs[-1][: len(rows)].masked_fill_(~here[rows], 0)
        pair.handle = _Arrival(rows, ids.shape[0])
