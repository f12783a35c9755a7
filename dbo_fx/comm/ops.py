"""The communication ops of the `dbo_fx` namespace and the table of what is in flight.

Models call `dispatch` and `combine`, or `dispatch_batched` and `combine_batched`. The compiler
replaces each by `comm_buffers`, a `_send` and a `_recv`, which name the collective or exchange
(`expert_layouts.py`) and carry three things that the compiler decides:

* `transport`: the name of what carries them.
* `flight`: tells apart the operations of one kind and group that may be in flight together, so that
  the halves of one operation find each other.
* `slot`: which of the transport's own buffers the operation uses; None where it has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import functional
from dbo_fx.comm.batched import ByCollectives, carries_batched
from dbo_fx.comm.buffers import buffers, comm_buffers
from dbo_fx.comm.expert_layouts import kind_of
from dbo_fx.comm.pairing import PairingTransport
from dbo_fx.comm.protocol import Transport, realign, transport_for
from dbo_fx.errors import CommunicationError

_HALVES = ("dispatch", "combine")
_DECIDED = "str group, str transport, int flight, int? slot=None"
_SEND = f"(Tensor[] inputs, Tensor(a!)[] outputs, str collective, {_DECIDED}) -> ()"
_RECV = f"(Tensor(a!)[] outputs, {_DECIDED}) -> ()"
_SCHEMAS = (
    *functional.SCHEMAS,
    "comm_buffers(Tensor[] inputs, str collective, str group) -> Tensor[]",
    *(f"{kind}_send{_SEND}" for kind in _HALVES),
    *(f"{kind}_recv{_RECV}" for kind in _HALVES),
)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Identity of an operation that was sent and not yet received."""

    group: str
    kind: str
    flight: int

    def __str__(self) -> str:
        """Return the form that error messages use."""
        return f"{self.kind}, flight {self.flight}, group {self.group!r}"


@dataclass(frozen=True, slots=True)
class _Operation:
    """What must stay alive between the halves of one operation."""

    transport: Transport
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    slot: int | None
    launched: Any


# By the fields of `InFlight`: a tuple costs a send and a recv less to make, and to hash.
_IN_FLIGHT: dict[tuple[str, str, int], _Operation] = {}


@cache
def _name(group: str, kind: str, flight: int) -> str:
    """What errors call an operation."""
    return str(InFlight(group, kind, flight))


def in_flight() -> tuple[InFlight, ...]:
    """Return the operations of this process that were sent and not yet received, oldest first."""
    return tuple(InFlight(*key) for key in _IN_FLIGHT)


def abandon_in_flight(*names: str) -> None:
    """Forget un-received operations, after a step that failed half-way.

    Transports with buffers of their own are brought back to where a region starts. The other ranks
    may still wait for this one: use it on all ranks, or before giving up.

    Args:
        names: Names of the process groups that the step used; none stand for all groups.
    """
    for key in list(_IN_FLIGHT):
        if not names or key[0] in names:
            del _IN_FLIGHT[key]
    for name in names or (None,):
        realign(name)


def send(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    collective: str,
    group: str,
    transport: str,
    flight: int,
    slot: int | None = None,
    *,
    kind: str,
) -> None:
    """Launch the first half of a dispatch or combine on the current stream.

    Args:
        inputs: Tensors of this rank, rows first.
        outputs: What `comm_buffers` gave for them; not readable before the `recv`.
        collective: "all_gather", "reduce_scatter_sum", "all_to_all", or an exchange.
        group: Name of the process group.
        transport: Name of what carries it.
        flight: Number that its recv names too.
        slot: Which of the transport's own buffers it uses; None where the transport has none.
        kind: "dispatch" or "combine".

    Raises:
        CommunicationError: The flight was sent and not yet received, the buffers do not fit, the
            transport does not carry this device's tensors, or it is another slot's turn.
    """
    key, name = (group, kind, flight), _name(group, kind, flight)
    if key in _IN_FLIGHT:
        raise CommunicationError(
            f"{name}: sent twice without a receive in between. Call {kind}_recv for this flight "
            "first, or abandon_in_flight() after a step that failed."
        )
    kind_here = kind_of(collective)
    counted = kind_here == "batched" or len(inputs) == len(outputs)
    if not inputs or not counted:
        raise CommunicationError(
            f"{name}: found {len(inputs)} inputs and {len(outputs)} outputs, wanted one output for "
            "each input and at least one. Pass what comm_buffers returned for these inputs."
        )
    carrier = transport_for(inputs[0].device.type, transport)
    _check_slot(name, carrier, slot)
    launched: Any
    if isinstance(carrier, PairingTransport):
        launched = carrier.launch_pair(inputs, outputs, collective, group, name, (kind, flight))
    elif kind_here == "batched" and not carries_batched(carrier):
        launched = ByCollectives(carrier, group, slot, name).launch(inputs, outputs, collective)
    else:
        launched = carrier.launch(inputs, outputs, collective, group, slot, name)
    _IN_FLIGHT[key] = _Operation(carrier, tuple(inputs), tuple(outputs), slot, launched)


