"""How attention looks in a captured graph: one fused op, or a softmax between two matmuls.

Model names play no part. `linear` is no matmul here: a softmax over a router's scores is no
attention.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

FUSED = ("scaled_dot_product", "attention", "flash_attn")
MATMULS = ("matmul", "mm", "bmm", "baddbmm", "einsum")
SOFTMAXES = ("softmax", "_softmax")
# What may stand between the softmax and its matmuls: casts, scaling, masking, capping and views.
BETWEEN = (
    "to", "_to_copy", "mul", "div", "add", "sub", "tanh", "dropout", "masked_fill", "where",
    "view", "reshape", "expand", "unsqueeze", "transpose", "permute", "flatten", "unflatten",
    "contiguous", "clone",
)  # fmt: skip


def is_attention_core(node: Node) -> bool:
    """A fused attention op, or the softmax between two matmuls of an attention in plain ops."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name.split("::")[1]
    if any(part in name for part in FUSED):
        return True
    return name in SOFTMAXES and all(core_ends(node))


def core_ends(core: Node) -> tuple[set[Node], set[Node]]:
    """Where an attention core begins and ends: a fused op is both, a softmax lies between matmuls.

    Returns:
        The matmuls that make the scores and those that weigh the values with them; empty sets for
        a softmax that is no attention.
    """
    if not _named(core, SOFTMAXES):
        return {core}, {core}
    return (
        {n for n in _walk(core, forward=False) if _named(n, MATMULS)},
        {n for n in _walk(core, forward=True) if _named(n, MATMULS)},
    )


def _named(node: Node, names: Iterable[str]) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        target._schema.name.split("::")[1] in names
    )


def _walk(node: Node, *, forward: bool) -> set[Node]:
    """Nodes reachable through casts, scaling, masking and views, and the first op behind them."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        here = todo.pop()
        if here is not node and not _named(here, BETWEEN):
            continue
        for other in here.users if forward else here.all_input_nodes:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found
