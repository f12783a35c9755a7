"""CPU twin of loopback: the same results, hidden until they are received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.loopback import chunks, complete, plan, refuse_peers
from dbo_fx.comm.poison import poison
from dbo_fx.comm.retiring import Independent
from dbo_fx.contracts import LOOPBACK, Contract


@dataclass(frozen=True, slots=True)
class LoopbackTwin(Independent):
    """The same results on CPU tensors, hidden until the recv."""

    contract: Contract = LOOPBACK

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Tensor, ...]:
        """Compute the results and poison the visible outputs; see `Loopback.launch`.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Visible outputs, one for each input; poisoned until `finish`.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a group without real peers.
            slot: Not used.
            name: Not used.

        Returns:
            What `finish` shows.

        Raises:
            CommunicationError: The group has real peers.
        """
        refuse_peers(group)
        rank, ranks = groups.rank(group), groups.world_size(group)
        hidden = []
        for given, visible in zip(inputs, outputs, strict=True):
            source = given.contiguous()
            output = torch.empty_like(visible, memory_format=torch.contiguous_format)
            transfer, parts = plan(collective, source, output, rank, ranks)
            for sent, landed in chunks([transfer]):
                landed.copy_(sent)
            complete(collective, source, output, parts, rank, ranks)
            visible.fill_(poison(visible.dtype))
            hidden.append(output)
        return tuple(hidden)

    def finish(self, flight: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> None:
        """Show what has arrived.

        Args:
            flight: What `launch` returned.
            outputs: The visible outputs that were launched with it.
        """
        for visible, real in zip(outputs, flight, strict=True):
            visible.copy_(real)
