"""Run every distinct segment once and see how much it holds inside.

What is counted is what the allocator is asked for: the storages of every op's results, also of the
ops that a fused or composite op is made of. The walk in `memory` sees the traced ops only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import value_of
from dbo_fx.certificates.memory import microbatch_sizes, traced_sizes
from dbo_fx.pipeline import State
from dbo_fx.symbols import ConcreteSizes
from dbo_fx.tag import tag_of


def measure_segments(
    state: State, tokens: int, device: torch.device | str | None = None
) -> dict[tuple[str, int], int]:
    """Run each distinct segment once for every number of rows that it gets.

    Args:
        state: The state behind `lower`.
        tokens: Size of the whole batch along the dim that is split.
        device: Where to run; where the graph was traced if left out.

    Returns:
        Peak bytes of what a segment creates, by its name and rows.
    """
    rows = microbatch_sizes(tokens, state.microbatches)
    found: dict[tuple[str, int], int] = {}
    for node in state.graph.nodes:
        if node.op != "call_module":
            continue
        tag = tag_of(node)
        whole = tag is None or tag.microbatch is None
        key = str(node.target), tokens if whole else rows[tag.microbatch]  # type: ignore[index, union-attr]
        if key not in found:
            sizes = ConcreteSizes(state.captured.symbol, key[1], _others(state))
            found[key] = peak_of(state.segments[key[0]], sizes, device)
    return found


def peak_of(segment: GraphModule, sizes: ConcreteSizes, device: torch.device | str | None) -> int:
    """Peak bytes of what one run of a segment creates, its inputs not counted.

    Args:
        segment: The segment.
        sizes: Values of the size symbols.
        device: Where to run; where it was traced if None.
    """
    inputs = [
        _input(value_of(n), sizes, device) for n in segment.graph.nodes if n.op == "placeholder"
    ]
    live = LiveStorages(inputs)
    with torch.no_grad(), live:
        segment(*inputs)
    return live.peak_bytes


def _others(state: State) -> dict[Any, int]:
    return {s: v for s, v in traced_sizes(state.captured).items() if s != state.captured.symbol}


def _input(value: Any, sizes: ConcreteSizes, device: torch.device | str | None) -> Any:
    """Zeros, which are valid as ids and as indices."""
    if not isinstance(value, torch.Tensor):
        return sizes.number(value)
    strides = [sizes.number(s) for s in value.stride()]
    return torch.empty_strided(
        sizes.shape(value), strides, dtype=value.dtype, device=device or value.device
    ).zero_()


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that is created while the mode is on.

    Attributes:
        peak_bytes: The most that was alive behind any op.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        """Do not count the storages of `given`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {_key(t) for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
        self.live: dict[int, tuple[Any, int]] = {}
        self.peak_bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then count."""
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

    def note(self, result: Any) -> int:
        """Take in the storages of a value; return the bytes that are alive."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in self.given:
                storage = tensor.untyped_storage()
                self.live[_key(tensor)] = _weak(storage), storage.nbytes()
        self.live = {k: v for k, v in self.live.items() if not v[0].expired()}
        alive = sum(count for _, count in self.live.values())
        self.peak_bytes = max(self.peak_bytes, alive)
        return alive


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
