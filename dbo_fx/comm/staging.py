"""Memory of every rank of a group that all its ranks read and write, and a barrier among them.

`SymmetricStaging` is torch's symmetric memory: peers' memory is mapped, so a copy into it or out of
it is a peer copy, which the copy engines do. It is the only place that touches that private API.
`SharedStaging` is the same for CPU tensors of processes on one host.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.errors import CommunicationError

HALVES = 2


class Staging(Protocol):
    """Two halves of equal size on every rank."""

    @property
    def half_bytes(self) -> int:
        """Bytes of one half."""

    def half(self, rank: int, index: int) -> Tensor:
        """A rank's half number 0 or 1, as bytes."""

    def barrier(self) -> None:
        """Go on only when all ranks have come here: on CUDA the current stream, else the host."""


class SymmetricStaging:
    """Torch's symmetric memory. Making one is a collective: all ranks of the group, same size.

    Args:
        group: Name of the process group; any backend, its store is used.
        half_bytes: Bytes of one half.
        device: This rank's CUDA device.

    Raises:
        CommunicationError: The ranks cannot map each other's memory.
    """

    def __init__(self, group: str, half_bytes: int, device: torch.device) -> None:
        """Allocate, and exchange the handles."""
        import torch.distributed._symmetric_memory as symmetric

        self.half_bytes = half_bytes
        size = HALVES * half_bytes
        try:
            self._own = symmetric.empty(size, dtype=torch.uint8, device=device)
            self._handle = symmetric.rendezvous(self._own, cast(Any, group))
            ranks = range(groups.world_size(group))
            whole = [self._handle.get_buffer(r, (size,), torch.uint8) for r in ranks]
        except RuntimeError as error:
            raise CommunicationError(
                f"group {group!r}: its ranks cannot map each other's memory ({error}). Copies by "
                "copy engines need peer access between all GPUs of the group, on one host. Use "
                "transport='nccl' otherwise."
            ) from error
        self._halves = [buffer.view(HALVES, half_bytes) for buffer in whole]

    def half(self, rank: int, index: int) -> Tensor:
        """See `Staging`."""
        return self._halves[rank][index]

    def barrier(self) -> None:
        """See `Staging`. One small kernel; all of a group's stand on one stream."""
        self._handle.barrier(channel=0)


class SharedStaging:
    """Files that all processes of one host map. Making one is a collective, as above.

    Args:
        group: Name of a process group that carries CPU tensors.
        half_bytes: Bytes of one half.
        number: How many this rank made for the group before; equal on all ranks.

    Raises:
        CommunicationError: A peer's file is not on this host.
    """

    def __init__(self, group: str, half_bytes: int, number: int) -> None:
        """Make the own file and map everybody's."""
        self.half_bytes = half_bytes
        self._group, self._one = group, torch.zeros(1)
        store, rank = groups.store(group), groups.rank(group)
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        own = os.path.join(folder, f"dbo_fx_{uuid.uuid4().hex}")
        size = HALVES * half_bytes
        self._halves: list[Tensor] = []
        with open(own, "wb") as file:
            file.truncate(size)
        try:
            store.set(f"dbo_fx copy_engine {number} {rank}", own)
            for peer in range(groups.world_size(group)):
                path = store.get(f"dbo_fx copy_engine {number} {peer}").decode()
                self._halves.append(_mapped(path, size, peer).view(HALVES, half_bytes))
            self.barrier()
        finally:
            os.unlink(own)

    def half(self, rank: int, index: int) -> Tensor:
        """See `Staging`."""
        return self._halves[rank][index]

    def barrier(self) -> None:
        """See `Staging`."""
        dist.all_reduce(self._one, group=groups.process_group(self._group))


def _mapped(path: str, size: int, peer: int) -> Tensor:
    if not os.path.exists(path):
        raise CommunicationError(
            f"rank {peer}'s staging memory {path} is not on this host. The CPU twin of copy_engine "
            "needs all ranks on one host, as peer copies do; use transport='gloo' otherwise."
        )
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
