"""What nodes read and write, found by running them: the check on `dbo_fx.effects`.

`effects_of` reads schemas and the storages that tracing left behind. Here every node runs again on
fake tensors. Reads are what the ops inside a node touch below autograd, where composite ops have
come apart. Writes are the tensors whose version counter moved, and those that these inner ops
mutate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import CapturedGraph, value_of
from dbo_fx.effects import Effects
from dbo_fx.symbols import enable_python_dispatcher

# Per node: the names of the storages that it reads, writes and has its results in.
Found = dict[str, tuple[list[str], list[str], list[str]]]


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Touched(TorchDispatchMode):
    """Keeps every tensor that an op other than a view is given, and every one that is mutated."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.mutated: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "prim":  # prim::device and the like.
            self.found += tensors((args, kwargs))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.mutated += tensors(value)
        return func(*args, **(kwargs or {}))


class _Names:
    """Names storages after the first node that has one, in the order of its results."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}

    def add(self, node: Node, keys: list[Any]) -> None:
        for index, key in enumerate(keys):
            self.names.setdefault(key, f"{node.name}.{index}")

    def of(self, keys: Any) -> list[str]:
        return sorted({self.names[k] for k in keys if k in self.names})


def observe(captured: CapturedGraph) -> Found:
    """Run the graph node by node on its own fake inputs."""
    env: dict[Node, Any] = {}
    names, found = _Names(), {}
    with captured.fake_mode, torch.no_grad(), enable_python_dispatcher():
        for node in captured.graph.nodes:
            if node.op == "output":
                continue
            inputs = tensors([env[n] for n in node.all_input_nodes])
            versions = [t._version for t in inputs]
            mode = _Touched()
            if node.op == "call_function":
                with mode:
                    env[node] = node.target(*_filled(node.args, env), **_filled(node.kwargs, env))
            else:
                env[node] = _given(node, captured.module)
            written = [t for t, v in zip(inputs, versions, strict=True) if t._version != v]
            given = {_key(t) for t in inputs}
            writes = {_key(t) for t in [*written, *mode.mutated]} & given
            reads = ({_key(t) for t in mode.found} & given) | writes
            results = [_key(t) for t in tensors(env[node])]
            names.add(node, results)
            found[node.name] = (names.of(reads), names.of(writes), names.of(results))
    return found


def declared(captured: CapturedGraph, effects: Effects) -> Found:
    """What `effects_of` says, with storages named as `observe` names them."""
    names, found = _Names(), {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        names.add(node, [_key(t) for t in tensors(value_of(node))])
        access = effects.of(node)
        kinds = (access.reads, access.writes, access.results)
        reads, writes, results = (names.of(map(_storage, keys)) for keys in kinds)
        found[node.name] = (reads, writes, results)
    return found


def _storage(key: Any) -> Any:
    """The storage of a key that names a part of one."""
    return key[0] if isinstance(key, tuple) else key


def differences(captured: CapturedGraph, effects: Effects) -> list[str]:
    """One line for every node on which the two disagree."""
    seen, said = observe(captured), declared(captured, effects)
    return [
        f"{name}: observed reads, writes, results {seen[name]}, declared {said[name]}"
        for name in seen
        if seen[name] != said[name]
    ]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _filled(arguments: Any, env: dict[Node, Any]) -> Any:
    return torch.fx.map_arg(arguments, lambda n: env[n])


def _given(node: Node, module: GraphModule) -> Any:
    """An input as traced; a constant of the module."""
    if node.op == "placeholder":
        return value_of(node)
    value = value_of(node)
    return getattr(module, str(node.target)) if value is None else value
