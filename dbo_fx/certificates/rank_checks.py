"""The checks behind `prove_ranks`: each raises with the ranks' lanes at the first difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise
from typing import Any

from dbo_fx.certificates.counterexample import Counterexample, Place
from dbo_fx.certificates.execution import Execution, Kind, Operation
from dbo_fx.certificates.order import HappensBefore
from dbo_fx.certificates.rendezvous import Instance, Rendezvous, launches
from dbo_fx.errors import VerificationError

SAME_PROGRAM = "Let every rank compile the same program: compare options, versions and input sizes."


@dataclass
class SameProgram:
    """Ranks that run the same operations."""

    ranks: list[int]
    operations: tuple[Operation, ...]
    launches: dict[Instance, int] = field(init=False)

    def __post_init__(self) -> None:
        """Number the launches."""
        self.launches = launches(self.operations)

    @property
    def rank(self) -> int:
        """The rank that stands for all."""
        return self.ranks[0]

    @cached_property
    def recvs(self) -> Counter[tuple[str | None, str, Any]]:
        """What the rank retires, over which communicator."""
        recvs = (o for o in self.operations if o.kind is Kind.RECV)
        return Counter((o.communicator, o.transfer, o.flight) for o in recvs)

    @cached_property
    def microbatches(self) -> frozenset[int]:
        """The microbatches whose actions are in the program."""
        actions = (o.action for o in self.operations)
        return frozenset(a.microbatch for a in actions if a and a.microbatch is not None)

    def launch(self, instance: Instance) -> Operation | None:
        """The launch itself, None if this rank has none."""
        index = self.launches.get(instance)
        return None if index is None else self.operations[index]

    def flight(self, communicator: str, flight: Hashable) -> Instance | None:
        """The first send of this flight."""
        for instance, index in self.launches.items():
            if instance[0] == communicator and self.operations[index].flight == flight:
                return instance
        return None

    def place(self, instance: Instance) -> Place | None:
        """The launch for a counterexample; its index is that of this rank."""
        index = self.launches.get(instance)
        if index is None:
            return None
        operation = self.operations[index]
        return Place(operation.name, operation.stream, index)

    def lane(self, *marked: Instance | None) -> list[str]:
        """The launches around the marked ones, and the marks below; the end where one is missing.

        Without a mark, the first few.
        """
        order = list(self.launches)
        place = {instance: i for i, instance in enumerate(order)}
        spots = sorted(place.get(i, len(order)) for i in marked if i is not None) or [2]
        shown = {i for spot in spots for i in range(spot - 2, spot + 3) if 0 <= i < len(order)}
        text, marks, last = f"rank {self.rank}", "", -1
        for i in sorted(shown):
            text += "" if i == last + 1 else "  ..."
            name = self.operations[self.launches[order[i]]].name
            if order[i] in marked:
                marks = marks.ljust(len(text) + 2) + "^" * len(name)
            text += f"  {name}"
            last = i
        text += "" if last == len(order) - 1 else "  ..."
        return [text, marks] if marks else [text]


def same_programs(executions: Sequence[Execution], count: int) -> list[SameProgram]:
    """The ranks sorted by what they run; one execution stands for `count` ranks."""
    if len(executions) == 1:
        return [SameProgram(list(range(count)), executions[0].operations)]
    classes: list[SameProgram] = []
    for rank, execution in enumerate(executions):
        for one in classes:
            if one.operations is execution.operations or one.operations == execution.operations:
                one.ranks.append(rank)
                break
        else:
            classes.append(SameProgram([rank], execution.operations))
    return classes


@dataclass
class RankChecks:
    """The checks of `prove_ranks`, in order."""

    classes: list[SameProgram]
    count: int
    members: Mapping[str, Sequence[int]]
    variant: str

    def error(
        self,
        rule: str,
        found: str,
        lanes: Sequence[str],
        fix: str,
        *places: tuple[SameProgram, Instance],
    ) -> VerificationError:
        """What a check raises: what was found, the ranks' launches with marks, and what to do."""
        first, second, *_ = (*(one.place(i) for one, i in places), None, None)
        picture = "\n".join(f"  {line}" for line in lanes)
        example = Counterexample(
            rule, self.variant, first, second, None, found, fix, picture=picture
        )
        return VerificationError(str(example), counterexample=example)

    def members_of(self, communicator: str) -> Sequence[int]:
        """The ranks that take part in a communicator."""
        return self.members.get(communicator, range(self.count))

    def counts(self) -> dict[str, int]:
        """The most launches of any rank, by communicator."""
        found: dict[str, int] = {}
        for one in self.classes:
            for communicator, n in one.launches:
                found[communicator] = max(found.get(communicator, 0), n + 1)
        return found

    def check_members(self) -> None:
        """Only members launch."""
        for one in self.classes:
            for communicator, n in one.launches:
                strangers = [r for r in one.ranks if r not in self.members_of(communicator)]
                if strangers:
                    name = one.operations[one.launches[communicator, n]].name
                    raise self.error(
                        "rank-order",
                        f"rank {strangers[0]} launches {name} over {communicator}, but is no "
                        f"member of it (members: {list(self.members_of(communicator))})",
                        one.lane((communicator, n)),
                        "Only members may launch; name every communicator's members.",
                        (one, (communicator, n)),
                    )

    def check_variants(self) -> None:
        """A rank whose program has other microbatches runs another variant."""
        first, *others = self.classes
        for one in others:
            if one.microbatches != first.microbatches:
                raise self.error(
                    "variant",
                    f"rank {first.rank} runs {_microbatches(first)} and rank {one.rank} "
                    f"{_microbatches(one)}: two variants in one step",
                    [*first.lane(), *one.lane()],
                    "Let all ranks agree on each step before it (dbo_fx.wrap, agree_batch).",
                )

    def check_total(self, one: SameProgram) -> None:
        """Each launch happens before the next one of its rank."""
        order = HappensBefore(one.operations)
        instances = list(one.launches)
        for first, second in pairwise(instances):
            i, j = one.launches[first], one.launches[second]
            # What holds the host until it is done is before all that the host reaches later.
            holds = (b for b in range(i, j) if one.operations[b].blocks_host)
            if order.before(i, j) or any(b == i or order.before(i, b) for b in holds):
                continue
            early, late = one.operations[i], one.operations[j]
            raise self.error(
                "rank-order",
                f"on rank {one.rank} nothing orders {early.name} on {early.stream} (over "
                f"{early.communicator}) and {late.name} on {late.stream} (over "
                f"{late.communicator}): each rank may start them in another order",
                one.lane(first, second),
                f"Record an event on {early.stream} behind {early.name} and let {late.stream} wait "
                f"for it before {late.name}, or launch both on one stream.",
                (one, first),
                (one, second),
            )

    def check_same(self) -> None:
        """The n-th launch over each communicator, and what is retired, is the same everywhere."""
        for communicator, launched in self.counts().items():
            taking = set(self.members_of(communicator))
            first, *others = [c for c in self.classes if taking & set(c.ranks)]
            for one in others:
                for n in range(launched):
                    self._check_launch(first, one, (communicator, n))
                self._check_recvs(first, one, communicator)

    def _check_launch(self, one: SameProgram, other: SameProgram, instance: Instance) -> None:
        mine, its = one.launch(instance), other.launch(instance)
        if mine and its and _what(mine) == _what(its):
            return
        raise self.error(
            "rank-order",
            f"launch {instance[1] + 1} over {instance[0]} differs: rank {one.rank} "
            f"{_said(mine)}, rank {other.rank} {_said(its)}",
            [*one.lane(instance), *other.lane(instance)],
            SAME_PROGRAM,
            (one, instance),
            (other, instance),
        )

    def _check_recvs(self, one: SameProgram, other: SameProgram, communicator: str) -> None:
        for missing, has in ((other, one), (one, other)):
            for (over, transfer, flight), _ in (has.recvs - missing.recvs).items():
                if over == communicator:
                    name = next(
                        o.name
                        for o in has.operations
                        if o.kind is Kind.RECV and (o.communicator, o.flight) == (over, flight)
                    )
                    raise self.error(
                        "rank-order",
                        f"rank {has.rank} retires {name} ({transfer}) over {over}, "
                        f"rank {missing.rank} does not",
                        [*has.lane(has.flight(over, flight)), *missing.lane()],
                        SAME_PROGRAM,
                    )

    def check_common_order(self) -> None:
        """All ranks' orders together have no circle, so one order holds on all of them."""
        before: dict[Instance, dict[Instance, SameProgram]] = {}
        for one in self.classes if len(self.classes) > 1 else ():
            instances = list(one.launches)
            for first, second in pairwise(instances):
                before.setdefault(second, {}).setdefault(first, one)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            circle: list[Instance] = error.args[1]
            pairs = pairwise(circle)
            steps = self._opposite() or [(before[b][a], a, b) for a, b in pairs]
        else:
            return
        lanes = [line for one, *marked in steps for line in one.lane(*marked)]
        raise self.error(
            "rank-order",
            f"launches in different orders: {', '.join(_order(*step) for step in steps)}",
            [*lanes, *self.stuck()],
            SAME_PROGRAM,
            *((one, late) for one, _, late in steps),
        )

    def _opposite(self) -> list[tuple[SameProgram, Instance, Instance]]:
        """The first two launches that two ranks make in opposite orders."""
        for one, other in combinations(self.classes, 2):
            place = {instance: i for i, instance in enumerate(other.launches)}
            shared = [i for i in one.launches if i in place]
            for first, second in pairwise(shared):
                if place[first] > place[second]:
                    return [(one, first, second), (other, second, first)]
        return []

    def stuck(self) -> tuple[str, ...]:
        """Who waits for whom where nothing can go on; nothing if all ranks come to the end."""
        programs = {one.rank: one.operations for one in self.classes}
        members = {
            name: frozenset(c.rank for c in self.classes if set(c.ranks) & taking)
            for name in self.counts()
            for taking in [set(self.members_of(name))]
        }
        run = Rendezvous(programs, members)
        return () if run.run() else run.chain()


def _microbatches(one: SameProgram) -> str:
    count = len(one.microbatches)
    return f"{count} microbatch{'es' if count > 1 else ''}" if count else "the unsplit model"


def _what(launch: Operation) -> tuple[Kind, str, Any]:
    return launch.kind, launch.transfer, launch.flight


def _said(launch: Operation | None) -> str:
    return "launches none" if launch is None else f"launches {launch.name} ({launch.transfer})"


def _order(one: SameProgram, first: Instance, second: Instance) -> str:
    early, late = one.launch(first), one.launch(second)
    assert early is not None
    assert late is not None
    return f"rank {one.rank} {early.name} before {late.name}"
