"""Compiled segments: what is cut out, shared, checked, and how the results compare."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import Graph, GraphModule

import dbo_fx
from dbo_fx import symbols
from dbo_fx.backend import compile_captured
from dbo_fx.capture import value_of
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import OptionError, SoundnessError, UnsupportedGraphError, VerificationError
from dbo_fx.graph_python import python_text
from dbo_fx.options import Options
from dbo_fx.segment_compilers import check_backend
from dbo_fx.segment_core import core_of
from dbo_fx.segment_sizes import CoreSizes, Source, core_sizes, size_in
from dbo_fx.segments import Artifact, CompiledSegment, artifacts, body_of, clear_artifacts
from dbo_fx.symbols import SymbolFacts, rebuilt_mode
from small_moe import (
    CachedMoe,
    H,
    PlainMoe,
    arguments,
    one_rank,
    rows,
    traced,
    traced_model,
)

aten = torch.ops.aten
COUNTED: list[GraphModule] = []
Made = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


@torch._dynamo.register_backend(name="counted")
def counted(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that runs graphs as they are, and counts them."""
    COUNTED.append(gm)
    return gm.forward


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_artifacts()
    COUNTED.clear()
    with one_rank():
        yield
    clear_artifacts()


def compiled(
    model: type[PlainMoe] = PlainMoe, layers: int = 1, backend: str = "counted", **options: Any
) -> CompiledProgram:
    """A program for one real rank."""
    captured = traced_model(model, layers, ranks=1).fresh()
    return compile_captured(captured, Options(segment_backend=backend, **options))


def run(program: CompiledProgram, model: type[PlainMoe], layers: int, count: int = 6) -> list[Any]:
    """Results and inputs after a call: caches and counters are written in place."""
    args = traced_model(model, layers, ranks=1).args(count)
    with torch.no_grad():
        return [*program(*args), *args]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_what_is_compiled_does_not_grow_with_layers() -> None:
    """Nor with microbatches and schedules."""
    compiled(CachedMoe, 2)
    count = len(COUNTED)
    assert 3 <= count <= 8
    compiled(CachedMoe, 2, schedule="sequential", num_microbatches=3)
    assert len(COUNTED) == len(artifacts()) == count
    clear_artifacts()
    compiled(CachedMoe, 6)
    assert len(COUNTED) == 2 * count


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_split_and_sequential_run_the_same_kernels(backend: str) -> None:
    """Bit for bit, caches and counters included; AOT takes writes out of graphs, as Inductor."""
    split = compiled(CachedMoe, 2, backend)
    serial = compiled(CachedMoe, 2, backend, schedule="sequential")
    eager = compiled(CachedMoe, 2, "eager")
    for count in (6, 7):
        assert_equal(run(split, CachedMoe, 2, count), run(serial, CachedMoe, 2, count))
    for one, other in zip(run(split, CachedMoe, 2), run(eager, CachedMoe, 2), strict=True):
        torch.testing.assert_close(one, other)
    assert split.checked is not None
    assert "compiled segments agree" in split.checked


def test_inductor_compiles_a_segment() -> None:
    """Writes, views and a symbolic size, from one small body."""

    def function(x: Tensor, cache: Tensor) -> Any:
        cache.add_(1)
        y = x.sin() + cache
        return y, y.t()

    inputs = rows(4), torch.zeros(H)
    segment = compile_body(body(function, *inputs), "inductor")
    cache, other = torch.ones(H), torch.ones(H)
    results = segment(rows(4), cache)
    for one, two in zip([*results, cache], [*function(rows(4), other), other], strict=True):
        torch.testing.assert_close(one, two)
    assert shares(*results)


@pytest.mark.parametrize("name", ["inductr", "dbo_fx", 3])
def test_an_unknown_backend_is_refused(name: Any) -> None:
    with pytest.raises(OptionError, match=r"segment_backend=.*Known: .*aot_eager.*inductor"):
        check_backend(name)
    with pytest.raises(OptionError, match="segment_backend"):
        compiled(backend=name)


