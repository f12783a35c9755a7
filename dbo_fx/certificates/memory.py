"""How much memory a program holds at most, against the graph that was not split.

Two levels. Program-level values cross segments: what segments return, landing buffers, merges. The
emitted module's variables hold exactly these, so their bytes at every call are exact. Inside a
segment further values live; their peak is read off each distinct segment once, or measured
(`measure.measure_segments`). Not counted: what the caller holds (inputs, weights, caches), kernel
workspaces, and what a transport allocates for itself.

The unsplit graph is walked alike, op by op, its communications in one piece with their results.
All layers are walked, so the numbers need no steady state.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import sympy
import torch
from torch.fx import Node

from dbo_fx.capture import CapturedGraph, value_of
from dbo_fx.certificates.lifetimes import lifetimes_of
from dbo_fx.certificates.memory_report import Alive, MemoryReport, Moment
from dbo_fx.certificates.storage_spans import WHOLE, Bytes, Span, program_spans, traced_spans
from dbo_fx.errors import OptionError
from dbo_fx.passes.schedule import action_of
from dbo_fx.pipeline import State
from dbo_fx.symbols import expression, hint_of
from dbo_fx.tag import tag_of

Measured = Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class MemoryCertificate:
    """Predicted memory of one program, for any size of the batch.

    Attributes:
        layers: MoE layers, all of them walked.
        reports: For the sizes asked for; first the traced size, if tracing knew one.
    """

    layers: int
    reports: tuple[MemoryReport, ...]
    _model: _Model = field(repr=False, compare=False)

    def at(self, tokens: int, others: Mapping[sympy.Symbol, int] | None = None) -> MemoryReport:
        """The prediction for one size of the batch.

        Args:
            tokens: Size of the whole batch along the dim that is split.
            others: Values of further size symbols; the traced ones if left out.

        Raises:
            OptionError: `tokens` is no size.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise OptionError(f"memory: tokens={tokens!r} is no batch size; pass an integer >= 1")
        return self._model.at(tokens, others)

    def with_measured(self, measured: Measured) -> MemoryCertificate:
        """The same with measured instead of computed peaks inside segments.

        Args:
            measured: What `measure.measure_segments` returned.
        """
        model = replace(self._model, measured={**self._model.measured, **measured})
        return replace(self, _model=model, reports=tuple(model.at(r.tokens) for r in self.reports))

    def __str__(self) -> str:
        """A few lines for every size."""
        if not self.reports:
            return "memory: no size was known while tracing; ask for one with at(tokens)"
        return "\n".join(map(str, self.reports))

    def to_json(self) -> dict[str, object]:
        """Plain values, the curve included."""
        return {"layers": self.layers, "sizes": [r.to_json() for r in self.reports]}


def memory_certificate(state: State, tokens: Iterable[int] = ()) -> MemoryCertificate:
    """Predict a program's memory.

    Args:
        state: The state behind `lower` (and before `emit`).
        tokens: Sizes of the whole batch to report besides the traced one.
    """
    model = _Model.of(state)
    traced = traced_sizes(state.captured).get(state.captured.symbol)
    sizes = dict.fromkeys([*([] if traced is None else [traced]), *tokens])
    return MemoryCertificate(state.layers, tuple(model.at(size) for size in sizes), model)


def traced_sizes(captured: CapturedGraph) -> dict[sympy.Symbol, int]:
    """The values that size symbols had while tracing."""
    return size_values(captured, [value_of(n) for n in captured.placeholders])


def size_values(captured: CapturedGraph, args: Sequence[object]) -> dict[sympy.Symbol, int]:
    """The values of size symbols in these inputs; of fake ones the traced values."""
    found: dict[sympy.Symbol, int] = {}
    for node, given in zip(captured.placeholders, args, strict=True):
        value = value_of(node)
        pairs = [(value, given)]
        if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
            pairs = list(zip(value.shape, given.shape, strict=True))
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and isinstance(expression(size), sympy.Symbol):
                known = hint_of(number) if isinstance(number, torch.SymInt) else number
                if isinstance(known, int):
                    found[expression(size)] = known
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    position: int
    name: str
    layer: int | None
    segment: str | None
    microbatch: int


