"""Rules for ops that move, cut or join dims, and for those that work along whole dims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from dbo_fx.layouts import (
    REPLICATED,
    Call,
    Layout,
    Layouts,
    Replicated,
    Split,
    as_split,
    mixes,
    reshaped,
)
from dbo_fx.rules import Rule, elementwise

LOOKS_BACK = "Keep what earlier rows are needed for in a cache, or split along another dim."


def subject(call: Call) -> Node:
    """The tensor that an op works on."""
    return call.tensors()[0]


def every(call: Call, layout: Layout) -> Layouts:
    """One layout for every result."""
    return (layout,) * call.results if call.is_list() else layout


def same(call: Call) -> Layouts:
    """The result has the rows of the first tensor."""
    return every(call, call.layout(subject(call)))


def view(call: Call) -> Layouts:
    """Equal element order, other sizes."""
    node = subject(call)
    layout, shape = call.layout(node), call.shape(node)
    if isinstance(layout, Replicated):
        # Constant rows that are joined with a varying dim vary, but still from row to row alike.
        if not any(map(call.varies, shape)) or shape == call.out:
            return layout
        split = as_split(shape, call.sizes.prime) or mixes("views two dims of the batch at once")
        layout = replace(split, shift=layout.shift)
    assert isinstance(layout, Split)
    moved = reshaped(shape, call.out, layout)
    return moved or mixes(f"cuts across dim {layout.dim}, which is split, or joins it with others")


def moved(order: Callable[[Call, int], list[int]]) -> Rule:
    """A permutation: `order` lists for every dim of the result the argument's dim."""

    def rule(call: Call) -> Layouts:
        layout = call.layout(subject(call))
        if not isinstance(layout, Split):
            return layout
        dims = order(call, call.rank(subject(call)))
        return replace(layout, dim=dims.index(layout.dim))

    return rule


def swapped(call: Call, rank: int) -> list[int]:
    """`transpose`."""
    dims = list(range(rank))
    one, two = (call[k] for k in (("dim0", "dim1") if "dim0" in call.args else ("axis0", "axis1")))
    dims[one], dims[two] = dims[two], dims[one]
    return dims


def reversed_dims(_: Call, rank: int) -> list[int]:
    """`t`, `numpy_T`."""
    return list(range(rank))[::-1]


def last_two(_: Call, rank: int) -> list[int]:
    """`mT`, `adjoint`."""
    return [*range(rank - 2), rank - 1, rank - 2]


def permuted(call: Call, rank: int) -> list[int]:
    """`permute`."""
    return [d % rank for d in call["dims"]]


def movedim(call: Call, rank: int) -> list[int]:
    """`movedim`, with one dim or a list of them."""
    source, target = call["source"], call["destination"]
    sources = [d % rank for d in (source if isinstance(source, list | tuple) else [source])]
    targets = [d % rank for d in (target if isinstance(target, list | tuple) else [target])]
    rest = iter([d for d in range(rank) if d not in sources])
    places = dict(zip(targets, sources, strict=True))
    return [places[d] if d in places else next(rest) for d in range(rank)]


def expanded(call: Call) -> Layouts:
    """`expand`: new dims on the left, dims of size one become larger."""
    layout = call.layout(subject(call))
    if not isinstance(layout, Split):
        return layout
    return replace(layout, dim=layout.dim + len(call.out) - call.rank(subject(call)))


def repeated(call: Call) -> Layouts:
    """`repeat` and `tile`: copies of the split dim lie outside it."""
    node = subject(call)
    layout = call.layout(node)
    if not isinstance(layout, Split):
        return layout
    dim = layout.dim + len(call.out) - call.rank(node)
    return replace(
        layout, dim=dim, outer=layout.outer * call.out[dim] // call.shape(node)[layout.dim]
    )


