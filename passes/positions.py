"""Which windows over token positions must move with the microbatch.

needs:    a tagged graph and its effects
ensures:  for every `arange` and table slice over the split size: offset or not, or a refusal
before -> after: nothing changes here; `microbatch` turns `arange(0, s)` into
                 `arange(start, start + s)`

A window [0, s) means two things. As an index into something that is split itself, it is local to
the microbatch. As a position (a row of a table, an angle, a slot), it is global and needs the
microbatch's offset, unless it is added to a counter that the earlier microbatch has advanced.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from dbo_fx.capture import POSITION, size_of, value_of, where
from dbo_fx.errors import SoundnessError
from dbo_fx.pipeline import State
from dbo_fx.symbols import START, coefficient, expression, free_symbols
from dbo_fx.tag import Tag, set_tag, tag_of

aten = torch.ops.aten
ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
WINDOWS = (*ARANGES, aten.slice.Tensor, aten.narrow.default)
END = 2**63 - 1
CARRIES = {
    "view", "reshape", "unsqueeze", "squeeze", "expand", "to", "clone", "contiguous", "repeat",
    "repeat_interleave", "slice", "transpose", "permute", "flatten", "unflatten", "detach", "alias",
    "_to_copy", "broadcast_to", "expand_as", "view_as", "float", "long", "int",
}  # fmt: skip
COMPARES = {"eq", "ne", "lt", "le", "gt", "ge", "sub"}
ARITHMETIC = {"add", "mul", "div", "floor_divide", "remainder", "fmod", "clamp", "neg"} | COMPARES
INDEXED_DIM = {"index_select": 1, "gather": 1, "index_copy_": 1, "index_add_": 1, "scatter_": 1}


@dataclass(frozen=True, slots=True)
class Position:
    """A window over positions: an arange, or a slice of a table.

    Attributes:
        node: The captured node.
        factor: Positions per row of the split dim.
        offset: Whether it moves with the microbatch.
    """

    node: Node
    factor: int
    offset: bool

    def shift(self, copy: Node, start: Node | int) -> None:
        """Move the copy's window by `start * factor`, with size nodes put right before it."""
        graph = copy.graph

        def moved(bound: Node | int) -> Node | int:
            by = _size(graph, operator.mul, start, self.factor) if self.factor != 1 else start
            return by if bound == 0 else _size(graph, operator.add, by, bound)

        low, high, _ = _bounds(copy)
        with graph.inserting_before(copy):
            if copy.target is aten.narrow.default:
                copy.update_arg(2, moved(low))
            elif copy.target is aten.slice.Tensor:
                copy.args = (*copy.args[:2], moved(low), moved(high))
            else:
                copy.target = aten.arange.start
                copy.args = (moved(low), moved(high))


def _size(graph: Graph, function: Any, *args: Node | int) -> Node:
    node = graph.call_function(function, args)
    node.meta["val"] = next((value_of(a) for a in args if isinstance(a, Node)), 0)
    one, other = (_position(a) for a in args)
    node.meta[POSITION] = function(one, other)
    set_tag(node, Tag("size"))
    return node


def _position(bound: Node | int) -> sympy.Expr:
    """A bound over the microbatch's start and size; a start has no microbatch in its tag."""
    if not isinstance(bound, Node):
        return sympy.Integer(bound)
    is_start = bound.meta.get(POSITION) is None and tag_of(bound) == Tag("size")
    return START if is_start else size_of(bound)


def positions(state: State) -> dict[Node, Position]:
    """All windows of the captured graph, with the decision for each.

    Raises:
        SoundnessError: one window is used both as a local index and as a global position.
    """
    windows = {}
    for node in state.graph.nodes:
        factor = _window_factor(node, state)
        if factor is not None:
            windows[node] = factor
    tainted = _carriers(set(windows))
    counters = _from_counters(state)
    found = {}
    for node, factor in windows.items():
        uses = _Uses(state, tainted, counters)
        uses.follow(node)
        if uses.local and uses.everywhere:
            raise SoundnessError(
                f"{where(node)} is used as an index within the microbatch ({uses.local[0].name}) "
                f"and as a position in the whole batch ({uses.everywhere[0].name}). Build it "
                "twice, or pass the positions in as an input."
            )
        if uses.everywhere:
            _refuse_strided(node, factor, state)
        found[node] = Position(node, factor, bool(uses.everywhere))
    return found


def _refuse_strided(node: Node, factor: int, state: State) -> None:
    """Positions over (outer, split, ...) flattened: a microbatch's own are not side by side."""
    token = state.captured.token_inputs[0]
    outer = value_of(state.captured.placeholders[token.index]).shape[: token.dim].numel()
    if token.dim and outer != 1 and factor % int(outer) == 0:
        raise SoundnessError(
            f"{where(node)} numbers {factor} positions per row of dim {token.dim}, over {outer} "
            "flattened outer rows: those of one microbatch are no window of it. Split along dim "
            "0, or build the positions per row."
        )


