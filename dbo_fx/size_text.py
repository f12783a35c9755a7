"""Size expressions as text, and back: `2*s77`, `Eq(Mod(s77, 2), 0)`.

The text is parsed by hand, never evaluated: it may come from a file.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import sympy

from dbo_fx.errors import GraphFileError
from dbo_fx.symbols import SIZE_FUNCTIONS

_FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    **SIZE_FUNCTIONS,
    **{
        f.__name__: f
        for f in (sympy.And, sympy.Or, sympy.Not, sympy.Max, sympy.Min, sympy.Add, sympy.Mul)
    },
    **{f.__name__: f for f in (sympy.Pow, sympy.Abs, sympy.Piecewise, sympy.Rational)},
    "Eq": sympy.Eq,
    "Ne": sympy.Ne,
    "Equality": sympy.Eq,
    "Unequality": sympy.Ne,
    "StrictLessThan": sympy.Lt,
    "LessThan": sympy.Le,
    "StrictGreaterThan": sympy.Gt,
    "GreaterThan": sympy.Ge,
}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.FloorDiv: SIZE_FUNCTIONS["FloorDiv"],
    ast.BitAnd: sympy.And,
    ast.BitOr: sympy.Or,
}
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}


@lru_cache(maxsize=4096)
def size_text(expr: sympy.Basic) -> str:
    """An expression as text that `parse_size` reads back as an equal one.

    Raises:
        GraphFileError: the expression has a function that graph files do not know.
    """
    symbols = {str(s): s for s in expr.free_symbols}
    for text in (str(expr), _functional(expr)):
        try:
            if parse_size(text, symbols) == expr:
                return text
        except GraphFileError:
            continue
    raise GraphFileError(
        f"the size {expr} cannot be saved: it has a function that graph files do not know. "
        f"Known: {', '.join(sorted(_FUNCTIONS))}."
    )


def parse_size(text: str, symbols: Mapping[str, sympy.Symbol]) -> sympy.Basic:
    """Read an expression.

    Args:
        text: What `size_text` made.
        symbols: By name.

    Raises:
        GraphFileError: it is no such text, or has an unknown symbol or function.
    """
    try:
        return _read(ast.parse(text, mode="eval").body, symbols)
    except (SyntaxError, TypeError, ValueError, KeyError, RecursionError) as error:
        if isinstance(error, GraphFileError):
            raise
        raise GraphFileError(f"{text!r} is no size: {error}. Save the graph again.") from error


def _functional(expr: sympy.Basic) -> str:
    """`CleanDiv(s77, 2)`: every function by its own name."""
    if expr.is_Symbol or not expr.args:
        return str(expr)
    inner = ", ".join(map(_functional, expr.args))
    return f"{type(expr).__name__}({inner})"


def _read(node: ast.expr, symbols: Mapping[str, sympy.Symbol]) -> Any:
    match node:
        case ast.Constant(value=bool(value)):
            return sympy.true if value else sympy.false
        case ast.Constant(value=int(value)):
            return sympy.Integer(value)
        case ast.Constant(value=float(value)):
            return sympy.Float(value)
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_read(inner, symbols)
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return sympy.Not(_read(inner, symbols))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_read(left, symbols), _read(right, symbols))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            return _COMPARED[type(op)](_read(left, symbols), _read(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_read(a, symbols) for a in args))
        case ast.Tuple(elts=items):
            return tuple(_read(item, symbols) for item in items)
    raise GraphFileError(f"{ast.unparse(node)!r} is no part of a size. Save the graph again.")
