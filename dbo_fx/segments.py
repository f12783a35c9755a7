"""Segments, compiled: one artifact in a process for everything that has the same structure.

Layers, microbatches and programs share artifacts, because a segment's graph says nothing of them:
weights are inputs, the size symbol is an argument. So the time to compile does not grow with the
number of layers, and a split program and a sequential one run the same kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from dbo_fx.errors import VerificationError
from dbo_fx.host_code import use_methods
from dbo_fx.passes.lower import structure
from dbo_fx.segment_compilers import (
    EAGER,
    Direct,
    Run,
    check_backend,
    compile_core,
    environment,
    is_bare,
    run_and_look,
)
from dbo_fx.segment_core import Core, call_core, core_of
from dbo_fx.segment_sizes import ALIGNMENT, CoreSizes, core_sizes

_ARTIFACTS: dict[str, Artifact] = {}


class CompiledSegment(nn.Module):
    """A segment that runs compiled code; `body` is what it computes, for people and certificates.

    Attributes:
        body: The segment's graph.
        backend: What compiled it.
        artifact: The compiled core; None where there is nothing to compute.
    """

    def __init__(self, name: str, body: GraphModule, backend: str) -> None:
        """Compile, or take what this process has compiled already."""
        super().__init__()
        self.name, self.body, self.backend = name, body, backend
        core = core_of(body.graph)
        self.artifact = None
        if core.graph is not None:
            self.artifact = _put_in(core, name, backend)
        use_methods(core.outer)
        self._outer = GraphModule({}, core.outer, class_name="Segment")
        self.forward = self._outer.forward

    def extra_repr(self) -> str:
        """One line."""
        return f"{self.name}, {self.backend}"


def body_of(module: nn.Module | None) -> GraphModule | None:
    """The graph that a segment computes, compiled or not; None if the module is no segment."""
    if isinstance(module, CompiledSegment):
        return module.body
    return module if isinstance(module, GraphModule) else None


def artifacts() -> Mapping[str, Artifact]:
    """Everything compiled in this process, by hash."""
    return dict(_ARTIFACTS)


def clear_artifacts() -> None:
    """Forget them: the next program compiles anew."""
    _ARTIFACTS.clear()


@dataclass
class Artifact:
    """A compiled core and what its calls must keep to.

    Attributes:
        run: Takes the size symbols' values, then the tensors.
        name: The first segment that it was compiled for.
        backend: What compiled it.
        symbols: Its size symbols.
        rules: What the compiler assumed about them.
        aligned: Positions of the arguments that it writes and assumes to be aligned.
        results: Shapes and strides of what it returns, over the symbols.
        written: Positions of all arguments that it writes.
        seen: By sizes that were checked, what runs them in less host time than `run`, if anything.
    """

    run: Run
    name: str
    backend: str
    symbols: tuple[sympy.Symbol, ...]
    rules: tuple[sympy.Basic, ...]
    aligned: tuple[int, ...]
    results: tuple[tuple[torch.dtype, tuple[sympy.Expr, ...], tuple[sympy.Expr, ...]], ...]
    written: tuple[int, ...] = ()
    seen: dict[tuple[int, ...], Direct | None] = field(default_factory=dict)

    def function(self) -> Run:
        """The core as a function: it checks each size once, and written inputs every time."""
        run, seen, count = self.run, self.seen, len(self.symbols)
        aligned = tuple(count + i for i in self.aligned)

        def core(*arguments: Any) -> Sequence[Any]:
            for index in aligned:
                if arguments[index].data_ptr() % ALIGNMENT and arguments[index].is_cuda:
                    self._misaligned(index - count)
            sizes = arguments[:count]
            try:
                if sizes not in seen:
                    return self._first(arguments)
                direct = seen[sizes]
                if direct is None or not is_bare():
                    return run(*arguments)
                return direct([*arguments])
            except AssertionError as error:  # Inductor's code compares sizes and strides.
                raise self._wrong(str(error)) from error

        return core

    def broken_by(self, sizes: Mapping[sympy.Symbol, int]) -> sympy.Basic | None:
        """The first assumption of the compiler that does not hold for these sizes."""
        return next((r for r in self.rules if r.subs(sizes) == sympy.false), None)

    def _first(self, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """A call with a new size."""
        sizes = dict(zip(self.symbols, arguments, strict=False))
        rule = self.broken_by(sizes)
        if rule is not None:
            raise VerificationError(
                f"{self.name} as {self.backend} compiled it is not good for {sizes}: the "
                f"compiler assumed {rule}. Capture with a batch of such a size, or compile "
                "with segment_backend='eager'."
            )
        found, direct = run_and_look(
            self.backend, self.run, arguments, [len(self.symbols) + i for i in self.written]
        )
        self._check(found, arguments, sizes)
        self.seen[arguments[: len(self.symbols)]] = direct
        return found

    def _check(
        self, found: Sequence[Any], arguments: Sequence[Any], sizes: Mapping[Any, Any]
    ) -> None:
        """The results must look as they were traced, and lie in memory of their own."""
        taken = {_storage(a) for a in arguments if isinstance(a, torch.Tensor) and a.numel()}
        for index, (dtype, shape, stride) in enumerate(self.results):
            result = found[index]
            wanted = [[int(n.subs(sizes)) for n in part] for part in (shape, stride)]
            steps = [s for n, s in zip(*wanted, strict=True) if n > 1]
            has = [s for n, s in zip(result.shape, result.stride(), strict=True) if n > 1]
            if (result.dtype, list(result.shape)) != (dtype, wanted[0]) or (
                has != steps and result.numel()
            ):
                raise self._wrong(
                    f"result {index} is {result.dtype} {list(result.shape)} with strides "
                    f"{list(result.stride())}; traced was {dtype} {wanted[0]} with {wanted[1]}"
                )
            if result.numel() and _storage(result) in taken:
                raise self._wrong(f"result {index} shares memory with an input or another result")
            taken.add(_storage(result))

    def _wrong(self, what: str) -> VerificationError:
        return VerificationError(
            f"{self.name} as {self.backend} compiled it: {what}. What is compiled relies on it. "
            "Compile with segment_backend='eager', and report the backend."
        )

    def _misaligned(self, index: int) -> None:
        raise VerificationError(
            f"{self.name}: argument {index} of the compiled part is written in place, and does not "
            f"begin at a multiple of {ALIGNMENT} bytes: the compiled code would write a copy of "
            "all of it. Allocate the cache by itself, or slice it at multiples of "
            f"{ALIGNMENT} bytes; or compile with segment_backend='eager'."
        )


def _put_in(core: Core, name: str, backend: str) -> Artifact:
    """Find or compile the artifact, and let the outer graph call it."""
    assert core.graph is not None
    assert core.call is not None
    inputs = [n for n in core.graph.nodes if n.op == "placeholder"]
    sizes = core_sizes(inputs, core.results)
    values = [sizes.value(n) for n in inputs]
    graph = _bare(core.graph, inputs, values, sizes.sizes)
    key = _key(graph, backend, values)
    artifact = _ARTIFACTS.get(key)
    # Compiled for small batches, perhaps, and this graph was captured with a large one.
    if artifact is None or artifact.broken_by(sizes.hints) is not None:
        artifact = _ARTIFACTS[key] = _compile(graph, core, name, backend, sizes, values)
    _call(core, sizes, artifact)
    return artifact


def _compile(
    graph: Graph, core: Core, name: str, backend: str, sizes: CoreSizes, values: list[Any]
) -> Artifact:
    assert sizes.mode.shape_env is not None
    before = len(sizes.mode.shape_env.guards)
    results = tuple(
        (r.dtype, tuple(map(sizes.renamed, r.shape)), tuple(map(sizes.renamed, r.stride())))
        for r in core.results
    )
    module = GraphModule({}, graph)
    run = compile_core(backend, module, [*sizes.sizes, *values], sizes.mode, name)
    rules = tuple(g.expr for g in sizes.mode.shape_env.guards[before:])
    aligned = tuple(i for i in core.written if not values[i].storage_offset())
    return Artifact(run, name, backend, sizes.symbols, rules, aligned, results, core.written)


def _bare(graph: Graph, inputs: list[Node], values: list[Any], sizes: Sequence[Any]) -> Graph:
    """The graph with its sizes as first arguments; only arguments say what was traced."""
    bare = Graph()
    for index, size in enumerate(sizes):
        bare.placeholder(f"size{index}").meta = {"val": size, "example_value": size}
    env: dict[Node, Node] = {}
    for node, value in zip(inputs, values, strict=True):
        env[node] = bare.placeholder(node.name)
        env[node].meta = {"val": value, "example_value": value}
    for node in graph.nodes:
        if node.op == "call_function":
            env[node] = bare.node_copy(node, env.__getitem__)
            env[node].meta = {}
        elif node.op == "output":
            bare.output(tuple(env[n] for n in node.args[0]))
    return bare


def _key(graph: Graph, backend: str, values: Sequence[Any]) -> str:
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    devices = sorted({str(v.device) for v in tensors})
    offsets = [v.storage_offset() for v in tensors]
    text = f"{structure(graph)} {environment(backend)} {devices} {offsets}"
    return hashlib.sha256(text.encode()).hexdigest()


def _call(core: Core, sizes: CoreSizes, artifact: Artifact) -> None:
    """Put the artifact in the place of the outer graph's stand-in."""
    assert core.call is not None
    assert core.call.target is call_core
    with core.outer.inserting_before(core.call):
        numbers = sizes.read(core.outer, core.call.args)
        call = core.outer.call_function(artifact.function(), (*numbers, *core.call.args))
    core.call.replace_all_uses_with(call)
    core.outer.erase_node(core.call)
    for item in list(call.users):
        for cast in list(item.users):
            if _casts_nothing(cast, item):
                cast.replace_all_uses_with(item)
                core.outer.erase_node(cast)


def _casts_nothing(node: Node, item: Node) -> bool:
    """Whether a node casts a result of the core, which has been checked, to the dtype it has."""
    is_cast = node.target is torch.ops.aten.to.dtype and not node.kwargs
    return is_cast and node.args == (item, item.meta["val"].dtype)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


__all__ = [
    "EAGER",
    "Artifact",
    "CompiledSegment",
    "artifacts",
    "body_of",
    "check_backend",
    "clear_artifacts",
]
