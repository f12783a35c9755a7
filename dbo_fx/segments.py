"""Segments, compiled: one artifact in a process for everything that has the same structure.

Layers, microbatches and programs share artifacts, because a segment's graph says nothing of them:
weights are inputs, the size symbol is an argument. So the time to compile does not grow with the
number of layers, and a split program and a sequential one run the same kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from dbo_fx.capture import value_of
from dbo_fx.errors import UnsupportedGraphError, VerificationError
from dbo_fx.passes.lower import structure
from dbo_fx.segment_compilers import EAGER, Run, check_backend, compile_core, environment
from dbo_fx.segment_core import Core, call_core, core_of
from dbo_fx.symbols import (
    FakeTensorMode,
    SymbolFacts,
    coefficient,
    expression,
    fake_mode_of,
    fake_storage,
    fake_tensor,
    free_symbols,
    rebuilt_mode,
    symbol_facts,
)

ALIGNMENT = 16
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


@dataclass(frozen=True)
class _Symbols:
    """The size symbols of a core under names of its own, in a shape environment of its own.

    Compiling adds guards. In Dynamo's environment they would become recompilations on one rank.

    Attributes:
        mode: The fake mode.
        old: The captured graph's symbols, in the core's order; or a quotient of one (`s * 5 // 4`)
            where the core's inputs show nothing else of it.
        new: The core's symbols.
        sizes: The core's symbols as sizes.
        size: Makes a size of an expression over the new symbols.
    """

    mode: FakeTensorMode
    old: tuple[sympy.Expr, ...]
    new: tuple[sympy.Symbol, ...]
    sizes: tuple[Any, ...]
    size: Callable[[sympy.Expr], Any]

    @classmethod
    def of(cls, nodes: Sequence[Node], results: Sequence[torch.Tensor]) -> _Symbols:
        values = [*map(value_of, nodes), *results]
        free = dict.fromkeys(s for v in values for s in _ordered_symbols(v))
        old = tuple(dict.fromkeys(x for s in free for x in _seen_sizes(s, nodes, values)))
        env = next((m.shape_env for v in values if (m := fake_mode_of(v)) is not None), None)
        facts, guards = [], []
        if old:
            assert env is not None
            known = [_facts(env, s) for s in old]
            for index, (symbol, fact) in enumerate(zip(old, known, strict=True)):
                if fact is None:
                    raise UnsupportedGraphError(f"size {symbol} is of an unknown kind")
                facts.append(
                    SymbolFacts(f"s{index}", fact.assumes, fact.lower, fact.upper, fact.hint)
                )
            rename = dict(zip(old, (f.symbol for f in facts), strict=True))
            guards = [
                g.expr.xreplace(rename) for g in env.guards if g.expr.free_symbols <= set(old)
            ]
        mode, size = rebuilt_mode(facts, guards)
        new = tuple(f.symbol for f in facts)
        return cls(mode, old, new, tuple(map(size, new)), size)

    def renamed(self, number: Any) -> sympy.Expr:
        return expression(number).xreplace(dict(zip(self.old, self.new, strict=True)))

    def value(self, old: Any) -> Any:
        """A fake value of the captured graph in this environment."""
        if not isinstance(old, torch.Tensor):
            return self.size(self.renamed(old)) if isinstance(old, torch.SymInt) else old
        shape, stride = ([self.renamed(n) for n in part] for part in (old.shape, old.stride()))
        offset = _misalignment(old)
        last = sum((d - 1) * s for d, s in zip(shape, stride, strict=True))
        bytes_ = (last + 1 + offset) * old.element_size()
        return fake_tensor(
            self.mode,
            fake_storage(self._number(bytes_)),
            [self._number(n) for n in shape],
            [self._number(n) for n in stride],
            offset,
            dtype=old.dtype,
            device=old.device,
        )

    def _number(self, expr: Any) -> Any:
        return int(expr) if sympy.sympify(expr).is_Integer else self.size(expr)


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
    """

    run: Run
    name: str
    backend: str
    symbols: tuple[sympy.Symbol, ...]
    rules: tuple[sympy.Basic, ...]
    aligned: tuple[int, ...]
    results: tuple[tuple[torch.dtype, tuple[sympy.Expr, ...], tuple[sympy.Expr, ...]], ...]
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def function(self) -> Run:
        """The core as a function: it checks each size once, and written inputs every time."""
        run, seen, count = self.run, self.seen, len(self.symbols)
        aligned = tuple(count + i for i in self.aligned)

        def core(*arguments: Any) -> Sequence[Any]:
            for index in aligned:
                if arguments[index].data_ptr() % ALIGNMENT and arguments[index].is_cuda:
                    self._misaligned(index - count)
            try:
                if arguments[:count] in seen:
                    return run(*arguments)
                return self._first(arguments)
            except AssertionError as error:  # Inductor's code compares sizes and strides.
                raise self._wrong(str(error)) from error

        return core

    def _first(self, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """A call with a new size."""
        sizes = dict(zip(self.symbols, arguments, strict=False))
        for rule in self.rules:
            if rule.subs(sizes) == sympy.false:
                raise VerificationError(
                    f"{self.name} as {self.backend} compiled it is not good for {sizes}: the "
                    f"compiler assumed {rule}. Capture with a batch of such a size, or compile "
                    "with segment_backend='eager'."
                )
        found = self.run(*arguments)
        self._check(found, arguments, sizes)
        self.seen.add(arguments[: len(self.symbols)])
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
    symbols = _Symbols.of(inputs, core.results)
    values = [symbols.value(value_of(n)) for n in inputs]
    graph = _bare(core.graph, inputs, values, symbols.sizes)
    key = _key(graph, backend, values)
    if key not in _ARTIFACTS:
        _ARTIFACTS[key] = _compile(graph, core, name, backend, symbols, values)
    artifact = _ARTIFACTS[key]
    _call(core, symbols.old, artifact)
    return artifact


def _compile(
    graph: Graph, core: Core, name: str, backend: str, symbols: _Symbols, values: list[Any]
) -> Artifact:
    assert symbols.mode.shape_env is not None
    before = len(symbols.mode.shape_env.guards)
    module = GraphModule({}, graph)
    run = compile_core(backend, module, [*symbols.sizes, *values], symbols.mode, name)
    rules = tuple(g.expr for g in symbols.mode.shape_env.guards[before:])
    results = tuple(
        (
            r.dtype,
            tuple(map(symbols.renamed, r.shape)),
            tuple(map(symbols.renamed, r.stride())),
        )
        for r in core.results
    )
    aligned = tuple(i for i in core.written if not values[i].storage_offset())
    return Artifact(run, name, backend, symbols.new, rules, aligned, results)


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


def _call(core: Core, symbols: Sequence[sympy.Expr], artifact: Artifact) -> None:
    """Put the artifact in the place of the outer graph's stand-in."""
    assert core.call is not None
    given = [a for a in core.call.args if isinstance(a, Node)]
    with core.outer.inserting_before(core.call):
        sizes = [_size(core.outer, symbol, given) for symbol in symbols]
        call = core.outer.call_function(artifact.function(), (*sizes, *core.call.args))
    assert core.call.target is call_core
    core.call.replace_all_uses_with(call)
    core.outer.erase_node(core.call)


def _size(outer: Graph, symbol: sympy.Expr, given: Sequence[Node]) -> Node:
    """The value of a size symbol: an argument, or read off a tensor's shape."""
    for node in given:
        if isinstance(value_of(node), torch.SymInt) and expression(value_of(node)) == symbol:
            return node
    found = _shown(symbol, given)
    if found is not None:
        return outer.call_function(size_in, found)
    raise UnsupportedGraphError(
        f"a segment's sizes follow {symbol}, but no input of it is a multiple of {symbol} long. "
        "Compile with segment_backend='eager'."
    )


def _shown(symbol: sympy.Expr, given: Sequence[Node]) -> tuple[Node, int, int] | None:
    """A tensor, a dim of it, and of how many times the symbol that dim is."""
    for node in given:
        value = value_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            times = coefficient(expression(size), symbol)
            if times is not None and times > 0:
                return node, dim, times
    return None


def _seen_sizes(
    symbol: sympy.Symbol, given: Sequence[Node], values: Sequence[Any]
) -> tuple[sympy.Expr, ...]:
    """The symbol; or quotients of it, if the inputs show only these and all sizes follow them."""
    passed = [value_of(n) for n in given]
    direct = any(isinstance(v, torch.SymInt) and expression(v) == symbol for v in passed)
    if direct or _shown(symbol, given) is not None:
        return (symbol,)
    numbers = [expression(n) for v in values for n in _numbers(v)]
    parts = {a for n in numbers for a in n.atoms(sympy.Function) if symbol in a.free_symbols}
    shown = sorted((a for a in parts if _shown(a, given) is not None), key=str)
    hidden = {a: sympy.Dummy() for a in shown}
    if any(symbol in n.xreplace(hidden).free_symbols for n in numbers):
        return (symbol,)
    return tuple(shown)


def _facts(env: Any, size: sympy.Expr) -> SymbolFacts | None:
    """What is known of a symbol, or of a quotient, which grows with its symbols."""
    if isinstance(size, sympy.Symbol):
        return symbol_facts(env, size)
    parts = {s: symbol_facts(env, s) for s in size.free_symbols}
    if any(f is None or f.lower is None for f in parts.values()):
        return None
    lower = int(size.subs({s: f.lower for s, f in parts.items() if f is not None}))
    hints = {s: f.hint for s, f in parts.items() if f is not None and f.hint is not None}
    hint = int(size.subs(hints)) if len(hints) == len(parts) else None
    return SymbolFacts("", "positive" if lower > 0 else "nonnegative", lower, None, hint)


def size_in(tensor: torch.Tensor, dim: int, times: int) -> int:
    """The value of a size symbol, of which a tensor's dim is a multiple."""
    return tensor.shape[dim] // times


def _ordered_symbols(value: Any) -> Iterator[sympy.Symbol]:
    for number in _numbers(value):
        yield from sorted(free_symbols(number), key=str)


def _numbers(value: Any) -> tuple[Any, ...]:
    sized = isinstance(value, torch.Tensor)
    return (*value.shape, *value.stride()) if sized else (value,)


def _misalignment(value: torch.Tensor) -> int:
    """Elements by which a tensor begins behind a multiple of 16 bytes, as it was traced."""
    offset, width = value.storage_offset(), value.element_size()
    return offset * width % ALIGNMENT // width if isinstance(offset, int) else 0


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
