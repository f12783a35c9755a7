"""What each layer's phases were made of and why, and what can run beside its communications."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from dbo_fx.certificates.overlap import OverlapReport
from dbo_fx.errors import OptionError
from dbo_fx.ir import Phase
from dbo_fx.tables import Block, Table

_INDEX = re.compile(r"\d+")
TAIL = "tail"
NOTHING_NEAR = "nothing: schedule (only what it needs, and what needs it, stands near it)"


@dataclass(frozen=True, slots=True)
class Op:
    """One call of the captured graph.

    Attributes:
        name: The node's name.
        op: What is called, such as `aten.linear.default`.
        module: The module that called it, as the model names it.
        at: `file:line in function` of the model.
    """

    name: str
    op: str
    module: str = ""
    at: str = ""

    def __str__(self) -> str:
        """`aten.linear.default in model.layers.1.mlp at modeling.py:7 in forward`."""
        module = f" in {self.module}" if self.module else ""
        return f"{self.op}{module}{f' at {self.at}' if self.at else ''}"


@dataclass(frozen=True, slots=True)
class Taken:
    """The calls that one rule put into one phase of a layer, in graph order.

    Attributes:
        phase: The phase's name.
        rule: Why they are there.
        ops: The calls.
    """

    phase: str
    rule: str
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """One communication of a layer, and what its order permits beside it.

    Attributes:
        communication: Such as `D_m0@7`.
        beside: The actions that can run beside it.
        prevented: What needs nothing of it and cannot, each with the reason.
    """

    communication: str
    beside: tuple[str, ...]
    prevented: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One MoE layer, or what follows the last one.

    Attributes:
        layer: Its index among the MoE layers, from 0; None for the tail.
        module: The module that holds its dispatch and experts, if the model has one for each layer.
        taken: What its phases were made of; empty for a program text.
        overlap: Its communications.
    """

    layer: int | None
    module: str
    taken: tuple[Taken, ...]
    overlap: tuple[Beside, ...]

    @property
    def title(self) -> str:
        """`7 (model.layers.10)`."""
        name = TAIL if self.layer is None else f"layer {self.layer}"
        return f"{name} ({self.module})" if self.module else name

    def to_json(self) -> dict[str, Any]:
        """Plain values: the first and the last call of each rule."""
        return {
            "layer": self.layer,
            "module": self.module,
            "phases": [
                {
                    "phase": t.phase,
                    "rule": t.rule,
                    "ops": len(t.ops),
                    "first": asdict(t.ops[0]),
                    "last": asdict(t.ops[-1]),
                }
                for t in self.taken
            ],
            "overlap": [
                {
                    "communication": b.communication,
                    "beside": list(b.beside),
                    "prevented": list(b.prevented),
                }
                for b in self.overlap
            ],
        }


def layers_of_program(report: OverlapReport, layers: int) -> tuple[LayerFacts, ...]:
    """The layers of a program text, whose phases have no ops.

    Args:
        report: Its overlap report.
        layers: How many MoE layers it has.
    """
    beside = beside_by_layer(report)
    return tuple(LayerFacts(layer, "", (), tuple(beside[layer])) for layer in range(layers))


def beside_by_layer(report: OverlapReport) -> defaultdict[int | None, list[Beside]]:
    """The communications of every layer, in the order of their sends."""
    found: defaultdict[int | None, list[Beside]] = defaultdict(list)
    for overlap in report.overlaps:
        beside, prevented = map(str, overlap.beside), tuple(map(str, overlap.prevented))
        if not overlap.beside and not prevented:
            prevented = (NOTHING_NEAR,)
        item = Beside(overlap.communication.bound(), tuple(beside), prevented)
        found[overlap.communication.layer].append(item)
    return found


