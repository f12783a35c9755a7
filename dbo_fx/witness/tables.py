"""The host's side of a transport: what is in flight, and whose slot's turn it is.

What it finds is wrong on every run, whatever the interleaving.
"""

from __future__ import annotations

from collections import defaultdict

from dbo_fx.contracts import Contract
from dbo_fx.ir import Action, Phase


class Table:
    """One rank's table of what is in flight, and the transport's own slot counters.

    Args:
        contract: The transport's contract.
        rank: The rank.
        problems: Where to note what is wrong.
    """

    def __init__(self, contract: Contract, rank: int, problems: list[str]) -> None:
        """Nothing is in flight, every communicator is at slot 0."""
        self.contract, self.rank, self.problems = contract, rank, problems
        self._index: defaultdict[str, int] = defaultdict(int)
        self._in_flight: dict[tuple[str, Phase, int | None], tuple[Action, int, int | None]] = {}
        self._flights = 0

    def send_slot(self, communicator: str, said: int | None, number: int, name: str) -> int | None:
        """The slot that a send uses, which must be the transport's own next one."""
        slots = self.contract.slots
        if slots is None:
            if said is not None:
                self.problems.append(f"{name} takes slot {said} of a transport without slots")
            return None
        real = self._index[communicator] % slots
        self._index[communicator] += 1
        slot = number % slots if said is None else said
        if slot != real:
            self.problems.append(
                f"{name} on rank {self.rank} takes slot {slot}, the transport is at slot {real}"
            )
        return slot

    def launch(self, communicator: str, action: Action, slot: int | None) -> int:
        """Enter a send into the table of what is in flight; its identity."""
        key = (communicator, action.phase, action.microbatch)
        if key in self._in_flight:
            self.problems.append(f"{action.bound()} is sent with {key[1]} of m{key[2]} in flight")
        self._flights += 1
        self._in_flight[key] = (action.communication, self._flights, slot)
        return self._flights

    def retire(self, communicator: str, action: Action) -> tuple[int, int | None]:
        """Take a recv's send off the table: its identity and slot."""
        found = self._in_flight.pop((communicator, action.phase, action.microbatch), None)
        if found is None:
            self.problems.append(f"{action.bound()} without a send before it on the host")
            return 0, None
        sent, identity, slot = found
        if sent != action.communication:
            self.problems.append(f"{action.bound()} receives {sent.bound()}")
        return identity, slot

    def count(self, communicator: str) -> None:
        """Count an operation that never runs."""
        self._index[communicator] += 1

    def end(self) -> None:
        """End a region that ran whole: nothing may be in flight."""
        for action, _, _ in self._in_flight.values():
            self.problems.append(f"{action.bound()} is sent and never received")
        self._in_flight.clear()
        for communicator, count in self._index.items():
            if count % self.contract.parity == 0:  # A whole region: the next starts at slot 0.
                self._index[communicator] = 0

    def abandon(self, realign: bool) -> None:
        """End a region that failed."""
        self._in_flight.clear()
        if realign:
            self._index.clear()
