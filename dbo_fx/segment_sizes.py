"""The sizes of a core under symbols of its own, in a shape environment of its own.

A core gets the value of every size symbol as an argument, in front of its tensors. Where that value
can be read at run time is found here: off an argument that is a size, or off a tensor's shape.

    x [s, 16, 128], w [...]         s is x.shape[0]
    y [16*s, 4], no other           s is y.shape[0] // 16
    y [4*a*b, 8], no other          only a*b is known: it takes the place of both
    y [(5*s + 3)//4, 8], no other   only the quotient is known: it takes the place of s
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from dbo_fx.capture import size_of, value_of
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.symbols import (
    START,
    FakeTensorMode,
    SymbolFacts,
    expression,
    fake_mode_of,
    fake_storage,
    fake_tensor,
    rebuilt_mode,
    symbol_facts,
)

ALIGNMENT = 16


@dataclass(frozen=True)
class Source:
    """Where the value of a size is read.

    Attributes:
        index: Of the core's argument.
        dim: Of a tensor; None for an argument that is a number.
        times: How often the size is contained there.
        others: Sizes that it is multiplied with there, by their numbers.
    """

    index: int
    dim: int | None
    times: int
    others: tuple[int, ...]


@dataclass(frozen=True)
class CoreSizes:
    """Sizes of a core.

    Compiling adds guards. In Dynamo's environment they would become recompilations on one rank.

    Attributes:
        mode: The core's fake mode.
        symbols: The core's symbols.
        sizes: They as sizes.
        hints: Their values while tracing, as far as they are known.
        sources: Where their values are read.
        rename: From the captured graph's symbols.
        size: Makes a size of an expression over the core's symbols.
    """

    mode: FakeTensorMode
    symbols: tuple[sympy.Symbol, ...]
    sizes: tuple[Any, ...]
    hints: dict[sympy.Symbol, int]
    sources: tuple[Source, ...]
    rename: dict[sympy.Symbol, sympy.Expr]
    size: Callable[[sympy.Expr], Any]

    def renamed(self, number: Any) -> sympy.Expr:
        """A size of the captured graph over the core's symbols.

        Raises:
            UnsupportedGraphError: it follows something that no input tells.
        """
        return self._renamed(expression(number))

    def _renamed(self, old: sympy.Expr) -> sympy.Expr:
        found = old.xreplace(self.rename)
        if not found.free_symbols <= set(self.symbols):
            raise UnsupportedGraphError(
                f"a segment has the size {old}, which cannot be read off the shapes "
                "of its inputs. Compile with segment_backend='eager'."
            )
        return found

    def value(self, node: Node) -> Any:
        """What was traced for an input, in the core's environment."""
        old = value_of(node)
        if not isinstance(old, torch.Tensor):
            return self._number(self._renamed(size_of(node)))
        shape, stride = ([self.renamed(n) for n in part] for part in (old.shape, old.stride()))
        offset = misalignment(old)
        last = sum((d - 1) * s for d, s in zip(shape, stride, strict=True))
        return fake_tensor(
            self.mode,
            fake_storage(self._number((last + 1 + offset) * old.element_size())),
            [self._number(n) for n in shape],
            [self._number(n) for n in stride],
            offset,
            dtype=old.dtype,
            device=old.device,
        )

    def _number(self, expr: Any) -> Any:
        return int(expr) if sympy.sympify(expr).is_Integer else self.size(expr)

    def read(self, outer: Graph, arguments: Sequence[Any]) -> list[Node]:
        """Nodes that read the values, in order."""
        nodes: list[Node] = []
        for source in self.sources:
            given = arguments[source.index]
            if source.dim is None and source.times == 1 and not source.others:
                nodes.append(given)
                continue
            others = [nodes[i] for i in source.others]
            args = (given, source.dim, source.times, *others)
            nodes.append(outer.call_function(size_in, args))
        return nodes


def core_sizes(inputs: Sequence[Node], results: Sequence[torch.Tensor]) -> CoreSizes:
    """Find the sizes of a core.

    Args:
        inputs: Its placeholders.
        results: What was traced for its results.

    Raises:
        UnsupportedGraphError: a size is of an unknown kind.
    """
    values = [*map(value_of, inputs), *results]
    numbers = [size_of(n) for n in inputs if not isinstance(value_of(n), torch.Tensor)]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    numbers += [expression(s) for v in tensors for s in (*v.shape, *v.stride())]
    quotients = _quotients(inputs, numbers)
    shown = [e.xreplace(quotients) for e in numbers]
    free = tuple(dict.fromkeys(s for e in shown for s in sorted(e.free_symbols, key=str)))
    env = next((m.shape_env for v in values if (m := fake_mode_of(v)) is not None), None)
    # Sizes in the bounds of windows that begin where the microbatch begins.
    windows = [n.free_symbols for n in map(size_of_number, inputs) if START in n.free_symbols]
    beside = set[sympy.Symbol]().union(*windows) - {START}
    terms, sources = _solve(free, list(_places(inputs, quotients)))
    behind = {symbol: quotient for quotient, symbol in quotients.items()}
    facts = []
    for index, term in enumerate(terms):
        assert env is not None
        known = [
            _facts_of_quotient(env, behind[s]) if s in behind else _facts(env, s, beside)
            for s in term
        ]
        if None in known:
            raise UnsupportedGraphError(f"size {term[0]} is of an unknown kind")
        facts.append(_product(f"s{index}", [f for f in known if f is not None]))
    new = tuple(f.symbol for f in facts)
    rename: dict[sympy.Symbol, sympy.Expr] = {}
    for term, symbol in zip(terms, new, strict=True):
        rename[behind.get(term[-1], term[-1])] = symbol / sympy.Mul(*term[:-1])
    guards = [g.expr.xreplace(rename) for g in env.guards] if env is not None and new else []
    mode, size = rebuilt_mode(facts, [g for g in guards if g.free_symbols <= set(new)])
    hints = {f.symbol: f.hint for f in facts if f.hint is not None}
    return CoreSizes(mode, new, tuple(map(size, new)), hints, tuple(sources), rename, size)