def test_the_cpu_runs_segments_as_they_were_traced() -> None:
    program = compile_captured(traced_model(ranks=1).fresh(), Options())
    assert program.plan.segments == "eager"
    assert not any(isinstance(m, CompiledSegment) for m in program.module.children())


def test_a_program_that_only_gets_looked_at_is_not_compiled() -> None:
    captured = traced_model(ranks=1).fresh()
    compile_captured(captured, Options(segment_backend="counted"), runs=False)
    assert not COUNTED


def test_plan_and_dump_show_backend_and_bodies() -> None:
    one, other = compiled(backend="counted"), compiled(backend="eager")
    assert one.plan.digest != other.plan.digest
    assert one.plan.split == other.plan.split
    assert str(one.plan).endswith("segments counted")
    assert compiled().plan == one.plan
    texts = [python_text(p.module.graph, "What runs", p.module) for p in (one, other)]
    assert texts[0] == texts[1]
    assert "def segment_0(" in texts[0]


def body(
    function: Callable[..., Any], *inputs: Tensor, views: Callable[..., list[Tensor]] | None = None
) -> GraphModule:
    """A segment's body from a function; `views` makes the inputs of the arguments."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def all_of_it(*given: Tensor) -> Any:
        return function(*(given if views is None else views(*given)))

    return make_fx(all_of_it, tracing_mode="fake", pre_dispatch=True)(*inputs)


def outer_text(graph: Graph) -> str:
    """Names of the ops around the core."""
    return " ".join(
        getattr(n.target, "__name__", str(n.target)).split(".")[0]
        for n in graph.nodes
        if n.op == "call_function" and n.target.__name__ != "getitem"
    )


def shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def compile_body(graph: GraphModule, backend: str = "aot_eager") -> CompiledSegment:
    return CompiledSegment("segment_0", graph, backend)


def test_views_stay_views() -> None:
    """Of inputs, of other results, of a tensor that is not returned itself, and of a view."""

    def function(x: Tensor, w: Tensor) -> Any:
        y = (x @ w).relu()
        return y.view(-1), w.t(), y.chunk(2)[1], (x + 1).t()

    inputs = rows(4), torch.ones(H, H)
    graph = body(function, *inputs)
    core = core_of(graph.graph)
    assert len(core.results) == 2
    segment = compile_body(graph)
    flat, turned, half, other = segment(*inputs)
    assert_equal([flat, turned, half, other], list(function(*inputs)))
    assert shares(flat, half)
    assert shares(turned, inputs[1])
    assert not shares(other, flat)
    assert not other.is_contiguous()


def test_a_body_of_views_compiles_nothing() -> None:
    graph = body(lambda w: (w.t(), w.chunk(2)[0]), torch.ones(4, 6))
    segment = compile_body(graph, "counted")
    assert segment.artifact is None
    assert not COUNTED
    weight = torch.ones(4, 6)
    assert all(shares(result, weight) for result in segment(weight))


@pytest.mark.parametrize("backend", ["aot_eager", "counted"])
def test_in_place_ops_write_inputs(backend: str) -> None:
    """The core takes the slice that is written, not the cache that it is a slice of."""

    def function(caches: Tensor, x: Tensor, counter: Tensor) -> Any:
        one, two = caches.unbind(0)
        written = one.copy_(x * 2)
        counter += 1
        return written.sum(0), one, two * 1, counter

    def inputs() -> list[Tensor]:
        return [torch.zeros(2, 4, H), rows(4), torch.tensor([3])]

    graph = body(function, *inputs())
    core = core_of(graph.graph)
    assert outer_text(core.outer).startswith("unbind")
    assert core.written
    segment, mine, its = compile_body(graph, backend), inputs(), inputs()
    results = segment(*mine)
    assert_equal([*results, *mine], [*function(*its), *its])
    assert shares(results[1], mine[0])
    assert results[3] is mine[2]


def test_a_cache_that_is_written_through_views_that_overlap_stays_whole() -> None:
    def function(cache: Tensor, x: Tensor) -> Any:
        cache[:3].add_(x[:3])
        cache[1:].mul_(2)
        return (cache.sum(0),)

    graph = body(function, torch.zeros(4, H), rows(4))
    cache, other = torch.ones(4, H), torch.ones(4, H)
    assert_equal([*compile_body(graph)(cache, rows(4)), cache], [*function(other, rows(4)), other])


def test_inputs_that_share_what_is_written_are_refused() -> None:
    def function(one: Tensor, other: Tensor) -> Any:
        one.add_(1)
        return (other * 2,)

    cut = body(function, torch.zeros(4, H), views=lambda c: [c[:3], c[1:]])
    graph = Graph()
    nodes = list(cut.graph.nodes)
    views = [n for n in nodes if n.target is aten.slice.Tensor]
    env = {}
    for index, view in enumerate(views):
        env[view] = graph.placeholder(f"x{index}")
        env[view].meta = {"val": value_of(view)}
    for node in nodes[1:]:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    with pytest.raises(UnsupportedGraphError, match=r"share memory and one of them is written"):
        core_of(graph)


def test_shapes_that_change_in_place_are_refused() -> None:
    def function(x: Tensor) -> Any:
        y = x + 1
        y.t_()
        return (y,)

    with pytest.raises(UnsupportedGraphError, match="changes the shape of a tensor in place"):
        core_of(body(function, rows(4)).graph)


def made(change: Callable[[list[Tensor]], Any], name: str) -> None:
    """A backend whose results are changed, under a name of its own."""

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: change(list(gm(*args)))

    torch._dynamo.register_backend(backend, name=name)


made(lambda found: [f.t().contiguous().t() if f.dim() == 2 else f for f in found], "turning")
made(lambda found: found[:1] * len(found), "doubling")
made(lambda found: [f * 1.1 if f.is_floating_point() else f for f in found], "inexact")


@pytest.mark.parametrize(
    ("backend", "message"),
    [("turning", "with strides"), ("doubling", "shares memory with an input or another result")],
)
def test_results_that_look_different_are_refused(backend: str, message: str) -> None:
    segment = compile_body(body(lambda x: (x + 1, x + 2), rows(4)), backend)
    with pytest.raises(VerificationError, match=f"segment_0 as {backend} compiled it: .*{message}"):
        segment(rows(4))


def test_wrong_values_are_refused_on_the_first_call() -> None:
    program = compiled(backend="inexact")
    match = r"segment_\d as inexact compiled it differs from its traced ops: result 0 by"
    with pytest.raises(SoundnessError, match=match):
        run(program, PlainMoe, 1)
    with pytest.raises(SoundnessError, match=match):
        run(program, PlainMoe, 1)


@torch._dynamo.register_backend(name="assuming")
def assuming(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that compiles for small sizes only, as Inductor does for 32-bit offsets."""
    assert all(bool(size < 7) for size in inputs if isinstance(size, torch.SymInt))
    return gm.forward


