"""Apply a program's `SmSharing` to this process while a call of it runs.

What matmuls leave is torch's experimental SM carve-out, read by cuBLAS and CUTLASS kernels at every
launch, so a CUDA graph keeps what held during its capture; this file is the only one that touches
it. What communication gets is read by transports that can limit themselves (`Contract.takes_sms`).
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from dbo_fx.errors import OptionError
from dbo_fx.sm_sharing import SmSharing

_COMM_SMS: ContextVar[int | None] = ContextVar("dbo_fx_comm_sms", default=None)


def comm_sms() -> int | None:
    """The most SMs that communication of the running program may take; None: no limit."""
    return _COMM_SMS.get()


def matmul_carveout() -> int | None:
    """How many SMs matmuls of this process leave at present."""
    found: int | None = torch._C._get_sm_carveout_experimental()
    return found


def set_matmul_carveout(left: int | None) -> None:
    """Let matmuls of this process leave so many SMs from now on; None: none."""
    torch._C._set_sm_carveout_experimental(left)


class SmLimits:
    """What one module's calls apply.

    Args:
        device: Where the module runs; on a CPU nothing is set.
    """

    def __init__(self, device: torch.device) -> None:
        """Share nothing yet."""
        self.sharing = SmSharing()
        self._device = device
        self._before: SmSharing | None = None

    def enter(self) -> None:
        """Apply them; what a call before left behind by raising is undone first.

        Raises:
            OptionError: Matmuls would leave all SMs of the device.
        """
        self.leave()
        if not self.sharing:
            return
        is_cuda = self._device.type == "cuda"
        if is_cuda and self.sharing.left is not None:
            self._check(self.sharing.left)
        self._before = SmSharing(comm_sms(), matmul_carveout() if is_cuda else None)
        if self.sharing.comm is not None:
            _COMM_SMS.set(self.sharing.comm)
        if is_cuda and self.sharing.left is not None:
            set_matmul_carveout(self.sharing.left)

    def leave(self) -> None:
        """Put back what held before, if a call is inside."""
        before, self._before = self._before, None
        if before is None:
            return
        _COMM_SMS.set(before.comm)
        if self._device.type == "cuda" and self.sharing.left is not None:
            set_matmul_carveout(before.left)

    def _check(self, left: int) -> None:
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        if left >= count:
            raise OptionError(
                f"matmul_carveout={left} leaves nothing to matmuls: the device has {count} SMs. "
                "A few more than communication takes are enough, for example 8."
            )
