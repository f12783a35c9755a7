"""How long the storages of a graph live, in its own order, and how many bytes they have.

Two readings of the same rule, that a storage dies behind the last node that names a value in it:
of a lowered graph, whose copies share fake tensors (`program_spans`), and of any graph that was
traced, such as the captured one or a segment's (`traced_spans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import value_of
from dbo_fx.certificates.lifetimes import Lifetime
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.symbols import same_storage_key
from dbo_fx.tag import tag_of

WHOLE = -1
Bytes = int | torch.SymInt


@dataclass(frozen=True, slots=True)
class Span:
    """One storage.

    Attributes:
        name: For people.
        size: Bytes, perhaps an expression of the split size.
        born: Position of the node that creates it.
        dies: Position of the last node that names it; the graph's last position for results.
        microbatch: Whose rows it has; WHOLE for the whole batch.
    """

    name: str
    size: Bytes
    born: int
    dies: int
    microbatch: int = WHOLE


def program_spans(lifetimes: Sequence[Lifetime], order: Sequence[Node]) -> tuple[Span, ...]:
    """The spans of what a lowered graph creates outside its segments, by birth.

    Args:
        lifetimes: What `lifetimes_of` found.
        order: The graph's nodes.
    """
    position = {n: i for i, n in enumerate(order)}
    last = len(order) - 1
    found = []
    for lifetime in lifetimes:
        tag, value = tag_of(lifetime.born), lifetime.value
        microbatch = WHOLE if tag is None or tag.microbatch is None else tag.microbatch
        fresh = lifetime.born.target is BUFFERS or (tag is not None and tag.role == "merge")
        size = _dense(value) if fresh else storage_bytes(value)
        dies = last if lifetime.dies is None else position[lifetime.dies]
        born = position[lifetime.born]
        found.append(Span(lifetime.name.rstrip("_"), size, born, dies, microbatch))
    return tuple(sorted(found, key=lambda s: s.born))


def traced_spans(order: Sequence[Node]) -> tuple[Span, ...]:
    """The spans of what a traced graph creates, by birth; inputs and constants are not its own."""
    position = {n: i for i, n in enumerate(order)}
    given = {
        same_storage_key(t)
        for n in order
        if n.op in ("placeholder", "get_attr")
        for t in _tensors(n)
    }
    first: dict[int, tuple[Node, torch.Tensor]] = {}
    last: dict[int, int] = {}
    for node in order:
        if node.op != "call_function":
            continue
        for tensor in _tensors(node):
            key = same_storage_key(tensor)
            if key not in given:
                first.setdefault(key, (node, tensor))
                uses = (position[node], *(position[u] for u in node.users))
                last[key] = max(last.get(key, -1), *uses)
    return tuple(
        Span(node.name, storage_bytes(tensor), position[node], last[key])
        for key, (node, tensor) in first.items()
    )


def storage_bytes(tensor: torch.Tensor) -> Bytes:
    """Bytes of the storage that a fake tensor lies in."""
    size: Bytes = tensor.untyped_storage().nbytes()
    return size


def _dense(tensor: torch.Tensor) -> Bytes:
    """Landing buffers and merges have memory of their own, whatever was traced for the result."""
    size: Bytes = tensor.numel() * tensor.element_size()
    return size


def _tensors(node: Node) -> list[Any]:
    return [v for v in tree_leaves(value_of(node)) if isinstance(v, torch.Tensor)]