def test_what_the_compiler_assumed_is_checked() -> None:
    """And is no guard of Dynamo's, which would compile again on one rank."""
    traced = traced_model(ranks=1)
    env = traced.captured.fake_mode.shape_env
    assert env is not None
    guards = len(env.guards)
    program = compiled(backend="assuming", verify="static")
    assert len(env.guards) == guards
    run(program, PlainMoe, 1, 8)
    with pytest.raises(VerificationError, match=r"not good for \{s0: 7\}: the compiler assumed"):
        run(program, PlainMoe, 1, 14)
    first = next(iter(artifacts().values()))
    size = first.symbols[0]
    assert (first.broken_by({size: 6}), str(first.broken_by({size: 7}))) == (None, f"{size} < 7")
    first.rules = (sympy.Lt(size, 2),)  # As if compiled for smaller batches than the traced one.
    compiled(backend="assuming", verify="static")
    assert first not in artifacts().values()


class Sequences(PlainMoe):
    """[B, S, H] -> [B, S, H], with both sizes symbolic: what follows the gate sees B * S only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(0, 1)).view(x.shape)


@pytest.mark.parametrize("backend", ["counted", "aot_eager"])
def test_several_symbolic_sizes(backend: str) -> None:
    x = torch.randn(6, 3, H)
    torch._dynamo.mark_dynamic(x, 1)
    trace = traced(Sequences(), (x,), split_dim=0)
    options = Options(segment_backend=backend, split_dim=0)
    program = compile_captured(trace.fresh(), options)
    assert {len(a.symbols) for a in artifacts().values()} >= {1}
    for batch, count in ((6, 3), (4, 5), (9, 2)):
        given = torch.randn(batch, count, H)
        wanted = Sequences()(given)
        sizes = {6: batch, 3: count}
        inputs = [sizes[i] if isinstance(i, int) else i for i in trace.args()]
        inputs[trace.captured.token_inputs[0].index] = given
        with torch.no_grad():
            torch.testing.assert_close(program(*inputs)[0], wanted)


def test_sizes_are_read_where_they_stand() -> None:
    """Of a product, of a factor beside a known one, and of a size that is an argument."""
    mode, size = rebuilt_mode([SymbolFacts(n, "positive", 2, None, 4) for n in "abc"], [])
    a, b, c = (size(sympy.Symbol(n, integer=True, positive=True)) for n in "abc")

    def places(*values: Any) -> CoreSizes:
        graph = Graph()
        for index, value in enumerate(values):
            graph.placeholder(f"x{index}").meta = {"val": value}
        return core_sizes(list(graph.nodes), ())

    def tensor(*shape: Any) -> Tensor:
        return symbols.fake_tensor(
            mode,
            symbols.fake_storage(4096),
            shape,
            [1] * len(shape),
            0,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    assert places(tensor(4 * a * b, 8)).sources == (Source(0, 0, 4, ()),)
    assert places(tensor(3, 4 * a * b), tensor(a)).sources == (
        Source(1, 0, 1, ()),
        Source(0, 1, 4, (0,)),
    )
    assert places(tensor(a * b * c), tensor(2 * a * b)).sources == (
        Source(1, 0, 2, ()),
        Source(0, 0, 1, (0,)),
    )
    assert places(tensor(3), a).sources == (Source(1, None, 1, ()),)
    found = places(tensor(4 * a * b, 8))
    assert str(found.renamed(512 * a * b)) == "512*s0"
    assert [size_in(torch.zeros(24, 2), 0, 4), size_in(24, None, 2, 3)] == [6, 4]
    with pytest.raises(UnsupportedGraphError, match=r"cannot be read off the shapes"):
        found.renamed(a)


@torch._dynamo.register_backend(name="failing")
def failing(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that cannot."""
    raise ValueError("wants another kind of graph")


