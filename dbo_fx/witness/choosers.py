"""Who runs next: choosers for `interleave.execute`, from obedient to malicious."""

from __future__ import annotations

from random import Random

from dbo_fx.witness.interleave import Chooser, Machine, Step


def in_order(steps: list[Step], machine: Machine) -> Step:
    """The order in which the hosts enqueued, as far as ranks agree to meet."""
    return min(steps)


def drawn(seed: int) -> Chooser:
    """A uniform choice at every step."""
    choice = Random(seed).choice
    return lambda steps, machine: choice(steps)


def eager(stream: str) -> Chooser:
    """A stream runs as far ahead as it can, on all ranks."""
    return lambda steps, machine: min(steps, key=lambda s: (not _on(machine, s, stream), s))


def late(stream: str) -> Chooser:
    """A stream runs only when nothing else can, on all ranks."""
    return lambda steps, machine: min(steps, key=lambda s: (_on(machine, s, stream), s))


def delayed(index: int) -> Chooser:
    """A task runs as late as possible, and what stands behind it."""
    return lambda steps, machine: min(steps, key=lambda s: (index in s, s))


def hastened(index: int, wanted: frozenset[int]) -> Chooser:
    """A task runs as early as possible: what it needs (`wanted`) first, then it, then the rest."""
    return lambda steps, machine: min(
        steps, key=lambda s: (index not in s, wanted.isdisjoint(s), s)
    )


def after(first: int, second: int) -> Chooser:
    """One task runs directly behind another one, if it may."""

    def choose(steps: list[Step], machine: Machine) -> Step:
        ready = machine.done[second]
        return min(steps, key=lambda s: ((first not in s) if ready else (first in s), s))

    return choose


def _on(machine: Machine, step: Step, stream: str) -> bool:
    plan = machine.plan
    return any(plan.names[plan.tasks[i].queue][1] == stream for i in step)
