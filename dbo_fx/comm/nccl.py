"""NCCL transport for CUDA tensors: launch on the current stream, receive by an event.

The program makes the comm stream current around `send`, records an event after it and makes the
compute stream wait for that event before `recv`; so nothing here touches streams or events, and
both halves can be captured in a CUDA graph. Outputs must have been allocated on the compute stream
(`comm_buffers`) before the event that the comm stream waits for: allocated on the comm stream they
would go back to its pool while the compute stream still reads them.

An all-to-all leaves out the rank's own block, which a copy on the device moves many times faster
than NCCL's few thread blocks would.

A program that says how many SMs communication gets (`sms comm 4`) has communicators of its own,
whose kernels take at most so many thread blocks, one an SM. These are not launched in clusters,
NCCL's default on Hopper: a cluster waits until one part of the chip (GPC) has room for all of it,
and the SMs that matmuls leave free lie anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dbo_fx.comm import collectives, groups
from dbo_fx.comm.retiring import Independent, ReceivedByEvent
from dbo_fx.contracts import NCCL, Contract
from dbo_fx.errors import CommunicationError
from dbo_fx.sm_limits import comm_sms

_LIMITED: dict[tuple[str, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def limited(group: str, max_ctas: int) -> str:
    """Return the name of a group of the same ranks whose NCCL kernels take at most so many SMs.

    Its first call for a group and a number makes the communicator, on all ranks together.

    Args:
        group: Name of a process group with an NCCL backend.
        max_ctas: The most thread blocks of a kernel; each takes one SM.

    Raises:
        CommunicationError: It does not exist yet, and none can be made under capture.
    """
    base = groups.process_group(group)
    known = _LIMITED.get((group, max_ctas))
    if known is None or known[0] is not base:
        if torch.cuda.is_current_stream_capturing():
            raise CommunicationError(
                f"group {group!r} has no communicator of {max_ctas} SMs yet, and none can be made "
                "under capture: run the program once eagerly first."
            )
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas
        options.config.cga_cluster_size = 0
        made = dist.new_group(
            dist.get_process_group_ranks(base),
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
        )
        known = _LIMITED[group, max_ctas] = base, made
    name = groups.name_of(known[1])
    assert name is not None
    return name


def release_limited() -> None:
    """Destroy the communicators that `limited` made, on all ranks; no graph may use them any more.

    `torch.distributed.destroy_process_group()` of the default group destroys them, too.
    """
    for _, made in _LIMITED.values():
        with suppress(ValueError):  # It went with the default group.
            dist.destroy_process_group(made)
    _LIMITED.clear()


@dataclass(frozen=True, slots=True)
class Nccl(ReceivedByEvent, Independent):
    """NCCL collectives ordered on the caller's stream."""

    contract: Contract = NCCL

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Tensor, ...]:
        """Enqueue the collectives on the current stream.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Contiguous outputs, one for each input.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a process group with an NCCL backend.
            slot: Not used: outputs are the program's own buffers.
            name: Not used: NCCL reports its errors itself.

        Returns:
            The tensors that the collectives read, to be held until `finish`.

        Raises:
            CommunicationError: The group's backend for CUDA tensors is not NCCL, or under capture
                the communicator with the program's number of SMs does not exist yet.
        """
        backend = groups.backend_name(group, "cuda")
        if backend != "nccl":
            raise CommunicationError(
                f"group {group!r} carries CUDA tensors with {backend!r}, wanted 'nccl': only NCCL "
                "keeps the order of the current stream. Create the group with backend 'nccl', or "
                "use transport='copy_engine' on one host."
            )
        if (limit := comm_sms()) is not None:
            group = limited(group, limit)
        sources = tuple(t.contiguous() for t in inputs)
        for output, source in zip(outputs, sources, strict=True):
            if collective == "all_to_all":
                _exchange(output, source, group)
            else:
                # async_op=True would run on NCCL's own stream, outside the program's events.
                collectives.start(collective, output, source, group, asynchronous=False)
        return sources


def _exchange(output: Tensor, source: Tensor, group: str) -> None:
    """All-to-all in equal blocks along dim 0; the own block is copied, not sent.

    Args:
        output: Contiguous, R blocks.
        source: Contiguous, R blocks.
        group: Name of the process group, R ranks.
    """
    output, source = collectives.as_moved(output), collectives.as_moved(source)
    ranks, own = groups.world_size(group), groups.rank(group)
    blocks, places = list(source.chunk(ranks)), list(output.chunk(ranks))
    places[own].copy_(blocks[own])
    blocks[own], places[own] = blocks[own][:0], places[own][:0]
    dist.all_to_all(places, blocks, group=groups.process_group(group))
