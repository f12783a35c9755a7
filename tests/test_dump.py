"""Dump folders: what is in them, and that their Python files run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import dbo_fx
from dbo_fx import dump
from dbo_fx.errors import DboError, OptionError, SoundnessError
from dbo_fx.graph_python import python_text, tag_text
from dbo_fx.ir import Half, Phase, parse_program
from dbo_fx.options import Options
from dbo_fx.tag import Tag
from small_moe import CachedMoe, H, PlainMoe, Traced, arguments, one_rank, rows, traced

STAGES = ["captured", "tagged", "microbatched", "scheduled", "emitted"]
FILES = {
    *(f"{name}.py" for name in STAGES),
    *(f"{name}.{ext}" for name in ("certificate", "overlap", "memory") for ext in ("txt", "json")),
    "captured.dbograph.json",
    "program.dbo",
    "report.txt",
}


class Scaled(CachedMoe):
    """A constant takes part."""

    def forward(self, x: Tensor, counter: Tensor, caches: Any) -> Any:  # type: ignore[override]
        scale = torch.tensor([1.0, 2.0, 0.5, 4.0] * (H // 4))
        return super().forward(x, counter, caches) * scale


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def dumped(trace: Traced, folder: Path, **options: Any) -> Path:
    """Compile a traced graph with a dump; the folder that was written."""
    dbo_fx.compile_graph(trace.fresh(), Options(dump_dir=folder, verify="static", **options))
    (written,) = (folder / "rank0").iterdir()
    return written


def imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("kind", [PlainMoe, Scaled])
def test_every_file_runs_with_the_same_results(
    kind: type[PlainMoe], progress: bool, tmp_path: Path
) -> None:
    model = kind(2)
    trace = traced(model, arguments(model))
    folder = dumped(trace, tmp_path, progress=progress)
    wanted, written = trace.args(8), []
    with torch.no_grad():
        results = trace.captured.module(*wanted)
    for name in STAGES:
        module, args = imported(folder / f"{name}.py"), trace.args(8)
        with torch.no_grad():
            found = module.forward(*args)
        torch.testing.assert_close(found, results, rtol=1e-4, atol=1e-5)
        written.append([a for a in args if isinstance(a, Tensor)])
    for after in written:
        kept = [a for a in wanted if isinstance(a, Tensor)]
        torch.testing.assert_close(after, kept, rtol=1e-4, atol=1e-5)
    captured = imported(folder / "captured.py")
    with torch.no_grad():
        assert torch.equal(captured.forward(*trace.args(8))[0], results[0])


def test_files_are_also_programs(tmp_path: Path) -> None:
    folder = dumped(traced(PlainMoe(), (rows(),)), tmp_path)
    for name in ("captured", "emitted"):
        command = [sys.executable, str(folder / f"{name}.py")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "Inputs:\n" in told
        assert "    l_x_: float32[" in told


def test_the_folder_holds_what_it_says(tmp_path: Path) -> None:
    folder = dumped(traced(PlainMoe(2), (rows(),)), tmp_path)
    assert {p.name for p in folder.iterdir()} == FILES
    compiled = dbo_fx.compilations()[-1]
    text = {p.name: p.read_text() for p in folder.iterdir()}
    assert parse_program(text["program.dbo"]) == compiled.program
    assert text["report.txt"] == f"{compiled}\n"
    assert text["certificate.txt"] == f"{compiled.certificate}\n"
    assert json.loads(text["certificate.json"]).keys() >= {"hazards", "ranks", "overlap"}
    assert json.loads(text["overlap.json"]) == json.loads(text["certificate.json"])["overlap"]


def test_the_captured_graph_is_the_one_before_the_passes(tmp_path: Path) -> None:
    trace = traced(PlainMoe(2), (rows(),))
    folder = dumped(trace, tmp_path)
    kept = dbo_fx.load_graph(folder / "captured.dbograph.json")
    assert [n.name for n in kept.graph.nodes] == [n.name for n in trace.captured.graph.nodes]
    again, _ = dbo_fx.compile_graph(kept)
    assert again == dbo_fx.compilations()[-2].program


def test_calls_say_where_they_belong(tmp_path: Path) -> None:
    folder = dumped(traced(PlainMoe(2), (rows(),)), tmp_path)

    def comments(name: str) -> list[str]:
        lines = (folder / f"{name}.py").read_text().splitlines()
        return [line.partition("  # ")[2].split("  ")[0] for line in lines if "  # " in line]

    assert "D@1" in comments("tagged")
    assert {"m0 A1@1", "m1 MLP@0", "m1 slice"} <= set(comments("microbatched"))
    assert {"m0 D.send@1 comm", "m1 D.recv@0 comp", "sync comp"} <= set(comments("scheduled"))
    assert {"m0 A1@0 comp", "m1 MLP@1 comp"} <= set(comments("emitted"))
    assert "    # small_moe.py:" in (folder / "captured.py").read_text()


def test_tags_as_text() -> None:
    assert tag_text(None) == ""
    assert tag_text(Tag("size", stream="comp")) == "size comp"
    assert tag_text(Tag("comm", Phase.D, 3, 1, Half.SEND, "comm")) == "m1 D.send@3 comm"
    assert tag_text(Tag(phase=Phase.TAIL, microbatch=0)) == "m0 TAIL"


def test_odd_arguments_are_code() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    index = graph.call_function(
        torch.ops.aten.masked_fill.Scalar, (x, x, float("-inf")), {"other": [slice(0, x, 2)]}
    )
    y = graph.call_function(torch.sym_max, ((x,), {"a": torch.float32, "b": torch.device("cpu")}))
    graph.output((index, y))
    text = python_text(graph, "Odd.")
    assert "masked_fill.Scalar(x, x, float('-inf'), other=[slice(0, x, 2)])" in text
    assert "torch.sym_max((x,), {'a': torch.float32, 'b': torch.device('cpu')})" in text
    compile(text, "odd.py", "exec")


# When a folder is written.


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dbo_fx.compile_graph(traced(PlainMoe(), (rows(),)).fresh())
    assert not list(tmp_path.iterdir())


def test_every_compilation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    trace = traced(PlainMoe(), (rows(),))
    for _ in range(2):
        dbo_fx.compile_graph(trace.fresh(), {"dump_dir": tmp_path})
    torch._dynamo.reset()
    x = rows()
    torch._dynamo.mark_dynamic(x, 0)
    run = torch.compile(PlainMoe(), backend="dbo_fx", options={"dump_dir": str(tmp_path)})
    with torch.no_grad():
        run(x)
    assert sorted(p.name for p in (tmp_path / "rank0").iterdir()) == ["0", "1", "2"]
    assert {p.name for p in (tmp_path / "rank0" / "2").iterdir()} >= FILES


class Mixes(PlainMoe):
    """Adds the mean over all rows."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x - x.mean(0))


