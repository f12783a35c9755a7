"""The arguments of a loaded program: found by name, and checked as Dynamo's guards would.

A compiled model is compiled anew for another shape or dtype. A loaded program cannot be, so it
refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dbo_fx.capture import CapturedGraph, source_of, value_of
from dbo_fx.errors import GraphFileError, OptionError, SoundnessError
from dbo_fx.input_names import InputName, follow, input_names
from dbo_fx.saved_weights import steps
from dbo_fx.symbols import ConcreteSizes, expression, free_symbols


class CallInputs:
    """Makes the graph's inputs from the arguments of a call.

    Attributes:
        names: The arguments' names, in the order in which the graph first uses them.
        weights: The inputs that are weights, with their places.

    Args:
        captured: The captured graph.
    """

    def __init__(self, captured: CapturedGraph) -> None:
        """Sort the inputs into weights, arguments and sizes.

        Raises:
            GraphFileError: an input has no place that another process can find.
        """
        self.captured = captured
        self.inputs = captured.placeholders
        self.places = input_names([(n.name, source_of(n)) for n in self.inputs])
        pairs = list(zip(self.inputs, self.places, strict=True))
        self.weights = [(n, p) for n, p in pairs if p is not None and p.is_weight]
        self.arguments = [(n, p) for n, p in pairs if p is not None and not p.is_weight]
        self.names = tuple(dict.fromkeys(place.root for _, place in self.arguments))
        self._seen: set[Any] = set()
        for node, place in self.weights:
            if free_symbols(value_of(node)):
                raise GraphFileError(
                    f"weight {place.dotted} has the symbolic shape {tuple(value_of(node).shape)}. "
                    "Weights must have fixed sizes: compile without dynamic=True."
                )

    def bind(
        self, weights: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The graph's inputs in its order.

        Args:
            weights: By input name.
            args: Arguments in the order of `names`.
            kwargs: Arguments by name.

        Raises:
            OptionError: an argument is missing, unknown or given twice.
            SoundnessError: one has a shape, dtype, device or layout that the program was not
                compiled for.
        """
        given = self._named(args, kwargs)
        values: dict[str, Any] = dict(weights)
        for node, place in self.arguments:
            values[node.name] = _found(place, given[place.root])
        tensors = [(n, values[n.name]) for n, _ in self.arguments]
        for (node, value), (_, place) in zip(tensors, self.arguments, strict=True):
            if isinstance(value_of(node), Tensor) and not isinstance(value, Tensor):
                raise OptionError(f"argument {place} is a {type(value).__name__}, want a tensor.")
        key = tuple(map(_key, (value for _, value in tensors)))
        sizes = self._sizes(tensors)
        if key not in self._seen:
            self._check(tensors, sizes)
            self._seen.add(key)
        return tuple(values[n.name] if n.name in values else _number(n, sizes) for n in self.inputs)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        wanted = f"Arguments: {', '.join(self.names)}."
        if len(args) > len(self.names):
            raise OptionError(f"got {len(args)} arguments, want {len(self.names)}. {wanted}")
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.names:
                raise OptionError(f"unknown argument {name!r}. {wanted}")
            if name in given:
                raise OptionError(f"argument {name!r} is given twice. {wanted}")
            given[name] = value
        missing = [name for name in self.names if name not in given]
        if missing:
            raise OptionError(f"argument {missing[0]!r} is missing. {wanted}")
        return given

    def _sizes(self, tensors: Sequence[tuple[Node, Any]]) -> dict[sympy.Symbol, int]:
        """The value of every size symbol that an input has alone in a dim, or is."""
        sizes: dict[sympy.Symbol, int] = {}
        for node, found in tensors:
            like = value_of(node)
            pairs = [(like, found)]
            if isinstance(like, Tensor) and isinstance(found, Tensor):
                pairs = list(zip(like.shape, found.shape, strict=False))
            for size, number in pairs:
                if isinstance(size, torch.SymInt) and expression(size).is_Symbol:
                    sizes.setdefault(expression(size), int(number))
        return sizes

    def _check(self, tensors: Sequence[tuple[Node, Any]], sizes: dict[sympy.Symbol, int]) -> None:
        split = self.captured.symbol
        if split not in sizes:
            raise SoundnessError(f"no argument has the size {split} that is split.")
        numbers = ConcreteSizes(split, sizes[split], sizes)
        for node, found in tensors:
            like = value_of(node)
            if isinstance(like, Tensor):
                self._compare(node, like, found, numbers)
        environment = self.captured.fake_mode.shape_env
        assert environment is not None
        for symbol, size in sizes.items():
            bounds = environment.var_to_range.get(symbol)
            if bounds is not None and not bounds.lower <= size <= bounds.upper:
                raise SoundnessError(
                    f"size {symbol} is {size}, and the program was compiled for "
                    f"{bounds.lower} to {bounds.upper}."
                )
        for guard in environment.guards:
            if guard.expr.subs(sizes) == sympy.false:
                raise SoundnessError(
                    f"with {', '.join(f'{s} = {v}' for s, v in sizes.items())} the program's "
                    f"assumption {guard.expr} does not hold. Compile it for such a batch."
                )

    def _compare(self, node: Node, like: Tensor, found: Any, sizes: ConcreteSizes) -> None:
        place = next(p for n, p in self.arguments if n is node)
        facts: dict[str, tuple[Any, Any]] = {
            "dtype": (found.dtype, like.dtype),
            "device": (found.device.type, like.device.type),
            "shape": (tuple(found.shape), sizes.shape(like)),
        }
        if tuple(found.shape) == sizes.shape(like):
            stride = [sizes.number(s) for s in like.stride()]
            facts["strides"] = (steps(found.shape, found.stride()), steps(found.shape, stride))
        for what, (is_, wanted) in facts.items():
            if is_ != wanted:
                raise SoundnessError(
                    f"argument {place} has {what} {is_}, and the program was compiled for "
                    f"{wanted} ({tuple(like.shape)}). Pass such a tensor, or compile again."
                )


def _found(place: InputName, value: Any) -> Any:
    try:
        return follow(value, place.path)
    except (LookupError, AttributeError, TypeError) as error:
        raise OptionError(f"argument {place.root!r} holds no {place}: {error}") from error


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _number(node: Node, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """A size that Dynamo passes beside the tensors."""
    return int(expression(value_of(node)).subs(sizes))
