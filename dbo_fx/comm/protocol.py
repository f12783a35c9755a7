"""What a transport must be able to do (`Transport`); what it promises is in `dbo_fx.contracts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from dbo_fx.comm.copy_engine import CopyEngine
from dbo_fx.comm.copy_engine_twin import CopyEngineTwin
from dbo_fx.comm.deepep_cuda_ll import LowLatency
from dbo_fx.comm.deepep_cuda_rows import Elastic, HighThroughput
from dbo_fx.comm.deepep_ll import LowLatencyTwin
from dbo_fx.comm.deepep_rows import RowsTwin
from dbo_fx.comm.gloo import GlooReference
from dbo_fx.comm.loopback import Loopback
from dbo_fx.comm.loopback_twin import LoopbackTwin
from dbo_fx.comm.nccl import Nccl
from dbo_fx.contracts import DEEPEP_HT, DEEPEP_LL_ASYNC, DEEPEP_V2, Contract, register_contract
from dbo_fx.errors import CommunicationError, OptionError

if TYPE_CHECKING:
    from torch import Tensor


class Transport(Protocol):
    """Moves tensors for one collective; the in-flight table around it lives in `ops.py`."""

    @property
    def contract(self) -> Contract:
        """What a program may assume."""

    def launch(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> Any:
        """Start `collective` from each input into the output at the same position.

        Args:
            inputs: Tensors of this rank.
            outputs: What `comm_buffers` gave for these inputs; not readable before `finish`.
            collective: A name in `collectives.COLLECTIVES`.
            group: Name of the process group.
            slot: The slot that the program says; None where the contract has no slots.
            name: What to call the operation in errors.

        Returns:
            Whatever `finish` needs.
        """

    def finish(self, flight: Any, outputs: Sequence[Tensor]) -> None:
        """Retire what `launch` returned; `outputs` hold the result on the consumer's stream."""

    def begin(self, group: str) -> None:
        """Start a region, a call or a capture, over a group; refuse if it would start wrongly."""

    def realign(self, group: str | None) -> None:
        """Forget what is un-received over a group (None: over all); the next region may begin."""


DEFAULTS = {"cpu": "gloo", "cuda": "nccl"}
_TRANSPORTS: dict[tuple[str, str], Transport] = {
    ("cpu", "gloo"): GlooReference(),
    ("cuda", "nccl"): Nccl(),
    ("cuda", "copy_engine"): CopyEngine(),
    ("cpu", "copy_engine"): CopyEngineTwin(),
    ("cuda", "loopback"): Loopback(),
    ("cpu", "loopback"): LoopbackTwin(),
    ("cpu", "deepep_ll"): LowLatencyTwin(),
    ("cpu", "deepep_ll_async"): LowLatencyTwin(DEEPEP_LL_ASYNC),
    ("cpu", "deepep_ht"): RowsTwin(DEEPEP_HT),
    ("cpu", "deepep_v2"): RowsTwin(DEEPEP_V2),
    ("cuda", "deepep_ll"): LowLatency(),
    ("cuda", "deepep_ll_async"): LowLatency(DEEPEP_LL_ASYNC),
    ("cuda", "deepep_ht"): HighThroughput(DEEPEP_HT),
    ("cuda", "deepep_v2"): Elastic(DEEPEP_V2),
}


def register_transport(transport: Transport, device_type: str) -> None:
    """Make a transport usable by its contract's name; its contract becomes known too.

    Args:
        transport: The transport.
        device_type: What it carries, as in `tensor.device.type`.

    Raises:
        OptionError: Another transport, or another contract, has this name.
    """
    name = transport.contract.name
    if _TRANSPORTS.get((device_type, name), transport) is not transport:
        raise OptionError(
            f"another transport for {device_type!r} is called {name!r}; choose another name"
        )
    register_contract(transport.contract)
    _TRANSPORTS[device_type, name] = transport


def transport_for(device_type: str, name: str | None = None) -> Transport:
    """Return the transport that carries tensors of a device type.

    Args:
        device_type: "cpu" or "cuda", as in `tensor.device.type`.
        name: Name of its contract; None for the usual one: the gloo reference for "cpu", NCCL for
            "cuda".

    Returns:
        The transport, the same object every time.

    Raises:
        CommunicationError: No transport, or not this one, carries tensors of this device type.
    """
    if name is None and device_type not in DEFAULTS:
        raise CommunicationError(
            f"no transport carries tensors on {device_type!r}, only on {sorted(DEFAULTS)}. "
            "Move the model and its inputs to one of these."
        )
    wanted = DEFAULTS[device_type] if name is None else name
    found = _TRANSPORTS.get((device_type, wanted))
    if found is None:
        there = sorted(n for device, n in _TRANSPORTS if device == device_type)
        devices = sorted(device for device, n in _TRANSPORTS if n == wanted)
        raise CommunicationError(
            f"transport {wanted!r} carries no tensors on {device_type!r}; it is there for "
            f"{devices}. On {device_type!r} choose one of {there}."
        )
    return found


def unusable(device_type: str, name: str) -> str | None:
    """Why a transport cannot be used on this machine, as far as that can be told without using it.

    Args:
        device_type: "cpu" or "cuda".
        name: Name of its contract.

    Returns:
        The reason and what would mend it; None if nothing speaks against it.
    """
    look = getattr(transport_for(device_type, name), "unusable", None)
    found: str | None = None if look is None else look()
    return found


Region = tuple[str, tuple[str, ...]]
"""What `begin_region` is given: a transport's name and groups."""
_REGIONS: ContextVar[list[Region] | None] = ContextVar("dbo_fx_regions", default=None)


@contextmanager
def noted_regions() -> Iterator[list[Region]]:
    """Note the regions that begin within the body, each once: a replay begins them again."""
    found: list[Region] = []
    token = _REGIONS.set(found)
    try:
        yield found
    finally:
        _REGIONS.reset(token)


def begin_region(name: str, groups: Iterable[str]) -> None:
    """Start a call, a capture or a replay of a program.

    Args:
        name: Name of the program's transport.
        groups: Names of the process groups that it communicates over.

    Raises:
        CommunicationError: The transport is not where a region starts.
    """
    groups = tuple(groups)
    noted = _REGIONS.get()
    if noted is not None and (name, groups) not in noted:
        noted.append((name, groups))
    for transport in [t for (_, n), t in _TRANSPORTS.items() if n == name]:
        for group in groups:
            transport.begin(group)


def realign(group: str | None) -> None:
    """Let every transport forget what is un-received over a group (None: over all)."""
    for transport in _TRANSPORTS.values():
        transport.realign(group)
