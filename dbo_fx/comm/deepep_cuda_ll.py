"""DeepEP's low-latency kernels: the batched layout, one Buffer of two slots for a group.

`LowLatency(DEEPEP_LL)` cuts every operation in two kernels: `send` puts rows on the wire, and the
hook that it returns is `recv`, launched on the stream that was current at the send. Both run on the
compute stream. `LowLatency(DEEPEP_LL_ASYNC)` runs an operation in one piece on the communication
stream. The discipline of slots is told in `deepep_ll.py`.

Both transports share a group's Buffer: a process starts NVSHMEM once. All operations over a group
have one shape class (M, E, H): the class decides where things lie in the Buffer, and counters of
one class are data of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import deepep_package, groups
from dbo_fx.comm.deepep_groups import (
    Opened,
    check_rows,
    open_buffer,
    show,
    wait_for_compute,
)
from dbo_fx.comm.deepep_ibgda import enable_without_infiniband
from dbo_fx.comm.expert_layouts import batched, kind_of
from dbo_fx.contracts import DEEPEP_LL, Contract
from dbo_fx.errors import CommunicationError

HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MOST_CHOICES = 11
DEVICE = "cuda"
_REALIGN = (
    "A step that fails half-way leaves the index where it stopped: call "
    "dbo_fx.comm.abandon_in_flight() on every rank before the next step."
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape class.

    Attributes:
        max_tokens: M.
        experts: E.
        hidden: H.
    """

    max_tokens: int
    experts: int
    hidden: int

    def __str__(self) -> str:
        """`M=128 E=64 H=2048`."""
        return f"M={self.max_tokens} E={self.experts} H={self.hidden}"


@dataclass(slots=True)
class _Buffer:
    """A group's Buffer and the index that its next operation has."""

    shape: Shape
    opened: Opened
    index: int = 0
    unreceived: str = ""
    broken: bool = False


# One for a group, whichever of the two transports uses it: NVSHMEM is started once in a process.
_BUFFERS: dict[str, _Buffer] = {}


@dataclass(frozen=True, slots=True)
class _Sent:
    buffer: _Buffer
    name: str
    hook: Callable[[], None] | None
    arrived: tuple[Tensor, ...]
    held: tuple[Tensor, ...]


def check_choices(name: str, top_k: int) -> None:
    """Refuse more experts a token than the kernels have room for.

    Raises:
        CommunicationError: There are more.
    """
    if top_k > MOST_CHOICES:
        raise CommunicationError(
            f"{name}: found {top_k} experts a token, wanted at most {MOST_CHOICES}."
        )


def check_shape(name: str, shape: Shape, ranks: int) -> None:
    """Refuse what the kernels are not compiled for.

    Raises:
        CommunicationError: Names what was found and what is wanted.
    """
    if shape.hidden not in HIDDEN:
        raise CommunicationError(
            f"{name}: found hidden size {shape.hidden}, DeepEP's low-latency kernels are compiled "
            f"for {', '.join(map(str, HIDDEN))}. Use another transport for this model."
        )
    if shape.max_tokens * ranks % 4:
        raise CommunicationError(
            f"{name}: max_tokens={shape.max_tokens} times {ranks} ranks is not a multiple of 4. "
            f"Choose max_tokens={-(-shape.max_tokens // 4) * 4}."
        )


