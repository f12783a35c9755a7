"""Sharding rules for a user's own ops, one line each.

A rule maps a call to the layout of its results: `register_rule("my::norm", row_wise())`. The
compiler's own table for ATen is in `passes/sharding_rules.py`; a registered rule goes first. A rule
is a promise: the first call compares split and unsplit results, but a rule that is wrong for other
inputs only is not noticed. It also promises that the op does not communicate; `register_local`
promises that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from dbo_fx.errors import OptionError
from dbo_fx.layouts import REPLICATED, Call, Layout, Layouts, Replicated, Split, mixes
from dbo_fx.opaque import WITH_RULE, check_name

Rule = Callable[[Call], Layouts]
REGISTERED: dict[str, Rule] = WITH_RULE


def register_rule(op: str, rule: Rule) -> None:
    """Say how an op treats rows, and with it that the op does not communicate with other ranks.

    Args:
        op: The op's qualified name without overload, `namespace::name`.
        rule: `elementwise`, `replicated`, `row_wise(dim)`, or a function from a `Call` to a layout.

    Raises:
        OptionError: the name or the rule is no such thing.
    """
    check_name("register_rule", op)
    if not callable(rule):
        raise OptionError(f"register_rule: rule={rule!r} for {op} is not callable.")
    REGISTERED[op] = rule


def elementwise(call: Call) -> Layouts:
    """Every element of a result depends on the elements at its place, after broadcasting."""
    layout = broadcast(call, call.tensors(), len(_first_shape(call)))
    return _for_all(call, layout)


def replicated(call: Call) -> Layouts:
    """The result is the same for every microbatch, such as a table of the op's own."""
    return _for_all(call, REPLICATED)


def row_wise(dim: int = 0) -> Rule:
    """Row i of every result depends on row i of the arguments alone, rows being along `dim`.

    Args:
        dim: The dim of the rows, in the arguments that are split and in all results.

    Returns:
        The rule.
    """

    def rule(call: Call) -> Layouts:
        found = None
        for node in call.tensors():
            layout = call.split(node)
            if layout is None:
                continue
            if layout.dim != call.dim(node, dim):
                mixes(f"works on rows along dim {dim}, but {node.name} is split along {layout.dim}")
            if found is not None and replace(found, dim=layout.dim) != layout:
                mixes("pairs rows that are flattened in different ways")
            found = layout
        if found is None:
            return _for_all(call, REPLICATED)
        ranks = [len(shape) for shape in call.sizes_of_results()]
        layouts = tuple(replace(found, dim=dim % rank) for rank in ranks)
        return layouts if call.results > 1 or call.is_list() else layouts[0]

    return rule


def broadcast(call: Call, nodes: list[Node], rank: int) -> Replicated | Split:
    """The layout of what is computed elementwise from tensors that broadcast to `rank` dims."""
    found: Split | None = None
    for node in nodes:
        layout = call.split(node)
        if layout is None:
            continue
        here = replace(layout, dim=layout.dim + rank - call.rank(node), shift=0)
        if found is None:
            found = here
        elif found.dim != here.dim:
            mixes("meets every row with every other row")
        elif (found.outer, found.inner) != (here.outer, here.inner):
            mixes("pairs rows that are flattened in different ways")
        else:
            found = replace(found, region=found.region or here.region)
    return found or REPLICATED


def _first_shape(call: Call) -> tuple[int, ...]:
    return next(iter(call.sizes_of_results()), ())


def _for_all(call: Call, layout: Layout) -> Layouts:
    return (layout,) * call.results if call.is_list() else layout
