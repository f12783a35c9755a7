"""Operators that let one rank run another program than the rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from damage import Damage, operator
from damage_order import Shape, needed
from dbo_fx.ir import Action, Half, Program
from generated import Case, unsplit
from generated_binding import is_allowed, program_of


def _other_orders(base: Case) -> Iterator[tuple[Program, Action, Action]]:
    """The base with two neighbouring sends exchanged, each valid by itself."""
    program = base.program
    actions = list(program.actions)
    shape, pairs = Shape.of(program), needed(program)
    for one, other in pairwise([a for a in actions if a.half is Half.SEND]):
        first, second = actions.index(one), actions.index(other)
        needs = [
            a
            for a in actions[first:second]
            if (("run", a), ("run", other)) in pairs or _leads_to(a, other, actions, base)
        ]
        rest = [a for a in actions[first:second] if a not in needs]
        if one in needs:
            continue
        order = [*actions[:first], *needs, other, *rest, *actions[second + 1 :]]
        if is_allowed(order, base.contract):
            yield program_of(order, shape, base.contract, program.schedule), one, other


def _leads_to(action: Action, target: Action, actions: list[Action], base: Case) -> bool:
    """Whether the reference needs an action, over others, before the target."""
    pairs = needed(base.program)
    wanted = {target}
    for candidate in reversed(actions[: actions.index(target)]):
        if any((("run", candidate), ("run", w)) in pairs for w in wanted):
            wanted.add(candidate)
    return action in wanted


@operator("sends exchanged on one rank")
def sends_exchanged(base: Case) -> Iterator[Damage]:
    for program, one, other in _other_orders(base):
        note = f"rank 1 launches {other.bound()} before {one.bound()}"
        yield Damage((base.program, program), "unsafe", note)


@operator("communicators exchanged on one rank")
def communicators_exchanged(base: Case) -> Iterator[Damage]:
    """Dispatch and combine go over communicators of their own, each in the same order."""
    for program, one, other in _other_orders(base):
        if one.phase is not other.phase:
            note = f"rank 1 launches {other.bound()} before {one.bound()}"
            yield Damage((base.program, program), "unsafe", note, communicators=2)


@operator("one rank does not split")
def one_rank_unsplit(base: Case) -> Iterator[Damage]:
    if base.program.microbatches > 1:
        whole = unsplit(base.program, base.contract)
        yield Damage((base.program, whole), "unsafe", "rank 1 runs the unsplit model")
