"""Streams, events and hosts on CPU: what may run next, and who chooses.

A `Plan` holds what the hosts of R ranks enqueue. Every stream of every rank is a queue of deferred
tasks that run in order. Queues run in any order between each other, except that

* a wait starts when the record is done that stood last before it in host order; an event that was
  never recorded is not waited for (CUDA's semantics);
* a meeting, one rank's part of a collective, starts when every rank has one of the same
  communicator at the head of some queue; all parts then run as one step;
* where several communicators are in use, a rank runs one collective at a time: it takes its device
  when it arrives and gives it back after the meeting (`Host.meet` with `exclusive`). Libraries give
  no better promise, so an order that differs between ranks can get stuck;
* with `blocking`, a host enqueues nothing behind an unfinished blocking task.

Nothing here knows programs, graphs or transports. A step is a tuple of task indices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Step = tuple[int, ...]
Cell = Hashable


@dataclass(slots=True, eq=False)
class Task:
    """One deferred thing on one queue.

    Attributes:
        index: Position in `Plan.tasks`.
        rank: Whose task it is.
        queue: Index of the queue that it stands in.
        name: For people.
        act: What it does to the world; None for markers.
        reads: Cells that it reads. Cells of different ranks never compare equal.
        writes: Cells that it writes.
        needs: Task that must be done before, -1 for none.
        meets: The communicator whose other members must be there as well.
        takes: Occupies the rank's device until the next meeting of this queue.
        payload: What `Plan.exchange` needs to know of a meeting.
        blocks: The host waits for it.
        barrier: The last blocking task before it in host order, -1 for none.
    """

    index: int
    rank: int
    queue: int
    name: str
    act: Callable[[Any], None] | None = None
    reads: frozenset[Cell] = frozenset()
    writes: frozenset[Cell] = frozenset()
    needs: int = -1
    meets: str | None = None
    takes: bool = False
    payload: Any = None
    blocks: bool = False
    barrier: int = -1

    @property
    def is_marker(self) -> bool:
        """Whether it does nothing but order other tasks."""
        return self.act is None and self.meets is None

    def conflicts(self, other: Task) -> bool:
        """Whether the order of the two can matter to what they do."""
        return not (
            self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )


@dataclass
class Plan:
    """What all hosts enqueue.

    Attributes:
        ranks: Number of ranks.
        exchange: Runs a meeting: gets the world and the parts, ordered by rank.
    """

    ranks: int
    exchange: Callable[[Any, Sequence[Task]], None]
    tasks: list[Task] = field(default_factory=list)
    queues: list[list[Task]] = field(default_factory=list)
    names: list[tuple[int, str]] = field(default_factory=list)

    def text(self, index: int) -> str:
        """`rank 0 comm  D_m0.send@0`."""
        task = self.tasks[index]
        rank, stream = self.names[task.queue]
        return f"rank {rank} {stream}  {task.name}"

    def describe(self, steps: Iterable[Step]) -> str:
        """An interleaving, one step a line."""
        return "\n".join(" + ".join(map(self.text, step)) for step in steps)


class Host:
    """One rank's host: enqueues tasks and knows the latest record of every event.

    Args:
        plan: Where the tasks go.
        rank: The rank.
        exclusive: Whether collectives take the device when they arrive.
    """

    def __init__(self, plan: Plan, rank: int, exclusive: bool = False) -> None:
        """Start without streams; each comes into being with its first task."""
        self.plan, self.rank, self.exclusive = plan, rank, exclusive
        self.events: dict[int, int] = {}
        self._queues: dict[str, int] = {}
        self._barrier = -1

    def run(
        self,
        stream: str,
        name: str,
        act: Callable[[Any], None] | None,
        reads: Iterable[Cell] = (),
        writes: Iterable[Cell] = (),
        blocks: bool = False,
    ) -> Task:
        """Enqueue a task."""
        task = self._add(stream, name)
        task.act, task.reads, task.writes = act, frozenset(reads), frozenset(writes)
        self._block(task, blocks)
        return task

    def meet(
        self,
        stream: str,
        name: str,
        communicator: str,
        payload: Any,
        reads: Iterable[Cell] = (),
        writes: Iterable[Cell] = (),
        blocks: bool = False,
    ) -> Task:
        """Enqueue this rank's part of a collective."""
        turn: Cell = ("turn", self.rank, "" if self.exclusive else communicator)
        if self.exclusive:
            arrival = self._add(stream, f"{name} arrives")
            arrival.takes, arrival.writes = True, frozenset({turn})
        task = self._add(stream, name)
        task.meets, task.payload = communicator, payload
        task.reads, task.writes = frozenset(reads), frozenset({turn, *writes})
        self._block(task, blocks)
        return task

    def record(self, stream: str, event: int) -> None:
        """Enqueue a record of an event."""
        self.events[event] = self._add(stream, f"record e{event}").index

    def wait(self, stream: str, event: int) -> None:
        """Enqueue a wait for the latest record of an event, if there is one."""
        self._add(stream, f"wait e{event}").needs = self.events.get(event, -1)

    def tails(self, but: str) -> list[int]:
        """The last task that does something, of every stream but one."""
        found = []
        for stream, queue in self._queues.items():
            acting = (t.index for t in reversed(self.plan.queues[queue]) if not t.is_marker)
            last = next(acting, None)
            if stream != but and last is not None:
                found.append(last)
        return found

    def _add(self, stream: str, name: str) -> Task:
        plan = self.plan
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = len(plan.queues)
            plan.queues.append([])
            plan.names.append((self.rank, stream))
        task = Task(len(plan.tasks), self.rank, queue, name, barrier=self._barrier)
        plan.tasks.append(task)
        plan.queues[queue].append(task)
        return task

    def _block(self, task: Task, blocks: bool) -> None:
        task.blocks = blocks
        if blocks:
            self._barrier = task.index


