"""Inputs that the graph writes in place: counters, and caches that the microbatches fill in turn.

A counter that every step advances by a multiple of the batch's rows is behind the whole batch's by
nothing and ahead of its own start by what earlier microbatches added: `shift` -1 per row. A cache
may be written by slot, every row its own slots, and read whole afterwards; whether a row then
depends on later ones is left to the row-dependence test.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.layouts import Call, Layout, Layouts, Mixed, Replicated, Split
from dbo_fx.passes.sharding_index import slot_dims
from dbo_fx.passes.sharding_packing import NOTE
from dbo_fx.pipeline import State
from dbo_fx.symbols import ConcreteSizes, same_storage_key
from dbo_fx.tag import tag_of

SCRATCH = (
    "writes an input that all microbatches share, but not by slot: the microbatches overwrite each "
    "other's values"
)
SLOTS = (
    "Write it by slot (index_copy_, index_put_ with the tokens' slots), or give every layer a new "
    "buffer."
)


def storage_of(node: Node) -> Hashable:
    """A key for the storage that a node's result lies in; None for numbers and several storages."""
    value = value_of(node)
    tensors = value if isinstance(value, list | tuple) else [value]
    keys = {same_storage_key(t) for t in tensors if isinstance(t, torch.Tensor)}
    return next(iter(keys)) if len(keys) == 1 else None


def written_tensors(node: Node) -> list[Node]:
    """The tensors that an op writes in place, by its schema."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    found: list[Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            nodes = given if isinstance(given, list | tuple) else [given]
            found += [n for n in nodes if isinstance(n, Node)]
    return found


def written_storages(node: Node) -> set[Hashable]:
    """The storages that an op writes in place."""
    return {storage_of(n) for n in written_tensors(node)}


@dataclass
class _Shared:
    """One written storage."""

    step: int | None = None
    advanced: Node | None = None
    read: list[tuple[int, int, Node]] = field(default_factory=list)
    windows: set[tuple[int, ...]] = field(default_factory=set)


class LiveIns:
    """What is known of the storages that outlive the call and are written by it."""

    def __init__(self, state: State, sizes: ConcreteSizes) -> None:
        """Find the counters: storages whose only write adds a multiple of the split size."""
        self.state, self.sizes = state, sizes
        inputs = state.captured.placeholders
        tokens = {storage_of(inputs[t.index]) for t in state.captured.token_inputs}
        written: dict[Hashable, list[Node]] = {}
        for node in state.graph.nodes:
            tag = tag_of(node)
            once = tag is not None and tag.role == "shared"  # It runs before all microbatches.
            if state.effects.of(node).writes & state.effects.live_in and not once:
                for key in written_storages(node) - tokens:
                    written.setdefault(key, []).append(node)
        constant = {storage_of(n) for n in state.graph.nodes if n.op in ("placeholder", "get_attr")}
        self.of: dict[Hashable, _Shared] = {}
        for key, nodes in written.items():
            if key in constant:
                step = self._step(nodes[0]) if len(nodes) == 1 else None
                self.of[key] = _Shared(step)

    def _step(self, node: Node) -> int | None:
        """By how much a counter advances per row of the batch."""
        if node.target is not torch.ops.aten.add_.Tensor or len(node.args) < 2 or node.kwargs:
            return None
        amount = node.args[1]
        value = value_of(amount) if isinstance(amount, Node) else amount
        number = self.sizes.number(value)
        if not isinstance(number, int) or number % self.sizes.prime:
            return None
        return number // self.sizes.prime

    def holds(self, key: Hashable) -> bool:
        """Whether the storage is one of them."""
        return key in self.of

    def layout(self, node: Node, known: Layouts) -> Layout:
        """The layout of a view of such a storage, at this point of the graph."""
        shared = self.of[storage_of(node)]
        if isinstance(known, Split):
            return known  # A window that moves with the microbatch: its own rows only.
        if isinstance(known, Mixed):
            return known
        if shared.step is None:
            return Replicated(state=True)
        if shared.advanced is None:
            return Replicated(shift=-shared.step)
        return Mixed(
            shared.advanced,
            "advances a counter that is read afterwards: a microbatch would read the end of its own"
            " rows, not of the batch",
            "Read the counter before it is advanced.",
        )

    def read(self, views: dict[Node, Any]) -> None:
        """Note that the content of these views was used."""
        for node in views:
            low, high = _extent(self.sizes, value_of(node))
            self.of[storage_of(node)].read.append((low, high, node))

    def read_window(self, node: Node) -> None:
        """Note that a microbatch read its own window of a storage."""
        self.of[storage_of(node)].windows.add(self._alignment(node))

    def _alignment(self, node: Node) -> tuple[int, ...]:
        """Windows of equal alignment hold the same rows for the same microbatch."""
        value = value_of(node)
        steps = [int(self.sizes.number(s)) for s in value.stride()]
        return int(self.sizes.number(value.storage_offset())), *steps

    def write(
        self, node: Node, target: Node, content: Layout, known: dict[Node, Layouts]
    ) -> Mixed | None:
        """Judge a write; returns why it cannot be done in turn, or None."""
        shared = self.of[storage_of(target)]
        bad = next((x for x in known.values() if isinstance(x, Mixed)), None)
        if bad is not None:
            return bad
        if shared.step is not None:
            shared.advanced = node
            return None
        if node.target is NOTE:
            return None  # Each microbatch adds what it lost; no row reads it.
        low, high = _extent(self.sizes, value_of(target))
        for start, end, reader in shared.read:
            if start < high and low < end:
                return Mixed(
                    node,
                    f"writes what {reader.name} has read: the microbatches run one after the other "
                    "in some layers, so one would see what the other wrote later",
                    SLOTS,
                )
        own = known[target]
        if shared.windows - {self._alignment(target)}:
            return Mixed(node, "writes rows that were read at other places before", SLOTS)
        if isinstance(own, Split) and own.shift == 0:
            fits = isinstance(content, Replicated) or content == own
            return None if fits else content if isinstance(content, Mixed) else _scratch(node)
        if self._is_by_slot(node, known):
            return None
        return _scratch(node)

    def _is_by_slot(self, node: Node, known: dict[Node, Layouts]) -> bool:
        written = slot_dims(Call(node, known, self.sizes))
        if written is None:
            return False
        places, rows = written
        layouts = [known.get(p) for p in places]
        splits = [x for x in layouts if isinstance(x, Split)]
        whole = all(x.shift == 0 for x in layouts if isinstance(x, Split | Replicated))
        source = known.get(rows) if isinstance(rows, Node) else None
        match = not isinstance(source, Split) or any(
            (x.outer, x.inner) == (source.outer, source.inner) for x in splits
        )
        return bool(splits) and whole and match and all(x is not None for x in layouts)


def _scratch(node: Node) -> Mixed:
    return Mixed(node, SCRATCH, SLOTS)


def _extent(sizes: ConcreteSizes, value: torch.Tensor) -> tuple[int, int]:
    """First element and the one behind the last of a view in its storage."""
    low = int(sizes.number(value.storage_offset()))
    shape = sizes.shape(value)
    steps = [int(sizes.number(s)) for s in value.stride()]
    return low, low + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) + 1
