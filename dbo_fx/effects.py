"""What every node reads and writes, from op schemas and storages, and the order that follows.

A storage key is any hashable. Views share a key. Node order alone is never trusted: two nodes keep
their order only if one of them writes what the other one touches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import value_of
from dbo_fx.symbols import same_storage_key

Key = Hashable


@dataclass(frozen=True, slots=True)
class Dependency:
    """`before` must be complete before `after` runs.

    `kind` is `data`, `RAW`, `WAR` or `WAW`; `key` is the storage for the last three.
    """

    before: Node
    after: Node
    kind: str
    key: Key = None


@dataclass(frozen=True, slots=True)
class Access:
    """The storages one node reads, writes, and has its results in."""

    reads: frozenset[Key] = frozenset()
    writes: frozenset[Key] = frozenset()
    results: frozenset[Key] = frozenset()

    def renamed(self, rename: Mapping[Key, Key]) -> Access:
        """The same access with some storages renamed."""
        return Access(*(frozenset(rename.get(k, k) for k in keys) for keys in self._fields()))

    def _fields(self) -> tuple[frozenset[Key], frozenset[Key], frozenset[Key]]:
        return self.reads, self.writes, self.results

    @staticmethod
    def union(accesses: Iterable[Access]) -> Access:
        """What several nodes do together."""
        merged = [frozenset[Key]()] * 3
        for access in accesses:
            merged = [a | b for a, b in zip(merged, access._fields(), strict=True)]
        return Access(*merged)


@dataclass
class Effects:
    """Accesses of all nodes of a graph, and which storages outlive the call.

    Attributes:
        access: Per node; nodes without tensors may be missing.
        live_in: Storages of graph inputs and constants.
    """

    access: dict[Node, Access] = field(default_factory=dict)
    live_in: frozenset[Key] = frozenset()

    def of(self, node: Node) -> Access:
        """The node's access; nothing for a node without tensors."""
        return self.access.get(node, Access())

    def written(self) -> frozenset[Key]:
        """All storages that some node writes after they came into being."""
        return frozenset(k for access in self.access.values() for k in access.writes)

    def mutated_live_in(self) -> frozenset[Key]:
        """Storages of inputs that the graph writes (KV caches, counters)."""
        return self.written() & self.live_in

    def dependencies(self, nodes: Iterable[Node]) -> Iterator[Dependency]:
        """All orders that these nodes, run in this order, rely on."""
        writer: dict[Key, Node] = {}
        readers: defaultdict[Key, list[Node]] = defaultdict(list)
        for node in nodes:
            for argument in node.all_input_nodes:
                yield Dependency(argument, node, "data")
            access = self.of(node)
            for key in access.reads:
                if key in writer and writer[key] is not node:
                    yield Dependency(writer[key], node, "RAW", key)
            for key in access.writes:
                if key in writer and writer[key] is not node:
                    yield Dependency(writer[key], node, "WAW", key)
                for reader in readers[key]:
                    if reader is not node:
                        yield Dependency(reader, node, "WAR", key)
                writer[key] = node
                readers[key] = []
            for key in access.reads - access.writes:
                readers[key].append(node)


def effects_of(graph: Graph) -> Effects:
    """Read every node's access off its schema and the storages of `meta["val"]`."""
    access = {node: _access(node) for node in graph.nodes if node.op != "output"}
    for node in graph.nodes:
        if node.op == "output":
            keys = frozenset(k for n in node.all_input_nodes for k in _keys(value_of(n)))
            access[node] = Access(reads=keys)
    live = frozenset(
        key
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for key in access[node].results
    )
    return Effects(access, live)


def _keys(value: Any) -> frozenset[Key]:
    leaves = tree_leaves(value)
    return frozenset(same_storage_key(t) for t in leaves if isinstance(t, torch.Tensor))


def _access(node: Node) -> Access:
    results = _keys(value_of(node))
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return Access(results=results)
    reads: frozenset[Key] = frozenset()
    writes: frozenset[Key] = frozenset()
    for argument, value in _bound_arguments(node):
        values = torch.fx.map_arg(value, value_of)
        keys = _keys(values)
        if _is_write(node.target, argument):
            writes |= keys
            # The old content may matter (index_put_), and overwriting it needs an order anyway.
            reads |= keys
        else:
            reads |= keys
    if not writes and is_view_op(node.target) and results and results <= reads:
        # A view touches no data. Ops that may copy (reshape, contiguous, to) have new results then.
        reads = frozenset()
    return Access(reads, writes, results)


def _is_write(op: torch._ops.OpOverload, argument: Any) -> bool:
    """Whether the schema says so; `detach_` says so, but changes no data."""
    alias = argument.alias_info
    return bool(alias and alias.is_write) and op is not torch.ops.aten.detach_.default


def is_view_op(op: torch._ops.OpOverload) -> bool:
    """Whether the schema says that a result may share storage with an argument, unwritten."""
    aliases = [r.alias_info for r in op._schema.returns if r.alias_info is not None]
    return op is torch.ops.aten.detach_.default or any(not alias.is_write for alias in aliases)


def _bound_arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
