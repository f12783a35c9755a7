"""One interleaving of every equivalence class, and the interleavings that look most dangerous.

Two interleavings are equivalent when one becomes the other by swapping neighbours that do not
conflict (Mazurkiewicz traces). `classes` runs one of each: a persistent set of queues says which
steps must be tried at a state, sleep sets keep what was tried from being tried again. Source:
Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", chapters 4 and 5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dbo_fx.errors import DboError
from dbo_fx.witness.interleave import Cell, Machine, Plan, Step, Task


class TooManyClasses(DboError):
    """A plan has more equivalence classes than the caller wants to run."""


@dataclass
class Skeleton:
    """The order that holds on every run, and the conflicting pairs that it leaves open.

    Attributes:
        ancestors: Per task, the tasks of the same rank that are always done before it, as bits.
        rivals: Per task, conflicting tasks that may run before or after it.
    """

    ancestors: list[int]
    rivals: list[list[int]]

    @classmethod
    def of(cls, plan: Plan) -> Skeleton:
        """Read it off queues and events; meetings are taken to order nothing across ranks."""
        ancestors = [0] * len(plan.tasks)
        last: dict[int, int] = {}
        for task in plan.tasks:
            for index in (last.get(task.queue, -1), task.needs):
                if index >= 0:
                    ancestors[task.index] |= ancestors[index] | (1 << index)
            last[task.queue] = task.index
        rivals: list[list[int]] = [[] for _ in plan.tasks]
        users: defaultdict[Cell, list[Task]] = defaultdict(list)
        pairs: set[tuple[int, int]] = set()
        for task in plan.tasks:
            for cell in task.reads | task.writes:
                for other in users[cell]:
                    if other.queue == task.queue or ancestors[task.index] >> other.index & 1:
                        continue
                    if cell in task.writes or cell in other.writes:
                        pairs.add((other.index, task.index))
                users[cell].append(task)
        for early, later in sorted(pairs):
            rivals[early].append(later)
            rivals[later].append(early)
        return cls(ancestors, rivals)

    def pairs(self) -> list[tuple[int, int]]:
        """The open pairs, each once, earlier task first."""
        return [(a, b) for a, others in enumerate(self.rivals) for b in others if a < b]

    def needed(self, index: int) -> frozenset[int]:
        """The ancestors of a task as a set."""
        bits = self.ancestors[index]
        return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)


@dataclass(frozen=True)
class Run:
    """One complete run: the machine as it ended, and the text of a stuck state."""

    machine: Machine
    stuck: str | None


def classes(plan: Plan, fresh: Callable[[], Machine], limit: int = 10_000) -> Iterator[Run]:
    """Run one interleaving of every class.

    Args:
        plan: What the machines run.
        fresh: Makes a machine at the start of the plan, with a world of its own.
        limit: Largest number of runs, counting those that turn out to be in a class already seen.

    Raises:
        TooManyClasses: The limit is reached before all classes have run.
    """
    skeleton = Skeleton.of(plan)
    todo: list[tuple[tuple[Step, ...], frozenset[Step]]] = [((), frozenset())]
    runs = 0
    while todo:
        runs += 1
        if runs > limit:
            raise TooManyClasses(
                f"found more than {limit} interleavings to run, wanted at most that many; raise "
                "the limit, take a program of fewer layers, or sample with confirm()"
            )
        prefix, sleep = todo.pop()
        machine = fresh()
        for step in prefix:
            machine.run(step)
        if _finish(machine, skeleton, sleep, todo):
            yield Run(machine, machine.stuck())


def _finish(
    machine: Machine,
    skeleton: Skeleton,
    sleep: frozenset[Step],
    todo: list[tuple[tuple[Step, ...], frozenset[Step]]],
) -> bool:
    """Run to the end, leaving the other choices in `todo`; False where all choices sleep."""
    while steps := machine.enabled():
        chosen = steps if len(steps) == 1 else _persistent(machine, steps, skeleton)
        awake = [s for s in chosen if s not in sleep]
        if not awake:
            return False
        seen = set(sleep)
        first = awake[0]
        seen.add(first)
        for step in awake[1:]:
            rest = frozenset(s for s in seen if _independent(machine.plan, s, step))
            todo.append(((*machine.trace, step), rest))
            seen.add(step)
        if sleep:
            sleep = frozenset(s for s in sleep if _independent(machine.plan, s, first))
        machine.run(first)
    return True


def _independent(plan: Plan, one: Step, other: Step) -> bool:
    tasks = plan.tasks
    return not any(
        tasks[i].queue == tasks[j].queue or tasks[i].conflicts(tasks[j]) for i in one for j in other
    )


def _persistent(machine: Machine, steps: list[Step], skeleton: Skeleton) -> list[Step]:
    """The smallest set of steps, over all starting points, that nothing outside can disturb."""
    best = steps
    for start in steps:
        queues = _closure(machine, start, skeleton)
        found = [s for s in steps if any(machine.plan.tasks[i].queue in queues for i in s)]
        if len(found) < len(best):
            best = found
        if len(best) == 1:
            break
    return best


def _closure(machine: Machine, start: Step, skeleton: Skeleton) -> set[int]:
    plan, done = machine.plan, machine.done
    todo = [plan.tasks[i].queue for i in start]
    queues: set[int] = set()
    while todo:
        queue = todo.pop()
        if queue in queues or machine.at[queue] == len(plan.queues[queue]):
            continue
        queues.add(queue)
        head = plan.queues[queue][machine.at[queue]]
        todo += [plan.tasks[r].queue for r in skeleton.rivals[head.index] if not done[r]]
        todo += _enablers(machine, head)
    return queues


def _enablers(machine: Machine, head: Task) -> list[int]:
    """Queues of which one must move before a head that may not run yet can run."""
    plan, done = machine.plan, machine.done
    if head.needs >= 0 and not done[head.needs]:
        return [plan.tasks[head.needs].queue]
    if machine.blocking and head.barrier >= 0 and not done[head.barrier]:
        return [plan.tasks[head.barrier].queue]
    if head.takes and head.rank in machine.taken:
        return [machine.taken[head.rank].queue]
    if head.meets is None:
        return []
    # The queues of the other ranks that can still take part, those that are there included.
    return [
        index
        for index, queue in enumerate(plan.queues)
        if plan.names[index][0] != head.rank
        and any(t.meets == head.meets for t in queue[machine.at[index] :])
    ]
