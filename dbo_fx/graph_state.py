"""Puts back what warm-up runs write in place: caches, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dbo_fx.errors import OptionError


@contextmanager
def kept_state(tensors: Iterable[Tensor]) -> Iterator[Callable[[], None]]:
    """Save the memory of tensors; parameters are nobody's cache and left out.

    Args:
        tensors: Anything; whole storages are saved, each once.

    Yields:
        A function that puts back what was saved. It is called at the end, too.

    Raises:
        OptionError: There is no memory for the copies.
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.nbytes():
            storages[storage.data_ptr()] = _bytes(tensor)
    try:
        saved = [(live, live.clone()) for live in storages.values()]
    except torch.OutOfMemoryError as error:
        size = sum(live.numel() for live in storages.values())
        raise OptionError(
            f"CUDA graph: the static arguments hold {size} bytes, and there is no room for a copy "
            "of them during the warm-up. If they hold nothing yet, pass "
            "GraphOptions(keep_state=False)."
        ) from error

    def put_back() -> None:
        for live, copy in saved:
            live.copy_(copy)

    try:
        yield put_back
    finally:
        put_back()


def _bytes(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as bytes."""
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return empty.set_(tensor.untyped_storage())
