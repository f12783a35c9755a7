"""A measuring device for one GPU without peers: a link as slow as a NIC that takes no SMs.

The group pretends to have peers (torch's "fake" backend), or has one rank. Every peer is taken for
a copy of this rank: it holds the same tensors. What would come from it goes from this GPU's memory
to pinned host memory and back, in chunks on two streams, so that both directions of the bus are
busy at once. As many bytes leave and enter the GPU as over a network. Results are deterministic,
and those of no real model: never serve with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.peer_exchange import rows_by_rank
from dbo_fx.comm.retiring import Independent, ReceivedByEvent
from dbo_fx.contracts import LOOPBACK, Contract
from dbo_fx.errors import CommunicationError

CHUNK_BYTES = 2 << 20
CHUNKS = 8  # Pinned chunks in turn; the way out may be this far ahead of the way back.


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one tensor's operation moves: `landing[p]` gets `source` over the link for each peer."""

    source: Tensor
    landing: tuple[Tensor, ...]


def plan(
    collective: str, source: Tensor, output: Tensor, rank: int, ranks: int
) -> tuple[Transfer, Tensor | None]:
    """Say what goes over the link for one tensor.

    Args:
        collective: A name in `collectives.COLLECTIVES`.
        source: Contiguous input, rows first.
        output: Its output.
        rank: This rank in the group.
        ranks: R; with one rank its own part goes over the link.

    Returns:
        The transfer, and for a sum the parts [peers, rows, ...] that it lands in.
    """
    part = source if collective == "all_gather" else rows_by_rank(source, ranks)[rank]
    peers = [p for p in range(ranks) if p != rank] or [rank]
    if collective == "reduce_scatter_sum":
        parts = part.new_empty((len(peers), *part.shape))
        return Transfer(part, tuple(parts.unbind(0))), parts
    landing = rows_by_rank(output, ranks)
    return Transfer(part, tuple(landing[p] for p in peers)), None


def complete(
    collective: str, source: Tensor, output: Tensor, parts: Tensor | None, rank: int, ranks: int
) -> None:
    """Add what does not go over the link: this rank's own part.

    Args:
        collective: A name in `collectives.COLLECTIVES`.
        source: As in `plan`.
        output: As in `plan`.
        parts: What `plan` returned for a sum.
        rank: This rank in the group.
        ranks: R.
    """
    own = source if collective == "all_gather" else rows_by_rank(source, ranks)[rank]
    if parts is not None:
        output.copy_(parts[0])
        for term in (*parts[1:], *([own] if ranks > 1 else [])):
            output.add_(term)
    elif ranks > 1:
        rows_by_rank(output, ranks)[rank].copy_(own)


class _Bus:
    """Two streams and pinned memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pinned = torch.empty(CHUNKS, CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)

    def move(self, transfers: Sequence[Transfer]) -> None:
        """Out and back, ordered behind and before what stands on the current stream."""
        current = torch.cuda.current_stream()
        self.out.wait_stream(current)
        self.back.wait_stream(current)
        returned: list[torch.cuda.Event] = []
        for source, landing in chunks(transfers):
            host = self.pinned[len(returned) % CHUNKS][: source.numel()]
            if len(returned) >= CHUNKS:
                self.out.wait_event(returned[-CHUNKS])
            with torch.cuda.stream(self.out):
                host.copy_(source, non_blocking=True)
                left = self.out.record_event()
            self.back.wait_event(left)
            with torch.cuda.stream(self.back):
                landing.copy_(host, non_blocking=True)
                returned.append(self.back.record_event())
        current.wait_stream(self.back)
        current.wait_stream(self.out)


def chunks(transfers: Sequence[Transfer]) -> list[tuple[Tensor, Tensor]]:
    """Cut transfers into pieces of at most `CHUNK_BYTES`: source and landing place, as bytes.

    Args:
        transfers: What an operation moves.
    """
    pieces: list[tuple[Tensor, Tensor]] = []
    for transfer in transfers:
        source = _bytes(transfer.source)
        for landing in map(_bytes, transfer.landing):
            for start in range(0, source.numel(), CHUNK_BYTES):
                chunk = slice(start, start + CHUNK_BYTES)
                pieces.append((source[chunk], landing[chunk]))
    return pieces


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def refuse_peers(group: str) -> None:
    """Refuse a group of more than one real rank.

    Args:
        group: Name of the process group.

    Raises:
        CommunicationError: Its ranks would get nothing from each other.
    """
    if not groups.is_fake(group) and groups.world_size(group) > 1:
        raise CommunicationError(
            f"loopback: group {group!r} has {groups.world_size(group)} real ranks, and loopback "
            "sends nothing to anybody: it measures overlap on one GPU. Use 'nccl' or "
            "'copy_engine' here; for loopback a group of backend 'fake', or of one rank."
        )


class Loopback(ReceivedByEvent, Independent):
    """The link through pinned host memory.

    Attributes:
        contract: What it promises.
    """

    contract: Contract = LOOPBACK

    def __init__(self) -> None:
        """Allocate nothing before a device's first operation."""
        self._buses: dict[torch.device, _Bus] = {}

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Tensor, ...]:
        """Enqueue one operation behind what stands on the current stream.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Contiguous outputs, one for each input.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a group without real peers.
            slot: Not used: outputs are the program's own buffers.
            name: Not used.

        Returns:
            The tensors that the copies read or fill, to be held until `finish`.

        Raises:
            CommunicationError: The group has real peers, or the first operation is captured.
        """
        refuse_peers(group)
        bus = self._bus(inputs[0].device)
        rank, ranks = groups.rank(group), groups.world_size(group)
        sources = tuple(t.contiguous() for t in inputs)
        planned = [
            plan(collective, s, o, rank, ranks) for s, o in zip(sources, outputs, strict=True)
        ]
        bus.move([transfer for transfer, _ in planned])
        for source, output, (_, parts) in zip(sources, outputs, planned, strict=True):
            complete(collective, source, output, parts, rank, ranks)
        return (*sources, *(parts for _, parts in planned if parts is not None))

    def _bus(self, device: torch.device) -> _Bus:
        if device not in self._buses:
            if torch.cuda.is_current_stream_capturing():
                raise CommunicationError(
                    f"loopback: no pinned memory for {device} yet, and none can be had under "
                    "capture: run the program once eagerly first."
                )
            self._buses[device] = _Bus(device)
        return self._buses[device]
