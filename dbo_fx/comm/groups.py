"""The only file that touches private parts of torch.distributed, besides `staging`.

Everything else knows a process group by its name, the string that functional collectives use too.
`tests/test_comm.py` fails by name when one of these parts moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d

from dbo_fx.errors import CommunicationError


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group with this name.

    Args:
        name: `group.group_name`.

    Returns:
        The group.

    Raises:
        CommunicationError: This process knows no such group.
    """
    try:
        # Newer torch types the name as GroupName, older ones as str; both take a str.
        return _resolve_process_group(cast(Any, name))
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"process group {name!r} is unknown in this process. Create it first "
            "(torch.distributed.init_process_group or new_group) and pass its group_name."
        ) from error


def name_of(group: dist.ProcessGroup | str | None) -> str | None:
    """Return the name of a group.

    Args:
        group: A group, its name, or None for the default group.

    Returns:
        The name; None if the default group was asked for and torch.distributed is not initialised.

    Raises:
        CommunicationError: This process is not a member of the group.
    """
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            return None
        group = distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise CommunicationError(
            f"this rank is not a member of the group it was given ({group!r}): "
            "only members may communicate over it."
        )
    return str(group.group_name)


def world_size(name: str) -> int:
    """Return the number of ranks R in the group."""
    return int(process_group(name).size())


def rank(name: str) -> int:
    """Return this process's rank within the group, 0..R-1."""
    return int(process_group(name).rank())


def store(name: str) -> distributed_c10d.Store:
    """Return the rendezvous store of the group, with the group's own key prefix."""
    return distributed_c10d._get_process_group_store(process_group(name))


def backend_name(name: str, device_type: str) -> str | None:
    """Return the backend that carries a device's tensors in the group, in lower case.

    Args:
        name: Name of the group.
        device_type: "cpu" or "cuda".

    Returns:
        For example "gloo", "nccl", "fake"; None if the group has no backend for this device.
    """
    group = process_group(name)
    known = _BACKENDS.setdefault(group, {})
    if device_type not in known:
        device = torch.device(device_type)
        if device not in group._device_types:
            return None
        known[device_type] = str(group._get_backend(device).name()).lower()
    return known[device_type]


# Every launch over NCCL asks. What a group has is never taken from it.
_BACKENDS: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def is_fake(name: str) -> bool:
    """Tell whether the group only pretends to communicate (torch's "fake" backend)."""
    return str(dist.get_backend(process_group(name))).lower() == "fake"


@contextmanager
def aliases(names: Sequence[str]) -> Iterator[None]:
    """Let the default group answer to these names too; for graphs that other processes captured."""
    group = distributed_c10d._get_default_group()
    for name in names:
        _register_process_group(cast(Any, name), group)
    try:
        yield
    finally:
        for name in names:
            _unregister_process_group(cast(Any, name))
