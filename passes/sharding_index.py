"""Rules for ops that look rows up or put them somewhere.

An index into a dim that is split must count from the microbatch's own start: its `shift` is then
the number of elements per row, `inner`. An index into anything else must not (`shift` 0).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.layouts import REPLICATED, Call, Layout, Layouts, Replicated, Split, mixes
from dbo_fx.rules import broadcast

PASS_IN = "Pass the positions in as an input that is split with the tokens."


def embedding(call: Call) -> Layouts:
    """Rows of a table."""
    weight, indices = call.args["weight"], call.args["indices"]
    if call.split(weight):
        mixes("looks rows up in a table that is split")
    refuse_shift(call, indices, 0)
    return _plain(call.layout(indices))


def index(call: Call) -> Layouts:
    """`x[i, :, j]`."""
    node, places = call.args["self"], call.args["indices"]
    given = {d: i for d, i in enumerate(places) if i is not None}
    rows = _rows(call, node, given)
    layout = call.layout(node)
    if not isinstance(layout, Split) or layout.dim in given:
        return rows if isinstance(rows, Replicated) else replace(rows, dim=rows.dim + _start(given))
    if isinstance(rows, Split):
        mixes("meets every row with every other row")
    rank = max(call.rank(i) for i in given.values())
    behind = layout.dim > _start(given) or not _adjacent(given)
    before = sum(d < layout.dim for d in given)
    return replace(layout, dim=layout.dim - before + (rank if behind else 0))


def _adjacent(given: dict[int, Any]) -> bool:
    dims = sorted(given)
    return dims[-1] - dims[0] == len(dims) - 1


def _start(given: dict[int, Any]) -> int:
    """Where the indexed dims appear in the result."""
    return min(given) if _adjacent(given) else 0


def _rows(call: Call, node: Node, given: dict[int, Any]) -> Replicated | Split:
    """The layout of the indices after they are broadcast with each other."""
    layout = call.layout(node)
    for dim, place in given.items():
        along = isinstance(layout, Split) and layout.dim == dim
        if not along:
            refuse_shift(call, place, 0)
        elif not is_local(call, place, layout):
            mixes(f"looks up rows of dim {dim} of {node.name}, which is split, by {place.name}")
    nodes = list(given.values())
    return broadcast(call, nodes, max(call.rank(n) for n in nodes))


def is_local(call: Call, place: Any, layout: Layout) -> bool:
    """Whether an index counts rows of a split dim from the microbatch's own start."""
    own = call.split(place)
    return (
        isinstance(layout, Split)
        and layout.outer == 1
        and own is not None
        and (own.shift == layout.inner)
    )


def refuse_shift(call: Call, place: Any, wanted: int) -> None:
    """An index into something whole must not count from the microbatch's start."""
    layout = call.layout(place)
    if isinstance(layout, Split | Replicated) and layout.shift != wanted:
        mixes(f"uses {place.name}, which counts from the microbatch's own start", PASS_IN)


def _plain(layout: Layout) -> Layout:
    return replace(layout, shift=0) if isinstance(layout, Split | Replicated) else layout


def index_select(call: Call) -> Layouts:
    """`x.index_select(dim, i)`."""
    node, place = call.args["self"], call.args["index"]
    dim, layout = call.dim(node, call["dim"]), call.layout(node)
    rows = _rows(call, node, {dim: place})
    if isinstance(layout, Split) and layout.dim != dim:
        return mixes("meets every row with every other row") if call.split(place) else layout
    return replace(rows, dim=dim) if isinstance(rows, Split) else rows


def gather(call: Call) -> Layouts:
    """`x.gather(dim, i)`: beside `dim`, elements of x and i lie at the same place."""
    node, place = call.args["self"], call.args["index"]
    dim, layout, own = call.dim(node, call["dim"]), call.layout(node), call.split(place)
    if isinstance(layout, Split) and layout.dim == dim:
        if not is_local(call, place, layout):
            mixes(f"looks up rows of dim {dim} of {node.name}, which is split, by {place.name}")
        return replace(own, shift=0) if own else REPLICATED
    refuse_shift(call, place, 0)
    if own is not None and own.dim != dim and not isinstance(layout, Split):
        _refuse_shorter(call, node, own)
    return broadcast(call, [node, place], call.rank(node))


def _refuse_shorter(call: Call, node: Node, own: Split) -> None:
    """Row i of the index takes from row i of a table: microbatches would start at its row 0."""
    if not call.varies(call.shape(node)[own.dim]):
        mixes(f"pairs rows of the batch with the first rows of {node.name}", PASS_IN)