@dataclass(frozen=True)
class _Model:
    """Spans with symbolic sizes, of the program, its segments and the unsplit graph."""

    captured: CapturedGraph
    microbatches: int
    calls: tuple[_Call, ...]
    program: tuple[Span, ...]
    segments: Mapping[str, tuple[Span, ...]]
    unsplit: tuple[Span, ...]
    traced: Mapping[sympy.Symbol, int]
    measured: Measured = field(default_factory=dict)

    @classmethod
    def of(cls, state: State) -> _Model:
        order = list(state.graph.nodes)
        return cls(
            captured=state.captured,
            microbatches=state.microbatches,
            calls=tuple(_calls(order)),
            program=program_spans(lifetimes_of(state.effects, order), order),
            segments={
                name: traced_spans(list(segment.graph.nodes))
                for name, segment in state.segments.items()
            },
            unsplit=traced_spans(list(state.captured.graph.nodes)),
            traced=traced_sizes(state.captured),
        )

    def at(self, tokens: int, others: Mapping[sympy.Symbol, int] | None = None) -> MemoryReport:
        rows = microbatch_sizes(tokens, self.microbatches)
        sizes = _Sizes(self.captured.symbol, tokens, rows, {**self.traced, **(others or {})})
        curve = _curve(self.program, sizes, self.calls[-1].position if self.calls else 0)
        born = _born(self.program, sizes)
        inside = _Inside(self.segments, sizes, self.measured)
        moments = []
        for call in self.calls:
            held = curve[call.position]
            inner = max(inside.peak(call), born.get(call.position, 0))
            during = held - born.get(call.position, 0) + inner
            moments.append(Moment(call.name, call.layer, held, during))
        last = max((s.dies for s in self.unsplit), default=0)
        peak = max(range(len(moments)), key=lambda i: moments[i].during_bytes, default=None)
        return MemoryReport(
            tokens=tokens,
            microbatches=rows,
            curve=tuple(moments),
            unsplit_peak_bytes=max(_curve(self.unsplit, sizes, last), default=0),
            alive=() if peak is None else self._alive(self.calls[peak], moments[peak], sizes),
            uncounted=tuple(dict.fromkeys(sizes.uncounted)),
        )

    def _alive(self, call: _Call, moment: Moment, sizes: _Sizes) -> tuple[Alive, ...]:
        """What is held while a call runs; what it makes itself is one entry."""
        names = {c.position: c.name for c in self.calls}
        spans = [s for s in self.program if s.born < call.position <= s.dies]
        alive = [
            Alive(s.name, sizes.of(s), names.get(s.born, ""), _death(s, self.calls)) for s in spans
        ]
        own = moment.during_bytes - sum(a.bytes for a in alive)
        if own:
            alive.append(Alive(f"inside {call.name}", own, call.name, call.name))
        return tuple(sorted(alive, key=lambda a: -a.bytes))


def microbatch_sizes(tokens: int, count: int) -> tuple[int, ...]:
    """Rows of every microbatch, as the program cuts them."""
    bounds = [tokens * i // count for i in range(count + 1)]
    return tuple(high - low for low, high in pairwise(bounds))


class _Sizes:
    """Bytes of spans as numbers; each distinct expression is evaluated once per microbatch size."""

    def __init__(
        self,
        symbol: sympy.Symbol,
        tokens: int,
        rows: tuple[int, ...],
        values: dict[sympy.Symbol, int],
    ) -> None:
        self.symbol, self.values = symbol, values
        self.size = {WHOLE: tokens, **dict(enumerate(rows))}
        self.known: dict[tuple[sympy.Expr, int], int | None] = {}
        self.uncounted: list[str] = []

    def of(self, span: Span) -> int:
        """The span's bytes; 0 if they depend on data, and its name is kept."""
        number = self.number(span.size, self.size[span.microbatch])
        if number is None:
            self.uncounted.append(span.name)
            return 0
        return number

    def number(self, size: Bytes, tokens: int) -> int | None:
        if isinstance(size, int):
            return size
        key = expression(size), tokens
        if key not in self.known:
            value = key[0].subs({**self.values, self.symbol: tokens})
            self.known[key] = int(value) if value.is_Integer else None
        return self.known[key]


class _Inside:
    """Peaks within segments, beside what the program holds outside them."""

    def __init__(
        self, segments: Mapping[str, tuple[Span, ...]], sizes: _Sizes, measured: Measured
    ) -> None:
        self.segments, self.sizes, self.measured = segments, sizes, measured
        self.known: dict[tuple[str, int], int] = {}

    def peak(self, call: _Call) -> int:
        if call.segment is None:
            return 0
        key = call.segment, self.sizes.size[call.microbatch]
        if key in self.measured:
            return self.measured[key]
        if key not in self.known:
            spans = [replace(s, microbatch=call.microbatch) for s in self.segments[call.segment]]
            last = max((s.dies for s in spans), default=0)
            self.known[key] = max(_curve(spans, self.sizes, last))
        return self.known[key]


def _curve(spans: Sequence[Span], sizes: _Sizes, last: int) -> list[int]:
    """Bytes alive while each position runs, its results included."""
    change = [0] * (last + 2)
    for span in spans:
        number = sizes.of(span)
        change[min(span.born, last + 1)] += number
        change[min(span.dies + 1, last + 1)] -= number
    held, total = [], 0
    for step in change[: last + 1]:
        total += step
        held.append(total)
    return held


def _born(spans: Sequence[Span], sizes: _Sizes) -> dict[int, int]:
    born: dict[int, int] = {}
    for span in spans:
        born[span.born] = born.get(span.born, 0) + sizes.of(span)
    return born


def _calls(order: Sequence[Node]) -> Iterable[_Call]:
    """Everything that runs: no markers, sizes and items."""
    for position, node in enumerate(order):
        tag, action = tag_of(node), action_of(node)
        runs = node.op.startswith("call") and node.target is not operator.getitem
        if not runs or tag is None or tag.role in ("sync", "size", "total"):
            continue
        yield _Call(
            position,
            node.name,
            None if action is None else action.layer,
            str(node.target) if node.op == "call_module" else None,
            WHOLE if tag.microbatch is None else tag.microbatch,
        )


def _death(span: Span, calls: Sequence[_Call]) -> str | None:
    """The last call that holds it; None for results."""
    if not calls or span.dies > calls[-1].position:
        return None
    last = None
    for call in calls:
        if call.position > span.dies:
            break
        last = call.name
    return last
