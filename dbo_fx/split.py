"""Which inputs of a model are split, and how: `SplitSpec`.

Every input has a kind. Nothing is guessed and nothing is passed on without one. `SplitSpec.split`
takes the exact shapes that each slice needs, from numbers known to the host; inside a captured
graph `dbo_fx.batch_metadata` computes the metadata kinds instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dbo_fx.batch_metadata import PAD_SLOT
from dbo_fx.errors import OptionError, SoundnessError
from dbo_fx.split_points import BatchShape, Slice

SplitFunction = Callable[[Any, BatchShape, Slice], Any]

# What each kind means; those with a dim take it after a colon, 0 if left out.
KINDS: Mapping[str, str] = {
    "token": "tensor with a token dim: the slice's rows",
    "request": "tensor with a request dim: the rows of the slice's requests",
    "positions": "[T] or [N, T]: the last dim is the token dim",
    "offsets": "table whose row i belongs to token i, T rows or more: from the slice's first token",
    "cu_seqlens": "[R + 1] cumulative query lengths: clamped to the slice, counted from its start",
    "seq_lens": "[R] sequence lengths: without the tokens after the slice",
    "query_lens": "[R] query lengths: clamped to the slice",
    "computed_lens": "[R] computed tokens: with those of earlier slices",
    "block_table": "[R, P] pages: the rows of the slice's requests",
    "slot_mapping": "[T], or without padding: the slice's entries, -1 in the padding",
    "per_request_list": "list or tuple with one entry per request",
    "replicated": "the same for every microbatch",
    "static": "KV cache, weights: the same object, never copied; it must not move",
    "function": "a callable (value, batch, slice) -> value",
}
_WITH_DIM = ("token", "request", "offsets")


@dataclass(frozen=True, slots=True)
class InputKind:
    """How one input is split.

    Attributes:
        name: One of `KINDS`.
        dim: The dim that is sliced, for `token`, `request` and `offsets`.
        function: For `function`.
    """

    name: str
    dim: int | None = None
    function: SplitFunction | None = None

    def __str__(self) -> str:
        """`token:0`, `request:0`, `static`, `function:module.name`."""
        if self.function is not None:
            where = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            return f"function:{where}"
        return self.name if self.dim is None else f"{self.name}:{self.dim}"

    @classmethod
    def parse(cls, field: str, value: str | SplitFunction) -> InputKind:
        """The kind that a text or a function stands for.

        Args:
            field: Name of the input, for the message.
            value: `token:1`, `request`, ..., or a function.

        Raises:
            OptionError: No such kind, or a wrong dim.
        """
        if callable(value):
            return cls("function", None, value)
        name, colon, dim = str(value).partition(":")
        if name == "function":
            raise OptionError(
                f"SplitSpec, input {field!r}: found {value!r}, wanted the function itself: a text "
                "cannot hold it."
            )
        if not isinstance(value, str) or name not in KINDS:
            close = difflib.get_close_matches(name, KINDS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise OptionError(
                f"SplitSpec, input {field!r}: unknown kind {value!r}.{hint} Known: {_known()}."
            )
        if name not in _WITH_DIM:
            if colon:
                raise OptionError(f"SplitSpec, input {field!r}: {name!r} has no dim, drop :{dim}.")
            return cls(name)
        try:
            return cls(name, int(dim) if colon else 0)
        except ValueError:
            raise OptionError(
                f"SplitSpec, input {field!r}: {dim!r} is no dim, wanted an integer: '{name}:0'."
            ) from None


@dataclass(frozen=True, slots=True)
class SplitSpec:
    """The kind of every input.

    Attributes:
        kinds: Pairs of input name and kind, in the order given.
    """

    kinds: tuple[tuple[str, InputKind], ...]

    @classmethod
    def parse(cls, mapping: Mapping[str, str | SplitFunction]) -> SplitSpec:
        """A spec from a plain mapping such as `{"input_ids": "token", "kv_cache": "static"}`.

        Raises:
            OptionError: An unknown kind or a wrong dim; the message names the input.
        """
        return cls(tuple((name, InputKind.parse(name, value)) for name, value in mapping.items()))

    def as_mapping(self) -> dict[str, str | SplitFunction]:
        """The mapping that `parse` reads back."""
        return {name: kind.function or str(kind) for name, kind in self.kinds}

    def __str__(self) -> str:
        """One line per input: its name and its kind."""
        width = max((len(name) for name, _ in self.kinds), default=0)
        return "\n".join(f"{name:<{width}}  {kind}" for name, kind in self.kinds)

    def split(
        self, inputs: Mapping[str, Any], batch: BatchShape, slices: Sequence[Slice]
    ) -> tuple[dict[str, Any], ...]:
        """Each microbatch's inputs.

        Args:
            inputs: The batch's inputs by name; None stays None.
            batch: Shape of the batch. Tensors per request may have more rows, for idle slots; the
                microbatches' tensors have exactly those of their requests.
            slices: The microbatches.

        Returns:
            One dict per slice, with the keys of `inputs`. Token and request slices are views where
            dim 0 is cut; static and replicated values are the same objects.

        Raises:
            OptionError: An input has no kind.
            SoundnessError: A value does not have the size or the type that its kind says.
        """
        kinds = dict(self.kinds)
        unknown = [name for name in inputs if name not in kinds]
        if unknown:
            raise OptionError(
                f"SplitSpec: no kind for input {unknown[0]!r}"
                + (f" (nor for {unknown[1:]})" if unknown[1:] else "")
                + f". Say how it is split, or 'replicated'. Known kinds: {_known()}."
            )
        return tuple(
            {name: _split(name, kinds[name], value, batch, s) for name, value in inputs.items()}
            for s in slices
        )

    def static_addresses(self, inputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Where the tensors of the static inputs lie: take it at capture, check it at replay."""
        return {
            name: tuple(t.data_ptr() for t in tree_leaves(inputs[name]) if isinstance(t, Tensor))
            for name, kind in self.kinds
            if kind.name == "static" and name in inputs
        }

    def check_static(
        self, inputs: Mapping[str, Any], addresses: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Raise if a static input has moved.

        Raises:
            SoundnessError: The message names the input.
        """
        found = self.static_addresses(inputs)
        for name in {**addresses, **found}:
            if found.get(name) != addresses.get(name):
                raise SoundnessError(
                    f"SplitSpec: static input {name!r} lies at {found.get(name)}, wanted "
                    f"{addresses.get(name)} as at capture: a replay would read the old memory. "
                    "Write into the same tensor, or capture anew."
                )


def _known() -> str:
    return ", ".join(f"{name}:DIM" if name in _WITH_DIM else name for name in KINDS)


def _split(name: str, kind: InputKind, value: Any, batch: BatchShape, piece: Slice) -> Any:
    if value is None or kind.name in ("static", "replicated"):
        return value
    if kind.function is not None:
        return kind.function(value, batch, piece)
    low, high = piece.request_start, piece.request_stop
    if kind.name == "per_request_list":
        if not isinstance(value, list | tuple) or len(value) != batch.num_requests:
            found = f"{type(value).__name__} of {len(value) if hasattr(value, '__len__') else '?'}"
            raise _misfit(name, kind, found, f"a list or tuple of {batch.num_requests}")
        return value[low:high]
    if not isinstance(value, Tensor):
        raise _misfit(name, kind, type(value).__name__, "a tensor")
    dim = _sliced_dim(name, kind, value)
    size = value.shape[dim]
    if kind.name in ("token", "positions", "slot_mapping"):
        wanted = {batch.padded_tokens}
        if kind.name == "slot_mapping":
            wanted.add(batch.num_tokens)
        if size not in wanted:
            raise _misfit(name, kind, f"size {size}", f"{' or '.join(map(str, sorted(wanted)))}")
        if kind.name == "slot_mapping":
            return _slots(value, piece)
        return _rows(value, dim, piece.start, piece.stop)
    if kind.name == "offsets":
        if size < batch.padded_tokens:
            raise _misfit(name, kind, f"size {size}", f"at least {batch.padded_tokens}")
        return _rows(value, dim, piece.start, size)
    rows = batch.num_requests + (kind.name == "cu_seqlens")
    if size < rows:
        raise _misfit(name, kind, f"size {size}", f"at least {rows}")
    if kind.name == "cu_seqlens":
        return value[low : high + 1].clamp(piece.start, piece.stop) - piece.start
    if kind.name in ("request", "block_table"):
        return _rows(value, dim, low, high)
    return _lengths(kind.name, value, batch, piece)


def _sliced_dim(name: str, kind: InputKind, value: Tensor) -> int:
    """The sliced dim, if the tensor has the dims that the kind says."""
    if kind.name == "positions":
        if value.dim() not in (1, 2):
            raise _misfit(name, kind, f"{value.dim()} dims", "1 or 2")
        return value.dim() - 1
    if kind.dim is None:
        dims = 2 if kind.name == "block_table" else 1
        if value.dim() != dims:
            raise _misfit(name, kind, f"{value.dim()} dims", str(dims))
        return 0
    if not -value.dim() <= kind.dim < value.dim():
        raise _misfit(name, kind, f"{value.dim()} dims", f"a dim {kind.dim}")
    return kind.dim % value.dim()


def _rows(value: Tensor, dim: int, start: int, stop: int) -> Tensor:
    piece = value.narrow(dim, start, stop - start)
    # Compiled segments and many kernels want contiguous inputs; dim 0 stays a view.
    return piece.contiguous() if dim else piece


def _slots(value: Tensor, piece: Slice) -> Tensor:
    padding = value.new_full((piece.width - piece.num_tokens,), PAD_SLOT)
    return torch.cat([value[piece.start : piece.start + piece.num_tokens], padding])


def _lengths(kind: str, value: Tensor, batch: BatchShape, piece: Slice) -> Tensor:
    """Only the first and the last request of a slice can straddle its ends."""
    lengths = value[piece.request_start : piece.request_stop].clone()
    if piece.num_tokens:
        starts = batch.query_start_loc
        before = max(piece.start - starts[piece.request_start], 0)
        after = max(starts[piece.request_stop] - piece.stop, 0)
        if kind != "seq_lens":
            lengths[0] += before if kind == "computed_lens" else -before
        if kind != "computed_lens":
            lengths[-1] -= after
    return lengths


def _misfit(name: str, kind: InputKind, found: str, wanted: str) -> SoundnessError:
    return SoundnessError(
        f"SplitSpec: input {name!r}, kind {kind}: found {found}, wanted {wanted}. "
        "Mend the kind or the batch's shape."
    )
