"""What a diff compares: the items of a program or a graph, their events and their lifetimes.

Programs, schedules and graphs are all read into `Facts`. Names of nodes and numbers of events stand
in it for people only. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dbo_fx.certificates.execution import Kind, Storage
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.contracts import GLOO
from dbo_fx.errors import ScheduleError
from dbo_fx.ir import Action, Half, Keepalive, Merge, Phase, Program, Record, Run, Step, Wait

INPUT, CONSTANT, OUTPUT = "input", "constant", "output"
RUN, KEEPALIVE = "run", "keepalive"


class Place(NamedTuple):
    """Where an item belongs: what the passes' tags say, without the stream."""

    role: str = ""
    phase: str = ""
    layer: int | None = None
    microbatch: int | None = None
    half: str = ""

    def __str__(self) -> str:
        """`D_m0.recv@3`, `A0@3` before duplication, the role if there is no phase."""
        if not self.phase:
            return self.role
        microbatch = "" if self.microbatch is None else f"_m{self.microbatch}"
        half = f".{self.half}" if self.half else ""
        layer = "" if self.layer is None or self.phase == Phase.TAIL.value else f"@{self.layer}"
        return f"{self.phase}{microbatch}{half}{layer}"

    @property
    def action(self) -> Action | None:
        """The schedule's action, if this is the place of one."""
        if not self.phase:
            return None
        phase = Phase(self.phase)
        half = Half(self.half) if self.half else None
        try:
            return Action(phase, self.microbatch, half, None if phase is Phase.TAIL else self.layer)
        except ScheduleError:
            return None


NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class Item:
    """One action of a program, or one node of a graph.

    Attributes:
        name: A node's name; no difference by itself.
        what: What it is: `run`, `keepalive`, `aten::silu.default`, `input`.
        at: Position in the list of items and markers.
        place: Phase, layer, microbatch, half.
        args: Its arguments as text, with `%` in place of other items.
        inputs: Indices of the items behind these `%`, in order.
        stream: Where it runs; None for what runs nowhere.
        value: What tracing saw of its value: type, shape, strides.
        path: The module that called it; of an input, where it came from.
    """

    name: str
    what: str
    at: int
    place: Place = NOWHERE
    args: str = ""
    inputs: tuple[int, ...] = ()
    stream: str | None = None
    value: str = ""
    path: str = ""

    @property
    def short(self) -> str:
        """How it is called among what something crossed: its action, if it has one."""
        return self._known or (str(self.place) if self.place.phase else self.what)

    @property
    def _known(self) -> str:
        """The name of what programs are made of."""
        if self.what == KEEPALIVE:
            return f"{KEEPALIVE} {self.place._replace(half='')}"
        return self.name if self.what in (RUN, "merge") else ""

    @property
    def label(self) -> str:
        """How it is called by itself; no name of a node in it."""
        if self._known:
            return self._known
        where = str(self.place) if self.place.phase else self.path
        return f"{where} {self.what}".strip()

    @property
    def is_given(self) -> bool:
        """Whether it exists before the graph runs."""
        return self.what in (INPUT, CONSTANT)

    @property
    def is_light(self) -> bool:
        """Whether it only hands on or holds something; then it moves along with others."""
        return self.what in (KEEPALIVE, "operator.getitem")


@dataclass(frozen=True, slots=True)
class Marker:
    """A record or a wait; `at` is its position in the list of items and markers."""

    event: int
    stream: str
    at: int


@dataclass(frozen=True, slots=True)
class Edge:
    """One wait with the record that it waits for; a lone marker has None on the other side."""

    record: Marker | None
    wait: Marker | None


@dataclass(frozen=True, slots=True)
class Life:
    """A storage.

    Attributes:
        name: For people.
        key: What tells storages of one birth apart; the whole identity if there is no birth.
        born: Item that creates it; None in programs, where `key` says it.
        last: The last item that names it; None if the caller gets it.
    """

    name: str
    key: str
    born: int | None
    last: int | None


