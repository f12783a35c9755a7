"""How long a diff takes; `full_size.py` calls this with the full-size model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.fx import Graph, GraphModule

from dbo_fx import schedules, sync
from dbo_fx.capture import CapturedGraph
from dbo_fx.compiled import CompiledProgram
from dbo_fx.contracts import contract
from dbo_fx.graph_file import graph_text
from dbo_fx.inspect.diff import GraphDiff, diff
from dbo_fx.ir_bind import bound_program


def diff_figures(captured: CapturedGraph, compiled: CompiledProgram) -> dict[str, object]:
    """Seconds for the diff and its text, of captured graphs, emitted graphs and programs.

    Args:
        captured: The captured graph; compared with one in which every activation is another.
        compiled: The compiled program; compared with one without keepalives, its text with the
            sequential schedule's.
    """
    program = compiled.program
    sequential = bound_program(
        schedules.load("sequential"),
        program.layers,
        contract(program.transport),
        program.microbatches,
    )
    with tempfile.TemporaryDirectory() as folder:
        was, now = (Path(folder) / f"{name}.dbograph.json" for name in ("was", "now"))
        text = graph_text(captured)
        was.write_text(text, encoding="utf-8")
        now.write_text(text.replace("aten::silu.default", "aten::gelu.default"), encoding="utf-8")
        files, changes = _timed(lambda: diff(was, now))
    emitted, _ = _timed(lambda: diff(compiled, _without_keepalives(compiled.module)))
    programs, _ = _timed(lambda: diff(program, sequential))
    return {
        "diff_captured_s": files,
        "diff_captured_changes": changes,
        "diff_emitted_s": emitted,
        "diff_programs_s": programs,
    }


def _timed(make: Callable[[], GraphDiff]) -> tuple[float, int]:
    started = time.perf_counter()
    found = make()
    str(found)
    seconds = round(time.perf_counter() - started, 2)
    assert found, "the edit was not found"
    return seconds, len(found.changes)


def _without_keepalives(module: GraphModule) -> GraphModule:
    graph = Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    for node in list(graph.nodes):
        if node.target is sync.keepalive:
            graph.erase_node(node)
    return GraphModule(module, graph)
