"""Tag every node with its layer and phase, from the communication structure alone.

needs:    a normalized graph and its effects
ensures:  every call has a `Tag`: `size`, `shared` (depends on no token), `comm`, or `compute` with
          the phase A0, A1, MLP, S or TAIL of its layer; `state.communications` has two per layer
before -> after: nothing moves; nodes are only tagged

Terms. Time is cut by the communications into slots: A of layer k is slot 4k, its MLP 4k+2, the
TAIL 4L. A node's *earliest* slot follows from what it needs, its *latest* from what needs it. Most
nodes have no choice. The shared expert has: it could run any time between its layer's attention and
the next layer. It becomes S if it follows its layer's attention core; all else goes as late as
possible.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from dbo_fx import phase_rules as rules
from dbo_fx.attention import core_ends, is_attention_core
from dbo_fx.capture import is_size_value, value_of, where
from dbo_fx.communication import (
    Communication,
    is_communication,
    is_launch,
    launch_of,
    phases_of,
    refuse_opaque,
)
from dbo_fx.effects import Effects, Key
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.ir import Phase
from dbo_fx.pipeline import State
from dbo_fx.symbols import free_symbols
from dbo_fx.tag import Tag, retag, set_tag, tag_of


@dataclass(frozen=True, slots=True)
class Regions:
    """See the module's contract."""

    name: str = "regions"

    def apply(self, state: State) -> tuple[State, str]:
        """Tag the nodes of `graph` and fill `communications` and `layers`.

        Raises:
            UnsupportedGraphError: communication that is no dispatch / combine pair.
        """
        tagger = _Tagger(state)
        communications = tagger.communications
        layers = len(communications) // 2
        tagger.tag_all()
        counts = Counter(
            t.phase.value for n in state.graph.nodes if (t := tag_of(n)) and t.phase is not None
        )
        shared = sum(1 for n in state.graph.nodes if is_shared(n))
        text = (
            f"{layers} MoE layers; nodes "
            + ", ".join(f"{p.value} {counts[p.value]}" for p in Phase)
            + f"; {shared} shared by the microbatches"
        )
        return replace(state, communications=communications, layers=layers), text


def is_shared(node: Node) -> bool:
    """Whether one copy of the node serves all microbatches."""
    tag = tag_of(node)
    return tag is not None and tag.role == "shared"


def predecessors(graph: Graph, effects: Effects) -> dict[Node, list[Node]]:
    """What every node needs, through values and through storages."""
    needs: dict[Node, list[Node]] = {n: [] for n in graph.nodes}
    for dependency in effects.dependencies(graph.nodes):
        needs[dependency.after].append(dependency.before)
    return needs


