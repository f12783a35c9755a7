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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import batched, collectives, groups
from dbo_fx.comm.expert_layouts import Batched, check_batched, kind_of, outputs_of
from dbo_fx.comm.poison import poison
from dbo_fx.comm.pairing import PairingTransport
from dbo_fx.comm.protocol import Transport, realign, transport_for
from dbo_fx.errors import CommunicationError

_HALVES = ("dispatch", "combine")
_DECIDED = "str group, str transport, int flight, int? slot=None"
_SEND = f"(Tensor[] inputs, Tensor(a!)[] outputs, str collective, {_DECIDED}) -> ()"
_RECV = f"(Tensor(a!)[] outputs, {_DECIDED}) -> ()"
_SCHEMAS = (
    "dispatch(Tensor x, Tensor ids, Tensor weights, str group, int? num_experts=None)"
    " -> (Tensor, Tensor, Tensor)",
    "dispatch_fp8(Tensor x, Tensor scales, Tensor ids, Tensor weights, str group,"
    " int? num_experts=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "dispatch_batched(Tensor x, Tensor ids, str group, int max_tokens, int num_experts,"
    " bool fp8=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "combine_batched(Tensor y, Tensor ids, Tensor weights, Tensor src, Tensor ranges, str group,"
    " int max_tokens, int num_experts) -> Tensor",
    "combine(Tensor y, SymInt num_tokens, str group) -> Tensor",
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


_IN_FLIGHT: dict[InFlight, _Operation] = {}


def in_flight() -> tuple[InFlight, ...]:
    """Return the operations of this process that were sent and not yet received, oldest first."""
    return tuple(_IN_FLIGHT)


def abandon_in_flight(*names: str) -> None:
    """Forget un-received operations, after a step that failed half-way.

    Transports with buffers of their own are brought back to where a region starts. The other ranks
    may still wait for this one: use it on all ranks, or before giving up.

    Args:
        names: Names of the process groups that the step used; none stand for all groups.
    """
    for key in list(_IN_FLIGHT):
        if not names or key.group in names:
            del _IN_FLIGHT[key]
    for name in names or (None,):
        realign(name)


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, group: str, num_experts: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring tokens to the ranks of their experts, with their routing.

    Args:
        x: [T, H] tokens of this rank; T must be the same on every rank.
        ids: [T, K] experts of each token, counted over all ranks.
        weights: [T, K] weights of these experts.
        group: Name of the process group of R ranks.
        num_experts: E. Transports that send a token only where it is wanted need it.

    Returns:
        The same three tensors with [R*T, ...] rows. Collectives bring every rank's rows, rank 0's
        first. Other transports bring those that have an expert here, in any order; the rest is
        garbage with ids -1, and so are the ids of experts elsewhere.
    """
    x, ids, weights = _run((x, ids, weights), "all_gather", group)
    return x, ids, weights


def dispatch_fp8(
    x: Tensor,
    scales: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    num_experts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bring tokens that were cast to float8 to the ranks of their experts.

    Args:
        x: [T, H] float8_e4m3fn, see `expert_layouts.quantised`.
        scales: [T, H / 128].
        ids: As for `dispatch`.
        weights: As for `dispatch`.
        group: As for `dispatch`.
        num_experts: As for `dispatch`.

    Returns:
        The same four tensors with [R*T, ...] rows, as `dispatch` returns them.
    """
    x, scales, ids, weights = _run((x, scales, ids, weights), "all_gather", group)
    return x, scales, ids, weights


def combine(y: Tensor, num_tokens: int, group: str) -> Tensor:
    """Sum the ranks' contributions and keep those for this rank's tokens.

    Args:
        y: [R*T, H] contributions of this rank's experts to the rows that its dispatch returned.
        num_tokens: T, the tokens of this rank.
        group: Name of the process group of R ranks.

    Returns:
        [T, H] sums.

    Raises:
        CommunicationError: `y` does not have R*T rows.
    """
    wanted = num_tokens * groups.world_size(group)
    if y.shape[0] != wanted:
        raise CommunicationError(
            f"combine over group {group!r}: y has {y.shape[0]} rows, wanted {wanted} "
            f"({groups.world_size(group)} ranks of {num_tokens} tokens). Pass num_tokens of the "
            "dispatch that this combine belongs to."
        )
    return _run((y,), "reduce_scatter_sum", group)[0]


def dispatch_batched(
    x: Tensor, ids: Tensor, group: str, max_tokens: int, num_experts: int, fp8: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring tokens to their experts: each expert of this rank has rows of its own.

    Args:
        x: [T, H] tokens of this rank, T <= M; T must be the same on every rank.
        ids: [T, K] experts of each token, counted over all ranks; -1 for none.
        group: Name of the process group of R ranks.
        max_tokens: M, the same on every rank.
        num_experts: E; R divides it.
        fp8: Send float8 with a float32 scale for 128 values.

    Returns:
        rows [E/R, R*M, H], scales [E/R, R*M, H / 128 or 0], counts [E/R]: expert e has `counts[e]`
        rows, those behind are garbage. And src, ranges, which `combine_batched` wants.

    Raises:
        CommunicationError: R does not divide E, or T > M.
    """
    exchange = Batched(max_tokens, num_experts, fp8).dispatch()
    rows, scales, counts, src, ranges = _run((x, ids), exchange, group)
    return rows, scales, counts, src, ranges


def combine_batched(
    y: Tensor,
    ids: Tensor,
    weights: Tensor,
    src: Tensor,
    ranges: Tensor,
    group: str,
    max_tokens: int,
    num_experts: int,
) -> Tensor:
    """Bring what the experts made of a token back, weighted and summed.

    Args:
        y: [E/R, R*M, H], every row where `dispatch_batched` had it.
        ids: [T, K] as given to the dispatch.
        weights: [T, K] float32.
        src: From the dispatch.
        ranges: From the dispatch.
        group: Name of the process group of R ranks.
        max_tokens: M.
        num_experts: E.

    Returns:
        [T, H].

    Raises:
        CommunicationError: The sizes are not those of a dispatch.
    """
    exchange = Batched(max_tokens, num_experts).combine()
    return _run((y, ids, weights, src, ranges), exchange, group)[0]


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
    _check(inputs, collective, group)
    return _buffers(inputs, collective, group)


def _check(inputs: Sequence[Tensor], collective: str, group: str) -> None:
    if kind_of(collective) == "batched":
        check_batched(collective, inputs, group, groups.world_size(group))
        return
    name = collective.split()[0]
    plain = {"rows_dispatch": "all_gather", "rows_combine": "reduce_scatter_sum"}.get(name, name)
    for tensor in inputs:
        collectives.check(plain, tensor, group)


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
    key = InFlight(group, kind, flight)
    if key in _IN_FLIGHT:
        raise CommunicationError(
            f"{key}: sent twice without a receive in between. Call {kind}_recv for this flight "
            "first, or abandon_in_flight() after a step that failed."
        )
    kind_here = kind_of(collective)
    counted = kind_here == "batched" or len(inputs) == len(outputs)
    if not inputs or not counted:
        raise CommunicationError(
            f"{key}: found {len(inputs)} inputs and {len(outputs)} outputs, wanted one output for "
            "each input and at least one. Pass what comm_buffers returned for these inputs."
        )
    carrier = transport_for(inputs[0].device.type, transport)
    _check_slot(key, carrier, slot)
    if isinstance(carrier, PairingTransport):
        launched = carrier.launch_pair(inputs, outputs, collective, group, str(key), (kind, flight))
    elif kind_here == "batched" and not carries_batched(carrier):
        launched = _ByCollectives(carrier, group, slot, str(key)).launch(
            inputs, outputs, collective
        )
    else:
        launched = carrier.launch(inputs, outputs, collective, group, slot, str(key))
    _IN_FLIGHT[key] = _Operation(carrier, tuple(inputs), tuple(outputs), slot, launched)


def _check_slot(key: InFlight, carrier: Transport, slot: int | None) -> None:
    slots = carrier.contract.slots
    if slots is None and slot is not None:
        raise CommunicationError(
            f"{key}: found slot {slot}, but {carrier.contract.name} has no slots. Leave it out."
        )
    if slots is not None and slot not in range(slots):
        raise CommunicationError(
            f"{key}: found slot {slot}, wanted one of 0..{slots - 1}: the n-th send of a region "
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
    key = InFlight(group, kind, flight)
    if key not in _IN_FLIGHT:
        others = "; ".join(map(str, _IN_FLIGHT)) or "nothing"
        raise CommunicationError(
            f"{key}: received without a send. In flight: {others}. Call {kind}_send for this "
            "flight first."
        )
    operation = _IN_FLIGHT[key]
    carrier = operation.transport.contract.name
    if [_place(t) for t in outputs] != [_place(t) for t in operation.outputs]:
        raise CommunicationError(
            f"{key}: received into other outputs than were sent. Pass the tensors that "
            f"{kind}_send was given."
        )
    if (transport, slot) != (carrier, operation.slot):
        raise CommunicationError(
            f"{key}: received over {transport} in slot {slot}, but sent over {carrier} in slot "
            f"{operation.slot}. Both halves name the same."
        )
    del _IN_FLIGHT[key]
    launched = operation.launched
    try:
        if isinstance(launched, _ByCollectives):
            launched.finish(outputs)
        else:
            operation.transport.finish(launched, outputs)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"{key}: the {carrier} transport failed: {error}. A rank of the group has probably "
            "ended; look at that rank's error first."
        ) from error


@dataclass(slots=True)
class _ByCollectives:
    """A batched exchange over a transport that carries collectives only."""

    carrier: Transport
    group: str
    slot: int | None
    name: str
    hidden: list[Tensor] = field(default_factory=list)

    def launch(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: str
    ) -> _ByCollectives:
        """Run it; on CUDA in stream order, on CPU to its end, hidden until it is received."""
        found = batched.run(exchange, inputs, self.group, self._collective)
        if inputs[0].is_cuda:
            for output, value in zip(outputs, found, strict=True):
                output.copy_(value)
            return self
        self.hidden = found
        for output in outputs:
            output.fill_(poison(output.dtype))
        return self

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Show what has arrived."""
        for output, value in zip(outputs, self.hidden, strict=False):
            output.copy_(value)

    def _collective(self, collective: str, source: Tensor) -> Tensor:
        outputs = _buffers([source], collective, self.group)
        launched = self.carrier.launch(
            [source], outputs, collective, self.group, self.slot, self.name
        )
        self.carrier.finish(launched, outputs)
        return outputs[0]


def carries_batched(carrier: Transport) -> bool:
    """Whether the transport has kernels for the batched layout, or imitates them."""
    return "collectives" not in carrier.contract.carries


def _run(inputs: Sequence[Tensor], collective: str, group: str) -> list[Tensor]:
    outputs = comm_buffers(inputs, collective, group)
    transport = transport_for(inputs[0].device.type)
    if kind_of(collective) == "batched":
        run = _ByCollectives(transport, group, None, collective)
        run.launch(inputs, outputs, collective).finish(outputs)
        return outputs
    launched = transport.launch(inputs, outputs, collective, group, None, collective)
    transport.finish(launched, outputs)
    return outputs


def _buffers(inputs: Sequence[Tensor], collective: str, group: str) -> list[Tensor]:
    ranks = groups.world_size(group)
    if kind_of(collective) != "collectives":
        return outputs_of(collective, inputs, ranks)
    return [
        t.new_empty((collectives.output_rows(collective, t.shape[0], ranks), *t.shape[1:]))
        for t in inputs
    ]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _fake_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, group: str, num_experts: int | None = None
) -> tuple[Tensor, ...]:
    return tuple(_buffers((x, ids, weights), "all_gather", group))


def _fake_dispatch_fp8(
    x: Tensor,
    scales: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    num_experts: int | None = None,
) -> tuple[Tensor, ...]:
    return tuple(_buffers((x, scales, ids, weights), "all_gather", group))


def _fake_combine(y: Tensor, num_tokens: int, group: str) -> Tensor:
    return y.new_empty((num_tokens, *y.shape[1:]))


def _fake_dispatch_batched(
    x: Tensor, ids: Tensor, group: str, max_tokens: int, num_experts: int, fp8: bool = False
) -> tuple[Tensor, ...]:
    return tuple(_buffers((x, ids), Batched(max_tokens, num_experts, fp8).dispatch(), group))


def _fake_combine_batched(
    y: Tensor,
    ids: Tensor,
    weights: Tensor,
    src: Tensor,
    ranges: Tensor,
    group: str,
    max_tokens: int,
    num_experts: int,
) -> Tensor:
    inputs = (y, ids, weights, src, ranges)
    return _buffers(inputs, Batched(max_tokens, num_experts).combine(), group)[0]


def _fake_nothing(*_: object) -> None:
    return None


def _register(library: Any) -> None:
    for schema in _SCHEMAS:
        library.define(schema)
    real: dict[str, Any] = {
        "dispatch": dispatch,
        "dispatch_fp8": dispatch_fp8,
        "dispatch_batched": dispatch_batched,
        "combine": combine,
        "combine_batched": combine_batched,
        "comm_buffers": comm_buffers,
    }
    fake: dict[str, Any] = {
        "dispatch": _fake_dispatch,
        "dispatch_fp8": _fake_dispatch_fp8,
        "dispatch_batched": _fake_dispatch_batched,
        "combine": _fake_combine,
        "combine_batched": _fake_combine_batched,
        "comm_buffers": _buffers,
    }
    for kind in _HALVES:
        real[f"{kind}_send"] = partial(send, kind=kind)
        real[f"{kind}_recv"] = partial(recv, kind=kind)
        fake[f"{kind}_send"] = fake[f"{kind}_recv"] = _fake_nothing
    for name in real:
        for key in ("CPU", "CUDA"):
            library.impl(name, real[name], key)
        torch.library.register_fake(f"dbo_fx::{name}", fake[name], lib=library)


# The registrations live as long as this object.
_LIBRARY = torch.library.Library("dbo_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_register(_LIBRARY)
