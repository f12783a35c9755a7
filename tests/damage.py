"""Named ways to damage a program, each with the class that the verifier and the witness must see.

An operator takes a valid case and yields mutants. Their class does not come from the verifier: an
operator that changes events, lifetimes or the order takes it from `damage_order`, which computes
what the program really needs; one that breaks a contract or a pairing says `unsafe` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from damage_class import Class, class_of
from dbo_fx import schedules
from dbo_fx.contracts import Contract
from dbo_fx.ir import STREAMS, Program, Run, Step
from generated import Case, case, contracts, scheduled


@dataclass(frozen=True, slots=True)
class Damage:
    """What an operator did to a case.

    Attributes:
        programs: What the ranks run: one program for all, or one each.
        expected: Its class; None if it is to follow from the orders that the base needs.
        note: What was done.
        completed: Sends that a region before it had launched when it failed, its slots not set
            back; None if none failed.
        among: Where it follows: damage of another class is none of this operator's.
        captured: Whether it runs under capture.
        communicators: 2 if combines go over a communicator of their own.
    """

    programs: tuple[Program, ...]
    expected: Class | None
    note: str
    among: tuple[Class, ...] = ("unsafe", "redundant", "slower")
    completed: int | None = None
    captured: bool = False
    communicators: int = 1

    def as_class(self, expected: Class) -> Damage:
        """The same damage under a declared class."""
        return replace(self, expected=expected)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged program, with the name of the operator and the valid case it was made from."""

    operator: str
    base: Case
    damage: Damage

    @property
    def programs(self) -> tuple[Program, ...]:
        """What each of two ranks runs."""
        programs = self.damage.programs
        return programs if len(programs) > 1 else programs * 2

    def __str__(self) -> str:
        """What it is, and the programs, for a failure report."""
        texts = "\n".join(map(str, self.damage.programs))
        return (
            f"{self.operator}: {self.damage.note}; declared {self.damage.expected}, over "
            f"{self.base.contract.name}\n{texts}"
        )


Operator = Callable[[Case], Iterator[Damage]]
OPERATORS: dict[str, Operator] = {}
HARMLESS: set[str] = set()  # Operators whose mutants are never unsafe.


def operator(name: str, *, serious: bool = True) -> Callable[[Operator], Operator]:
    """Register an operator on programs under a name.

    Args:
        name: The name.
        serious: Whether some of its mutants are unsafe.
    """

    def register(function: Operator) -> Operator:
        assert name not in OPERATORS, name
        OPERATORS[name] = function
        if not serious:
            HARMLESS.add(name)
        return function

    return register


def mutants(name: str, base: Case, rng: Random | None = None) -> Iterator[Mutant]:
    """An operator's mutants of a case, each with its class.

    Args:
        name: The operator.
        base: The case.
        rng: Draws their order; the operator's own by default.
    """
    damages = list(OPERATORS[name](base))
    if rng is not None:
        rng.shuffle(damages)
    for damage in damages:
        if damage.expected is None:
            damage = damage.as_class(class_of(base.program, base.contract, damage.programs[0]))
            if damage.expected not in damage.among:
                continue
        yield Mutant(name, base, damage)


def classed(base: Case, steps: Sequence[Step], note: str) -> Damage:
    """A damage whose class follows from the orders that the base needs."""
    return Damage((replace(base.program, steps=tuple(steps)),), None, note)


def unsafe(base: Case, steps: Sequence[Step], note: str) -> Damage:
    """A damage that is wrong whatever the orders are."""
    return Damage((replace(base.program, steps=tuple(steps)),), "unsafe", note)


def only(damages: Iterable[Damage], *classes: Class) -> Iterator[Damage]:
    """Those of some classes; others would be damage of another kind."""
    return (replace(d, among=classes) for d in damages)


def moved(steps: tuple[Step, ...], index: int, to: int) -> list[Step]:
    """The steps with one moved to stand directly before the step that had the number `to`."""
    rest = [*steps[:index], *steps[index + 1 :]]
    rest.insert(to if to <= index else to - 1, steps[index])
    return rest


def without(steps: tuple[Step, ...], *indices: int) -> list[Step]:
    """The steps without some."""
    return [step for index, step in enumerate(steps) if index not in indices]


def substituted(steps: tuple[Step, ...], changes: dict[int, Step]) -> list[Step]:
    """The steps with some replaced."""
    return [changes.get(index, step) for index, step in enumerate(steps)]


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the matrix: a schedule, or `generated` programs, under a contract."""

    schedule: str
    contract: Contract
    layers: int

    def base(self, rng: Random) -> Case | None:
        """A valid program to damage; None where the contract forbids the schedule."""
        if self.schedule == "generated":
            return case(rng.randrange(1 << 30), self.contract)
        return scheduled(self.schedule, self.layers, self.contract, rng.choice((2, 3)))


def matrix(layers: tuple[int, ...] = (1, 2, 3)) -> list[Cell]:
    """Every schedule and the generated programs, under every contract, over some layers."""
    named = [
        Cell(name, contract, n)
        for name in schedules.names()
        for contract in contracts()
        for n in layers
    ]
    return [*named, *(Cell("generated", contract, 0) for contract in contracts())]


def sample(name: str, rng: Random, cells: Sequence[Cell]) -> Iterator[Mutant]:
    """A mutant of every cell in which the operator finds something to damage, in random order."""
    for cell in rng.sample(cells, len(cells)):
        base = cell.base(rng)
        if base is not None:
            yield from islice(mutants(name, base, rng), 1)


def jumbled(base: Case, rng: Random, edits: int) -> Program:
    """A program with random edits of any kind: steps moved, dropped, doubled, on other streams.

    It has no declared class; what can be asked is whether a certificate for it is right.
    """
    steps = list(base.program.steps)
    for _ in range(edits):
        index = rng.randrange(len(steps))
        step = steps[index]
        kind = rng.random()
        if kind < 0.6:
            near = index + rng.choice((-3, -2, -1, 1, 2, 3))
            steps.insert(max(0, min(len(steps) - 1, near)), steps.pop(index))
        elif kind < 0.8:
            # A phase that nobody runs is not in the model: such a program is another one.
            if not isinstance(step, Run) or step.action.half is not None:
                steps.pop(index)
        elif kind < 0.9:
            steps.insert(rng.randrange(len(steps)), step)
        else:
            steps[index] = replace(step, stream=rng.choice(STREAMS))
    return replace(base.program, steps=tuple(steps))
