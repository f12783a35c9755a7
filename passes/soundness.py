"""May this graph be split? The first gate: refuse what is known to change results.

needs:    a tagged graph and its effects
ensures:  no random op; no input is written once per microbatch with the same value; no split input
          along an inner dim is written
before -> after: the graph is not changed

Guards and ranges are re-evaluated at every microbatch size when a batch comes (`sizes_refused`),
and the first call compares split and unsplit results (`dbo_fx.differential`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dbo_fx.capture import value_of, where
from dbo_fx.errors import SoundnessError
from dbo_fx.pipeline import State
from dbo_fx.symbols import SizeRules, free_symbols


@dataclass(frozen=True, slots=True)
class Soundness:
    """See the module's contract."""

    name: str = "soundness"

    def apply(self, state: State) -> tuple[State, str]:
        """Check; the state stays as it is.

        Raises:
            SoundnessError: names the node, the reason and what to do.
        """
        token = token_dependent(state)
        for node in state.graph.nodes:
            if node.op == "call_function":
                _refuse_random(node)
                _refuse_repeated_write(node, state, token)
        _refuse_inner_writes(state)
        mutated = len(state.effects.mutated_live_in())
        return state, f"{len(token)} nodes depend on tokens; {mutated} inputs written, in order"


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
