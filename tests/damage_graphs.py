"""Operators on lowered graphs, and what the verifier and the witness say of them.

An operator looks at a fresh state and yields edits; one of them is applied, to that state alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from damage_class import Class
from dbo_fx import sync
from dbo_fx.capture import value_of
from dbo_fx.certificates.hazards import violations
from dbo_fx.certificates.of_graph import execution_of_graph
from dbo_fx.ir import COMM
from dbo_fx.passes.halves import BUFFERS, argument
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS, stream_of
from dbo_fx.pipeline import State
from dbo_fx.tag import retag, tag_of
from dbo_fx.witness import Verdict
from dbo_fx.witness.graphs import GraphWitness
from generated_graphs import GraphCase, reference_of


@dataclass(frozen=True, slots=True)
class Edit:
    """One way to damage the state that it was made for."""

    note: str
    expected: Class
    apply: Callable[[], None]


GraphOperator = Callable[[State], Iterator[Edit]]
GRAPH_OPERATORS: dict[str, GraphOperator] = {}
LOST_EDGE = "mutation edge missing"  # Made while the graph is ordered, not by an edit.


@dataclass(frozen=True, slots=True)
class GraphJudgement:
    """What was said of a damaged graph."""

    operator: str
    case: GraphCase
    note: str
    expected: Class
    refusal: str | None
    verdict: Verdict
    graph: str

    @property
    def disagrees(self) -> str | None:
        """Who does not see what the operator declared."""
        is_unsafe = self.expected == "unsafe"
        wrong = ["the verifier"] if (self.refusal is not None) != is_unsafe else []
        wrong += ["the witness"] if self.verdict.safe == is_unsafe else []
        return " and ".join(wrong) or None

    def __str__(self) -> str:
        """A report that can be read without running anything again."""
        return (
            f"{self.disagrees or 'nobody'} disagrees\n{self.operator}: {self.note}; declared "
            f"{self.expected}\n{self.case}\n{self.graph}\nverifier: {self.refusal or 'certified'}\n"
            f"witness: {self.verdict}"
        )


def graph_mutant(
    name: str, case: GraphCase, rng: Random, only_unsafe: bool = False
) -> tuple[State, str, Class] | None:
    """A damaged state, what was done and its class; None if there is nothing to damage."""
    if name == LOST_EDGE:
        layer = rng.randrange(case.layers)
        expected: Class = "unsafe" if "Cached" in case.kind.__name__ else "redundant"
        return case.lowered(swapped=layer), f"attention of layer {layer} turned round", expected
    state = case.lowered()
    edits = list(GRAPH_OPERATORS[name](state))
    if only_unsafe:
        edits = [e for e in edits if e.expected == "unsafe"]
    if not edits:
        return None
    edit = rng.choice(edits)
    edit.apply()
    state.graph.lint()
    return state, edit.note, edit.expected


def judge_graph(name: str, case: GraphCase, rng: Random, runs: int = 12) -> GraphJudgement | None:
    """Damage a graph and ask both; None if there is nothing to damage."""
    mutant = graph_mutant(name, case, rng, rng.random() < 0.8)
    if mutant is None:
        return None
    state, note, expected = mutant
    text = "\n".join(_line(n) for n in state.graph.nodes if n.op.startswith("call"))
    found = graph_refusal(state, case)
    verdict = graph_witness(state, case).confirm(200 if expected == "unsafe" else runs)
    return GraphJudgement(name, case, note, expected, found, verdict, text)


def graph_refusal(state: State, case: GraphCase) -> str | None:
    """Why the verifier refuses, None if it certifies."""
    found = next(violations(execution_of_graph(state, case.contract).execution), None)
    return None if found is None else f"{found.rule}: {found.missing}; {found.fix}"


def graph_witness(state: State, case: GraphCase) -> GraphWitness:
    """The witness of a state; emits it."""
    right = reference_of(case.kind, case.layers, case.microbatches)
    return GraphWitness(state, case.inputs, right)


def _line(node: Node) -> str:
    return f"  {stream_of(node):<5} {node.name}({', '.join(map(str, node.args))})"


def graph_operator(name: str) -> Callable[[GraphOperator], GraphOperator]:
    """Register an operator on graphs under a name."""

    def register(function: GraphOperator) -> GraphOperator:
        assert name not in GRAPH_OPERATORS, name
        GRAPH_OPERATORS[name] = function
        return function

    return register


def _nodes(state: State, *targets: Any) -> list[Node]:
    return [n for n in state.graph.nodes if n.target in targets]


@graph_operator("wait dropped in a graph")
def wait_dropped(state: State) -> Iterator[Edit]:
    """The streams pass makes no event that another one makes needless.

    A wait that orders nothing but the allocation of landing buffers is left alone: transports on
    CPU fill them at the recv.
    """
    for node in _nodes(state, sync.wait):
        if stream_of(node) == COMM and not _orders_inputs(state, node):
            continue
        yield Edit(f"without {node}", "unsafe", partial(state.graph.erase_node, node))


def _orders_inputs(state: State, wait: Node) -> bool:
    """Whether the send behind a wait reads what no earlier wait has ordered."""
    position = {n: i for i, n in enumerate(state.graph.nodes)}
    records = {n.args[0]: position[n] for n in _nodes(state, sync.record)}
    before = [n for n in _nodes(state, sync.wait) if position[n] < position[wait]]
    known = max((records[n.args[0]] for n in before if stream_of(n) == COMM), default=-1)
    send = next(n for n in _nodes(state, *SENDS) if position[n] > position[wait])
    made = [n for n in tree_leaves(send.args[0]) if isinstance(n, Node)]
    return max(position[_maker(n)] for n in made) > known


def _maker(node: Node) -> Node:
    """The call whose result a node is a part of."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


