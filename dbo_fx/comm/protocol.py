"""What a transport must be able to do (`Transport`); what it promises is in `dbo_fx.contracts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dbo_fx.contracts import Contract
from dbo_fx.errors import CommunicationError

if TYPE_CHECKING:
    from torch import Tensor


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


def _transports() -> dict[str, Transport]:
    from dbo_fx.comm.gloo import GlooReference
    from dbo_fx.comm.nccl import Nccl

    return {t.contract.name: t for t in (GlooReference(), Nccl())}
