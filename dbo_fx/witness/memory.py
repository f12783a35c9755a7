"""A rank's memory, as the host hands it out, and what all ranks' tasks act on.

Memory of a rank is one list of words. Every stream has its own pool: what is freed goes on top of
it and is handed out next (last in, first out), to values of that stream only. A free is a task of
the stream that owns the memory and overwrites it at once. So the addresses are known before
anything runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dbo_fx.witness.interleave import Cell, Host, Task
from dbo_fx.witness.model import NEVER, POISON, WORDS, Value, Words, value_text
from dbo_fx.witness.transports import Channel

Gather = Callable[[list[int]], Any]


@dataclass
class World:
    """Memory, transports and results of all ranks in one run."""

    memory: list[list[int]]
    channels: dict[tuple[int, str], Channel]
    results: dict[tuple[int, int], int] = field(default_factory=dict)
    problem: str | None = None
    wrong: str | None = None
    done: list[bool] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or text


@dataclass(slots=True)
class Part:
    """One rank's part of a collective: what it gives, and what it does with what it gets."""

    label: str
    gather: Gather
    deliver: Callable[[World, Words], None]


def exchange(world: World, parts: Sequence[Task]) -> None:
    """Give every rank what all ranks gave; ranks that mean different collectives are a problem."""
    labels = [task.payload.label for task in parts]
    if len(set(labels)) > 1:
        met = ", ".join(f"rank {t.rank} at {t.payload.label}" for t in parts)
        world.fail(f"ranks meet at different collectives over {parts[0].meets}: {met}")
    words = tuple(w for t in parts for w in t.payload.gather(world.memory[t.rank]))
    for task in parts:
        task.payload.deliver(world, words)


class RankMemory:
    """Where a rank's values lie, and in whose memory.

    Args:
        host: Enqueues what overwrites memory.
        rank: The rank.
    """

    def __init__(self, host: Host, rank: int) -> None:
        """Nothing is allocated but what stands for values that nobody wrote."""
        self.host, self.rank = host, rank
        self.words = list(NEVER)
        self.blocks: dict[Value, int] = {}
        self._owner: dict[int, str] = {}
        self._pools: defaultdict[str, list[int]] = defaultdict(list)

    def address(self, value: Value) -> int:
        """Where a value lies; values that nobody wrote lie where nobody writes."""
        return self.blocks.get(value, 0)

    def cells(self, values: Iterable[Value]) -> list[Cell]:
        """The memory of values, as cells."""
        found = (self.address(v) for v in values)
        return [(self.rank, a) for a in found if a]

    def gather(self, values: Iterable[Value]) -> Gather:
        """Reads all words of some values from a memory."""
        bases = [self.address(v) for v in values] or [0]
        return itemgetter(*(b + i for b in bases for i in range(WORDS)))

    def allocate(self, value: Value, stream: str) -> int:
        """Give a value memory of a stream, unless it has some."""
        if value in self.blocks:
            return self.blocks[value]
        pool = self._pools[stream]
        if pool:
            base = pool.pop()
        else:
            base = len(self.words)
            self.words += POISON
        self.blocks[value] = base
        self._owner[base] = stream
        return base

    def poison(self, value: Value, why: str) -> None:
        """Overwrite a value's memory, in the order of the stream that owns it."""
        base, rank = self.blocks[value], self.rank

        def act(world: World) -> None:
            world.memory[rank][base : base + WORDS] = POISON

        self.host.run(self._owner[base], f"{why} {value_text(value)}", act, (), [(rank, base)])

    def free(self, value: Value) -> None:
        """Give a value's memory back; the next allocation of its stream gets it."""
        if value in self.blocks:
            self.poison(value, "free")
            base = self.blocks.pop(value)
            self._pools[self._owner[base]].append(base)
