"""The model that programs stand for: which values an action reads and writes, and the reference.

Per microbatch m and layer l: `A0` reads what the layer below left (`c`, `h`, `s`; the input in
layer 0) and reads and writes the cache; `A1` reads `q` and the cache and writes `h`, which stays,
and `x`, which is sent; `D` carries x to d, `MLP` makes y of d, `C` carries y to c, `S` makes s of
h; `TAIL` makes `out` of the last layer's c, h and s. An action that no microbatch has in a layer is
part of its neighbour: its readers read what it would have read.

Values are a few words; an action's result is a hash of every word it reads and of what it is, so
that one wrong word anywhere changes the final result. The reference computes microbatch after
microbatch on a dictionary: no streams, no memory, no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dbo_fx import ir
from dbo_fx.ir import Action, Half, Phase

Value = tuple[str, int, int]  # Name, microbatch, layer; -1 where one does not apply.
Words = tuple[int, ...]
Communicators = Callable[[Action], str | None]

WORDS = 2
RESULT: Value = ("result", -1, -1)
_PHASES = {phase: index for index, phase in enumerate(Phase)}
_HALVES = {None: 0, Half.SEND: 1, Half.RECV: 2}


def mix(*parts: int) -> Words:
    """A value's words from integers; the same in every process."""
    first = hash(parts)
    return first, hash((first, 1))


POISON = mix(-7)
NEVER = mix(-8)  # What a value holds that nobody wrote.


def salt(action: Action, rank: int) -> int:
    """A number for an action on a rank."""
    microbatch = -1 if action.microbatch is None else action.microbatch
    layer = -1 if action.layer is None else action.layer
    return hash((_PHASES[action.phase], _HALVES[action.half], microbatch, layer, rank))


def start(value: Value, rank: int) -> Words:
    """What an input or a cache holds before the first call."""
    return mix(len(value[0]), ord(value[0][0]), value[1], value[2], rank)


def expert_communicator(action: Action) -> str | None:
    """One communicator carries dispatch and combine; nothing else communicates."""
    return "ep" if action.phase.is_communication else None


def value_text(value: Value) -> str:
    """`h_m0@3`."""
    name, m, layer = value
    return name + ("" if m < 0 else f"_m{m}") + ("" if layer < 0 else f"@{layer}")


