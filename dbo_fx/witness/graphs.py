"""The witness for emitted graphs: run them on real tensors, under any legal interleaving.

A first run in host order (`dry_run`) does what the generated Python does. It finds out, for every
node, which storages it makes, reads and writes, and on which stream. Streams and events come from
the calls of `runtime` alone; tags are not looked at. Then every node that touches memory becomes a
deferred task. In a run,

* storages begin as poison, inputs as they were given, so who reads too early reads poison;
* behind the last use of a storage on the host, a fill with poison is enqueued on the stream that
  allocated it; the in-flight table's references do not count: a program keeps alive what it needs;
* `comm_buffers` poisons on the stream that allocates; the transport itself hides what is in flight;
* what a transport raises is a failure, and so is an operation that is left in flight, or a slot
  from which the next region may not start.

Outputs and inputs are compared bit for bit with the first run of the graph that is the reference.
The graph runs as one rank of a real process group, whose operations complete at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dbo_fx import sync
from dbo_fx.comm import abandon_in_flight
from dbo_fx.contracts import contract
from dbo_fx.emit import Emit
from dbo_fx.ir import COMP
from dbo_fx.pipeline import State
from dbo_fx.witness.dry_run import Done, DryRun, is_half, named_arguments
from dbo_fx.witness.explore import Run
from dbo_fx.witness.interleave import Cell, Host, Machine, Plan, Task
from dbo_fx.witness.runs import Outcome, Witness
from dbo_fx.witness.tensors import bits, storage_of, tensors_in

_BUFFERS = torch.ops.dbo_fx.comm_buffers.default


@dataclass
class World:
    """What a run leaves besides tensors."""

    problem: str = ""
    results: tuple[bytes, ...] = ()
    done: list[bool] = field(default_factory=list)


class GraphWitness(Witness):
    """Executes an emitted graph.

    Args:
        graph: The emitted module, or a state whose graph is emitted if it is not yet.
        inputs: Arguments of the module; they are copied.
        reference: The undamaged graph, whose run in host order says what is right; by default the
            graph itself.
    """

    def __init__(
        self,
        graph: GraphModule | State,
        inputs: Sequence[Any],
        reference: GraphModule | State | None = None,
    ) -> None:
        """Do the first run and enqueue everything; needs the process group of the graph."""
        right = None if reference is None else DryRun(_module(reference), inputs)
        self.first = DryRun(_module(graph), inputs)
        self.expected = self.first.results if right is None else right.results
        self.plan = Plan(1, _no_exchange)
        _Enqueue(self.first, self.plan).all()

    def fresh(self, blocking: bool = False) -> Machine:
        """Poison every storage, restore the inputs, and forget what is in flight."""
        self.first.reset()
        world = World()
        machine = Machine(self.plan, world, blocking)
        world.done = machine.done
        return machine

    def outcome(self, run: Run) -> Outcome:
        """Compare outputs and inputs with the reference's."""
        world = run.machine.world
        problem = self.first.problem or run.stuck or world.problem
        problem = problem or self.first.left_over()
        if not problem and world.results != self.expected:
            wrong = [
                f"result {i} of {len(self.expected)}"
                for i, (found, wanted) in enumerate(zip(world.results, self.expected, strict=False))
                if found != wanted
            ]
            problem = f"differs from the reference: {', '.join(wrong) or 'number of results'}"
        abandon_in_flight()
        digest = blake2b(b"".join(world.results), digest_size=8).digest()
        return Outcome(not problem, int.from_bytes(digest), problem, tuple(run.machine.trace))


