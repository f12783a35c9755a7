"""Tables as values: aligned plain text in pipes; in a terminal the commands draw them with rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column names.

    Attributes:
        columns: One name a column.
        rows: One text a column each.
        title: Stands above the table.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def __str__(self) -> str:
        """Columns two spaces apart, indented below the title."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        indent = "  " if self.title else ""
        drawn = [
            (indent + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True))).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *drawn] if self.title else drawn)


Block = str | Table


def plain(blocks: Sequence[Block]) -> str:
    """Paragraphs and tables as text; ends in a newline."""
    return "".join(f"{block}\n" for block in blocks)
