"""Make the captured graph canonical and find out what every node reads and writes.

needs:    a captured graph
ensures:  one wait per collective; every size is computed from the size symbol alone, at the start;
          no dead nodes, and no lost writes; `state.effects` covers every node
before -> after: `sym_size(linear_3, 0) * 2` -> `s * 2` at the start; two waits of one launch -> one
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Graph, Node

from dbo_fx.capture import CapturedGraph, value_of
from dbo_fx.communication import is_communication
from dbo_fx.effects import Effects, effects_of
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.pipeline import State
from dbo_fx.symbols import expression, symint
from dbo_fx.tag import Tag, set_tag, tag_of

WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True, slots=True)
class Normalize:
    """See the module's contract."""

    name: str = "normalize"

    def apply(self, state: State) -> tuple[State, str]:
        """Fill `effects`; the graph is changed in place."""
        graph = state.graph
        waits = dedupe_waits(graph)
        sizes = hoist_sizes(state.captured)
        effects = effects_of(graph)
        dead = remove_dead(graph, effects)
        graph.lint()
        state.captured.module.recompile()
        effects = Effects({n: effects.of(n) for n in graph.nodes}, effects.live_in)
        text = (
            f"{len(graph.nodes)} nodes; {waits} double waits, {len(dead)} dead nodes removed; "
            f"{sizes} sizes; {len(effects.mutated_live_in())} inputs written in place"
        )
        return replace(state, effects=effects), text


def dedupe_waits(graph: Graph) -> int:
    """Keep the first wait of every collective."""
    first: dict[Node, Node] = {}
    removed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not WAIT:
            continue
        launch = node.args[0]
        assert isinstance(launch, Node)
        # Waiting for what another wait returned is waiting twice, too.
        if launch in first.values():
            keep = launch
        elif launch in first:
            keep = first[launch]
        else:
            first[launch] = node
            continue
        node.replace_all_uses_with(keep)
        graph.erase_node(node)
        removed += 1
    return removed


def size_node(captured: CapturedGraph) -> Node:
    """The node that holds the split size; made from the first token input if it is no input."""
    for node in captured.placeholders:
        value = value_of(node)
        if isinstance(value, torch.SymInt) and expression(value) == captured.symbol:
            return node
    token = captured.token_inputs[0]
    source = captured.placeholders[token.index]
    for user in source.users:
        if tag_of(user) == Tag(role="total"):
            return user
    with captured.graph.inserting_before(captured.placeholders[-1].next):
        node = captured.graph.call_function(
            torch.ops.aten.sym_size.int, (source, token.dim), name="total"
        )
    node.meta["val"] = value_of(source).shape[token.dim]
    set_tag(node, Tag(role="total"))
    return node


def hoist_sizes(captured: CapturedGraph) -> int:
    """Recompute every integer size from the size symbol, right after the inputs."""
    graph = captured.graph
    base = size_node(captured)
    builder = _SizeBuilder(graph, base, captured.symbol)
    count = 0
    for node in list(graph.nodes):
        if node.op not in ("call_function", "placeholder") or node is base:
            continue
        value = value_of(node)
        if tag_of(node) == Tag(role="size") or not isinstance(value, torch.SymInt | int):
            continue
        expr = expression(value)
        if isinstance(value, bool) or not expr.free_symbols <= {captured.symbol}:
            continue  # A second symbol: stays where it is, as ordinary size arithmetic.
        node.replace_all_uses_with(builder.build(expr, value))
        if node.op == "placeholder":
            continue  # Two marked inputs bring their size each; the microbatch has but one.
        graph.erase_node(node)
        count += 1
    return count


class _SizeBuilder:
    """Prints a sympy expression of one symbol as FX nodes, each distinct expression once."""

    def __init__(self, graph: Graph, base: Node, symbol: sympy.Symbol) -> None:
        self.graph = graph
        self.after = base if base.op != "placeholder" else _last_placeholder(graph)
        self.symbol = symbol
        self.made: dict[sympy.Expr, Node | int] = {symbol: base}

    def build(self, expr: sympy.Expr, value: torch.SymInt | int) -> Node | int:
        """The node (or constant) for this expression; `value` is what tracing saw for it."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self.made:
            function, arguments = self._split(expr)
            built = tuple(self.build(a, self._value(a, value)) for a in arguments)
            with self.graph.inserting_after(self.after):
                node = self.graph.call_function(function, built)
            node.meta["val"] = value if isinstance(value, torch.SymInt) else int(value)
            set_tag(node, Tag(role="size"))
            self.made[expr], self.after = node, node
        return self.made[expr]

    def _value(self, expr: sympy.Expr, like: torch.SymInt | int) -> torch.SymInt | int:
        assert isinstance(like, torch.SymInt)
        return symint(expr, like)

    def _split(self, expr: sympy.Expr) -> tuple[Callable[..., object], tuple[sympy.Expr, ...]]:
        if isinstance(expr, sympy.Add | sympy.Mul):
            function = operator.add if isinstance(expr, sympy.Add) else operator.mul
            return function, (expr.args[0], expr.func(*expr.args[1:]))
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 1:
            return operator.mul, (expr.base, expr.base ** (expr.exp - 1))
        name = type(expr).__name__
        if name in ("FloorDiv", "CleanDiv"):
            return operator.floordiv, expr.args
        if name in ("Mod", "PythonMod"):
            return operator.mod, expr.args
        if name in ("Max", "Min"):
            return (torch.sym_max if name == "Max" else torch.sym_min), expr.args
        raise UnsupportedGraphError(
            f"a size is computed as {expr}, and {name} of a size is not supported. Compute sizes "
            "with + - * // % only."
        )


def _last_placeholder(graph: Graph) -> Node:
    placeholders: list[Node] = [n for n in graph.nodes if n.op == "placeholder"]
    return placeholders[-1]


def remove_dead(graph: Graph, effects: Effects) -> list[str]:
    """Remove what nobody reads and what changes nothing that outlives the call.

    `Graph.eliminate_dead_code` deletes unread in-place writes; here a write to an input is a root.
    """
    needs: dict[Node, list[Node]] = {n: [] for n in graph.nodes}
    for dependency in effects.dependencies(graph.nodes):
        if dependency.kind != "WAR":
            needs[dependency.after].append(dependency.before)
    # Reading a fresh storage needs what was written into it earlier, through any view: RAW does it.
    todo = [n for n in graph.nodes if is_root(n, effects)]
    alive = set(todo)
    while todo:
        for node in needs[todo.pop()]:
            if node not in alive:
                alive.add(node)
                todo.append(node)
    dead = [n for n in graph.nodes if n not in alive]
    for node in reversed(dead):
        graph.erase_node(node)
    return [n.name for n in dead]


def is_root(node: Node, effects: Effects) -> bool:
    """Whether the node must run even if nobody reads its result."""
    if node.op in ("placeholder", "output") or is_communication(node):
        return True
    if effects.of(node).writes & effects.live_in:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or not node.target._schema.returns:
        return not effects.of(node).writes
    return False