class _Enqueue:
    """Turns what a dry run saw into deferred tasks."""

    def __init__(self, first: DryRun, plan: Plan) -> None:
        self.first, self.plan = first, plan
        self.host = Host(plan, 0)
        self.stream_of: dict[int, str] = {s: COMP for s in first.saved}
        self.maker = {s: node.name for node, done in first.seen.items() for s in done.made}

    def all(self) -> None:
        dying = self._last_uses()
        for node in self.first.nodes:
            if self.first.is_runtime(node):
                self._marker(node)
            elif node in self.first.seen:
                self._work(node, self.first.seen[node])
            elif node.op == "output" and node in self.first.env:
                self._end(node)
            for storage in dying[node]:
                self._free(storage)

    def _marker(self, node: Node) -> None:
        if node.target in ("record", "wait"):
            _, event, stream = node.args
            getattr(self.host, str(node.target))(str(stream), int(str(event)))

    def _work(self, node: Node, done: Done) -> None:
        for storage in done.made:
            self.stream_of[storage] = done.stream
        if node.target is sync.keepalive or not done.is_work:
            return
        cells: list[Cell] = [*done.made, *done.writes]
        if is_half(node):
            cells += _table_cells(node)
        name = node.name
        act = self._allocate(done) if node.target is _BUFFERS else self._act(node, done)
        self.host.run(done.stream, name, _guarded(name, act), done.reads, cells)

    def _allocate(self, done: Done) -> Callable[[], None]:
        def act() -> None:
            for storage in done.made:
                self.first.poison(storage)

        return act

    def _act(self, node: Node, done: Done) -> Callable[[], None]:
        first, made = self.first, set(done.made)
        shown = first.env[node]
        kept = [storage_of(t) in made for t in tensors_in(shown)]
        places = tensors_in(shown)

        def act() -> None:
            found = tensors_in(first.call(node))
            for place, value, new in zip(places, found, kept, strict=True):
                if new:
                    place.copy_(value)

        return act

    def _free(self, storage: int) -> None:
        name = f"free {self.maker[storage]}"
        act = _guarded(name, lambda: self.first.poison(storage))
        self.host.run(self.stream_of[storage], name, act, (), [storage])

    def _end(self, node: Node) -> None:
        first, plan, tails = self.first, self.plan, self.host.tails(COMP)
        for index in tails:
            plan.tasks[index].reads |= {"end"}
        returned = tensors_in((first.env[node], first.inputs))

        def act(world: World) -> None:
            pending = next((i for i in tails if not world.done[i]), None)
            if pending is not None and not world.problem:
                world.problem = f"the caller goes on while {plan.text(pending)} has not run"
            world.results = bits(returned)

        cells = {storage_of(t) for t in returned}
        self.host.run(COMP, "end", act, cells, ["end"])

    def _last_uses(self) -> defaultdict[Node, list[int]]:
        """Storages by the node behind which the generated Python drops the last reference."""
        position = {node: i for i, node in enumerate(self.first.nodes)}
        last: dict[int, Node] = {}
        for node, value in self.first.env.items():
            if node.op == "output":
                continue
            dropped = max([node, *node.users], key=position.__getitem__)
            for tensor in tensors_in(value):
                storage = storage_of(tensor)
                if storage not in last or position[last[storage]] < position[dropped]:
                    last[storage] = dropped
        found: defaultdict[Node, list[int]] = defaultdict(list)
        for storage, node in last.items():
            if storage not in self.first.saved and node.op != "output":
                found[node].append(storage)
        return found


def _table_cells(node: Node) -> list[Cell]:
    """The entry of the in-flight table, and the channel of transports with an in-flight limit."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = named_arguments(node)
    kind = node.target._schema.name.split("::")[1].rsplit("_", 1)[0]
    cells: list[Cell] = [("flight", given["group"], kind, given["flight"])]
    if contract(given["transport"]).max_in_flight is not None:
        cells.append(("channel", given["group"]))
    return cells


def _guarded(name: str, act: Callable[[], None]) -> Callable[[World], None]:
    """Note what a task raises; nothing runs behind the first problem, its values are garbage."""

    def run(world: World) -> None:
        if world.problem:
            return
        try:
            with torch.no_grad():
                act()
        except Exception as error:
            world.problem = f"{name}: {error}"

    return run


def _no_exchange(world: Any, parts: Sequence[Task]) -> None:
    raise AssertionError("one rank has nobody to meet")


def _module(graph: GraphModule | State) -> GraphModule:
    if isinstance(graph, GraphModule):
        return graph
    state = graph if graph.module is not None else Emit().apply(graph)[0]
    assert state.module is not None
    return state.module
