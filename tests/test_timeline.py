"""Timelines: streams and events on paper, whose time counts, what is inside, what the page gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import dbo_fx
from dbo_fx.backend import compile_captured
from dbo_fx.compiled import CompiledProgram
from dbo_fx.contracts import DEEPEP_LL, GLOO, NCCL, Contract
from dbo_fx.errors import OptionError, ScheduleError
from dbo_fx.inspect.action_times import read_times
from dbo_fx.inspect.timeline import Timeline, timeline_of_compiled, timeline_of_program
from dbo_fx.inspect.timeline_bars import hover_text
from dbo_fx.inspect.timeline_figure import figure
from dbo_fx.inspect.timeline_items import Inside, Item
from dbo_fx.inspect.write_timeline import timeline, write_files
from dbo_fx.ir import Action, Program, parse_program
from dbo_fx.ir_bind import bound_program
from dbo_fx.options import Options
from dbo_fx.schedules import load
from small_moe import CachedMoe, PlainMoe, TwoLaunches, one_rank, traced_model

TIMES = {"A0": 10, "A1": 30, "D": 25, "MLP": 40, "C": 35, "S": 15, "TAIL": 5, "merge": 2}


def program_of(
    schedule: str = "mlp_shared_overlap", layers: int = 2, contract: Contract = NCCL
) -> Program:
    return bound_program(load(schedule), layers, contract, 2)


def spans(found: Timeline) -> dict[str, tuple[float, float]]:
    return {item.name: (item.start_us, item.end_us) for item in found.items}


def text_program(*steps: str, transport: str = "nccl") -> Program:
    header = ["program 1", "schedule mine", "microbatches 2", "layers 1", f"transport {transport}"]
    return parse_program("\n".join([*header, *steps]))


TWO_STREAMS = (
    "comp  A0_m0@0",
    "comp  record e0",
    "comm  wait e0",
    "comm  D_m0.send@0",
    "comm  record e1",
    "comp  A0_m1@0",
    "comp  wait e1",
    "comp  D_m0.recv@0",
    "comp  MLP_m0@0",
)


def test_streams_run_beside_each_other_and_waits_hold_them():
    found = timeline_of_program(
        text_program(*TWO_STREAMS), {"A0": 10, "A0_m1": 4, "D": 25, "D.recv": 1, "MLP": 7}
    )
    assert spans(found) == {
        "A0_m0@0": (0, 10),
        "D_m0.send@0": (10, 35),
        "A0_m1@0": (10, 14),
        "D_m0.recv@0": (35, 36),
        "MLP_m0@0": (36, 43),
    }
    first, second = found.arrows
    assert (first.from_stream, first.from_us, first.to_stream, first.to_us) == (
        "comp", 10, "comm", 10,
    )  # fmt: skip
    assert (second.event, second.held_us) == (1, 21)
    assert (second.after, second.before) == ("D_m0.send@0", "D_m0.recv@0")
    assert found.end_us == 43
    assert found.busy_us("comp") == 22
    assert found.unit == "us"
    assert found.source == "predicted from given times"


def test_an_event_that_has_happened_holds_nothing():
    found = timeline_of_program(text_program(*TWO_STREAMS), {**TIMES, "A0_m1": 90})
    assert found.arrows[1].held_us == 0
    assert (found.arrows[1].from_us, found.arrows[1].to_us) == (35, 100)


def test_without_times_every_action_takes_one_unit_and_says_so():
    found = timeline_of_program(program_of())
    assert {item.duration_us for item in found.items} == {0, 1}
    zero = {item.name.partition("_")[0] for item in found.items if not item.duration_us}
    assert zero == {"D", "C", "merge"}  # The recvs: their transfers have been counted as sends.
    assert found.unit == "units"
    assert "order only: one unit per action" in str(found)


def test_a_parted_action_takes_its_time_once():
    steps = ("comp  A0_m0@0", "comp  record e0", "comp  A0_m0@0")
    whole = text_program("comp  A0_m0@0")
    parted = Program("mine", 2, 1, "nccl", _unchecked(*steps))
    assert timeline_of_program(whole).end_us == timeline_of_program(parted).end_us == 1


def _unchecked(*steps: str) -> tuple:
    return tuple(step for text in steps for step in text_program(text).steps)


def test_the_latest_record_counts_and_an_unrecorded_event_holds_nothing():
    steps = _unchecked("comp  A0_m0@0", "comp  record e0", "comp  A1_m0@0", "comp  record e0")
    waits = tuple(s for s in text_program(*TWO_STREAMS).steps if str(s).startswith("comm  wait"))
    sends = _unchecked("comm  D_m0.send@0")
    assert timeline_of_program(Program("m", 2, 1, "nccl", (*steps, *waits, *sends))).end_us == 3
    found = timeline_of_program(Program("m", 2, 1, "nccl", (*waits, *sends)))
    assert (found.end_us, found.arrows) == (1, ())
    assert found.certificate.startswith("refused: ")


def test_a_host_that_waits_enqueues_nothing():
    """gloo's recv blocks the host: what stands behind it begins later, on every stream."""
    steps = (*TWO_STREAMS[:8], "comm  D_m1.send@0")
    times = {"A0": 1, "D": 10, "D.recv": 5}
    assert spans(timeline_of_program(text_program(*steps), times))["D_m1.send@0"] == (11, 21)
    blocking = timeline_of_program(text_program(*steps, transport="gloo"), times)
    assert spans(blocking)["D_m1.send@0"] == (16, 26)


