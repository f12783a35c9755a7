"""Prove that one rank's program has no race: order, lifetimes, events, forks and joins.

Two accesses of a storage conflict if one of them writes. Every pair that the reference orders must
be ordered in its direction (`Execution.required`); every other conflicting pair, lifetimes
included, must be ordered as the host enqueues it. What transports demand is in `rules`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dbo_fx.certificates import rules
from dbo_fx.certificates.counterexample import shortest
from dbo_fx.certificates.execution import Execution, Kind, Operation, Required, Storage
from dbo_fx.certificates.hazard_certificate import HazardCertificate
from dbo_fx.certificates.order import HappensBefore
from dbo_fx.certificates.violation import Violation, label, named, synchronise
from dbo_fx.errors import VerificationError

__all__ = ["HazardCertificate", "Violation", "prove", "violations"]

_HOST = (Kind.ALLOCATE, Kind.FREE)
_MARKERS = (*_HOST, Kind.RECORD, Kind.WAIT)


def violations(execution: Execution, captured: bool = False) -> Iterator[Violation]:
    """Find every broken rule, one after the other.

    Args:
        execution: What the host enqueues.
        captured: The program is to run under CUDA graph capture.

    Yields:
        Violations; several may have one cause. `counterexample.shortest` picks one.
    """
    order = HappensBefore(execution.operations)
    yield from _events(execution)
    yield from _required(execution, order)
    yield from _storages(execution, order)
    yield from _forks_and_joins(execution, order)
    yield from rules.broken_contract(execution, order)
    if captured:
        yield from rules.not_capturable(execution)


def prove(execution: Execution, captured: bool = False) -> HazardCertificate:
    """Certify a program, or refuse it with the shortest counterexample.

    Args:
        execution: What the host enqueues.
        captured: The program is to run under CUDA graph capture.

    Returns:
        What was proven.

    Raises:
        VerificationError: A rule is broken; `counterexample` shows where.
    """
    found = shortest(execution, violations(execution, captured))
    if found is not None:
        raise VerificationError(str(found), counterexample=found)
    return _certificate(execution)


def _certificate(execution: Execution) -> HazardCertificate:
    operations, required = execution.operations, execution.required
    kinds = [o.kind for o in operations]
    refusal = next(rules.not_capturable(execution), None)
    return HazardCertificate(
        dependencies=len(required),
        cross_stream=sum(
            operations[r.before].stream != operations[r.after].stream for r in required
        ),
        storages=len({s for o in operations for s in o.reads | o.writes}),
        lifetimes=kinds.count(Kind.FREE),
        communications=rules.communications(operations),
        max_in_flight=rules.most_in_flight(operations),
        events=kinds.count(Kind.RECORD),
        capturable=refusal is None,
        reason="" if refusal is None else refusal.missing,
    )


def _events(execution: Execution) -> Iterator[Violation]:
    recorded: dict[int | None, int] = {}
    all_records = {o.event: i for i, o in enumerate(execution.operations) if o.kind is Kind.RECORD}
    for index, operation in enumerate(execution.operations):
        event = operation.event
        if operation.kind is Kind.RECORD:
            if event in recorded:
                yield Violation(
                    "event",
                    recorded[event],
                    index,
                    None,
                    f"e{event} is recorded twice",
                    "give the second record an event of its own",
                )
            recorded.setdefault(event, index)
        elif operation.kind is Kind.WAIT and event not in recorded:
            later = all_records.get(event)
            yield Violation(
                "event",
                later,
                index,
                None,
                f"{operation.stream} waits for e{event}, which is not recorded before",
                "put the record behind the last operation that the wait is for"
                if later is None
                else f"move record e{event} before its wait",
            )


def _required(execution: Execution, order: HappensBefore) -> Iterator[Violation]:
    operations = execution.operations
    inputs = {s for o in operations if o.kind is Kind.BEGIN for s in o.writes}
    for need in execution.required:
        if order.before(need.before, need.after):
            continue
        first, second = operations[need.before], operations[need.after]
        swap = need.after < need.before
        yield Violation(
            _rule(need, first, second, inputs),
            need.before,
            need.after,
            need.storage,
            f"{named(second)} {'runs before' if swap else 'is not ordered behind'} {named(first)} "
            f"({need.kind})",
            synchronise(first, second, swap),
        )


def _rule(need: Required, first: Operation, second: Operation, inputs: set[Storage]) -> str:
    """A mutated input makes later tokens depend on earlier ones; anything else is a dependency."""
    one, other = first.action, second.action
    if need.storage not in inputs or one is None or other is None:
        return "dependency"
    return "dependency" if one.microbatch == other.microbatch else "microbatch-order"


@dataclass(slots=True)
class _History:
    """What happened to one storage so far, in host order."""

    allocated: int | None = None
    doubled: int | None = None  # The access before a second allocation.
    written: int | None = None  # By the last operation that left a value.
    freed: int | None = None
    last_write: int | None = None  # Lifetimes included.
    readers: list[int] = field(default_factory=list)


def _storages(execution: Execution, order: HappensBefore) -> Iterator[Violation]:
    histories: defaultdict[Storage, _History] = defaultdict(_History)
    owned = {s for o in execution.operations if o.kind is Kind.ALLOCATE for s in o.writes}
    covered = {(r.before, r.after) for r in execution.required}
    writers: defaultdict[tuple[int, Storage | None], list[int]] = defaultdict(list)
    for need in execution.required:
        if need.kind == "RAW":
            writers[need.after, need.storage].append(need.before)
    for index, operation in enumerate(execution.operations):
        for storage in sorted(operation.reads | operation.writes, key=str):
            history = histories[storage]
            yield from _existence(execution, index, storage, history, storage in owned)
            yield from _overwritten(execution, index, storage, history, writers[index, storage])
            for earlier in _conflicting(history, storage in operation.writes):
                if (earlier, index) not in covered and not order.before(earlier, index):
                    yield _unordered(execution, earlier, index, storage)
            _enter(history, operation, index, storage in operation.writes)


def _conflicting(history: _History, writes: bool) -> list[int]:
    last = [] if history.last_write is None else [history.last_write]
    return [*last, *history.readers] if writes else last


def _enter(history: _History, operation: Operation, index: int, writes: bool) -> None:
    if not writes:
        history.readers.append(index)
        return
    history.last_write = index
    history.readers.clear()
    if operation.kind is Kind.ALLOCATE:
        if history.freed is None:
            history.doubled = history.allocated if history.written is None else history.written
        history.allocated, history.freed, history.written = index, None, None
    elif operation.kind is Kind.FREE:
        history.freed = index
    else:
        history.written, history.doubled = index, None


def _existence(
    execution: Execution, index: int, storage: Storage, history: _History, owned: bool
) -> Iterator[Violation]:
    """In host order: allocated, written, read, freed."""
    operation, name = execution.operations[index], execution.label(storage)
    if operation.kind is Kind.ALLOCATE:
        return
    if history.doubled is not None and operation.kind is not Kind.FREE:
        text = f"{named(operation)} makes {name} a second time"
        fix = f"remove the second {operation.name}"
        yield Violation("dependency", history.doubled, index, storage, text, fix)
    if history.freed is not None:
        text = f"{named(operation)} comes behind the end of the lifetime of {name}"
        freed = execution.operations[history.freed]
        fix = f"move {label(freed)} behind {label(operation)}"
        yield Violation("lifetime", index, history.freed, storage, text, fix)
    elif owned and history.allocated is None:
        text = f"{named(operation)} needs {name}, which is not allocated before it"
        fix = f"run what makes {name} before {label(operation)}"
        yield Violation("dependency", None, index, storage, text, fix)
    elif history.written is None and storage not in operation.writes:
        text = f"{named(operation)} reads {name}, which nothing writes before it"
        fix = f"run what makes {name} before {label(operation)}"
        yield Violation("dependency", None, index, storage, text, fix)


def _overwritten(
    execution: Execution, index: int, storage: Storage, history: _History, writers: list[int]
) -> Iterator[Violation]:
    """What the reference reads is still there: nothing else has landed in the same storage."""
    last = history.written
    if last is None or not writers or last in writers or last < max(writers):
        return
    operations = execution.operations
    reader, writer, other = operations[index], operations[max(writers)], operations[last]
    name = execution.label(storage)
    text = f"{named(other)} overwrites {name} of {label(writer)} before {named(reader)} reads it"
    fix = f"give {label(other)} a buffer of its own, or move it behind {label(reader)}"
    yield Violation("dependency", last, index, storage, text, fix)


def _unordered(execution: Execution, earlier: int, index: int, storage: Storage) -> Violation:
    first, second = execution.operations[earlier], execution.operations[index]
    name = execution.label(storage)
    fix = synchronise(first, second, False)
    if second.kind is Kind.FREE:
        text = f"{name} may be freed while {named(first)} still uses it"
        fix = (
            f"record an event on {first.stream} behind {label(first)}, wait for it on "
            f"{second.stream}, and keep {name} alive behind the wait"
        )
        return Violation("lifetime", earlier, index, storage, text, fix)
    if first.kind in _HOST:
        text = f"{named(second)} may use {name} before its memory is free for it"
        return Violation("lifetime", earlier, index, storage, text, fix)
    rule = "join" if second.kind is Kind.END else "dependency"
    text = f"{named(second)} is not ordered behind {named(first)}"
    return Violation(rule, earlier, index, storage, text, fix)


def _forks_and_joins(execution: Execution, order: HappensBefore) -> Iterator[Violation]:
    operations = execution.operations
    begin = next((i for i, o in enumerate(operations) if o.kind is Kind.BEGIN), None)
    end = next((i for i, o in enumerate(operations) if o.kind is Kind.END), None)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, operation in enumerate(operations):
        if operation.kind not in (*_HOST, Kind.WAIT):
            first.setdefault(operation.stream, index)
        if operation.kind not in _MARKERS:
            last[operation.stream] = index
    for stream, index in first.items():
        if begin is not None and index != begin and not order.before(begin, index):
            text = f"{stream} is not forked: {named(operations[index])} waits for nothing"
            fix = synchronise(operations[begin], operations[index], False)
            yield Violation("fork", begin, index, None, text, fix)
    for stream, index in last.items():
        if end is not None and index != end and not order.before(index, end):
            text = f"{stream} is not joined at the end: {named(operations[index])} may still run"
            fix = synchronise(operations[index], operations[end], False)
            yield Violation("join", index, end, None, text, fix)
