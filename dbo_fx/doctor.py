"""What this machine and installation can do: versions, devices, transports, extras, self-tests.

Versions come from the packages' metadata; nothing heavy is imported but torch.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dbo_fx import self_tests
from dbo_fx.contracts import CONTRACTS
from dbo_fx.diagnosis import Diagnosis, Finding

# Version that the tests run with; what else is found may work and has not been tried.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.13", "2.11"),
    "transformers": ("5.19",),
}
PACKAGES = (
    "torch", "transformers", "numpy", "typer", "rich", "plotly", "depyf", "vllm",
    "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12",
)  # fmt: skip
# Extra: the packages that it brings.
EXTRAS = {
    "cli": ("typer", "rich"),
    "hf": ("transformers",),
    "html": ("plotly",),
    "debug": ("depyf",),
}
OLDEST_TORCH = (2, 11)
DEEPEP_BUILD = "tokenspeed-deepep==2.1.0.post20260801"  # For torch 2.11 and CUDA 13.
INFINIBAND = Path("/dev/infiniband")


def diagnose() -> Diagnosis:
    """Look at this machine and this installation."""
    return Diagnosis(
        {
            "versions": tuple(_versions()),
            "devices": tuple(_devices()),
            "transports": tuple(_transport(name) for name in CONTRACTS),
            "extras": tuple(_extra(name) for name in EXTRAS),
            "self-tests": (self_tests.gloo(), self_tests.program(), self_tests.compiler()),
        }
    )


def installed(package: str) -> str | None:
    """A package's version from its metadata; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_tested(name: str, found: str) -> bool:
    tested = TESTED.get(name)
    return tested is None or any(found == t or found.startswith(f"{t}.") for t in tested)


def _versions() -> list[Finding]:
    found = [
        Finding("dbo_fx", "ok", installed("dbo-fx") or "not installed as a package"),
        _version("python", platform.python_version(), core=True),
    ]
    for package in PACKAGES:
        number = installed(package)
        if number is not None or package in ("torch", "transformers", "vllm"):
            found.append(_version(package, number, core=package == "torch"))
    found.append(_deep_ep())
    if (torch := _torch()) is not None:
        for name, number in _of_torch(torch):
            found.append(Finding(name, "ok", number))
    return found


def _deep_ep() -> Finding:
    """The distribution that brings the package deep_ep; it goes by several names."""
    names = packages_distributions().get("deep_ep", [])
    if names:
        return Finding("deep_ep", "ok", f"{names[0]} {version(names[0])}")
    if find_spec("deep_ep") is not None:
        return Finding("deep_ep", "untested", "on the path, without a version")
    torch = _torch()
    if torch is None or not torch.distributed.is_available():
        return Finding("deep_ep", "missing", "-", f"pip install {DEEPEP_BUILD}")
    from dbo_fx.comm.deepep_package import build_for

    return Finding("deep_ep", "missing", "-", f"pip install {build_for(torch.__version__)}")


def _version(name: str, number: str | None, *, core: bool = False) -> Finding:
    if number is None:
        mend = {"torch": "pip install torch", "transformers": "pip install 'dbo-fx[hf]'"}
        return Finding(name, "missing", "-", mend.get(name, ""), core)
    if name == "torch" and tuple(map(int, number.split(".")[:2])) < OLDEST_TORCH:
        return Finding(name, "broken", number, "pip install --upgrade torch", core)
    if _is_tested(name, number):
        return Finding(name, "ok", number, core=core)
    return Finding(name, "untested", number, f"tested with {', '.join(TESTED[name])}", core)


def _torch() -> Any | None:
    """The module torch, or None where it cannot be imported."""
    if find_spec("torch") is None:
        return None
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def _of_torch(torch: Any) -> list[tuple[str, str]]:
    """Versions of what torch was built with."""
    found = []
    if torch.version.cuda is not None:
        found.append(("CUDA", str(torch.version.cuda)))
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found.append(("NCCL in torch", ".".join(map(str, torch.cuda.nccl.version()))))
    return found


def _devices() -> list[Finding]:
    found = [Finding("cpu", "ok", f"{platform.machine()}, {_cores()} cores", core=True)]
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        why = "no CUDA device" if torch is None or torch.version.cuda else "torch without CUDA"
        return [*found, Finding("cuda", "missing", why), _infiniband()]
    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        memory_gb = facts.total_memory / 2**30
        text = f"{facts.name}, {memory_gb:.0f} GiB, {facts.multi_processor_count} SMs"
        found.append(Finding(f"cuda:{index}", "ok", text))
    for one in range(count):
        reached = [o for o in range(count) if o != one]
        reached = [o for o in reached if torch.cuda.can_device_access_peer(one, o)]
        if count > 1:
            text = f"reaches {', '.join(f'cuda:{o}' for o in reached) or 'no other device'}"
            mend = "" if len(reached) == count - 1 else "see nvidia-smi topo -m"
            state = "ok" if not mend else "missing"
            found.append(Finding(f"peer access of cuda:{one}", state, text, mend))
    return [*found, *_links(count), _infiniband()]