def test_transfers_that_occupy_no_stream_have_a_lane():
    found = timeline_of_program(
        program_of(contract=DEEPEP_LL), {**TIMES, "D.send": 2, "D.recv": 3, "C.recv": 1}
    )
    assert found.streams == ("comp", "in flight")
    at = spans(found)
    assert at["D_m0.send@0"] == (40, 42)
    assert at["D_m0@0"] == (42, 67)
    assert at["A0_m1@0"] == (42, 52)
    assert at["D_m0.recv@0"] == (82, 85)
    slow = spans(timeline_of_program(program_of(contract=DEEPEP_LL), {**TIMES, "D": 1000}))
    assert slow["D_m0.recv@0"][0] == 1040


@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
@pytest.mark.parametrize("contract", [NCCL, GLOO, DEEPEP_LL], ids=lambda c: c.name)
def test_streams_are_first_in_first_out(schedule: str, contract: Contract):
    found = timeline_of_program(program_of(schedule, 3, contract), TIMES)
    for stream in found.streams:
        items = found.of(stream)
        assert all(a.end_us <= b.start_us for a, b in pairwise(items))
    runs = [item.action for item in found.items if item.stream != "in flight" and item.action]
    assert tuple(runs) == program_of(schedule, 3, contract).actions


def test_overlap_is_faster_than_one_after_the_other():
    overlapped, one_by_one = (
        timeline_of_program(program_of(name, 4), TIMES)
        for name in ("mlp_shared_overlap", "sequential")
    )
    assert overlapped.end_us < one_by_one.end_us
    assert overlapped.busy_us("comp") == one_by_one.busy_us("comp")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"D": 1}, 1),
        ({"D": 1, "D_m1": 2}, 2),
        ({"D": 1, "D_m1": 2, "D.send": 3}, 3),
        ({"D": 1, "D_m1": 2, "D.send": 3, "D@0": 4}, 4),
        ({"D@0": 4, "D_m1.send": 5}, 5),
        ({"D@0": 4, "D_m1.send": 5, "D_m1@0": 6}, 6),
        ({"D_m1.send": 5, "D_m1@0": 6, "D.send@0": 7}, 7),
        ({"D.send@0": 7, "D_m1.send@0": 8, "D_m0.send@0": 9}, 8),
    ],
)
def test_the_key_that_says_most_wins(times: dict[str, float], expected: float):
    found = timeline_of_program(text_program("comm  D_m1.send@0"), times)
    assert found.end_us == expected


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({}, "none for A0_m0@0; add 'A0' for all of that phase"),
        ({"A0@1": 3}, "none for A0_m0@0"),
        ({"A0": 1, "AO": 3}, "unknown key 'AO'"),
        ({"A0": 1, "A0.send": 3}, "unknown key 'A0.send'"),
        ({"A0": 1, "TAIL@3": 3}, "unknown key 'TAIL@3'"),
        ({"A0": 1, "D@x": 3}, "unknown key 'D@x'"),
        ({"A0": -1}, "'A0' is -1; wanted microseconds, from 0 up"),
        ({"A0": float("nan")}, "'A0' is nan"),
        ({"A0": True}, "'A0' is True"),
        ({"A0": "fast"}, "'A0' is 'fast'"),
    ],
)
def test_wrong_times_are_refused(times: dict[str, float], reason: str):
    with pytest.raises(OptionError, match="times: ") as refused:
        timeline_of_program(text_program("comp  A0_m0@0"), times)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "found list, wanted an object"),
        ("{", "is no JSON"),
        ('{"A0": "x"}', "times.json: times: 'A0' is 'x'"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_times_file_is_named(tmp_path: Path, text: str | None, reason: str):
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError) as refused:
        read_times(path)
    assert reason in str(refused.value)
    assert "times.json" in str(refused.value)


