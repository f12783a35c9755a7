"""NCCL transport for CUDA tensors: launch on the current stream, receive by an event.

The program makes the comm stream current around `send`, records an event after it and makes the
compute stream wait for that event before `recv`; so nothing here touches streams or events, and
both halves can be captured in a CUDA graph. Outputs must have been allocated on the compute stream
(`comm_buffers`) before the event that the comm stream waits for: allocated on the comm stream they
would go back to its pool while the compute stream still reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dbo_fx.comm import collectives, groups
from dbo_fx.contracts import NCCL, Contract
from dbo_fx.errors import CommunicationError


@dataclass(frozen=True, slots=True)
class Nccl:
    """NCCL collectives ordered on the caller's stream."""

    contract: Contract = NCCL

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Tensor, ...]:
        """Enqueue the collectives on the current stream.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Contiguous outputs, one for each input.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a process group with an NCCL backend.
            slot: Not used: outputs are the program's own buffers.
            name: Not used: NCCL reports its errors itself.

        Returns:
            The tensors that the collectives read, to be held until `finish`.

        Raises:
            CommunicationError: The group's backend for CUDA tensors is not NCCL.
        """
        backend = groups.backend_name(group, "cuda")
        if backend != "nccl":
            raise CommunicationError(
                f"group {group!r} carries CUDA tensors with {backend!r}, wanted 'nccl': only NCCL "
                "keeps the order of the current stream. Create the group with backend 'nccl'."
            )
        sources = tuple(t.contiguous() for t in inputs)
        for output, source in zip(outputs, sources, strict=True):
            # async_op=True would run on NCCL's own stream, outside the program's events.
            collectives.start(collective, output, source, group, asynchronous=False)
        return sources

    def finish(self, flight: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> None:
        """Do nothing: the program's wait for the event already made the outputs usable.

        Args:
            flight: What `launch` returned; the caller lets go of it after this.
            outputs: The outputs of the launch.
        """

    def begin(self, group: str) -> None:
        """Do nothing: no operation depends on those before it.

        Args:
            group: Name of the process group.
        """

    def realign(self, group: str | None) -> None:
        """Do nothing: no operation depends on those before it.

        Args:
            group: Name of a process group; None for all.
        """