def _infiniband() -> Finding:
    """What reaches other hosts; within one host nobody needs it."""
    ports = sorted(p.name for p in INFINIBAND.glob("uverbs*")) if INFINIBAND.exists() else []
    if ports:
        return Finding("InfiniBand", "ok", ", ".join(ports))
    return Finding("InfiniBand", "missing", "no device; one host only", "needed for several hosts")


def _links(count: int) -> list[Finding]:
    """What connects the devices, as nvidia-smi calls it: `NV18`, `PIX`, `SYS`."""
    if count < 2 or shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
    )
    return links_in(done.stdout)


def links_in(topology: str) -> list[Finding]:
    """Read the matrix that `nvidia-smi topo -m` prints."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0])]
    rows = [words for words in rows if "X" in words]  # The head has no diagonal.
    found = []
    for one, words in enumerate(rows):
        for other in range(one + 1, len(rows)):
            link = words[1 + other]
            state = "ok" if link.startswith("NV") else "missing"
            text = f"{link}, NVLink" if state == "ok" else f"{link}, no NVLink"
            found.append(Finding(f"link {words[0]} to {rows[other][0]}", state, text))
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _transport(name: str) -> Finding:
    """Whether a transport can run here; what is not there says what is missing."""
    torch = _torch()
    if torch is None:
        return Finding(name, "missing", "needs torch", "pip install torch", name == "gloo")
    if not torch.distributed.is_available():
        mend = "install a torch that is built with torch.distributed"
        return Finding(name, "broken", "torch without torch.distributed", mend, name == "gloo")
    look: dict[str, Callable[[Any], Finding]] = {
        "gloo": _has_gloo,
        "nccl": _has_nccl,
        "copy_engine": _has_copies,
        "loopback": _has_copies,
    }
    if name in look:
        finding = look[name](torch)
        return replace(finding, name=name)
    return _has_deepep(name) if name.startswith("deepep") else _has_other(name)


def _has_other(name: str) -> Finding:
    """A transport of another package may say itself why it cannot run."""
    from dbo_fx.comm.protocol import unusable
    from dbo_fx.errors import CommunicationError

    try:
        why = unusable("cuda", name)
    except CommunicationError:
        why = None
    if why is not None:
        return Finding(name, "missing", why, "see the package that brings it")
    return Finding(name, "ok", "registered by another package")


def _has_copies(torch: Any) -> Finding:
    """What needs a device and nothing else."""
    name = "copies"
    if torch.version.cuda is None:
        mend = "install a CUDA build of torch (https://pytorch.org/get-started)"
        return Finding(name, "missing", "CPU twin only: torch is built for the CPU", mend)
    if not torch.cuda.is_available():
        return Finding(name, "missing", "CPU twin only: no CUDA device", "run on a host with GPUs")
    return Finding(name, "ok", f"{torch.cuda.device_count()} CUDA devices")


def _has_gloo(torch: Any) -> Finding:
    if torch.distributed.is_gloo_available():
        return Finding("gloo", "ok", "CPU reference", core=True)
    mend = "install a torch that is built with gloo"
    return Finding("gloo", "broken", "torch without gloo", mend, core=True)


def _has_nccl(torch: Any) -> Finding:
    if torch.version.cuda is None:
        mend = "install a CUDA build of torch (https://pytorch.org/get-started)"
        return Finding("nccl", "missing", "torch is built for the CPU", mend)
    if not torch.distributed.is_nccl_available():
        return Finding("nccl", "missing", "torch without NCCL", "install a torch with NCCL")
    if not torch.cuda.is_available():
        return Finding("nccl", "missing", "no CUDA device", "run on a host with GPUs")
    return Finding("nccl", "ok", f"{torch.cuda.device_count()} CUDA devices")


def _has_deepep(name: str) -> Finding:
    """The kernels of the deep_ep package; its CPU twin is always there."""
    from dbo_fx.comm import deepep_package

    why = deepep_package.reason(name)
    if why is not None:
        return Finding(name, "missing", f"CPU twin only: {why.found}", why.mend)
    host = deepep_package.nvshmem()
    found = deepep_package.distribution()
    package = "deep_ep" if found is None else " ".join(found)
    nccl = deepep_package.nccl_version()
    return Finding(name, "ok", f"{package}, NCCL {nccl}, {host}")


def _extra(name: str) -> Finding:
    missing = [package for package in EXTRAS[name] if installed(package) is None]
    if missing:
        found = f"without {', '.join(missing)}"
        return Finding(name, "missing", found, f"pip install 'dbo-fx[{name}]'")
    found = ", ".join(f"{package} {installed(package)}" for package in EXTRAS[name])
    return Finding(name, "ok", found)


def main() -> int:
    """Print the diagnosis; for `python -m dbo_fx.doctor`, which needs no extra."""
    found = diagnose()
    sys.stdout.write(f"{found}\n")
    return 0 if found.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