@graph_operator("keepalive dropped in a graph")
def keepalive_dropped(state: State) -> Iterator[Edit]:
    for node in _nodes(state, sync.keepalive):
        held = [a for a in node.args if isinstance(a, Node)]
        classes = {class_without(state, node, a) for a in held}
        if "unsafe" in classes or None not in classes:
            expected: Class = "unsafe" if "unsafe" in classes else "redundant"
            yield Edit(f"without {node}", expected, partial(state.graph.erase_node, node))


@graph_operator("keepalive argument dropped")
def keepalive_argument_dropped(state: State) -> Iterator[Edit]:
    for node in _nodes(state, sync.keepalive):
        for held in node.args:
            assert isinstance(held, Node)
            expected = class_without(state, node, held)
            if expected is not None:
                rest = tuple(a for a in node.args if a is not held)
                note = f"{node} without {held}"
                yield Edit(note, expected, partial(setattr, node, "args", rest))


def class_without(state: State, keepalive: Node, argument: Node) -> Class | None:
    """What happens if a keepalive does not name a value; None where another name may hold it.

    Uses behind the keepalive keep the value alive as long. Without them, and on another stream
    than its owner's, the send may still read what is freed.
    """
    position = {n: i for i, n in enumerate(state.graph.nodes)}
    if any(position[u] > position[keepalive] for u in argument.users):
        return "redundant"
    others = [u for u in argument.users if u is not keepalive and u.target is not BUFFERS]
    sends = [u for u in others if u.target in SENDS]
    if others != sends or len(sends) != 1:
        return None
    return "unsafe" if stream_of(sends[0]) == COMM else "redundant"


@graph_operator("landing buffers shared")
def landing_shared(state: State) -> Iterator[Edit]:
    """A communication lands where what an earlier one brought is still to be read."""
    buffers = _nodes(state, BUFFERS)
    position = {n: i for i, n in enumerate(state.graph.nodes)}
    for index, one in enumerate(buffers):
        for other in buffers[index + 1 :]:
            received = max(position[n] for n in one.users if n.target in RECVS)
            read = max(position[n] for n in _readers(one))
            sent = min(position[n] for n in other.users if n.target in SENDS)
            if _shapes(one) == _shapes(other) and received < sent < read:
                note = f"{other} becomes {one}"
                yield Edit(note, "unsafe", partial(_share, state, one, other))


def _readers(buffers: Node) -> list[Node]:
    """Who reads what lands, behind the recv."""
    items = [u for u in buffers.users if u.op == "call_function" and u.target not in SENDS]
    readers = [r for i in items for r in i.users if r.op == "call_module"]
    return readers or [buffers]


def _shapes(buffers: Node) -> list[Any]:
    return [(tuple(map(str, v.shape)), v.dtype) for v in tree_leaves(value_of(buffers))]


def _share(state: State, one: Node, other: Node) -> None:
    """The graph and its effects, as a pass would leave them that hands out buffers again."""
    effects = state.effects
    old = sorted(effects.of(other).results, key=str)
    new = sorted(effects.of(one).results, key=str)
    rename = dict(zip(old, new, strict=False))
    other.replace_all_uses_with(one)
    state.graph.erase_node(other)
    for node, access in list(effects.access.items()):
        effects.access[node] = access.renamed(rename)


@graph_operator("buffers allocated on the communication stream")
def buffers_on_comm(state: State) -> Iterator[Edit]:
    for node in _nodes(state, BUFFERS):
        yield Edit(f"{node} on comm", "unsafe", partial(retag, node, stream=COMM))


@graph_operator("output not joined")
def output_not_joined(state: State) -> Iterator[Edit]:
    """The merge or a tail runs on the communication stream, which nothing waits for."""
    for node in state.graph.nodes:
        tag = tag_of(node)
        if node.op == "call_module" and tag is not None and _feeds_output(node):
            yield Edit(f"{node} on comm", "unsafe", partial(retag, node, stream=COMM))
        if node.op == "call_function" and tag is not None and tag.role == "merge":
            yield Edit(f"{node} on comm", "unsafe", partial(retag, node, stream=COMM))


def _feeds_output(node: Node) -> bool:
    """Whether merges read what a segment makes."""
    items = [u for u in node.users if u.op == "call_function"]
    tags = [tag_of(r) for i in items for r in i.users]
    return any(tag is not None and tag.role == "merge" for tag in tags)


@graph_operator("recv dropped in a graph")
def recv_dropped(state: State) -> Iterator[Edit]:
    for node in _nodes(state, *RECVS):
        yield Edit(f"without {node}", "unsafe", partial(state.graph.erase_node, node))


@graph_operator("recv before its send in a graph")
def recv_before_send(state: State) -> Iterator[Edit]:
    for send in _nodes(state, *SENDS):
        action = action_of(send)
        assert action is not None
        for recv in _nodes(state, *RECVS):
            other = action_of(recv)
            assert other is not None
            same = other.communication == action.communication
            if same and argument(recv, "flight") == argument(send, "flight"):
                note = f"{recv} before {send}"
                yield Edit(note, "unsafe", partial(send.prepend, recv))
