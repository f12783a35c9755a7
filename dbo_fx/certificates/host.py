"""Which ops make the host wait for the device, so that no graph capture may hold them.

An op blocks the host if its result's shape or value is needed on the CPU: item, nonzero, boolean
indexing, unique, and copies between a device and ordinary CPU memory. Only the op's name and the
traced values are read; what a custom op does inside is its author's word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import value_of

_READS_VALUES = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose",
    "nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
}  # fmt: skip
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}


def blocks_host(nodes: Iterable[Node]) -> bool:
    """Whether one of these nodes makes the host wait."""
    return any(is_blocking(node) for node in nodes)


def is_blocking(node: Node) -> bool:
    """Whether this op makes the host wait for the device."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    name = schema.name.split("::")[1]
    if schema.name.startswith("aten::"):
        if name in _READS_VALUES or (name == "where" and len(schema.arguments) == 1):
            return True
        if name == "repeat_interleave" and node.target._overloadname != "self_int":
            return node.kwargs.get("output_size") is None
        if name in _INDEXED:
            return _has_boolean_index(node)
    return _crosses_devices(node)


def _has_boolean_index(node: Node) -> bool:
    """Masks as indices are turned into positions first; one number behind a mask needs none."""
    indices = [i for i in tree_leaves(node.args[1]) if isinstance(i, Node)]
    masks = any(_dtype(i) in (torch.bool, torch.uint8) for i in indices)
    if not masks or len(node.args) < 3 or not isinstance(node.args[2], Node):
        return masks
    value = value_of(node.args[2])
    return not (isinstance(value, torch.Tensor) and value.dim() == 0)


def _dtype(node: Node) -> Any:
    return getattr(value_of(node), "dtype", None)


def _crosses_devices(node: Node) -> bool:
    """Whether data moves between CPU memory and another device; CPU scalars as operands do not."""
    given = [value_of(n) for n in node.all_input_nodes]
    tensors = [v for v in tree_leaves(given) if isinstance(v, torch.Tensor) and v.dim()]
    results = [v for v in tree_leaves(value_of(node)) if isinstance(v, torch.Tensor)]
    if not tensors or not results:
        return False
    kinds = {t.device.type for t in (*tensors, *results)}
    return "cpu" in kinds and len(kinds - {"meta"}) > 1
