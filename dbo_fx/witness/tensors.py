"""Storages that a run can poison, restore and compare, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, while somebody holds the tensor."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def flat(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as one dimension of the tensor's type."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def poison_for(tensor: Tensor) -> Tensor:
    """What to overwrite a tensor's storage with: NaN, -7, or the opposite of what it holds."""
    whole = flat(tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full_like(whole, float("nan"))
    if tensor.dtype == torch.bool:
        return whole.logical_not()
    lowest, highest = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
    return torch.full_like(whole, -7 if lowest < 0 else highest)


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies of nested values; tensors that shared a storage share one again."""
    known: dict[int, torch.UntypedStorage] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        storage = known.setdefault(storage_of(leaf), _cloned(leaf))
        new = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return new.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())

    return [tree_map(copy, value) for value in values]


def _cloned(tensor: Tensor) -> torch.UntypedStorage:
    found: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return found


def bits(tensors: Iterable[Tensor]) -> tuple[bytes, ...]:
    """The contents of tensors; equal bits are equal bytes, NaN included."""
    return tuple(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
