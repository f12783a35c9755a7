"""Copy the graph per microbatch by rebinding the size symbol; slice inputs, merge outputs.

needs:    a tagged, sound graph and its effects
ensures:  a graph that runs microbatch 0 whole, then 1, ...; every copy carries its microbatch in
          its tag; shared nodes exist once; `state.copies` and `effects` speak of the new graph
before -> after: `y = f(x, s)` ->
                 `x0 = x[:s0]; y0 = f(x0, s0); x1 = x[s0:]; y1 = f(x1, s1); cat(y0, y1)`

Rebinding, not retracing: retracing at the microbatch's size adds guards to Dynamo's graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg
from torch.utils._pytree import tree_map

from dbo_fx.capture import is_size_value, value_of, where
from dbo_fx.effects import Access, Effects
from dbo_fx.errors import SoundnessError
from dbo_fx.passes.normalize import size_node
from dbo_fx.passes.positions import positions
from dbo_fx.pipeline import State
from dbo_fx.symbols import coefficient, expression, free_symbols
from dbo_fx.tag import Tag, retag, set_tag, tag_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Microbatch:
    """See the module's contract.

    Attributes:
        count: Number of microbatches; 1 keeps the batch whole.
    """

    count: int = 2
    name: str = "microbatch"

    def apply(self, state: State) -> tuple[State, str]:
        """Build the duplicated graph.

        Raises:
            SoundnessError: an output without a token dim, or a position used both ways.
        """
        copier = _Copier(state, self.count)
        copier.run()
        new = replace(
            state,
            graph=copier.graph,
            effects=copier.effects,
            microbatches=self.count,
            copies=tuple(copier.env),
        )
        offsets = sum(p.offset for p in copier.positions.values())
        text = (
            f"{self.count} microbatches, {len(copier.graph.nodes)} nodes; {copier.shared} shared, "
            f"{offsets} positions offset, {copier.merged} outputs merged"
        )
        return new, text


class _Copier:
    def __init__(self, state: State, count: int) -> None:
        self.state, self.count = state, count
        self.symbol = state.captured.symbol
        self.source = list(state.graph.nodes)
        self.positions = positions(state)
        self.graph = Graph()
        self.effects = Effects(live_in=state.effects.live_in)
        self.inputs: dict[Node, Node] = {}
        self.env: list[dict[Node, Node]] = [{} for _ in range(count)]
        self.start: list[Node | int] = []
        self.size: list[Node | int] = []
        self.shared = self.merged = 0
        private = self._private_keys()
        self.rename = [{k: (k, m) for k in private} for m in range(count)]

    def run(self) -> None:
        for node in self.source:
            if node.op in ("placeholder", "get_attr"):
                self.inputs[node] = self._copy(node, None, self.inputs)
        self._split_points()
        for m in range(self.count):
            self.env[m].update(self.inputs)
            self._slice_inputs(m)
        for m in range(self.count):
            for node in self.source:
                if node.op == "call_function" and node is not self.total_source:
                    self._copy_call(node, m)
        self._merge_outputs()
        self.graph.lint()

    def _private_keys(self) -> frozenset[Hashable]:
        """Storages that every microbatch has its own copy of."""
        common = set(self.state.effects.live_in)
        for node in self.source:
            tag = tag_of(node)
            if tag is not None and tag.role == "shared":
                common |= self.state.effects.of(node).results
        everything = {k for a in self.state.effects.access.values() for k in a.results}
        return frozenset(everything - common)

    def _call(self, function: Any, args: tuple[Any, ...], tag: Tag, value: Any = None) -> Node:
        node = self.graph.call_function(function, args)
        node.meta["val"] = value
        set_tag(node, tag)
        return node

    def _copy(self, node: Node, m: int | None, env: dict[Node, Node]) -> Node:
        # Named at birth: a rename would make the namespace search for a free number again.
        name = node.name if m is None else f"{node.name}_m{m}"
        args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copy.meta = dict(node.meta)
        if m is not None:
            retag(copy, microbatch=m)
        access = self.state.effects.of(node)
        self.effects.access[copy] = access if m is None else access.renamed(self.rename[m])
        return copy

    def _split_points(self) -> None:
        """Boundaries total * i // count: the midpoint for two."""
        base = size_node(self.state.captured)
        self.total_source = base
        total = self.inputs.get(base)
        if total is None:
            total = self._copy(base, None, self.inputs)
        set_tag(total, Tag("total"))
        self.total, value = total, value_of(base)
        bounds: list[Node | int] = [0]
        for i in range(1, self.count):
            scaled = self._call(operator.mul, (total, i), Tag("size"), value) if i > 1 else total
            bounds.append(self._call(operator.floordiv, (scaled, self.count), Tag("size"), value))
        bounds.append(total)
        self.bounds = bounds
        for m in range(self.count):
            low, high = bounds[m], bounds[m + 1]
            size = high
            if m:
                size = self._call(operator.sub, (high, low), Tag("size", microbatch=m), value)
            self.start.append(low)
            self.size.append(size)

    def _slice_inputs(self, m: int) -> None:
        env, base = self.env[m], self.total_source
        size = self.size[m]
        assert isinstance(size, Node)
        env[base] = size
        if self.count == 1:
            return
        placeholders = self.state.captured.placeholders
        for token in self.state.captured.token_inputs:
            source = placeholders[token.index]
            args = (self.inputs[source], token.dim, self.bounds[m], self.bounds[m + 1])
            value = value_of(source)
            piece = self._call(aten.slice.Tensor, args, Tag("slice", microbatch=m), value)
            access = Access(results=self.effects.of(self.inputs[source]).results)
            if token.dim:  # Compiled segments and many kernels want contiguous inputs.
                self.effects.access[piece] = access
                key = frozenset({(token.name, "slice", m)})
                access = Access(access.results, frozenset(), key)
                piece = self._call(
                    aten.contiguous.default, (piece,), Tag("slice", microbatch=m), value
                )
            self.effects.access[piece] = access
            env[source] = piece

    def _copy_call(self, node: Node, m: int) -> None:
        env = self.env[m]
        tag = tag_of(node)
        assert tag is not None, f"{node.name} has no tag"
        if tag.role == "shared":
            if m == 0:
                copy = self._copy(node, None, env)
                self.shared += 1
                for other in self.env:
                    other[node] = copy
            return
        copy = self._copy(node, m, env)
        env[node] = copy
        position = self.positions.get(node)
        if position is not None and position.offset and m:
            position.shift(copy, self.start[m])

    def _merge_outputs(self) -> None:
        output = self.source[-1]
        assert output.op == "output"
        done: dict[Node, Any] = {}

        def merge(item: Any) -> Any:
            if not isinstance(item, Node):
                return item
            if item not in done:
                done[item] = self._merge(item)
            return done[item]

        merged = self.graph.output(tree_map(merge, output.args[0]))
        reads = [self.effects.of(n).results for n in merged.all_input_nodes]
        self.effects.access[merged] = Access(reads=frozenset().union(*reads))

    def _merge(self, node: Node) -> Any:
        value = value_of(node)
        if node in self.inputs:
            return self.inputs[node]
        if is_size_value(value):
            return self._total_of(node)
        copies = [env[node] for env in self.env]
        if all(c is copies[0] for c in copies):
            return copies[0]
        dims = [d for d, s in enumerate(value.shape) if self.symbol in free_symbols(s)]
        if not dims and self.state.effects.of(node).results & self.state.effects.live_in:
            return copies[-1]  # A view of a cache or counter that the microbatches wrote in turn.
        if len(dims) != 1:
            raise SoundnessError(
                f"output {where(node)} has shape {tuple(value.shape)} and cannot be put together "
                f"from microbatches: exactly one dim must follow the split size {self.symbol}. A "
                "reduction over the batch must be computed outside the compiled region."
            )
        self.merged += 1
        return self._cat(copies, value, dims[0], where(node))

    def _cat(self, copies: list[Node], value: torch.Tensor, dim: int, place: str) -> Node:
        """Concatenate along the split size; undo a flattening of (outer, split, ...) first."""
        token = self.state.captured.token_inputs[0]
        first = value_of(self.state.captured.placeholders[token.index])
        sizes = [expression(s) for s in first.shape[: token.dim]]
        # Size.numel() would fix a symbolic size, and Dynamo then refuse the mark on it.
        outer = math.prod(map(int, sizes)) if all(s.is_Integer for s in sizes) else None
        factor = coefficient(expression(value.shape[dim]), self.symbol)
        flat = dim < token.dim and outer != 1 and factor != 1
        if factor is None or (flat and (outer is None or factor % outer)):
            raise SoundnessError(
                f"output {place}: size {value.shape[dim]} of dim {dim} is not a multiple of the "
                f"split size {self.symbol} that a concatenation could rebuild. Return it per token."
            )
        tag = Tag("merge")
        if flat:
            copies = [self._known(aten.unflatten.int, (c, dim, [outer, -1]), tag) for c in copies]
        merged = self._known(aten.cat.default, (copies, dim + 1 if flat else dim), tag)
        if flat:
            merged = self._known(aten.flatten.using_ints, (merged, dim, dim + 1), tag)
        merged.meta["val"] = value
        return merged

    def _known(self, function: Any, args: tuple[Any, ...], tag: Tag) -> Node:
        """A call that reads its arguments and has a result of its own."""
        node = self._call(function, args, tag)
        reads = [self.effects.of(n).results for n in node.all_input_nodes]
        key = frozenset({("merge", node.name)})
        self.effects.access[node] = Access(frozenset().union(*reads), frozenset(), key)
        return node

    def _total_of(self, node: Node) -> Node:
        """A size in the output: computed from the whole batch."""
        if node is self.total_source:
            return self.total
        if tag_of(node) not in (Tag("size"),):
            raise SoundnessError(f"output {where(node)} is a number that depends on the tokens")
        env = {**self.inputs, self.total_source: self.total}
        for here in self.source[: self.source.index(node) + 1]:
            if here not in env and tag_of(here) == Tag("size"):
                env[here] = self._copy(here, None, env)
        return env[node]