def chosen(layers: Sequence[LayerFacts], layer: int | None) -> tuple[LayerFacts, ...]:
    """One layer, or all.

    Raises:
        OptionError: There is no such layer.
    """
    if layer is None:
        return tuple(layers)
    found = [facts for facts in layers if facts.layer == layer]
    if not found:
        count = sum(facts.layer is not None for facts in layers)
        raise OptionError(f"there is no MoE layer {layer}; they count from 0 to {count - 1}")
    return tuple(found)


def folded(layers: Sequence[LayerFacts]) -> list[tuple[LayerFacts, ...]]:
    """Runs of layers that differ in nothing but their index."""
    return [tuple(run) for _, run in groupby(layers, key=_likeness)]


def _likeness(facts: LayerFacts) -> tuple[object, ...]:
    taken = tuple(
        (t.phase, t.rule, tuple((op.op, _INDEX.sub("*", op.module), op.at) for op in t.ops))
        for t in facts.taken
    )
    return facts.layer is None, taken, tuple(map(str, _relative(facts).overlap))


def _relative(facts: LayerFacts) -> LayerFacts:
    """The same with layers counted from its own: `@l`, `@l+1`, and without event numbers."""
    own = facts.layer or 0

    def text(value: str) -> str:
        def shift(match: re.Match[str]) -> str:
            offset = int(match[1]) - own
            return "@l" if offset == 0 else f"@l{offset:+d}"

        return re.sub(r"@(\d+)", shift, re.sub(r"\be\d+: ", "", value))

    overlap = tuple(
        Beside(text(b.communication), tuple(map(text, b.beside)), tuple(map(text, b.prevented)))
        for b in facts.overlap
    )
    return replace(facts, overlap=overlap)


def tables(layers: Sequence[LayerFacts], *, detail: bool = False) -> list[Block]:
    """What people read: equal layers folded into one table, a folded run with relative layers.

    Args:
        layers: The layers to show.
        detail: Name every call instead of the first and last of each rule.
    """
    found: list[Block] = []
    for run in folded(layers):
        first, last = run[0], run[-1]
        shown = first if len(run) == 1 else _relative(first)
        found += ["", first.title if len(run) == 1 else _run_title(first, last)]
        if shown.taken:
            found.append(_taken_in_full(shown.taken) if detail else _taken(shown.taken))
        found += _overlap(shown.overlap)
    return found


def _run_title(first: LayerFacts, last: LayerFacts) -> str:
    modules = f" ({first.module} to {last.module})" if first.module and last.module else ""
    return f"layers {first.layer} to {last.layer}{modules}, alike; named are the calls of the first"


def _taken(taken: Iterable[Taken]) -> Table:
    rows = []
    for item in taken:
        first, last = item.ops[0], item.ops[-1]
        rows.append((item.phase, str(len(item.ops)), item.rule, "first", *_cells(first)))
        if len(item.ops) > 1:
            rows.append(("", "", "", "last", *_cells(last)))
    return Table(("phase", "ops", "why", "", "op", "module", "line"), tuple(rows), "  taken")


def _taken_in_full(taken: Iterable[Taken]) -> Table:
    rows = []
    for item in taken:
        rows.append((item.phase, str(len(item.ops)), item.rule, "", ""))
        rows += [("", "", f"  {op.op}", op.module, op.at) for op in item.ops]
    return Table(("phase", "ops", "why, and the calls", "module", "line"), tuple(rows), "  taken")


def _cells(op: Op) -> tuple[str, str, str]:
    return op.op, op.module, op.at


def _overlap(overlap: Sequence[Beside]) -> list[Block]:
    if not overlap:
        return []
    rows = tuple((b.communication, " ".join(b.beside) or "nothing") for b in overlap)
    lines = [f"    {b.communication}: {text}" for b in overlap for text in b.prevented]
    table = Table(("communication", "can run beside it"), rows, "  overlap")
    return [table, "  what could overlap and does not", *lines] if lines else [table]


def sort_key(phase: str) -> int:
    """Where a phase stands within its layer."""
    return [p.value for p in Phase].index(phase)