@dataclass(frozen=True)
class Facts:
    """One side of a diff.

    Attributes:
        source: How it is called in the title.
        kind: `schedule`, `program` or `graph`.
        items: In host order.
        edges: Events by what they connect.
        lives: Storages.
        header: What else counts: transport, layers, microbatches.
    """

    source: str
    kind: str
    items: tuple[Item, ...]
    edges: tuple[Edge, ...] = ()
    lives: tuple[Life, ...] = ()
    header: Mapping[str, str] = field(default_factory=dict)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions in order, each once: for the lanes."""
        found = (item.place.action for item in self.items if item.what != KEEPALIVE)
        return tuple(dict.fromkeys(a for a in found if a is not None))


def facts_of_program(program: Program) -> Facts:
    """Read a program."""
    items: list[Item] = []
    index_of: dict[int, int] = {}
    for at, step in enumerate(program.steps):
        item = _item_of_step(step, at)
        if item is not None:
            index_of[at] = len(items)
            items.append(item)
    header = {"transport": program.transport, "layers": str(program.layers)}
    header["microbatches"] = str(program.microbatches)
    if program.sms:
        header["sms"] = str(program.sms).removeprefix("sms ")
    markers = [(at, s) for at, s in enumerate(program.steps) if isinstance(s, Record | Wait)]
    return Facts(
        f"{program.schedule} ({layers_text(program.layers)}, {program.transport})",
        "program",
        tuple(items),
        tuple(pair_markers((isinstance(s, Record), s.event, s.stream, at) for at, s in markers)),
        tuple(_lives_of_program(program, index_of)),
        header,
    )


def facts_of_actions(actions: Iterable[Action], source: str) -> Facts:
    """Read a list of actions, such as a schedule's order."""
    items = [_item_of_action(action, at, action_text(action)) for at, action in enumerate(actions)]
    return Facts(source, "schedule", tuple(items))


def layers_text(count: int) -> str:
    """`1 layer`, `61 layers`."""
    return f"{count} layer" if count == 1 else f"{count} layers"


def action_text(action: Action) -> str:
    """With layers, labels have become indices."""
    is_bound = action.layer is not None or action.phase is Phase.TAIL
    return action.bound() if is_bound else str(action)


def _item_of_step(step: Step, at: int) -> Item | None:
    match step:
        case Run(stream, action, slot):
            args = "" if slot is None else f"slot {slot}"
            return _item_of_action(action, at, action.bound(), stream, args)
        case Keepalive(stream, action):
            name = f"{KEEPALIVE} {action.bound()}"
            return Item(name, KEEPALIVE, at, _place(action), stream=stream)
        case Merge(stream):
            return Item("merge", "merge", at, stream=stream)
    return None


def _item_of_action(
    action: Action, at: int, name: str, stream: str | None = None, args: str = ""
) -> Item:
    return Item(name, RUN, at, _place(action), args, stream=stream)


def _place(action: Action) -> Place:
    half = action.half.value if action.half else ""
    return Place("", action.phase.value, action.layer, action.microbatch, half)


def _lives_of_program(program: Program, index_of: Mapping[int, int]) -> Iterator[Life]:
    """The storages of the phase model; which transport carries D and C does not matter for it."""
    execution = execution_of_program(program, GLOO)
    count: dict[Storage, int] = {}
    for operation, step in zip(execution.operations, execution.steps, strict=True):
        if operation.kind is Kind.FREE and step is not None and step - 1 in index_of:
            (storage,) = operation.writes
            count[storage] = count.get(storage, 0) + 1
            yield Life(str(storage), f"{storage} {count[storage]}", None, index_of[step - 1])


def pair_markers(markers: Iterable[tuple[bool, int, str, int]]) -> Iterator[Edge]:
    """Connect every wait with the latest record of its event before it.

    Args:
        markers: In host order: whether it is a record, its event, stream and position.

    Yields:
        Edges; a record that nobody waits for and a wait for nothing have one side only.
    """
    latest: dict[int, Marker] = {}
    waited: set[int] = set()
    records: list[Marker] = []
    for is_record, event, stream, at in markers:
        marker = Marker(event, stream, at)
        if is_record:
            latest[event] = marker
            records.append(marker)
            continue
        record = latest.get(event)
        if record is not None:
            waited.add(record.at)
        yield Edge(record, marker)
    for record in records:
        if record.at not in waited:
            yield Edge(record, None)


def stream_positions(items: Sequence[Item]) -> dict[str, list[int]]:
    """Per stream the indices of its items, in order."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        if item.stream is not None:
            found.setdefault(item.stream, []).append(index)
    return found
