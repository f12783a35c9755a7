"""What the passes know of a node: one typed record under one `node.meta` key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dbo_fx.ir import Action, Half, Phase

if TYPE_CHECKING:
    from torch.fx import Node

KEY = "dbo_fx"


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a node belongs.

    Attributes:
        phase: The phase; None for sizes, slices, shared and merge nodes.
        layer: Index of the MoE layer (not of the decoder layer), counted from 0.
        microbatch: Index of the microbatch; None before duplication and for shared nodes.
        half: send or recv, for the two halves of a communication.
        stream: Name of the stream, once assigned.
        role: `compute`, `comm`, `size`, `shared`, `slice`, `merge` or `sync`.
        rule: Why it belongs there, in words; plays no part in comparisons.
    """

    role: str = "compute"
    phase: Phase | None = None
    layer: int | None = None
    microbatch: int | None = None
    half: Half | None = None
    stream: str | None = None
    rule: str = field(default="", compare=False, repr=False)

    @property
    def action(self) -> Action:
        """The schedule action this node is part of."""
        assert self.phase is not None
        layer = None if self.phase is Phase.TAIL else self.layer
        return Action(self.phase, self.microbatch, self.half, layer)


def tag_of(node: Node) -> Tag | None:
    """The node's tag, or None when no pass has tagged it."""
    tag: Tag | None = node.meta.get(KEY)
    return tag


def set_tag(node: Node, tag: Tag) -> None:
    """Replace the node's tag."""
    node.meta[KEY] = tag


def retag(node: Node, **changes: Any) -> None:
    """Change some fields of the node's tag."""
    tag = tag_of(node)
    assert tag is not None, f"{node.name} has no tag"
    node.meta[KEY] = replace(tag, **changes)
