"""The order that a program must keep, derived from the captured graph and not from any schedule.

The reference runs microbatch 0 whole, then 1, and so on; inside a microbatch the captured graph's
order; slices first, merges last. What all microbatches share runs once, with microbatch 0. Every
conflict between two accesses in that order, and every value that one hands to the other, is an
order that the program must keep.

A shared node that writes must come before, or behind, the same nodes of *every* microbatch. Where
the captured graph has it behind a node, that node's later copies must stand before it too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from dbo_fx.certificates.execution import Kind, Required, Storage
from dbo_fx.effects import Member

Place = tuple[int, int | None]
_HALVES = (Kind.ALLOCATE, Kind.SEND, Kind.RECV)


@dataclass(frozen=True, slots=True)
class Step:
    """One captured node, as an operation of the program runs it.

    Attributes:
        operation: The operation's index.
        kind: Its kind.
        role: The role in the node's tag.
        member: The captured node.
    """

    operation: int
    kind: Kind
    role: str
    member: Member

    @property
    def key(self) -> tuple[int, int, int]:
        """Where the reference runs it."""
        half = _HALVES.index(self.kind) if self.kind in _HALVES else 0
        ends = {"slice": -1, "merge": 1 << 30, "end": 1 << 31}
        rank = ends.get(self.role, self.member.microbatch or 0)
        return rank, self.member.position, half


@dataclass
class Reference:
    """All steps in the reference's order.

    Attributes:
        steps: The steps, sorted.
        creator: The operation that each storage comes into being in.
        live_in: Storages of inputs and constants.
    """

    steps: list[Step]
    live_in: frozenset[Storage]
    creator: dict[Storage, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort, and find out where storages come from."""
        self.steps = sorted(self.steps, key=lambda s: s.key)
        for step in self.steps:
            for key in step.member.access.results - self.live_in:
                self.creator.setdefault(key, step.operation)

    def required(self, captured: Sequence[Node]) -> tuple[Required, ...]:
        """Every order that the program must keep, each once.

        Args:
            captured: The captured graph's nodes; members say their positions in it.
        """
        found: dict[tuple[int, int, str, Storage], Required] = {}
        for order in (self._conflicts(), self._shared_writes(), self._values(captured)):
            for r in order:
                if r.before != r.after:
                    found.setdefault((r.before, r.after, r.kind, r.storage), r)
        return tuple(
            sorted(found.values(), key=lambda r: (r.after, r.before, r.kind, str(r.storage)))
        )

    def _conflicts(self) -> Iterator[Required]:
        writer: dict[Storage, int] = {}
        readers: defaultdict[Storage, list[int]] = defaultdict(list)
        for step in self.steps:
            here, access = step.operation, step.member.access
            for key in access.results:
                if key not in writer and self.creator.get(key) == here:
                    writer[key] = here
            for key in access.reads:
                if key in writer:
                    yield Required(writer[key], here, "RAW", key)
            for key in access.writes:
                if key in writer:
                    yield Required(writer[key], here, "WAW", key)
                for reader in readers[key]:
                    yield Required(reader, here, "WAR", key)
                writer[key] = here
                readers[key] = []
            for key in access.reads - access.writes:
                if not readers[key] or readers[key][-1] != here:
                    readers[key].append(here)

    def _shared_writes(self) -> Iterator[Required]:
        """Later microbatches' nodes that the captured graph has before a shared write."""
        writes: defaultdict[Storage, list[Step]] = defaultdict(list)
        for step in self.steps:
            if step.member.microbatch is None and step.role == "shared":
                for key in step.member.access.writes:
                    writes[key].append(step)
        if not writes:
            return
        for step in self.steps:
            if not step.member.microbatch:
                continue
            access = step.member.access
            for key in (access.reads | access.writes) & writes.keys():
                for write in writes[key]:
                    if step.member.position < write.member.position:
                        kind = "WAW" if key in access.writes else "WAR"
                        yield Required(step.operation, write.operation, kind, key)

    def _values(self, captured: Sequence[Node]) -> Iterator[Required]:
        """What one captured node hands to another, for every microbatch."""
        starts, ends = self._places()
        position = {n: i for i, n in enumerate(captured)}
        for (at, microbatch), start in starts.items():
            if at >= len(captured):
                continue
            for argument in captured[at].all_input_nodes:
                before = _first(ends, position[argument], microbatch)
                if before is not None:
                    yield Required(before, start, "data")

    def _places(self) -> tuple[dict[Place, int], dict[Place, int]]:
        """Which operation reads a captured node's inputs, and which one has its result."""
        starts: dict[Place, int] = {}
        ends: dict[Place, int] = {}
        for step in self.steps:
            place = step.member.position, step.member.microbatch
            if step.kind is not Kind.ALLOCATE:
                starts.setdefault(place, step.operation)
                ends[place] = step.operation
        return starts, ends


def _first(ends: Mapping[Place, int], position: int, microbatch: int | None) -> int | None:
    """The microbatch's own copy, else the one that all share."""
    own = ends.get((position, microbatch))
    return own if own is not None else ends.get((position, None))
