"""When every action ran: the diagnostic module, its clock, medians, files, and what follows."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx import measuring, stamps
from dbo_fx.backend import compile_captured
from dbo_fx.compiled import CompiledProgram
from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError
from dbo_fx.inspect.measured import Measured, Stamp, measured_from_json, read_measured
from dbo_fx.ir import Run, parse_program
from dbo_fx.ir_bind import bound_program
from dbo_fx.options import Options
from dbo_fx.progress import Place
from dbo_fx.schedules import load
from dbo_fx.stamps import StampedRuntime
from small_moe import CachedMoe, PlainMoe, Traced, one_rank, traced_model


def compiled(trace: Traced, schedule: str = "mlp_shared_overlap") -> CompiledProgram:
    return compile_captured(trace.fresh(), Options(verify="static", schedule=schedule))


@functools.cache
def measured(
    schedule: str, kind: type[PlainMoe] = PlainMoe, layers: int = 2, replays: int = 3
) -> tuple[CompiledProgram, Measured]:
    trace = traced_model(kind, layers, ranks=1)
    with one_rank():
        program = compiled(trace, schedule)
        return program, program.measure(trace.args(12), replays)


@pytest.mark.parametrize("schedule", ["sequential", "mlp_shared_overlap", "single_batch_overlap"])
def test_every_action_has_its_time_on_its_stream(schedule: str) -> None:
    program, found = measured(schedule)
    steps = [s for s in program.program.steps if isinstance(s, Run)]
    # A0 and A1 are one segment here: it counts as its last action.
    wanted = [(s.stream, s.action.bound()) for s in steps if s.action.phase.value != "A0"]
    merged = [("comp", "merge")] if program.program.microbatches > 1 else []
    assert [(s.stream, s.name) for s in found.stamps] == wanted + merged
    assert (found.mode, found.device, found.replays, found.tokens) == ("eager", "cpu", 3, 12)
    assert set(found.times) == {s.action.bound() for s in steps} | {"merge"}
    assert all(found.times[s.action.bound()] == 0 for s in steps if s.action.phase.value == "A0")


def test_on_cpu_actions_run_one_after_the_other() -> None:
    _, found = measured("mlp_shared_overlap", replays=1)
    assert all(s.duration_us == s.stop_us - s.start_us > 0 for s in found.stamps)
    ends = [s.stop_us for s in found.stamps]
    assert ends == sorted(ends)
    assert found.stamps[-1].stop_us < found.stamped_us


def test_what_belongs_to_no_microbatch_is_stamped_too() -> None:
    _, found = measured("mlp_shared_overlap", CachedMoe)
    assert "shared" in {s.name for s in found.stamps}
    assert "shared" not in found.times


def test_what_the_program_writes_is_put_back() -> None:
    trace = traced_model(CachedMoe, 2, ranks=1)
    args, untouched = trace.args(6), trace.args(6)
    with one_rank():
        program = compiled(trace)
        assert program.written
        program.measure(args, 2)
        assert all(map(_same, args, untouched))
        after, wanted = program(*args), program(*untouched)
    assert all(map(torch.equal, after, wanted))
    assert all(map(_same, args, untouched))


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_the_program_itself_stays_as_it_was() -> None:
    trace = traced_model(PlainMoe, 2, ranks=1)
    with one_rank():
        program = compiled(trace)
        before = program.module.code, program.program.digest, len(dbo_fx.compilations())
        wanted = program(*trace.args(12))
        program.measure(trace.args(12), 1)
        assert (program.module.code, program.program.digest, len(dbo_fx.compilations())) == before
        assert all(map(torch.equal, program(*trace.args(12)), wanted))


def test_the_diagnostic_module_runs_the_same_segments_in_the_same_order() -> None:
    trace = traced_model(PlainMoe, 2, ranks=1)
    with one_rank():
        program = compiled(trace)
        other = measuring._stamped(program)
        marks = {"start", "finish"}
        one = [n for n in program.module.graph.nodes if n.target not in marks]
        two = [n for n in other.module.graph.nodes if n.target not in marks]
        assert [(n.op, n.target) for n in one] == [(n.op, n.target) for n in two]
        for n in one:
            if n.op == "call_module":
                assert getattr(program.module, n.target) is getattr(other.module, n.target)
        assert all(map(torch.equal, program(*trace.args(12)), other(*trace.args(12))))


def test_arguments_are_caught_from_a_call_of_the_model() -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    args = trace.args(8)
    with one_rank():
        program = compiled(trace)
        assert program.measure(lambda: program(*args), 1).tokens == 8
        with pytest.raises(OptionError, match="the call did not run CompiledProgram"):
            program.measure(lambda: None, 1)


def test_wrong_arguments_are_refused() -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    with one_rank():
        program = compiled(trace)
        with pytest.raises(OptionError, match="replays=0; wanted 1 or more"):
            program.measure(trace.args(), 0)
        with pytest.raises(OptionError, match=r"1 inputs; the graph of .* takes \d+, .*lambda"):
            program.measure(trace.args()[:1])
        with pytest.raises(OptionError, match="cannot be captured in a CUDA graph on cpu"):
            program.measure(trace.args(), graph=True)


def on_two_ranks(rank: int) -> tuple[float, list[str]]:
    from dbo_fx.models.moe import MoeConfig, MoeDecoder

    torch._dynamo.reset()
    net = MoeDecoder(MoeConfig(layers=1, hidden=32, shared_hidden=48)).eval()
    model = torch.compile(net, backend="dbo_fx", fullgraph=True)
    ids = torch.randint(0, 256, (9, 4), generator=torch.Generator().manual_seed(rank))
    torch._dynamo.mark_dynamic(ids, 0)
    with torch.no_grad():
        model(ids)
        found = dbo_fx.compilations()[-1].measure(lambda: model(ids), 3)
    return found.total_us, [s.name for s in found.stamps]


def test_all_ranks_measure_together(ranks: Any) -> None:
    one, two = ranks(on_two_ranks)
    assert one[1] == two[1]
    assert min(one[0], two[0]) > 0


# --- what follows from a measurement


class FakeEvent:
    """A timing event of a pretended device: every record takes the next microsecond."""

    clock = 0

    def record(self, stream: str) -> None:
        FakeEvent.clock += 1
        self.at, self.stream = FakeEvent.clock, stream

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) / 1e3


class FakeStreams(dict[str, str]):
    """A pool that is always ready."""

    def begin(self) -> None:
        """Nothing to make."""


def test_on_cuda_events_are_recorded_on_the_streams_of_the_actions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stamps, "timing_event", FakeEvent)
    monkeypatch.setattr(StampedRuntime, "is_cuda", True)
    order = [Place("comp", "A1_m0@0"), Place("comm", "D_m0.send@0"), Place("comp", "MLP_m0@0")]
    runtime = StampedRuntime(torch.device("cpu"), order)
    monkeypatch.setattr(runtime, "_streams", FakeStreams(comp="current", comm="side"))
    for _ in range(2):  # A replay records the same events again.
        runtime.begin()
        runtime.start(1, "comp")
        runtime.finish(1, "comp")
        runtime.start(1, "comm")
        runtime.start(2, "comp")
        runtime.finish(1, "comm")
        runtime.finish(2, "comp")
        spans = runtime.spans_us()
        assert [(round(a), round(b)) for a, b in spans] == [(1, 2), (3, 5), (4, 6)]
    events = [event for pair in runtime._stamps.values() for event in pair]
    assert [e.stream for e in events] == ["current"] * 2 + ["side"] * 2 + ["current"] * 2  # type: ignore[attr-defined]


PROGRAM = (
    "program 1\nschedule hand\nmicrobatches 2\nlayers 1\ntransport {transport}\n"
    "comp  A0_m0@0\ncomp  A1_m0@0\ncomp  record e0\ncomm  wait e0\ncomm  D_m0.send@0\n"
    "comm  record e1\ncomp  A1_m1@0\ncomp  wait e1\ncomp  D_m0.recv@0\ncomp  MLP_m0@0\n"
)


def hand(transport: str = "nccl") -> Measured:
    rows = [
        ("A1_m0@0", "comp", 1, 11),
        ("D_m0.send@0", "comm", 12, 32),
        ("A1_m1@0", "comp", 12, 20),
        ("D_m0.recv@0", "comp", 33, 35),
        ("MLP_m0@0", "comp", 35, 40),
    ]
    return Measured(
        parse_program(PROGRAM.format(transport=transport)),
        tuple(Stamp(n, s, float(a), float(b), float(b - a)) for n, s, a, b in rows),
        total_us=41.0,
        stamped_us=44.0,
        replays=5,
        mode="graph",
        device="H",
        torch="2.0",
        tokens=4,
    )


def test_times_where_the_send_is_the_transfer() -> None:
    assert hand().times == {
        "A0_m0@0": 0, "A1_m0@0": 10, "D_m0.send@0": 20, "A1_m1@0": 8, "D_m0.recv@0": 2,
        "MLP_m0@0": 5, "merge": 0,
    }  # fmt: skip


def test_times_where_recv_completes_the_transfer() -> None:
    assert {k: v for k, v in hand("gloo").times.items() if k[0] == "D"} == {
        "D_m0.send@0": 35 - 12, "D_m0.recv@0": 0,
    }  # fmt: skip
    assert {k: v for k, v in hand("deepep_ll").times.items() if k[0] == "D"} == {
        "D_m0.send@0": 20, "D_m0@0": 35 - 32, "D_m0.recv@0": 0,
    }  # fmt: skip


def test_an_action_in_two_stretches_takes_their_sum() -> None:
    one = hand()
    again = (*one.stamps, Stamp("MLP_m0@0", "comp", 50.0, 57.0, 7.0))
    assert replace(one, stamps=again).times["MLP_m0@0"] == 12


def test_simulating_a_sequential_measurement_gives_its_own_gapless_time() -> None:
    program, found = measured("sequential")
    simulated = dbo_fx.simulate(program, found)
    assert simulated.total_us == pytest.approx(sum(found.times.values()))
    assert simulated.total_us < found.stamped_us


def test_times_of_a_sequential_program_bound_another_schedule() -> None:
    _, found = measured("sequential")
    overlapped = bound_program(load("mlp_shared_overlap"), 2, contract("gloo"))
    bound = dbo_fx.simulate(overlapped, found)
    assert bound.total_us < dbo_fx.simulate(found.program, found).total_us
    assert bound.total_us == dbo_fx.simulate(overlapped, found.times_for(overlapped)).total_us


@pytest.mark.parametrize(
    ("schedule", "layers", "transport", "message"),
    [
        ("mlp_shared_overlap", 3, "gloo", "layers 2; mlp_shared_overlap has 3"),
        ("mlp_shared_overlap_3", 2, "gloo", "microbatches 2; mlp_shared_overlap_3 has 3"),
        ("mlp_shared_overlap", 2, "nccl", "transport gloo; mlp_shared_overlap has nccl"),
    ],
)
def test_times_of_another_model_are_refused(
    schedule: str, layers: int, transport: str, message: str
) -> None:
    found = replace(hand("gloo"), program=bound_program(load("sequential"), 2, contract("gloo"), 2))
    with pytest.raises(OptionError, match=message):
        found.times_for(bound_program(load(schedule), layers, contract(transport)))


def test_times_that_lack_an_action_are_refused() -> None:
    other = parse_program(f"{hand().program}comp  A0_m1@0\ncomp  S_m0@0\n")
    with pytest.raises(OptionError, match=r"measured hand has no A0_m1@0, S_m0@0, which hand runs"):
        hand().times_for(other)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    found = hand()
    path = found.save(tmp_path / "measured.json")
    assert read_measured(path) == found
    values = json.loads(path.read_text(encoding="utf-8"))
    assert (values["schedule"], values["device"], values["times"]["MLP_m0@0"]) == ("hand", "H", 5)
    assert dbo_fx.simulate(found.program, path).total_us == 37


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "is no measurement"), ("[", "no JSON"), (None, "No such file")],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        read_measured(path)


def test_a_damaged_file_is_refused() -> None:
    values = hand().to_json()
    del values["stamps"]
    with pytest.raises(OptionError, match=r"m\.json: is damaged \(KeyError\('stamps'\)\)"):
        measured_from_json(values, "m.json")


def test_it_prints_readably() -> None:
    assert str(hand()).splitlines()[:3] == [
        "hand, nccl, 4 rows, in a CUDA graph on H, torch 2.0, medians of 5",
        "  total 41.0 us; with stamps 44.0 us (+7.3%)",
        "  A1_m0: 10.0 us on average, 10.0 to 10.0",
    ]


# --- the timeline


def test_what_was_measured_stands_beside_the_plan() -> None:
    line = dbo_fx.timeline(hand())
    assert line.streams == ("comp", "comm", "comp measured", "comm measured")
    assert line.source == "partly measured, partly predicted"
    there = [(i.name, i.start_us, i.end_us) for i in line.of("comp measured")]
    assert there == [
        ("A1_m0@0", 1, 11), ("A1_m1@0", 12, 20), ("D_m0.recv@0", 33, 35), ("MLP_m0@0", 35, 40),
    ]  # fmt: skip
    assert all(item.is_measured for item in line.of("comm measured"))
    found = [
        (a.event, a.from_stream, a.from_us, a.to_stream, a.to_us, a.held_us, a.after, a.before)
        for a in line.arrows
        if a.to_stream.endswith("measured")
    ]
    assert found == [
        (0, "comp measured", 11, "comm measured", 12, 12, "A1_m0@0", "D_m0.send@0"),
        (1, "comm measured", 32, "comp measured", 33, 13, "D_m0.send@0", "D_m0.recv@0"),
    ]
    for arrow in line.arrows:
        assert arrow.source is None or line.items[arrow.source].name == arrow.after


def test_a_measurement_of_another_program_gives_times_only() -> None:
    _, found = measured("sequential")
    line = dbo_fx.timeline(
        bound_program(load("mlp_shared_overlap"), 2, contract("gloo")), times=found
    )
    assert line.streams == ("comp", "comm")
    assert line.source == "predicted from given times"


def test_a_compiled_program_shows_its_nodes_and_its_measurement(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the html extra is not installed")
    program, found = measured("mlp_shared_overlap")
    page = tmp_path / "page.html"
    line = program.timeline(page, times=found)
    assert line.memory is not None
    assert "comp measured" in line.streams
    assert len(line.of("comp measured")) + len(line.of("comm measured")) == len(found.stamps)
    assert "comm measured" in page.read_text(encoding="utf-8")


def test_reading_a_measurement_needs_no_torch(tmp_path: Path) -> None:
    path = hand().save(tmp_path / "m.json")
    code = (
        "import sys, dbo_fx; from dbo_fx.inspect.measured import read_measured\n"
        f"print(dbo_fx.timeline(read_measured({str(path)!r})).end_us, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "40.0 False\n", done.stderr


# --- on a device


@pytest.mark.gpu
def test_in_a_cuda_graph(tmp_path: Path) -> None:
    """The captured program keeps its results, and the actions fill its time."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from dbo_fx.models.moe import MoeConfig, MoeDecoder

        torch._dynamo.reset()
        net = MoeDecoder(MoeConfig(layers=3, hidden=512, shared_hidden=512)).eval().cuda()
        model = torch.compile(net, backend="dbo_fx", fullgraph=True)
        ids = torch.randint(0, 256, (64, 32), device="cuda")
        torch._dynamo.mark_dynamic(ids, 0)
        with torch.no_grad():
            wanted = model(ids)
            program = dbo_fx.compilations()[-1]
            found = program.measure(lambda: model(ids), 10)
            assert torch.equal(model(ids), wanted)
    finally:
        dist.destroy_process_group()
    assert found.mode == "graph"
    last = max(s.stop_us for s in found.stamps)
    assert 0.5 * found.stamped_us < last <= 1.1 * found.stamped_us
    assert all(s.duration_us >= 0 for s in found.stamps)
    assert dbo_fx.simulate(program, found).total_us < 1.2 * found.stamped_us
