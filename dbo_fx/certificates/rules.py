"""What a transport's contract demands of a program, and of a row of regions.

Source of the demands: `contracts.Contract`; `docs/transports.md` tells where each comes from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from dbo_fx.certificates.execution import Execution, Kind, Operation
from dbo_fx.certificates.order import HappensBefore
from dbo_fx.certificates.pairs import broken_pairs
from dbo_fx.certificates.violation import Violation, label, named, synchronise

_Flight = tuple[str | None, Hashable]


def broken_contract(execution: Execution, order: HappensBefore) -> Iterator[Violation]:
    """Find what breaks the contract of the execution's transport.

    Args:
        execution: What the host enqueues.
        order: Its happens-before relation.

    Yields:
        Violations of "stream", "pairing", "in-flight", "slot" and "parity".
    """
    yield from _streams(execution)
    yield from _pairing(execution)
    yield from _in_flight(execution, order)
    yield from _slots(execution)
    yield from _slots_free(execution, order)
    yield from _parity(execution)
    yield from broken_pairs(execution)


def not_capturable(execution: Execution) -> Iterator[Violation]:
    """Find what cannot stand under CUDA graph capture."""
    contract = execution.contract
    for index, operation in enumerate(execution.operations):
        if operation.blocks_host:
            text = f"{named(operation)} makes the host wait"
        elif not contract.capturable and operation.kind in (Kind.SEND, Kind.RECV):
            text = f"{named(operation)} goes over {contract.name}, which cannot be captured"
        else:
            continue
        fix = f"run the program eagerly, or over a transport other than {contract.name}"
        yield Violation("capture", None, index, None, text, fix)


def communications(operations: Sequence[Operation]) -> int:
    """How many communications there are; several launches of one action count once."""
    return len({_communication(o) for o in operations if o.kind is Kind.SEND})


def most_in_flight(operations: Sequence[Operation]) -> int:
    """Most communications sent and not yet received at once, in host order."""
    open_: Counter[Hashable] = Counter()
    most = 0
    for operation in operations:
        if operation.kind is Kind.SEND:
            open_[_communication(operation)] += 1
            most = max(most, len(open_))
        elif operation.kind is Kind.RECV:
            key = _communication(operation)
            open_[key] -= 1
            if open_[key] <= 0:
                del open_[key]
    return most


def _communication(operation: Operation) -> Hashable:
    return _flight(operation) if operation.action is None else operation.action.communication


def _flight(operation: Operation) -> _Flight:
    return operation.communicator, operation.flight


def _streams(execution: Execution) -> Iterator[Violation]:
    contract = execution.contract
    wanted = {Kind.SEND: contract.send_stream, Kind.RECV: contract.recv_stream}
    for index, operation in enumerate(execution.operations):
        stream = wanted.get(operation.kind)
        if stream is not None and operation.stream != stream:
            right = f"{contract.name} wants its {operation.kind.value}s on {stream}"
            text = f"{named(operation)} stands on the wrong stream; {right}"
            yield Violation("stream", None, index, None, text, f"run it on {stream}")


def _pairing(execution: Execution) -> Iterator[Violation]:
    """Every send has one recv behind it; a flight is not sent again while it is under way."""
    sent: dict[_Flight, int] = {}
    done: dict[_Flight, int] = {}
    for index, operation in enumerate(execution.operations):
        key = _flight(operation)
        if operation.kind is Kind.SEND:
            if key in sent:
                text = f"{named(operation)} is launched again while it is in flight"
                fix = "remove the second send, or receive the first one before it"
                yield Violation("pairing", sent[key], index, None, text, fix)
            sent[key] = index
        elif operation.kind is Kind.RECV:
            if key not in sent:
                text = f"{named(operation)} is received, but not in flight"
                fix = "send it before" if key not in done else "remove the second recv"
                yield Violation("pairing", done.get(key), index, None, text, fix)
            else:
                del sent[key]
                done[key] = index
    for index in sent.values():
        text = f"{named(execution.operations[index])} is sent and never received"
        yield Violation("pairing", index, None, None, text, "add its recv behind the send")


def _in_flight(execution: Execution, order: HappensBefore) -> Iterator[Violation]:
    """At a send, all earlier ones but `limit - 1` are received for certain."""
    limit = execution.contract.max_in_flight
    if limit is None:
        return
    operations = execution.operations
    received = _received(operations)
    pending: defaultdict[str | None, list[int]] = defaultdict(list)
    for index, operation in enumerate(operations):
        if operation.kind is not Kind.SEND:
            continue
        open_ = [
            send
            for send in pending[operation.communicator]
            if not _is_received(received[send], index, order)
        ]
        if len(open_) >= limit:
            oldest = open_[0]
            text = (
                f"{named(operation)} may be launched while {label(operations[oldest])} is in "
                f"flight over {operation.communicator}; {execution.contract.name} allows {limit} "
                "at once"
            )
            fix = _behind_recv(execution, oldest, received[oldest], index)
            yield Violation("in-flight", oldest, index, None, text, fix)
            open_ = open_[-limit + 1 :] if limit > 1 else []
        pending[operation.communicator] = [*open_, index]


def _received(operations: Sequence[Operation]) -> dict[int, int | None]:
    """Per send the recv that retires it."""
    received: dict[int, int | None] = {}
    sent: dict[_Flight, int] = {}
    for index, operation in enumerate(operations):
        if operation.kind is Kind.SEND:
            received[index] = None
            sent[_flight(operation)] = index
        elif (
            operation.kind is Kind.RECV and (send := sent.pop(_flight(operation), None)) is not None
        ):
            received[send] = index
    return received


def _is_received(recv: int | None, before: int, order: HappensBefore) -> bool:
    return recv is not None and order.before(recv, before)


def _behind_recv(execution: Execution, send: int, recv: int | None, index: int) -> str:
    operations = execution.operations
    if recv is None:
        return f"receive {label(operations[send])} before {label(operations[index])}"
    return synchronise(operations[recv], operations[index], index < recv)


def _slots_free(execution: Execution, order: HappensBefore) -> Iterator[Violation]:
    """A slot is used again only when what it held before is received for certain."""
    slots, operations = execution.contract.slots, execution.operations
    if slots is None:
        return
    received = _received(operations)
    sends: defaultdict[str | None, list[int]] = defaultdict(list)
    for index, operation in enumerate(operations):
        if operation.kind is not Kind.SEND:
            continue
        earlier = sends[operation.communicator]
        earlier.append(index)
        if len(earlier) <= slots:
            continue
        send = earlier[-1 - slots]
        if not _is_received(received[send], index, order):
            text = (
                f"{named(operation)} takes the slot of {label(operations[send])}, which may be "
                "in flight still"
            )
            fix = _behind_recv(execution, send, received[send], index)
            yield Violation("slot", send, index, None, text, fix)


def _slots(execution: Execution) -> Iterator[Violation]:
    """Operation n of a region uses slot n modulo the number of slots; its recv the same one."""
    slots = execution.contract.slots
    if slots is None:
        yield from _no_slots(execution)
        return
    count: Counter[str | None] = Counter()
    sent: dict[_Flight, tuple[int, int | None]] = {}
    for index, operation in enumerate(execution.operations):
        if operation.kind is Kind.SEND:
            due = count[operation.communicator] % slots
            count[operation.communicator] += 1
            sent[_flight(operation)] = index, operation.slot
            if operation.slot not in (None, due):
                text = (
                    f"{named(operation)} uses slot {operation.slot}, but as send "
                    f"{count[operation.communicator]} over {operation.communicator} it gets slot "
                    f"{due}"
                )
                yield Violation("slot", None, index, None, text, f"give it slot {due}")
        elif operation.kind is Kind.RECV and _flight(operation) in sent:
            send, slot = sent[_flight(operation)]
            if operation.slot != slot:
                text = f"{named(operation)} reads slot {operation.slot}, its send fills slot {slot}"
                yield Violation("slot", send, index, None, text, f"give it slot {slot}")


def _no_slots(execution: Execution) -> Iterator[Violation]:
    """A transport without slots refuses an operation that names one."""
    for index, operation in enumerate(execution.operations):
        if operation.slot is not None:
            text = f"{named(operation)} uses slot {operation.slot}; {execution.contract.name} has"
            yield Violation("slot", None, index, None, f"{text} no slots", "leave the slot out")


def _parity(execution: Execution) -> Iterator[Violation]:
    parity = execution.contract.parity
    sends: defaultdict[str | None, list[int]] = defaultdict(list)
    for index, operation in enumerate(execution.operations):
        if operation.kind is Kind.SEND:
            sends[operation.communicator].append(index)
    for communicator, places in sends.items():
        if len(places) % parity:
            text = (
                f"{len(places)} sends over {communicator}; {execution.contract.name} wants a "
                f"multiple of {parity}, so that the next region starts at slot 0"
            )
            fix = f"add {parity - len(places) % parity} empty operation(s) at the end"
            yield Violation("parity", places[0], places[-1], None, text, fix)


@dataclass(frozen=True)
class Region:
    """One run of a program, captured or eager, in a row of runs over the same communicators.

    Attributes:
        execution: What it enqueues; it assumes that it starts at slot 0.
        completed: How many sends were launched before it failed; None if all of it ran.
        realigned: After a failure the slots were set back before the next region.
    """

    execution: Execution
    completed: int | None = None
    realigned: bool = True


def check_regions(history: Sequence[Region]) -> Iterator[Violation]:
    """Find regions that start at another slot than they assume.

    Args:
        history: Regions in the order in which they run.

    Yields:
        Violations of "slot"; `first` and `second` are indices into `history`: the region that
        left the slots off, and the one that starts there.
    """
    at: Counter[str | None] = Counter()
    cause: dict[str | None, int] = {}
    for index, region in enumerate(history):
        slots = region.execution.contract.slots
        sends = [o for o in region.execution.operations if o.kind is Kind.SEND]
        if slots is None:
            continue
        for communicator in dict.fromkeys(o.communicator for o in sends):
            if at[communicator] % slots:
                yield _misaligned(history, cause[communicator], index, communicator, at, slots)
                at[communicator] = 0  # Reported; the next one is judged by what this one leaves.
        failed = region.completed is not None
        for operation in sends[: region.completed]:
            at[operation.communicator] += 1
            cause[operation.communicator] = index
        if failed and region.realigned:
            at.clear()


def _misaligned(
    history: Sequence[Region],
    first: int,
    second: int,
    communicator: str | None,
    at: Counter[str | None],
    slots: int,
) -> Violation:
    before, after = history[first], history[second]
    how = "" if before.completed is None else f", which failed after {before.completed} sends"
    text = (
        f"region {second} ({after.execution.source}) assumes slot 0 of {communicator} and starts "
        f"at slot {at[communicator] % slots}, where region {first} ({before.execution.source})"
        f"{how} left it"
    )
    fix = f"re-align {communicator} to slot 0 behind region {first}, before region {second}"
    if before.completed is None:
        fix += f"; or give region {first} an even number of sends" if slots == 2 else ""
    return Violation("slot", first, second, None, text, fix)
