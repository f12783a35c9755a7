"""How dispatch and combine look in a captured graph, whatever carries them.

Recognised: the functional ops `dbo_fx::dispatch` / `dbo_fx::combine`, plain or batched, and pairs
of a `_c10d_functional` launch (all_gather_into_tensor, all_to_all_single, reduce_scatter_tensor)
and its `wait_tensor`. Model names play no part.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

import dbo_fx.comm  # noqa: F401  (registers the ops)
from dbo_fx import opaque
from dbo_fx.capture import value_of, where
from dbo_fx.comm import groups
from dbo_fx.comm.expert_layouts import Batched
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.ir import Phase
from dbo_fx.symbols import are_equal_parts

DISPATCH = torch.ops.dbo_fx.dispatch.default
DISPATCH_FP8 = torch.ops.dbo_fx.dispatch_fp8.default
DISPATCH_BATCHED = torch.ops.dbo_fx.dispatch_batched.default
COMBINE = torch.ops.dbo_fx.combine.default
COMBINE_BATCHED = torch.ops.dbo_fx.combine_batched.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

COLLECTIVE = {
    DISPATCH: "all_gather",
    DISPATCH_FP8: "all_gather",
    DISPATCH_BATCHED: "batched_dispatch",
    COMBINE: "reduce_scatter_sum",
    COMBINE_BATCHED: "batched_combine",
    ALL_GATHER: "all_gather",
    ALL_TO_ALL: "all_to_all",
    REDUCE_SCATTER: "reduce_scatter_sum",
}
PHASES = {
    DISPATCH: (Phase.D,),
    DISPATCH_FP8: (Phase.D,),
    DISPATCH_BATCHED: (Phase.D,),
    COMBINE: (Phase.C,),
    COMBINE_BATCHED: (Phase.C,),
    ALL_GATHER: (Phase.D,),
    ALL_TO_ALL: (Phase.D, Phase.C),
    REDUCE_SCATTER: (Phase.C,),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launched collective.

    Attributes:
        node: The launching node in the captured graph.
        collective: `all_gather`, `all_to_all`, `reduce_scatter_sum` or a batched exchange.
        group: Process group name.
        inputs: The tensors sent.
        results: Per arriving tensor the nodes that stand for it (items or the wait).
        rows: Whether it is one of the ops that DeepEP's row kernels carry.
        experts: E, where the dispatch says it.
    """

    node: Node
    collective: str
    group: str
    inputs: tuple[Node, ...]
    results: tuple[tuple[Node, ...], ...]
    rows: bool = False
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class Communication:
    """One dispatch or combine of one layer: one or more launches that travel together."""

    phase: Phase
    layer: int
    launches: tuple[Launch, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the captured graph that it replaces."""
        results = [r for launch in self.launches for rs in launch.results for r in rs]
        return tuple(dict.fromkeys([*(launch.node for launch in self.launches), *results]))

    def __str__(self) -> str:
        """`D@0: all_gather x3 over group 0`."""
        kinds = ", ".join(f"{x.collective} x{len(x.inputs)}" for x in self.launches)
        return f"{self.phase.value}@{self.layer}: {kinds} over group {self.launches[0].group}"


def is_launch(node: Node) -> bool:
    """Whether the node starts a collective that may be a dispatch or a combine."""
    return node.op == "call_function" and node.target in COLLECTIVE


def phases_of(launch: Node) -> tuple[Phase, ...]:
    """Which phases a launching node may be part of."""
    assert isinstance(launch.target, torch._ops.OpOverload)
    return PHASES[launch.target]


def is_communication(node: Node) -> bool:
    """Whether the node communicates at all, in any form."""
    return node.op == "call_function" and opaque.communicates(node.target)


def refuse_opaque(graph: Graph) -> None:
    """Refuse calls of which nobody knows whether they communicate.

    Raises:
        UnsupportedGraphError: names the first such op and its place, and the lines that declare all
            of them.
    """
    found: dict[str, Node] = {}
    for node in graph.nodes:
        name = opaque.op_name(node.target) if node.op == "call_function" else None
        if name is not None and opaque.is_opaque(node.target):
            found.setdefault(name, node)
    if not found:
        return
    first, *others = found
    node = found[first]
    if argument := opaque.group_argument(node.target):
        raise UnsupportedGraphError(
            f"{where(node)} takes a process group (argument {argument}), so it communicates, in a "
            "way that dbo_fx does not know: a schedule around it can deadlock. Express it by "
            "torch.ops.dbo_fx.dispatch / combine or functional collectives, or keep it out of the "
            f"compiled region. If it does not communicate after all, say so: {_declares(first)}."
        )
    more = "".join(f" Also unknown: {name}; {_declares(name)}." for name in others)
    raise UnsupportedGraphError(
        f"{where(node)} is an op that dbo_fx does not know. It may communicate, and a schedule "
        f"that does not know of a communication can deadlock. If it does not, say so: "
        f"{_declares(first)} (its rows are then tested on the first call), or "
        f'dbo_fx.register_rule("{first}", dbo_fx.row_wise(dim=0)) if it works row by row.{more}'
    )


def _declares(name: str) -> str:
    return f'dbo_fx.register_local("{name}")'


def launch_of(node: Node) -> Launch:
    """Describe a launching node.

    Raises:
        UnsupportedGraphError: splits that are uneven or depend on data, an unknown reduction, or a
            launch that nobody waits for.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    collective = COLLECTIVE[target]
    if target in _OWN:
        return _own(node, collective)
    waits = tuple(u for u in node.users if u.target is WAIT)
    if len(waits) != 1 or len(node.users) != 1:
        raise UnsupportedGraphError(
            f"{where(node)}: its result must be used through exactly one wait_tensor, found "
            f"{[u.name for u in node.users]}. Use torch.distributed._functional_collectives."
        )
    group = str(node.args[-1])
    if target is REDUCE_SCATTER and node.args[1] != "sum":
        raise UnsupportedGraphError(f"{where(node)}: reduction {node.args[1]!r}, want 'sum'")
    if target is ALL_TO_ALL:
        _refuse_uneven(node, groups.world_size(group))
    return Launch(node, collective, group, _nodes(node.args[:1]), (waits,))


_OWN = (DISPATCH, DISPATCH_FP8, DISPATCH_BATCHED, COMBINE, COMBINE_BATCHED)


def _own(node: Node, collective: str) -> Launch:
    """Describe one of the functional `dbo_fx` ops."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    given: dict[str, Any] = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    tensors = [a.name for a in schema.arguments if str(a.type) == "Tensor"]
    inputs = _nodes(tuple(given[name] for name in tensors))
    count = len(schema.returns)
    results: tuple[tuple[Node, ...], ...] = ((node,),)
    if count > 1:
        items = [u for u in node.users if u.target is operator.getitem]
        results = tuple(tuple(u for u in items if u.args[1] == i) for i in range(count))
    if "max_tokens" in given:
        sizes = Batched(given["max_tokens"], given["num_experts"], given.get("fp8", False))
        collective = sizes.dispatch() if node.target is DISPATCH_BATCHED else sizes.combine()
        return Launch(node, collective, str(given["group"]), inputs, results)
    experts = given.get("num_experts")
    return Launch(node, collective, str(given["group"]), inputs, results, True, experts)


def _nodes(arguments: object) -> tuple[Node, ...]:
    assert isinstance(arguments, tuple)
    assert all(isinstance(a, Node) for a in arguments)
    return arguments


def _refuse_uneven(node: Node, ranks: int) -> None:
    assert isinstance(node.args[0], Node)
    rows = value_of(node.args[0]).shape[0]
    for sizes in node.args[1:3]:
        assert isinstance(sizes, tuple | list)
        values: list[Any] = [value_of(s) if isinstance(s, Node) else s for s in sizes]
        if not all(are_equal_parts(v, ranks, rows) for v in values):
            raise UnsupportedGraphError(
                f"{where(node)}: splits {values} of {rows} rows over {ranks} ranks are not even, "
                "or not for every batch size. Splits that depend on data cannot be captured: send "
                "every rank the same number of rows (a static capacity) and give the ranks a "
                "dim of their own, x.view(ranks, -1, hidden)."
            )


def communicating_groups(graph: Graph) -> set[str]:
    """Names of the process groups over which a Dynamo graph communicates, in any form.

    Graphs inside higher-order ops count: a checkpointed layer communicates, too.
    """
    calls = (n for n in opaque.all_calls(graph) if opaque.communicates(n.target))
    return {group for node in calls if (group := opaque.group_of(node)) is not None}