def test_layers_follow_the_leading_microbatch():
    layers = timeline_of_program(program_of(layers=3)).layers
    assert [(r.layer, r.start_us, r.end_us) for r in layers] == [(0, 0, 8), (1, 8, 16), (2, 16, 25)]
    twice = timeline_of_program(program_of("sequential", 2)).layers
    assert [r.layer for r in twice] == [0, 1, 0, 1]
    assert all(a.end_us == b.start_us for a, b in pairwise(twice))


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    with one_rank():
        return compile_captured(traced_model(CachedMoe, 2, 1).fresh(), Options())


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
def test_every_captured_node_is_inside_one_item_of_each_microbatch(
    model: type[PlainMoe], schedule: str
):
    with one_rank():
        found = compile_captured(traced_model(model, 2, 1).fresh(), Options(schedule=schedule))
    items = timeline_of_compiled(found).items
    assert all(item.nodes for item in items if item.action is not None)
    inside = Counter(
        (item.phase, item.layer, item.microbatch, node.name)
        for item in items
        for node in item.nodes
        if node.op not in ("sent", "received")
    )
    assert set(inside.values()) == {1}
    expected = set()
    for node in found.captured.graph.nodes:
        tag = node.meta.get("dbo_fx")
        is_compute = tag and tag.role == "compute" and "getitem" not in str(node.target)
        if is_compute and node.op == "call_function" and hasattr(node.target, "_schema"):
            expected |= {(tag.phase.value, tag.layer, m, node.name) for m in (0, 1)}
    assert set(inside) == expected


def test_shapes_and_bytes_are_those_of_the_microbatch(compiled: CompiledProgram):
    found = timeline_of_compiled(compiled, tokens=13)  # Microbatches of 6 and 7 rows.
    rows = {0: 6, 1: 7}
    for item in found.items:
        if item.phase == "S":
            count = rows[item.microbatch]
            assert [n.op for n in item.nodes] == ["linear", "silu"]
            assert {n.shape for n in item.nodes} == {f"[{count}, 8] f32"}
            assert item.bytes == 2 * count * 8 * 4
    sent = next(item for item in found.items if item.name == "C_m1.send@0")
    assert [(n.op, n.shape, n.bytes) for n in sent.nodes] == [("sent", "[7, 8] f32", 224)]
    written = {n.name: n.bytes for i in found.items if i.name == "A0_m0@0" for n in i.nodes}
    assert written["index_copy_"] is None  # In place.
    assert written["unsqueeze"] is None  # A view.