def repeat_interleaved(call: Call) -> Layouts:
    """Every element several times: copies of the split dim lie inside it."""
    node = subject(call)
    layout = call.layout(node)
    if not isinstance(layout, Split):
        return layout
    if not isinstance(call["repeats"], int):
        mixes("repeats rows as often as data says")
    flat = call["dim"] is None
    if flat and call.rank(node) > 1:
        mixes("flattens before it repeats", "Give repeat_interleave a dim.")
    if not flat and call.dim(node, call["dim"]) != layout.dim:
        return layout
    return replace(layout, inner=layout.inner * call["repeats"], shift=0)


def whole_along(name: str, does: str, remedy: str = "") -> Rule:
    """Works along the dims of argument `name`, keeps them: fine unless one follows the batch."""

    def rule(call: Call) -> Layouts:
        refuse_along(call, touched(call, name), does, remedy)
        return same(call)

    return rule


def touched(call: Call, name: str) -> set[int]:
    """The dims that an argument names; all of them where it is None or empty."""
    rank, given = call.rank(subject(call)), call[name]
    if given is None or given == []:
        return set(range(rank))
    return {d % max(rank, 1) for d in (given if isinstance(given, list | tuple) else [given])}


def refuse_along(call: Call, dims: set[int], does: str, remedy: str = "") -> None:
    """Refuse a call that works along a dim of the batch."""
    node = subject(call)
    shape, layout = call.shape(node), call.split(node)
    for dim in sorted(dims & set(range(len(shape)))):
        if (layout is not None and layout.dim == dim) or call.varies(shape[dim]):
            mixes(
                f"{does} dim {dim} of {node.name}, which holds the rows of the batch",
                *filter(None, [remedy]),
            )


def reduced(name: str = "dim", does: str = "reduces") -> Rule:
    """Dims of argument `name` disappear, or stay with size one."""

    def rule(call: Call) -> Layouts:
        if "other" in call.args:
            return elementwise(call)  # the maximum of two tensors
        node, dims = subject(call), touched(call, name)
        refuse_along(call, dims, does)
        layout = call.layout(node)
        if not isinstance(layout, Split):
            return every(call, layout)
        if call["keepdim"]:
            return every(call, layout)
        return every(call, replace(layout, dim=layout.dim - sum(d < layout.dim for d in dims)))

    return rule


def last_dims(does: str) -> Rule:
    """Norms over the trailing dims of `normalized_shape`."""

    def rule(call: Call) -> Layouts:
        node = subject(call)
        rank = call.rank(node)
        refuse_along(call, set(range(rank - len(call["normalized_shape"]), rank)), does)
        return every(call, call.layout(node))

    return rule


def sliced(call: Call) -> Layouts:
    """`slice`: the split dim must stay whole."""
    node = subject(call)
    dim, layout = call.dim(node, call["dim"]), call.layout(node)
    if isinstance(layout, Split) and layout.dim == dim:
        step = call["step"]
        if call.out[dim] != call.shape(node)[dim] or step not in (1, None):
            mixes(f"takes some rows of dim {dim}, which is split", LOOKS_BACK)
    return layout


def narrowed(call: Call) -> Layouts:
    """`narrow`."""
    node = subject(call)
    dim, layout = call.dim(node, call["dim"]), call.layout(node)
    if isinstance(layout, Split) and layout.dim == dim and call.out[dim] != call.shape(node)[dim]:
        mixes(f"takes some rows of dim {dim}, which is split", LOOKS_BACK)
    return layout


def selected(call: Call) -> Layouts:
    """`select`: one index of a dim, which disappears."""
    node = subject(call)
    dim, layout = call.dim(node, call["dim"]), call.layout(node)
    if not isinstance(layout, Split):
        return layout
    if layout.dim == dim:
        mixes(f"takes one row of dim {dim}, which is split", LOOKS_BACK)
    return replace(layout, dim=layout.dim - (dim < layout.dim))


def cut(keep: bool) -> Rule:
    """`split`, `chunk` (dim stays) and `unbind` (dim goes)."""

    def rule(call: Call) -> Layouts:
        node = subject(call)
        dim, layout = call.dim(node, call["dim"]), call.layout(node)
        if isinstance(layout, Split):
            if layout.dim == dim:
                mixes(f"cuts dim {dim}, which is split, into pieces", LOOKS_BACK)
            if not keep:
                layout = replace(layout, dim=layout.dim - (dim < layout.dim))
        return every(call, layout)

    return rule


