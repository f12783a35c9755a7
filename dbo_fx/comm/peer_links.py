"""Which half of the staging memory an operation takes, and how much memory there is.

Operations of a group stand on one stream and use the halves in turn. So one barrier is enough: a
rank that has passed operation n - 1's knows that all ranks are done with operation n - 2, which had
the same half. A region (a call or a capture) starts at half 0 behind a barrier of its own, because
nobody knows which half the region before it used last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dbo_fx.comm import groups
from dbo_fx.comm.staging import HALVES, Staging
from dbo_fx.errors import CommunicationError

LEAST_BYTES = 1 << 20


@dataclass(slots=True)
class Link:
    """What one group's operations share.

    Attributes:
        group: The group itself: another one may get its name later.
        staging: The memory in use; None before the first operation.
        outgrown: Smaller memory from before, which captured graphs may still use.
        next: The half of the next operation.
        is_fresh: The next operation starts a region.
        captures: The last operation stood under capture.
    """

    group: Any
    staging: Staging | None = None
    outgrown: list[Staging] = field(default_factory=list)
    next: int = 0
    is_fresh: bool = True
    captures: bool = False

    def begin(self) -> None:
        """Start a region."""
        self.next, self.is_fresh = 0, True

    def room(self, size: int, make: Callable[[int, int], Staging], capturing: bool) -> Staging:
        """Memory with halves of at least `size` bytes.

        Args:
            size: What the next operation takes.
            make: Makes memory of that many bytes a half, the n-th of this group.
            capturing: The operation stands under capture.

        Raises:
            CommunicationError: There is not enough, and under capture none can be made.
        """
        if self.staging is not None and self.staging.half_bytes >= size:
            return self.staging
        if capturing:
            had = 0 if self.staging is None else self.staging.half_bytes
            raise CommunicationError(
                f"copy_engine: this operation stages {size} bytes, group "
                f"{self.group.group_name!r} has room for {had}. All ranks make room together, "
                "which no capture can hold: run the program once eagerly at this size first."
            )
        rounded = max(LEAST_BYTES, 1 << (size - 1).bit_length())
        made = make(rounded, len(self.outgrown) + (self.staging is not None))
        if self.staging is not None:
            self.outgrown.append(self.staging)
        self.staging = made
        return made

    def turn(self, staging: Staging, capturing: bool = False) -> int:
        """The half of this operation, which becomes the current one."""
        if self.is_fresh or capturing != self.captures:
            self.begin()
            staging.barrier()
        self.is_fresh, self.captures = False, capturing
        index = self.next
        self.next = (index + 1) % HALVES
        return index


class Links:
    """One link for each group, made at its first operation."""

    def __init__(self) -> None:
        """None yet."""
        self._links: dict[str, Link] = {}

    def __getitem__(self, name: str) -> Link:
        """The link of the group that has this name now."""
        group = groups.process_group(name)
        link = self._links.get(name)
        if link is None or link.group is not group:
            link = self._links[name] = Link(group)
        return link

    def known(self, name: str | None) -> list[Link]:
        """The link of a group if it has one; None: all links."""
        return [link for key, link in self._links.items() if name in (None, key)]


def refuse_pretended(group: str) -> None:
    """Refuse a group of torch's "fake" backend.

    Args:
        group: Name of the process group.

    Raises:
        CommunicationError: It has no real peers.
    """
    if groups.is_fake(group):
        raise CommunicationError(
            f"copy_engine: group {group!r} only pretends to have peers, whose memory would be "
            "copied. Use transport='loopback' on one GPU, or a real group."
        )
