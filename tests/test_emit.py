"""The emitted module: flat, in the program's order, with the effects of the model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dbo_fx.backend import compile_captured
from dbo_fx.comm import abandon_in_flight, in_flight
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import VerificationError
from dbo_fx.ir import COMM, Program, Record, Run, Wait
from dbo_fx.options import Options
from dbo_fx.runtime import Runtime, TraceEntry
from small_moe import (
    CachedMoe,
    PlainMoe,
    Traced,
    nodes_of,
    one_rank,
    rows,
    run_passes,
    text_of,
    traced,
    traced_model,
)

STATIC = Options(verify="static")


def emitted(trace: Traced, schedule: str = "mlp_shared_overlap", count: int = 2) -> GraphModule:
    module = run_passes(trace.fresh(), "emit", schedule, count).module
    assert module is not None
    return module


def test_the_code_of_the_plain_layer(golden: Callable[[str, str], None]) -> None:
    golden("emit_plain.txt", text_of(emitted(traced_model()).graph))


def test_the_module_is_flat() -> None:
    module = emitted(traced_model(PlainMoe, 2))
    kinds = {n.op for n in module.graph.nodes}
    assert kinds == {
        "placeholder",
        "get_attr",
        "call_function",
        "call_module",
        "call_method",
        "output",
    }
    children = dict(module.named_children())
    assert {n.target for n in module.graph.nodes if n.op == "call_module"} == {
        name for name, child in children.items() if isinstance(child, GraphModule)
    }
    for child in children.values():
        assert not list(child.children())
    assert {n.target for n in module.graph.nodes if n.op == "call_method"} == {
        "begin",
        "use",
        "record",
        "wait",
    }
    assert "CompiledProgram" not in module.code


@pytest.mark.parametrize("count", [1, 2, 3])
def test_begin_comes_before_everything_else(count: int) -> None:
    graph = emitted(traced_model(), "sequential", count).graph
    calls = [n for n in graph.nodes if n.op.startswith("call")]
    assert calls[0].target == "begin"
    assert len(nodes_of(graph, "begin")) == 1


def events(program: Program) -> list[str]:
    """The records and waits of a program, and the changes of stream that they imply."""
    found, current = [], "comp"
    for step in program.steps:
        if isinstance(step, Run) and step.stream != current:
            current = step.stream
            found.append(f"{current} use")
        if isinstance(step, Record | Wait):
            word = "record" if isinstance(step, Record) else "wait"
            found.append(f"{step.stream} {word} e{step.event}")
    return found


@pytest.mark.parametrize("schedule", ["sequential", "mlp_shared_overlap"])
def test_the_trace_on_cpu_is_the_program(schedule: str) -> None:
    trace = traced_model(PlainMoe, 2, ranks=1)
    state = run_passes(trace.fresh(), "emit", schedule)
    assert state.module is not None
    assert state.program is not None
    runtime = state.module.runtime
    assert isinstance(runtime, Runtime)
    with one_rank():
        for _ in range(2):
            state.module(*trace.args())
            kinds = [str(entry) for entry in runtime.trace if entry.kind != "use"]
            assert kinds == [e for e in events(state.program) if not e.endswith("use")]
            uses = [str(entry) for entry in runtime.trace if entry.kind == "use"]
            assert uses == [e for e in events(state.program) if e.endswith("use")]


def test_the_comm_stream_is_current_for_sends_only() -> None:
    current = "comp"
    for node in emitted(traced_model(CachedMoe, 2)).graph.nodes:
        if node.target == "use":
            current = node.args[1]
        elif node.op in ("call_function", "call_module"):
            assert (current == COMM) == str(node.target).endswith("_send.default"), node
    assert current == "comp"


def reference(trace: Traced, args: list[Any], count: int) -> Any:
    """Each microbatch through the captured graph in order, then joined."""
    token = trace.captured.token_inputs[0]
    total = args[token.index].shape[0]
    bounds = [total * i // count for i in range(count + 1)]
    parts = []
    for low, high in pairwise(bounds):
        piece = [high - low if isinstance(a, int) and a == total else a for a in args]
        piece[token.index] = args[token.index][low:high]
        parts.append(trace.captured.module(*piece)[0])
    return torch.cat(parts)


@pytest.mark.parametrize("total", [4, 7])
@pytest.mark.parametrize(("schedule", "count"), [("mlp_shared_overlap", 2), ("sequential", 3)])
@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
def test_results_and_written_inputs_equal_the_microbatched_reference_bit_for_bit(
    model: type[PlainMoe], schedule: str, count: int, total: int
) -> None:
    trace = traced_model(model, 2, ranks=1)
    ours, theirs, whole = trace.args(total), trace.args(total), trace.args(total)
    with one_rank():
        (out,) = emitted(trace, schedule, count)(*ours)
        assert torch.equal(out, reference(trace, theirs, count))
        trace.captured.module(*whole)
    for mine, his, unsplit in zip(ours, theirs, whole, strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine, his)
            torch.testing.assert_close(mine, unsplit, rtol=1e-4, atol=1e-4)


def test_written_inputs_change_once_per_call() -> None:
    trace = traced_model(CachedMoe, 1, ranks=1)
    module, args = emitted(trace), trace.args()
    (counter,) = (a for a in args if isinstance(a, Tensor) and a.shape == (1,))
    (cache,) = (a for a in args if isinstance(a, Tensor) and a.shape == (16, 8))
    with one_rank():
        module(*args)
        assert counter.item() == 8
        assert cache.abs().sum(1).count_nonzero() == 8
        module(*args)
    assert counter.item() == 14
    assert cache.abs().sum(1).count_nonzero() == 14


class Constants(PlainMoe):
    """A tensor made inside the model."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x * torch.tensor([2.0] * 8))


