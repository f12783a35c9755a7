"""The nodes, shapes, bytes and memory of a compiled program, for its timeline."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import value_of
from dbo_fx.certificates.memory import traced_sizes
from dbo_fx.certificates.memory_report import MemoryReport
from dbo_fx.compiled import CompiledProgram
from dbo_fx.effects import Member
from dbo_fx.inspect.timeline import MemoryCurve
from dbo_fx.inspect.timeline_items import Inside, Item
from dbo_fx.ir import COMP, Action, Half
from dbo_fx.passes.schedule import action_of
from dbo_fx.symbols import expression, same_storage_key
from dbo_fx.tag import tag_of

_MARKERS = ("record", "wait")
_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the emitted module.

    Attributes:
        name: The node's name.
        marker: How many records and waits stand before it.
        parts: The nodes that it stands for, by action; a segment may run A0 and A1.
    """

    name: str
    marker: int
    parts: tuple[tuple[Action, tuple[Inside, ...]], ...]


def calls_of(compiled: CompiledProgram, report: MemoryReport) -> list[Call]:
    """Read every call off the emitted module.

    Args:
        compiled: The compiled program.
        report: Says how many rows every microbatch has.
    """
    state = compiled._state
    members = {node.name: found for node, found in state.members.items()}
    describe = _Descriptions(compiled, report)
    calls: list[Call] = []
    marker = 0
    for node in state.graph.nodes:
        if node.op == "call_method" and node.target in _MARKERS:
            marker += 1
        elif node.op.startswith("call") and node.target is not operator.getitem:
            parts = describe.parts(node, members.get(node.name, ()))
            calls.append(Call(node.name, marker, tuple(parts)))
    return calls


def with_nodes(items: Sequence[Item], calls: Iterable[Call]) -> tuple[Item, ...]:
    """Put into every item what runs inside it.

    Args:
        items: The program's items, in host order.
        calls: The module's calls, in host order.
    """
    inside: defaultdict[tuple[Action, int], list[Inside]] = defaultdict(list)
    for call in calls:
        for action, nodes in call.parts:
            inside[action, call.marker] += nodes
    return tuple(
        item
        if item.action is None
        else replace(item, nodes=tuple(inside.get((_carrier(item.action), item.marker), ())))
        for item in items
    )


def memory_of(report: MemoryReport, calls: Iterable[Call], items: Iterable[Item]) -> MemoryCurve:
    """Place every call of the memory report on the time axis.

    Args:
        report: The prediction.
        calls: The module's calls.
        items: The program's items.
    """
    runs = {(i.action, i.marker): i for i in items if i.stream == COMP and i.action is not None}
    called = {call.name: call for call in calls}
    now, times = 0.0, []
    for moment in report.curve:
        call = called.get(moment.name)
        parts = () if call is None else call.parts
        mine = [runs[key] for a, _ in parts if call and (key := (a, call.marker)) in runs]
        if mine:
            times.append(max(now, min(i.start_us for i in mine)))
            now = max(now, *(i.end_us for i in mine))
        else:
            times.append(now)
    return MemoryCurve(report, tuple(times))


def _carrier(action: Action) -> Action:
    """A transfer's nodes are its send's."""
    is_whole = action.phase.is_communication and action.half is None
    return replace(action, half=Half.SEND) if is_whole else action


class _Descriptions:
    """Texts of captured nodes at one size of the batch; each value is looked at once."""

    def __init__(self, compiled: CompiledProgram, report: MemoryReport) -> None:
        self.captured = compiled.captured
        self.nodes = list(self.captured.graph.nodes)
        self.rows = dict(enumerate(report.microbatches))
        self.whole = report.tokens
        self.others = traced_sizes(self.captured)
        self.known: dict[tuple[Any, int], int | str] = {}
        self.texts: dict[tuple[str, int | None], Inside] = {}

    def parts(
        self, call: Node, members: Iterable[Member]
    ) -> Iterator[tuple[Action, tuple[Inside, ...]]]:
        action, tag = action_of(call), tag_of(call)
        if action is None or tag is None:
            return
        if action.half is not None:
            yield action, tuple(self._carried(action, members))
            return
        found: dict[Action, list[Inside]] = {}
        for member in members:
            if member.microbatch is None or member.position >= len(self.nodes):
                continue
            node = self.nodes[member.position]
            part = tag_of(node)
            if part is None or part.phase is None or node.target is operator.getitem:
                continue
            key = replace(part, microbatch=member.microbatch).action
            found.setdefault(key, []).append(self._inside(node, member.microbatch))
        for key, nodes in found.items():
            yield key, tuple(nodes)

    def _carried(self, action: Action, members: Iterable[Member]) -> Iterator[Inside]:
        """What a send sends, or what a recv brings."""
        for node in dict.fromkeys(self.nodes[member.position] for member in members):
            sends = action.half is Half.SEND
            if sends:
                for given in node.all_input_nodes:
                    if isinstance(value_of(given), torch.Tensor):
                        yield self._tensor(given, "sent", action.microbatch)
            elif isinstance(value_of(node), torch.Tensor):
                yield self._tensor(node, "received", action.microbatch)

    def _tensor(self, node: Node, role: str, microbatch: int | None) -> Inside:
        value = value_of(node)
        return Inside(
            node.name, role, self._shape(value, microbatch), self._bytes(value, microbatch)
        )

    def _inside(self, node: Node, microbatch: int | None) -> Inside:
        key = node.name, microbatch
        if key not in self.texts:
            results = [v for v in tree_leaves(value_of(node)) if isinstance(v, torch.Tensor)]
            shape = ", ".join(self._shape(v, microbatch) for v in results)
            size: int | None = None
            if results and not _is_alias(node, results):
                parts = [self._bytes(v, microbatch) for v in results]
                size = None if None in parts else sum(p for p in parts if p is not None)
            self.texts[key] = Inside(node.name, _op(node), shape, size)
        return self.texts[key]

    def _shape(self, value: torch.Tensor, microbatch: int | None) -> str:
        sizes = ", ".join(str(self._number(s, microbatch)) for s in value.shape)
        return f"[{sizes}] {_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}"

    def _bytes(self, value: torch.Tensor, microbatch: int | None) -> int | None:
        total = value.element_size()
        for size in value.shape:
            number = self._number(size, microbatch)
            if not isinstance(number, int):
                return None
            total *= number
        return total

    def _number(self, size: int | torch.SymInt, microbatch: int | None) -> int | str:
        """A size as a number; as text if it depends on data."""
        if isinstance(size, int):
            return size
        rows = self.whole if microbatch is None else self.rows[microbatch]
        key = expression(size), rows
        if key not in self.known:
            value = key[0].subs({**self.others, self.captured.symbol: rows})
            self.known[key] = int(value) if value.is_Integer else str(value)
        return self.known[key]


def _is_alias(node: Node, results: Sequence[torch.Tensor]) -> bool:
    """Whether the results are in a storage that was there before: views, writes in place."""
    given = {
        same_storage_key(v)
        for n in node.all_input_nodes
        for v in tree_leaves(value_of(n))
        if isinstance(v, torch.Tensor)
    }
    return all(same_storage_key(v) in given for v in results)


def _op(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name.split("::")[1])
    return str(getattr(node.target, "__name__", node.target))