def test_a_backend_that_fails_is_named() -> None:
    match = r"segment_0: segment_backend='failing' did not compile it \(ValueError: wants another"
    with pytest.raises(UnsupportedGraphError, match=match):
        compiled(backend="failing")


def test_damaged_files_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder of its own, with a warning that names the damaged one."""
    folders = []

    def standalone(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        folders.append(cache_dir())
        if len(folders) == 1:
            raise ImportError("cut.so: file too short\nand more")
        return gm.forward

    monkeypatch.setattr(torch._inductor, "standalone_compile", standalone)
    segment = compile_body(body(lambda x: (x + 1,), rows(4)), "inductor")
    assert torch.equal(segment(rows(4))[0], rows(4) + 1)
    assert folders[0] == cache_dir() != folders[1]
    assert f"its files in {folders[0]} (ImportError: cut.so: file too short)" in caplog.text


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_segments import H, body, compile_body, rows

def function(x, cache):
    cache.add_(1)
    return (x.sin() + cache,)

segment = compile_body(body(function, rows(4), torch.zeros(H)), "inductor")
cache = torch.ones(H)
torch.testing.assert_close(segment(rows(4), cache)[0], rows(4).sin() + 2)
print("right", cache[0].item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [None, ".so", ".py"])
def test_processes_share_inductors_files(tmp_path: Path, damaged: str | None) -> None:
    """Two that start together; and one that finds files that were cut short."""
    tests = str(Path(__file__).parent)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-c", SCRIPT.format(tests=tests)]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(line, env=env, text=True, stdout=-1, stderr=-1)

    for process in [started(), started()]:
        out, err = process.communicate(timeout=300)
        assert out == "right 2.0\n", err
    if damaged is not None:
        for file in tmp_path.rglob(f"*{damaged}"):
            file.write_text("cut")
        out, err = started().communicate(timeout=300)
        assert out == "right 2.0\n", err
        assert f"Inductor could not use its files in {tmp_path}" in err


class Place:
    """Stands for a tensor on a GPU."""

    is_cuda = True

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def test_a_written_input_that_would_be_copied_is_refused() -> None:
    artifact = Artifact(lambda *args: (), "segment_1", "inductor", (), (), (1,), ())
    core = artifact.function()
    core(Place(8), Place(32))
    with pytest.raises(VerificationError, match=r"argument 1 .* multiple of 16 bytes"):
        core(Place(0), Place(40))


def test_segments_are_found_in_modules() -> None:
    program = compiled()
    found = [body_of(m) for m in program.module.children()]
    assert sum(isinstance(m, GraphModule) for m in found) == program.summary.distinct_segments
    assert body_of(None) is None
    assert "counted" in repr(program.module)
    assert copy.deepcopy(program.module) is not None


def test_the_public_entry_takes_the_option() -> None:
    model = PlainMoe(1)
    x = rows(6)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        options = {"segment_backend": "counted"}
        result = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)(x)
        torch.testing.assert_close(result, model(x))
    assert dbo_fx.compilations()[-1].plan.segments == "counted"


def test_a_saved_program_is_compiled_by_the_same_backend(tmp_path: Path) -> None:
    model = CachedMoe(2)
    args = arguments(model)
    torch._dynamo.mark_dynamic(args[0], 0)
    options = {"segment_backend": "counted"}
    with torch.no_grad():
        torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)(*args)
    count = len(COUNTED)
    dbo_fx.save(dbo_fx.compilations()[-1], tmp_path / "saved")
    loaded = dbo_fx.load(tmp_path / "saved", model)
    assert loaded.compiled.plan.segments == "counted"
    assert len(COUNTED) == count
    clear_artifacts()
    dbo_fx.load(tmp_path / "saved", model)
    assert len(COUNTED) == 2 * count


class Positions(PlainMoe):
    """Adds a table's rows by the token's place in the batch, and that place itself."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        places = torch.arange(x.shape[0]).unsqueeze(1)
        return self.body(x + table[: x.shape[0]] + places)


@pytest.mark.parametrize("backend", ["counted", "aot_eager"])
def test_where_a_microbatch_begins_is_no_size_of_it(backend: str) -> None:
    """Both are numbers that were traced as the batch's size; a compiler must not confuse them."""
    table = torch.randn(16, H)
    trace = traced(Positions(), (rows(8), table))
    split = compile_captured(trace.fresh(), Options(segment_backend=backend))
    assert max(len(a.symbols) for a in artifacts().values()) == 2
    for count in (8, 7, 11):
        with torch.no_grad():
            result = split(*trace.args(count))[0]
        torch.testing.assert_close(result, Positions()(rows(count), table), rtol=1e-4, atol=1e-5)
