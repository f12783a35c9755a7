"""What a program needs: a small model of its own, from which mutants get their class.

It knows the phases' reads and writes, allocations and frees, and how streams and events order
them. It shares no code with the verifier or the witness, and asks one question only: does an
order that the reference needs still hold? Reachability is a bit mask for each operation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from dbo_fx.ir import (
    COMM,
    COMP,
    Action,
    Half,
    Keepalive,
    Merge,
    Phase,
    Program,
    Record,
    Run,
    Step,
    Wait,
)

Key = tuple[object, ...]
Pair = tuple[Key, Key]
RANK = {p: i for i, p in enumerate([Phase.A0, Phase.A1, Phase.D, Phase.MLP, Phase.C, Phase.S])}


@dataclass(frozen=True, slots=True)
class Item:
    """One operation: a step, or the allocation or end of a value."""

    key: Key
    stream: str
    step: int
    event: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Which actions a program must run: they say which values exist."""

    layers: int
    microbatches: int
    shared: frozenset[tuple[int, int]]  # (microbatch, layer) with an S
    tail: bool

    @classmethod
    def of(cls, program: Program) -> Shape:
        """The shape of a program's actions."""
        shared = {
            (a.microbatch, a.layer)
            for a in program.actions
            if a.phase is Phase.S and a.microbatch is not None and a.layer is not None
        }
        tail = any(a.phase is Phase.TAIL for a in program.actions)
        return cls(program.layers, program.microbatches, frozenset(shared), tail)

    def reads(self, action: Action) -> list[str]:
        """The values an action reads; a recv changes what it receives."""
        m, layer = action.microbatch, action.layer
        assert m is not None
        here = f"m{m}@{layer}"
        match action.phase, action.half:
            case Phase.A0, _:
                assert layer is not None
                before = [f"input_m{m}"] if layer == 0 else self.results(m, layer - 1)
                return [*before, f"cache@{layer}"]
            case Phase.A1, _:
                return [f"q_{here}", f"cache@{layer}"]
            case Phase.D, Half.SEND:
                return [f"x_{here}"]
            case Phase.C, Half.SEND:
                return [f"y_{here}"]
            case ((Phase.D | Phase.C), _):
                return self.writes(action)
            case Phase.MLP, _:
                return [f"d_{here}"]
            case Phase.S, _:
                return [f"h_{here}"]
        return self.results(m, self.layers - 1)

    def writes(self, action: Action) -> list[str]:
        """The values an action writes."""
        m, layer = action.microbatch, action.layer
        here = f"m{m}@{layer}"
        return {
            Phase.A0: [f"q_{here}", f"cache@{layer}"],
            Phase.A1: [f"h_{here}", f"x_{here}"],
            Phase.D: [f"d_{here}"],
            Phase.MLP: [f"y_{here}"],
            Phase.C: [f"c_{here}"],
            Phase.S: [f"s_{here}"],
            Phase.TAIL: [f"out_m{m}"],
        }[action.phase]

    def results(self, m: int, layer: int) -> list[str]:
        """What a layer leaves for the next one, the tail or the merge."""
        names = ["c", "h", "s"] if (m, layer) in self.shared else ["c", "h"]
        return [f"{n}_m{m}@{layer}" for n in names]

    def merged(self) -> list[str]:
        """What the merge reads."""
        if self.tail:
            return [f"out_m{m}" for m in range(self.microbatches)]
        return [v for m in range(self.microbatches) for v in self.results(m, self.layers - 1)]

    def named(self, step: Step) -> list[str]:
        """The values whose lifetime a step extends."""
        match step:
            case Run(_, action):
                return [*self.reads(action), *self.writes(action)]
            case Keepalive(_, action):
                return self.named(Run(COMM, replace(action, half=Half.SEND)))
            case Merge():
                return self.merged()
        return []


def reference(shape: Shape, program: Program) -> list[Action]:
    """The program's actions in the order of the unscheduled model: m0 whole, then m1, ..."""
    actions = set(program.actions)

    def place(action: Action) -> tuple[int, int, int, int]:
        assert action.microbatch is not None
        if action.phase is Phase.TAIL:
            return action.microbatch, shape.layers, 0, 0
        assert action.layer is not None
        return action.microbatch, action.layer, RANK[action.phase], action.half is Half.RECV

    return sorted(actions, key=place)