def test_a_refused_graph_leaves_what_there_was(tmp_path: Path) -> None:
    with pytest.raises(SoundnessError):
        dumped(traced(Mixes(), (rows(),)), tmp_path)
    (folder,) = (tmp_path / "rank0").iterdir()
    names = {p.name for p in folder.iterdir()}
    assert names == {"captured.py", "captured.dbograph.json", "tagged.py", "refused.txt"}
    told = (folder / "refused.txt").read_text()
    assert told.startswith("SoundnessError: ")
    assert "(refused by pass soundness)" in told


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    trace = traced(PlainMoe(), (rows(),))
    with pytest.raises(OptionError, match=r"dump_dir='.*/file' cannot be written"):
        dumped(trace, file)
    with pytest.raises(DboError) as refused:
        dumped(traced(Mixes(), (rows(),)), file)
    assert isinstance(refused.value, SoundnessError)
    assert any("cannot be written" in note for note in refused.value.__notes__)


def test_other_parts_add_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(compiled: dbo_fx.CompiledProgram, folder: Path) -> None:
        (folder / "page.html").write_text(compiled.program.digest)

    writers: list[Callable[..., None]] = [*dump.WRITERS, page]
    monkeypatch.setattr(dump, "WRITERS", writers)
    folder = dumped(traced(PlainMoe(), (rows(),)), tmp_path)
    assert (folder / "page.html").read_text() == dbo_fx.compilations()[-1].program.digest


def test_a_graph_that_no_file_can_hold_is_still_dumped(tmp_path: Path) -> None:
    trace = traced(PlainMoe(), (rows(),))
    captured = trace.fresh()
    node = next(n for n in captured.graph.nodes if "softmax" in n.name)
    node.kwargs = {**node.kwargs, "dtype": None}
    odd = replace(trace, captured=captured)
    node.meta["val"] = object()
    collected = dump.Dump(tmp_path)
    collected.begin(odd.captured)
    assert "captured.py" in collected.texts
    assert "object" in collected.texts["captured.not_saved.txt"]
