"""Propagate layouts through a graph: which rows of a value a microbatch can compute alone.

needs:    a tagged graph, its effects, and the decision about windows over positions
ensures:  every node has a `Finding` in its meta; `Analysis` lists what only a test can decide
before -> after: nothing moves; `mean(x, 0)` gets `mixing: reduces dim 0 of x, ...`

Terms. A *layout* says how a value of the whole batch relates to the microbatches' values
(`dbo_fx.layouts`). Rules compute layouts per op. What is written in place changes the layout of the
storage, hence of all its views. An *obligation* is a node that is right only if a test on real
values says so: an unknown op, a read of a cache that the microbatches write in turn, or rows in
another order between dispatch and combine.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.communication import ALL_TO_ALL, DISPATCH_BATCHED, is_communication, is_launch
from dbo_fx.effects import is_view_op
from dbo_fx.ir import Phase
from dbo_fx.layouts import (
    APART,
    REPLICATED,
    Call,
    Inside,
    Layout,
    Layouts,
    Mixed,
    Mixing,
    Replicated,
    Split,
    candidates,
)
from dbo_fx.passes.positions import Position
from dbo_fx.passes.sharding_packing import PACK, UNPACK
from dbo_fx.passes.sharding_rules import (
    CARRIES,
    DECIDES,
    LOOKS_UP,
    MOVES,
    ORDERS,
    SHAPE_ONLY,
    SUMS,
    TAKES_SIZES,
    rule_of,
)
from dbo_fx.passes.sharding_state import LiveIns, storage_of, written_tensors
from dbo_fx.pipeline import State
from dbo_fx.symbols import ConcreteSizes, free_symbols

KEY = "dbo_fx_sharding"
CAPACITY = (
    "decides about rows by their place among all rows (a capacity that drops tokens): a microbatch "
    "would keep others"
)
DROPLESS = "Use dropless routing."
OWN_START = "uses positions that count from the microbatch's own start as if they were the batch's"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the analysis found about one node.

    Attributes:
        verdict: `independent`, `slice-with-offset`, `replicated`, `mixing` or `unknown`.
        layout: The layout of its result; one per result for lists.
        reason: Why, for `mixing` and `unknown`.
    """

    verdict: str
    layout: Layouts
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Obligation:
    """A node that only a test on real values can clear.

    Attributes:
        node: The captured node.
        kind: `unknown`, `state` or `region`.
        reason: What must hold, for messages.
    """

    node: Node
    kind: str
    reason: str


@dataclass
class Analysis:
    """Layouts of all nodes, what is left to test, and what the graph writes.

    Attributes:
        layouts: Per node that holds tensors.
        obligations: In graph order.
        lost: Writes to inputs that the microbatches cannot do in turn, in graph order.
    """

    layouts: dict[Node, Layouts] = field(default_factory=dict)
    obligations: list[Obligation] = field(default_factory=list)
    lost: list[tuple[Node, Mixed]] = field(default_factory=list)


def finding_of(node: Node) -> Finding | None:
    """The node's finding, or None before the soundness pass."""
    found: Finding | None = node.meta.get(KEY)
    return found


def propagate(state: State, positions: Mapping[Node, Position]) -> Analysis:
    """Compute all layouts and put a `Finding` on every node."""
    walk = _Walk(state, positions)
    walk.run()
    return walk.analysis


@dataclass
class _Storage:
    """A storage that the graph made or slices, and the layout of its first, whole tensor."""

    base: Node
    layout: Layout
    version: int = 0


