"""What a transport promises (`Contract`) and what it must be able to do (`Transport`).

The verifier and the scheduling passes read contracts; no other code knows a transport by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dbo_fx.errors import CommunicationError, OptionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contract:
    """What a program may assume about a transport.

    Attributes:
        name: Name of the transport, as a program text prints it.
        capturable: Both halves may run under CUDA graph capture.
        blocks_host: `recv` makes the calling CPU thread wait.
        two_halves: `send` returns before the data has arrived.
        max_in_flight: Un-received operations allowed at once over one group; None means one for
            each slot of each kind, the rule that the in-flight table checks for every transport.
        send_stream: Stream that the program must make current for `send`.
        recv_stream: Stream that the program must make current for `recv`.
        recv_is: How `recv` makes the result usable: "event" (the program's own wait does it, so
            the wait may sink to the first use), "kernel" (it stays where the schedule says) or
            "host".
        num_sms: SMs that the transport occupies, None if it does not fix the number.
        keepalive: Until when inputs and outputs must stay alive.
        parity: Name of a rule on alternating buffers, None if there is none.
    """

    name: str
    capturable: bool
    blocks_host: bool
    two_halves: bool
    max_in_flight: int | None
    send_stream: str = "comm"
    recv_stream: str = "comp"
    recv_is: Literal["event", "kernel", "host"] = "event"
    num_sms: int | None = None
    keepalive: str = "recv"
    parity: str | None = None


class Transport(Protocol):
    """Moves tensors for one collective; the in-flight table around it lives in `ops.py`."""

    @property
    def contract(self) -> Contract:
        """What a program may assume."""

    def launch(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], collective: str, group: str
    ) -> Any:
        """Start `collective` from each input into the output at the same position.

        Args:
            inputs: Tensors of this rank.
            outputs: What `comm_buffers` gave for these inputs; not readable before `finish`.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of the process group.

        Returns:
            Whatever `finish` needs.
        """

    def finish(self, flight: Any, outputs: Sequence[Tensor]) -> None:
        """Retire what `launch` returned; `outputs` hold the result on the consumer's stream."""


def transport_for(device_type: str) -> Transport:
    """Return the transport that carries tensors of a device type.

    Args:
        device_type: "cpu" or "cuda", as in `tensor.device.type`.

    Returns:
        The gloo reference for "cpu", NCCL for "cuda".

    Raises:
        CommunicationError: No transport carries tensors of this device type.
    """
    transports = {"cpu": "gloo", "cuda": "nccl"}
    if device_type not in transports:
        raise CommunicationError(
            f"no transport carries tensors on {device_type!r}, only on {sorted(transports)}. "
            "Move the model and its inputs to one of these."
        )
    return _transports()[transports[device_type]]


def contract(name: str) -> Contract:
    """Return a transport's contract by its name.

    Args:
        name: "gloo" or "nccl".

    Returns:
        The contract.

    Raises:
        OptionError: No transport has this name.
    """
    transports = _transports()
    if name not in transports:
        raise OptionError(f"unknown transport {name!r}: use one of {sorted(transports)}")
    return transports[name].contract


def _transports() -> dict[str, Transport]:
    # Imported here because both modules need Contract from this one.
    from dbo_fx.comm.gloo import GlooReference
    from dbo_fx.comm.nccl import Nccl

    return {t.contract.name: t for t in (GlooReference(), Nccl())}
