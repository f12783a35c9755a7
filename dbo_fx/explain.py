"""What the compiler found in a model: which inputs are split and how, what is where, and why.

Runs without weights and without other ranks: the model may live on the meta device, and the process
group only pretends.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import torch
import torch.distributed as dist

from dbo_fx.backend import compile_captured
from dbo_fx.capture import CapturedGraph, trace, value_of, where
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import OptionError
from dbo_fx.options import Options
from dbo_fx.passes.sharding import finding_of
from dbo_fx.split import SplitSpec

TARGET = "module:callable"


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
    """

    captured: str
    inputs: Mapping[str, str]
    weights: int
    verdicts: Mapping[str, int]
    notable: Sequence[tuple[str, str, str]]
    summary: str
    certificate: str
    passes: Sequence[str]

    def __str__(self) -> str:
        """Paragraphs for a terminal."""
        inputs = [f"  {name}: {kind}" for name, kind in self.inputs.items()]
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        notable = [f"  {verdict}: {place}\n    {reason}" for place, verdict, reason in self.notable]
        return "\n".join(
            [
                self.captured,
                "",
                f"inputs, and {self.weights} weights that all microbatches share:",
                *inputs,
                "",
                f"nodes: {verdicts}",
                *notable,
                "",
                self.summary,
                f"certificate:\n{indent(self.certificate, '  ')}",
                "",
                *self.passes,
            ]
        )


def explain(
    target: str, *, ranks: int = 2, dim: int | None = 0, options: Options | None = None
) -> Explanation:
    """Load a model, compile it for pretended ranks and say what was found.

    Args:
        target: `module:callable`. The callable takes nothing and returns `(model, args)` or
            `(model, args, kwargs)`; it is called when the process group exists.
        ranks: Size of the pretended process group.
        dim: Dim of the tensor arguments that is split; None where the callable marks it.
        options: How to split and schedule.

    Raises:
        OptionError: The target cannot be loaded or returns something else.
        DboError: The model is refused.
    """
    with pretended_ranks(ranks):
        model, args, kwargs = load(target)
        captured = trace(model, args, kwargs, mark=dim)
        return explanation(compile_captured(captured, options or Options()))


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
    )


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


@contextmanager
def pretended_ranks(ranks: int) -> Iterator[None]:
    """A default process group of `ranks` ranks that communicates with nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise OptionError("explain makes a process group of its own; one is initialised already.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Import and call `module:callable`.

    Raises:
        OptionError: says what is missing, or what came back instead.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise OptionError(f"{target!r} is not {TARGET}, for example my_model:build")
    if "" not in sys.path:
        sys.path.insert(0, "")  # As `python -m` does: modules of the current folder come first.
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{target!r} cannot be loaded: {error}") from error
    found = function()
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise OptionError(
            f"{target}() returned {type(found).__name__}, wanted (model, args) or "
            "(model, args, kwargs)"
        )
    model, args = found[0], found[1]
    kwargs = found[2] if len(found) == 3 else {}
    if isinstance(model, torch.nn.Module):
        model = model.eval().requires_grad_(False)
    return model, tuple(args), dict(kwargs)
