"""What comes out of a collective or an exchange: checked, and allocated uninitialised."""

from __future__ import annotations

from collections.abc import Sequence

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
    check(inputs, collective, group)
    if inputs and inputs[0].is_cuda:
        _COMPUTE[inputs[0].get_device()] = torch.cuda.current_stream(inputs[0].device)
    return buffers(inputs, collective, group)


_COMPUTE: dict[int, torch.cuda.Stream] = {}


def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which a program last allocated its buffers on a device: its compute stream."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _COMPUTE.get(index)


def check(inputs: Sequence[Tensor], collective: str, group: str) -> None:
    """Refuse what the collective or exchange cannot carry, before any rank communicates.

    Raises:
        CommunicationError: See `comm_buffers`.
    """
    if kind_of(collective) == "batched":
        check_batched(collective, inputs, group, groups.world_size(group))
        return
    name = collective.split()[0]
    plain = {"rows_dispatch": "all_gather", "rows_combine": "reduce_scatter_sum"}.get(name, name)
    for tensor in inputs:
        collectives.check(plain, tensor, group)


def buffers(inputs: Sequence[Tensor], collective: str, group: str) -> list[Tensor]:
    """Allocate as `comm_buffers` does, without its checks; sizes may be symbolic."""
    ranks = groups.world_size(group)
    if kind_of(collective) != "collectives":
        return outputs_of(collective, inputs, ranks)
    return [
        t.new_empty((collectives.output_rows(collective, t.shape[0], ranks), *t.shape[1:]))
        for t in inputs
    ]
