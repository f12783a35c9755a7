"""What a step does on the host beside its kernels, in calls, which do not depend on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_fx.comm.gloo import GlooReference
from dbo_fx.comm.ops import DIRECT
from dbo_fx.host_code import Program, host_graph
from dbo_fx.segment_compilers import run_and_look
from dbo_fx.segments import CompiledSegment
from small_moe import H, PlainMoe, Traced, one_rank, rows, run_passes, traced_model
from test_segments import body, compile_body


def calls(run: Callable[[], Any]) -> Counter[str]:
    """Python functions that a run enters, by file."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def in_files(found: Counter[str], *parts: str) -> int:
    return sum(n for file, n in found.items() if any(part in file for part in parts))


class Seen(TorchDispatchMode):
    """Counts ops of dbo_fx that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dbo_fx":
            self.ops[func._opname] += 1
        return func(*args, **(kwargs or {}))


def program(layers: int = 2) -> tuple[Program, Traced]:
    trace = traced_model(PlainMoe, layers, ranks=1)
    module = run_passes(trace.fresh(), "emit").module
    assert isinstance(module, Program)
    return module, trace


@pytest.fixture(scope="module")
def written() -> CompiledSegment:
    """Views and a written input, compiled by Inductor."""

    def function(x: Tensor, cache: Tensor) -> Any:
        cache.add_(1)
        y = x.sin() + cache
        return y, y.t()

    return compile_body(body(function, rows(4), torch.zeros(H)), "inductor")


@torch.no_grad()
def test_a_checked_segment_runs_inductors_code_and_nothing_of_what_stands_around_it(
    written: CompiledSegment,
) -> None:
    assert written.artifact is not None
    inputs = rows(4), torch.zeros(H)
    first = calls(lambda: written(*inputs))
    second = calls(lambda: written(*inputs))
    around = "_functorch", "_dynamo/eval_frame", "_inductor/standalone_compile"
    assert in_files(first, *around)
    assert not in_files(second, *around)
    assert in_files(second, "dbo_fx") <= 6
    assert None not in written.artifact.seen.values()
    again = written(*inputs)
    assert torch.equal(inputs[1], torch.full((H,), 3.0))
    torch.testing.assert_close(again[0], inputs[0].sin() + inputs[1])


def test_where_gradients_or_a_profiler_are_on_all_of_it_runs(written: CompiledSegment) -> None:
    inputs = rows(4), torch.zeros(H)
    with torch.no_grad():
        written(*inputs)
        with torch.profiler.profile() as profile:
            written(*inputs)
    assert any("CompiledFxGraph" in e.name for e in profile.events())
    assert in_files(calls(lambda: written(*inputs)), "_functorch")


@torch.no_grad()
def test_version_counters_move_as_before(written: CompiledSegment) -> None:
    x, cache = rows(4), torch.zeros(H)
    for _ in range(3):
        before = cache._version
        written(x, cache)
        assert cache._version > before
    with torch.inference_mode():
        written(x, torch.zeros(H))


def test_a_first_call_in_inference_mode_counts_for_later_ones(written: CompiledSegment) -> None:
    assert written.artifact is not None
    written.artifact.seen.clear()
    with torch.inference_mode():
        written(rows(4), torch.zeros(H))
    with torch.no_grad():
        cache = torch.zeros(H)
        written(rows(4), cache)
        assert cache._version > 0


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [lambda run: lambda *args: [r.clone() for r in run(*args)], lambda run: lambda *args: ()],
)
def test_what_does_more_than_hand_on_is_kept(
    change: Callable[[Any], Any], written: CompiledSegment
) -> None:
    assert written.artifact is not None
    run = change(written.artifact.run)
    given = rows(4), torch.zeros(H)
    _, direct = run_and_look("inductor", run, given)
    assert direct is None
    _, direct = run_and_look("inductor", written.artifact.run, given)
    assert direct is not None


@torch.no_grad()
def test_a_step_goes_round_the_dispatcher_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, trace = program()
    dispatched: list[Any] = []
    call = torch._ops.OpOverload.__call__

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.namespace == "dbo_fx":
            dispatched.append(self)
        return call(self, *args, **kwargs)

    with one_rank():
        expected = module(*trace.args())
        monkeypatch.setattr(torch._ops.OpOverload, "__call__", spy)
        found = calls(lambda: module(*trace.args()))
        assert dispatched == []
        # The module itself, and a look-up of each child: no segment is called as a module.
        assert in_files(found, "torch/nn/modules") <= 3 + len(list(module.children()))
        with Seen() as seen:
            watched = module(*trace.args())
    assert torch.equal(expected[0], watched[0])
    kinds = [f"{kind}_{half}" for kind in ("dispatch", "combine") for half in ("send", "recv")]
    assert len(dispatched) == 2 * 24  # By the graph, and by the mode.
    assert seen.ops == {"comm_buffers": 8} | dict.fromkeys(kinds, 4)


def test_gradients_profilers_hooks_and_other_tensors_are_served_by_the_graph_itself() -> None:
    module, trace = program()
    args = tuple(trace.args())
    assert module.is_watched(args)
    with torch.no_grad():
        assert not module.is_watched(args)
        with torch.profiler.profile():
            assert module.is_watched(args)
        assert module.is_watched((*args, object()))
        segment = next(m for name, m in module.named_children() if name.startswith("segment"))
        hook = segment.register_forward_pre_hook(lambda *_: None)
        assert module.is_watched(args)
        hook.remove()
        assert not module.is_watched(args)


def test_the_host_graph_is_a_copy() -> None:
    module, _ = program(1)
    before = module.code
    copy = host_graph(module.graph)
    assert module.code == before
    targets = {n.target for n in copy.nodes}
    assert targets >= set(DIRECT.values())
    assert not any(n.op == "call_module" for n in copy.nodes)
    copy.lint()


@torch.no_grad()
def test_calls_of_a_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """What buffers, send and recv call in Python beside the transport."""
    monkeypatch.setattr(GlooReference, "launch", lambda *_: ())
    monkeypatch.setattr(GlooReference, "finish", lambda *_: None)

    def communicate(inputs: list[Tensor], group: str) -> None:
        outputs = DIRECT["comm_buffers"](inputs, "all_gather", group)
        DIRECT["dispatch_send"](inputs, outputs, "all_gather", group, "gloo", 0)
        DIRECT["dispatch_recv"](outputs, group, "gloo", 0)

    with one_rank() as group:
        inputs = [rows(4), rows(4), rows(4)]
        communicate(inputs, group)
        assert calls(lambda: communicate(inputs, group)).total() <= 25


@torch.no_grad()
def test_markers_cost_one_call() -> None:
    module, trace = program()
    runtime: Any = module.runtime
    with one_rank():
        module(*trace.args())
    for run in (lambda: runtime.record(0, "comp"), lambda: runtime.wait(0, "comm")):
        run()
        assert calls(run).total() <= 3  # The lambda, the marker, and whether it is CUDA.


def test_a_memory_format_stays_with_the_op() -> None:
    """`Tensor.to` takes it by its name alone, and a traced graph has it by its place."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    to = torch.ops.aten.to.dtype
    kept = graph.call_function(to, (x, torch.float64, False, False, torch.contiguous_format))
    graph.output((kept, graph.call_function(to, (x, torch.float64))))
    run = torch.fx.GraphModule({}, host_graph(graph))
    assert [n.op for n in run.graph.nodes][1:3] == ["call_function", "call_method"]
    assert all(y.dtype == torch.float64 for y in run(torch.ones(2)))


def test_what_runs_is_what_is_read() -> None:
    """A graph that was edited, and not recompiled yet, runs nowhere."""
    with one_rank():
        module, trace = program()
        given = trace.args(6)
        with torch.no_grad():
            want = module(*given)
        again = Program(module, module.graph, class_name="DboProgram")
        output = next(n for n in reversed(again.graph.nodes) if n.op == "output")
        output.args = ((None,),)
        with torch.no_grad():
            found = again(*given)
        assert torch.equal(found[0], want[0])
