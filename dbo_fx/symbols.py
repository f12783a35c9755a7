"""The one place that reads symbolic sizes and fake tensors, most of which is private API of torch.

`tests/test_torch_adapters.py` fails loudly when one of these moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import ShapeGuard, SLoc
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.utils._sympy import functions as _size_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

__all__ = [
    "SIZE_FUNCTIONS",
    "START",
    "ConcreteSizes",
    "FakeTensorMode",
    "SizeRules",
    "SymbolFacts",
    "are_equal_parts",
    "coefficient",
    "enable_python_dispatcher",
    "expression",
    "fake_base",
    "fake_mode_of",
    "fake_storage",
    "fake_tensor",
    "free_symbols",
    "hint_of",
    "make_fx",
    "preserve_node_meta",
    "rebuilt_mode",
    "same_storage_key",
    "size_rules",
    "source_name",
    "symbol_facts",
    "symint",
]
# Functions of sizes that sympy itself does not have, by name.
SIZE_FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    name: getattr(_size_functions, name) for name in _size_functions.__all__
}


# Where a microbatch begins in the batch: independent of its size, whatever a node's value says.
START = sympy.Symbol("start", integer=True, nonnegative=True)


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """The size as a sympy expression, with replacements (specialisations) applied."""
    if isinstance(size, torch.SymInt):
        expr: sympy.Expr = size.node.expr
        return expr
    return sympy.Integer(int(size))


def free_symbols(value: Any) -> set[sympy.Symbol]:
    """All size symbols in the shape of a tensor, or in a symbolic number; empty for the rest."""
    if isinstance(value, torch.Tensor):
        return {s for size in value.shape for s in free_symbols(size)}
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    if isinstance(value, tuple | list):
        return {s for item in value for s in free_symbols(item)}
    return set()


def coefficient(size: sympy.Expr, symbol: sympy.Symbol) -> int | None:
    """`c` if the size is exactly `c * symbol`, else None."""
    ratio = sympy.expand(size) / symbol
    return int(ratio) if ratio.is_Integer else None


def are_equal_parts(part: int | torch.SymInt, count: int, whole: int | torch.SymInt) -> bool:
    """Whether `count` times `part` is `whole`, given the guards recorded so far.

    `s // 2` is half of `s` only where tracing assumed that `s % 2 == 0`.
    """
    one, all_of_it = expression(part), expression(whole)
    if one * count == all_of_it:
        return True
    if type(one).__name__ not in ("FloorDiv", "CleanDiv") or not isinstance(part, torch.SymInt):
        return False
    base, divisor = one.args
    assumed = [g.expr for g in part.node.shape_env.guards if isinstance(g.expr, sympy.Equality)]
    zero = [e.lhs for e in assumed if e.rhs == 0 and type(e.lhs).__name__ in ("Mod", "PythonMod")]
    exact = any(mod.args == (base, divisor) for mod in zero)
    return bool(exact and base * count == all_of_it * divisor)


def hint_of(size: torch.SymInt) -> int | None:
    """The value that a symbolic size had when it was traced."""
    hint = size.node.hint
    return None if hint is None else int(hint)


def symint(expr: sympy.Expr, like: torch.SymInt) -> torch.SymInt | int:
    """A symbolic size with this expression, in the shape environment of `like`."""
    result: torch.SymInt | int = like.node.shape_env.create_symintnode(expr, hint=None)
    return result


def fake_mode_of(value: Any) -> FakeTensorMode | None:
    """The mode a fake tensor belongs to; None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def same_storage_key(tensor: torch.Tensor) -> int:
    """A key equal for two fake tensors exactly when they share storage (while both are alive)."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class SizeRules:
    """What tracing assumed about one size symbol: a closed range and the guards it recorded."""

    symbol: sympy.Symbol
    lower: int
    upper: int | None
    guards: tuple[sympy.Basic, ...]

    def broken_by(self, size: int) -> str | None:
        """The first assumption that does not hold when the symbol has this value, or None."""
        if size < self.lower or (self.upper is not None and size > self.upper):
            upper = "inf" if self.upper is None else str(self.upper)
            return f"{self.symbol} in [{self.lower}, {upper}]"
        for guard in self.guards:
            truth = guard.subs({self.symbol: size})
            if truth == sympy.false:
                return str(guard)
        return None


def size_rules(shape_env: ShapeEnv, symbol: sympy.Symbol) -> SizeRules:
    """Range and guards of `symbol` as recorded so far, without guards on other symbols alone."""
    bounds = shape_env.var_to_range[symbol]
    upper = None if not bounds.upper.is_finite or bounds.upper >= 2**48 else int(bounds.upper)
    guards = tuple(g.expr for g in shape_env.guards if symbol in g.expr.free_symbols)
    return SizeRules(symbol, int(bounds.lower), upper, guards)


class ConcreteSizes:
    """Symbolic sizes as numbers.

    Without given values the split symbol becomes a large prime and every other symbol another one:
    then a size is a multiple of the prime exactly if it follows the split symbol.
    """

    PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117)

    def __init__(
        self,
        symbol: sympy.Symbol,
        size: int | None = None,
        others: dict[sympy.Symbol, int] | None = None,
    ) -> None:
        """Let the split symbol have this size (None: the prime), and some other ones theirs."""
        self.prime = self.PRIMES[0] if size is None else size
        self._symbols: dict[sympy.Symbol, int] = {**(others or {}), symbol: self.prime}
        self._known: dict[sympy.Expr, int | float] = dict(self._symbols)

    def number(self, size: Any) -> Any:
        """A size, or any other value unchanged."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        expr = size.node.expr
        if expr not in self._known:
            for symbol in sorted(expr.free_symbols - self._symbols.keys(), key=str):
                self._symbols[symbol] = self.PRIMES[len(self._symbols) % len(self.PRIMES)]
            value = expr.subs(self._symbols)
            kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
            self._known[expr] = kinds[type(size)](value)
        return self._known[expr]

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """A tensor's sizes."""
        return tuple(s if type(s) is int else self.number(s) for s in tensor.shape)


