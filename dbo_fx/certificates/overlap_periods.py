"""Communications of an execution, what is beside each, and the period around it.

Positions are those of the host order. Everything is looked up in windows of one period, so that
time grows with the number of operations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dbo_fx.certificates.execution import Execution, Kind, Operation, Required
from dbo_fx.certificates.order import HappensBefore
from dbo_fx.ir import Action

_VALUE_KINDS = frozenset({"RAW", "data"})


@dataclass(slots=True)
class Flight:
    """One communication: all its launches, as positions in host order."""

    action: Action
    communicator: str | None
    sends: list[int] = field(default_factory=list)
    recvs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Period:
    """The neighbourhood of a communication.

    Attributes:
        flight: The communication.
        candidates: Compute operations that cannot run beside it.
        needed: What it needs, each with the edge that is no value on the way to it, if one is.
        needing: What needs it, likewise.
    """

    flight: Flight
    candidates: Sequence[int]
    needed: Mapping[int, Required | None]
    needing: Mapping[int, Required | None]


class Timeline:
    """Looks up orders in one execution.

    Args:
        execution: One rank's operations.
    """

    def __init__(self, execution: Execution) -> None:
        """Index the operations; linear in their number."""
        self.execution = execution
        self.operations = execution.operations
        self.order = HappensBefore(execution.operations)
        self.on_stream: defaultdict[str, list[int]] = defaultdict(list)
        self.computing: defaultdict[str, list[int]] = defaultdict(list)
        self.record_of: dict[int, int] = {}
        self.flights: dict[Action, Flight] = {}
        self.in_flight: dict[int, tuple[Flight, ...]] = {}
        self.sends: list[int] = []
        self.flight_at: dict[int, Flight] = {}
        self._index()
        self.needs: defaultdict[int, list[Required]] = defaultdict(list)
        self.needed_by: defaultdict[int, list[Required]] = defaultdict(list)
        for required in execution.required:
            self.needs[required.after].append(required)
            self.needed_by[required.before].append(required)

    def _index(self) -> None:
        recorded: dict[int | None, int] = {}
        open_: dict[Action, Flight] = {}
        for index, operation in enumerate(self.operations):
            self.on_stream[operation.stream].append(index)
            match operation.kind:
                case Kind.RECORD:
                    recorded[operation.event] = index
                case Kind.WAIT if operation.event in recorded:
                    self.record_of[index] = recorded[operation.event]
                case Kind.COMPUTE if operation.action is not None:
                    self.computing[operation.stream].append(index)
                    self.in_flight[index] = tuple(open_.values())
                case Kind.SEND | Kind.RECV:
                    self.in_flight[index] = tuple(open_.values())
                    self._half(index, operation, open_)

    def _half(self, index: int, operation: Operation, open_: dict[Action, Flight]) -> None:
        action = self.action(index).communication
        flight = self.flights.setdefault(action, Flight(action, operation.communicator))
        self.flight_at[index] = flight
        if operation.kind is Kind.SEND:
            self.sends.append(index)
            flight.sends.append(index)
            open_[action] = flight
        else:
            flight.recvs.append(index)
            if len(flight.recvs) == len(flight.sends):
                open_.pop(action, None)

    def computes(self) -> Iterator[int]:
        """All compute operations that belong to an action."""
        for indices in self.computing.values():
            yield from indices

    def action(self, index: int) -> Action:
        """The action of an operation that has one."""
        action = self.operations[index].action
        assert action is not None, f"{self.operations[index]} belongs to no action"
        return action

    def text(self, index: int) -> str:
        """An operation for people: its action where it has one."""
        operation = self.operations[index]
        return operation.name if operation.action is None else operation.action.bound()

    # --- what runs beside

    def is_over(self, flight: Flight, index: int) -> bool:
        """Whether the communication's results are usable before the operation starts."""
        before = self.order.before
        received = bool(flight.recvs) and all(before(recv, index) for recv in flight.recvs)
        if received or self.execution.contract.recv_is == "kernel":
            return received
        return bool(flight.sends) and all(before(send, index) for send in flight.sends)

    def beside(self, flight: Flight) -> list[int]:
        """Compute operations ordered neither before nor behind a communication."""
        found: list[int] = []
        for indices in self.computing.values():
            first, last = self._span(flight, indices)
            found += indices[first:last]
        return sorted(found)

    def _span(self, flight: Flight, indices: Sequence[int]) -> tuple[int, int]:
        """Along one stream what is before comes first, and what is behind comes last."""
        first = 0
        if flight.sends:
            clock = self.order.clocks[flight.sends[0]]
            first = bisect_right(indices, clock.get(self.operations[indices[0]].stream, -1))
        last = bisect_left(indices, True, lo=first, key=lambda i: self.is_over(flight, i))
        return first, last

    def under_way(self, index: int, communicator: str | None) -> list[Flight]:
        """Communications sent and not received when the host comes to an operation."""
        return [f for f in self.in_flight[index] if f.communicator == communicator]

    # --- the neighbourhood

    def periods(self) -> Iterator[Period]:
        """The period of each communication, in the order of the sends."""
        own = self._own_computes()
        of_microbatch: defaultdict[int | None, list[Flight]] = defaultdict(list)
        for flight in self.flights.values():
            if flight.sends:
                of_microbatch[flight.action.microbatch].append(flight)
        neighbours = {
            flight.action: (before, after)
            for flights in of_microbatch.values()
            for before, flight, after in zip(
                [None, *flights], flights, [*flights[1:], None], strict=False
            )
        }
        for flight in self.flights.values():
            if flight.sends:
                before, after = neighbours[flight.action]
                bounds = own.get(flight.action.microbatch, (-1, len(self.operations)))
                yield self._period(flight, before, after, bounds)

    def _own_computes(self) -> dict[int | None, tuple[int, int]]:
        """Around the first and the last compute operation of each microbatch."""
        own: dict[int | None, tuple[int, int]] = {}
        for index in sorted(self.computes()):
            microbatch = self.action(index).microbatch
            first, _ = own.get(microbatch, (index - 1, index))
            own[microbatch] = (first, index + 1)
        return own

    def _period(
        self, flight: Flight, before: Flight | None, after: Flight | None, own: tuple[int, int]
    ) -> Period:
        """From the results of the one before to the send of the one after; else `own`."""
        low = own[0] if before is None else before.sends[0]
        high = own[1] if after is None else after.sends[0]
        candidates = []
        for indices in self.computing.values():
            first, last = bisect_right(indices, low), bisect_left(indices, high)
            if before is not None:
                first = max(first, self._span(before, indices)[1])
            if after is not None:
                last = min(last, self._span(after, indices)[0])
            spared = range(*self._span(flight, indices))
            candidates += [
                indices[position]
                for position in range(first, last)
                if position not in spared and self._is_near(flight.action, indices[position])
            ]
        needed = _reach(flight.sends, self.needs, low, high, forward=False)
        needing = _reach(flight.sends + flight.recvs, self.needed_by, low, high, forward=True)
        return Period(flight, sorted(candidates), needed, needing)

    def _is_near(self, communication: Action, index: int) -> bool:
        action = self.action(index)
        if action.layer is None or communication.layer is None:
            return True
        return abs(action.layer - communication.layer) <= 1


def _reach(
    starts: Sequence[int],
    edges: Mapping[int, Sequence[Required]],
    low: int,
    high: int,
    *,
    forward: bool,
) -> dict[int, Required | None]:
    """What is reached inside a window, each with the first edge on the way that hands no value."""
    cause: dict[int, Required | None] = dict.fromkeys(starts)
    for values_only in (True, False):
        pending = list(cause)
        while pending:
            node = pending.pop()
            for edge in edges.get(node, ()):
                other = edge.after if forward else edge.before
                is_value = edge.kind in _VALUE_KINDS
                if other in cause or not low < other < high or (values_only and not is_value):
                    continue
                cause[other] = cause[node] or (None if is_value else edge)
                pending.append(other)
    return cause