def find_communications(graph: Graph, needs: dict[Node, list[Node]]) -> tuple[Communication, ...]:
    """Group the launches into dispatches and combines.

    A launch's level is the length of the longest chain of launches before it. What has the same
    level travels together. Even levels dispatch, odd levels combine.

    Raises:
        UnsupportedGraphError: a collective that fits neither, an unmatched dispatch, or an op that
            may communicate.
    """
    refuse_opaque(graph)
    level: dict[Node, int] = {}
    groups: defaultdict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        level[node] = max((level[p] for p in needs[node]), default=0)
        if is_launch(node):
            groups[level[node]].append(node)
            level[node] += 1
        elif is_communication(node) and node.target not in _WAITS:
            raise UnsupportedGraphError(
                f"{where(node)} communicates, but is neither dispatch nor combine (all-gather, "
                "all-to-all, reduce-scatter with their waits, or dbo_fx.dispatch / combine). "
                "Tensor parallelism inside the split region is not supported yet."
            )
    found = []
    for index in sorted(groups):
        phase = Phase.C if index % 2 else Phase.D
        for node in groups[index]:
            if phase not in phases_of(node):
                raise UnsupportedGraphError(
                    f"{where(node)} would be the {phase.value} of MoE layer {index // 2} "
                    "(dispatches and combines must alternate), but it cannot be one. Check that "
                    "every layer has one dispatch and one combine inside this graph, with no graph "
                    "break between."
                )
        launches = tuple(launch_of(node) for node in groups[index])
        found.append(Communication(phase, index // 2, launches))
    if len(found) % 2:
        raise UnsupportedGraphError(
            f"{found[-1]}: the last dispatch has no combine in this graph. A graph break between "
            "them cuts the layer: compile with fullgraph=True to see where."
        )
    return tuple(found)


_WAITS = (torch.ops._c10d_functional.wait_tensor.default,)


class _Tagger:
    def __init__(self, state: State) -> None:
        self.graph = state.graph
        self.effects = state.effects
        self.symbol = state.captured.symbol
        self.needs = predecessors(state.graph, state.effects)
        self.communications = find_communications(state.graph, self.needs)
        self.layers = len(self.communications) // 2
        self.comm_of = {n: c for c in self.communications for n in c.nodes}
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        self.position = {n: i for i, n in enumerate(self.graph.nodes)}
        self.users: dict[Node, list[Node]] = {n: [] for n in self.graph.nodes}
        for node, before in self.needs.items():
            for p in before:
                self.users[p].append(node)

    def tag_all(self) -> None:
        for node in self.nodes:
            if node in self.comm_of:
                comm = self.comm_of[node]
                rule = rules.SENDS if comm.phase is Phase.D else rules.RETURNS
                set_tag(node, Tag("comm", comm.phase, comm.layer, rule=rule))
        self._tag_sizes()
        self._tag_shared()
        self.earliest = self._earliest()
        self.unread = self._unread()
        self.latest = self._latest()
        self._tag_compute()
        self._tag_unread()
        self._tag_items()

    def _untagged(self) -> list[Node]:
        return [n for n in self.nodes if tag_of(n) is None]

    def _tag_sizes(self) -> None:
        """Size arithmetic over other symbols than the split one, and asserts about sizes."""
        for node in self._untagged():
            tensors = [p for p in node.all_input_nodes if isinstance(value_of(p), torch.Tensor)]
            if not tensors and (is_size_value(value_of(node)) or _is_size_assert(node)):
                set_tag(node, Tag("size", rule=rules.SIZE))

    def _tag_shared(self) -> None:
        """Nodes that no token reaches: masks, rope tables, views and casts of weights.

        What touches a storage that a token reaches is not shared: every microbatch needs buffers of
        its own, and the later one must see what the earlier one wrote to an input. An input that is
        read and written without tokens alone (a decode step's counter) stays shared: once per step.
        """
        free = {n for n in self.graph.nodes if n.op == "get_attr" or self._is_token_free_input(n)}
        mutated = self.effects.mutated_live_in()
        barred: frozenset[Key] = frozenset()
        candidates = self._untagged()
        while True:
            shared = set(free)
            for node in candidates:
                access = self.effects.of(node)
                touched = access.reads | access.writes | access.results
                if not touched & barred and all(p in shared for p in self.needs[node]):
                    shared.add(node)
            spoiled = frozenset[Key]()
            for node in self.nodes:
                if node not in shared:
                    access = self.effects.of(node)
                    spoiled |= access.writes | (access.reads & mutated)
            if spoiled <= barred:
                break
            barred |= spoiled
        for node in candidates:
            if node in shared:
                set_tag(node, Tag("shared", rule=rules.NO_TOKENS))

    def _is_token_free_input(self, node: Node) -> bool:
        return node.op == "placeholder" and self.symbol not in free_symbols(value_of(node))

    def _earliest(self) -> dict[Node, int]:
        slot: dict[Node, int] = {}
        for node in self.graph.nodes:
            slot[node] = max((self._after(p, slot[p]) for p in self.needs[node]), default=0)
        return slot

    def _after(self, node: Node, slot: int) -> int:
        comm = self.comm_of.get(node)
        if comm is None:
            return slot
        return 4 * comm.layer + (2 if comm.phase is Phase.D else 4)

    def _unread(self) -> set[Node]:
        """Writes to inputs that no other node reads, asserts, and what only these need.

        Nothing says how late they may run.
        """
        found: set[Node] = set()
        for node in reversed(self._untagged()):
            users = {u for u in self.users[node] if u not in found}
            writes = self.effects.of(node).writes & self.effects.live_in
            if not users or (writes and all(u.op == "output" for u in users)):
                found.add(node)
        return found

    def _latest(self) -> dict[Node, int]:
        slot: dict[Node, int] = {}
        for node in reversed(list(self.graph.nodes)):
            users = [u for u in self.users[node] if u in slot and u not in self.unread]
            ends = [self._before(u, slot[u]) for u in users]
            slot[node] = min(ends, default=4 * self.layers)
        return slot

    def _before(self, node: Node, slot: int) -> int:
        comm = self.comm_of.get(node)
        if comm is None:
            return slot
        return 4 * comm.layer + (0 if comm.phase is Phase.D else 2)

    def _tag_compute(self) -> None:
        flexible = []
        for node in self._untagged():
            if node in self.unread:
                continue
            early, late = self.earliest[node], self.latest[node]
            assert early <= late, f"{node.name} must run after slot {early} and before {late}"
            layer = late // 4
            if late % 4 == 2:
                rule = rules.EXPERTS if early == late else rules.FOR_COMBINE
                set_tag(node, Tag("compute", Phase.MLP, layer, rule=rule))
            elif early == late or early % 4 == 2:
                rule = rules.PLAIN if early == late else rules.NOT_COMBINED
                set_tag(node, Tag("compute", Phase.A0, layer, rule=rule))
            else:
                flexible.append(node)
        follows = self._attention_layer(self._last_cores())
        for node in flexible:
            layer = self.earliest[node] // 4
            if follows[node] == layer:
                set_tag(node, Tag("compute", Phase.S, layer, rule=rules.BESIDE))
            else:
                set_tag(node, Tag("compute", Phase.A0, self.latest[node] // 4, rule=rules.LATE))
        self._split_attention()

    def _last_cores(self) -> dict[int, Node]:
        """The last attention core among the nodes that must run in each layer's A."""
        last = {}
        for node in self.nodes:
            tag = tag_of(node)
            if tag is not None and tag.phase is Phase.A0 and is_attention_core(node):
                last[tag.layer or 0] = node
        return last

    def _attention_layer(self, cores: dict[int, Node]) -> dict[Node, int]:
        """The last layer whose attention core a node follows; layers without one count."""
        layer_of = {node: layer for layer, node in cores.items()}
        follows: dict[Node, int] = {}
        for node in self.graph.nodes:
            own = layer_of.get(node, -1)
            follows[node] = max((follows[p] for p in self.needs[node]), default=-1)
            follows[node] = max(follows[node], own)
            slot = self.earliest[node]
            if slot % 4 == 0 and slot // 4 not in cores and node.op == "call_function":
                follows[node] = max(follows[node], slot // 4)
        return follows

    def _split_attention(self) -> None:
        """A0 is what the layer's last attention core needs; A1 is that core and the rest of A."""
        members: defaultdict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            tag = tag_of(node)
            if tag is not None and tag.phase is Phase.A0:
                members[tag.layer or 0].append(node)
        for layer, nodes in members.items():
            if layer == self.layers:
                for node in nodes:
                    set_tag(
                        node, Tag("compute", Phase.TAIL, None, rule=_because(node, rules.AFTER))
                    )
                continue
            cores = [n for n in nodes if is_attention_core(n)]
            if not cores:
                for node in nodes:
                    retag(node, rule=_because(node, rules.NO_CORE))
                continue
            first, last = core_ends(cores[-1])
            inside = set(nodes)
            core = _reached(first & inside, self.users, inside)
            before = _reached(last & inside, self.needs, inside) - core
            inner = core & _reached(last & inside, self.needs, inside)
            for node in nodes:
                phase = Phase.A0 if node in before else Phase.A1
                rule = (
                    rules.CORE
                    if node in inner
                    else rules.FOR_CORE
                    if node in before
                    else rules.FEEDS
                )
                set_tag(node, Tag("compute", phase, layer, rule=_because(node, rule)))

    def _tag_unread(self) -> None:
        """What nobody in the graph waits for joins the phase of its last predecessor."""
        for node in self._untagged():
            slot = self.earliest[node]
            phase = Phase.MLP if slot % 4 == 2 else Phase.A0
            if slot == 4 * self.layers:
                phase = Phase.TAIL
            tags = [Tag("compute", phase, None if phase is Phase.TAIL else slot // 4)]
            tags += [t for p in self.needs[node] if (t := tag_of(p)) and t.role == "compute"]
            set_tag(node, replace(max(tags, key=_rank), rule=rules.UNREAD))

    def _tag_items(self) -> None:
        """An item of a call's results stays with the call: segments pass tensors, not tuples."""
        for node in self.nodes:
            if node.target is operator.getitem and node not in self.comm_of:
                source = node.args[0]
                assert isinstance(source, Node)
                tag, own = tag_of(source), tag_of(node)
                assert own is not None
                if tag is None or tag.role != "compute":
                    continue
                if (tag.phase, tag.layer) != (own.phase, own.layer):
                    set_tag(node, tag)


def _because(node: Node, rule: str) -> str:
    """A rule of the split of A, with the rule that put the node into A if that says more."""
    tag = tag_of(node)
    more = tag.rule if tag is not None else ""
    return rule if more in ("", rules.PLAIN) else f"{rule}; {more}"


def _reached(
    start: set[Node], edges: Mapping[Node, Iterable[Node]], inside: set[Node]
) -> set[Node]:
    """`start`, and what can be reached from it along the edges without leaving `inside`."""
    found, todo = set(start), list(start)
    while todo:
        for node in edges[todo.pop()]:
            if node in inside and node not in found:
                found.add(node)
                todo.append(node)
    return found


def _rank(tag: Tag) -> tuple[int, int]:
    order = list(Phase)
    layer = tag.layer if tag.layer is not None else 1 << 30
    assert tag.phase is not None
    return layer, order.index(tag.phase)


def _is_size_assert(node: Node) -> bool:
    return node.target is torch.ops.aten._assert_scalar.default
