"""What transports do to memory while a program runs: in-flight data, slots, and what destroys it.

* `recv_is` "event": the send itself writes the landing buffer; the recv reads and writes it.
* "host" and "kernel": the send leaves the data with the transport and poisons the landing buffer;
  the recv puts it there.
* A transport with slots keeps the data in the slot that the program names. A send destroys what
  its slot holds un-received, and, where fewer operations may be in flight than there are slots,
  what the next slot holds: its counters are cleared for the next operation. (DeepEP's low-latency
  kernels clear the other buffer of two.)
* A send beyond `max_in_flight` destroys the oldest un-received operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dbo_fx.contracts import Contract
from dbo_fx.witness.model import Words


def counts_flights(contract: Contract) -> bool:
    """Whether the in-flight limit asks for more than the slots do by themselves."""
    limit, slots = contract.max_in_flight, contract.slots
    return limit is not None and (slots is None or limit < slots - 1)


def touched_slots(contract: Contract, slot: int | None) -> tuple[int, ...]:
    """The slots whose data a send in `slot` destroys."""
    limit, slots = contract.max_in_flight, contract.slots
    if slots is None or slot is None:
        return ()
    clears = limit is not None and limit < slots
    return (slot, (slot + 1) % slots) if clears else (slot,)


@dataclass(slots=True)
class Flight:
    """One operation on one rank between its halves."""

    name: str
    slot: int | None
    data: Words
    received: bool = False
    destroyed_by: str = ""


@dataclass(slots=True)
class Channel:
    """One rank's end of a communicator."""

    contract: Contract
    flights: dict[int, Flight] = field(default_factory=dict)
    slots: dict[int, Flight] = field(default_factory=dict)

    @property
    def is_hidden(self) -> bool:
        """Whether data stays with the transport until it is received."""
        return self.contract.recv_is != "event"

    def send(self, identity: int, name: str, slot: int | None, data: Words) -> None:
        """Take an operation in flight."""
        limit = self.contract.max_in_flight
        flight = Flight(name, slot, data)
        if counts_flights(self.contract):
            assert limit is not None
            waiting = [f for f in self.flights.values() if not f.destroyed_by]
            for old in waiting[: max(0, len(waiting) + 1 - limit)]:
                old.destroyed_by = name
        for touched in touched_slots(self.contract, slot):
            held = self.slots.get(touched)
            if held is not None and not held.received:
                held.destroyed_by = name
        if slot is not None:
            self.slots[slot] = flight
        self.flights[identity] = flight

    def recv(self, identity: int, name: str, slot: int | None) -> Words | str:
        """Retire an operation: its data, or why there is none."""
        flight = self.flights.pop(identity, None)
        if flight is None:
            return f"{name} runs before its send"
        if flight.destroyed_by:
            return f"{name} would wait for ever: {flight.destroyed_by} cleared its data"
        if slot is not None and self.slots.get(slot) is not flight:
            held = self.slots[slot].name if slot in self.slots else "nothing"
            return f"{name} reads slot {slot}, which holds {held}"
        flight.received = True
        return flight.data
