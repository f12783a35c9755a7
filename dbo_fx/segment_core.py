"""Cut a segment's body into what is worth compiling and the views around it.

A compiler may return a copy where the traced code returns a view, or the same tensor twice where
the traced code returns two. The verifier and the lifetimes read off storages who shares memory with
whom. So views never leave through a compiler: the *core* returns one tensor for each storage that
it creates, and the views of these, and of the segment's own inputs, are made around it, by the same
ops as before.

    before   a = linear(x, w); b = a.view(-1, 8); cache.select(0, 1).copy_(b); return b, cache
    after    slot = cache.select(0, 1)
             a = core(x, w, slot)            # linear, view, copy_
             return a.view(-1, 8), cache
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import POSITION, is_size_value, value_of, where
from dbo_fx.effects import effects_of, extent
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.symbols import expression, same_storage_key

EAGER = "Compile with segment_backend='eager', or have the model clone one of them."


@dataclass(frozen=True)
class Core:
    """A body in two parts.

    Attributes:
        graph: What is compiled; None where the body only makes views.
        outer: The body around it, which calls the core at `call`.
        call: The node of `outer` that calls the core; it has the core's arguments.
        written: Positions of the core's arguments that it writes in place.
        results: What was traced for the core's results.
    """

    graph: Graph | None
    outer: Graph
    call: Node | None
    written: tuple[int, ...]
    results: tuple[torch.Tensor, ...]


def core_of(body: Graph) -> Core:
    """Cut a segment's body.

    Args:
        body: Placeholders, calls, and a tuple as output; `meta["val"]` on every node.

    Raises:
        UnsupportedGraphError: who shares memory with whom could not be kept up by a compiler.
    """
    return _Cut(body).core()


def call_core(*args: Any) -> Any:
    """Stands for the call of the compiled core."""
    raise AssertionError("a core that was not put in")


@dataclass
class _Cut:
    body: Graph
    inner: Graph = field(default_factory=Graph)
    outer: Graph = field(default_factory=Graph)
    outside: dict[Node, Node] = field(default_factory=dict)
    arguments: list[Node] = field(default_factory=list)
    bases: list[Node] = field(default_factory=list)

    def core(self) -> Core:
        nodes = list(self.body.nodes)
        output = nodes[-1]
        for node in nodes:
            if node.op == "placeholder":
                self.outside[node] = self.outer.node_copy(node)
        access = effects_of(self.body).access
        self.written_keys = {k for n in nodes for k in _storages(access[n].writes)}
        self.hoisted = self._hoisted(nodes)
        results = list(output.args[0])
        # What needs the core is found first, so that its call stands before what needs it.
        self._find_bases(results)
        env = self._inner_nodes(nodes)
        call = self._call(env)
        if call is not None:
            for index, base in enumerate(self.bases):
                item = self.outer.call_function(operator.getitem, (call, index))
                item.meta["val"] = value_of(base)
                self.outside[base] = item
        self.outer.output(tuple(self._outer(r) for r in results))
        self.outer.lint()
        written = tuple(
            i
            for i, node in enumerate(self.arguments)
            if call is not None and _key(node) in self.written_keys
        )
        values = tuple(value_of(b) for b in self.bases)
        return Core(None if call is None else self.inner, self.outer, call, written, values)

    def _find_bases(self, results: Iterable[Any]) -> None:
        """The tensors that the core has to return: one for each storage that it creates."""
        seen: set[Node] = set()
        owners = {_key(n): n for n in self.outside}
        todo = [r for r in results if isinstance(r, Node)]
        while todo:
            node = todo.pop(0)
            if node in seen or node.op == "placeholder":
                continue
            seen.add(node)
            if _is_base(node):
                key = _key(node)
                if key is None or owners.setdefault(key, node) is not node:
                    raise UnsupportedGraphError(
                        f"{where(node)} shares memory with {where(owners.get(key, node))}, and no "
                        f"view op says so; a compiled segment could not keep that up. {EAGER}"
                    )
                self.bases.append(node)
            else:
                todo += node.all_input_nodes
        order = {n: i for i, n in enumerate(self.body.nodes)}
        self.bases.sort(key=order.__getitem__)

    def _outer(self, value: Any) -> Any:
        """The same value outside of the core; views are made again there."""
        if not isinstance(value, Node):
            return value
        if value not in self.outside:
            same = _written_argument(value)
            if same is not None:
                self.outside[value] = self._outer(same)
            else:
                for argument in value.all_input_nodes:
                    self._outer(argument)
                self.outside[value] = self.outer.node_copy(value, self.outside.__getitem__)
        return self.outside[value]

    def _hoisted(self, nodes: list[Node]) -> set[Node]:
        """Views of written inputs that the core takes instead of the inputs.

        A compiler would otherwise copy all of a cache to write a slice of it.
        """
        hoisted: set[Node] = set()
        for key in self.written_keys:
            aliases = [n for n in nodes if isinstance(value_of(n), torch.Tensor) and _key(n) == key]
            inputs = [n for n in aliases if n.op == "placeholder"]
            if not inputs:
                continue
            used = [n for n in aliases if any(not _is_view(u) for u in n.users)]
            places: dict[Any, Node] = {}
            for node in used:
                places.setdefault(_geometry(node), _first(node))
            apart = all(_are_apart(a, b) for a, b in combinations(places.values(), 2))
            if apart and all(map(_needs_no_core, places.values())):
                hoisted |= {n for n in used if _first(n) is n}
            elif len(inputs) > 1:
                raise UnsupportedGraphError(
                    f"{where(inputs[0])} and {where(inputs[1])} share memory and one of them is "
                    f"written; a compiled segment could not take both. {EAGER}"
                )
        return hoisted

    def _inner_nodes(self, nodes: list[Node]) -> dict[Node, Node]:
        """Copy the body; what is outside of the core becomes one of its arguments."""
        env: dict[Node, Node] = {}
        places: dict[Any, Node] = {}
        for node in nodes:
            if node.op != "placeholder" and node not in self.hoisted:
                continue
            place = (_key(node), _geometry(node)) if _key(node) in self.written_keys else node
            if place not in places:
                places[place] = self.inner.placeholder(f"x{len(self.arguments)}")
                kept = ("val", POSITION)
                places[place].meta = {k: node.meta[k] for k in kept if k in node.meta}
                self.arguments.append(node)
            env[node] = places[place]
        for node in nodes[:-1]:
            if node not in env:
                env[node] = self.inner.node_copy(node, env.__getitem__)
        self.inner.output(tuple(env[b] for b in self.bases))
        for node in reversed(list(self.inner.nodes)):
            if not node.users and node.op == "call_function" and _is_view(node):
                self.inner.erase_node(node)
        return env

    def _call(self, env: dict[Node, Node]) -> Node | None:
        """Call the core with the arguments that it uses, if it computes anything."""
        if not any(n.op == "call_function" for n in self.inner.nodes):
            assert not self.bases
            return None
        kept = []
        for node in self.arguments:
            if env[node].users:
                kept.append(node)
            else:
                self.inner.erase_node(env[node])
        self.arguments = kept
        self.inner.lint()
        return self.outer.call_function(call_core, tuple(self._outer(n) for n in kept))


def _storages(keys: Iterable[Any]) -> set[int]:
    return {k[0] if isinstance(k, tuple) else k for k in keys}


def _key(node: Node) -> int | None:
    """The storage that a node's results lie in, if it is one."""
    keys = {same_storage_key(v) for v in tree_leaves(value_of(node)) if _is_tensor(v)}
    return keys.pop() if len(keys) == 1 else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _aliased(node: Node) -> Node | None:
    """The argument whose memory a node's results lie in."""
    key = _key(node)
    if node.op != "call_function" or key is None:
        return None
    if node.target is operator.getitem:  # Items of a view op are views; other items are new.
        parent = node.args[0]
        assert isinstance(parent, Node)
        return parent if _aliased(parent) is not None else None
    return next((a for a in node.all_input_nodes if _key(a) == key), None)