def test_the_memory_curve_is_on_the_same_axis(compiled: CompiledProgram):
    found = timeline_of_compiled(compiled, TIMES, tokens=64)
    assert found.memory is not None
    assert found.memory.report == compiled.memory(64)
    times = list(found.memory.at_us)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= found.end_us
    at = {moment.name: time for time, moment in found.memory.points}
    starts = spans(found)
    assert at["A_m1_l1"] == starts["A0_m1@1"][0]
    assert at["MLP_m0_l0"] == starts["MLP_m0@0"][0]
    assert at["D_m0_l0_send"] == starts["A1_m0@0"][1]


def test_a_compiled_timeline_has_the_programs_own_certificate(compiled: CompiledProgram):
    found = timeline_of_compiled(compiled)
    assert str(compiled.certificate.hazards) in found.certificate
    assert "\n".join(found.overlap) == str(compiled.certificate.overlap)
    assert found.title.endswith("gloo, 6 rows")


def test_hover_text_is_tidy_and_escaped():
    nodes = tuple(Inside(f"mm_{n}", "mm<1>", "[4, 8] f32", 128 if n else None) for n in range(20))
    item = Item("comp", 2.5, 14, "A0_m0@3", Action.parse_bound("A0_m0@3"), nodes)
    lines = hover_text(item, "us").split("<br>")
    assert lines[:3] == [
        "<b>A0_m0@3</b>  on comp",
        "2.5 to 14 us  (11.5 us, predicted)",
        "20 nodes, writes 2.4 KiB",
    ]
    assert lines[3] == "mm_0   mm&lt;1&gt;  [4, 8] f32"
    assert lines[4] == "mm_1   mm&lt;1&gt;  [4, 8] f32  128 B"
    assert lines[-1] == "... 6 more: click for all of them"
    assert len(lines) == 3 + 14 + 1


def test_few_traces_for_many_layers(compiled: CompiledProgram):
    few = figure(timeline_of_program(program_of(layers=2)))
    many = figure(timeline_of_program(program_of(layers=61)))
    assert len(few["data"]) == len(many["data"]) <= 5
    drawn = figure(timeline_of_compiled(compiled, TIMES))
    roles = Counter(trace["meta"]["role"] for trace in drawn["data"])
    assert roles == {"bars": 3, "arrows": 2, "memory": 4}
    assert drawn["layout"]["xaxis"]["matches"] == "x2"
    json.dumps(drawn, allow_nan=False)


def test_a_page_is_one_file_without_addresses(tmp_path: Path):
    pytest.importorskip("plotly", reason="the html extra is not installed")
    path = tmp_path / "page.html"
    dbo_fx.timeline("mlp_shared_overlap", path, layers=3)
    text = path.read_text(encoding="utf-8")
    own = text.partition("/**\n* plotly.js")[0] + text.rpartition("</script>\n<script>")[2]
    assert "http" not in own
    assert "src=" not in own
    assert "<title>mlp_shared_overlap: 3 layers, 2 microbatches, nccl</title>" in own
    assert "@@" not in own
    assert "order only: one unit per action" in own
    assert "busy" not in own.partition("<nav>")[0]  # Shares of units would mislead.


def test_data_cannot_end_its_script(tmp_path: Path):
    pytest.importorskip("plotly", reason="the html extra is not installed")
    from dbo_fx.inspect.timeline_html import timeline_html

    found = timeline_of_program(text_program(*TWO_STREAMS))
    nodes = (Inside("</script><script>alert(1)", "mm", "", None),)
    bad = Item("comp", 0, 1, "A0_m0@0", Action.parse_bound("A0_m0@0"), nodes)
    page = timeline_html(Timeline("<b>&", (bad, *found.items), (), ("comp", "comm"), (), False))
    assert "alert(1)" in page
    assert "</script><script>alert(1)" not in page
    assert "<title>&lt;b&gt;&amp;</title>" in page


