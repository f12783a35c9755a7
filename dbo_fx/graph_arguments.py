"""The arguments of a captured call: which tensors are copied, where all others lie.

Containers, dataclasses and plain objects with tensors within are looked into, so that an error can
name `past.layers[3].keys`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dbo_fx.errors import SoundnessError

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
        plain: Of an object without tensors, its attributes that are plain values.
    """

    path: str
    value: Any
    place: Place | None = None
    parts: dict[Any, _Piece] | None = None
    copied: bool = False
    plain: dict[Any, Any] = field(default_factory=dict)


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
            # An object without tensors is compared as one.
            return _Piece(path, value, plain=_plain(parts))
        return _Piece(path, value, parts=pieces)

    def static(self) -> Iterator[Tensor]:
        """The tensors that are not copied."""
        for _, tensor in self.named_static():
            yield tensor

    def named_static(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are not copied, with their paths."""
        for piece in self._leaves(self._root):
            if piece.place is not None:
                yield piece.path, piece.value

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
    elif piece.plain:
        now = _plain(_parts(value) or {})
        for key, before in piece.plain.items():
            if key not in now or not _same(now[key], before):
                attribute = _Piece(_join(piece.path, value, key), before)
                raise _changed(attribute, _words(now.get(key)), _words(before))


def _plain(parts: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in parts.items() if isinstance(value, _PLAIN)}


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, _PLAIN) or type(one) is not type(other):
        return False
    return bool(one == other) or (one != one and other != other)  # NaN is equal to itself here.


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
    slots: dict[Any, Any] = {}
    for kind in type(value).__mro__:
        names = getattr(kind, "__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                slots[name] = getattr(value, name)
    own: dict[Any, Any] | None = getattr(value, "__dict__", None)
    return slots | (own or {}) if slots else own


def _join(path: str, value: Any, key: Any) -> str:
    if not path:
        return str(key)
    return f"{path}[{key!r}]" if _is_container(value) else f"{path}.{key}"


def _words(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Enum):
        return str(value)
    size = f" of {len(value)}" if _is_container(value) else ""
    return f"{type(value).__name__}{size}"


def _changed(piece: _Piece, found: str, wanted: str) -> SoundnessError:
    where = f"argument {piece.path!r}" if piece.path else "the arguments"
    found = f"another {found}" if found == wanted else found
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
