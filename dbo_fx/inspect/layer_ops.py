"""What a compiled program's layers were made of, read from the tags of its captured graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Node

from dbo_fx.capture import module_path
from dbo_fx.compiled import CompiledProgram
from dbo_fx.graph_places import line_of
from dbo_fx.inspect.layers import LayerFacts, Op, Taken, beside_by_layer, sort_key
from dbo_fx.tag import tag_of


def layers_of(compiled: CompiledProgram) -> tuple[LayerFacts, ...]:
    """Every MoE layer of a compiled program, and the tail.

    Args:
        compiled: The program.

    Returns:
        The layers in order; what follows the last one, if anything, comes last.
    """
    nodes: defaultdict[int | None, dict[tuple[str, str], list[Node]]]
    nodes = defaultdict(lambda: defaultdict(list))
    for node in compiled.captured.graph.nodes:
        tag = tag_of(node)
        if tag is not None and tag.phase is not None:
            nodes[tag.action.layer][tag.phase.value, tag.rule].append(node)
    beside = beside_by_layer(compiled.certificate.overlap)
    return tuple(
        LayerFacts(layer, _holder(nodes[layer]), _taken(nodes[layer]), tuple(beside[layer]))
        for layer in sorted(nodes, key=lambda layer: (layer is None, layer))
    )


def _taken(by_rule: dict[tuple[str, str], list[Node]]) -> tuple[Taken, ...]:
    found = [Taken(*key, tuple(map(_op, nodes))) for key, nodes in by_rule.items()]
    return tuple(sorted(found, key=lambda taken: sort_key(taken.phase)))


def _op(node: Node) -> Op:
    target = node.target if isinstance(node.target, OpOverload) else _named(node)
    return Op(node.name, str(target), module_path(node), line_of(node))


def _named(node: Node) -> str:
    """`getitem` for `operator.getitem`."""
    return str(getattr(node.target, "__name__", node.target))


def _holder(by_rule: dict[tuple[str, str], list[Node]]) -> str:
    """The innermost module around a layer's dispatch, experts and attention core."""
    paths = [
        path
        for (phase, _), nodes in by_rule.items()
        if phase in ("A1", "D", "MLP", "C")
        for path in {module_path(node) for node in nodes}
        if path
    ]
    return _common(paths)


def _common(paths: Iterable[str]) -> str:
    """The longest dotted beginning of all paths; empty if it names no layer, by a number."""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) if any(part.isdigit() for part in shared) else ""
