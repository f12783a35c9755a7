"""Small tests of this installation for `dbo-fx doctor`: they take well under a second each."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from importlib.util import find_spec

from dbo_fx.diagnosis import Finding

_TIMEOUT_S = 20


def gloo() -> Finding:
    """One rank, over localhost."""
    name = "gloo over localhost"
    if find_spec("torch") is None:
        return Finding(name, "broken", "needs torch", "pip install torch", core=True)
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return Finding(name, "broken", _first_line(error), "reinstall torch", core=True)
    if not dist.is_available():
        mend = "install a torch that is built with torch.distributed"
        return Finding(name, "broken", "torch without torch.distributed", mend, core=True)
    if dist.is_initialized():
        return Finding(name, "ok", "a process group exists already", core=True)
    started = time.perf_counter()
    try:
        limit = timedelta(seconds=_TIMEOUT_S)
        # torch does not mark it as exported.
        store = dist.TCPStore("localhost", 0, 1, True, limit)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
        try:
            value = torch.ones(2)
            dist.all_reduce(value)
            right = bool((value == 1).all())
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        mend = "set GLOO_SOCKET_IFNAME to an interface that reaches this host"
        return Finding(name, "broken", _first_line(error), mend, core=True)
    if not right:
        return Finding(name, "broken", "an all-reduce gave a wrong result", core=True)
    return Finding(name, "ok", f"{time.perf_counter() - started:.2f} s", core=True)


def program() -> Finding:
    """Read, bind and prove a shipped schedule."""
    from dbo_fx.check import check
    from dbo_fx.subjects import Request

    name = "prove a schedule"
    found = check(Request("mlp_shared_overlap"))
    if found.certified:
        return Finding(name, "ok", "mlp_shared_overlap is certified", core=True)
    return Finding(name, "broken", found.summary, "reinstall dbo-fx", core=True)


def compiler() -> Finding:
    """Inductor compiles what is not split with a C++ compiler."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    name = "C++ compiler"
    if path is not None:
        return Finding(name, "ok", path)
    why = "none; graphs without MoE communication go to Inductor, which needs one"
    mend = "apt install g++, or options={'inner_backend': 'eager'}"
    return Finding(name, "missing", why, mend)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
