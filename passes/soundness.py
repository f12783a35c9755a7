"""May this graph be split? Refuse what a microbatch would compute differently from the whole batch.

needs:    a tagged graph, its effects and communications
ensures:  every node has a `Finding`; no row of an output or of a written input needs rows of
          another microbatch, except where `state.obligations` says that a test must decide
before -> after: nodes are only annotated

When a batch comes, guards, ranges (`sizes_refused`) and shapes (`dbo_fx.fake_rerun`) are evaluated
again at every microbatch size. The first call tests the obligations (`dbo_fx.row_dependence`) and,
with `verify="numeric"`, compares split and unsplit results (`dbo_fx.differential`). The method and
its limits: `docs/soundness.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from dbo_fx.capture import value_of, where
from dbo_fx.errors import SoundnessError
from dbo_fx.layouts import APART, Inside, Mixed, Replicated, Split
from dbo_fx.passes.positions import positions
from dbo_fx.passes.sharding import Analysis, Obligation, finding_of, propagate
from dbo_fx.pipeline import State
from dbo_fx.symbols import SizeRules, coefficient, expression, free_symbols
from dbo_fx.tag import tag_of

LEAD = "splitting this batch changes results"


@dataclass(frozen=True, slots=True)
class Soundness:
    """See the module's contract."""

    name: str = "soundness"

    def apply(self, state: State) -> tuple[State, str]:
        """Annotate the nodes and fill `obligations`.

        Raises:
            SoundnessError: names the node, its line in the model, the reason and what to do.
        """
        token = token_dependent(state)
        for node in state.graph.nodes:
            if node.op == "call_function":
                _refuse_random(node)
                _refuse_repeated_write(node, state, token)
        _refuse_inner_writes(state)
        analysis = propagate(state, positions(state))
        for _, mixed in analysis.lost:
            raise SoundnessError(f"{LEAD}: {_told(mixed)}")
        _refuse_outputs(state, analysis)
        return replace(state, obligations=tuple(analysis.obligations)), _report(state, analysis)


def _report(state: State, analysis: Analysis) -> str:
    calls = [n for n in state.graph.nodes if n.op == "call_function"]
    verdicts = Counter(f.verdict for n in calls if (f := finding_of(n)) is not None)
    kinds = Counter(o.kind for o in analysis.obligations)
    counted = ", ".join(f"{verdicts[v]} {v}" for v in sorted(verdicts))
    tests = ", ".join(f"{kinds[k]} {k}" for k in sorted(kinds)) or "nothing"
    mutated = len(state.effects.mutated_live_in())
    return f"{counted}; {mutated} inputs written, in order; left to a test: {tests}"


def _told(mixed: Mixed) -> str:
    return f"{where(mixed.node)} {mixed.reason}. {mixed.remedy}"


def _refuse_outputs(state: State, analysis: Analysis) -> None:
    output = next(n for n in reversed(state.graph.nodes) if n.op == "output")
    for index, node in enumerate(torch.utils._pytree.tree_leaves(output.args[0])):
        if not isinstance(node, Node) or not isinstance(value_of(node), torch.Tensor):
            continue
        layout = analysis.layouts[node]
        assert not isinstance(layout, tuple)
        place = f"output {index} ({node.name}) cannot be put together from microbatches"
        if isinstance(layout, Mixed):
            raise SoundnessError(f"{LEAD}: {place}: {_told(layout)}")
        if isinstance(layout, Inside):
            raise SoundnessError(
                f"{LEAD}: {place}: {where(node)} leaves the region between dispatch and combine "
                f"with its rows in another order. {APART}"
            )
        if isinstance(layout, Split | Replicated) and layout.shift:
            raise SoundnessError(
                f"{LEAD}: {place}: {where(node)} counts from its own start. {APART}"
            )
        if isinstance(layout, Split):
            _refuse_interleaved(state, node, layout, place)


