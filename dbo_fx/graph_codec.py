"""The values of a graph file: arguments, call targets, and what tracing saw, to JSON and back.

`dbo_fx/graph_facts.py` says how values look.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from dbo_fx.errors import GraphFileError
from dbo_fx.opaque import op_name
from dbo_fx.size_text import parse_size, size_text
from dbo_fx.symbols import FakeTensorMode, expression, fake_base, fake_tensor, same_storage_key

_MODULES = {"operator": operator, "math": math, "torch": torch}
_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def target_text(target: Any, where: str) -> str:
    """A call's target by its qualified name: `aten::linear.default`, `operator.mul`.

    Raises:
        GraphFileError: it cannot be found again by a name.
    """
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return f"{op_name(target)}.{target._overloadname}"
    name = getattr(target, "__name__", "")
    for prefix, module in _MODULES.items():
        # Of torch, only what works on sizes: sym_max, _sym_sqrt.
        allowed = prefix != "torch" or name.lstrip("_").startswith("sym_")
        if allowed and getattr(module, name, None) is target:
            return f"{prefix}.{name}"
    raise GraphFileError(
        f"{where} calls {target}, which has no name that another process knows. Wrap it in "
        "torch.library.custom_op."
    )


def target_of(text: str, where: str) -> Any:
    """The target of a call.

    Raises:
        GraphFileError: the op is not registered in this process, or there is no such function.
    """
    if "::" in text:
        return _op(text, where)
    prefix, _, name = text.partition(".")
    allowed = prefix in _MODULES and (prefix != "torch" or name.lstrip("_").startswith("sym_"))
    found = getattr(_MODULES[prefix], name, None) if allowed else None
    if not callable(found):
        raise GraphFileError(f"{where} calls {text}, which is no op and no function of sizes.")
    return found


def _op(text: str, where: str) -> Any:
    name, _, overload = text.partition(".")
    namespace, _, op = name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (AttributeError, RuntimeError) as error:
        raise GraphFileError(
            f"{where} calls {text}, and op {name} is not registered in this process. Import the "
            "package that registers it first; to read the file without, use "
            "dbo_fx.graph_facts.read_graph_facts."
        ) from error


def encode(value: Any, where: str) -> Any:
    """An argument as a JSON value.

    Raises:
        GraphFileError: it is of a kind that graph files do not hold.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, list):
        return [encode(v, where) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(v, where) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, where), encode(v, where)] for k, v in value.items()]}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [encode(v, where) for v in parts]}
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return {"size": size_text(value.node.expr)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in _NAMED.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise GraphFileError(
        f"{where} has a {type(value).__name__} ({value!r:.60}) as an argument, which a graph file "
        "cannot hold."
    )


@dataclass
class Encoder:
    """Turns what tracing saw into JSON values; storages are called after their first holder."""

    storages: dict[int, str] = field(default_factory=dict)

    def value(self, value: Any, name: str) -> Any:
        """The value of the node of that name.

        Raises:
            GraphFileError: as `encode`, or the tensor is sparse or quantised.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, list | tuple):
            items = [self.value(v, f"{name}.{i}") for i, v in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        return encode(value, name)

    def _tensor(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise GraphFileError(
                f"{name} is a {tensor.layout} tensor; graph files hold dense ones."
            )
        key = same_storage_key(tensor)
        facts: dict[str, Any] = {
            "tensor": str(tensor.dtype).removeprefix("torch."),
            "shape": [_size(s) for s in tensor.shape],
            "stride": [_size(s) for s in tensor.stride()],
            "device": str(tensor.device),
            "storage": self.storages.setdefault(key, name),
            "offset": _size(tensor.storage_offset()),
        }
        if facts["storage"] == name:
            facts["bytes"] = _size(tensor.untyped_storage().nbytes())
        return facts


def _size(size: int | torch.SymInt) -> int | str:
    expr = expression(size)
    return int(expr) if expr.is_Integer else size_text(expr)


@dataclass
class Decoder:
    """Turns JSON values back.

    Attributes:
        mode: The fake mode that tensors are made in.
        symbols: Size symbols by name.
        size: Makes a size from an expression.
        devices: Other devices for stored ones, by text.
        nodes: The nodes so far, by name.
    """

    mode: FakeTensorMode
    symbols: Mapping[str, sympy.Symbol]
    size: Callable[[sympy.Expr], torch.SymInt | int]
    devices: Callable[[str], torch.device]
    nodes: dict[str, Node] = field(default_factory=dict)
    storages: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def argument(self, value: Any) -> Any:
        """An argument, or a value that is no tensor."""
        if isinstance(value, str):
            return self.nodes[value.removeprefix("%")]
        if isinstance(value, list):
            return [self.argument(v) for v in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self._tensor(value)
        ((kind, inner),) = value.items()
        match kind:
            case "str":
                return str(inner)
            case "float":
                return float(inner)
            case "size":
                return self._sized(inner)
            case "device":
                return self.devices(inner)
            case "tuple":
                return tuple(self.argument(v) for v in inner)
            case "slice":
                return slice(*(self.argument(v) for v in inner))
            case "dict":
                return {self.argument(k): self.argument(v) for k, v in inner}
        return named(kind, inner)

    def _sized(self, text: int | str) -> Any:
        if isinstance(text, int):
            return text
        if text not in self.sizes:
            self.sizes[text] = self.size(parse_size(text, self.symbols))
        return self.sizes[text]

    def _tensor(self, facts: Mapping[str, Any]) -> torch.Tensor:
        # One object for all that lie alike in a storage: the item of a tuple and the node that
        # takes it out, the result of a write and what is written.
        key = str([v for k, v in facts.items() if k != "bytes"])
        if key not in self.tensors:
            self.tensors[key] = self._new(facts)
        return self.tensors[key]

    def _new(self, facts: Mapping[str, Any]) -> torch.Tensor:
        name, device = facts["storage"], self.devices(facts["device"])
        dtype = named("dtype", facts["tensor"])
        if name not in self.storages:
            self.storages[name] = self._base(facts["bytes"], dtype)
        base = self.storages[name]
        return fake_tensor(
            self.mode,
            base if base.dtype == dtype else base.untyped_storage(),
            [self._sized(s) for s in facts["shape"]],
            [self._sized(s) for s in facts["stride"]],
            self._sized(facts["offset"]),
            dtype=dtype,
            device=device,
        )

    def _base(self, number: int | str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that fills a storage of this many bytes, if numbers of this type can."""
        key = f"({number})/{dtype.itemsize}"
        if key not in self.sizes:
            count = expression(self._sized(number)) / dtype.itemsize
            whole = count.as_numer_denom()[1] == 1
            self.sizes[key] = self.size(count) if whole else None
        if self.sizes[key] is None:
            return fake_base(self._sized(number), torch.uint8)
        return fake_base(self.sizes[key], dtype)


def named(kind: str, name: str) -> Any:
    """A dtype, layout or memory format by its name.

    Raises:
        GraphFileError: torch has none of that name.
    """
    found = getattr(torch, name, None)
    if kind not in _NAMED or not isinstance(found, _NAMED[kind]):
        raise GraphFileError(f"{{{kind!r}: {name!r}}} is no value of a graph file.")
    return found