def scatter(call: Call) -> Layouts:
    """`x.scatter(dim, i, y)` and its kin."""
    node, place = call.args["self"], call.args["index"]
    dim, layout, own = call.dim(node, call["dim"]), call.layout(node), call.split(place)
    source = call.args.get("src")
    source = source if isinstance(source, Node) else call.args.get("value")
    others = [n for n in (place, source) if isinstance(n, Node) and call.rank(n)]
    along = isinstance(layout, Split) and layout.dim == dim
    if along and is_local(call, place, layout):
        return broadcast(call, [node, place], call.rank(node))
    if along or (own is not None and own.dim == dim):
        mixes(f"puts rows of the batch anywhere along dim {dim} of {node.name}")
    refuse_shift(call, place, 0)
    if own is not None and not isinstance(layout, Split):
        _refuse_shorter(call, node, own)
    return broadcast(call, [node, *others], call.rank(node))


def index_put_along(call: Call) -> Layouts:
    """`index_copy`, `index_add`, `index_fill`: whole slices of `dim`."""
    node, place = call.args["self"], call.args["index"]
    dim, layout = call.dim(node, call["dim"]), call.layout(node)
    source = call.args.get("source")
    if isinstance(layout, Split) and layout.dim == dim:
        if not is_local(call, place, layout):
            mixes(f"puts rows anywhere along dim {dim} of {node.name}, which is split")
        return layout
    if _is_own(call, place, call.shape(node)[dim]):
        return Split(dim, 1, call.shape(node)[dim] // call.sizes.prime)
    if call.split(place):
        mixes(f"puts rows of the batch anywhere along dim {dim} of {node.name}")
    return broadcast(call, [n for n in (node, source) if isinstance(n, Node)], call.rank(node))


def _is_own(call: Call, place: Any, size: int) -> bool:
    """Whether an index counts the microbatch's own elements of a dim of this size."""
    own = call.split(place)
    return own is not None and call.varies(size) and own.shift == size // call.sizes.prime


def index_put(call: Call) -> Layouts:
    """`x[i, :, j] = y`."""
    node, places = call.args["self"], call.args["indices"]
    given = {d: i for d, i in enumerate(places) if i is not None}
    layout = call.layout(node)
    if any(value_of(i).dtype is torch.bool for i in given.values()):
        return _masked(call, node, given)
    own = [d for d, i in given.items() if _is_own(call, i, call.shape(node)[d])]
    if isinstance(layout, Replicated) and len(own) == 1:
        return Split(own[0], 1, call.shape(node)[own[0]] // call.sizes.prime)
    along = isinstance(layout, Split) and layout.dim in given
    if isinstance(_rows(call, node, given), Split) and not along:
        mixes(f"puts rows of the batch anywhere in {node.name}")
    return layout


def _masked(call: Call, node: Node, given: dict[int, Any]) -> Layouts:
    """`x[mask] = number`, with a mask over x's first dims."""
    mask, values = given.get(0), call.args["values"]
    if len(given) > 1 or mask is None or max(call.shape(values), default=1) > 1:
        mixes("puts values where a mask says so, one after the other", "Use torch.where.")
    layouts = [x for x in (call.split(node), call.split(mask)) if x is not None]
    if len({(x.dim, x.outer, x.inner) for x in layouts}) > 1:
        mixes("pairs rows that are flattened in different ways")
    return layouts[0] if layouts else REPLICATED


def slot_dims(call: Call) -> tuple[list[Any], Any] | None:
    """The indices and the rows of a write by slot, or None for another kind of write."""
    name = str(call.node.target).split(".")[1].rstrip("_")
    if name in ("index_copy", "index_add", "scatter", "scatter_add", "index_fill"):
        return [call.args["index"]], call.args.get("source", call.args.get("src"))
    if name in ("index_put", "_unsafe_index_put"):
        return [i for i in call.args["indices"] if i is not None], call.args["values"]
    return None


def searched(call: Call) -> Layouts:
    """`searchsorted` and `bucketize`: values are looked up in sorted boundaries."""
    table = call.args.get("sorted_sequence", call.args.get("boundaries"))
    values = call.args.get("self", call.args.get("input"))
    if isinstance(table, Node) and call.split(table):
        mixes(f"searches in {table.name}, which holds the rows of the batch")
    return _plain(call.layout(values))
