"""Which calls may communicate: what is known by namespace, what users say, and what stays opaque.

A schedule that does not know of a communication can deadlock: one rank waits in it, another one in
a dispatch. So every op is one of three: it *communicates*, it is *local*, or it is *opaque*: of a
namespace that nobody has vouched for. Users vouch for an op with `dbo_fx.register_local`, or with
the sharding rule that they give it (`dbo_fx.register_rule`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from dbo_fx.errors import OptionError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMMUNICATING = _names(
    "_c10d_functional _c10d_functional_autograd c10d_functional c10d symm_mem _dtensor cplib dbo_fx"
)
# What torch itself ships beside these, read off torch 2.13: none of it leaves the process.
LOCAL = _names(
    "aten prims prim quantized _quantized quantized_decomposed quantization ao sparse"
    " semi_structured mkl mkldnn mkldnn_prepacked onednn inductor inductor_prims _native rngprims"
    " debugprims debug_mode_ops profiler streams torch_attn flex_lib static_runtime fsdp"
    " device_mesh bucketing export onnx"
)
LOCAL_OPS = frozenset(
    f"dbo_fx::{name}" for name in ("comm_buffers", "pack", "unpack", "note_overflow")
)
GROUPS = frozenset({"group", "group_name", "process_group", "pg"})
_WAITS = frozenset(
    f"{namespace}::wait_tensor" for namespace in ("_c10d_functional", "c10d_functional")
)
DECLARED: set[str] = set()
WITH_RULE: dict[str, Any] = {}  # What `rules.register_rule` registers.


def register_local(op: str) -> None:
    """Say that an op does not communicate with other ranks, however it treats rows.

    What it does with rows is tested on the first call's values. A schedule that does not know of a
    communication can deadlock, so a wrong word here can hang all ranks.

    Args:
        op: The op's qualified name without overload, `namespace::name`.

    Raises:
        OptionError: the name is no such thing, or is one of torch's own collectives.
    """
    check_name("register_local", op)
    if _namespace(op) in COMMUNICATING:
        raise OptionError(f"register_local: {op} communicates, so it cannot be declared local.")
    DECLARED.add(op)


def check_name(function: str, op: object) -> None:
    """Refuse what is no qualified op name.

    Raises:
        OptionError: names the function and what it was given.
    """
    if not isinstance(op, str) or not re.fullmatch(r"\w+::\w+", op):
        raise OptionError(f"{function}: op={op!r} is no name like 'my_ops::my_norm'.")


def op_name(target: Any) -> str | None:
    """`namespace::name` of an op or of a packet of its overloads; None for other callables."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return None


def communicates(target: Any) -> bool:
    """Whether the op is known to communicate, or to wait for a communication."""
    name = op_name(target)
    return name is not None and name not in LOCAL_OPS and _namespace(name) in COMMUNICATING


def launches(graph: Graph) -> list[Node]:
    """The calls that communicate, waits left out, also inside higher-order ops."""
    calls = (n for n in all_calls(graph) if communicates(n.target))
    return [n for n in calls if op_name(n.target) not in _WAITS]


def is_opaque(target: Any) -> bool:
    """Whether nobody has said that the op does not communicate."""
    name = op_name(target)
    if name is None or communicates(target) or name in LOCAL_OPS:
        return False
    return _namespace(name) not in LOCAL and name not in DECLARED and name not in WITH_RULE


def group_argument(target: Any) -> str | None:
    """Name of the argument that takes a process group or its name; None if there is none."""
    return next((a.name for a in _schema_arguments(target) if _takes_group(a)), None)


def group_of(node: Node) -> str | None:
    """The name of the group that a call is given, if it is written in the graph."""
    for index, argument in enumerate(_schema_arguments(node.target)):
        if _takes_group(argument):
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, str) else None
    return None


def all_calls(graph: Graph) -> Iterator[Node]:
    """All calls of a graph and of the graphs inside its higher-order ops."""
    for node in graph.nodes:
        if node.op == "call_function":
            yield node
            yield from calls_inside(node)


def calls_inside(node: Node) -> Iterator[Node]:
    """The calls in the graphs that a higher-order op is given."""
    for argument in tree_leaves((node.args, node.kwargs)):
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner: Any = argument.graph.owning_module
            for part in str(argument.target).split("."):
                inner = getattr(inner, part, None)
            if isinstance(inner, GraphModule):
                yield from all_calls(inner.graph)


def hidden_communication(node: Node) -> Node | None:
    """The first call inside a higher-order op that communicates, or may."""
    inside = calls_inside(node)
    return next((n for n in inside if communicates(n.target) or is_opaque(n.target)), None)


def _namespace(name: str) -> str:
    return name.split("::")[0]


def _schema_arguments(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]  # in torch
    return list(target._schema.arguments) if isinstance(target, torch._ops.OpOverload) else []


def _takes_group(argument: Any) -> bool:
    kind = str(argument.type)
    return "ProcessGroup" in kind or (argument.name in GROUPS and kind in ("str", "Any"))
