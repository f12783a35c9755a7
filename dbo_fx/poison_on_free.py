"""Runs a program so that a lifetime error shows: memory is overwritten as soon as it is free.

A tensor that Python drops goes back to the allocator at once, for the stream that it was allocated
on. Whoever still reads it, on another stream or through a pointer, reads what comes next there: in
most runs nothing, so that nobody notices. Here something always comes next. At a value's last use
its memory is filled with ones (NaN for every floating point type, -1 for integers), on the stream
that it was allocated on, which is what the allocator may do earliest. A correct program gives the
same results, bit for bit, eager and captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram

ONES = 0xFF


class PoisonOnFree(torch.nn.Module):
    """Runs an emitted module node by node and poisons what nobody names any more.

    Args:
        module: The emitted module. The memory of its inputs, constants and outputs is left alone.
        on_stream: Called when the program has changed to a stream, with the stream's name; to slow
            a stream down, so that the others overtake it.
    """

    def __init__(self, module: GraphModule, on_stream: Callable[[str], None] | None = None) -> None:
        """Look at the graph once."""
        super().__init__()
        self.module = module
        self.runtime = module.runtime
        self.on_stream = on_stream
        self._dying = last_uses(module.graph)

    def forward(self, *args: Any) -> Any:
        """Run with the module's arguments; returns its outputs."""
        memory = _Memory()
        given = iter(args)
        env: dict[Node, Any] = {}
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
                memory.protect(env[node])
            elif node.op == "get_attr":
                env[node] = _attribute(self.module, str(node.target))
                memory.protect(env[node])
            elif node.op == "output":
                return torch.fx.map_arg(node.args[0], env.__getitem__)
            else:
                env[node] = self._call(node, env)
                memory.born(env[node])
            for dead in self._dying[node]:
                memory.dies(env.pop(dead))
        raise AssertionError("a graph has an output")

    def _call(self, node: Node, env: dict[Node, Any]) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "call_module":
            return _attribute(self.module, str(node.target))(*args, **kwargs)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.target == "use" and self.on_stream is not None:
            self.on_stream(str(args[1]))
        return result


class _Memory:
    """Counts who names a storage, and remembers on which stream it was allocated."""

    def __init__(self) -> None:
        self._named = Counter[int]()
        self._streams: dict[int, torch.cuda.Stream | None] = {}
        self._protected: set[int] = set()

    def protect(self, value: Any) -> None:
        """Nobody frees this memory."""
        self._protected.update(_storages(value))

    def born(self, value: Any) -> None:
        """One more value of the program; new memory belongs to the current stream."""
        for address, tensor in _storages(value).items():
            if address not in self._protected:
                self._named[address] += 1
                stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
                self._streams.setdefault(address, stream)

    def dies(self, value: Any) -> None:
        """One value less; with the last one of a storage its memory is free."""
        for address, tensor in _storages(value).items():
            if address in self._protected:
                continue
            self._named[address] -= 1
            if not self._named[address]:
                stream = self._streams.pop(address)
                with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
                    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    empty.set_(tensor.untyped_storage()).fill_(ONES)


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For every node, the values that are named for the last time there, itself if by nobody."""
    dying: dict[Node, list[Node]] = {node: [] for node in graph.nodes}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        dying[max([node, *node.users], key=order.__getitem__)].append(node)
    return dying


def _storages(value: Any) -> dict[int, Tensor]:
    found = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes():
            found[leaf.untyped_storage().data_ptr()] = leaf
    return found


def _attribute(module: torch.nn.Module, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def poison_on_free(
    compiled: CompiledProgram, on_stream: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Let a compiled program run so within the body; a graph captured there stays so.

    Args:
        compiled: The program, from `dbo_fx.compilations()`.
        on_stream: As for `PoisonOnFree`.
    """
    plain = compiled.module
    assert compiled.plan  # Made of the plain module, once.
    compiled.module = PoisonOnFree(plain, on_stream)  # type: ignore[assignment]
    try:
        yield
    finally:
        compiled.module = plain
