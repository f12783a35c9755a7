"""Rules for matrix products and attention: every dim has a label, as in einsum."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from dbo_fx.layouts import REPLICATED, Call, Layout, Layouts, Split, mixes

CACHE = "Keep keys and values of earlier rows in a cache, or split along another dim."


def contraction(call: Call, operands: list[tuple[Any, list[str]]], out: list[str]) -> Layout:
    """The layout of a product whose operands' dims are labelled; labels not in `out` are summed."""
    found: tuple[str, int, int] | None = None
    region = False
    for node, labels in operands:
        if not isinstance(node, Node):
            continue
        for dim, size in enumerate(call.shape(node)):
            layout = call.split(node)
            along = layout is not None and layout.dim == dim
            if not along and not (call.varies(size) and labels[dim] not in out):
                continue
            if labels[dim] not in out:
                mixes(f"sums over dim {dim} of {node.name}, which holds the rows of the batch")
            assert layout is not None
            here = (labels[dim], layout.outer, layout.inner)
            if found not in (None, here):
                mixes("meets every row with every other row")
            found, region = here, region or layout.region
    if found is None:
        return REPLICATED
    return Split(out.index(found[0]), found[1], found[2], region=region)


def _batch(rank: int) -> list[str]:
    """Labels of broadcast dims, counted from the right."""
    return [f"b{i}" for i in range(rank, 0, -1)]


def linear(call: Call) -> Layouts:
    """`x @ w.T + b`."""
    x, w, b = call.args["input"], call.args["weight"], call.args["bias"]
    batch = _batch(call.rank(x) - 1)
    rows = ["n"] if call.rank(w) == 2 else []
    return contraction(call, [(x, [*batch, "k"]), (w, [*rows, "k"]), (b, rows)], [*batch, *rows])


def matmul(call: Call) -> Layouts:
    """`a @ b` with its broadcasting; also `mm`, `bmm`, `mv` and `dot`."""
    a, b = call.tensors()[0], call.tensors()[-1]
    ranks = call.rank(a), call.rank(b)
    left = ["k"] if ranks[0] == 1 else [*_batch(ranks[0] - 2), "m", "k"]
    right = ["k"] if ranks[1] == 1 else [*_batch(ranks[1] - 2), "k", "n"]
    batch = _batch(max(*ranks, 2) - 2)
    out = [*batch, *(["m"] if ranks[0] > 1 else []), *(["n"] if ranks[1] > 1 else [])]
    return contraction(call, [(a, left), (b, right)], out)


def matmul_plus(first: str, second: str) -> Any:
    """`addmm`, `baddbmm`, `addmv`: a product plus `self`."""

    def rule(call: Call) -> Layouts:
        a, b, plus = call.args[first], call.args[second], call.args["self"]
        batch = _batch(call.rank(a) - 2)
        right = ["k"] if call.rank(b) == 1 else [*batch, "k", "n"]
        out = [*batch, "m", *right[len(batch) + 1 :]]
        labels = out[len(out) - call.rank(plus) :]
        return contraction(call, [(a, [*batch, "m", "k"]), (b, right), (plus, labels)], out)

    return rule


def outer(call: Call) -> Layouts:
    """`outer`."""
    a, b = call.tensors()[0], call.tensors()[-1]
    return contraction(call, [(a, ["m"]), (b, ["n"])], ["m", "n"])


def einsum(call: Call) -> Layouts:
    """An equation with single letters."""
    equation = str(call["equation"]).replace(" ", "")
    if "..." in equation or "->" not in equation:
        mixes(f"has the equation {equation!r}", "Write it out: letters for every dim, and '->'.")
    left, right = equation.split("->")
    nodes = call.args["tensors"]
    operands = [(n, list(labels)) for n, labels in zip(nodes, left.split(","), strict=True)]
    return contraction(call, operands, list(right))


def attention(call: Call) -> Layouts:
    """`scaled_dot_product_attention`: queries [..., L, E] meet keys and values [..., S, E]."""
    q, k, v, mask = (call.args[name] for name in ("query", "key", "value", "attn_mask"))
    batch = _batch(call.rank(q) - 2)
    keys = list(batch)
    if batch and call.shape(q)[-3] != call.shape(k)[-3]:
        keys[-1] = "key heads"
    found = call.split(q)
    if found is not None and found.dim == len(batch):
        own = call.split(k)
        if own is not None and own.dim == found.dim:
            mixes("lets every row of the split dim attend to others", CACHE)
        if call["is_causal"]:
            mixes("hides keys by the row's place in the microbatch (is_causal)", CACHE)
    operands = [(q, [*batch, "l", "e"]), (k, [*keys, "s", "e"]), (v, [*keys, "s", "f"])]
    if isinstance(mask, Node):
        labels = [*batch, "l", "s"]
        operands.append((mask, labels[len(labels) - call.rank(mask) :]))
    return contraction(call, operands, [*batch, "l", "f"])