def _check_slot(name: str, carrier: Transport, slot: int | None) -> None:
    slots = carrier.contract.slots
    if slots is None and slot is not None:
        raise CommunicationError(
            f"{name}: found slot {slot}, but {carrier.contract.name} has no slots. Leave it out."
        )
    if slots is not None and slot not in range(slots):
        raise CommunicationError(
            f"{name}: found slot {slot}, wanted one of 0..{slots - 1}: the n-th send of a region "
            f"over a group uses slot n modulo {slots}."
        )


def recv(
    outputs: Sequence[Tensor],
    group: str,
    transport: str,
    flight: int,
    slot: int | None = None,
    *,
    kind: str,
) -> None:
    """Retire a sent operation; afterwards its outputs may be read.

    Args:
        outputs: The outputs that were given to the `send`.
        group: Name of the process group.
        transport: Name of what carries it, as given to the `send`.
        flight: Number that was given to the `send`.
        slot: The slot that was given to the `send`.
        kind: "dispatch" or "combine".

    Raises:
        CommunicationError: Nothing was sent under this number, the send had other outputs, another
            transport or another slot, or the transport failed.
    """
    key, name = (group, kind, flight), _name(group, kind, flight)
    if key not in _IN_FLIGHT:
        others = "; ".join(map(str, in_flight())) or "nothing"
        raise CommunicationError(
            f"{name}: received without a send. In flight: {others}. Call {kind}_send for this "
            "flight first."
        )
    operation = _IN_FLIGHT[key]
    carrier = operation.transport.contract.name
    if not _are_same(outputs, operation.outputs):
        raise CommunicationError(
            f"{name}: received into other outputs than were sent. Pass the tensors that "
            f"{kind}_send was given."
        )
    if (transport, slot) != (carrier, operation.slot):
        raise CommunicationError(
            f"{name}: received over {transport} in slot {slot}, but sent over {carrier} in slot "
            f"{operation.slot}. Both halves name the same."
        )
    del _IN_FLIGHT[key]
    launched = operation.launched
    try:
        if isinstance(launched, ByCollectives):
            launched.finish(outputs)
        else:
            operation.transport.finish(launched, outputs)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"{name}: the {carrier} transport failed: {error}. A rank of the group has probably "
            "ended; look at that rank's error first."
        ) from error


def _are_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are the same tensors; through the dispatcher they come as other objects."""
    if len(tensors) == len(others) and all(map(operator.is_, tensors, others)):
        return True
    return [_place(t) for t in tensors] == [_place(t) for t in others]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _fake_nothing(*_: object) -> None:
    return None


# The ops of a program as functions, for callers whom no mode, profiler or tracing watches: the
# dispatcher takes as long as they do.
DIRECT: dict[str, Callable[..., Any]] = {"comm_buffers": comm_buffers}


def _register(library: Any) -> None:
    for schema in _SCHEMAS:
        library.define(schema)
    real: dict[str, Any] = functional.REAL | {"comm_buffers": comm_buffers}
    fake: dict[str, Any] = functional.FAKE | {"comm_buffers": buffers}
    for kind in _HALVES:
        for half in (send, recv):
            named = update_wrapper(partial(half, kind=kind), half)
            real[f"{kind}_{half.__name__}"] = DIRECT[f"{kind}_{half.__name__}"] = named
        fake[f"{kind}_send"] = fake[f"{kind}_recv"] = _fake_nothing
    for name in real:
        for key in ("CPU", "CUDA"):
            library.impl(name, real[name], key)
        torch.library.register_fake(f"dbo_fx::{name}", fake[name], lib=library)


# The registrations live as long as this object.
_LIBRARY = torch.library.Library("dbo_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_register(_LIBRARY)
