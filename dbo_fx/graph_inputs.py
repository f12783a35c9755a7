"""The inputs of captured calls: buffers for token rows, addresses of everything else.

A graph reads the memory that it was captured with. Token rows are copied there before a replay.
Everything else is static: it must be the same memory, with the same shape, or the same value; this
is checked, and an error names the argument.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dbo_fx.errors import SoundnessError
from dbo_fx.token_rows import TokenRows, original_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def place_of(tensor: Tensor) -> Place:
    """What a graph assumes of a tensor: address, shape, strides, dtype, device."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@dataclass(slots=True, eq=False)
class _Piece:
    """One argument or a part of it, as it was at the capture.

    Attributes:
        path: For example `past.layers[0].keys`.
        value: The tensor, or the plain value.
        place: Where a static tensor lies; None for a tensor that is copied.
        parts: Of a container or an object with tensors within, by key; None for a leaf.
        copied: Whether it is a tensor whose values are copied.
    """

    path: str
    value: Any
    place: Place | None = None
    parts: dict[Any, _Piece] | None = None
    copied: bool = False


class Arguments:
    """The arguments of a call as they were at the capture.

    Args:
        bound: Values by argument name.
        copied: Ids of the tensors whose values are copied.

    Attributes:
        copied: These tensors by path, such as `past.layers[0].keys`.
    """

    def __init__(self, bound: Mapping[str, Any], copied: set[int]) -> None:
        """Take addresses and values."""
        self.copied: dict[str, Tensor] = {}
        self._root = self._piece("", dict(bound), copied, ())

    def _piece(self, path: str, value: Any, copied: set[int], within: tuple[int, ...]) -> _Piece:
        if isinstance(value, Tensor):
            if id(value) not in copied:
                return _Piece(path, value, place_of(value))
            self.copied[path] = value
            return _Piece(path, None, copied=True)
        parts = _parts(value)
        if parts is None or id(value) in within:
            return _Piece(path, value)
        within = (*within, id(value))
        is_object = not _is_container(value) and not dataclasses.is_dataclass(value)
        if is_object:  # Its tensors stay where they are: nothing puts a buffer into an object.
            copied = set()
        pieces = {
            k: self._piece(_join(path, value, k), v, copied, within) for k, v in parts.items()
        }
        if is_object and not any(p.place or p.parts for p in pieces.values()):
            return _Piece(path, value)  # An object without tensors is compared as one.
        return _Piece(path, value, parts=pieces)

    def static(self) -> Iterator[Tensor]:
        """The tensors that are not copied."""
        for piece in self._leaves(self._root):
            if piece.place is not None:
                yield piece.value

    def _leaves(self, piece: _Piece) -> Iterator[_Piece]:
        if piece.parts is None:
            yield piece
            return
        for part in piece.parts.values():
            yield from self._leaves(part)

    def check(self, bound: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to copy, by path.

        Raises:
            SoundnessError: A static argument moved or has another value; names it.
        """
        found: dict[str, Tensor] = {}
        _check(self._root, dict(bound), found)
        return found


def _check(piece: _Piece, value: Any, found: dict[str, Tensor]) -> None:
    if piece.parts is not None:
        parts = _parts(value) if type(value) is type(piece.value) else None
        if parts is None or parts.keys() != piece.parts.keys():
            raise _changed(piece, _words(value), _words(piece.value))
        for key, part in piece.parts.items():
            _check(part, parts[key], found)
    elif piece.copied:
        if not isinstance(value, Tensor):
            raise _changed(piece, _words(value), "a tensor")
        found[piece.path] = value
    elif piece.place is not None:
        if not isinstance(value, Tensor):
            raise _changed(piece, _words(value), _words(piece.value))
        if place_of(value) != piece.place:
            raise _moved(piece.path, place_of(value), piece.place)
    elif value is not piece.value and not _same(value, piece.value):
        raise _changed(piece, _words(value), _words(piece.value))


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _parts(value: Any) -> dict[Any, Any] | None:
    """What a container or an object holds, by key; None for what is compared as a whole."""
    if isinstance(value, (*_PLAIN, type)) or callable(value):
        return None
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return getattr(value, "__dict__", None)


def _join(path: str, value: Any, key: Any) -> str:
    if not path:
        return str(key)
    return f"{path}[{key!r}]" if _is_container(value) else f"{path}.{key}"


def _words(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    size = f" of {len(value)}" if _is_container(value) else ""
    return f"{type(value).__name__}{size}"


def _changed(piece: _Piece, found: str, wanted: str) -> SoundnessError:
    where = f"argument {piece.path!r}" if piece.path else "the arguments"
    return SoundnessError(
        f"CUDA graph: {where}: found {found}, the capture had {wanted}, and a replay would use "
        "that. Bring the same, capture again, or name what changes with every step in copied=..."
    )


def _moved(path: str, found: Place, wanted: Place) -> SoundnessError:
    if found[0] != wanted[0]:
        what = f"lies at {found[0]:#x}, the capture read {wanted[0]:#x}"
    else:
        what = f"has {_layout(found)}, the capture read {_layout(wanted)}"
    return SoundnessError(
        f"CUDA graph: static argument {path!r} {what}: a replay would read and write the old "
        "memory. Write into the same tensor, or capture again."
    )


def _layout(place: Place) -> str:
    _, shape, stride, dtype, device = place
    return f"shape {list(shape)}, strides {list(stride)}, {dtype} on {device}"


class Weights:
    """The parameters and buffers of a model, as they lay at the capture.

    Args:
        calls: What was captured; of compiled models, the module behind them.
    """

    def __init__(self, calls: Mapping[str, Any]) -> None:
        """Take addresses."""
        self._paths: list[str] = []
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._tensors: list[Tensor] = []  # Kept: nothing else may get this memory.
        self.buffers: list[Tensor] = []
        seen: set[int] = set()
        for call in calls.values():
            original = original_of(call) or call
            if isinstance(original, nn.Module) and id(original) not in seen:
                seen.add(id(original))
                self._add(original)
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def _add(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        self._paths.append(f"{prefix}.{name}" if prefix else name)
                        self._holders.append(holder)
                        self._names.append(name)
                        self._tensors.append(tensor)
            self.buffers.extend(t for t in module._buffers.values() if t is not None)

    def check(self) -> None:
        """Refuse a weight that has moved.

        Raises:
            SoundnessError: Names it.
        """
        # Every step does this for every weight, so the loops are those of `map`.
        now = list(map(dict.get, self._holders, self._names))
        if all(map(operator.is_, now, self._tensors)):
            places = list(map(Tensor.data_ptr, self._tensors))
            if places == self._addresses:
                return
        for path, tensor, address in zip(self._paths, now, self._addresses, strict=True):
            if tensor is None or tensor.data_ptr() != address:
                where = "nowhere" if tensor is None else f"at {tensor.data_ptr():#x}"
                raise SoundnessError(
                    f"CUDA graph: weight {path!r} lies {where}, the capture read {address:#x}: a "
                    "replay would use the old one. Load weights in place (copy_), or capture again."
                )


@dataclass(slots=True)
class Buffers:
    """The memory that token rows are copied to; smaller buckets use the start of the largest's.

    Attributes:
        dim: Dimension of the token rows.
        storages: By path, memory for the largest bucket.
    """

    dim: int
    storages: dict[str, torch.UntypedStorage] = field(default_factory=dict)

    def buffer(self, path: str, like: Tensor, rows: int | None) -> Tensor:
        """A buffer in this memory.

        Args:
            path: The argument's.
            like: Gives dtype, device and the other sizes.
            rows: Token rows; None for a tensor that is copied whole.
        """
        shape = list(like.shape)
        if rows is not None:
            shape[self.dim] = rows
        with torch.inference_mode(False), torch.no_grad():
            fresh = torch.zeros(shape, dtype=like.dtype, device=like.device)
            known = self.storages.get(path)
            if known is None or known.nbytes() < fresh.untyped_storage().nbytes():
                self.storages[path] = fresh.untyped_storage()
                return fresh
            # No view: Dynamo would guard on what it is a view of.
            empty = torch.empty(0, dtype=like.dtype, device=like.device)
            return empty.set_(known, 0, fresh.shape, fresh.stride())


@dataclass(slots=True)
class StaticInputs:
    """The inputs of one graph.

    Attributes:
        rows: Token rows of the bucket.
        tokens: How to find and pad them.
        arguments: What the capture was given.
        weights: Of the captured calls.
        buffers: The buffers by path, and whether each holds token rows.
        fill: Values for added rows by path.
    """

    rows: int
    tokens: TokenRows
    arguments: Arguments
    weights: Weights
    buffers: dict[str, tuple[Tensor, bool]]
    fill: dict[str, float]

    def check(self, bound: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to copy, by path.

        Raises:
            SoundnessError: Something static moved or changed, or a tensor to copy does not fit.
        """
        found = self.arguments.check(bound)
        rows = {t.shape[self.tokens.dim] for p, t in found.items() if self.buffers[p][1]}
        for path, tensor in found.items():
            buffer, has_rows = self.buffers[path]
            wanted, shape = list(buffer.shape), list(tensor.shape)
            if has_rows and len(shape) == len(wanted):
                wanted[self.tokens.dim] = shape[self.tokens.dim]
            alike = (shape, tensor.dtype, tensor.device) == (wanted, buffer.dtype, buffer.device)
            if not alike or len(rows) > 1:
                raise SoundnessError(
                    f"CUDA graph: argument {path!r} is {tensor.dtype} {shape} on {tensor.device}, "
                    f"the capture had {buffer.dtype} {list(buffer.shape)} on {buffer.device}, and "
                    f"token rows {sorted(rows)} were found. Bring the same but for the token rows, "
                    "equally many everywhere, or capture again."
                )
        return found

    def copy(self, found: Mapping[str, Tensor]) -> None:
        """Copy values into the buffers, rows first, then what padding needs."""
        with torch.no_grad():
            for path, tensor in found.items():
                buffer, has_rows = self.buffers[path]
                rows = tensor.shape[self.tokens.dim] if has_rows else self.rows
                if not has_rows or rows == self.rows:
                    buffer.copy_(tensor, non_blocking=True)
                    continue
                buffer.narrow(self.tokens.dim, 0, rows).copy_(tensor, non_blocking=True)
                added = buffer.narrow(self.tokens.dim, rows, self.rows - rows)
                added.fill_(self.fill.get(path, 0))

    def held(self) -> set[int]:
        """Addresses of the storages of all inputs."""
        tensors = [t for t, _ in self.buffers.values()]
        tensors += list(self.arguments.static())
        return {t.untyped_storage().data_ptr() for t in tensors}