class Machine:
    """A plan while it runs: which tasks are done, and what may run next.

    Args:
        plan: What to run.
        world: What tasks act on.
        blocking: Whether hosts wait for their blocking tasks.
    """

    def __init__(self, plan: Plan, world: Any, blocking: bool = False) -> None:
        """Nothing has run."""
        self.plan, self.world, self.blocking = plan, world, blocking
        self.done = [False] * len(plan.tasks)
        self.at = [0] * len(plan.queues)
        self.taken: dict[int, Task] = {}
        self.trace: list[Step] = []

    def enabled(self) -> list[Step]:
        """The steps that may run next."""
        found: list[Step] = []
        meetings: dict[str, dict[int, list[int]]] = {}
        done, at = self.done, self.at
        for index, queue in enumerate(self.plan.queues):
            if at[index] == len(queue):
                continue
            task = queue[at[index]]
            if task.needs >= 0 and not done[task.needs]:
                continue
            if self.blocking and task.barrier >= 0 and not done[task.barrier]:
                continue
            if task.takes and task.rank in self.taken:
                continue
            if task.meets is None:
                found.append((task.index,))
            else:
                meetings.setdefault(task.meets, {}).setdefault(task.rank, []).append(task.index)
        for parts in meetings.values():
            if len(parts) == self.plan.ranks:
                found += product(*(parts[rank] for rank in sorted(parts)))
        return found

    def run(self, step: Step) -> None:
        """Run a step that is enabled."""
        tasks = self.plan.tasks
        if len(step) == 1 and tasks[step[0]].meets is None:
            task = tasks[step[0]]
            if task.act is not None:
                task.act(self.world)
            if task.takes:
                self.taken[task.rank] = task
        else:
            parts = [tasks[i] for i in step]
            self.plan.exchange(self.world, parts)
            for part in parts:
                self.taken.pop(part.rank, None)
        for i in step:
            self.done[i] = True
            self.at[tasks[i].queue] += 1
        self.trace.append(step)

    def heads(self) -> list[Task]:
        """The tasks that stand first in their queues."""
        queues = self.plan.queues
        return [q[p] for q, p in zip(queues, self.at, strict=True) if p < len(q)]

    def stuck(self) -> str | None:
        """None when all is done, else the heads of all queues, to call when nothing may run."""
        heads = self.heads()
        if not heads:
            return None
        lines = [f"  {self.plan.text(t.index)}{self._reason(t)}" for t in heads]
        return "\n".join(["stuck; the heads of the queues are", *lines])

    def _reason(self, task: Task) -> str:
        if task.needs >= 0 and not self.done[task.needs]:
            return f" (waits for {self.plan.text(task.needs)})"
        if task.meets is not None:
            return f" (waits for the other ranks on {task.meets})"
        if task.takes and task.rank in self.taken:
            return f" (the device runs {self.taken[task.rank].name})"
        if self.blocking and task.barrier >= 0 and not self.done[task.barrier]:
            return f" (the host waits for {self.plan.text(task.barrier)})"
        return ""


Chooser = Callable[[list[Step], Machine], Step]


def execute(machine: Machine, chooser: Chooser) -> str | None:
    """Run a machine until nothing may run; return the text of a stuck state."""
    while steps := machine.enabled():
        machine.run(steps[0] if len(steps) == 1 else chooser(steps, machine))
    return machine.stuck()
