"""Turn runs of compute nodes into segments, one submodule per distinct structure.

needs:    a graph with streams and events
ensures:  every compute or shared node is inside a segment, called as `self.segment_N(...)`;
          segments of equal structure are one object, over layers, microbatches and schedules;
          `effects` and `dependencies` speak of the segments' calls; `members` remembers what each
          call was made of
before -> after: `a = linear(x, w); b = silu(a)` -> `A_m0_l0 = self.segment_0(x, w); b = A_m0_l0[0]`

A segment ends where A, MLP, S or TAIL of one microbatch ends. Nothing is fused across them.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import POSITION, value_of
from dbo_fx.effects import Access, Dependency, Member
from dbo_fx.ir import Half, Phase
from dbo_fx.passes.schedule import is_same_segment
from dbo_fx.passes.streams import stream_of
from dbo_fx.pipeline import State
from dbo_fx.symbols import START
from dbo_fx.tag import set_tag, tag_of


@dataclass(frozen=True, slots=True)
class Lower:
    """See the module's contract."""

    name: str = "lower"

    def apply(self, state: State) -> tuple[State, str]:
        """Replace the runs in place; fill `segments` and `members`."""
        lowering = _Lowering(state)
        runs = list(segment_runs(state.graph.nodes))
        for run in runs:
            lowering.replace_run(run)
        state.graph.lint()
        new = replace(
            state,
            segments=lowering.segments,
            members=lowering.members,
            dependencies=lowering.dependencies(),
        )
        return new, f"{len(runs)} segments, {len(lowering.segments)} distinct"


def segment_runs(nodes: Iterable[Node]) -> Iterable[list[Node]]:
    """Maximal runs of neighbouring compute nodes that may share a segment."""
    run: list[Node] = []
    for node in nodes:
        inside = is_segment_node(node)
        if run and not (inside and _continues(run[0], node)):
            yield run
            run = []
        if inside:
            run.append(node)
    if run:
        yield run


def is_segment_node(node: Node) -> bool:
    """Whether the node computes: it is no communication, marker, size, slice or merge."""
    tag = tag_of(node)
    return node.op == "call_function" and tag is not None and tag.role in ("compute", "shared")


def _continues(one: Node, other: Node) -> bool:
    a, b = tag_of(one), tag_of(other)
    assert a is not None
    assert b is not None
    return a.role == b.role and stream_of(one) == stream_of(other) and is_same_segment(one, other)


class _Lowering:
    def __init__(self, state: State) -> None:
        self.state = state
        self.segments: dict[str, GraphModule] = {}
        self.by_structure: dict[str, str] = {}
        self.call_of: dict[Node, Node] = {}
        self.members = members_of(state)
        self.names = Counter[str]()
        self.facts: dict[int, str] = {}

    def replace_run(self, run: list[Node]) -> None:
        graph, inside = self.state.graph, set(run)
        inputs = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in inside))
        outputs = [n for n in run if any(u not in inside for u in n.users)]
        target = self._intern(_segment_graph(run, inputs, outputs))
        with graph.inserting_before(run[0]):
            call = graph.call_module(target, tuple(inputs))
        call.name = self._name(run[0])
        call.meta["val"] = tuple(value_of(n) for n in outputs)
        tag = tag_of(run[-1])
        assert tag is not None
        set_tag(call, tag)
        effects = self.state.effects
        effects.access[call] = Access.union(effects.of(n) for n in run)
        self.members[call] = tuple(m for n in run for m in self.members.pop(n))
        for node in run:
            self.call_of[node] = call
        with graph.inserting_before(run[0]):
            for index, node in enumerate(outputs):
                self._item(call, index, node, inside)
        for node in reversed(run):
            graph.erase_node(node)
            effects.access.pop(node)

    def _item(self, call: Node, index: int, node: Node, inside: set[Node]) -> None:
        item = self.state.graph.call_function(operator.getitem, (call, index))
        item.name = f"{node.name}_"
        item.meta.update(node.meta)
        set_tag(item, tag_of(call))  # type: ignore[arg-type]
        results = self.state.effects.of(node).results
        self.state.effects.access[item] = Access(results=results)
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)

    def _name(self, node: Node) -> str:
        tag = tag_of(node)
        assert tag is not None
        if tag.phase is None:
            self.names["shared"] += 1
            return f"shared_{self.names['shared'] - 1}"
        letter = "A" if tag.phase in (Phase.A0, Phase.A1) else tag.phase.value
        layer = "" if tag.layer is None else f"_l{tag.layer}"
        name = f"{letter}_m{tag.microbatch}{layer}"
        self.names[name] += 1  # A schedule may cut between A0 and A1, a wait anywhere.
        return name if self.names[name] == 1 else f"{name}_{self.names[name] - 1}"

    def _intern(self, body: Graph) -> str:
        key = structure(body, self.facts)
        if key not in self.by_structure:
            name = f"segment_{len(self.segments)}"
            self.by_structure[key] = name
            self.segments[name] = GraphModule({}, body)
        return self.by_structure[key]

    def dependencies(self) -> tuple[Dependency, ...]:
        """The old dependencies, between calls; a segment's own order keeps those inside it."""
        found = {}
        for d in self.state.dependencies:
            before, after = (self.call_of.get(n, n) for n in (d.before, d.after))
            if before is not after:
                found[before, after, d.kind, d.key] = Dependency(before, after, d.kind, d.key)
        return tuple(found.values())