def _needs_no_core(node: Node) -> bool:
    """Whether a view can be made before anything is computed."""
    return node.op == "placeholder" or (
        _is_view(node) and all(map(_needs_no_core, node.all_input_nodes))
    )


def _writes(node: Node) -> bool:
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


def _is_view(node: Node) -> bool:
    """Whether a node only makes views, or numbers."""
    if node.op != "call_function" or _writes(node):
        return False
    return _aliased(node) is not None or is_size_value(value_of(node))


def _is_base(node: Node) -> bool:
    """Whether a node creates the storage that its result lies in."""
    return _aliased(node) is None and not is_size_value(value_of(node))


def _written_argument(node: Node) -> Node | None:
    """What an in-place op returns: the tensor that it wrote."""
    same = _aliased(node)
    if same is None or not _writes(node):
        return None
    if _geometry(same) != _geometry(node):
        raise UnsupportedGraphError(
            f"{where(node)} changes the shape of a tensor in place; a compiled segment could not "
            f"keep that up. {EAGER}"
        )
    return same


def _first(node: Node) -> Node:
    """The value that was there before in-place ops returned it."""
    while (same := _written_argument(node)) is not None:
        node = same
    return node


def _geometry(node: Node) -> Any:
    """Shape, strides and offset, to compare with; None for what is no tensor."""
    value = value_of(node)
    if not _is_tensor(value):
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return value.dtype, value.dim(), tuple(map(expression, numbers))


def _are_apart(one: Node, other: Node) -> bool:
    (low, high), (start, end) = extent(value_of(one)), extent(value_of(other))
    return high <= start or end <= low
