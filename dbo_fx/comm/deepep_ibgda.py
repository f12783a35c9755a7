"""Let the low-latency kernels run where there is no InfiniBand: one word of NVSHMEM's device state.

The dispatch kernel asserts `ibgda_state.num_rc_per_pe >= local experts`, also where every peer is
reached over NVLink and no such connection is used. Without InfiniBand the field is 0. This writes
it, in this process alone, and only if what lies there looks as NVSHMEM 3.4 lays it out: anything
else is refused. The one file that knows of it.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

from dbo_fx.comm.deepep_package import INFINIBAND
from dbo_fx.errors import CommunicationError

SYMBOL = "nvshmemi_ibgda_device_state_d"
WORDS = 13
RC_PER_PE = 7  # Index of the word `num_rc_per_pe`.
ENOUGH = 128


def enable_without_infiniband(local_experts: int) -> None:
    """Say that there are enough connections; nothing if InfiniBand is there.

    Args:
        local_experts: Experts of a rank.

    Raises:
        CommunicationError: The state is not where it should be.
    """
    if INFINIBAND.exists():
        return
    path, base = _library()
    offset = symbol_value(Path(path).read_bytes(), SYMBOL)
    runtime = ctypes.CDLL("libcudart.so.13")
    place = ctypes.c_void_p()
    if not offset or runtime.cudaGetSymbolAddress(
        ctypes.byref(place), ctypes.c_void_p(base + offset)
    ):
        raise _moved(f"{SYMBOL} is not found in {path}")
    state = ctypes.create_string_buffer(4 * WORDS)
    if runtime.cudaMemcpy(state, place, ctypes.c_size_t(4 * WORDS), 2):
        raise _moved("its state cannot be read")
    found = struct.unpack(f"<{WORDS}I", state.raw)[RC_PER_PE]
    if found >= local_experts:
        return
    if found:
        raise _moved(f"num_rc_per_pe is {found}, wanted 0 without InfiniBand")
    value = ctypes.c_uint32(max(local_experts, ENOUGH))
    assert place.value is not None
    target = ctypes.c_void_p(place.value + 4 * RC_PER_PE)
    if runtime.cudaMemcpy(target, ctypes.byref(value), ctypes.c_size_t(4), 1):
        raise _moved("its state cannot be written")


def _moved(what: str) -> CommunicationError:
    return CommunicationError(
        f"deepep_ll without InfiniBand: {what}. The low-latency kernels of this build cannot run "
        "on NVLink alone; use deepep_ht, or the build that dbo-fx doctor names."
    )


def _library() -> tuple[str, int]:
    """The extension of deep_ep in this process, and where it is mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = [line.split() for line in lines if "/deep_ep/_C." in line or "deep_ep_cpp." in line]
    if not mapped:
        raise _moved("the library of deep_ep is not loaded")
    return mapped[0][-1], min(int(words[0].split("-")[0], 16) for words in mapped)


def symbol_value(image: bytes, name: str) -> int:
    """Return the value of a symbol in an ELF file's table, local ones included; 0 if there is none.

    Args:
        image: The file.
        name: The symbol.
    """
    start = struct.unpack_from("<Q", image, 0x28)[0]
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, start + k * size) for k in range(count)]
    for section in (s for s in sections if s[1] == 2):  # SHT_SYMTAB
        strings, length = sections[section[6]][4:6]
        wanted = image[strings : strings + length].find(b"\0" + name.encode() + b"\0") + 1
        for at in range(section[4], section[4] + section[5], 24):
            where, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            if wanted and where == wanted and value:
                return int(value)
    return 0
