"""Why a compute operation cannot run beside a communication that it needs nothing of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import Literal

from dbo_fx.certificates.execution import Kind, Required
from dbo_fx.certificates.overlap_periods import Flight, Period, Timeline
from dbo_fx.ir import Phase

Reason = Literal[
    "dependency",
    "late event",
    "early wait",
    "segment boundary",
    "in-flight limit",
    "stream order",
    "schedule",
]
Found = tuple[Reason, str, int | None]

_MARKERS = frozenset({Kind.RECORD, Kind.WAIT, Kind.ALLOCATE, Kind.FREE})


class Reasons:
    """Finds what orders a communication and an operation that need nothing of each other.

    Args:
        timeline: The execution, indexed.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Keep the index."""
        self.timeline = timeline
        self.operations = timeline.operations
        self.contract = timeline.execution.contract
        limit, slots = self.contract.max_in_flight, self.contract.slots
        self.limit = slots if limit is None else limit

    def why(self, period: Period, index: int) -> Found | None:
        """Why an operation is not beside a communication.

        Args:
            period: The communication's.
            index: One of the period's candidates.

        Returns:
            The reason, the operations concerned and the event, if one is; None if the reason is
            that a value passes between the two.
        """
        behind = self.timeline.is_over(period.flight, index)
        reached = period.needing if behind else period.needed
        if index in reached:
            edge = reached[index]
            return None if edge is None else self._dependency(edge)
        return self._behind(period, index) if behind else self._before(period, index)

    def _text(self, index: int) -> str:
        return self.timeline.text(index)

    def _dependency(self, edge: Required) -> Found:
        label = self.timeline.execution.label(edge.storage)
        order = f"{self._text(edge.before)}, then {self._text(edge.after)}"
        return "dependency", f"{edge.kind} on {label}: {order}", None

    def _before(self, period: Period, index: int) -> Found:
        flight, stream = period.flight, self.operations[index].stream
        send = flight.sends[0]
        needs = [i for i in period.needed if self._is_on(i, stream) and i != send]
        last = max(needs, default=-1)
        if last > index:
            if self._is_same_group(last, index):
                return "segment boundary", f"in one run of compute with {self._text(last)}", None
            return "schedule", f"stands before {self._text(last)}", None
        retired = self._retired_between(index, flight)
        if retired is not None:
            return "in-flight limit", self._limit(send, retired.recvs[-1]), None
        if self.operations[send].stream == stream:
            return "schedule", f"stands before {self._text(send)}", None
        for wait in self._own_waits(send):
            record = self.timeline.record_of.get(wait)
            if record is not None and self.timeline.order.before(index, record):
                return self._late_event(send, last, record)
        return self._stream_order(send, index)

    def _is_on(self, index: int, stream: str) -> bool:
        """Whether it is work on the stream; obtaining a buffer is none."""
        operation = self.operations[index]
        return operation.stream == stream and operation.kind not in _MARKERS

    def _retired_between(self, index: int, flight: Flight) -> Flight | None:
        """What is in flight at the operation and has to be received before the send."""
        others, send = self.timeline.under_way(index, flight.communicator), flight.sends[0]
        if self.limit is None or len(others) < self.limit:
            return None
        return next((f for f in others if f.recvs and index < f.recvs[-1] < send), None)

    def _limit(self, send: int, recv: int) -> str:
        allowed = f"{self.contract.name} allows {self.limit} in flight"
        return f"{self._text(send)} has to stand behind {self._text(recv)}: {allowed}"

    def _own_waits(self, send: int) -> list[int]:
        """The waits directly before an operation on its stream."""
        indices = self.timeline.on_stream[self.operations[send].stream]
        waits = []
        for position in range(bisect_left(indices, send) - 1, -1, -1):
            kind = self.operations[indices[position]].kind
            if kind not in _MARKERS:
                break
            if kind is Kind.WAIT:
                waits.append(indices[position])
        return waits

    def _late_event(self, send: int, last: int, record: int) -> Found:
        computes = self.timeline.computing[self.operations[record].stream]
        between = computes[bisect_right(computes, last) : bisect_left(computes, record)]
        needed = "nothing near" if last < 0 else self._text(last)
        behind = " ".join(dict.fromkeys(map(self._text, between)))
        text = f"{self._text(send)} needs {needed}, its record stands behind {behind}"
        return "late event", text, self.operations[record].event

    def _stream_order(self, send: int, index: int) -> Found:
        """Something before the send on its own stream waits for the operation."""
        stream = self.operations[send].stream
        indices = self.timeline.on_stream[stream]
        end = bisect_left(indices, send)
        before = self.timeline.order.before
        first = bisect_left(indices, True, hi=end, key=lambda i: before(index, i))
        others = (i for i in islice(indices, first, end) if self.operations[i].communicates)
        holder = next(others, None)
        if holder is None:
            return "schedule", f"stands before {self._text(send)}", None
        return "stream order", f"{self._text(send)} follows {self._text(holder)} on {stream}", None

    def _behind(self, period: Period, index: int) -> Found:
        flight, stream = period.flight, self.operations[index].stream
        halves = {*flight.sends, *flight.recvs}
        uses = [i for i in period.needing if self._is_on(i, stream) and i not in halves]
        use = min(uses, default=len(self.operations))
        if use < index:
            if self._is_same_group(use, index):
                return "segment boundary", f"in one run of compute with {self._text(use)}", None
            return "schedule", f"stands behind {self._text(use)}", None
        limited = self._sent_between(flight, index)
        if limited is not None:
            return "in-flight limit", self._limit(limited, flight.recvs[-1]), None
        received = flight.recvs if self.contract.recv_is != "event" else []
        if received and received[-1] < index:
            return "schedule", f"stands behind {self._text(received[-1])}", None
        return self._of_wait(flight, self._first_over(flight, stream), min(use, *received, use))

    def _sent_between(self, flight: Flight, index: int) -> int | None:
        """A send between the recv and the operation, which had to find the flight retired."""
        if self.limit is None or not flight.recvs:
            return None
        sends, communicator = self.timeline.sends, flight.communicator
        for send in sends[bisect_right(sends, flight.recvs[-1]) : bisect_left(sends, index)]:
            others = len(self.timeline.under_way(send, communicator))
            is_same = self.operations[send].communicator == communicator
            if is_same and others + 2 > self.limit:  # With the flight and the send itself.
                return send
        return None

    def _first_over(self, flight: Flight, stream: str) -> int:
        """The first operation on the stream that finds the results usable."""
        indices, is_over = self.timeline.on_stream[stream], self.timeline.is_over
        return indices[bisect_left(indices, True, key=lambda i: is_over(flight, i))]

    def _of_wait(self, flight: Flight, wait: int, use: int) -> Found:
        event = self.operations[wait].event
        served = self._served(wait)
        if served is None or served is flight:
            first = "nothing near" if use >= len(self.operations) else self._text(use)
            return "early wait", f"the first use of {flight.action.bound()} is {first}", event
        sent = flight.sends[-1]
        if served.sends[0] < sent:
            waiting = self._text((served.recvs or served.sends)[0])
            text = f"the record that {waiting} waits for stands behind {self._text(sent)}"
            return "late event", text, event
        stream = self.operations[sent].stream
        text = f"{self._text(served.sends[0])} follows on {stream} and is waited for first"
        return "stream order", text, event

    def _served(self, wait: int) -> Flight | None:
        """What a wait is for: the recv directly behind it, else the last send that it covers."""
        record = self.timeline.record_of.get(wait)
        if record is None:
            return None
        covered = self.timeline.on_stream[self.operations[record].stream]
        flight_at = self.timeline.flight_at
        positions = range(bisect_left(covered, record) - 1, -1, -1)
        newest = next((flight_at[covered[p]] for p in positions if covered[p] in flight_at), None)
        received = []
        indices = self.timeline.on_stream[self.operations[wait].stream]
        for index in islice(indices, bisect_right(indices, wait), None):
            kind = self.operations[index].kind
            if kind is Kind.RECV:
                received.append(flight_at[index])
            elif kind not in _MARKERS:
                break
        return newest if newest in received or not received else received[0]

    def _is_same_group(self, one: int, other: int) -> bool:
        a, b = self.operations[one].action, self.operations[other].action
        if a is None or b is None or (a.microbatch, a.layer) != (b.microbatch, b.layer):
            return False
        return a.phase is b.phase or {a.phase, b.phase} == {Phase.A0, Phase.A1}
