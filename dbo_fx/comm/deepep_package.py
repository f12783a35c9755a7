"""The `deep_ep` package: is it there, does it fit, and load it so that it works.

Its library binds torch's C++ ABI, NVSHMEM's host library and NCCL. `reason` looks without importing
it; `load` imports it. Nothing else of dbo_fx imports `deep_ep`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dbo_fx.errors import CommunicationError

BUILD = "tokenspeed-deepep==2.1.0.post20260801"
# Builds of this distribution from this version on are made for torch 2.13 and crash under 2.11.
NEWER_ABI = ("tokenspeed-deepep", "2.1.0.post20260810", (2, 13))
TESTED_TORCH = (2, 11)
NVSHMEM = "libnvshmem_host.so.3"
# What V2 alone calls, and NCCL 2.28 does not have all of.
V2_SYMBOLS = (
    "ncclCommQueryProperties",
    "ncclCommWindowRegister",
    "ncclDevCommCreate",
    "ncclGetLsaDevicePointer",
    "ncclTeamLsa",
    "ncclTeamWorld",
)
INFINIBAND = Path("/dev/infiniband")
USUAL_CUDA = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why DeepEP cannot be used here.

    Attributes:
        found: What was found.
        mend: What to do, as a command where there is one.
    """

    found: str
    mend: str

    def __str__(self) -> str:
        """Both."""
        return f"{self.found}. {self.mend}"


def distribution() -> tuple[str, str] | None:
    """Name and version of the distribution that brings `deep_ep`; None if there is none."""
    names = packages_distributions().get("deep_ep", [])
    return (names[0], version(names[0])) if names else None


def reason(mode: str) -> Reason | None:
    """Say why a mode cannot be used on this machine, without importing anything.

    Args:
        mode: Name of a transport.

    Returns:
        The reason; None if nothing speaks against it.
    """
    if torch.version.cuda is None:
        return Reason("torch is built for the CPU", "Install a CUDA build of torch.")
    if not torch.cuda.is_available():
        return Reason("no CUDA device", "Run on a host with GPUs.")
    if find_spec("deep_ep") is None:
        mend = f"pip install {build_for(torch.__version__)}"
        return Reason("the package deep_ep is not installed", mend)
    return _abi(distribution(), torch.__version__) or _libraries(mode)


def build_for(torch_version: str) -> str:
    """What to install for a version of torch, as pip takes it."""
    name, since, least = NEWER_ABI
    return f"'{name}>={since}'" if _release(torch_version) >= least else BUILD


def _release(torch_version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in torch_version.split(".")[:2])


def _abi(found: tuple[str, str] | None, torch_version: str) -> Reason | None:
    """A build for another torch has undefined symbols, or crashes later."""
    if found is None:  # Put on the path by hand: only loading it tells.
        return None
    name, number = found
    newer, since, least = NEWER_ABI
    here = _release(torch_version)
    if name == newer and _key(number) >= _key(since) and here < least:
        return Reason(
            f"{name} {number} is built for torch >= {'.'.join(map(str, least))}, found torch "
            f"{torch_version}",
            f"pip install {BUILD}",
        )
    if name == newer and _key(number) < _key(since) and here >= least:
        return Reason(
            f"{name} {number} is built for torch {'.'.join(map(str, TESTED_TORCH))}, found torch "
            f"{torch_version}",
            f"pip install '{newer}>={since}'",
        )
    return None


def _key(number: str) -> tuple[int, ...]:
    digits = "".join(c if c.isdigit() else " " for c in number)
    return tuple(int(part) for part in digits.split())


def _libraries(mode: str) -> Reason | None:
    if nvshmem() is None:
        return Reason(f"{NVSHMEM} is not found", "pip install nvidia-nvshmem-cu13")
    home = cuda_home()
    if home is None:
        return Reason(
            "no CUDA toolkit is found, and deep_ep does not load without one",
            "Install it, or set CUDA_HOME to where it is.",
        )
    if mode != "deepep_v2":
        return None
    if missing := missing_symbols():
        return Reason(
            f"the loaded NCCL {nccl_version()} has no {', '.join(missing)}",
            "pip install 'nvidia-nccl-cu13>=2.30'",
        )
    compiler = Path(os.environ.get("EP_JIT_NVCC_COMPILER") or home / "bin" / "nvcc")
    if not compiler.is_file():
        return Reason(
            f"deepep_v2 compiles its kernels when they run, and {compiler} is not there",
            "Install nvcc 12.3 or later, and set CUDA_HOME or EP_JIT_NVCC_COMPILER.",
        )
    return None


def cuda_home() -> Path | None:
    """Where `deep_ep` looks for the CUDA toolkit; None if it finds none."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        return Path(nvcc).parent.parent
    return USUAL_CUDA if USUAL_CUDA.exists() else None


def nvshmem() -> Path | None:
    """Where NVSHMEM's host library lies; None if it is not in this Python's packages."""
    for folder in map(Path, sys.path):
        path = folder / "nvidia" / "nvshmem" / "lib" / NVSHMEM
        if path.is_file():
            return path
    return None


def nccl_version() -> str:
    """The NCCL that torch has loaded."""
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def missing_symbols() -> list[str]:
    """What V2 needs of NCCL, and the library that this process has loaded does not have."""
    nccl_version()  # Loads it.
    found = {line.split()[-1] for line in _maps() if "libnccl.so" in line}
    libraries = [ctypes.CDLL(path) for path in found]
    return [s for s in V2_SYMBOLS if not any(hasattr(lib, s) for lib in libraries)]


def _maps() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


@cache
def load() -> Any:
    """Import `deep_ep`.

    Returns:
        The module.

    Raises:
        CommunicationError: It is missing, does not fit torch, or a library is missing.
    """
    why = reason("deepep")
    if why is not None:
        raise CommunicationError(f"DeepEP cannot be used: {why}")
    host = nvshmem()
    assert host is not None
    _environment()
    flags = sys.getdlopenflags()
    try:
        # NVSHMEM is linked without a path that is right here. NCCL symbols of V2 bind when called.
        ctypes.CDLL(str(host), mode=ctypes.RTLD_GLOBAL)
        sys.setdlopenflags(os.RTLD_LAZY)
        module = import_module("deep_ep")
    except (ImportError, OSError, AssertionError) as error:
        raise CommunicationError(f"DeepEP cannot be loaded: {_why(str(error))}") from error
    finally:
        sys.setdlopenflags(flags)
    return module


def _environment() -> None:
    """What DeepEP and NVSHMEM must know on one host; what is set already stays."""
    # Else V2 asks NCCL for connections between hosts, and refuses to start where there are none.
    os.environ.setdefault("EP_DISABLE_GIN", "1")
    if not INFINIBAND.exists():
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")


def _why(text: str) -> str:
    """What an error of the loader means."""
    first = text.splitlines()[0] if text else "no reason given"
    if "nvshmem" in text.lower():
        return f"{first}. Its NVSHMEM is another one: pip install nvidia-nvshmem-cu13"
    if "nccl" in text.lower():
        return f"{first}. Its NCCL is another one: pip install 'nvidia-nccl-cu13>=2.28'"
    if "undefined symbol" in text or "libtorch" in text or "libc10" in text:
        return f"{first}. It is built for another torch: pip install {BUILD} (torch 2.11, CUDA 13)"
    return f"{first}. Reinstall it: pip install --force-reinstall {BUILD}"
