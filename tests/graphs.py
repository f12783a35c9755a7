"""Tiny MoE models for the analysis tests, the first passes run on them, and a text form of phases.

The models are made of unary ops, each in one role, so that a phase can be read off the op's name:
sin, cos, tan project queries, keys, values; sigmoid is the gate, exp the routed expert, silu the
shared one. They need the fixture `fake_group`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import dbo_fx.comm  # noqa: F401 (registers torch.ops.dbo_fx)
from dbo_fx.capture import CapturedGraph, trace
from dbo_fx.ir import Phase
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.pipeline import Pass, Pipeline, State
from dbo_fx.tag import tag_of

B, S, H = 4, 3, 8
GROUP = "0"
OPS = torch.ops.dbo_fx
Model = Callable[..., Any]
# Views say little about a phase, and torch versions differ in which ones they leave in a graph.
LEFT_OUT = {
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "expand", "slice",
    "select", "unsqueeze", "squeeze", "unbind", "split", "split_with_sizes", "chunk", "getitem",
    "to", "view_as", "contiguous", "clone", "detach", "detach_", "alias", "t", "numpy_T", "repeat",
    "broadcast_to", "wait_tensor", "lift_fresh_copy",
}  # fmt: skip


def hidden(*shape: int) -> Tensor:
    """[B, S, H] inputs, or of another shape."""
    return torch.zeros(shape or (B, S, H))


def attention(x: Tensor) -> Tensor:
    """[B, S, H] -> [B, S, H]: every sequence attends to itself, one head, one fused op."""
    return F.scaled_dot_product_attention(x.sin(), x.cos(), x.tan(), is_causal=True)


def plain_attention(x: Tensor) -> Tensor:
    """The same in plain ops, with a mask that is made from token values."""
    scores = x.sin() @ x.cos().transpose(1, 2) * 0.5
    hides = (x.sum(-1) > 0).unsqueeze(1)
    return scores.masked_fill(hides, -1e9).softmax(-1) @ x.tan()


def experts(x: Tensor, expert: Callable[[Tensor], Tensor] = torch.exp) -> Tensor:
    """[..., H] -> [..., H] through gate, dispatch, one expert a rank, and combine."""
    flat = x.reshape(-1, x.shape[-1])
    weights, ids = flat.sigmoid().topk(2)
    rows, ids, weights = OPS.dispatch(flat, ids, weights, GROUP)
    y = expert(rows) * (weights * ids).sum(-1, keepdim=True)
    return OPS.combine(y, flat.shape[0], GROUP).view_as(x)


def layer(x: Tensor, attend: Callable[[Tensor], Tensor] = attention, shared: bool = True) -> Tensor:
    """[B, S, H] -> [B, S, H]: attention, then routed experts and a shared one, with residuals."""
    h = x + attend(x)
    y = h + experts(h)
    return y + F.silu(h) if shared else y


@functools.cache
def hugging_face(family: str, **changes: Any) -> State:
    """A small model of transformers with sharded experts, [B, S] tokens, normalized; made once."""
    from dbo_fx.integrations.transformers import expert_parallel
    from test_transformers import build, forward

    model = expert_parallel(build(family, **changes))
    x = torch.zeros(B, S, dtype=torch.long)
    return normalized(lambda tokens: forward(model, tokens), x)


def captured(model: Model, *args: Any, mark: int | None = 0) -> CapturedGraph:
    """Trace a model; `mark` None means that the arguments are marked already."""
    return trace(model, args, mark=mark)


def run(model: Model, *args: Any, passes: tuple[Pass, ...] = (), mark: int | None = 0) -> State:
    """Trace a model and run the analysis passes (or other ones) on it."""
    return Pipeline(passes or (Normalize(), Regions())).run(captured(model, *args, mark=mark))[0]


def normalized(model: Model, *args: Any, mark: int | None = 0) -> State:
    """Trace a model and normalize its graph."""
    return run(model, *args, passes=(Normalize(),), mark=mark)


def op(node: Node) -> str:
    """An op's name without namespace and overload."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return str(getattr(node.target, "__name__", node.target))


def calls(state: State) -> list[str]:
    """The names of all ops of the graph, in its order."""
    return [op(n) for n in state.graph.nodes if n.op == "call_function"]


def find(state: State, name: str, index: int = 0) -> Node:
    """The first (or `index`-th) node that calls an op."""
    return [n for n in state.graph.nodes if n.op == "call_function" and op(n) == name][index]


def place(node: Node) -> str:
    """`A0@1`, `TAIL`, or the role of a node that belongs to no phase."""
    tag = tag_of(node)
    assert tag is not None, f"{node.name} has no tag"
    if tag.phase is None:
        return tag.role
    return tag.phase.value if tag.phase is Phase.TAIL else f"{tag.phase.value}@{tag.layer}"


def phases(state: State) -> dict[str, list[str]]:
    """The ops of every phase in graph order, views left out; phases in the order of a layer."""
    order = [f"{p.value}@{k}" for k in range(state.layers) for p in Phase if p is not Phase.TAIL]
    found: dict[str, list[str]] = {key: [] for key in ["shared", *order, "TAIL"]}
    for node in state.graph.nodes:
        if node.op != "call_function" or op(node) in LEFT_OUT or node.target in SIZES:
            continue
        if place(node) not in ("size", "total"):
            found[place(node)].append(op(node))
    return {key: ops for key, ops in found.items() if ops}


SIZES = {operator.add, operator.mul, operator.floordiv, operator.mod, operator.sub}


def table(state: State) -> str:
    """`phases` as text: a line per phase, equal ops that follow each other counted."""
    lines = []
    for key, ops in phases(state).items():
        runs: list[list[Any]] = []
        for name in ops:
            if runs and runs[-1][0] == name:
                runs[-1][1] += 1
            else:
                runs.append([name, 1])
        cells = [name if count == 1 else f"{name} x{count}" for name, count in runs]
        lines.append(f"{key:<6} {' '.join(cells)}")
    return "\n".join(lines) + "\n"
