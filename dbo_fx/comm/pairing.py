"""Transports whose combine needs what its dispatch left behind.

A dispatch and the combine of the same group and flight are a pair. What the first one knows (where
each row came from) stays here, from the dispatch's send until the combine's recv; a program has no
tensor for it, so that models need no other ops than for collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dbo_fx.comm.expert_layouts import ROWS_COMBINE, kind_of
from dbo_fx.contracts import Contract
from dbo_fx.errors import CommunicationError


@dataclass(slots=True)
class Pair:
    """A dispatch that was sent, until its combine was.

    Attributes:
        exchange: Its text.
        handle: What the transport put there for the combine.
        received: Whether its rows may be read.
    """

    exchange: str
    handle: Any = None
    received: bool = False


@dataclass(slots=True)
class Launched:
    """What `finish` needs.

    Attributes:
        pair: The pair.
        work: The transport's own.
        is_dispatch: Which half of the pair it is.
    """

    pair: Pair
    work: Any
    is_dispatch: bool


@dataclass
class PairingTransport(ABC):
    """Base of the transports that carry "rows".

    Attributes:
        contract: What it promises.
    """

    contract: Contract
    _pairs: dict[tuple[str, int], Pair] = field(default_factory=dict)

    @abstractmethod
    def dispatch(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pair: Pair, group: str, name: str
    ) -> Any:
        """Launch a dispatch; `finish_work` gets what this returns."""

    @abstractmethod
    def combine(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pair: Pair, group: str, name: str
    ) -> Any:
        """Launch a combine; `finish_work` gets what this returns."""

    @abstractmethod
    def finish_work(self, work: Any, outputs: Sequence[Tensor], pair: Pair) -> None:
        """Make the outputs usable on the current stream."""

    def launch_pair(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        exchange: str,
        group: str,
        name: str,
        half: tuple[str, int],
    ) -> Launched:
        """Launch one of a pair.

        Args:
            inputs: Tensors of this rank.
            outputs: What `comm_buffers` gave for them.
            exchange: `rows_dispatch E` or `rows_combine`.
            group: Name of the process group.
            name: What to call the operation in errors.
            half: "dispatch" or "combine", and the flight.

        Raises:
            CommunicationError: A collective, a second dispatch of a flight, or none before a
                combine.
        """
        if kind_of(exchange) != "rows":
            raise CommunicationError(
                f"{name}: found {exchange}, but {self.contract.name} carries the dispatch and "
                "combine ops of rows only. Use torch.ops.dbo_fx.dispatch and combine."
            )
        key = group, half[1]
        if exchange != ROWS_COMBINE:
            if key in self._pairs:
                raise CommunicationError(
                    f"{name}: the flight's last dispatch has had no combine, which needs what that "
                    f"one left with {self.contract.name}. Combine it first, or call "
                    "dbo_fx.comm.abandon_in_flight() on every rank after a step that failed."
                )
            pair = Pair(exchange)
            work = self.dispatch(inputs, outputs, pair, group, name)
            self._pairs[key] = pair
            return Launched(pair, work, True)
        found = self._pairs.get(key)
        if found is None or not found.received:
            what = "no dispatch" if found is None else "a dispatch that is not received"
            raise CommunicationError(
                f"{name}: found {what} of this flight, wanted one that is received: a combine "
                "needs to know where the rows came from. Both halves of a layer name one flight."
            )
        work = self.combine(inputs, outputs, found, group, name)
        del self._pairs[key]
        return Launched(found, work, False)

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> Any:
        """Refuse: without a flight nothing can be paired.

        Raises:
            CommunicationError: Always.
        """
        raise CommunicationError(
            f"{name}: {self.contract.name} runs in compiled programs only, where dispatch and "
            "combine have a flight."
        )

    def finish(self, flight: Launched, outputs: Sequence[Tensor]) -> None:
        """Retire what `launch_pair` returned.

        Args:
            flight: That.
            outputs: The outputs that were launched with it.
        """
        self.finish_work(flight.work, outputs, flight.pair)
        flight.pair.received = flight.is_dispatch

    def begin(self, group: str) -> None:
        """Refuse to start a region while a dispatch waits for its combine.

        Args:
            group: Name of the process group.

        Raises:
            CommunicationError: One does.
        """
        left = [flight for name, flight in self._pairs if name == group]
        if left:
            raise CommunicationError(
                f"{self.contract.name}, group {group!r}: the dispatch of flight {left[0]} has had "
                "no combine. A step that fails half-way leaves it: call "
                "dbo_fx.comm.abandon_in_flight() on every rank before the next step."
            )

    def realign(self, group: str | None) -> None:
        """Forget dispatches without combine.

        Args:
            group: Name of a process group; None for all.
        """
        for key in [k for k in self._pairs if group in (None, k[0])]:
            del self._pairs[key]
