"""What transports need not do, said once: classes to inherit from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ReceivedByEvent:
    """A transport whose `recv` is an event that the program itself waits for."""

    __slots__ = ()

    def finish(self, flight: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> None:
        """Do nothing: the program's wait for the event already made the outputs usable.

        Args:
            flight: What `launch` returned; the caller lets go of it after this.
            outputs: The outputs of the launch.
        """


class Independent:
    """A transport none of whose operations depends on those before it."""

    __slots__ = ()

    def begin(self, group: str) -> None:
        """Do nothing: no operation depends on those before it.

        Args:
            group: Name of the process group.
        """

    def realign(self, group: str | None) -> None:
        """Do nothing: no operation depends on those before it.

        Args:
            group: Name of a process group; None for all.
        """
