"""The class of a damaged program: unsafe, slower, or redundant if neither."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from damage_order import Key, Pair, ancestors, broken, items, needed
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMP, Action, Half, Program

Class = Literal["unsafe", "redundant", "slower"]


def class_of(base: Program, contract: Contract, program: Program) -> Class:
    """Unsafe if a needed order is lost; slower if less can run beside communication."""
    if broken(program, needed(base)) or overrun(program, contract):
        return "unsafe"
    return "slower" if beside(program) < beside(base) else "redundant"


def beside(program: Program) -> frozenset[Pair]:
    """Which communications may run at the same time as which computations.

    A communication whose send is on the compute stream lasts until its recv there.
    """
    found = items(program)
    masks = ancestors(found)
    at = {item.key: index for index, item in enumerate(found)}
    others = [i for i, item in enumerate(found) if _is_compute(item.key)]
    pairs: set[Pair] = set()
    for i, item in enumerate(found):
        if _half(item.key) is not Half.SEND:
            continue
        if item.stream == COMP:
            until = at.get(_recv(item.key), i)
            pairs |= {(item.key, found[j].key) for j in others if i < j < until}
        else:
            free = (j for j in others if not (masks[i] >> j | masks[j] >> i) & 1)
            pairs |= {(item.key, found[j].key) for j in free}
    return frozenset(pairs)


def _is_compute(key: Key) -> bool:
    return key[0] == "run" and isinstance(key[1], Action) and not key[1].phase.is_communication


def overrun(program: Program, contract: Contract) -> str | None:
    """Which send may be launched before the contract allows it; programs with whole pairs only.

    At a send at most `max_in_flight` - 1 earlier ones may be un-received, and what its slot held
    before is received.
    """
    found = items(program)
    masks = ancestors(found)
    at = {item.key: index for index, item in enumerate(found)}
    sends = [item.key for item in found if _half(item.key) is Half.SEND]
    for n, key in enumerate(sends):
        mask = masks[at[key]]
        received = [bool(mask >> at[_recv(k)] & 1) for k in sends[:n]]
        limit, slots = contract.max_in_flight, contract.slots
        if limit is not None and received.count(False) >= limit:
            return f"{key[1]} is one too many"
        if slots is not None and n >= slots and not received[n - slots]:
            return f"{key[1]} takes a slot that is in use"
    return None


def _half(key: Key) -> Half | None:
    return key[1].half if key[0] == "run" and isinstance(key[1], Action) else None


def _recv(key: Key) -> Key:
    action = key[1]
    assert isinstance(action, Action)
    return "run", replace(action, half=Half.RECV)
