"""Transport by peer copies: the copy engines move the data, matmuls keep their SMs.

Every rank has staging memory that its peers read and write (`staging`), in two halves. One
operation over a group:

    all_gather, all_to_all    copy the own rows into the own half; barrier; copy what the peers have
                              for this rank out of their halves into the outputs
    reduce_scatter_sum        copy every peer's part into its half; barrier; add up what has come

Operations stand on one stream and use the halves in turn. So one barrier is enough: a rank that has
passed operation n - 1's knows that all ranks are done with operation n - 2, which had the same
half. A region (a call or a capture) starts at half 0 behind a barrier of its own, because nobody
knows which half the region before it used last.

SMs do three short things: the barrier, the copies within one GPU, and the sum. All of them run on
the comm stream behind the send, so the recv is an event and may sink to the first use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.poison import poison
from dbo_fx.comm.staging import HALVES, SharedStaging, Staging, SymmetricStaging
from dbo_fx.contracts import COPY_ENGINE, Contract
from dbo_fx.errors import CommunicationError

ALIGNMENT_BYTES = 256
LEAST_BYTES = 1 << 20


def needed_bytes(inputs: Sequence[Tensor]) -> int:
    """Bytes of a half that one operation takes."""
    return sum(_aligned(t.numel() * t.element_size()) for t in inputs)


def exchange(
    staging: Staging,
    index: int,
    collective: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rank: int,
    ranks: int,
) -> None:
    """Run one operation on the current stream (CPU: on the host).

    Args:
        staging: Memory of the group; a half holds at least `needed_bytes(inputs)`.
        index: Which half.
        collective: A name in `collectives.COLLECTIVES`.
        inputs: Contiguous tensors of this rank, rows first.
        outputs: One contiguous tensor for each.
        rank: This rank in the group.
        ranks: R, the size of the group.
    """
    peers = [(rank + step) % ranks for step in range(1, ranks)]
    pairs = list(zip(inputs, outputs, _places(inputs), strict=True))

    def staged(peer: int, place: slice, like: Tensor) -> Tensor:
        return staging.half(peer, index)[place].view(like.dtype).view(like.shape)

    if collective == "reduce_scatter_sum":
        for source, _, place in pairs:
            parts = _parts(source, ranks)
            for peer in peers:
                staged(peer, place, parts)[rank].copy_(parts[peer])
        staging.barrier()
        for source, output, place in pairs:
            parts = _parts(source, ranks)
            _add_up(parts[rank], staged(rank, place, parts), output, rank)
        return
    for source, _, place in pairs:
        staged(rank, place, source).copy_(source)
    staging.barrier()
    for source, output, place in pairs:
        landing = _parts(output, ranks)
        shape = (1, *source.shape) if collective == "all_gather" else landing.shape
        part = 0 if collective == "all_gather" else rank
        for peer in peers:
            landing[peer].copy_(staged(peer, place, source).view(shape)[part])
        landing[rank].copy_(source.view(shape)[part])


def _parts(tensor: Tensor, ranks: int) -> Tensor:
    """[R*n, ...] rows as [R, n, ...]."""
    return tensor.view(ranks, tensor.shape[0] // ranks, *tensor.shape[1:])


def _add_up(own: Tensor, staged: Tensor, output: Tensor, rank: int) -> None:
    """Sum over the ranks in their order; more than two terms are rounded once."""
    if len(staged) == 1:
        output.copy_(own)
    elif len(staged) == 2:
        first, second = (own, staged[1]) if rank == 0 else (staged[0], own)
        torch.add(first, second, out=output)
    else:
        staged[rank].copy_(own)
        torch.sum(staged, 0, dtype=output.dtype, out=output)


def _places(inputs: Sequence[Tensor]) -> Iterator[slice]:
    start = 0
    for tensor in inputs:
        size = tensor.numel() * tensor.element_size()
        yield slice(start, start + size)
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class Link:
    """What one group's operations share.

    Attributes:
        group: The group itself: another one may get its name later.
        staging: The memory in use; None before the first operation.
        outgrown: Smaller memory from before, which captured graphs may still use.
        next: The half of the next operation.
        is_fresh: The next operation starts a region.
        captures: The last operation stood under capture.
        pending: Operations of the CPU twin that nothing has run yet, oldest first.
    """

    group: Any
    staging: Staging | None = None
    outgrown: list[Staging] = field(default_factory=list)
    next: int = 0
    is_fresh: bool = True
    captures: bool = False
    pending: deque[Sent] = field(default_factory=deque)

    def begin(self) -> None:
        """Start a region."""
        self.next, self.is_fresh = 0, True

    def room(self, size: int, make: Callable[[int, int], Staging], capturing: bool) -> Staging:
        """Memory with halves of at least `size` bytes.

        Args:
            size: What the next operation takes.
            make: Makes memory of that many bytes a half, the n-th of this group.
            capturing: The operation stands under capture.

        Raises:
            CommunicationError: There is not enough, and under capture none can be made.
        """
        if self.staging is not None and self.staging.half_bytes >= size:
            return self.staging
        if capturing:
            had = 0 if self.staging is None else self.staging.half_bytes
            raise CommunicationError(
                f"copy_engine: this operation stages {size} bytes, group "
                f"{self.group.group_name!r} has room for {had}. All ranks make room together, "
                "which no capture can hold: run the program once eagerly at this size first."
            )
        rounded = max(LEAST_BYTES, 1 << (size - 1).bit_length())
        made = make(rounded, len(self.outgrown) + (self.staging is not None))
        if self.staging is not None:
            self.outgrown.append(self.staging)
        self.staging = made
        return made

    def turn(self, staging: Staging, capturing: bool = False) -> int:
        """The half of this operation, which becomes the current one."""
        if self.is_fresh or capturing != self.captures:
            self.begin()
            staging.barrier()
        self.is_fresh, self.captures = False, capturing
        index = self.next
        self.next = (index + 1) % HALVES
        return index


class Links:
    """One link for each group, made at its first operation."""

    def __init__(self) -> None:
        """None yet."""
        self._links: dict[str, Link] = {}

    def __getitem__(self, name: str) -> Link:
        """The link of the group that has this name now."""
        group = groups.process_group(name)
        link = self._links.get(name)
        if link is None or link.group is not group:
            link = self._links[name] = Link(group)
        return link

    def known(self, name: str | None) -> list[Link]:
        """The link of a group if it has one; None: all links."""
        return [link for key, link in self._links.items() if name in (None, key)]


def _refuse_pretended(group: str) -> None:
    if groups.is_fake(group):
        raise CommunicationError(
            f"copy_engine: group {group!r} only pretends to have peers, whose memory would be "
            "copied. Use transport='loopback' on one GPU, or a real group."
        )


class CopyEngine:
    """Peer copies between the GPUs of one host.

    Attributes:
        contract: What it promises.
    """

    contract: Contract = COPY_ENGINE

    def __init__(self) -> None:
        """Allocate nothing before a group's first operation."""
        self._links = Links()

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Tensor, ...]:
        """Enqueue one operation on the current stream.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Contiguous outputs, one for each input.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a process group, of any backend.
            slot: Not used: outputs are the program's own buffers.
            name: Not used.

        Returns:
            The tensors that the copies read, to be held until `finish`.

        Raises:
            CommunicationError: The group has no real peers, their memory cannot be mapped, or the
                staging memory is too small under capture.
        """
        _refuse_pretended(group)
        link, device = self._links[group], inputs[0].device
        capturing = torch.cuda.is_current_stream_capturing()
        sources = tuple(t.contiguous() for t in inputs)
        staging = link.room(
            needed_bytes(sources), lambda size, _: SymmetricStaging(group, size, device), capturing
        )
        index = link.turn(staging, capturing)
        rank, ranks = groups.rank(group), groups.world_size(group)
        exchange(staging, index, collective, sources, outputs, rank, ranks)
        return sources

    def finish(self, flight: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> None:
        """Do nothing: the program's wait for the event already made the outputs usable.

        Args:
            flight: What `launch` returned; the caller lets go of it after this.
            outputs: The outputs of the launch.
        """

    def begin(self, group: str) -> None:
        """Let the next operation start at half 0, behind a barrier.

        Args:
            group: Name of the process group.
        """
        self._links[group].begin()

    def realign(self, group: str | None) -> None:
        """Let the next operation start at half 0, behind a barrier.

        Args:
            group: Name of a process group; None for all.
        """
        for link in self._links.known(group):
            link.begin()


@dataclass(slots=True, eq=False)
class Sent:
    """One operation of the twin.

    Attributes:
        name: What to call it in errors.
        run: Does it.
        hidden: What arrives, before anybody sees it.
    """

    name: str
    run: Callable[[], None]
    hidden: tuple[Tensor, ...]
    is_done: bool = False


class CopyEngineTwin:
    """The same operations on CPU tensors, as late and in the order that a comm stream may run them.

    A send only notes its operation and poisons the outputs. A recv runs all operations up to its
    own, oldest first, through memory that the ranks share, and then shows what has arrived.

    Attributes:
        contract: What it promises.
    """

    contract: Contract = COPY_ENGINE

    def __init__(self) -> None:
        """Allocate nothing before a group's first operation."""
        self._links = Links()

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> tuple[Link, Sent]:
        """Note the operation; see `CopyEngine.launch`.

        Args:
            inputs: Tensors of this rank, rows first; copied.
            outputs: Visible outputs, one for each input; poisoned until `finish`.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of a process group that carries CPU tensors.
            slot: Not used.
            name: What to call the operation in errors.

        Returns:
            The group's link, and the operation.

        Raises:
            CommunicationError: The group has no real peers.
        """
        _refuse_pretended(group)
        link = self._links[group]
        # The program orders later writes to the inputs behind the send's event, not behind a recv.
        sources = tuple(t.clone(memory_format=torch.contiguous_format) for t in inputs)
        hidden = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs)

        def run() -> None:
            size = needed_bytes(sources)
            staging = link.room(size, lambda s, n: SharedStaging(group, s, n), False)
            rank, ranks = groups.rank(group), groups.world_size(group)
            index = link.turn(staging)
            exchange(staging, index, collective, sources, hidden, rank, ranks)

        sent = Sent(name, run, hidden)
        link.pending.append(sent)
        for visible in outputs:
            visible.fill_(poison(visible.dtype))
        return link, sent

    def finish(self, flight: tuple[Link, Sent], outputs: Sequence[Tensor]) -> None:
        """Run what is pending up to this operation, and show its result.

        Args:
            flight: What `launch` returned.
            outputs: The visible outputs that were launched with it.

        Raises:
            CommunicationError: The operation was given up meanwhile.
        """
        link, sent = flight
        while not sent.is_done:
            if not link.pending:
                raise CommunicationError(
                    f"{sent.name}: given up by abandon_in_flight() before it was received. "
                    "Start the step again."
                )
            oldest = link.pending.popleft()
            oldest.run()
            oldest.is_done = True
        for visible, real in zip(outputs, sent.hidden, strict=True):
            visible.copy_(real)

    def begin(self, group: str) -> None:
        """Let the next operation start at half 0, behind a barrier.

        Args:
            group: Name of the process group.

        Raises:
            CommunicationError: Operations of an earlier region are not received.
        """
        link = self._links[group]
        if link.pending:
            raise CommunicationError(
                f"{link.pending[0].name} is not received, and a region over group {group!r} "
                "starts. After a step that failed half-way call dbo_fx.comm.abandon_in_flight() "
                "on every rank."
            )
        link.begin()

    def realign(self, group: str | None) -> None:
        """Forget what is pending; the next operation starts at half 0, behind a barrier.

        Args:
            group: Name of a process group; None for all.
        """
        for link in self._links.known(group):
            link.pending.clear()
            link.begin()
