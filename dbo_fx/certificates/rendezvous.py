"""Wait-for over ranks, streams and hosts: who waits for whom when nothing can go on.

Every rank goes on as far as it can. Progress only ever enables more of it, so one run to the end
shows what every run does, whatever the timing. Rendezvous is the strictest meaning of a launch: it
is over once every member of its communicator has come to it, and until then it holds up its stream.
Ranks that run the same program are always at the same place, so one of them stands for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from dbo_fx.certificates.execution import Kind, Operation

Instance = tuple[str, int]  # Communicator, and how many launches over it came before.
Place = tuple[int, int]  # Index of the stand-in, index of its operation.


def is_launch(operation: Operation) -> bool:
    """Whether the operation starts a communication."""
    return operation.kind in (Kind.SEND, Kind.COLLECTIVE)


def launches(operations: Sequence[Operation]) -> dict[Instance, int]:
    """Every launch's index, by its place among the launches over its communicator."""
    counts: defaultdict[str, int] = defaultdict(int)
    found: dict[Instance, int] = {}
    for index, operation in enumerate(operations):
        if is_launch(operation):
            assert operation.communicator is not None, f"{operation.name} names no communicator"
            found[operation.communicator, counts[operation.communicator]] = index
            counts[operation.communicator] += 1
    return found


@dataclass
class _Rank:
    """One stand-in: what its host has enqueued, and how far its streams are."""

    rank: int
    operations: Sequence[Operation]
    enqueued: int = 0
    done: bytearray = field(init=False)
    queues: dict[str, list[int]] = field(init=False)
    at: dict[str, int] = field(init=False)
    index_of: dict[Instance, int] = field(init=False)
    instance_of: dict[int, Instance] = field(init=False)
    source: dict[int, int | None] = field(init=False)

    def __post_init__(self) -> None:
        """Sort the operations by stream, and find what waits and recvs wait for."""
        self.done = bytearray(len(self.operations))
        queues: defaultdict[str, list[int]] = defaultdict(list)
        for index, operation in enumerate(self.operations):
            queues[operation.stream].append(index)
        self.queues = dict(queues)
        self.at = dict.fromkeys(queues, 0)
        self.index_of = launches(self.operations)
        self.instance_of = {index: instance for instance, index in self.index_of.items()}
        self.source = _sources(self.operations)

    @property
    def finished(self) -> bool:
        """Whether everything is done."""
        return all(self.done)

    def host_waits_in(self) -> int | None:
        """The operation that holds the host, None if the host is free."""
        last = self.enqueued - 1
        holds = last >= 0 and self.operations[last].blocks_host and not self.done[last]
        return last if holds else None

    def head(self, stream: str) -> int | None:
        """The first operation of a stream that is not done, whether enqueued or not."""
        queue, at = self.queues[stream], self.at[stream]
        return queue[at] if at < len(queue) else None


def _sources(operations: Sequence[Operation]) -> dict[int, int | None]:
    """What each wait and each recv waits for on its own rank: a record, a send, or nothing."""
    recorded: dict[int | None, int] = {}
    sends: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, operation in enumerate(operations):
        if operation.kind is Kind.SEND:
            sends[operation.communicator, operation.flight].append(index)
    retired: defaultdict[Hashable, int] = defaultdict(int)
    found: dict[int, int | None] = {}
    for index, operation in enumerate(operations):
        if operation.kind is Kind.RECORD:
            recorded[operation.event] = index
        elif operation.kind is Kind.WAIT:
            found[index] = recorded.get(operation.event)
        elif operation.kind is Kind.RECV:
            key = operation.communicator, operation.flight
            found[index] = sends[key][retired[key]] if retired[key] < len(sends[key]) else None
            retired[key] += 1
    return found


