"""From the lowered graph to the module that runs.

needs:    a verified graph
ensures:  a flat GraphModule whose nodes are segments, sends and recvs, and runtime calls; its
          Python order is the schedule; nothing traces or compiles it again
before -> after: `wait(1, 'comp')` -> `runtime.wait(1, 'comp')`;
                 a send on comm -> `runtime.use('comm')`, the send, `runtime.use('comp')`;
                 of a program that shares SMs, the output: `runtime.end()` before it;
                 with counters or stamps, an action: `runtime.start(1, 'comp')` before, `finish`
                 behind it
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from dbo_fx import sync
from dbo_fx.capture import value_of
from dbo_fx.counters import Counters, DeviceCounters
from dbo_fx.host_code import Program
from dbo_fx.ir import COMP
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import stream_of
from dbo_fx.pipeline import State
from dbo_fx.progress import Place
from dbo_fx.runtime import Runtime
from dbo_fx.sm_sharing import SmSharing
from dbo_fx.stamps import StampedRuntime
from dbo_fx.tag import Tag, set_tag, tag_of


@dataclass(frozen=True, slots=True)
class Emit:
    """See the module's contract. The emitted graph replaces `state.graph`.

    Attributes:
        progress: Whether the module counts the actions that have finished; None: on CPU only.
        stamps: Whether to emit a diagnostic module instead, which says when every action ran
            (`StampedRuntime`); it counts nothing.
    """

    progress: bool | None = False
    stamps: bool = False
    name: str = "emit"

    def apply(self, state: State) -> tuple[State, str]:
        """Build the module; `state.module` is it."""
        graph, env = Graph(), dict[Node, Node]()
        device = _device(state)
        is_counted = device.type == "cpu" if self.progress is None else self.progress
        if self.stamps:
            counting = _Counting(state.graph.nodes, _stamped_place)
        else:
            counting = _Counting(state.graph.nodes if is_counted else (), _place)
        sharing = SmSharing() if state.program is None else state.program.sms
        streams = _Streams(graph, counting, ends=bool(sharing))
        for node in state.graph.nodes:
            if node.op.startswith("call") and streams.runtime is None:
                streams.begin()
            copy = streams.emit(node, env)
            if copy is not None:
                env[node] = copy
        root: dict[str, Any] = {**_constants(state), **state.segments, **state.compiled}
        if self.stamps:
            root["runtime"] = StampedRuntime(device, counting.order)
        else:
            root["runtime"] = Runtime(device, counting.counters(device) if is_counted else None)
        root["runtime"].limits.sharing = sharing
        module = Program(root, graph, class_name="DboProgram")
        graph.lint()
        calls = sum(n.op.startswith("call") for n in graph.nodes)
        return replace(state, graph=graph, lowered=state.graph, module=module), f"{calls} calls"


class _Counting:
    """Numbers the actions of every stream.

    A stream's neighbouring nodes of one action are one: a wait or another stream may cut it.
    """

    def __init__(self, nodes: Iterable[Node], place_of: Callable[[Node], Place | None]) -> None:
        self.order: list[Place] = []
        self.starts: dict[Node, int] = {}
        self.finishes: dict[Node, int] = {}
        latest: dict[str, tuple[Place, Node]] = {}
        count = Counter[str]()
        for node in nodes:
            place = place_of(node)
            if place is None:
                continue
            before = latest.get(place.stream)
            if before is not None and before[0] == place:
                del self.finishes[before[1]]
            else:
                count[place.stream] += 1
                self.order.append(place)
                self.starts[node] = count[place.stream]
            self.finishes[node] = count[place.stream]
            latest[place.stream] = (place, node)

    def counters(self, device: torch.device) -> Counters:
        """The counters that the module's calls move."""
        is_cpu = device.type == "cpu"
        return Counters(self.order) if is_cpu else DeviceCounters(self.order, device)


def _place(node: Node) -> Place | None:
    """The stream and action of a call that does the action's work."""
    action = action_of(node)
    if action is None or not node.op.startswith("call"):
        return None
    if node.target in (BUFFERS, sync.record, sync.wait, sync.keepalive, operator.getitem):
        return None
    return Place(stream_of(node), action.bound())


def _stamped_place(node: Node) -> Place | None:
    """As `_place`, and the calls that belong to no action but take time: `merge`, `shared`."""
    tag = tag_of(node)
    if tag is not None and tag.role in ("merge", "shared") and node.op.startswith("call"):
        is_item = node.target is operator.getitem
        return None if is_item else Place(stream_of(node), tag.role)
    return _place(node)


class _Streams:
    """Copies nodes into the emitted graph and switches streams where they change."""

    def __init__(self, graph: Graph, counting: _Counting, *, ends: bool) -> None:
        self.graph, self.counting, self.ends = graph, counting, ends
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
        if node.op == "output" and self.ends:
            self._call("end")
        starts, finishes = self.counting.starts.get(node), self.counting.finishes.get(node)
        if starts is not None:
            self._call("start", starts, stream)
        copy = self.graph.node_copy(node, env.__getitem__)
        if finishes is not None:
            self._call("finish", finishes, stream)
        return copy

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
