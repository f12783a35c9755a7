"""What a program text or a schedule overlaps, layer by layer, and what it does not and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import overlap_report
from dbo_fx.inspect.layers import LayerFacts, chosen, layers_of_program, tables
from dbo_fx.ir import Program
from dbo_fx.tables import Block, plain


@dataclass(frozen=True, slots=True)
class ProgramExplanation:
    """What `dbo-fx explain` prints of a text, which has no ops and no inputs.

    Attributes:
        program: The program.
        layers: What overlaps in each layer.
    """

    program: Program
    layers: tuple[LayerFacts, ...]

    @property
    def summary(self) -> str:
        """Two lines."""
        p = self.program
        return (
            f"{p.schedule}: MoE layers: {p.layers}, microbatches: {p.microbatches}, "
            f"transport: {p.transport}\n"
            "A program text has no ops. Give a model, a saved graph or a config to see what its "
            "phases are made of."
        )

    def blocks(self, layer: int | None = None) -> list[Block]:
        """Paragraphs and tables.

        Raises:
            OptionError: There is no such layer.
        """
        return [self.summary, *tables(chosen(self.layers, layer), detail=layer is not None)]

    def __str__(self) -> str:
        """Paragraphs for a terminal."""
        return plain(self.blocks()).rstrip("\n")

    def to_json(self, layer: int | None = None) -> dict[str, Any]:
        """Plain values.

        Raises:
            OptionError: There is no such layer.
        """
        return {
            "kind": "program",
            "schedule": self.program.schedule,
            "microbatches": self.program.microbatches,
            "transport": self.program.transport,
            "layers": [facts.to_json() for facts in chosen(self.layers, layer)],
        }


def explain_program(
    program: Program, source: str = "", lines: Sequence[int] = ()
) -> ProgramExplanation:
    """Say what overlaps in a program, layer by layer.

    Args:
        program: The program.
        source: The file that it was read from, for messages.
        lines: Per step the number of its line there.

    Raises:
        VerificationError: The program is not safe; then what it overlaps means nothing.
    """
    execution = execution_of_program(program)
    prove(replace(execution, source=source, lines=tuple(lines)) if lines else execution)
    return ProgramExplanation(program, layers_of_program(overlap_report(execution), program.layers))