class Rendezvous:
    """Runs programs of several ranks to the end, or to where nothing can go on.

    Args:
        programs: The operations of each stand-in, by the first rank that it stands for.
        members: Which stand-ins take part in each communicator.
    """

    def __init__(
        self, programs: Mapping[int, Sequence[Operation]], members: Mapping[str, frozenset[int]]
    ) -> None:
        """Nothing has run yet."""
        self.ranks = [_Rank(rank, operations) for rank, operations in programs.items()]
        index = {rank.rank: i for i, rank in enumerate(self.ranks)}
        self.members = {c: frozenset(index[r] for r in ranks) for c, ranks in members.items()}
        self.arrived: defaultdict[Instance, set[int]] = defaultdict(set)

    def run(self) -> bool:
        """Go on until nothing can; whether everything is done then."""
        while any([self._advance(who) for who in range(len(self.ranks))]):
            pass
        return all(rank.finished for rank in self.ranks)

    def _advance(self, who: int) -> bool:
        rank, went_on, again = self.ranks[who], False, True
        while again:
            again = False
            while rank.enqueued < len(rank.operations) and rank.host_waits_in() is None:
                rank.enqueued += 1
                again = True
            for stream in rank.queues:
                while (index := rank.head(stream)) is not None and self._is_ready(who, index):
                    rank.done[index] = 1
                    rank.at[stream] += 1
                    again = True
            went_on = went_on or again
        return went_on

    def _is_ready(self, who: int, index: int) -> bool:
        """Whether the first operation of a stream can be completed now."""
        rank = self.ranks[who]
        if index >= rank.enqueued:
            return False
        operation = rank.operations[index]
        if operation.kind is Kind.WAIT:
            source = rank.source[index]
            return source is None or bool(rank.done[source])
        if operation.kind is Kind.RECV:
            source = rank.source[index]
            return source is not None and bool(rank.done[source])
        if is_launch(operation):
            instance = rank.instance_of[index]
            self.arrived[instance].add(who)
            return self.arrived[instance] >= self.members[instance[0]]
        return True

    def chain(self) -> tuple[str, ...]:
        """After a run that got stuck: the circle of waits, or the waits up to a dead end."""
        who = next(i for i, rank in enumerate(self.ranks) if not rank.finished)
        place: Place | None = who, self.ranks[who].done.index(0)
        seen: dict[Place, int] = {}
        lines: list[str] = []
        while place is not None and place not in seen:
            seen[place] = len(lines)
            line, place = self._blocker(*place)
            lines += [line] if line else []
        return tuple(lines[seen[place] :] if place is not None else lines)

    def _blocker(self, who: int, index: int) -> tuple[str, Place | None]:
        """Why an operation is not done, and what has to be done first."""
        rank = self.ranks[who]
        operation = rank.operations[index]
        if index >= rank.enqueued:
            held = rank.host_waits_in()
            assert held is not None, "the host is free, but has not enqueued everything"
            name = rank.operations[held].name
            text = f"rank {rank.rank}: the host waits in {name}, before it reaches {operation.name}"
            return text, (who, held)
        head = rank.head(operation.stream)
        assert head is not None, f"{operation.name} is not done, but its stream is"
        if head != index:
            return "", (who, head)
        waits = f"rank {rank.rank}: {operation.stream} waits in {operation.name} for"
        if is_launch(operation):
            return self._missing(waits, who, index)
        source = rank.source[index]
        if source is None:
            return f"{waits} a send that this rank never makes", None
        return f"{waits} {rank.operations[source].name}", (who, source)

    def _missing(self, waits: str, who: int, index: int) -> tuple[str, Place | None]:
        """Which member has not come to a launch, and where that member's own launch is."""
        instance = self.ranks[who].instance_of[index]
        late = min(self.members[instance[0]] - self.arrived[instance])
        other = self.ranks[late]
        if instance not in other.index_of:
            return f"{waits} rank {other.rank}, which never launches it", None
        return f"{waits} rank {other.rank}", (late, other.index_of[instance])
