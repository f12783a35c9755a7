"""What every node reads and writes, from op schemas and storages, and the order that follows.

A storage key is any hashable. Views share a key, unless they provably lie apart: layers that keep
their caches in one tensor (`caches.unbind(0)`) do not wait for each other. Node order alone is
never trusted: two nodes keep their order only if one of them writes what the other one touches.
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


@dataclass(frozen=True, slots=True)
class Member:
    """One node of the captured graph, as a call of the lowered graph runs it.

    Attributes:
        position: Where it stands in the captured graph.
        microbatch: Whose copy it is; None for what all microbatches share.
        access: What this copy reads, writes and returns.
    """

    position: int
    microbatch: int | None
    access: Access = Access()


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
    raw = {node: _raw_access(node) for node in graph.nodes}
    parts = _Parts(raw.values())
    access = {node: Access(*map(parts.keys, tensors)) for node, tensors in raw.items()}
    live = frozenset(
        key
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for key in access[node].results
    )
    return Effects(access, live)


Tensors = list[torch.Tensor]
Raw = tuple[Tensors, Tensors, Tensors]


def _raw_access(node: Node) -> Raw:
    """The tensors a node reads, writes and returns."""
    results = _tensors(value_of(node))
    if node.op == "output":
        return [t for n in node.all_input_nodes for t in _tensors(value_of(n))], [], []
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return [], [], results
    reads: Tensors = []
    writes: Tensors = []
    for argument, value in _bound_arguments(node):
        tensors = _tensors(torch.fx.map_arg(value, value_of))
        # The old content may matter (index_put_), and overwriting it needs an order anyway.
        reads += tensors
        if _is_write(node.target, argument):
            writes += tensors
    stored = {same_storage_key(t) for t in reads}
    aliases = bool(results) and all(same_storage_key(t) in stored for t in results)
    if not writes and is_view_op(node.target) and aliases:
        # A view touches no data. Ops that may copy (reshape, contiguous, to) have new results then.
        reads = []
    return reads, writes, results


def _tensors(value: Any) -> Tensors:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Parts:
    """Cuts written storages into parts that no access straddles; a part is a key.

    Only extents that do not depend on symbolic sizes count; any other access covers its storage.
    """

    def __init__(self, raw: Iterable[Raw]) -> None:
        touched: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        written: set[int] = set()
        for reads, writes, _ in raw:
            written.update(same_storage_key(t) for t in writes)
            for tensor in reads:
                touched[same_storage_key(tensor)].append(extent(tensor))
        self.parts = {key: _merged(touched[key]) for key in written}

    def keys(self, tensors: Tensors) -> frozenset[Key]:
        """The keys of all parts that these tensors lie in."""
        return frozenset(key for tensor in tensors for key in self._keys(tensor))

    def _keys(self, tensor: torch.Tensor) -> Iterator[Key]:
        storage = same_storage_key(tensor)
        parts = self.parts.get(storage, [])
        if len(parts) < 2:
            yield storage
            return
        low, high = extent(tensor)
        for index, (start, end) in enumerate(parts):
            if low < end and start < high:
                yield storage, index


def extent(tensor: torch.Tensor) -> tuple[float, float]:
    """First byte and end of what a tensor covers of its storage; everything if symbolic."""
    low, sizes, steps = tensor.storage_offset(), tensor.shape, tensor.stride()
    if not all(type(f) is int for f in (low, *sizes, *steps)):
        return 0, float("inf")
    span = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    return float(low * tensor.element_size()), float((low + span + 1) * tensor.element_size())


def _merged(extents: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping extents put together, in order."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(extents):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


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