def _window_factor(node: Node, state: State) -> int | None:
    """Positions per row of the split dim, or None for what is no window over it.

    Raises:
        SoundnessError: the window has no meaning for one microbatch.
    """
    if node.op != "call_function" or node.target not in WINDOWS:
        return None
    if node.target not in ARANGES and not _is_static_table(node, state):
        return None
    low, high, step = map(_plain, _bounds(node))
    symbol = state.captured.symbol
    if not any(symbol in free_symbols(b) for b in (low, high, step)):
        return None
    start, end = expression(low), expression(high)
    factor = coefficient(end - start, symbol)
    if factor is None or step != 1 or symbol in start.free_symbols:
        raise SoundnessError(
            f"{where(node)} goes from {start} to {end} in steps of {step}, where {symbol} is the "
            "split size: it has no meaning for one microbatch. Windows must start at a fixed "
            "position and hold a multiple of the split size; pass other ones in as an input."
        )
    return factor


def _plain(bound: Any) -> int | torch.SymInt:
    value: int | torch.SymInt = value_of(bound) if isinstance(bound, Node) else bound
    return value


def _bounds(node: Node) -> tuple[Any, Any, Any]:
    """Start, end and step of a window, as nodes or numbers."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.narrow.default:
        return args[2], _plain(args[2]) + _plain(args[3]), 1
    if node.target is aten.slice.Tensor:
        low, high, step = (*args[2:], None, None, None)[:3]
        return low or 0, END if high is None else high, 1 if step is None else step
    low, high = args[:2] if len(args) > 1 else (0, args[0])
    return low, high, args[2] if len(args) > 2 else 1


def _is_static_table(node: Node, state: State) -> bool:
    table = node.args[0]
    assert isinstance(table, Node)
    return state.captured.symbol not in free_symbols(value_of(table))


def _short(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))


def _carriers(windows: set[Node]) -> set[Node]:
    """Windows and what carries their values on unchanged, up to views, casts and constants."""
    found, todo = set(windows), list(windows)
    while todo:
        for user in todo.pop().users:
            tensors = [a for a in user.all_input_nodes if isinstance(value_of(a), torch.Tensor)]
            alone = all(a in found for a in tensors)
            if user not in found and alone and _short(user) in CARRIES | ARITHMETIC:
                found.add(user)
                todo.append(user)
    return found


def _from_counters(state: State) -> set[Node]:
    """Integers read from inputs that the graph writes: counters that a microbatch advances."""
    mutated = state.effects.mutated_live_in()
    found: set[Node] = set()
    for node in state.graph.nodes:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point:
            continue
        access = state.effects.of(node)
        touches = (access.reads | access.results) & mutated
        if touches or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


class _Uses:
    def __init__(self, state: State, tainted: set[Node], counters: set[Node]) -> None:
        self.state, self.tainted, self.counters = state, tainted, counters
        self.local: list[Node] = []
        self.everywhere: list[Node] = []
        self.seen: set[Node] = set()

    def follow(self, node: Node) -> None:
        """Sort every use of the window's value into local and global ones."""
        todo = [node]
        while todo:
            here = todo.pop()
            for user in here.users:
                if user not in self.seen:
                    self.seen.add(user)
                    if self._carries_on(here, user):
                        todo.append(user)

    def _carries_on(self, here: Node, user: Node) -> bool:
        name = _short(user)
        others = [
            a
            for a in user.all_input_nodes
            if a is not here and isinstance(value_of(a), torch.Tensor)
        ]
        if name in CARRIES and user.args[0] is here:
            return True
        if name in ARITHMETIC:
            return self._meets(user, name, others)
        indexed = self._indexed_size(here, user, name)
        if indexed is None:
            self.everywhere.append(user)
        elif self.state.captured.symbol in free_symbols(indexed):
            self.local.append(user)
        else:
            self.everywhere.append(user)
        return False

    def _meets(self, user: Node, name: str, others: list[Node]) -> bool:
        if not others:
            return True
        if any(o in self.counters for o in others):
            self.local.append(user)  # The counter already stands at the microbatch's start.
            return False
        if all(o in self.tainted for o in others):
            return name not in COMPARES  # Both sides move alike; a comparison does not notice.
        self.everywhere.append(user)
        return False

    def _indexed_size(self, here: Node, user: Node, name: str) -> int | torch.SymInt | None:
        """The size that `here` indexes in `user`, or None if it is used as data."""
        table = user.args[0] if user.args else None
        if not isinstance(table, Node) or not isinstance(value_of(table), torch.Tensor):
            return None
        shape: torch.Size = value_of(table).shape
        if name == "embedding" and user.args[1] is here:
            return shape[0]
        if name in ("index", "index_put", "index_put_") and isinstance(user.args[1], list | tuple):
            indices = list(user.args[1])
            return shape[indices.index(here)] if here in indices else None
        if name in INDEXED_DIM and len(user.args) > 2 and user.args[2] is here:
            dim = user.args[1]
            assert isinstance(dim, int)
            return shape[dim]
        return None
