"""The weights of a loaded program: looked up by name, and compared with what the graph wants."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.errors import GraphFileError, OptionError
from dbo_fx.input_names import InputName, follow

Weights = nn.Module | Mapping[str, Any] | str | os.PathLike[str] | None


def find_weights(wanted: Sequence[tuple[Node, InputName]], weights: Weights) -> list[Tensor]:
    """The tensors of these inputs, in order.

    Args:
        wanted: Inputs and their places.
        weights: The module; a state dict; the path of a `.safetensors` file; or, where the weights
            belong to several modules, a mapping from each root's name to its module.

    Raises:
        GraphFileError: one is missing, or has another shape, dtype, device or layout.
        OptionError: `weights` is of another kind, or a file that cannot be read.
    """
    roots = sorted({place.root for _, place in wanted})
    find = _finder(weights, roots)
    found = []
    for node, place in wanted:
        tensor = find(place)
        if not isinstance(tensor, Tensor):
            raise GraphFileError(
                f"weight {place.dotted} (input {node.name}) is missing: {_advice(weights)}"
            )
        _compare(node, place, tensor)
        found.append(tensor)
    return found


def _finder(weights: Weights, roots: Sequence[str]) -> Callable[[InputName], Any]:
    if weights is None:
        weights = {}
    if isinstance(weights, str | os.PathLike):
        weights = _read(weights)
    if isinstance(weights, nn.Module):
        if len(roots) > 1:
            raise OptionError(
                f"the weights belong to several modules ({', '.join(roots)}), and one was given. "
                f"Pass a mapping: weights={{{roots[0]!r}: ...}}."
            )
        weights = dict.fromkeys(roots, weights)
    if not isinstance(weights, Mapping):
        raise OptionError(
            f"weights is a {type(weights).__name__}; want a module, a state dict or the path of a "
            ".safetensors file."
        )
    given: Mapping[str, Any] = weights

    def find(place: InputName) -> Any:
        owner = given.get(place.root)
        if isinstance(owner, nn.Module):
            try:
                return follow(owner, place.path)
            except (LookupError, AttributeError, TypeError):
                return None
        # With several roots a state dict has to say which one it means.
        return given.get(place.dotted if len(roots) == 1 else str(place))

    return find


def _advice(weights: Weights) -> str:
    if weights is None:
        return "pass load(..., weights=model), a state dict or a .safetensors file."
    if isinstance(weights, nn.Module):
        return "the model has none of that name. Was the program saved from another model?"
    return (
        "it is not among the given ones. A state dict leaves out buffers that are not persistent, "
        "and files keep tied weights once: add it under this name, or pass the model."
    )


def _read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    name = os.fspath(path)
    if not name.endswith(".safetensors"):
        raise OptionError(f"weights={name!r}: a file of weights must end in .safetensors.")
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise OptionError(
            f"weights={name!r} needs the package safetensors: pip install safetensors, or pass the "
            "model or a state dict."
        ) from error
    try:
        return dict(load_file(name))
    except Exception as error:  # Of safetensors' own kind, or an OSError.
        raise OptionError(f"weights={name!r} cannot be read: {error}") from error


def _compare(node: Node, place: InputName, tensor: Tensor) -> None:
    like = value_of(node)
    facts = {
        "shape": (tuple(tensor.shape), tuple(like.shape)),
        "dtype": (tensor.dtype, like.dtype),
        "device": (tensor.device.type, like.device.type),
        "strides": (steps(tensor.shape, tensor.stride()), steps(like.shape, like.stride())),
    }
    for what, (found, wanted) in facts.items():
        if found != wanted:
            raise GraphFileError(
                f"weight {place.dotted} has {what} {found}, and the program was compiled for "
                f"{wanted}. Pass the weights that it was saved with, or compile again."
            )


def steps(shape: Sequence[int], stride: Sequence[int]) -> tuple[int | None, ...]:
    """The strides that matter: where a dim has more than one item."""
    return tuple(step if size > 1 else None for size, step in zip(shape, stride, strict=True))
