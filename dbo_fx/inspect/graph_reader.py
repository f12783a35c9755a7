"""Nodes as plain values, from the graphs that the passes work on: captured, scheduled or emitted.

Segments are looked into: every call of one stands for the nodes inside, with the call's layer,
microbatch and stream. So it is no difference how nodes are cut into segments.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from dbo_fx import sync
from dbo_fx.capture import CapturedGraph, module_path, source_of, value_of
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import GraphFileError
from dbo_fx.graph_codec import encode, target_text
from dbo_fx.inspect.facts import KEEPALIVE, Facts, layers_text
from dbo_fx.inspect.graph_items import facts_of_nodes
from dbo_fx.ir import COMP, Program
from dbo_fx.passes.lower import qualified_name
from dbo_fx.pipeline import State
from dbo_fx.runtime import Runtime
from dbo_fx.saved import SavedProgram
from dbo_fx.segments import body_of
from dbo_fx.size_text import size_text
from dbo_fx.symbols import expression, same_storage_key
from dbo_fx.tag import Tag, tag_of

Values = dict[str, Any]
_MARKERS = {sync.record: "record", sync.wait: "wait"}
_LARGEST = 1 << 20  # Bytes of constants that are compared.


def facts_of_graph(subject: object) -> Facts | None:
    """Read whatever holds a graph.

    Args:
        subject: A `CapturedGraph`, `State`, `CompiledProgram`, `SavedProgram` or `GraphModule`.

    Returns:
        The facts; None if it is none of these.
    """
    match _unwrapped(subject):
        case CompiledProgram() as subject:
            return _facts(subject.module, subject.module.graph, {}, _title(subject.program))
        case State() as subject:
            root = subject.captured.module
            title = "graph" if subject.program is None else _title(subject.program)
            return _facts(subject.module or root, subject.graph, subject.segments, title)
        case CapturedGraph() as subject:
            return _facts(subject.module, subject.graph, {}, "captured graph")
        case GraphModule() as subject:
            return _facts(subject, subject.graph, {}, type(subject).__name__)
    return None


def program_of(subject: object) -> Program | None:
    """The program of what has one beside its graph."""
    whole = _unwrapped(subject)
    return whole.program if isinstance(whole, CompiledProgram | State) else None


def _unwrapped(subject: object) -> object:
    return subject.compiled if isinstance(subject, SavedProgram) else subject


def _title(program: Program) -> str:
    layers = layers_text(program.layers)
    return f"graph of {program.schedule} ({layers}, {program.transport})"


def _facts(
    root: GraphModule, graph: Graph, segments: Mapping[str, GraphModule], source: str
) -> Facts:
    reader = _Reader(root, segments)
    nodes = list(reader.read(graph))
    return facts_of_nodes(nodes, reader.constants, source)


@dataclass
class _Reader:
    root: GraphModule
    segments: Mapping[str, GraphModule]
    constants: list[Values] = field(default_factory=list)
    stands_for: dict[str, Any] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    current: str | None = None

    def read(self, graph: Graph) -> Iterator[Values]:
        """The nodes, markers among them."""
        for node in graph.nodes:
            if node.target in _MARKERS:
                event, stream = node.args
                yield {"op": _MARKERS[node.target], "event": event, "stream": stream}
            elif node.op == "call_method" and self._is_runtime(node.args[0]):
                yield from self._runtime_call(node)
            elif self._is_runtime(node):
                self.current = COMP
            elif (segment := self._segment(node)) is not None:
                yield from self._inside(node, segment)
            elif node.target is operator.getitem and self._results(node.args[0]):
                self.stands_for[node.name] = self._results(node.args[0])[node.args[1]]
            else:
                if node.op == "get_attr":
                    self._constant(str(node.target))
                yield self._node(node, node.name, tag_of(node), module_path(node))

    def _is_runtime(self, node: object) -> bool:
        if not isinstance(node, Node) or node.op != "get_attr":
            return False
        return isinstance(getattr(self.root, str(node.target), None), Runtime)

    def _runtime_call(self, node: Node) -> Iterator[Values]:
        """Streams and events; `begin` and counters follow from them."""
        if node.target == "use":
            self.current = str(node.args[1])
        elif node.target in ("record", "wait"):
            _, event, stream = node.args
            yield {"op": node.target, "event": event, "stream": stream}

    def _segment(self, node: Node) -> GraphModule | None:
        """The called module, if it is a graph that takes its inputs by position."""
        if node.op != "call_module" or node.kwargs:
            return None
        name = str(node.target)
        found = body_of(self.segments.get(name) or self.root.get_submodule(name))
        if found is None:
            return None
        inputs = [n for n in found.graph.nodes if n.op == "placeholder"]
        results = next(iter(reversed(found.graph.nodes))).args[0]
        is_plain = len(inputs) == len(node.args) and isinstance(results, tuple | list)
        return found if is_plain else None

    def _results(self, node: object) -> list[Any]:
        """What the nodes inside of a call return; nothing for other nodes."""
        found = self.stands_for.get(node.name) if isinstance(node, Node) else None
        return found if isinstance(found, list) else []

    def _inside(self, call: Node, segment: GraphModule) -> Iterator[Values]:
        outer = tag_of(call)
        given = iter(call.args)
        for node in segment.graph.nodes:
            name = f"{call.name}/{node.name}"
            if node.op == "placeholder":
                self.stands_for[name] = self._encoded(next(given), "")
            elif node.op == "output":
                results = [self._encoded(a, f"{call.name}/") for a in node.args[0]]
                self.stands_for[call.name] = results
            else:
                yield self._node(node, name, _inner_tag(tag_of(node), outer), "")

    def _node(self, node: Node, name: str, tag: Tag | None, path: str) -> Values:
        prefix = name.removesuffix(node.name)
        facts: Values = {
            "name": name,
            "op": node.op,
            "target": _target(node),
            "args": [self._encoded(a, prefix) for a in node.args],
            "kwargs": {k: self._encoded(v, prefix) for k, v in sorted(node.kwargs.items())},
            "val": self._value(value_of(node)),
            "module": path,
            "input": source_of(node),
            "tag": {} if tag is None else _tag_values(tag),
        }
        if node.op == "placeholder":
            facts["args"] = []
        elif self.current is not None:
            facts["tag"]["stream"] = self.current
        return facts

    def _encoded(self, value: Any, prefix: str) -> Any:
        match value:
            case Node():
                name = prefix + value.name
                return self.stands_for.get(name, f"%{name}")
            case list():
                return [self._encoded(v, prefix) for v in value]
            case tuple():
                return {"tuple": [self._encoded(v, prefix) for v in value]}
            case slice():
                parts = (value.start, value.stop, value.step)
                return {"slice": [self._encoded(v, prefix) for v in parts]}
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return {"size": _size_text(value.node.expr)}
        try:
            return encode(value, "")
        except GraphFileError:
            return {"other": repr(value)}

    def _value(self, value: Any) -> Any:
        """As in graph files, except that storages have numbers; kept, because copies share it."""
        if isinstance(value, list | tuple):
            items = [self._value(v) for v in value]
            return items if isinstance(value, list) else {"tuple": items}
        if not isinstance(value, torch.Tensor):
            return self._encoded(value, "")
        if id(value) not in self.values:
            self.values[id(value)] = {
                "tensor": str(value.dtype).removeprefix("torch."),
                "shape": [_size(s) for s in value.shape],
                "stride": [_size(s) for s in value.stride()],
                "device": str(value.device),
                "storage": str(same_storage_key(value)),
            }
        return self.values[id(value)]

    def _constant(self, name: str) -> None:
        tensor: object = self.root
        for part in name.split("."):
            tensor = getattr(tensor, part, None)
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.nbytes > _LARGEST:
            return
        plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        text = base64.b64encode(bytes(plain.tolist())).decode()
        self.constants.append({"name": name, "base64": text})


def _inner_tag(inner: Tag | None, outer: Tag | None) -> Tag | None:
    """Segments are shared over layers and microbatches: these are the call's."""
    if inner is None or outer is None:
        return outer
    return Tag(inner.role, inner.phase, outer.layer, outer.microbatch, inner.half, outer.stream)


def _tag_values(tag: Tag) -> Values:
    return {
        "role": tag.role,
        "phase": "" if tag.phase is None else tag.phase.value,
        "layer": tag.layer,
        "microbatch": tag.microbatch,
        "half": "" if tag.half is None else tag.half.value,
        "stream": tag.stream or "",
    }


def _target(node: Node) -> str:
    if node.target is sync.keepalive:
        return KEEPALIVE
    try:
        return target_text(node.target, node.name)
    except GraphFileError:
        return qualified_name(node.target)


def _size(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else _size_text(expression(size))


@lru_cache(maxsize=4096)
def _size_text(expr: sympy.Basic) -> str:
    try:
        return size_text(expr)
    except GraphFileError:
        return str(expr)
