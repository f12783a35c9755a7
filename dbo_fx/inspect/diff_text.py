"""A diff as text."""

from __future__ import annotations

from dbo_fx.inspect.diff import GraphDiff
from dbo_fx.inspect.diff_blocks import Block, blocks


def diff_text(found: GraphDiff) -> str:
    """Both titles, per block its lanes on both sides and its differences, and the counts.

    Lanes that are the same on both sides are printed once.
    """
    lines = [f"--- {found.was.source}", f"+++ {found.now.source}"]
    if not found:
        return "\n".join([*lines, "no difference"])
    for block in blocks(found):
        lines += ["", f"@@ {block.title} @@", *_lanes(block), *block.lines]
    counts = ", ".join(f"{count} {kind}" for kind, count in found.counts.items())
    return "\n".join([*lines, "", counts])


def _lanes(block: Block) -> list[str]:
    if block.was == block.now:
        return [f" {row}" for row in block.was]
    return [f"-{row}" for row in block.was] + [f"+{row}" for row in block.now]
