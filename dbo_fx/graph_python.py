"""Graphs as Python files that people read and Python runs.

A file defines `forward`, which takes the graph's inputs in their order. Every call has a comment:
microbatch, phase, layer and stream (`# m0 A1@3 comp`), and the result. Constants come from the
graph file that lies beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from dbo_fx.capture import module_path, value_of
from dbo_fx.graph_places import line_of
from dbo_fx.runtime import Runtime
from dbo_fx.segments import body_of
from dbo_fx.tag import Tag, tag_of

RUNTIME = "runtime"
_WIDTH = 100
_IMPORTS = """import math
import operator

import torch

import dbo_fx.comm  # torch.ops.dbo_fx"""
_CONSTANTS = "CONSTANTS = graph_constants(__file__)"
_MARKERS = {
    "record": """def record(event, stream):
    \"\"\"Stands for recording an event; here everything runs in this order.\"\"\"""",
    "wait": """def wait(event, stream):
    \"\"\"Stands for a stream's wait for an event.\"\"\"""",
    "keepalive": """def keepalive(*values):
    \"\"\"Holds the values until here.\"\"\"""",
}


def python_text(graph: Graph, title: str, module: GraphModule | None = None) -> str:
    """A graph as the text of a Python file.

    Args:
        graph: Its calls are ops, functions of sizes, markers; or segments and the runtime's.
        title: The first line of the file's docstring.
        module: What holds segments and the runtime, if the graph has them.
    """
    nodes = list(graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    listed = "\n".join(f"    {n.name}: {_fact(value_of(n))}" for n in inputs)
    head = [f'"""{title}\n\nInputs:\n{listed}\n"""\n', _IMPORTS]
    if any(n.op == "get_attr" and n.target != RUNTIME for n in nodes):
        head += ["from dbo_fx.graph_file import graph_constants\n", _CONSTANTS]
    runtime = None if module is None else getattr(module, RUNTIME, None)
    if isinstance(runtime, Runtime):
        head.append(_runtime(runtime))
    used = {n.target.__name__ for n in nodes if n.op == "call_function" and _is_marker(n.target)}
    blocks = ["\n".join(head), *(text for name, text in _MARKERS.items() if name in used)]
    for name, child in () if module is None else module.named_children():
        body = body_of(child)
        if body is not None:
            blocks.append(_function(name, body.graph))
    blocks += [_function("forward", graph), 'if __name__ == "__main__":\n    print(__doc__)']
    return "\n\n\n".join(blocks) + "\n"


def tag_text(tag: Tag | None) -> str:
    """`m0 A1@3 comp`, `m1 D.send@0 comm`, `size comp`."""
    if tag is None:
        return ""
    place = tag.role
    if tag.phase is not None:
        half = "" if tag.half is None else f".{tag.half.value}"
        layer = "" if tag.layer is None else f"@{tag.layer}"
        place = f"{tag.phase.value}{half}{layer}"
    microbatch = "" if tag.microbatch is None else f"m{tag.microbatch}"
    return " ".join(filter(None, [microbatch, place, tag.stream]))


def _runtime(runtime: Runtime) -> str:
    lines = ["from dbo_fx.runtime import Runtime", ""]
    counters = ""
    if runtime.counters is not None:
        kind = type(runtime.counters).__name__
        lines.insert(0, f"from dbo_fx.counters import {kind}")
        lines.insert(1, "from dbo_fx.progress import Place")
        lines.append("ORDER = [")
        lines += [f"    Place({p.stream!r}, {p.action!r})," for p in runtime.counters.order]
        lines.append("]")
        device = f", torch.device({str(runtime.device)!r})" if runtime.is_cuda else ""
        counters = f", {kind}(ORDER{device})"
    lines.append(f"RUNTIME = Runtime(torch.device({str(runtime.device)!r}){counters})")
    return "\n".join(lines)


def _function(name: str, graph: Graph) -> str:
    inputs = [n.name for n in graph.nodes if n.op == "placeholder"]
    head = f"def {name}({', '.join(inputs)}):"
    if len(head) > _WIDTH:
        head = "\n".join([f"def {name}(", *(f"    {i}," for i in inputs), "):"])
    return "\n".join([head, *_body(graph)])


def _body(graph: Graph) -> Iterator[str]:
    said = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        place = " in ".join(filter(None, [line_of(node).split(" in ")[0], module_path(node)]))
        if place and place != said:
            yield f"    # {place}"
            said = place
        yield _line(node)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"    return {_expression(node.args[0])}"
    code = _call(node)
    if node.users:
        code = f"{node.name} = {code}"
    about = [tag_text(tag_of(node)), _fact(value_of(node)) if node.users else ""]
    comment = "  ".join(filter(None, about))
    return f"    {code}" + (f"  # {comment}" if comment else "")


def _call(node: Node) -> str:
    if node.op == "get_attr":
        return "RUNTIME" if node.target == RUNTIME else f"CONSTANTS[{str(node.target)!r}]"
    args = list(node.args)
    if node.op == "call_method":
        called = f"{_expression(args.pop(0))}.{node.target}"
    elif node.op == "call_module":
        called = str(node.target)
    else:
        called = _callable(node.target)
    given = [*map(_expression, args), *(f"{k}={_expression(v)}" for k, v in node.kwargs.items())]
    return f"{called}({', '.join(given)})"


def _is_marker(target: Any) -> bool:
    return getattr(target, "__module__", "") == "dbo_fx.sync"


def _callable(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = str(target.__name__)
    if _is_marker(target):
        return name
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    return f"{module}.{name}"


def _expression(value: Any) -> str:
    """An argument as Python code."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({_joined(value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{_joined(value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_expression(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_joined((value.start, value.stop, value.step))})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(map(_expression, values))


def _fact(value: Any) -> str:
    """`float32[s77, 8]`; of a tuple all items."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_fact, value))})"
    return "" if value is None else str(value)
