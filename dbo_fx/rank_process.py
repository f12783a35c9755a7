"""One rank's side of `launch.py`: join the group, run what the parent asks for, report back."""

from __future__ import annotations

import math
import os
import pickle
import re
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

_CONNECT_S = 10.0
_PEER_LOST = re.compile(
    "connection closed|connection reset|broken pipe|connection refused|socket closed|"
    "failed to recv|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank needs to join the group."""

    rank: int
    world_size: int
    backend: str
    port: int
    timeout_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank's call ended badly."""

    rank: int
    headline: str
    trace: str
    is_consequence: bool
    error: bytes | None = None

    def __str__(self) -> str:
        """Return the line that says who failed and how."""
        return f"rank {self.rank} {self.headline}"


def rank_main(setup: Setup, pipe: connection.Connection) -> None:
    """Be one rank, until the parent closes the pipe or something raises.

    Args:
        setup: Which rank of which group.
        pipe: Gives requests, takes results and failures. After a failure the process stays, with
            its connections, until the parent has decided whose failure came first.
    """
    try:
        _join(setup)
        while payload := _next_payload(pipe):
            fn, args = pickle.loads(payload)
            pipe.send_bytes(pickle.dumps(pickle.dumps(fn(setup.rank, *args))))
    except BaseException as error:
        # The parent kills this process after a failure: nothing is flushed then.
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(pickle.dumps(_failure(setup.rank, error)))
        _next_payload(pipe)
        os._exit(1)
    if dist.is_initialized():
        # Only if it was used: importing it here would take seconds. Some Buffers need the group.
        if (deepep := sys.modules.get("dbo_fx.comm.deepep_groups")) is not None:
            deepep.close_buffers()
        dist.destroy_process_group()


def _join(setup: Setup) -> None:
    os.environ.update(
        RANK=str(setup.rank), LOCAL_RANK=str(setup.rank), WORLD_SIZE=str(setup.world_size)
    )
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are on this host, whose own name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(setup.threads)
    device = None
    if setup.backend == "nccl":
        # NCCL itself refuses ranks that share one, or takes them (NCCL_MULTI_RANK_GPU_ENABLE=1).
        device = torch.device("cuda", setup.rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=max(1, math.ceil(setup.timeout_s)))
    dist.init_process_group(
        setup.backend,
        store=rendezvous(setup.port, timeout),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timeout,
        device_id=device,
    )


def rendezvous(port: int, timeout: timedelta = timedelta(seconds=_CONNECT_S)) -> Any:
    """Host the store that the ranks meet at, or connect to it.

    Args:
        port: 0 to host it on a free port, else where it is.
        timeout: Limit of each request to it.

    Returns:
        A `torch.distributed.TCPStore`.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, missing from the stub
        "127.0.0.1", port, is_master=port == 0, wait_for_workers=False, timeout=timeout
    )


def _next_payload(pipe: connection.Connection) -> bytes:
    """Return the next request; nothing if the parent asks to stop or is gone."""
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return b""


def _failure(rank: int, error: BaseException) -> Failure:
    trace = "".join(traceback.format_exception(error))
    headline = f"raised {type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        # Any class may refuse; the text of the traceback is enough then.
        pickled = None
    is_consequence = bool(_PEER_LOST.search(trace))
    return Failure(rank, headline, trace, is_consequence, pickled)
