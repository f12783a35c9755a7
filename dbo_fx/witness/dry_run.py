"""The first run of an emitted graph, in host order, as the generated Python does it.

It finds out what every node makes, reads and writes, and on which stream it is launched. An op's
schema says what it writes; a segment's writes show in the contents of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dbo_fx.comm import abandon_in_flight, in_flight
from dbo_fx.comm.protocol import begin_region
from dbo_fx.errors import DboError
from dbo_fx.ir import COMP
from dbo_fx.runtime import Runtime
from dbo_fx.witness.tensors import bits, copies, flat, poison_for, storage_of, tensors_in

_HALVES = ("_send", "_recv")


@dataclass
class Done:
    """What the dry run saw of a node.

    Attributes:
        stream: Where it was launched.
        made: Storages that came into being, each with a tensor in it.
        reads: Storages of its arguments.
        writes: Those that it changed.
    """

    stream: str
    made: dict[int, Tensor]
    reads: frozenset[int]
    writes: frozenset[int]

    @property
    def is_work(self) -> bool:
        """Whether it touches memory, rather than making a view or a number."""
        return bool(self.made or self.writes)


class DryRun:
    """Runs a graph in host order and keeps every value.

    Attributes:
        env: The value of every node that ran.
        seen: What every call did.
        known: Every storage, with a tensor in it.
        saved: What the storages of inputs and constants hold before a run.
        problem: What went wrong, or "".
        results: The bits of outputs and inputs behind the run.

    Args:
        module: The emitted module.
        inputs: Its arguments; they are copied.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[Any]) -> None:
        """Run."""
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.inputs = copies(inputs)
        self.env: dict[Node, Any] = {}
        self.seen: dict[Node, Done] = {}
        self.known: dict[int, Tensor] = {}
        self.saved: dict[int, Tensor] = {}
        self.problem = ""
        self.results: tuple[bytes, ...] = ()
        self.stream = COMP
        self.regions: set[tuple[str, str]] = set()
        self.given = iter(self.inputs)
        abandon_in_flight()
        self._run()
        abandon_in_flight()
        self.written = {s for done in self.seen.values() for s in done.writes if s in self.saved}
        self.poisons = {s: poison_for(t) for s, t in self.known.items() if s not in self.saved}

    def call(self, node: Node) -> Any:
        """Do what a node does, with the values as they are now."""
        args = map_arg(node.args, self.env.__getitem__)
        kwargs = map_arg(node.kwargs, self.env.__getitem__)
        if node.op == "call_function":
            assert callable(node.target)
            return node.target(*args, **kwargs)
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))(*args, **kwargs)
        assert node.op == "call_method"
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)

    def is_runtime(self, node: Node) -> bool:
        """Whether the node is a call of the runtime."""
        if node.op != "call_method" or not isinstance(node.args[0], Node):
            return False
        return isinstance(self.env.get(node.args[0]), Runtime)

    def reset(self) -> None:
        """Make memory as it is before a run."""
        abandon_in_flight()
        for storage in self.poisons:
            self.poison(storage)
        for storage in self.written:
            flat(self.known[storage]).copy_(self.saved[storage])

    def poison(self, storage: int) -> None:
        """Overwrite a storage."""
        flat(self.known[storage]).copy_(self.poisons[storage])

    def left_over(self) -> str:
        """What a finished run leaves with the transports that it should not."""
        if in_flight():
            return f"{in_flight()[0]}: sent and never received"
        try:
            for transport, group in self.regions:
                begin_region(transport, [group])
        except DboError as error:
            return f"the next region may not start: {error}"
        return ""

    def _run(self) -> None:
        for node in self.nodes:
            try:
                with torch.no_grad():
                    self._node(node)
            except Exception as error:
                self.problem = f"{node.name} in host order: {error}"
                return
        self.problem = self.left_over()

    def _node(self, node: Node) -> None:
        if node.op == "placeholder":
            self.env[node] = self._live_in(next(self.given))
        elif node.op == "get_attr":
            self.env[node] = self._live_in(_attribute(self.module, str(node.target)))
        elif node.op == "output":
            self.env[node] = map_arg(node.args[0], self.env.__getitem__)
            self.results = bits(tensors_in((self.env[node], self.inputs)))
        elif self.is_runtime(node):
            if node.target == "use":
                self.stream = str(node.args[1])
            elif node.target == "begin":
                self.stream = COMP
        else:
            self._call(node)

    def _live_in(self, value: Any) -> Any:
        for tensor in tensors_in(value):
            storage = storage_of(tensor)
            if storage not in self.known:
                self.known[storage] = tensor
                self.saved[storage] = flat(tensor).clone()
        return value

    def _call(self, node: Node) -> None:
        given = {storage_of(t): t for a in node.all_input_nodes for t in tensors_in(self.env[a])}
        before = {s: bits([flat(t)]) for s, t in given.items()}
        value = self.call(node)
        writes = {s for s, t in given.items() if bits([flat(t)]) != before[s]}
        writes |= self._declared(node)
        results = tensors_in(value)
        made = {storage_of(t): t for t in results if storage_of(t) not in self.known}
        self.known.update(made)
        self.env[node] = value
        self.seen[node] = Done(
            self.stream,
            made,
            frozenset(given),
            frozenset(writes),
        )
        self._note_region(node)

    def _declared(self, node: Node) -> set[int]:
        """Storages that an op's schema says it writes; a segment's show in their contents."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return set()
        found: set[int] = set()
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                real = map_arg(value, self.env.__getitem__)
                found |= {storage_of(t) for t in tensors_in(real)}
        return found

    def _note_region(self, node: Node) -> None:
        if is_half(node):
            given = named_arguments(node)
            if "transport" in given:
                self.regions.add((given["transport"], given["group"]))


def is_half(node: Node) -> bool:
    """Whether the node is a send or a recv of the `dbo_fx` ops."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "dbo_fx":
        return False
    return target._schema.name.endswith(_HALVES)


def named_arguments(node: Node) -> dict[str, Any]:
    """An op's arguments by the names in its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
