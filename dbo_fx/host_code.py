"""The Python that a step runs: what its graph says, for less host time.

A graph calls ops through the dispatcher by their schemas, and segments as modules. Where nobody
looks on (no mode, no profiler, no hook, no tracing), functions and tensor methods do the same.
The graph stays as it is; what is run is a copy.

    before   y = torch.ops.aten.view.default(x, [-1, 64]); A = self.segment_1(y)
    after    y = x.view([-1, 64]); A = segment_1.forward(y)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn.modules import module as modules

from dbo_fx.comm.ops import DIRECT
from dbo_fx.segment_compilers import is_bare

_ATEN = torch.ops.aten
_METHODS = {
    _ATEN.view.default: "view",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.transpose.int: "transpose",
    _ATEN.permute.default: "permute",
    _ATEN.expand.default: "expand",
    _ATEN.to.dtype: "to",
}
_FUNCTIONS = {getattr(torch.ops.dbo_fx, name).default: call for name, call in DIRECT.items()}
_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)}


class Program(GraphModule):
    """An emitted module: `graph` and `code` are what people read, a call runs `host_graph`."""

    def recompile(self) -> Any:
        """As `GraphModule` does; the cheaper code is made at the first call, of this graph."""
        code = super().recompile()
        cheaper = host_graph(self.graph)
        kind: Any = type(self)  # Of this object alone: GraphModule makes one for each.
        read = kind.forward
        made: list[Any] = []

        def forward(self: Program, *args: Any, **kwargs: Any) -> Any:
            if kwargs or self.is_watched(args):
                return read(self, *args, **kwargs)
            if not made:
                host = GraphModule(self, cheaper, class_name="DboProgram")
                made.append(type(host).forward)
            return made[0](self, *args)

        kind.forward = forward
        return code

    def is_watched(self, args: tuple[Any, ...]) -> bool:
        """Whether somebody sees, or changes, what the graph calls by its ops and modules."""
        return (
            not is_bare()
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._is_torch_function_mode_enabled()
            or torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
            or not _PLAIN.issuperset(map(type, args))
            or modules._has_any_global_hook()  # type: ignore[no-untyped-call]
            or any(m._forward_hooks or m._forward_pre_hooks for m in self._modules.values() if m)
        )


def host_graph(graph: Graph) -> Graph:
    """A copy of a program's graph that calls functions and methods directly."""
    copy = Graph()
    env: dict[Node, Node] = {}
    modules: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            if name not in modules:
                modules[name] = copy.get_attr(name)
            args = copy_args(node, env)
            env[node] = copy.call_method("forward", (modules[name], *args))
        else:
            env[node] = copy.node_copy(node, env.__getitem__)
            if node.target in _FUNCTIONS:
                env[node].target = _FUNCTIONS[node.target]
    use_methods(copy)
    return copy


def copy_args(node: Node, env: dict[Node, Node]) -> tuple[Any, ...]:
    """A node's arguments in a copy of its graph."""
    args: tuple[Any, ...] = torch.fx.map_arg(node.args, env.__getitem__)
    return args


def use_methods(graph: Graph) -> None:
    """Let a graph call tensor methods that dispatch the same op, in place."""
    for node in graph.nodes:
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target is _ATEN.to.dtype and len(node.args) > 4:
            continue  # The method takes a memory format by its name alone.
        if node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
        elif node.target is _ATEN.slice.Tensor and len(node.args) == 4 and node.args[1] == 0:
            x, _, start, stop = node.args
            node.target, node.args = operator.getitem, (x, slice(start, stop))
