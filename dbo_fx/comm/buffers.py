"""What comes out of a collective or an exchange: checked, and allocated uninitialised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dbo_fx.comm import collectives, groups
from dbo_fx.comm.expert_layouts import check_batched, kind_of, outputs_of


def comm_buffers(inputs: Sequence[Tensor], collective: str, group: str) -> list[Tensor]:
    """Allocate the outputs of a collective or exchange on the current stream, uninitialised.

    Args:
        inputs: Tensors of this rank, rows first.
        collective: "all_gather", "reduce_scatter_sum", "all_to_all", or an exchange.
        group: Name of the process group of R ranks.

    Returns:
        For a collective one contiguous tensor for each input, with R times its rows, a 1/R-th of
        them, or as many. For an exchange see `expert_layouts.py`.

    Raises:
        CommunicationError: Unknown collective, rows that do not divide evenly, or too many tokens.
    """
    ranks = groups.world_size(group)
    check(inputs, collective, group, ranks)
    if inputs and inputs[0].is_cuda:
        _COMPUTE[inputs[0].get_device()] = torch.cuda.current_stream(inputs[0].device)
    return _allocated(inputs, collective, ranks)


_COMPUTE: dict[int, torch.cuda.Stream] = {}


def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which a program last allocated its buffers on a device: its compute stream."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _COMPUTE.get(index)


def check(inputs: Sequence[Tensor], collective: str, group: str, ranks: int) -> None:
    """Refuse what the collective or exchange cannot carry, before any rank communicates.

    Raises:
        CommunicationError: See `comm_buffers`.
    """
    if kind_of(collective) == "batched":
        check_batched(collective, inputs, group, ranks)
        return
    plain = _collective(collective)
    for tensor in inputs:
        collectives.check(plain, tensor, group, ranks)


@cache
def _collective(exchange: str) -> str:
    """The collective whose sizes an exchange of rows has."""
    name = exchange.split()[0]
    return {"rows_dispatch": "all_gather", "rows_combine": "reduce_scatter_sum"}.get(name, name)


def buffers(inputs: Sequence[Tensor], collective: str, group: str) -> list[Tensor]:
    """Allocate as `comm_buffers` does, without its checks; sizes may be symbolic."""
    return _allocated(inputs, collective, groups.world_size(group))


def _allocated(inputs: Sequence[Tensor], collective: str, ranks: int) -> list[Tensor]:
    if kind_of(collective) != "collectives":
        return outputs_of(collective, inputs, ranks)
    found = []
    for tensor in inputs:
        rows, *others = tensor.shape
        rows = collectives.output_rows(collective, rows, ranks)
        found.append(tensor.new_empty((rows, *others)))
    return found
