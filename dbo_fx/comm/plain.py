"""Which transport carries the ops that models call in one piece (`functional.py`).

In this order: what `plain_ops_over` says; on CUDA, NCCL if it is the group's backend for CUDA and
`copy_engine` otherwise, because no other backend of torch keeps the order of streams; elsewhere the
device's usual transport. A group that pretends to have peers (torch's "fake" backend) needs
`plain_ops_over("loopback")`: what comes out is no real model's, so it is never chosen silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dbo_fx.comm import groups
from dbo_fx.comm.protocol import DEFAULTS, Transport, transport_for
from dbo_fx.contracts import Contract, contract
from dbo_fx.errors import OptionError

_CHOSEN: ContextVar[str | None] = ContextVar("dbo_fx_plain_ops", default=None)


def plain_carrier(device_type: str, group: str) -> Transport:
    """Return what carries a plain op.

    Args:
        device_type: Of the op's tensors, as in `tensor.device.type`.
        group: Name of the process group.

    Raises:
        CommunicationError: No transport, or not the chosen one, carries tensors of this device.
    """
    name = _CHOSEN.get()
    if name is None and device_type == "cuda":
        backend = groups.backend_name(group, "cuda")
        name = DEFAULTS["cuda"] if backend == "nccl" else "copy_engine"
    return transport_for(device_type, name)


@contextmanager
def plain_ops_over(name: str) -> Iterator[None]:
    """Let the plain ops (`dispatch`, `combine`, ...) of an eager model run over a transport.

    All ranks must do so. A graph captured within the body stays as it is; a model that
    `torch.compile` compiled runs the ops at every call, over what holds then.

    Args:
        name: Name of a transport that carries collectives in buffers of the caller.

    Raises:
        OptionError: There is no such transport, or it carries no plain ops.
    """
    if not carries_plain_ops(contract(name)):
        raise OptionError(
            f"plain_ops_over({name!r}): this transport does not carry collectives into the "
            "caller's buffers, as plain ops need. Use 'nccl', 'copy_engine' or 'gloo'."
        )
    token = _CHOSEN.set(name)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@contextmanager
def plain_ops_of_program(name: str) -> Iterator[None]:
    """Let the plain ops of a program's first-call tests run over its transport, if it carries them.

    Args:
        name: Name of the program's transport.
    """
    if not carries_plain_ops(contract(name)):
        yield
        return
    with plain_ops_over(name):
        yield


def carries_plain_ops(carrier: Contract) -> bool:
    """Whether a single operation may run between others, in no slot and without a partner."""
    return "collectives" in carrier.carries and carrier.slots is None and not carrier.pairs
