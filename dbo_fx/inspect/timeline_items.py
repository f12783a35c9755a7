"""What a timeline consists of: items on lanes, what is inside them, and arrows between them."""

from __future__ import annotations

from dataclasses import dataclass

from dbo_fx.ir import COMP, Action


def is_on_comp(lane: str) -> bool:
    """Whether a lane is the compute stream, planned or measured."""
    return lane.partition(" ")[0] == COMP


@dataclass(frozen=True, slots=True)
class Inside:
    """One node of the captured graph inside an item.

    Attributes:
        name: The node's name.
        op: What it calls; `sent` and `received` for what a communication carries.
        shape: Shapes and types of its results.
        bytes: What it newly holds; None for a view, a write in place, and a size that depends on
            data.
    """

    name: str
    op: str
    shape: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Item:
    """Something that runs on a lane for a while.

    Attributes:
        stream: The lane: a stream, `in flight` for transfers that occupy no stream, or either with
            ` measured` behind it.
        start_us: When it begins; units where the timeline has no times.
        end_us: When it ends.
        name: `A0_m0@3`; `merge`.
        action: The action; None for the merge.
        nodes: What runs inside.
        is_measured: Whether the times come from a device.
        marker: How many records and waits the host has met before it.
    """

    stream: str
    start_us: float
    end_us: float
    name: str
    action: Action | None = None
    nodes: tuple[Inside, ...] = ()
    is_measured: bool = False
    marker: int = 0

    @property
    def duration_us(self) -> float:
        """How long it takes."""
        return self.end_us - self.start_us

    @property
    def microbatch(self) -> int | None:
        """The microbatch's index; None for the merge."""
        return None if self.action is None else self.action.microbatch

    @property
    def layer(self) -> int | None:
        """The MoE layer; None for the tail and the merge."""
        return None if self.action is None else self.action.layer

    @property
    def phase(self) -> str:
        """`A0`, or `merge`."""
        return self.name if self.action is None else self.action.phase.value

    @property
    def bytes(self) -> int | None:
        """What its nodes newly hold, or what a communication carries; None if nothing is known."""
        known = [node.bytes for node in self.nodes if node.bytes is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Arrow:
    """An event, from its record to a wait for it.

    Attributes:
        event: The event's number.
        from_stream: The recording stream.
        from_us: When the event happens.
        to_stream: The waiting stream.
        to_us: When that stream goes on.
        held_us: How long the stream stood still for it; 0 if the event had happened before.
        after: What ran last before the record.
        before: What the wait stands in front of.
        source: Which item the event follows: the last one of its stream that takes time.
        target: Which item waits: the next one of its stream that takes time.
    """

    event: int
    from_stream: str
    from_us: float
    to_stream: str
    to_us: float
    held_us: float
    after: str
    before: str
    source: int | None = None
    target: int | None = None