def _refuse_interleaved(state: State, node: Node, layout: Split, place: str) -> None:
    """Outputs are concatenated; of a flattened dim only (outer, split, ...) like the input's."""
    token = state.captured.token_inputs[0]
    first = value_of(state.captured.placeholders[token.index])
    shape = value_of(node).shape
    if sum(state.captured.symbol in free_symbols(s) for s in shape) > 1:
        return  # Refused where outputs are merged, with the shape.
    sizes = [expression(s) for s in first.shape[: token.dim]]
    flattened = layout.dim < token.dim and coefficient(
        expression(shape[layout.dim]), state.captured.symbol
    ) not in (None, 1)
    product = sympy.prod(sizes)
    wanted = int(product) if flattened and product.is_Integer else 1
    if layout.outer != wanted:
        raise SoundnessError(
            f"{LEAD}: {place}: {where(node)} has the rows of one microbatch in several "
            f"places of dim {layout.dim}, which is flattened; they cannot be put back where they "
            "came from. Return it unflattened."
        )


def refuse_obligations(obligations: Sequence[Obligation], why: str) -> None:
    """Refuse what only a test on real values could clear.

    Args:
        obligations: What the soundness pass left over.
        why: Why there will be no test, as a sentence without its full stop.

    Raises:
        SoundnessError: names the first unknown op, and the line that gives it a rule.
    """
    for found in obligations:
        if found.kind == "unknown":
            raise SoundnessError(
                f"{where(found.node)} {found.reason}. Whether it mixes rows of the batch could "
                f"only be tested on real values: {why}."
            )


def token_dependent(state: State) -> set[Node]:
    """Nodes whose value depends on the tokens or on how many there are."""
    symbol = state.captured.symbol
    found: set[Node] = set()
    for node in state.graph.nodes:
        own = node.op == "placeholder" and symbol in free_symbols(value_of(node))
        if own or any(p in found for p in node.all_input_nodes):
            found.add(node)
    return found


def _refuse_random(node: Node) -> None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags and not _is_inactive_dropout(node)
    ):
        raise SoundnessError(
            f"{where(node)} draws random numbers: microbatches would draw others than the whole "
            "batch does. Call model.eval(), or pass the random values in as an input."
        )


def _is_inactive_dropout(node: Node) -> bool:
    """Dropout with probability 0 or outside training carries the tag, but draws nothing."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for index, argument in enumerate(target._schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        value = argument.default_value if value is None else value
        probability = argument.name in ("dropout_p", "p")
        if (probability and value == 0.0) or (argument.name == "train" and value is False):
            return True
    return False


def _refuse_repeated_write(node: Node, state: State, token: set[Node]) -> None:
    """A write that no token reaches happens once a step; copies would repeat it."""
    if node in token or not state.effects.of(node).writes & state.effects.live_in:
        return
    tag = tag_of(node)
    if tag is not None and tag.role == "shared":
        return  # Runs once for all microbatches.
    raise SoundnessError(
        f"{where(node)} writes an input in place with a value that does not depend on the tokens; "
        "it would run once per microbatch instead of once. Move the update out of the compiled "
        "region, or derive it from the number of tokens (x.shape[0])."
    )


def _refuse_inner_writes(state: State) -> None:
    inputs = state.captured.placeholders
    for token in state.captured.token_inputs:
        keys = state.effects.of(inputs[token.index]).results
        if token.dim and keys & state.effects.written():
            raise SoundnessError(
                f"input {token.name} is split along dim {token.dim} and written in place: the "
                "microbatches work on copies, so the write would be lost. Return the new value "
                "instead, or split along dim 0."
            )


def sizes_refused(rules: SizeRules, sizes: Sequence[int]) -> str | None:
    """Why a batch split into these sizes may not run, or None.

    Args:
        rules: Range and guards recorded while tracing.
        sizes: Rows of every microbatch.
    """
    for index, size in enumerate(sizes):
        broken = rules.broken_by(size)
        if broken is not None:
            return (
                f"microbatch {index} has {size} rows, but the graph was traced for {broken}. "
                "A branch or shape in the model depends on the batch size, or the batch is too "
                "small: pad with dbo_fx.wrap, or make the model independent of the batch size."
            )
    return None
