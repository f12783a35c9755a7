"""A broken rule, and the words in which all rules speak of operations."""

from __future__ import annotations

from dataclasses import dataclass

from dbo_fx.certificates.execution import Operation, Storage

RULES = (
    "dependency",
    "microbatch-order",
    "lifetime",
    "event",
    "fork",
    "join",
    "stream",
    "pairing",
    "in-flight",
    "slot",
    "parity",
    "capture",
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that a program breaks.

    Attributes:
        rule: One of `RULES`.
        first: Index of the operation that should be done first; None if only one takes part.
        second: Index of the operation that cannot run where it stands.
        storage: What both touch, if it is about a storage.
        missing: What is wrong: the order or the partner that is missing.
        fix: What to change.
    """

    rule: str
    first: int | None
    second: int | None
    storage: Storage | None
    missing: str
    fix: str


def named(operation: Operation) -> str:
    """An operation for people: `D_m0_l0_send of D_m0.send@0 on comm`, `free h_m0@0 on comp`."""
    return f"{label(operation)} on {operation.stream}"


def label(operation: Operation) -> str:
    """The same without its stream."""
    action = operation.action
    if action is None or action.microbatch is None or operation.name == action.bound():
        return operation.name
    return f"{operation.name} of {action.bound()}"


def synchronise(first: Operation, second: Operation, swap: bool) -> str:
    """How to order two operations, where the host enqueues `second` first if `swap`."""
    if swap:
        return f"move {label(second)} behind {label(first)}"
    return (
        f"record an event on {first.stream} behind {label(first)} and wait for it on "
        f"{second.stream} before {label(second)}"
    )
