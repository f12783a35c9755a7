"""When every storage that a program obtains is born, and when nobody names it any more.

Emitted Python drops a variable after its last use. So a storage lives from the node that creates it
until behind the last node that names a value in it: views, tuples and keepalives name it too.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.certificates.execution import Storage
from dbo_fx.effects import Effects
from dbo_fx.passes.halves import BUFFERS


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Memory that the program obtains while it runs.

    Attributes:
        storages: The keys of the one storage.
        born: The node that creates it.
        dies: The last node that names it; None for what is returned.
        holder: A node whose value lies in it, for its size.
        index: Which value of the holder, if that has several.
    """

    storages: frozenset[Storage]
    born: Node
    dies: Node | None
    holder: Node
    index: int | None = None

    @property
    def name(self) -> str:
        """A name for people."""
        return self.holder.name if self.index is None else f"{self.holder.name}[{self.index}]"

    @property
    def value(self) -> torch.Tensor:
        """A fake tensor in it."""
        value = value_of(self.holder)
        found = value if self.index is None else value[self.index]
        assert isinstance(found, torch.Tensor)
        return found


def lifetimes_of(effects: Effects, order: Sequence[Node]) -> tuple[Lifetime, ...]:
    """The lifetimes of everything that a graph's nodes create, by birth.

    Args:
        effects: What every node has its results in.
        order: The graph's nodes, the output last.
    """
    return _Lifetimes(effects, order).found()


class _Lifetimes:
    """Follows values; several keys of one storage are one lifetime."""

    def __init__(self, effects: Effects, order: Sequence[Node]) -> None:
        self.effects, self.order = effects, order
        self.position = {n: i for i, n in enumerate(order)}
        self.parent: dict[Storage, Storage] = {}
        self.born: dict[Storage, tuple[Node, Node, int | None]] = {}
        self.last: dict[Storage, int] = {}

    def found(self) -> tuple[Lifetime, ...]:
        named: list[tuple[Node, Node, int | None, frozenset[Storage]]] = []
        for node in self.order:
            for holder, index, keys in self._values(node):
                fresh = keys - self.effects.live_in
                if fresh:
                    self._join(fresh)
                    named.append((node, holder, index, fresh))
        for node, holder, index, keys in named:
            root = self._root(next(iter(keys)))
            self.born.setdefault(root, (node, holder, index))
            uses = [self.position[node], *(self.position[u] for u in node.users)]
            self.last[root] = max(self.last.get(root, -1), *uses)
        keys_of: defaultdict[Storage, set[Storage]] = defaultdict(set)
        for key in self.parent:
            keys_of[self._root(key)].add(key)
        returned = self.order[-1]
        return tuple(
            Lifetime(
                frozenset(keys_of[root]),
                node,
                None if self.order[self.last[root]] is returned else self.order[self.last[root]],
                holder,
                index,
            )
            for root, (node, holder, index) in self.born.items()
        )

    def _values(self, node: Node) -> Iterator[tuple[Node, int | None, frozenset[Storage]]]:
        """Each tensor of a node's value: who holds it, as which item, and its keys."""
        if node.op in ("placeholder", "get_attr", "output"):
            return
        if node.op != "call_module" and node.target is not BUFFERS:
            if isinstance(value_of(node), torch.Tensor):
                yield node, None, self.effects.of(node).results
            return
        for user in node.users:
            if user.target is operator.getitem:
                yield user, None, self.effects.of(user).results
        if node.target is BUFFERS:
            yield from self._unread(node)

    def _unread(self, node: Node) -> Iterator[tuple[Node, int | None, frozenset[Storage]]]:
        """Buffers that nobody reads have one key, their own; it says which of them it is."""
        known = {k for u in node.users for k in self._item_keys(u)}
        for key in self.effects.of(node).results - known:
            assert isinstance(key, tuple)
            yield node, key[2], frozenset({key})

    def _item_keys(self, user: Node) -> frozenset[Storage]:
        return self.effects.of(user).results if user.target is operator.getitem else frozenset()

    def _join(self, keys: frozenset[Storage]) -> None:
        first, *others = keys
        root = self._root(first)
        for key in others:
            self.parent[self._root(key)] = root

    def _root(self, key: Storage) -> Storage:
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            key = self.parent[key]
        return key