class LowLatency:
    """DeepEP low latency for CUDA tensors.

    Attributes:
        contract: What it promises.
    """

    def __init__(self, contract: Contract = DEEPEP_LL) -> None:
        """Load nothing yet: the first operation over a group makes its Buffer."""
        self.contract = contract

    @property
    def _has_hooks(self) -> bool:
        return self.contract.max_in_flight == 1

    def unusable(self) -> str | None:
        """Why it cannot be used on this machine; None if nothing speaks against it."""
        why = deepep_package.reason(self.contract.name)
        return None if why is None else str(why)

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> _Sent:
        """Send a batched dispatch or combine.

        Args:
            inputs: As `expert_layouts` says.
            outputs: What `comm_buffers` gave for them.
            collective: A batched exchange.
            group: Name of the process group.
            slot: The slot that is baked into the program.
            name: What to call the operation in errors.

        Returns:
            What `finish` needs.

        Raises:
            CommunicationError: Another layout, sizes that the kernels do not take, it is another
                slot's turn, or an operation is un-received.
        """
        if kind_of(collective) != "batched":
            raise CommunicationError(
                f"{name}: found {collective}, but {self.contract.name} carries the batched layout "
                "only. Use torch.ops.dbo_fx.dispatch_batched and combine_batched."
            )
        dispatches = collective.startswith("batched_dispatch")
        sizes, ids = batched(collective), inputs[1]
        hidden = inputs[0].shape[-1]
        shape = Shape(sizes.max_tokens, sizes.experts, hidden)
        weights = None if dispatches else inputs[2]
        check_choices(name, ids.shape[1])
        check_rows(name, inputs[0], ids, weights)
        found = self._buffer(group, shape, name)
        self._check_turn(found, slot, group, name)
        if not self._has_hooks:
            wait_for_compute(inputs[0].device)
        run = self._dispatch if dispatches else self._combine
        given = [t.contiguous() for t in inputs]
        with found.opened.launching(name) as buffer:
            hook, arrived = run(buffer, found.shape, given, outputs, sizes.fp8)
        found.index ^= 1
        found.unreceived = name if self._has_hooks else ""
        return _Sent(found, name, hook, arrived, tuple(given))

    def _check_turn(self, found: _Buffer, slot: int | None, group: str, name: str) -> None:
        if slot != found.index:
            raise CommunicationError(
                f"{name}: the program sends in slot {slot}, the Buffer of group {group!r} is at "
                f"slot {found.index}. {_REALIGN}"
            )
        if found.unreceived:
            raise CommunicationError(
                f"{name}: {found.unreceived} is not received, and this send would destroy it: its "
                "recv would spin until the trap, about 100 s. Receive every operation before the "
                "next send over this group."
            )

    def _dispatch(
        self,
        buffer: Any,
        shape: Shape,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        fp8: bool,
    ) -> tuple[Callable[[], None] | None, tuple[Tensor, ...]]:
        x, ids = inputs
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, shape.max_tokens, shape.experts, use_fp8=fp8, return_recv_hook=self._has_hooks
        )
        rows, scales = rows if fp8 else (rows, outputs[1])
        return hook, (rows, scales, counts, handle[0], handle[1])

    def _combine(
        self,
        buffer: Any,
        shape: Shape,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        fp8: bool,
    ) -> tuple[Callable[[], None] | None, tuple[Tensor, ...]]:
        y, ids, weights, src, ranges = inputs
        handle = (src, ranges, shape.max_tokens, shape.hidden, shape.experts)
        _, _, hook = buffer.low_latency_combine(
            y, ids, weights, handle, return_recv_hook=self._has_hooks, out=outputs[0]
        )
        return hook, (outputs[0],)

    def finish(self, flight: _Sent, outputs: Sequence[Tensor]) -> None:
        """Launch the receiving kernel, and show what it writes.

        Args:
            flight: What `launch` returned.
            outputs: The outputs that were launched with it.
        """
        if flight.hook is not None:
            with flight.buffer.opened.launching(flight.name):
                flight.hook()
        flight.buffer.unreceived = ""
        if len(outputs) > 1:
            show(outputs, flight.arrived)

    def begin(self, group: str) -> None:
        """Refuse to start a region at slot 1, or while an operation is un-received.

        Args:
            group: Name of the process group.

        Raises:
            CommunicationError: It would, the Buffer must be mended first and a capture runs, or a
                launch failed within DeepEP.
        """
        found = _BUFFERS.get(group)
        if found is None:
            return
        found.opened.require()
        if found.broken:
            self._mend(found, group)
        if found.index != 0:
            raise CommunicationError(
                f"the Buffer of group {group!r} is at slot {found.index}, and every region of a "
                f"{self.contract.name} program starts at slot 0. {_REALIGN}"
            )
        if found.unreceived:
            raise CommunicationError(f"{found.unreceived} is not received. {_REALIGN}")

    def realign(self, group: str | None) -> None:
        """Note which Buffers must be brought back to slot 0; the next eager call does it.

        Kernels cannot be launched here: a capture may just have failed. All ranks do this alike.

        Args:
            group: Name of a process group; None for all Buffers.
        """
        for name, found in _BUFFERS.items():
            if group in (None, name) and (found.index or found.unreceived):
                found.broken = True

    def _mend(self, found: _Buffer, group: str) -> None:
        """Clean both slots' counters, on all ranks, and flip an index that stopped at slot 1."""
        if torch.cuda.is_current_stream_capturing():
            raise CommunicationError(
                f"the Buffer of group {group!r} was left half-way by a step that failed, and "
                "cannot be mended under capture. Call the program once before the capture."
            )
        shape = found.shape
        sizes = shape.max_tokens, shape.hidden, shape.experts
        x = torch.zeros(1, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
        nowhere = torch.full((1, 1), -1, dtype=torch.int64, device=DEVICE)
        with found.opened.launching("mending a step that failed") as buffer:
            buffer.clean_low_latency_buffer(*sizes)
            if found.index:
                buffer.low_latency_dispatch(
                    x, nowhere, shape.max_tokens, shape.experts, use_fp8=False
                )
                buffer.clean_low_latency_buffer(*sizes)
        found.index, found.unreceived, found.broken = 0, "", False

    def _buffer(self, group: str, shape: Shape, name: str) -> _Buffer:
        found = _BUFFERS.get(group)
        if found is not None and found.shape == shape:
            return found
        if found is not None:
            raise CommunicationError(
                f"{name}: found {shape}, but the low-latency Buffer of group {group!r} was made "
                f"for {found.shape}, and two shapes cannot share one. Give all layers one "
                "max_tokens, or give them groups of their own."
            )
        ranks = groups.world_size(group)
        check_shape(name, shape, ranks)
        deep_ep = deepep_package.load()
        opened = open_buffer(
            DEEPEP_LL.name,
            group,
            str(shape),
            lambda: _make(deep_ep, group, shape, ranks),
            lambda: _BUFFERS.pop(group, None),
        )
        _BUFFERS[group] = _Buffer(shape, opened)
        return _BUFFERS[group]


def _make(deep_ep: Any, group: str, shape: Shape, ranks: int) -> Any:
    depth = max(1024, 1 << (2 * (shape.max_tokens + 1) - 1).bit_length())
    os.environ["NVSHMEM_QP_DEPTH"] = str(max(depth, int(os.environ.get("NVSHMEM_QP_DEPTH", 0))))
    needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        shape.max_tokens, shape.hidden, ranks, shape.experts
    )
    local = shape.experts // ranks
    buffer = deep_ep.Buffer(
        groups.process_group(group),
        0,
        needed,
        low_latency_mode=True,
        num_qps_per_rank=local,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )
    enable_without_infiniband(local)
    return buffer
