"""What all witnesses share: one run, many runs, one run of every class, and what they say."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dbo_fx.witness import choosers
from dbo_fx.witness.explore import Run, Skeleton, classes
from dbo_fx.witness.interleave import Chooser, Machine, Plan, Step, execute


@dataclass(frozen=True)
class Outcome:
    """What one run gave.

    Attributes:
        ok: It finished, broke no contract, and all results are the reference's.
        digest: A number for all results.
        problem: What went wrong, or "".
        steps: The interleaving.
    """

    ok: bool
    digest: int
    problem: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Verdict:
    """What many runs gave.

    Attributes:
        safe: No run failed.
        runs: How many ran.
        problem: What went wrong in the first one that failed, or "".
        interleaving: That run, one step a line, or "".
    """

    safe: bool
    runs: int
    problem: str = ""
    interleaving: str = ""

    def __str__(self) -> str:
        """`safe in 40 runs`, or the problem and the interleaving that shows it."""
        if self.safe:
            return f"safe in {self.runs} runs"
        return f"unsafe, found in run {self.runs}: {self.problem}\n{self.interleaving}"


class Witness(ABC):
    """Runs a plan under many interleavings.

    Attributes:
        plan: What the hosts enqueue.
        host_blocks: Whether some task makes its host wait.
    """

    plan: Plan
    host_blocks: bool = False

    @abstractmethod
    def fresh(self, blocking: bool = False) -> Machine:
        """A machine at the start, with a world as no run has touched it."""

    @abstractmethod
    def outcome(self, run: Run) -> Outcome:
        """Compare what a run left with the reference."""

    def run(self, chooser: Chooser = choosers.in_order, blocking: bool = False) -> Outcome:
        """Run once.

        Args:
            chooser: Which legal step comes next.
            blocking: Whether hosts wait for tasks that block them.
        """
        machine = self.fresh(blocking)
        return self.outcome(Run(machine, execute(machine, chooser)))

    def confirm(self, max_runs: int = 40, seed: int = 0) -> Verdict:
        """Run many interleavings, the most dangerous first, until one fails.

        Args:
            max_runs: How many.
            seed: For those that are drawn.
        """
        runs = 0
        for chooser, blocking in self._choices(seed):
            if runs == max_runs:
                break
            runs += 1
            outcome = self.run(chooser, blocking)
            if not outcome.ok:
                return self._unsafe(outcome, runs)
        return Verdict(True, runs)

    def exhaustive(self, limit: int = 10_000) -> Verdict:
        """Run one interleaving of every equivalence class, until one fails.

        Args:
            limit: Largest number of interleavings to try.

        Raises:
            TooManyClasses: There are more.
        """
        runs = 0
        for run in classes(self.plan, self.fresh, limit):
            runs += 1
            outcome = self.outcome(run)
            if not outcome.ok:
                return self._unsafe(outcome, runs)
        return Verdict(True, runs)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The order that always holds, and what it leaves open."""
        return Skeleton.of(self.plan)

    def _choices(self, seed: int) -> Iterator[tuple[Chooser, bool]]:
        yield choosers.in_order, False
        if self.host_blocks:
            yield choosers.in_order, True
        for stream in sorted({stream for _, stream in self.plan.names}):
            yield choosers.late(stream), False
            yield choosers.eager(stream), False
        draw = random.Random(seed)
        pairs = self.skeleton.pairs()
        draw.shuffle(pairs)
        for early, later in pairs:
            yield choosers.after(early, later), False
            yield choosers.delayed(early), False
            yield choosers.hastened(later, self.skeleton.needed(later)), False
        count = len(self.plan.tasks)
        while True:
            yield choosers.drawn(draw.getrandbits(32)), False
            yield choosers.delayed(draw.randrange(count)), False
            index = draw.randrange(count)
            yield choosers.hastened(index, self.skeleton.needed(index)), False

    def _unsafe(self, outcome: Outcome, runs: int) -> Verdict:
        return Verdict(False, runs, outcome.problem, self.plan.describe(outcome.steps))
