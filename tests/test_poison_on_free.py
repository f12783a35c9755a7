"""Freed memory is overwritten at once: right programs do not mind, wrong ones give NaN."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from dbo_fx.backend import compile_captured
from dbo_fx.options import Options
from dbo_fx.poison_on_free import PoisonOnFree, last_uses, poison_on_free
from dbo_fx.runtime import Runtime
from small_moe import CachedMoe, PlainMoe, Traced, one_rank, rows, traced_model

HIDDEN: list[Tensor] = []


def hide(x: Tensor) -> Tensor:
    """Keep a pointer that the graph knows nothing of."""
    HIDDEN.append(x)
    return x + 1


def reveal(y: Tensor) -> Tensor:
    return y + HIDDEN.pop()


def module_of(*targets: Any) -> GraphModule:
    """x -> a chain of calls, each with the one before it as its argument."""
    graph = Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))
    graph.output(value)
    root = nn.Module()
    root.runtime = Runtime(torch.device("cpu"))
    return GraphModule(root, graph)


def test_memory_that_is_still_read_behind_its_last_use_reads_as_nan() -> None:
    module = module_of(torch.neg, hide, reveal)
    module.runtime = Runtime(torch.device("cpu"))
    x = rows(2)
    torch.testing.assert_close(module(x), 1 - 2 * x)
    assert PoisonOnFree(module)(x).isnan().all()


def test_views_inputs_and_outputs_keep_their_memory() -> None:
    def first(x: Tensor) -> Tensor:
        return x[:1]

    module = module_of(torch.neg, first, first)
    module.runtime = Runtime(torch.device("cpu"))
    x = rows(2)
    before = x.clone()
    assert torch.equal(PoisonOnFree(module)(x), -x[:1])
    assert torch.equal(x, before)
    aliased = module_of(first)
    aliased.runtime = Runtime(torch.device("cpu"))
    assert PoisonOnFree(aliased)(x).data_ptr() == x.data_ptr()


def test_last_uses() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    b = graph.call_function(torch.neg, (x,))
    c = graph.call_function(operator.add, (a, a))
    out = graph.output(c)
    assert last_uses(graph) == {x: [], a: [], b: [x, b], c: [a], out: [c, out]}


@pytest.mark.parametrize("kind", [PlainMoe, CachedMoe])
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
def test_programs_run_clean(kind: type[PlainMoe], schedule: str) -> None:
    with one_rank():
        found: Traced = traced_model(kind, 2, 1)
        compiled = compile_captured(found.fresh(), Options(schedule=schedule, verify="static"))
        plain, poisoned = found.args(), found.args()
        with torch.no_grad():
            wanted = compiled(*plain)
            streams: list[str] = []
            with poison_on_free(compiled, streams.append):
                result = compiled(*poisoned)
    assert torch.equal(result[0], wanted[0])
    assert set(streams) <= {"comm", "comp"}
    torch.testing.assert_close(plain, poisoned, rtol=0, atol=0)
    assert isinstance(compiled.module, GraphModule)