@lru_cache(maxsize=512)
def needed(program: Program) -> frozenset[Pair]:
    """The orders that the reference needs, of a program whose actions are complete.

    Conflicting accesses in the reference's order; a landing buffer's allocation before and every
    value's end behind all its accesses.
    """
    shape = Shape.of(program)
    pairs: set[Pair] = set()
    readers: defaultdict[str, list[Key]] = defaultdict(list)
    writer: dict[str, Key] = {}
    touched: defaultdict[str, list[Key]] = defaultdict(list)
    steps: list[tuple[Key, list[str], list[str]]] = [
        (("run", a), shape.reads(a), shape.writes(a)) for a in reference(shape, program)
    ]
    for key, reads, writes in [*steps, (("merge",), shape.merged(), [])]:
        for value in dict.fromkeys([*reads, *writes]):
            touched[value].append(key)
            if value in writer:
                pairs.add((writer[value], key))
        for value in writes:
            pairs |= {(reader, key) for reader in readers[value] if reader != key}
            readers[value] = []
            writer[value] = key
        for value in reads:
            if value not in writes:
                readers[value].append(key)
    for value, keys in touched.items():
        if value[0] in "dc" and not value.startswith("cache"):
            pairs |= {(("allocate", value), key) for key in keys}
        if ends(value):
            pairs |= {(key, ("free", value)) for key in keys}
    return frozenset(pairs)


def ends(value: str) -> bool:
    """Whether the program lets go of a value: not of inputs, caches and results."""
    return not value.startswith(("input", "cache", "out"))


def landing_places(program: Program) -> dict[int, list[str]]:
    """Before which steps the host allocates which landing buffers.

    They belong to the compute stream: the host allocates them before the last record there that
    the sending stream waits for; without one, directly before the send.
    """
    shape = Shape.of(program)
    recorded: dict[int, Record] = {}
    place: dict[int, int] = {}
    waited: dict[str, int] = {}
    found: defaultdict[int, list[str]] = defaultdict(list)
    seen: set[Action] = set()
    for index, step in enumerate(program.steps):
        if isinstance(step, Record):
            recorded[step.event] = step
            place[step.event] = index
        elif isinstance(step, Wait):
            record = recorded.get(step.event)
            if record is not None and record.stream == COMP:
                waited[step.stream] = max(waited.get(step.stream, -1), place[step.event])
        elif isinstance(step, Run) and step.action.half is Half.SEND and step.action not in seen:
            at = index if step.stream == COMP else waited.get(step.stream, index)
            found[at] += shape.writes(step.action)
            seen.add(step.action)
    return found


@lru_cache(maxsize=512)
def items(program: Program) -> tuple[Item, ...]:
    """All operations in host order."""
    shape, steps = Shape.of(program), program.steps
    allocations = landing_places(program)
    last: dict[str, int] = {}
    owner: dict[str, str] = {}
    for index, step in enumerate(steps):
        last.update(dict.fromkeys(shape.named(step), index))
        if isinstance(step, Run) and step.action.half is Half.SEND:
            owner.update(dict.fromkeys(shape.writes(step.action), COMP))
        elif isinstance(step, Run):
            for value in shape.writes(step.action):
                owner.setdefault(value, step.stream)
    frees: defaultdict[int, list[str]] = defaultdict(list)
    for value, index in last.items():
        if ends(value):
            frees[index].append(value)
    found: list[Item] = []
    for index, step in enumerate(steps):
        found += [Item(("allocate", v), COMP, index) for v in allocations.get(index, ())]
        found.append(_item(step, index))
        found += [Item(("free", v), owner.get(v, COMP), index) for v in frees[index]]
    return tuple(found)


def _item(step: Step, index: int) -> Item:
    match step:
        case Run(stream, action):
            return Item(("run", action), stream, index)
        case Record(stream, event):
            return Item(("record", event), stream, index, event)
        case Wait(stream, event):
            return Item(("wait", event), stream, index, event)
        case Keepalive(stream, action):
            return Item(("keepalive", action), stream, index)
    return Item(("merge",), step.stream, index)


def ancestors(found: tuple[Item, ...]) -> list[int]:
    """For every operation the bit mask of those complete before it starts."""
    masks: list[int] = []
    stream: dict[str, int] = {}
    recorded: dict[int, int] = {}
    for index, item in enumerate(found):
        mask = stream.get(item.stream, 0)
        if item.key[0] == "wait" and item.event in recorded:
            mask |= recorded[item.event]
        masks.append(mask)
        stream[item.stream] = mask | 1 << index
        if item.key[0] == "record":
            assert item.event is not None
            recorded[item.event] = mask | 1 << index
    return masks


def broken(program: Program, pairs: frozenset[Pair]) -> list[Pair]:
    """The needed orders that a program does not keep, or whose operations it does not run."""
    found = items(program)
    masks = ancestors(found)
    at: dict[Key, int] = {}
    for index, item in enumerate(found):
        at.setdefault(item.key, index)
    return [
        (one, other)
        for one, other in pairs
        if one not in at or other not in at or not masks[at[other]] >> at[one] & 1
    ]


def is_kept(program: Program, pairs: frozenset[Pair]) -> bool:
    """Whether a program keeps all needed orders."""
    return not broken(program, pairs)
