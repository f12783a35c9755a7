"""From the lowered graph to the module that runs.

needs:    a verified graph
ensures:  a flat GraphModule whose nodes are segments, sends and recvs, and runtime calls; its
          Python order is the schedule; nothing traces or compiles it again
before -> after: `wait(1, 'comp')` -> `runtime.wait(1, 'comp')`;
                 a send on comm -> `runtime.use('comm')`, the send, `runtime.use('comp')`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dbo_fx import sync
from dbo_fx.capture import value_of
from dbo_fx.ir import COMP
from dbo_fx.passes.streams import stream_of
from dbo_fx.pipeline import State
from dbo_fx.runtime import Runtime
from dbo_fx.tag import Tag, set_tag


@dataclass(frozen=True, slots=True)
class Emit:
    """See the module's contract. The emitted graph replaces `state.graph`."""

    name: str = "emit"

    def apply(self, state: State) -> tuple[State, str]:
        """Build the module; `state.module` is it."""
        graph, env = Graph(), dict[Node, Node]()
        streams = _Streams(graph)
        for node in state.graph.nodes:
            if node.op.startswith("call") and streams.runtime is None:
                streams.begin()
            copy = streams.emit(node, env)
            if copy is not None:
                env[node] = copy
        root: dict[str, Any] = {**_constants(state), **state.segments}
        root["runtime"] = Runtime(_device(state))
        module = GraphModule(root, graph, class_name="DboProgram")
        graph.lint()
        calls = sum(n.op.startswith("call") for n in graph.nodes)
        return replace(state, graph=graph, module=module), f"{calls} calls"


class _Streams:
    """Copies nodes into the emitted graph and switches streams where they change."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runtime: Node | None = None
        self.current = COMP

    def begin(self) -> None:
        self.runtime = self.graph.get_attr("runtime")
        self._call("begin")

    def emit(self, node: Node, env: Mapping[Node, Node]) -> Node | None:
        if node.target is sync.record or node.target is sync.wait:
            self._call(node.target.__name__, *node.args)
            return None
        stream = stream_of(node) if node.op.startswith("call") else self.current
        if node.op == "output":
            stream = COMP
        if stream != self.current:
            self._call("use", stream)
            self.current = stream
        return self.graph.node_copy(node, env.__getitem__)

    def _call(self, method: str, *args: Any) -> None:
        assert self.runtime is not None
        node = self.graph.call_method(method, (self.runtime, *args))
        set_tag(node, Tag("sync"))


def _constants(state: State) -> dict[str, Any]:
    names = {str(n.target) for n in state.graph.nodes if n.op == "get_attr"}
    return {name: getattr(state.captured.module, name) for name in names}


def _device(state: State) -> torch.device:
    for token in state.captured.token_inputs:
        value = value_of(state.captured.placeholders[token.index])
        assert isinstance(value, torch.Tensor)
        return value.device
    raise AssertionError("a captured graph has a token input")