def _quotients(
    inputs: Sequence[Node], numbers: Sequence[sympy.Expr]
) -> dict[sympy.Expr, sympy.Symbol]:
    """Stand-ins for quotients whose symbols no input shows, if all sizes follow the quotients."""
    plain = {s for *_, factors in _places(inputs, {}) for s in factors}
    hidden = {s for e in numbers for s in e.free_symbols} - plain
    parts = {a for e in numbers for a in e.atoms(sympy.Function) if a.free_symbols & hidden}
    found = {
        part: sympy.Symbol(f"quotient{i}", integer=True, positive=True)
        for i, part in enumerate(sorted(parts, key=str))
    }
    readable = {s for *_, factors in _places(inputs, found) for s in factors}
    found = {part: symbol for part, symbol in found.items() if symbol in readable}
    left = {s for e in numbers for s in e.xreplace(found).free_symbols}
    return {part: s for part, s in found.items() if not part.free_symbols & hidden & left}


def _facts_of_quotient(env: Any, size: sympy.Expr) -> SymbolFacts | None:
    """What is known of a quotient, which grows with its symbols."""
    parts = {s: symbol_facts(env, s) for s in size.free_symbols}
    lowers = {s: f.lower for s, f in parts.items() if f is not None and f.lower is not None}
    hints = {s: f.hint for s, f in parts.items() if f is not None and f.hint is not None}
    if len(lowers) < len(parts) or int(size.subs(lowers)) < 1:
        return None
    hint = int(size.subs(hints)) if len(hints) == len(parts) else None
    return SymbolFacts("", "positive", int(size.subs(lowers)), None, hint)


def size_of_number(node: Node) -> sympy.Expr:
    """A number as an expression; 0 for a tensor."""
    is_tensor = isinstance(value_of(node), torch.Tensor)
    return sympy.Integer(0) if is_tensor else size_of(node)


def _facts(env: Any, symbol: sympy.Symbol, beside: set[sympy.Symbol]) -> SymbolFacts | None:
    """What is known of a symbol; with a window, hints are those of the second half of the batch."""
    if symbol == START:
        hints = [f.hint for s in beside if (f := symbol_facts(env, s)) is not None]
        whole = next((h for h in hints if h is not None), 4)
        return SymbolFacts(START.name, "nonnegative", 0, None, whole - whole // 2)
    facts = symbol_facts(env, symbol)
    if facts is not None and facts.hint is not None and symbol in beside:
        return replace(facts, hint=max(facts.hint // 2 - 1, 2))
    return facts


def size_in(value: Any, dim: int | None, times: int, *others: int) -> int:
    """The value of a size, which is contained in a number or in a tensor's dim."""
    number: int = value if dim is None else value.shape[dim]
    return number // (times * prod(others))


def misalignment(value: torch.Tensor) -> int:
    """Elements by which a tensor begins behind a multiple of 16 bytes, as it was traced."""
    offset, width = value.storage_offset(), value.element_size()
    return offset * width % ALIGNMENT // width if isinstance(offset, int) else 0


Term = tuple[sympy.Symbol, ...]
Place = tuple[int, int | None, int, Term]


def _places(
    inputs: Sequence[Node], quotients: Mapping[sympy.Expr, sympy.Symbol]
) -> Iterator[Place]:
    """Sizes that are a number times a product of symbols: argument, dim, number, symbols."""
    for index, node in enumerate(inputs):
        value = value_of(node)
        sizes: list[tuple[int | None, sympy.Expr]] = []
        if not isinstance(value, torch.Tensor):
            sizes = [(None, size_of(node))]
        else:
            sizes = [(dim, expression(size)) for dim, size in enumerate(value.shape)]
        for dim, size in sizes:
            times, factors = size.xreplace(dict(quotients)).as_coeff_mul()
            plain = times.is_Integer and times > 0 and all(f.is_Symbol for f in factors)
            if factors and plain:
                yield index, dim, int(times), tuple(sorted(factors, key=str))


def _solve(free: Sequence[sympy.Symbol], places: list[Place]) -> tuple[list[Term], list[Source]]:
    """Symbols whose values can be read, and products of the others; both in a fixed order."""
    terms: list[Term] = []
    sources: list[Source] = []
    number: dict[sympy.Symbol, int] = {}
    for most in range(1, len(free) + 1):  # Single symbols first.
        progress = True
        while progress:
            progress = False
            for index, dim, times, factors in places:
                term = tuple(f for f in factors if f not in number)
                if not 0 < len(term) <= most:
                    continue
                others = tuple(sorted({number[f] for f in factors if f in number}))
                if Counter(f for i in others for f in terms[i]) != Counter(factors) - Counter(term):
                    continue
                number.update(dict.fromkeys(term, len(terms)))
                terms.append(term)
                sources.append(Source(index, dim, times, others))
                progress = True
    return terms, sources


def _product(name: str, facts: Sequence[SymbolFacts]) -> SymbolFacts:
    """What is known of a product of sizes."""
    if len(facts) == 1:
        (one,) = facts
        return SymbolFacts(name, one.assumes, one.lower, one.upper, one.hint)
    lowers, uppers, hints = ([getattr(f, k) for f in facts] for k in ("lower", "upper", "hint"))
    return SymbolFacts(
        name,
        "positive",
        prod(max(low or 1, 1) for low in lowers),
        None if None in uppers else prod(uppers),
        None if None in hints else prod(hints),
    )