@dataclass(frozen=True)
class Shape:
    """What the undamaged program computes.

    Attributes:
        microbatches: How many.
        layers: How many.
        present: The phases that exist, by layer; TAIL with layer -1.
        merge: Whether a merge joins the outputs; without one the caller reads them all.
    """

    microbatches: int
    layers: int
    present: frozenset[tuple[Phase, int]]
    merge: bool

    @classmethod
    def of(cls, programs: Iterable[ir.Program]) -> Shape:
        """The union of what any microbatch of any rank does."""
        found = list(programs)
        present = {(a.phase, -1 if a.layer is None else a.layer) for p in found for a in p.actions}
        layers = max(p.layers for p in found)
        present |= {(phase, layer) for phase in (Phase.D, Phase.C) for layer in range(layers)}
        microbatches = max(p.microbatches for p in found)
        merge = any(isinstance(step, ir.Merge) for p in found for step in p.steps)
        return cls(microbatches, layers, frozenset(present), merge or microbatches > 1)

    def __hash__(self) -> int:
        """Hashed once: shapes are keys of caches."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.microbatches, self.layers, self.present, self.merge))

    def has(self, phase: Phase, layer: int) -> bool:
        """Whether some microbatch has this phase in this layer."""
        return (phase, layer) in self.present

    def reads(self, action: Action) -> tuple[Value, ...]:
        """The values an action reads."""
        m, layer = action.microbatch or 0, -1 if action.layer is None else action.layer
        match action.phase, action.half:
            case Phase.A0, _:
                return (*self.left(m, layer), ("cache", -1, layer))
            case Phase.A1, _:
                return (*self.projected(m, layer), ("cache", -1, layer))
            case Phase.D, Half.RECV:
                return (("d", m, layer),)
            case Phase.D, _:
                return self.sent(m, layer)
            case Phase.MLP, _:
                return (("d", m, layer),)
            case Phase.C, Half.RECV:
                return (("c", m, layer),)
            case Phase.C, _:
                return (("y" if self.has(Phase.MLP, layer) else "d", m, layer),)
            case Phase.S, _:
                return self.stays(m, layer)
            case _:
                return self.left(m, self.layers)

    def writes(self, action: Action) -> tuple[Value, ...]:
        """The values an action writes."""
        m, layer = action.microbatch or 0, -1 if action.layer is None else action.layer
        match action.phase:
            case Phase.A0:
                return (("cache", -1, layer), ("q", m, layer))
            case Phase.A1:
                if self.has(Phase.A0, layer):
                    return (("h", m, layer), ("x", m, layer))
                return (("cache", -1, layer), ("h", m, layer), ("x", m, layer))
            case Phase.D:
                return (("d", m, layer),)
            case Phase.MLP:
                return (("y", m, layer),)
            case Phase.C:
                return (("c", m, layer),)
            case Phase.S:
                return (("s", m, layer),)
            case _:
                return (("out", m, -1),)

    def kept(self, communication: Action) -> tuple[Value, ...]:
        """What a keepalive of a communication names: what is sent and what arrives."""
        return (*self.reads(communication), *self.writes(communication))

    def outputs(self) -> tuple[Value, ...]:
        """What a merge reads, or the caller where there is none."""
        if self.has(Phase.TAIL, -1):
            return tuple(("out", m, -1) for m in range(self.microbatches))
        every = (self.left(m, self.layers) for m in range(self.microbatches))
        return tuple(v for values in every for v in values)

    def results(self) -> tuple[Value, ...]:
        """What the caller reads at the end, the caches included."""
        caches = tuple(("cache", -1, layer) for layer in range(self.layers))
        return ((RESULT,) if self.merge else self.outputs()) + caches

    def left(self, m: int, layer: int) -> tuple[Value, ...]:
        """What the layer below `layer` leaves."""
        if layer == 0:
            return (("input", m, -1),)
        below = layer - 1
        shared: tuple[Value, ...] = (("s", m, below),) if self.has(Phase.S, below) else ()
        return (("c", m, below), *self.stays(m, below), *shared)

    def projected(self, m: int, layer: int) -> tuple[Value, ...]:
        """What the core of attention reads."""
        return (("q", m, layer),) if self.has(Phase.A0, layer) else self.left(m, layer)

    def stays(self, m: int, layer: int) -> tuple[Value, ...]:
        """What the shared expert and the next layer read of attention."""
        return (("h", m, layer),) if self.has(Phase.A1, layer) else self.projected(m, layer)

    def sent(self, m: int, layer: int) -> tuple[Value, ...]:
        """What is dispatched."""
        return (("x", m, layer),) if self.has(Phase.A1, layer) else self.projected(m, layer)

    def actions(self) -> list[Action]:
        """Microbatch after microbatch, layer after layer."""
        found = []
        for m in range(self.microbatches):
            for layer in range(self.layers):
                for phase in (Phase.A0, Phase.A1, Phase.D, Phase.MLP, Phase.C, Phase.S):
                    halves = tuple(Half) if phase.is_communication else (None,)
                    if self.has(phase, layer):
                        found += [Action(phase, m, half, layer) for half in halves]
            if self.has(Phase.TAIL, -1):
                found.append(Action(Phase.TAIL, m))
        return found


def computed(seed: int, name: int, words: Sequence[int]) -> Words:
    """The `name`-th value that an action writes."""
    return mix(seed, name, *words)


@dataclass(frozen=True)
class Expected:
    """What the reference computes.

    Attributes:
        results: Per rank, a digest of what the caller reads.
        written: Per rank, action and value, what was written.
    """

    results: tuple[int, ...]
    written: dict[tuple[int, Action, Value], Words]


@lru_cache(maxsize=256)
def reference(shape: Shape, ranks: int, communicator_of: Communicators) -> Expected:
    """Run the model in order, microbatch after microbatch, all ranks side by side."""
    values: list[dict[Value, Words]] = [{} for _ in range(ranks)]
    written: dict[tuple[int, Action, Value], Words] = {}
    for action in shape.actions():
        inputs = [_gather(shape.reads(action), v, rank) for rank, v in enumerate(values)]
        meets = communicator_of(action) is not None and action.half is not Half.RECV
        together = tuple(w for i in inputs for w in i)
        for rank, v in enumerate(values):
            words = together if meets else inputs[rank]
            for index, value in enumerate(shape.writes(action)):
                v[value] = computed(salt(action, rank), index, words)
                written[rank, action, value] = v[value]
    if shape.merge:
        for rank, v in enumerate(values):
            v[RESULT] = mix(rank, *_gather(shape.outputs(), v, rank))
    ends = (_gather(shape.results(), v, rank) for rank, v in enumerate(values))
    return Expected(tuple(map(hash, ends)), written)


def _gather(names: Iterable[Value], values: dict[Value, Words], rank: int) -> Words:
    found: list[int] = []
    for name in names:
        if name in values:
            found += values[name]
        else:
            found += start(name, rank) if name[0] in ("input", "cache") else NEVER
    return tuple(found)