class _Walk:
    def __init__(self, state: State, positions: Mapping[Node, Position]) -> None:
        self.state, self.positions = state, positions
        self.sizes = ConcreteSizes(state.captured.symbol)
        self.analysis = Analysis()
        self.layouts = self.analysis.layouts
        self.storages: dict[Hashable, _Storage] = {}
        self.seen: dict[Node, int] = {}
        self.obliged: dict[Node, str] = {}
        self.live = LiveIns(state, self.sizes)
        self.phase = {n: c.phase for c in state.communications for n in c.nodes}
        self.dispatched: Layout = REPLICATED
        self.inputs = {
            state.captured.placeholders[t.index]: t.dim for t in state.captured.token_inputs
        }

    def run(self) -> None:
        for node in self.state.graph.nodes:
            if node.op == "placeholder":
                dim = self.inputs.get(node)
                self._know(node, REPLICATED if dim is None else Split(dim))
            elif node.op == "call_function" and not _is_size(node):
                self._visit(node)
            else:
                self._know(node, REPLICATED)

    def _know(self, node: Node, layouts: Layouts, verdict: str | None = None) -> None:
        if not isinstance(value_of(node), torch.Tensor | list | tuple):
            node.meta[KEY] = Finding("replicated", REPLICATED)
            return
        self.layouts[node] = layouts
        reason = ""
        mixed = next((x for x in _each(layouts) if isinstance(x, Mixed)), None)
        if mixed is not None and mixed.node is node:
            verdict, reason = "mixing", mixed.reason
        if verdict is None:
            alone = all(isinstance(x, Replicated) for x in _each(layouts))
            verdict = "replicated" if alone else "mixing" if mixed else "independent"
        node.meta[KEY] = Finding(verdict, layouts, reason)
        key = storage_of(node)
        if key is not None and isinstance(value_of(node), torch.Tensor):
            storage = self.storages.get(key)
            if storage is None and not self.live.holds(key):
                assert not isinstance(layouts, tuple)
                self.storages[key] = storage = _Storage(node, layouts)
            if storage is not None:
                self.seen[node] = storage.version

    # Layouts as they are when a node reads them.

    def _layout(self, node: Node) -> Layouts:
        key = storage_of(node)
        if self.live.holds(key):
            return self.live.layout(node, self.layouts[node])
        storage = self.storages.get(key)
        if storage is None or self.seen.get(node) == storage.version:
            return self.layouts[node]
        self.seen[node] = storage.version
        if node is storage.base:
            self.layouts[node] = storage.layout
        else:
            source = self._source(node, key)
            if source is not None:
                self.layouts[node] = self._derive(node, source, self._layout(source))
        return self.layouts[node]

    def _source(self, node: Node, key: Hashable) -> Node | None:
        """The argument that a view was taken of."""
        return next((a for a in node.all_input_nodes if storage_of(a) == key), None)

    def _derive(self, node: Node, source: Node, layouts: Layouts) -> Layouts:
        """The layout of a view for another layout of what it views."""
        if node.target is operator.getitem:
            index = node.args[1]
            assert isinstance(index, int)
            return layouts[index] if isinstance(layouts, tuple) else layouts
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return layouts  # An in-place op returns its argument.
        return self._apply(node, {source: layouts})

    # One node.

    def _visit(self, node: Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            layouts = self.layouts[source]
            assert isinstance(index, int)
            found = layouts[index] if isinstance(layouts, tuple) else layouts
            self._know(node, found)
            return
        if is_communication(node):
            self._communicate(node)
            return
        known = {n: self._layout(n) for n in node.all_input_nodes if n in self.layouts}
        if self.state.effects.of(node).writes:
            self._write(node, known)
            return
        position = self.positions.get(node)
        if position is not None:
            self._know_window(node, position)
            return
        name = _name(node)
        touched = {n: x for n, x in known.items() if _is_state(x) and self._is_live(n)}
        if touched and not _is_view(node) and name not in SHAPE_ONLY:
            self.live.read(touched)
        for own in (n for n, x in known.items() if isinstance(x, Split) and self._is_live(n)):
            self.live.read_window(own)
        layouts = self._apply(node, known, judge=True)
        self._know(node, layouts, self._verdict(node))

    def _is_live(self, node: Node) -> bool:
        return self.live.holds(storage_of(node))

    def _verdict(self, node: Node) -> str | None:
        return "unknown" if self.obliged.get(node) == "unknown" else None

    def _know_window(self, node: Node, position: Position) -> None:
        dim = 0
        if node.target not in (torch.ops.aten.arange.default, torch.ops.aten.arange.start):
            source = node.args[0]
            assert isinstance(source, Node)
            dim = int(node.args[1]) % value_of(source).dim()  # type: ignore[arg-type]
        shift = 0 if position.offset else position.factor
        layout = Split(dim, 1, position.factor, shift)
        self._know(node, layout, "slice-with-offset" if position.offset else "independent")

    def _communicate(self, node: Node) -> None:
        known = {n: self._layout(n) for n in node.all_input_nodes if n in self.layouts}
        mixed = next((x for x in known.values() if isinstance(x, Mixed)), None)
        layouts = [x for x in known.values() if not isinstance(x, tuple)]
        first = layouts[0]
        if not is_launch(node):
            self._know(node, first)
        elif mixed is not None:
            self._know(node, _for_results(node, mixed))
        elif self.phase.get(node) is Phase.D:
            self.dispatched = first
            if node.target is DISPATCH_BATCHED:
                # Counts say which rows are there at all; src and ranges say where they came from.
                rows = Inside()
                self._know(node, (rows, rows, rows, Inside(place=True), Inside(place=True)))
                return
            found = tuple(self._sent(x, node) for x in layouts)
            self._know(node, found if isinstance(value_of(node), list | tuple) else found[0])
        else:
            self._know(node, self._combined(node, first))

    def _parts(self, node: Node) -> int:
        """How many ranks an all-to-all cuts dim 0 for."""
        splits = node.args[1]
        return len(splits) if isinstance(splits, list | tuple) else 1

    def _sent(self, layout: Layout, node: Node) -> Layout:
        if not isinstance(layout, Split):
            return layout
        if layout.dim:
            return replace(layout, region=True)
        if node.target is ALL_TO_ALL:
            if layout.outer % self._parts(node):
                return Mixed(node, "sends rows to ranks by their place in the batch", APART)
            return replace(layout, region=True)
        value, source = value_of(node), value_of(node.all_input_nodes[0])
        value = value[0] if isinstance(value, list | tuple) else value
        ranks = self.sizes.shape(value)[0] // max(self.sizes.shape(source)[0], 1)
        return replace(layout, outer=layout.outer * ranks, region=True)

    def _combined(self, node: Node, layout: Layout) -> Layout:
        if isinstance(layout, Inside):
            found = self.dispatched
            return replace(found, region=False) if isinstance(found, Split) else found
        if not isinstance(layout, Split):
            return layout
        layout = replace(layout, region=False)
        if layout.dim:
            return layout
        if node.target is ALL_TO_ALL:
            found = self._sent(layout, node)
            return found if isinstance(found, Mixed) else layout
        ranks = self.sizes.shape(value_of(node.all_input_nodes[0]))[0] // max(
            self.sizes.shape(value_of(node))[0], 1
        )
        if layout.outer % ranks:
            return Mixed(node, "adds up rows that lie in another order than at dispatch", DROPLESS)
        return replace(layout, outer=layout.outer // ranks)

    # Rules, and what is the same for all of them.

    def _apply(self, node: Node, known: dict[Node, Layouts], judge: bool = False) -> Layouts:
        """The layouts of a call's results, given those of its arguments."""
        name = _name(node)
        if name in SHAPE_ONLY:
            return _for_results(node, REPLICATED)
        given = {n: x for n, x in known.items() if not isinstance(x, tuple)}
        mixed = next((x for x in given.values() if isinstance(x, Mixed)), None)
        if mixed is not None:
            return _for_results(node, mixed)
        try:
            self._refuse_batch_size(node, name, given)
            return self._ruled(node, name, given, judge)
        except Mixing as found:
            return _for_results(node, Mixed(node, found.reason, found.remedy))

    def _ruled(self, node: Node, name: str, given: dict[Node, Layout], judge: bool) -> Layouts:
        state = any(_is_state(x) for x in given.values())
        rows = any(isinstance(x, Split | Inside) for x in given.values())
        if state and rows and judge:
            caches = [n.name for n, x in given.items() if _is_state(x)]
            self._oblige(node, "state", f"reads {caches[0]}, which earlier microbatches write")
        shift = self._shift(node, name, given)
        plain: dict[Node, Layouts] = {n: _plain(x, name) for n, x in given.items()}
        if any(isinstance(x, Inside) for x in given.values()) and node.target is not UNPACK:
            return self._inside(node, name, given)
        rule = rule_of(_qualified(node))
        if rule is None:
            return self._unknown(node, given, judge)
        call = Call(node, plain, self.sizes)
        try:
            found = rule(call)
        except (KeyError, IndexError, AttributeError, TypeError):
            return self._unknown(node, given, judge)  # An overload that the rule does not know.
        except Mixing:
            if not self._may_reorder(node, name, given):
                raise
            return self._reordered(node, name, judge)
        if node.target is PACK and judge:
            self._oblige(node, "region", "puts rows into blocks for other ranks")
        alone = state and not rows
        if isinstance(found, tuple):
            return tuple(_dressed(x, shift, alone) for x in found)
        return _dressed(found, shift, alone)

    def _refuse_batch_size(self, node: Node, name: str, given: dict[Node, Layout]) -> None:
        """A number that follows the batch size is another one in a microbatch."""
        if name in TAKES_SIZES or len(given) == len(node.all_input_nodes):
            return
        symbol = self.state.captured.symbol
        for argument in node.all_input_nodes:
            value = value_of(argument)
            if not isinstance(value, torch.Tensor | list | tuple) and symbol in free_symbols(value):
                raise Mixing(
                    "computes with the number of rows in the batch, and a microbatch has fewer",
                    "Pass the number in as a tensor input that is not split.",
                )

    def _shift(self, node: Node, name: str, given: dict[Node, Layout]) -> int:
        shifts = {
            n: x.shift for n, x in given.items() if isinstance(x, Split | Replicated) and x.shift
        }
        if not shifts or name in LOOKS_UP:
            return 0
        if name in CARRIES and len(set(shifts.values())) == 1 and len(shifts) == len(given):
            return next(iter(shifts.values()))
        if name in SUMS:
            return _summed(node, name, shifts)
        raise Mixing(OWN_START, "Build the positions twice, or pass them in as an input.")

    def _unknown(self, node: Node, given: dict[Node, Layout], judge: bool) -> Layouts:
        splits = [x for x in given.values() if isinstance(x, Split)]
        if not splits:
            return _for_results(node, REPLICATED)
        if judge:
            name = _qualified(node)
            self._oblige(node, "unknown", f"has no rule; {how_to_register(name)}")
        value = value_of(node)
        values = value if isinstance(value, list | tuple) else [value]
        found = tuple(self._guess(node, v, splits[0]) for v in values)
        return found if isinstance(value, list | tuple) else found[0]

    def _guess(self, node: Node, value: Any, like: Split) -> Layout:
        if not isinstance(value, torch.Tensor):
            return REPLICATED
        options = list(candidates(self.sizes.shape(value), self.sizes.prime, like))
        if not options:
            return REPLICATED
        fits = [x for x in options if (x.outer, x.inner) == (like.outer, like.inner)]
        best = [x for x in fits if x.dim == like.dim] or fits or options
        return replace(best[0], shift=0)

    # Between dispatch and combine.

    def _may_reorder(self, node: Node, name: str, given: dict[Node, Layout]) -> bool:
        splits = [x for x in given.values() if isinstance(x, Split)]
        inside = any(x.region for x in splits)
        counts = name in ("sum", "cumsum") and value_of(node.all_input_nodes[0]).is_floating_point()
        return inside and name in ORDERS | MOVES and not counts

    def _reordered(self, node: Node, name: str, judge: bool) -> Layouts:
        if judge:
            self._oblige(node, "region", "puts rows between dispatch and combine in another order")
        if name == "sort":
            return (Inside(), Inside(place=True))
        return _for_results(node, Inside(place=name in ORDERS))

    def _inside(self, node: Node, name: str, given: dict[Node, Layout]) -> Layouts:
        outside = [n for n, x in given.items() if isinstance(x, Split) and not x.region]
        if outside:
            raise Mixing(
                f"meets rows in the order of dispatch with {outside[0].name} from outside", APART
            )
        places = [x for x in given.values() if isinstance(x, Inside) and x.place]
        if places and name in DECIDES:
            raise Mixing(CAPACITY, DROPLESS)
        if name == "sort":
            return (Inside(bool(places)), Inside(place=True))
        if name in MOVES:
            first = given.get(node.all_input_nodes[0])
            return _for_results(node, Inside(isinstance(first, Inside) and first.place))
        if name not in ORDERS and name not in CARRIES and rule_of(_qualified(node)) is None:
            raise Mixing(
                "is not known, and works on rows in the order of dispatch",
                f"Say how it treats rows: {how_to_register(_qualified(node))}.",
            )
        value = value_of(node)
        counts = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return _for_results(node, Inside(bool(places) or (name in ORDERS and counts)))

    def _oblige(self, node: Node, kind: str, reason: str) -> None:
        if node not in self.obliged:
            self.obliged[node] = kind
            self.analysis.obligations.append(Obligation(node, kind, reason))

    # Writes.

    def _write(self, node: Node, known: dict[Node, Layouts]) -> None:
        target = _written(node)
        if target is None:
            self._write_unknown(node, known)
            return
        key = storage_of(target)
        if self.live.holds(key):
            mixed = self.live.write(node, target, self._new_content(node, target, known), known)
            if mixed is not None:
                self.analysis.lost.append((node, mixed))
            self._know(node, self.layouts[target], "independent" if mixed is None else "mixing")
            return
        layout = self._new_content(node, target, known)
        self._store(node, target, key, layout)

    def _new_content(self, node: Node, target: Node, known: dict[Node, Layouts]) -> Layout:
        name = _name(node)
        if name in ("zero", "fill") and not isinstance(known[target], Mixed):
            return REPLICATED
        if name == "copy":
            source = node.args[1]
            assert isinstance(source, Node)
            layout, held = known[source], known[target]
            assert not isinstance(layout, tuple)
            assert not isinstance(held, tuple)
            if isinstance(held, Mixed) and isinstance(layout, Replicated):
                return held
            if isinstance(layout, Split):
                ranks = value_of(target).dim() - value_of(source).dim()
                layout = replace(layout, dim=layout.dim + ranks)
            return layout
        found = self._apply(node, known, judge=not self._is_live(target))
        return found[0] if isinstance(found, tuple) else found

    def _store(self, node: Node, target: Node, key: Hashable, layout: Layout) -> None:
        storage = self.storages[key]
        old = storage.layout
        new = self._join(node, target, key, layout)
        if new != old:
            storage.layout, storage.version = new, storage.version + 1
        if (
            storage.base.op == "placeholder"
            and isinstance(new, Mixed)
            and not isinstance(old, Mixed)
        ):
            self.analysis.lost.append((node, new))
        self._know(node, self._layout(target))

    def _join(self, node: Node, target: Node, key: Hashable, layout: Layout) -> Layout:
        """The layout of a whole storage after one of its views got this one."""
        storage = self.storages[key]
        if isinstance(layout, Mixed | Inside) or isinstance(storage.layout, Mixed):
            return layout if isinstance(layout, Mixed | Inside) else storage.layout
        before = self._layout(target)
        if isinstance(before, Mixed):
            return Mixed(node, before.reason, before.remedy)
        if target is storage.base and not isinstance(layout, Replicated):
            return layout
        if isinstance(layout, Replicated):
            joined = storage.layout
            keep = isinstance(joined, Replicated) and layout.state and not joined.state
            return replace(joined, state=True) if keep else joined  # type: ignore[arg-type]
        if layout == before:
            return storage.layout
        shape = self.sizes.shape(value_of(storage.base))
        if isinstance(storage.layout, Replicated):
            for option in candidates(shape, self.sizes.prime, layout):
                if self._through(target, key, option) == layout:
                    return option
        return Mixed(node, "writes rows where others lie, or only for some of them", APART)

    def _through(self, view: Node, key: Hashable, base: Layout) -> Layouts:
        """The layout of a view if the whole storage had this one."""
        if view is self.storages[key].base:
            return base
        source = self._source(view, key)
        if source is None:
            return REPLICATED
        return self._derive(view, source, self._through(source, key, base))

    def _write_unknown(self, node: Node, known: dict[Node, Layouts]) -> None:
        """An op that writes several tensors, or one that nothing is known of."""
        layouts = self._apply(node, known, judge=True)
        reason = f"writes in place and has no rule; {how_to_register(_qualified(node))}"
        for argument in node.all_input_nodes:
            if self._is_live(argument) and argument in written_tensors(node):
                self.analysis.lost.append((node, Mixed(node, reason, APART)))
        self._know(node, layouts, self._verdict(node))


def how_to_register(op: str) -> str:
    """The line that gives an op a rule."""
    return f'dbo_fx.register_rule("{op}", dbo_fx.row_wise(dim=0)) if it works row by row'


def _each(layouts: Layouts) -> Iterator[Layout]:
    yield from layouts if isinstance(layouts, tuple) else (layouts,)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view_op(node.target)


def _is_size(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _is_state(layout: Layouts) -> bool:
    return isinstance(layout, Replicated) and layout.state


def _qualified(node: Node) -> str:
    target = node.target
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else str(target)


def _name(node: Node) -> str:
    """The op's name without namespace, and without the underscore of an in-place op."""
    name = _qualified(node).split("::")[-1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _plain(layout: Layout, name: str) -> Layout:
    """The layout as rules see it: without state, and with its shift only where that is an index."""
    if isinstance(layout, Replicated):
        return Replicated(layout.shift if name in LOOKS_UP else 0)
    if isinstance(layout, Split) and name not in LOOKS_UP:
        return replace(layout, shift=0)
    return layout


def _dressed(layout: Layout, shift: int, state: bool) -> Layout:
    if isinstance(layout, Replicated):
        return Replicated(shift, state) if shift or state else REPLICATED
    return replace(layout, shift=shift) if isinstance(layout, Split) else layout


def _for_results(node: Node, layout: Layout) -> Layouts:
    value = value_of(node)
    return (layout,) * len(value) if isinstance(value, list | tuple) else layout


def _summed(node: Node, name: str, shifts: dict[Node, int]) -> int:
    """The shift of a sum, difference, product with a number, quotient, or comparison."""
    left, right = (*node.args, None)[:2]
    one = shifts.get(left, 0) if isinstance(left, Node) else 0
    two = shifts.get(right, 0) if isinstance(right, Node) else 0
    if name in ("add", "sub", "rsub") and node.kwargs.get("alpha", 1) == 1:
        return one + two if name == "add" else one - two if name == "sub" else two - one
    if name in ("eq", "ne", "lt", "le", "gt", "ge") and one == two:
        return 0
    if name == "neg":
        return -one
    if isinstance(right, int) and right:
        if name == "mul":
            return one * right
        exact = one % right == 0
        rounds = name == "floor_divide" or node.kwargs.get("rounding_mode") == "floor"
        if exact and name == "div" and not node.kwargs.get("rounding_mode"):
            return one // right
        if exact and rounds:
            return one // right
        if exact and name == "remainder":
            return 0
    raise Mixing(OWN_START, "Build the positions twice, or pass them in as an input.")


def _written(node: Node) -> Node | None:
    """The only tensor that an in-place op writes; None for several."""
    found = written_tensors(node)
    known = rule_of(_qualified(node)) is not None or _name(node) in ("copy", "zero", "fill")
    return found[0] if len(found) == 1 and known else None