def members_of(state: State) -> dict[Node, tuple[Member, ...]]:
    """The captured nodes behind every node that touches tensors.

    A send and a recv stand for their launch; a recv for what arrives, too. Merges come last.
    """
    position = {n: i for i, n in enumerate(state.captured.graph.nodes)}
    source = {copy: position[n] for env in state.copies for n, copy in env.items()}
    launches = {x.node.name: x for c in state.communications for x in c.launches}
    found: dict[Node, tuple[Member, ...]] = {}
    for node in state.graph.nodes:
        tag, access = tag_of(node), state.effects.of(node)
        if tag is None or node.op != "call_function":
            continue
        if tag.role == "comm":
            if node.target is operator.getitem:
                continue
            launch = launches[_launch_name(access)]
            members = [Member(position[launch.node], tag.microbatch, access)]
            if tag.half is Half.RECV:
                arrived = [n for results in launch.results for n in results]
                members += [Member(position[n], tag.microbatch) for n in arrived]
            found[node] = tuple(members)
        elif tag.role == "merge":
            found[node] = (Member(len(position), None, access),)
        elif node in source:
            found[node] = (Member(source[node], tag.microbatch, access),)
    return found


def _launch_name(access: Access) -> str:
    """The captured launch that a half belongs to: its landing buffers are named after it."""
    for key in access.writes | access.results:
        if isinstance(key, tuple) and key[0] == "landing":
            return str(key[1])
    raise AssertionError("a half of a communication has landing buffers")


def _segment_graph(run: list[Node], inputs: list[Node], outputs: list[Node]) -> Graph:
    graph = Graph()
    env: dict[Node, Node] = {}
    for index, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{index}")
        env[node].meta = {"val": value_of(node)}
        position = node.meta.get(POSITION) or _start(node, run[0])
        if position is not None:
            env[node].meta[POSITION] = position
    for node in run:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in outputs))
    return graph


def _start(number: Node, user: Node) -> sympy.Symbol | None:
    """What stands for a number that is not computed from its user's own size."""
    tag, own = tag_of(number), tag_of(user)
    assert own is not None
    if tag is None or tag.role != "size" or own.microbatch in (None, 0, tag.microbatch):
        return None
    return START


def structure(graph: Graph, facts: dict[int, str] | None = None) -> str:
    """A hash of ops, argument positions and tensor facts.

    Equal on all ranks: names, addresses and device indices play no part.

    Args:
        graph: The graph.
        facts: Texts of values by `id`, kept over graphs that share values (microbatches do).
    """
    known = {} if facts is None else facts
    index = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = "" if node.op in ("placeholder", "output") else qualified_name(node.target)
        args = () if node.op == "placeholder" else (node.args, node.kwargs)
        text = map_aggregate(args, lambda a: index[a] if isinstance(a, Node) else _fact(a))
        value = value_of(node)
        if id(value) not in known or not isinstance(value, torch.Tensor):
            known[id(value)] = str([_fact(v) for v in tree_leaves(value)])
        position = f" {node.meta[POSITION]}" if POSITION in node.meta else ""
        lines.append(f"{node.op} {target} {text} {known[id(value)]}{position}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fact(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device.type}"
    return value.type if isinstance(value, torch.device) else repr(value)


def qualified_name(target: object) -> str:
    """A name for a call target that is the same in every process (str() may hold an address)."""
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
