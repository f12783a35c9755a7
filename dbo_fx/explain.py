"""What the compiler found in a model: which inputs are split and how, what is where, and why.

Runs without weights and without other ranks: the model may live on the meta device, and the process
group only pretends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import torch

from dbo_fx.capture import CapturedGraph, value_of, where
from dbo_fx.compiled import CompiledProgram
from dbo_fx.inspect.layer_ops import layers_of
from dbo_fx.inspect.layers import LayerFacts, chosen, tables
from dbo_fx.passes.sharding import finding_of
from dbo_fx.split import SplitSpec
from dbo_fx.subject_graphs import compiled_subject
from dbo_fx.subjects import Request
from dbo_fx.tables import Block, plain

MERGED = (
    "Layers are MoE layers, counted from 0. Where the schedule does not cut between A0 and A1, "
    "both are one run of compute, called A1 below."
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `dbo-fx explain` prints.

    Attributes:
        captured: The captured graph, in words.
        inputs: Kind of every input, weights apart.
        weights: How many inputs are weights, shared by all microbatches.
        verdicts: Nodes per verdict of the soundness pass.
        notable: Nodes that are neither independent nor replicated: name and place, verdict, reason.
        summary: Layers, phases, segments, communication.
        certificate: What was proven.
        passes: One line per pass.
        layers: What each layer's phases were made of and why, and what overlaps in it.
    """

    captured: str
    inputs: Mapping[str, str]
    weights: int
    verdicts: Mapping[str, int]
    notable: Sequence[tuple[str, str, str]]
    summary: str
    certificate: str
    passes: Sequence[str]
    layers: tuple[LayerFacts, ...] = ()

    def blocks(self, layer: int | None = None) -> list[Block]:
        """Paragraphs and tables; one layer in detail, if one is asked for.

        Raises:
            OptionError: There is no such layer.
        """
        shown = chosen(self.layers, layer)
        if layer is not None:
            return [self.summary, "", MERGED, *tables(shown, detail=True)]
        inputs = [f"  {line}" for line in folded_inputs(self.inputs)]
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        notable = [f"  {verdict}: {place}\n    {reason}" for place, verdict, reason in self.notable]
        return [
            self.captured,
            "",
            f"inputs, and {self.weights} weights that all microbatches share:",
            *inputs,
            "",
            f"nodes: {verdicts}",
            *notable,
            "",
            self.summary,
            "",
            MERGED,
            *tables(shown),
            "",
            f"certificate:\n{indent(self.certificate, '  ')}",
            "",
            *self.passes,
        ]

    def __str__(self) -> str:
        """Paragraphs for a terminal."""
        return plain(self.blocks()).rstrip("\n")

    def to_json(self, layer: int | None = None) -> dict[str, Any]:
        """Plain values.

        Raises:
            OptionError: There is no such layer.
        """
        return {
            "kind": "graph",
            "captured": self.captured,
            "inputs": dict(self.inputs),
            "weights": self.weights,
            "verdicts": dict(self.verdicts),
            "notable": [
                {"place": place, "verdict": verdict, "reason": reason}
                for place, verdict, reason in self.notable
            ],
            "summary": self.summary,
            "certificate": self.certificate,
            "passes": list(self.passes),
            "layers": [facts.to_json() for facts in chosen(self.layers, layer)],
        }


def explain(
    target: str, *, ranks: int = 2, dim: int | None = 0, schedule: str | None = None
) -> Explanation:
    """Load a model, compile it for pretended ranks and say what was found.

    Args:
        target: `module:callable`, a saved graph or a Hugging Face config. A callable takes nothing
            and returns `(model, args)` or `(model, args, kwargs)`; it is called when the process
            group exists.
        ranks: Size of the pretended process group.
        dim: Dim of a model's tensor arguments that is split; None where the callable marks it.
        schedule: Name or path of the schedule.

    Raises:
        OptionError: The target cannot be loaded or returns something else.
        DboError: The model is refused.
    """
    marked = -1 if dim is None else dim
    is_model = Request(target).kind == "model"
    request = Request(target, ranks, schedule=schedule, dim=marked if is_model else None)
    with compiled_subject(request) as compiled:
        return explanation(compiled)


def explanation(compiled: CompiledProgram) -> Explanation:
    """The explanation of a compiled program."""
    nodes = [n for n in compiled.captured.graph.nodes if n.op == "call_function"]
    findings = [(n, f) for n in nodes if (f := finding_of(n)) is not None]
    plain = ("independent", "replicated")
    weights = weight_names(compiled.captured)
    kinds = inferred_spec(compiled.captured, compiled.written).as_mapping()
    inputs = {name: str(kind) for name, kind in kinds.items() if name not in weights}
    return Explanation(
        captured=str(compiled.captured),
        inputs=inputs,
        weights=len(weights),
        verdicts=dict(Counter(f.verdict for _, f in findings).most_common()),
        notable=[(where(n), f.verdict, f.reason) for n, f in findings if f.verdict not in plain],
        summary=str(compiled.summary),
        certificate=str(compiled.certificate),
        passes=[str(report) for report in compiled.reports],
        layers=layers_of(compiled),
    )


def folded_inputs(inputs: Mapping[str, str]) -> list[str]:
    """`name: kind`, one line for all names that differ in numbers alone."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, kind in inputs.items():
        found.setdefault((re.sub(r"\d+", "*", name), kind), []).append(name)
    return [
        f"{names[0]}: {kind}" if len(names) == 1 else f"{pattern}: {kind} ({len(names)} of them)"
        for (pattern, kind), names in found.items()
    ]


def weight_names(captured: CapturedGraph) -> set[str]:
    """Inputs that are parameters of the model."""
    return {n.name for n in captured.placeholders if "_parameters_" in n.name}


def inferred_spec(captured: CapturedGraph, written: Sequence[str]) -> SplitSpec:
    """How every tensor input is split, from the marks and from what the graph does with it.

    Args:
        captured: The captured graph.
        written: Names of the inputs that the program writes in place.

    Returns:
        `token:D` for inputs with the split size, `static` for weights and written inputs,
        `replicated` for the rest.
    """
    tokens = {t.name: f"token:{t.dim}" for t in captured.token_inputs}
    static = weight_names(captured) | set(written)
    kinds = {}
    for node in captured.placeholders:
        if isinstance(value_of(node), torch.Tensor):
            kind = "static" if node.name in static else "replicated"
            kinds[node.name] = tokens.get(node.name, kind)
    return SplitSpec.parse(kinds)
