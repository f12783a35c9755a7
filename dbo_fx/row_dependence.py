"""The row-dependence test: change the later rows and see whether the earlier ones notice.

What no rule can decide (an unknown op, a cache that is written by slot and read whole, rows in
another order between dispatch and combine) is decided on the first call's real values. The unsplit
graph runs twice in lockstep, once with the contents of the later microbatches' rows replaced; at
every node the rows of the earlier ones must stay what they are. An unknown op is also called alone
with the earlier rows replaced: in a microbatch of its own the later ones cannot look back.

All ranks run it together; collectives run once in each of the two runs. Inputs are not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from dbo_fx.capture import where
from dbo_fx.differential import TOLERANCE, TOPK
from dbo_fx.layouts import Layout, Replicated, Split
from dbo_fx.passes.sharding import Obligation, finding_of
from dbo_fx.passes.sharding_packing import PACK
from dbo_fx.passes.sharding_state import storage_of, written_storages
from dbo_fx.pipeline import State
from dbo_fx.symbols import ConcreteSizes

LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor)
# Real dependence moves a row by far more than the rounding that the differential allows.
STRICTER = 0.1
# A part of one of `ConcreteSizes`' primes: a hundredth at least, such as every second position.
LEAST_DYNAMIC = min(ConcreteSizes.PRIMES) // 100
NOWHERE = "its rows lie between two dynamic sizes; mark one of them static"


class RowDependence:
    """Tests the obligations that the soundness pass left over.

    Args:
        state: The pipeline's last state.
    """

    def __init__(self, state: State) -> None:
        """Remember the unsplit graph, what it writes, and what is to be tested."""
        self.captured = state.captured
        self.count = state.microbatches
        self.obligations = {o.node: o for o in state.obligations}
        graph = state.captured.graph
        held = {storage_of(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")}
        calls = [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        writes = {n: written_storages(n) & held for n in calls}
        self.writers = {n for n, storages in writes.items() if storages}
        storages = {key for n in self.writers for key in writes[n]}
        self.written = {n for n in state.captured.placeholders if storage_of(n) in storages}
        # By graph order: the order of `users` is that of rewrites.
        last = {a: n for n in graph.nodes for a in n.all_input_nodes}
        self.dies_at: dict[Node, list[Node]] = {}
        for argument, node in last.items():
            self.dies_at.setdefault(node, []).append(argument)

    def run(self, args: Sequence[Any]) -> str | None:
        """Run the test at every boundary between microbatches.

        Args:
            args: The graph's inputs; they are not changed.

        Returns:
            Why the batch must not be split, or None.
        """
        token = self.captured.token_inputs[0]
        total = int(args[token.index].shape[token.dim])
        found: str | None = None
        for index in range(1, self.count):
            # Every rank makes every run, whatever it has found: the others wait in collectives.
            lockstep = _Lockstep(self, total * index // self.count, total)
            with torch.no_grad():
                lockstep.run(args)
            found = found or lockstep.verdict()
        return found


class _Lockstep:
    """One pair of runs."""

    def __init__(self, test: RowDependence, cut: int, total: int) -> None:
        self.test, self.cut, self.total = test, cut, total
        self.generator = torch.Generator().manual_seed(0)
        self.perturbed = 0
        self.moved: dict[Node, str] = {}
        self.found: tuple[Node, str] | None = None
        self.env: dict[Node, tuple[Any, Any]] = {}

    def verdict(self) -> str | None:
        """The message for the user."""
        if self.found is None:
            if self.perturbed:
                return None
            first = next(iter(self.test.obligations.values()))
            return (
                f"{where(first.node)} {first.reason}, and the row-dependence test found "
                "no floating-point rows to change. Register a rule (dbo_fx.register_rule), or give "
                "the model its tokens through an embedding."
            )
        node, how = self.found
        obligation = self.test.obligations.get(node) or self._cause(node)
        because = "" if obligation is None else f" ({obligation.node.name} {obligation.reason})"
        return (
            f"splitting this batch changes results: {where(node)} mixes rows of the "
            f"batch{because}: {how}. Let rows see only earlier ones, through a cache whose later "
            "slots a mask hides, or split along another dim (option split_dim)."
        )

    def _cause(self, node: Node) -> Obligation | None:
        """The last obligation before a node."""
        before: Obligation | None = None
        for here in self.test.captured.graph.nodes:
            before = self.test.obligations.get(here, before)
            if here is node:
                break
        return before

    def run(self, args: Sequence[Any]) -> None:
        """Run all nodes twice."""
        inputs = dict(zip(self.test.captured.placeholders, args, strict=True))
        for node in self.test.captured.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._input(node, inputs[node])
            elif node.op == "get_attr":
                value = getattr(self.test.captured.module, str(node.target))
                self.env[node] = (value, value)
            elif node.op == "call_function":
                self._call(node)
            self._judge(node)
            self._forget(node)

    def _judge(self, node: Node) -> None:
        """What leaves the call may not have moved: scores that a mask hides later may."""
        leaves = node.op == "output" or node in self.test.writers
        for argument in node.all_input_nodes if leaves and self.found is None else ():
            while argument in self.moved:
                self.found = (argument, self.moved[argument])
                argument = next((a for a in argument.all_input_nodes if a in self.moved), node)

    def _forget(self, node: Node) -> None:
        """Drop what no later node reads."""
        for argument in self.test.dies_at.get(node, ()):
            del self.env[argument]

    def _input(self, node: Node, value: Any) -> tuple[Any, Any]:
        one, two = value, value
        if node in self.test.written:
            one, two = value.clone(), value.clone()
        layout = _layouts(node)[0]
        if isinstance(layout, Split) and value.is_floating_point():
            two = self._changed(value, layout, later=True)
            self.perturbed += 1
        return one, two

    def _call(self, node: Node) -> None:
        obligation = self.test.obligations.get(node)
        if obligation is not None and obligation.kind == "unknown":
            self._alone(node)
        one, two = (self._computed(node, side) for side in (0, 1))
        layouts = _layouts(node)
        first = layouts[0]
        placed = isinstance(first, Split) and self._fits(_first(one), first)
        if node.target is TOPK and isinstance(first, Split) and placed:
            two = self._replayed(node, one, two, first)
        looked_up = node.target in LOOKUPS and one.is_floating_point() and self._is_constant(node)
        if looked_up and isinstance(first, Split) and placed:
            two = self._changed(two, first, later=True)
            self.perturbed += 1
        self.env[node] = (one, two)
        self._compare(node, _pairs(layouts, one, two), later=False)

    def _computed(self, node: Node, side: int) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.env[n][side])
        if node.target is PACK and side:
            args = (args[0], self._routed_alike(node.args[1]), *args[2:])
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _is_constant(self, node: Node) -> bool:
        """Whether a look-up's table is a weight, not a cache."""
        table = node.args[0]
        assert isinstance(table, Node)
        layout = _layouts(table)[0]
        return isinstance(layout, Replicated) and not layout.state

    def _compare(self, node: Node, pairs: Iterable[tuple[Any, Any, Any]], later: bool) -> None:
        """Note a node whose rows moved; `later` says which part must stay."""
        for layout, one, two in pairs:
            if not isinstance(layout, Split) or layout.shift or not isinstance(one, torch.Tensor):
                continue
            if not self._fits(one, layout):
                self.moved[node] = NOWHERE
                return
            mine, other = self._part(one, layout, later), self._part(two, layout, later)
            if _differ(mine, other):
                which, by = ("later", "earlier") if later else ("earlier", "later")
                self.moved[node] = f"{which} rows move when the contents of {by} ones change"
                return
            if other is not mine and self._is_new(node):
                other.copy_(mine)  # Rounding must not grow from layer to layer.

    def _is_new(self, node: Node) -> bool:
        """Whether the call made its result: no view of anything, nothing written."""
        op = node.target
        return isinstance(op, torch._ops.OpOverload) and not any(
            r.alias_info is not None for r in op._schema.returns
        )

    def _alone(self, node: Node) -> None:
        """Call an unknown op with one part of its rows replaced, then with the other."""
        values = {n: self.env[n][0] for n in node.all_input_nodes}
        layouts = _layouts(node)
        for later in (True, False):
            results = [self._recomputed(node, values, change, later) for change in (False, True)]
            self._compare(node, _pairs(layouts, *results), later=not later)
            for layout, one, two in _pairs(layouts, *results):
                whole = isinstance(layout, Replicated) and isinstance(one, torch.Tensor)
                if whole and _differ(one, two):
                    self.moved[node] = "its result has no rows, but moves with their contents"
            if any(self._is_nowhere(n, v) for n, v in values.items()):
                self.moved[node] = NOWHERE
            if node in self.moved and self.found is None:
                self.found = (node, self.moved[node])

    def _recomputed(self, node: Node, values: dict[Node, Any], change: bool, later: bool) -> Any:
        """The op on copies of its arguments, some rows of them replaced."""
        env = {n: self._copy(n, v, change, later) for n, v in values.items()}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _copy(self, node: Node, value: Any, change: bool, later: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        layout = _layouts(node)[0]
        if change and isinstance(layout, Split) and self._fits(value, layout):
            return self._changed(value, layout, later)
        return value.clone()

    def _is_nowhere(self, node: Node, value: Any) -> bool:
        """Whether a value has rows, but nobody can tell where."""
        layout = _layouts(node)[0]
        if not isinstance(layout, Split) or not isinstance(value, torch.Tensor):
            return False
        return not self._fits(value, layout)

    def _fits(self, value: Any, layout: Split) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        outer, inner = self._around(value, layout)
        return value.shape[layout.dim] == outer * self.total * inner

    def _around(self, value: torch.Tensor, layout: Split) -> tuple[int, int]:
        """What was flattened into the dim from the left and the right, in this call.

        For a size that is dynamic, too, the layout has a number made of large primes
        (`ConcreteSizes`), or a part of them: of two that cannot be, the larger one is dynamic.
        """
        size, outer, inner = value.shape[layout.dim], layout.outer, layout.inner
        if outer * self.total * inner == size or max(outer, inner) < LEAST_DYNAMIC:
            return outer, inner
        if inner > outer:
            return outer, size // (outer * self.total)
        return size // (inner * self.total), inner

    def _part(self, value: torch.Tensor, layout: Split, later: bool) -> torch.Tensor:
        """A view of the rows behind the cut, or before it."""
        outer, inner = self._around(value, layout)
        sizes = [outer, self.total, inner]
        rows = value.reshape([*value.shape[: layout.dim], *sizes, *value.shape[layout.dim + 1 :]])
        low, high = (self.cut, self.total) if later else (0, self.cut)
        part: torch.Tensor = rows.narrow(layout.dim + 1, low, high - low)
        return part

    def _changed(self, value: torch.Tensor, layout: Split, later: bool) -> torch.Tensor:
        """A copy with other contents in one part: noise of the same size; whole numbers in turn."""
        copy = value.clone(memory_format=torch.contiguous_format)
        part = self._part(copy, layout, later)
        if copy.is_floating_point():
            noise = torch.randn(part.shape, generator=self.generator).to(part)
            part.copy_(noise * value.abs().nan_to_num(0, 0, 0).amax().clamp(1e-3, 1e3))
        else:
            part.copy_(part.flip(layout.dim + 1))
        return copy

    def _replayed(self, node: Node, one: Any, two: Any, layout: Split) -> Any:
        """Earlier rows choose the same experts in both runs where only rounding differs."""
        mine, other = (self._part(x[0], layout, later=False) for x in (one, two))
        if _differ(mine, other):
            return two
        ids = two[1].clone()
        self._part(ids, layout, later=False).copy_(self._part(one[1], layout, later=False))
        source = node.args[0]
        dim = node.args[2] if len(node.args) > 2 else -1
        return self.env[source][1].gather(dim, ids), ids  # type: ignore[index]

    def _routed_alike(self, node: Any) -> torch.Tensor:
        """The later rows' choices of the first run: for noise's there may be no room."""
        one, two = self.env[node]
        ids: torch.Tensor = two.clone()
        layout = _layouts(node)[0]
        if isinstance(layout, Split) and self._fits(ids, layout):
            self._part(ids, layout, later=True).copy_(self._part(one, layout, later=True))
        return ids


def _layouts(node: Node) -> tuple[Layout, ...]:
    finding = finding_of(node)
    layouts = finding.layout if finding is not None else Replicated()
    return layouts if isinstance(layouts, tuple) else (layouts,)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _pairs(layouts: tuple[Layout, ...], one: Any, two: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(one, list | tuple):
        yield from zip(layouts, one, two, strict=False)
    else:
        yield layouts[0], one, two


def _differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    if torch.equal(one, two):
        return False
    if not one.is_floating_point():
        return True
    rounding = 2 * torch.finfo(one.dtype).eps
    limit = max(STRICTER * TOLERANCE.get(one.dtype, 0.0), rounding)
    one, two = one.double(), two.double()
    same = (one == two) | (one.isnan() & two.isnan())
    scale = torch.where(one.isfinite(), one, 0.0).abs().amax().clamp_min(1e-30)
    return not bool((torch.where(same, 0.0, one - two).abs() / scale).amax() <= limit)
