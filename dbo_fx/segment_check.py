"""Compiled segments against the ops that they were compiled from, on the first call's real values.

A program's compiled segments round differently from the traced ops, and over many layers the
difference grows beyond any useful tolerance. So whether *splitting* is right is judged on traced
ops on both sides (`traced_twin`), and whether *compiling* is right segment by segment: every
distinct one is compared once, on the values that reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from dbo_fx.effects import effects_of
from dbo_fx.segments import CompiledSegment, body_of

Compare = Callable[[CompiledSegment, list[tuple[Any, Any]]], None]
# Runs the first function, then the second with the first one's choices.
Both = Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]]


def compiled_segments(module: nn.Module) -> list[CompiledSegment]:
    """The segments of a program that run compiled code."""
    return [child for child in module.children() if isinstance(child, CompiledSegment)]


def traced_twin(module: GraphModule) -> GraphModule:
    """The same program with the traced ops in every segment; the module itself if it has them."""
    if not compiled_segments(module):
        return module
    names = {str(n.target) for n in module.graph.nodes if n.op in ("get_attr", "call_module")}
    root = {}
    for name in names:
        part = getattr(module, name)
        body = body_of(part) if isinstance(part, nn.Module) else None
        root[name] = part if body is None else body
    return GraphModule(root, module.graph, class_name="TracedProgram")


@contextmanager
def each_checked(module: GraphModule, both: Both, compare: Compare) -> Iterator[None]:
    """Compare every distinct segment with its traced ops the first time that it is called.

    Args:
        module: The program.
        both: Runs the compiled code, then the traced ops with the choices that the first made.
        compare: Gets the segment and pairs of tensors, compiled and traced.
    """
    segments = compiled_segments(module)
    own = {segment: segment.forward for segment in segments}
    for segment in segments:
        segment.forward = _checked(segment, own[segment], both, compare)
    try:
        yield
    finally:
        for segment in segments:
            segment.forward = own[segment]


def _checked(
    segment: CompiledSegment, run: Callable[..., Any], both: Both, compare: Compare
) -> Callable[..., Any]:
    written = written_inputs(segment.body)

    def first(*args: Any) -> Any:
        segment.forward = run
        given = _copies(args, written)
        results, traced = both(lambda: run(*args), lambda: segment.body(*given))
        pairs = list(zip(tree_leaves(results), tree_leaves(traced), strict=True))
        compare(segment, pairs + [(args[i], given[i]) for i in written])
        return results

    return first


def written_inputs(body: GraphModule) -> list[int]:
    """Positions of a segment's inputs that it writes in place."""
    effects = effects_of(body.graph)
    mutated = effects.mutated_live_in()
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    return [i for i, n in enumerate(inputs) if effects.of(n).results & mutated]


def _copies(args: tuple[Any, ...], written: list[int]) -> list[Any]:
    """The arguments, with copies of what is written; who shares memory in them shares it again."""
    touched = {_storage(args[i]) for i in written}
    copies: dict[int, torch.UntypedStorage] = {}
    given = list(args)
    for index, value in enumerate(args):
        if not isinstance(value, torch.Tensor) or _storage(value) not in touched:
            continue
        storage = value.untyped_storage()
        if _storage(value) not in copies:
            copies[_storage(value)] = storage.clone()  # type: ignore[no-untyped-call]
        copy = copies[_storage(value)]
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        given[index] = empty.set_(copy, value.storage_offset(), value.shape, value.stride())
    return given


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