@dataclass(frozen=True, slots=True)
class SymbolFacts:
    """One size symbol, as plain values.

    Attributes:
        name: Its name.
        assumes: What sympy may assume of it: a key of `ASSUMPTIONS`.
        lower: Least value; None for no limit.
        upper: Largest value; None for no limit.
        hint: The value that it had when it was traced, if there was one.
    """

    name: str
    assumes: str
    lower: int | None
    upper: int | None
    hint: int | None

    @property
    def symbol(self) -> sympy.Symbol:
        """The symbol itself."""
        return sympy.Symbol(self.name, **ASSUMPTIONS[self.assumes])


ASSUMPTIONS: dict[str, dict[str, bool]] = {
    "positive": {"integer": True, "positive": True},
    "nonnegative": {"integer": True, "nonnegative": True},
    "integer": {"integer": True},
    "real": {"real": True},
}


def symbol_facts(shape_env: ShapeEnv, symbol: sympy.Symbol) -> SymbolFacts | None:
    """What the environment knows of a symbol; None if it is of an unknown kind."""
    bounds = shape_env.var_to_range[symbol]
    hint = _hints(shape_env).get(symbol)
    for name, assumed in ASSUMPTIONS.items():
        if sympy.Symbol(symbol.name, **assumed) == symbol:
            lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
            return SymbolFacts(symbol.name, name, lower, upper, None if hint is None else int(hint))
    return None


def _hints(shape_env: ShapeEnv) -> dict[sympy.Symbol, Any]:
    """The values that symbols had when they were traced; torch 2.11 calls the table differently."""
    name = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    hints: dict[sympy.Symbol, Any] = getattr(shape_env, name)
    return hints


def rebuilt_mode(
    symbols: Iterable[SymbolFacts], guards: Iterable[sympy.Basic]
) -> tuple[FakeTensorMode, Callable[[sympy.Expr], torch.SymInt | int]]:
    """A fresh fake mode whose environment knows these symbols and guards.

    Returns:
        The mode, and a function that makes sizes of its environment from expressions.
    """
    shape_env = ShapeEnv()
    for facts in symbols:
        lower = -int_oo if facts.lower is None else facts.lower
        upper = int_oo if facts.upper is None else facts.upper
        shape_env._update_var_to_range(facts.symbol, ValueRanges(lower, upper))
        if facts.hint is not None:
            _hints(shape_env)[facts.symbol] = sympy.Integer(facts.hint)
    for guard in guards:
        shape_env.guards.append(ShapeGuard(guard, SLoc(None, None), False))

    def size(expr: sympy.Expr) -> torch.SymInt | int:
        made: torch.SymInt | int = shape_env.create_symintnode(expr, hint=None)
        return made

    return FakeTensorMode(shape_env=shape_env), size


def fake_storage(size: int | torch.SymInt) -> torch.UntypedStorage:
    """A storage of this many bytes for `fake_tensor`."""
    return torch.empty((size,), dtype=torch.uint8, device="meta").untyped_storage()


def fake_base(count: int | torch.SymInt, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that fills a storage of its own, for `fake_tensor`."""
    return torch.empty((count,), dtype=dtype, device="meta")


def fake_tensor(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage | torch.Tensor,
    shape: Any,
    stride: Any,
    offset: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor that lies in a `fake_storage`; adds no guard, and no mode may be active.

    A fake tensor is a meta tensor that says another device. It is put together by hand, because
    an op under the mode takes ten times as long. A `fake_base` of the same dtype takes a fiftieth
    of what a storage takes, which computes the bytes that symbolic sizes need.
    """
    if isinstance(storage, torch.Tensor):
        assert storage.dtype == dtype
        tensor = storage.as_strided(shape, stride, offset)
    else:
        tensor = torch.empty(0, dtype=dtype, device="meta")
        tensor.set_(storage, offset, shape, stride)
    return FakeTensor(mode, tensor, device)


def source_name(argument: Any) -> str | None:
    """Where Dynamo took a graph input from (`L['self']._parameters['w']`); None if not known.

    Args:
        argument: The placeholder's `meta["grapharg"]`.
    """
    name = getattr(getattr(argument, "source", None), "name", None)
    name = name() if callable(name) else name
    return name if isinstance(name, str) else None
