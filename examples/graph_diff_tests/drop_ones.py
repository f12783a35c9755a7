"""A pass of one's own: products with one are left out.

needs:    a captured graph
ensures:  no `mul` by the number one is left
before -> after: `y = mul(x, 1.0)` -> `x` wherever `y` was used
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbo_fx.pipeline import State


@dataclass(frozen=True, slots=True)
class DropOnes:
    """See the module's contract."""

    name: str = "drop_ones"

    def apply(self, state: State) -> tuple[State, str]:
        """Change the graph in place."""
        dropped = 0
        for node in list(state.graph.nodes):
            if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 1:
                node.replace_all_uses_with(node.args[0])
                state.graph.erase_node(node)
                dropped += 1
        state.graph.lint()
        state.captured.module.recompile()
        return state, f"{dropped} products with one left out"
