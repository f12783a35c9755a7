"""CPU twin of DeepEP's low-latency mode: gloo carries the data, the buffer discipline is LL's.

What a program can get wrong about the kernels (`deepep_cuda_ll.py`) is here exactly as there:

* A communicator has one Buffer of two slots with receive counters. Every operation, dispatch or
  combine, lands in the slot whose turn it is, flips the index and zeroes the other slot's counters.
* So at most one operation may be un-received: the next send destroys it. On a GPU its recv spins
  until the trap; here it raises.
* The index is baked into the program. Every region, a call or a capture, starts at slot 0.
* `send` returns at once, `recv` is a kernel of the current stream, outputs hold poison until then.
* Rows stand by expert with garbage behind them (`expert_layouts.py`): poison.

Unlike the kernels it carries plain collectives, too, so that a program of any model can be tested
under these rules.

Source: `Buffer::low_latency_dispatch`, `low_latency_combine` and `internode_ll.cu` of DeepEP
(`low_latency_buffer_idx ^= 1`, `next_clean`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.batched import ByCollectives
from dbo_fx.comm.expert_layouts import kind_of
from dbo_fx.comm.gloo import GlooReference
from dbo_fx.contracts import DEEPEP_LL, Contract
from dbo_fx.errors import CommunicationError

_REALIGN = (
    "A step that fails half-way leaves the index where it stopped: call "
    "dbo_fx.comm.abandon_in_flight() on every rank before the next step."
)


@dataclass(slots=True, eq=False)
class _Operation:
    """One dispatch or combine of any number of tensors."""

    name: str
    slot: int
    carried: Any
    received: bool = False
    destroyed_by: str | None = None

    def __str__(self) -> str:
        """Name and slot."""
        return f"{self.name} (slot {self.slot})"


@dataclass(slots=True)
class _Slot:
    """One half of a Buffer; `counter` is how many ranks' data have arrived, 0 when cleared."""

    counter: int = 0
    operation: _Operation | None = None


@dataclass(slots=True)
class _Buffer:
    """What one communicator's operations share."""

    index: int = 0
    slots: tuple[_Slot, _Slot] = field(default_factory=lambda: (_Slot(), _Slot()))

    def send(self, operation: _Operation, ranks: int) -> None:
        """Land in the current slot, flip the index, clear the other slot."""
        here, other = self.slots[self.index], self.slots[self.index ^ 1]
        here.counter, here.operation = ranks, operation
        other.counter = 0
        lost = other.operation
        if lost is not None and not lost.received and lost.destroyed_by is None:
            lost.destroyed_by = str(operation)
        self.index ^= 1

    def pass_by(self, operation: _Operation) -> None:
        """Land, be received and flip the index, before anything else is sent."""
        operation.received = True
        self.index ^= 1

    def receive(self, operation: _Operation) -> None:
        """Take the data out of its slot.

        Raises:
            CommunicationError: A later send cleared or overwrote the slot.
        """
        slot = self.slots[operation.slot]
        if slot.operation is not operation or slot.counter == 0:
            raise CommunicationError(
                f"{operation}: destroyed by {operation.destroyed_by}, which was sent before it was "
                "received and cleared its counters. On a GPU this recv would spin until the trap, "
                "about 100 s. Receive every operation before the next send over this group."
            )
        operation.received = True


@dataclass(frozen=True, slots=True)
class _Sent:
    """One operation and the Buffer that it is in."""

    buffer: _Buffer
    operation: _Operation


class LowLatencyTwin:
    """DeepEP low latency for CPU tensors.

    Attributes:
        contract: What it promises: DeepEP's contract, not gloo's. Without a limit of what is in
            flight, as where kernels are not cut in halves, nothing is destroyed.
    """

    def __init__(self, contract: Contract = DEEPEP_LL) -> None:
        """Start without Buffers; a group gets its own with its first operation."""
        self.contract = contract
        self._carrier = GlooReference()
        self._buffers: defaultdict[str, _Buffer] = defaultdict(_Buffer)

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> _Sent:
        """Send all inputs as one operation, in the slot that the program says.

        Args:
            inputs: Tensors of this rank, rows first.
            outputs: Visible outputs, one for each input; poisoned until `finish`.
            collective: A name in `collectives.COLLECTIVES`, or a batched exchange.
            group: Name of the process group.
            slot: The slot that is baked into the program.
            name: What to call the operation in errors.

        Returns:
            What `finish` needs.

        Raises:
            CommunicationError: It is another slot's turn.
        """
        buffer = self._buffers[group]
        if slot != buffer.index:
            raise CommunicationError(
                f"{name}: the program sends in slot {slot}, the Buffer of group {group!r} is at "
                f"slot {buffer.index}. {_REALIGN}"
            )
        if kind_of(collective) == "rows":
            raise CommunicationError(f"{name}: {self.contract.name} carries no {collective}.")
        if kind_of(collective) == "batched":
            run = ByCollectives(self._carrier, group, None, name)
            carried: Any = run.launch(inputs, outputs, collective)
        else:
            carried = self._carrier.launch(inputs, outputs, collective, group, None, name)
        operation = _Operation(name, buffer.index, carried)
        if self.contract.max_in_flight is None:
            buffer.pass_by(operation)
        else:
            buffer.send(operation, groups.world_size(group))
        return _Sent(buffer, operation)

    def finish(self, flight: _Sent, outputs: Sequence[Tensor]) -> None:
        """Show what has arrived.

        Args:
            flight: What `launch` returned.
            outputs: The visible outputs that were launched with it.

        Raises:
            CommunicationError: A later send destroyed it.
        """
        if self.contract.max_in_flight is not None:
            flight.buffer.receive(flight.operation)
        carried = flight.operation.carried
        if isinstance(carried, ByCollectives):
            carried.finish(outputs)
        else:
            self._carrier.finish(carried, outputs)

    def begin(self, group: str) -> None:
        """Refuse to start a region over a Buffer that is not at slot 0, or not received.

        Args:
            group: Name of the process group.

        Raises:
            CommunicationError: The Buffer is at slot 1, or holds what is not received.
        """
        index = self._buffers[group].index
        if index != 0:
            raise CommunicationError(
                f"the Buffer of group {group!r} is at slot {index}, and every region of a "
                f"{self.contract.name} program starts at slot 0. {_REALIGN}"
            )
        for slot in self._buffers[group].slots:
            if slot.counter and slot.operation is not None and not slot.operation.received:
                raise CommunicationError(
                    f"{slot.operation} is not received, and the first send of a region would "
                    f"destroy it. {_REALIGN}"
                )

    def realign(self, group: str | None) -> None:
        """Bring Buffers back to slot 0 and forget what is in them.

        Args:
            group: Name of a process group; None for all Buffers.
        """
        if group is None:
            self._buffers.clear()
        else:
            self._buffers.pop(group, None)