def test_tensor_constants_come_along() -> None:
    with one_rank():
        trace = traced(Constants(), (rows(),))
        out = emitted(trace)(*trace.args(7))
        torch.testing.assert_close(out, trace.captured.module(*trace.args(7)), rtol=1e-4, atol=1e-4)


def compiled_model(model: type[PlainMoe] = PlainMoe) -> tuple[CompiledProgram, Traced]:
    trace = traced_model(model, 1, ranks=1)
    with one_rank():
        return compile_captured(trace.fresh(), STATIC), trace


def test_host_time_of_every_call() -> None:
    compiled, trace = compiled_model()
    with one_rank():
        times = compiled.host_us_per_node(tuple(trace.args()), repeats=3)
    calls = [n.name for n in compiled.module.graph.nodes if n.op.startswith("call")]
    assert list(times) == calls
    assert all(0 < t < 1e6 for t in times.values())


def test_a_program_that_makes_the_host_wait_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, trace = compiled_model()
    monkeypatch.setattr(Runtime, "is_capturing", True)
    with one_rank():
        with pytest.raises(VerificationError, match=r"cannot be captured in a CUDA graph: .*gloo"):
            compiled(*trace.args())
        monkeypatch.undo()
        compiled(*trace.args())


def test_a_call_that_fails_half_way_leaves_nothing_in_flight() -> None:
    compiled, trace = compiled_model()
    wrong = trace.args()
    expert = next(i for i, a in enumerate(wrong) if isinstance(a, Tensor) and a.shape == (8, 8))
    wrong[expert] = torch.ones(3, 3)
    with one_rank():
        with pytest.raises(RuntimeError, match="shape"):
            compiled(*wrong)
        assert compiled.runtime.trace[-1] == TraceEntry("use", "comp")
        assert in_flight() == ()
        out = compiled(*trace.args())
        torch.testing.assert_close(out, trace.captured.module(*trace.args()), rtol=1e-4, atol=1e-4)
    assert in_flight() == ()


def test_the_bare_module_leaves_its_operation_in_flight() -> None:
    """What the compiled program cleans up: the test above would pass by luck otherwise."""
    _, trace = compiled_model()
    wrong = trace.args()
    expert = next(i for i, a in enumerate(wrong) if isinstance(a, Tensor) and a.shape == (8, 8))
    wrong[expert] = torch.ones(3, 3)
    with one_rank():
        with pytest.raises(RuntimeError):
            emitted(trace)(*wrong)
        assert [f.kind for f in in_flight()] == ["dispatch"]
        abandon_in_flight()


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_who_reads_before_the_recv_sees_poison(kind: str) -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    module = emitted(trace)
    recv = nodes_of(module.graph, getattr(torch.ops.dbo_fx, f"{kind}_recv").default)[0]
    module.graph.erase_node(recv)
    module.recompile()
    with one_rank():
        (out,) = module(*trace.args(7))
        assert out[:3].isnan().all()
        assert out[3:].isfinite().all()
        assert [f.flight for f in in_flight()] == [0]
        abandon_in_flight()


def test_trace_entries_print() -> None:
    runtime = Runtime(torch.device("cpu"))
    runtime.begin()
    runtime.use("comm")
    runtime.record(3, "comm")
    runtime.wait(3, "comp")
    assert [str(e) for e in runtime.trace] == ["comm use", "comm record e3", "comp wait e3"]
    assert not runtime.is_cuda
    runtime.begin()
    assert runtime.trace == []
