"""Which tensors of a call hold token rows: found, padded on the way in, cut on the way out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dbo_fx.errors import OptionError


@dataclass(frozen=True)
class TokenRows:
    """How a model's arguments and outputs hold token rows.

    Attributes:
        model: What is called; its signature gives the arguments their names.
        who: The function to name in errors.
        dim: Dimension of the token rows.
        names: Names of the arguments that hold them, or None to go by size.
        pad: Values for added rows by argument name; others get zeros.
    """

    model: Callable[..., Any]
    who: str = "wrap"
    dim: int = 0
    names: tuple[str, ...] | None = None
    pad: Mapping[str, float] | None = None

    @cached_property
    def signature(self) -> inspect.Signature:
        """The signature of the model, not of its compiled form."""
        original = original_of(self.model) or self.model
        target = original.forward if isinstance(original, torch.nn.Module) else original
        return inspect.signature(target)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], int]:
        """Return the ids of the tensors that hold token rows, and the number of rows.

        Raises:
            OptionError: None was found, or those that were named have several sizes.
        """
        where: Any = (args, kwargs)
        if self.names is not None:
            where = self.by_name(args, kwargs, "token_args", self.names)
        found = [t for t in leaves(where) if isinstance(t, Tensor) and t.dim() > self.dim]
        if not found:
            raise OptionError(
                f"{self.who}: found no tensor with a dimension {self.dim} among "
                f"{self.names or 'the arguments'}, wanted at least one that holds token rows. "
                "Pass the tokens as a tensor, or name them with token_args=..."
            )
        rows = int(found[0].shape[self.dim])
        sizes = sorted({int(leaf.shape[self.dim]) for leaf in found})
        if self.names is not None and len(sizes) > 1:
            raise OptionError(
                f"{self.who}: token_args {self.names} have sizes {sizes} along dimension "
                f"{self.dim}, wanted one size. Name only the tensors that hold token rows."
            )
        return {id(t) for t in found if t.shape[self.dim] == rows}, rows

    def by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], option: str, names: Sequence[str]
    ) -> list[Any]:
        """Return the values of the named arguments, however they were passed.

        Raises:
            OptionError: One was not passed.
        """
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        # What the signature collects in **kwargs is still an argument by name.
        given = {**bound, **kwargs}
        missing = [name for name in names if name not in given]
        if missing:
            raise OptionError(
                f"{self.who}: {option} {missing} were not passed, found {sorted(given)}. Pass "
                f"them, or leave their names out of {option}."
            )
        return [given[name] for name in names]

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, float]:
        """The named values for added rows, by the tensors' ids."""
        names = self.pad or {}
        values = self.by_name(args, kwargs, "pad", tuple(names))
        return {id(t): names[name] for name, t in zip(names, values, strict=True)}

    def padded(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tokens: set[int],
        rows: int,
        fill: Mapping[int, float],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every token tensor padded to `rows` and marked dynamic."""

        def pad(leaf: Any) -> Any:
            if id(leaf) not in tokens:
                return leaf
            missing = rows - leaf.shape[self.dim]
            if missing:
                shape = list(leaf.shape)
                shape[self.dim] = missing
                added = leaf.new_full(shape, fill.get(id(leaf), 0))
                leaf = torch.cat([leaf, added], self.dim)
            torch._dynamo.mark_dynamic(leaf, self.dim)
            return leaf

        padded_args: tuple[tuple[Any, ...], dict[str, Any]] = mapped(pad, (args, kwargs))
        return padded_args

    def cut(self, outputs: Any, padded: int, rows: int) -> Any:
        """Return the outputs with only the first `rows` rows where they have the padded number."""

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= self.dim:
                return leaf
            if leaf.shape[self.dim] != padded:
                return leaf
            return leaf.narrow(self.dim, 0, rows)

        return outputs if padded == rows else mapped(cut, outputs)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all leaves, within dataclasses too, which are no containers to pytree."""

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor | type) or not dataclasses.is_dataclass(item):
            return function(item)
        inner = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.init}
        changes = {n: mapped(function, v) for n, v in inner.items()}
        return dataclasses.replace(item, **changes)  # type: ignore[type-var]  # no type: see above

    return pytree.tree_map(leaf, value)


def leaves(value: Any) -> list[Any]:
    """All leaves that `mapped` visits, in its order."""
    found: list[Any] = []
    for item in pytree.tree_leaves(value):
        if isinstance(item, Tensor | type) or not dataclasses.is_dataclass(item):
            found.append(item)
        else:
            fields = [f for f in dataclasses.fields(item) if f.init]
            found += leaves([getattr(item, f.name) for f in fields])
    return found


def original_of(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the module or function that `torch.compile` was given, None if there is none."""
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        module: Callable[..., Any] = compiled._orig_mod
        return module
    function: Callable[..., Any] | None = getattr(compiled, "_torchdynamo_orig_callable", None)
    return function