def joined(new_dim: bool) -> Rule:
    """`cat` along a dim, `stack` along a new one."""

    def rule(call: Call) -> Layouts:
        nodes: list[Node] = [n for n in call.args["tensors"] if call.shape(n) != (0,)]
        rank = len(call.out)
        dim = call["dim"] % rank
        splits = [call.split(n) for n in nodes]
        first = next((s for s in splits if s is not None), None)
        if first is None:
            if not new_dim and call.varies(call.out[dim]):
                mixes(f"joins dim {dim}, whose size follows the batch, with others")
            return REPLICATED
        if not new_dim and first.dim == dim:
            return _side_by_side(call, nodes, first, dim)
        for node, split in zip(nodes, splits, strict=True):
            if split is not None and replace(split, region=first.region) != first:
                mixes(f"joins {nodes[0].name} and {node.name}, whose rows do not match")
        return replace(first, dim=first.dim + (new_dim and dim <= first.dim))

    return rule


def _side_by_side(call: Call, nodes: list[Node], first: Split, dim: int) -> Layout:
    outer = 0
    for node in nodes:
        split = call.split(node)
        if split is None or (split.dim, split.inner) != (dim, first.inner):
            mixes(f"puts {node.name} beside the rows of the batch along dim {dim}")
        outer += split.outer
    return replace(first, outer=outer)


def padded(call: Call) -> Layouts:
    """`pad`: pairs of sizes from the last dim on."""
    node, pads = subject(call), call["pad"]
    rank = call.rank(node)
    dims = {rank - 1 - i // 2 for i, size in enumerate(pads) if size != 0}
    refuse_along(call, dims, "pads", LOOKS_BACK)
    return same(call)


def factory(call: Call) -> Layouts:
    """New tensors with one value everywhere, or with no value yet."""
    given = call.args.get("fill_value")
    if isinstance(given, Node) and call.varies(int(call["fill_value"])):
        mixes("makes a value of the batch size")
    return REPLICATED


def squares(call: Call) -> Layouts:
    """`eye`, `tril` and such: what is at a place depends on two dims."""
    shape = call.out
    nodes = call.tensors()
    layout = call.layout(nodes[0]) if nodes else REPLICATED
    if any(map(call.varies, shape[-2:])) or (
        isinstance(layout, Split) and layout.dim >= len(shape) - 2
    ):
        mixes("compares rows of the batch by their place in it", LOOKS_BACK)
    return layout


def convolved(call: Call) -> Layouts:
    """Convolutions over [N, C, ...]: only N may be split."""
    layout = call.layout(call.args["input"])
    for name in ("weight", "bias"):
        if call.split(call.args.get(name)):
            mixes(f"has a split {name}")
    if isinstance(layout, Split) and layout.dim != 0:
        mixes(f"looks at neighbours along dim {layout.dim}, which is split", LOOKS_BACK)
    return layout


def batch_normed(call: Call) -> Layouts:
    """Statistics of the batch in training, elementwise else."""
    if call["training"] or call["train"]:
        mixes("takes statistics of the whole batch", "Call model.eval().")
    layout = call.layout(subject(call))
    if isinstance(layout, Split) and layout.dim == 1:
        mixes("normalises dim 1 by channel, which is split")
    return every(call, layout)


def first_dim_only(does: str) -> Rule:
    """Ops over [N, ...] that treat every N alone."""

    def rule(call: Call) -> Layouts:
        layout = call.layout(subject(call))
        if isinstance(layout, Split) and layout.dim:
            mixes(f"{does} dim {layout.dim}, which is split")
        return every(call, layout)

    return rule


def one_hot(call: Call) -> Layouts:
    """A new last dim."""
    if call.varies(call.out[-1]):
        mixes("makes a class of every row of the batch")
    return call.layout(subject(call))


def unused(_: Call) -> Layouts:
    """An op without results, such as an assert."""
    return REPLICATED