def test_anything_with_a_program_has_a_timeline(compiled: CompiledProgram, tmp_path: Path):
    schedule = load("sequential")
    assert timeline(schedule) == timeline("sequential")
    assert timeline(schedule, layers=3, transport="deepep_ll").streams == ("comp", "in flight")
    path = tmp_path / "mine.dbo"
    path.write_text(str(program_of()), encoding="utf-8")
    assert timeline(path, times=TIMES) == timeline_of_program(program_of(), TIMES)
    assert timeline(compiled, tokens=8) == compiled.timeline(tokens=8)
    trace = tmp_path / "trace.json"
    found = compiled.timeline(trace, times=TIMES)
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    other = tmp_path / "trace.perfetto"
    assert write_files(found, trace=other) == [other]
    assert other.read_bytes() == trace.read_bytes()


def test_wrong_use_is_refused(compiled: CompiledProgram, tmp_path: Path):
    with pytest.raises(OptionError, match=r"wanted a name that ends in \.html"):
        timeline("sequential", tmp_path / "page.png")
    with pytest.raises(OptionError, match="a schedule takes no tokens"):
        timeline("sequential", tokens=8)
    with pytest.raises(OptionError, match="a program takes no layers"):
        timeline(program_of(), layers=2)
    with pytest.raises(OptionError, match="a compiled program takes no transport"):
        timeline(compiled, transport="nccl")
    with pytest.raises(OptionError, match="cannot be written"):
        timeline("sequential", tmp_path / "nowhere" / "trace.json")
    with pytest.raises(OptionError, match="cannot be written"):
        write_files(timeline("sequential"), trace=tmp_path)
    with pytest.raises(ScheduleError, match="no schedule is called 'nope'"):
        timeline("nope")
    with pytest.raises(OptionError, match="found int; wanted a compiled program, a program"):
        timeline(3)  # type: ignore[arg-type]


def test_without_plotly_a_page_names_the_extra():
    code = (
        "import sys; sys.modules['plotly'] = None; import dbo_fx\n"
        "try: dbo_fx.timeline('sequential', 'page.html')\n"
        "except dbo_fx.DboError as error: print(error)\n"
        "dbo_fx.timeline('sequential')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "a timeline page needs plotly; pip install 'dbo-fx[html]'",
        "False",
    ], done.stderr


def shown(*arguments: str) -> tuple[int, str]:
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from typer.testing import CliRunner

    from dbo_fx.cli import app

    done = CliRunner().invoke(app, ["show", *arguments])
    assert done.stdout == ""
    return done.exit_code, done.stderr


def test_show_writes_a_page_and_a_trace(tmp_path: Path):
    pytest.importorskip("plotly", reason="the html extra is not installed")
    times, page, trace = (tmp_path / name for name in ("times.json", "page.htm", "trace.perfetto"))
    times.write_text(json.dumps(TIMES), encoding="utf-8")
    files = ("--html", str(page), "--trace", str(trace), "--times", str(times))
    code, messages = shown("mlp_shared_overlap", "--layers", "3", *files)
    assert (code, messages.splitlines()) == (
        0, [f"dbo-fx show: wrote {page}", f"dbo-fx show: wrote {trace}"],
    )  # fmt: skip
    assert "3 layers" in page.read_text(encoding="utf-8")[:500]
    process = json.loads(trace.read_text(encoding="utf-8"))["otherData"]["process 0"]
    assert process.endswith("predicted from given times")


def test_show_refuses_times_that_leave_actions_out(tmp_path: Path):
    times = tmp_path / "times.json"
    times.write_text('{"A0": 3}', encoding="utf-8")
    code, message = shown("sequential", "--times", str(times))
    assert (code, "none for A1_m0@0" in message) == (2, True)
    code, message = shown("sequential", "--times", str(times), "--trace", str(tmp_path / "t.json"))
    assert (code, "none for A1_m0@0" in message) == (2, True)
    assert not (tmp_path / "t.json").exists()
