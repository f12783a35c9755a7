"""The batched layout over plain collectives: what DeepEP's low-latency kernels do, in torch ops.

Any transport that carries collectives can have it. Every rank gathers all tokens and picks those of
its experts; the combine weighs and sums a rank's contributions in float32 and reduce-scatters them.
Nothing depends on sizes that only the data knows, so it can be captured. It moves more bytes than
DeepEP does and is there for correctness: as reference, as twin, and where no DeepEP is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.buffers import buffers
from dbo_fx.comm.expert_layouts import Batched, batched, quantised
from dbo_fx.comm.poison import poison

if TYPE_CHECKING:
    from dbo_fx.comm.protocol import Transport

# (collective, input) -> output, complete.
Exchange = Callable[[str, Tensor], Tensor]


def run(exchange: str, inputs: Sequence[Tensor], group: str, do: Exchange) -> list[Tensor]:
    """Do a batched exchange by collectives.

    Args:
        exchange: Its text.
        inputs: As `expert_layouts` says.
        group: Name of the process group.
        do: Runs one collective to its end (in stream order on CUDA).

    Returns:
        The outputs; garbage is poison.
    """
    sizes, ranks, rank = batched(exchange), groups.world_size(group), groups.rank(group)
    if exchange.startswith("batched_dispatch"):
        return _dispatch(sizes, inputs, ranks, rank, do)
    return [_combine(sizes, inputs, ranks, rank, do)]


def _dispatch(
    sizes: Batched, inputs: Sequence[Tensor], ranks: int, rank: int, do: Exchange
) -> list[Tensor]:
    x, ids = inputs
    tokens, device = x.shape[0], x.device
    local, room = sizes.slots(ranks)
    parts = quantised(x) if sizes.fp8 else (x,)
    gathered = [do("all_gather", p.contiguous()) for p in parts]
    places, chosen = _places(do("all_gather", ids), local, rank)
    counts = chosen.sum(1)
    # One more row takes what no expert wants.
    target = torch.where(chosen, places, room)
    packed = [_scattered(g, target, room) for g in gathered]
    src = torch.arange(tokens, device=device, dtype=torch.int32).repeat(ranks)
    src = _scattered(src.unsqueeze(-1), target, room).squeeze(-1)
    number = chosen.view(local, ranks, tokens).sum(2)
    ranges = (number.cumsum(1) - number) << 32 | number
    scales = packed[1] if sizes.fp8 else x.new_empty((local, room, 0), dtype=torch.float32)
    return [packed[0], scales, counts.to(torch.int32), src, ranges]


def _places(ids: Tensor, local: int, rank: int) -> tuple[Tensor, Tensor]:
    """Where every rank's tokens lie in each expert's rows, and which chose it: two [E/R, R*T]."""
    experts = torch.arange(local, device=ids.device) + local * rank
    chosen = (ids.unsqueeze(0) == experts.view(-1, 1, 1)).any(-1)
    return chosen.cumsum(1) - 1, chosen


def _scattered(values: Tensor, target: Tensor, room: int) -> Tensor:
    """Rows [R*T, ...] to [E/R, room, ...]; target [E/R, R*T] says where, `room` is nowhere."""
    local = target.shape[0]
    out = values.new_empty((local, room + 1, values.shape[-1])).fill_(poison(values.dtype))
    index = target.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    source = values.unsqueeze(0).expand(local, -1, -1)
    if values.element_size() == 1:  # scatter_ knows no float8.
        out.view(torch.uint8).scatter_(1, index, source.view(torch.uint8))
    else:
        out.scatter_(1, index, source)
    return out[:, :room].contiguous()


def _combine(
    sizes: Batched, inputs: Sequence[Tensor], ranks: int, rank: int, do: Exchange
) -> Tensor:
    y, ids, weights = inputs[0], inputs[1], inputs[2]
    local, _ = sizes.slots(ranks)
    ids, weights = do("all_gather", ids), do("all_gather", weights.float())
    places, chosen = _places(ids, local, rank)
    experts = torch.arange(local, device=ids.device) + local * rank
    mine = ids.unsqueeze(0) == experts.view(-1, 1, 1)
    factor = torch.where(mine, weights.unsqueeze(0), 0).sum(-1)
    index = torch.where(chosen, places, 0).unsqueeze(-1).expand(-1, -1, y.shape[-1])
    # A row that no token chose is garbage: left out by `where`, as 0 * NaN is NaN.
    rows = torch.where(chosen.unsqueeze(-1), y.gather(1, index).float(), 0)
    partial = (rows * factor.unsqueeze(-1)).sum(0)
    return do("reduce_scatter_sum", partial).to(y.dtype)


@dataclass(slots=True)
class ByCollectives:
    """A batched exchange over a transport that carries collectives only."""

    carrier: Transport
    group: str
    slot: int | None
    name: str
    hidden: list[Tensor] = field(default_factory=list)

    def launch(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: str
    ) -> ByCollectives:
        """Run it; on CUDA in stream order, on CPU to its end, hidden until it is received."""
        found = run(exchange, inputs, self.group, self.collective)
        if inputs[0].is_cuda:
            for output, value in zip(outputs, found, strict=True):
                output.copy_(value)
            return self
        self.hidden = found
        for output in outputs:
            output.fill_(poison(output.dtype))
        return self

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Show what has arrived."""
        for output, value in zip(outputs, self.hidden, strict=False):
            output.copy_(value)

    def collective(self, collective: str, source: Tensor) -> Tensor:
        """Run one collective to its end, in stream order on CUDA."""
        outputs = buffers([source], collective, self.group)
        launched = self.carrier.launch(
            [source], outputs, collective, self.group, self.slot, self.name
        )
        self.carrier.finish(launched, outputs)
        return outputs[0]


def carries_batched(carrier: Transport) -> bool:
    """Whether the transport has kernels for the batched layout, or imitates them."""
    return "collectives" not in carrier.contract.carries
