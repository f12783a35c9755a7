"""CPU twin of the peer copies: the same operations on memory that the ranks' processes share."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.peer_exchange import exchange, needed_bytes
from dbo_fx.comm.peer_links import Links, refuse_pretended
from dbo_fx.comm.poison import poison
from dbo_fx.comm.staging import SharedStaging
from dbo_fx.contracts import COPY_ENGINE, Contract
from dbo_fx.errors import CommunicationError


@dataclass(slots=True, eq=False)
class Sent:
    """One operation of the twin.

    Attributes:
        name: What to call it in errors.
        run: Does it.
        hidden: What arrives, before anybody sees it.
    """

    name: str
    run: Callable[[], None]
    hidden: tuple[Tensor, ...]
    is_done: bool = False


class CopyEngineTwin:
    """The same operations on CPU tensors, as late and in the order that a comm stream may run them.

    A send only notes its operation and poisons the outputs. A recv runs all operations up to its
    own, oldest first, through memory that the ranks share, and then shows what has arrived.

    Attributes:
        contract: What it promises.
    """

    contract: Contract = COPY_ENGINE

    def __init__(self) -> None:
        """Allocate nothing before a group's first operation."""
        self._links = Links()
        self._pending: defaultdict[str, deque[Sent]] = defaultdict(deque)

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[str, Sent]:
        """Note the operation; see `CopyEngine.launch`.

        Args:
            inputs: Tensors of this rank, rows first; copied.
            outputs: Visible outputs, one for each input; poisoned until `finish`.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a process group that carries CPU tensors.
            slot: Not used.
            name: What to call the operation in errors.

        Returns:
            The group's name, and the operation.

        Raises:
            CommunicationError: The group has no real peers.
        """
        refuse_pretended(group)
        link = self._links[group]
        # The program orders later writes to the inputs behind the send's event, not behind a recv.
        sources = tuple(t.clone(memory_format=torch.contiguous_format) for t in inputs)
        hidden = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs)

        def run() -> None:
            size = needed_bytes(sources)
            staging = link.room(size, lambda s, n: SharedStaging(group, s, n), False)
            rank, ranks = groups.rank(group), groups.world_size(group)
            index = link.turn(staging)
            exchange(staging, index, collective, sources, hidden, rank, ranks)

        sent = Sent(name, run, hidden)
        self._pending[group].append(sent)
        for visible in outputs:
            visible.fill_(poison(visible.dtype))
        return group, sent

    def finish(self, flight: tuple[str, Sent], outputs: Sequence[Tensor]) -> None:
        """Run what is pending up to this operation, and show its result.

        Args:
            flight: What `launch` returned.
            outputs: The visible outputs that were launched with it.

        Raises:
            CommunicationError: The operation was given up meanwhile.
        """
        group, sent = flight
        pending = self._pending[group]
        while not sent.is_done:
            if not pending:
                raise CommunicationError(
                    f"{sent.name}: given up by abandon_in_flight() before it was received. "
                    "Start the step again."
                )
            oldest = pending.popleft()
            oldest.run()
            oldest.is_done = True
        for visible, real in zip(outputs, sent.hidden, strict=True):
            visible.copy_(real)

    def begin(self, group: str) -> None:
        """Let the next operation start at half 0, behind a barrier.

        Args:
            group: Name of the process group.

        Raises:
            CommunicationError: Operations of an earlier region are not received.
        """
        if pending := self._pending[group]:
            raise CommunicationError(
                f"{pending[0].name} is not received, and a region over group {group!r} "
                "starts. After a step that failed half-way call dbo_fx.comm.abandon_in_flight() "
                "on every rank."
            )
        self._links[group].begin()

    def realign(self, group: str | None) -> None:
        """Forget what is pending; the next operation starts at half 0, behind a barrier.

        Args:
            group: Name of a process group; None for all.
        """
        for name in [group] if group is not None else list(self._pending):
            self._pending.pop(name, None)
        for link in self._links.known(group):
            link.begin()
