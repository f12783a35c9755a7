"""Transport by peer copies: the copy engines move the data, matmuls keep their SMs.

Every rank has staging memory that its peers read and write (`staging`), in two halves that
operations use in turn (`peer_links`); an operation is copies and one barrier (`peer_exchange`).

SMs do three short things: the barrier, the copies within one GPU, and the sum. All of them run on
the comm stream behind the send, so the recv is an event and may sink to the first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.peer_exchange import exchange, needed_bytes
from dbo_fx.comm.peer_links import Links, refuse_pretended
from dbo_fx.comm.retiring import ReceivedByEvent
from dbo_fx.comm.staging import SymmetricStaging
from dbo_fx.contracts import COPY_ENGINE, Contract


class CopyEngine(ReceivedByEvent):
    """Peer copies between the GPUs of one host.

    Attributes:
        contract: What it promises.
    """

    contract: Contract = COPY_ENGINE

    def __init__(self) -> None:
        """Allocate nothing before a group's first operation."""
        self._links = Links()

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Tensor, ...]:
        """Enqueue one operation on the current stream.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Contiguous outputs, one for each input.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a process group, of any backend.
            slot: Not used: outputs are the program's own buffers.
            name: Not used.

        Returns:
            The tensors that the copies read, to be held until `finish`.

        Raises:
            CommunicationError: The group has no real peers, their memory cannot be mapped, or the
                staging memory is too small under capture.
        """
        refuse_pretended(group)
        link, device = self._links[group], inputs[0].device
        capturing = torch.cuda.is_current_stream_capturing()
        sources = tuple(t.contiguous() for t in inputs)
        staging = link.room(
            needed_bytes(sources), lambda size, _: SymmetricStaging(group, size, device), capturing
        )
        index = link.turn(staging, capturing)
        rank, ranks = groups.rank(group), groups.world_size(group)
        exchange(staging, index, collective, sources, outputs, rank, ranks)
        return sources

    def begin(self, group: str) -> None:
        """Let the next operation start at half 0, behind a barrier.

        Args:
            group: Name of the process group.
        """
        self._links[group].begin()

    def realign(self, group: str | None) -> None:
        """Let the next operation start at half 0, behind a barrier.

        Args:
            group: Name of a process group; None for all.
        """
        for link in self._links.known(group):
            link.begin()
