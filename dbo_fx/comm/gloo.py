"""Reference transport for CPU tensors: results stay hidden until they are received.

`launch` lets the collective write into buffers nobody else sees and fills the visible outputs with
poison, so that a consumer that the schedule placed too early gives visibly wrong numbers instead
of right ones by luck. Inputs are copied: what is written into them behind the send, or what their
memory becomes, does not reach the peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import collectives
from dbo_fx.comm.poison import poison
from dbo_fx.comm.retiring import Independent
from dbo_fx.contracts import GLOO, Contract


@dataclass(frozen=True, slots=True)
class _Flight:
    """One launch: works to wait for, where they write, and what they read from."""

    works: tuple[Any, ...]
    hidden: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class GlooReference(Independent):
    """Asynchronous gloo collectives with poisoned outputs."""

    contract: Contract = GLOO

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> _Flight:
        """Start the collectives into hidden buffers and poison the visible outputs.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Visible outputs, one for each input.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of the process group.
            slot: Not used: every operation has hidden buffers of its own.
            name: Not used: gloo reports its errors itself.

        Returns:
            The works and the hidden buffers.
        """
        # The contract says that a send has read its inputs; gloo's threads read until the recv.
        sources = tuple(t.clone(memory_format=torch.contiguous_format) for t in inputs)
        hidden = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs)
        works = tuple(
            collectives.start(collective, real, source, group, asynchronous=True)
            for real, source in zip(hidden, sources, strict=True)
        )
        for visible in outputs:
            visible.fill_(poison(visible.dtype))
        return _Flight(works, hidden, sources)

    def finish(self, flight: _Flight, outputs: Sequence[Tensor]) -> None:
        """Wait for the collectives and show their results.

        Args:
            flight: What `launch` returned.
            outputs: The visible outputs that were launched with it.
        """
        for work in flight.works:
            work.wait()
        for visible, real in zip(outputs, flight.hidden, strict=True):
            visible.copy_(real)
