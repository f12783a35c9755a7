"""Compute the captured graph's shapes again at a microbatch's size.

Guards and ranges say what tracing noticed. A size that is baked in without a guard (by a custom
op's fake implementation, or a constant) shows only when shapes are computed again: concrete ones,
in a mode without a shape environment, because guards that are added to Dynamo's become recompiles.

Every call is run alone, on fake arguments of the shapes that the size symbol promises, and must
return what it promises for the result; that is the same as running the graph, but calls that are
equal up to names (the layers of a model) are run once.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from dbo_fx.capture import CapturedGraph, value_of, where
from dbo_fx.symbols import ConcreteSizes, FakeTensorMode, enable_python_dispatcher, expression


class FakeRerun:
    """The distinct calls of a captured graph.

    Args:
        captured: The captured graph.
    """

    def __init__(self, captured: CapturedGraph) -> None:
        """Keep one node of every set of equal calls."""
        self.captured = captured
        distinct: dict[Hashable, Node] = {}
        for node in captured.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                distinct.setdefault(_key(node), node)
        self.nodes = tuple(distinct.values())

    def refused(self, args: Sequence[Any], size: int) -> str | None:
        """Why the graph cannot run with `size` rows, or None.

        Args:
            args: The inputs of a real call; sizes other than the split one are taken from them.
            size: Rows of a microbatch.

        Returns:
            The node, and its shapes found and wanted.
        """
        sizes = ConcreteSizes(self.captured.symbol, size, _others(self.captured, args))
        with FakeTensorMode(), torch.no_grad(), enable_python_dispatcher():
            return next(filter(None, (_baked(n, sizes) for n in self.nodes)), None)


def _baked(node: Node, sizes: ConcreteSizes) -> str | None:
    """What is wrong with one call at these sizes."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: _fake(value_of(n), sizes))
    assert callable(node.target)
    try:
        result = node.target(*args, **kwargs)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return (
            f"{where(node)} fails with {sizes.prime} rows: {first}. A size in the model is fixed: "
            "make it follow x.shape."
        )
    found, wanted = _shapes(result, sizes), _shapes(value_of(node), sizes)
    if found == wanted:
        return None
    return (
        f"{where(node)} has shape {found} with {sizes.prime} rows, want {wanted}: a size is baked "
        "into it. Make it follow x.shape."
    )


def _key(node: Node) -> Hashable:
    """Equal for calls of one op with equal constants and equal symbolic tensors."""

    def described(argument: Node) -> Any:
        value = value_of(argument)
        if not isinstance(value, torch.Tensor):
            return argument.name if isinstance(value, list | tuple) else str(value)
        steps = tuple(map(str, value.stride()))
        return str(tuple(map(str, value.shape))), steps, str(value.dtype), str(value.device)

    return str(node.target), str(torch.fx.map_arg((node.args, node.kwargs), described))


def _others(captured: CapturedGraph, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The values of the other size symbols in this call."""
    found: dict[sympy.Symbol, int] = {}
    for node, real in zip(captured.placeholders, args, strict=True):
        value = value_of(node)
        tensor = isinstance(value, torch.Tensor)
        pairs = zip(value.shape, real.shape, strict=True) if tensor else [(value, real)]
        for symbolic, number in pairs:
            if isinstance(symbolic, torch.SymInt) and expression(symbolic).is_Symbol:
                found[expression(symbolic)] = int(number)
    found.pop(captured.symbol, None)
    return found


def _fake(value: Any, sizes: ConcreteSizes) -> Any:
    if isinstance(value, list | tuple):
        return [_fake(v, sizes) for v in value]
    if not isinstance(value, torch.Tensor):
        return sizes.number(value)
    steps = [sizes.number(s) for s in value.stride()]
    return torch.empty_strided(sizes.shape(value), steps, dtype=value.dtype, device=value.device)


def _shapes(value: Any, sizes: ConcreteSizes) -> Any:
    if isinstance(value, torch.Tensor):
        return sizes.shape(value)
    if isinstance(value, list | tuple):
        return [_shapes(v, sizes) for v in value]
    return None
