"""The shipped schedules are the seed's, and the loader says what it wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import Overlap, overlap_report
from dbo_fx.contracts import contract
from dbo_fx.errors import ScheduleError, VerificationError
from dbo_fx.ir import Action, Half, bind, draw, lanes, parse_schedule, unroll
from dbo_fx.ir_bind import bound_program
from dbo_fx.schedules import load, names, read

SEED_LANES = """\
comp  A0_0 A1_0 | MLP_1 | S_1 MLP_0 | S_0 A0_1 A1_1
comm  D_1       | D_0   | C_1       | C_0"""
SEED_ORDER = (
    "D_1.send A0_0 A1_0 D_1.recv D_0.send MLP_1 D_0.recv C_1.send S_1 MLP_0 C_1.recv C_0.send S_0 "
    "A0_1 A1_1 C_0.recv"
)
PERIOD = (
    "D_1.send A0_0@{k} A1_0@{k} D_1.recv D_0.send MLP_1 D_0.recv C_1.send S_1 MLP_0 C_1.recv "
    "C_0.send S_0 {lead} C_0.recv"
)


def with_layer(text: str, layer: int) -> str:
    """Put the period's layer on every action that does not name one."""
    items = text.split()
    return " ".join(i if "@" in i or "TAIL" in i else f"{i}@{layer}" for i in items)


def test_names_are_the_files():
    assert names() == [
        "mlp_shared_overlap",
        "mlp_shared_overlap_3",
        "sequential",
        "single_batch_overlap",
        "single_batch_overlap_dispatch",
        "vllm_high_throughput",
    ]


@pytest.mark.parametrize("name", names())
def test_shipped_schedule_has_its_files_name_and_parses_back(name):
    schedule = load(name)
    assert schedule.name == name
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("name", [name for name in names() if name != "sequential"])
def test_shipped_text_is_what_the_printer_writes(name):
    lines = read(name).splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if not line.startswith("#")] == str(load(name)).splitlines()


def test_overlap_is_the_seeds():
    schedule = load("mlp_shared_overlap")
    assert " ".join(map(str, schedule.order)) == SEED_ORDER
    assert draw(lanes(schedule.order)) == SEED_LANES
    assert (schedule.labels, schedule.num_microbatches, schedule.lead) == ((0, 1), 2, 1)


def test_overlap_over_two_layers():
    unrolled = unroll(load("mlp_shared_overlap"), 2)
    parts = [" ".join(map(str, p)) for p in (unrolled.prologue, *unrolled.periods)]
    assert parts == [
        "A0_1@0 A1_1@0",
        with_layer(PERIOD.format(k=0, lead="A0_1@1 A1_1@1"), 0),
        with_layer(PERIOD.format(k=1, lead="TAIL_1"), 1),
    ]
    assert [str(action) for action in unrolled.epilogue] == ["TAIL_0"]


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_overlap_never_has_two_communications_in_flight(layers):
    in_flight = 0
    for action in bind(load("mlp_shared_overlap"), layers):
        in_flight += {None: 0, Half.SEND: 1, Half.RECV: -1}[action.half]
        assert 0 <= in_flight <= 1


def test_periods_draw_the_seeds_lanes():
    unrolled = unroll(load("mlp_shared_overlap"), 3)
    picture = draw(lanes(unrolled.periods[1]), lambda action: str(action).partition("@")[0])
    assert picture == SEED_LANES


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_sequential_runs_one_microbatch_after_the_other(microbatches):
    schedule = load("sequential")
    assert (schedule.labels, schedule.num_microbatches, schedule.lead) == ((), None, None)
    unrolled = unroll(schedule, 2, microbatches)
    assert (unrolled.prologue, unrolled.epilogue) == ((), ())
    layers = "A0_{m}@{k} A1_{m}@{k} S_{m}@{k} D_{m}.send@{k} D_{m}.recv@{k} MLP_{m}@{k} "
    layers += "C_{m}.send@{k} C_{m}.recv@{k} "
    assert [" ".join(map(str, period)) for period in unrolled.periods] == [
        layers.format(m=m, k=0) + layers.format(m=m, k=1) + f"TAIL_{m}" for m in range(microbatches)
    ]
    assert bind(schedule, 2, microbatches) == unrolled.actions


IN_FLIGHT = {
    "mlp_shared_overlap": 1,
    "mlp_shared_overlap_3": 1,
    "sequential": 1,
    "single_batch_overlap": 1,
    "single_batch_overlap_dispatch": 1,
    "vllm_high_throughput": 2,
}
SPLITTING = ("mlp_shared_overlap", "mlp_shared_overlap_3", "vllm_high_throughput")


def most_in_flight(actions: tuple[Action, ...]) -> int:
    count = most = 0
    for action in actions:
        count += {None: 0, Half.SEND: 1, Half.RECV: -1}[action.half]
        most = max(most, count)
    return most


@pytest.mark.parametrize("name", names())
def test_every_shipped_schedule_is_proven_over_its_transports(name):
    schedule = load(name)
    count = schedule.num_microbatches or 2
    assert most_in_flight(bind(schedule, 5, count)) == IN_FLIGHT[name]
    for transport in ("gloo", "nccl", "deepep_ll"):
        program = bound_program(schedule, 3, contract(transport), count)
        allowed = contract(transport).max_in_flight
        if allowed is not None and IN_FLIGHT[name] > allowed:
            with pytest.raises(VerificationError, match="in-flight"):
                prove(execution_of_program(program))
        else:
            prove(execution_of_program(program))


def overlaps(name: str, layers: int = 3) -> dict[str, list[str]]:
    """Per communication of the middle layer, the phases and microbatches that run beside it."""
    program = bound_program(load(name), layers, contract("nccl"))

    def texts(overlap: Overlap) -> list[str]:
        return [b.action.bound() for b in overlap.beside]

    report = overlap_report(execution_of_program(program))
    return {
        o.communication.bound(): texts(o) for o in report.overlaps if o.communication.layer == 1
    }


@pytest.mark.parametrize("transport", ["gloo", "nccl", "deepep_ll"])
def test_sequential_has_nothing_beside_any_communication(transport):
    program = bound_program(load("sequential"), 3, contract(transport), 2)
    report = overlap_report(execution_of_program(program))
    assert len(report.alone) == len(report.overlaps) == 12


@pytest.mark.parametrize("name", SPLITTING)
def test_every_communication_has_other_microbatches_beside_it(name):
    for communication, beside in overlaps(name).items():
        own = Action.parse_bound(communication).microbatch
        others = [b for b in beside if Action.parse_bound(b).microbatch != own]
        assert others, communication


def test_single_batch_overlap_hides_one_communication_behind_the_shared_expert():
    assert overlaps("single_batch_overlap") == {"D_m0@1": [], "C_m0@1": ["S_m0@1"]}
    assert overlaps("single_batch_overlap_dispatch") == {"D_m0@1": ["S_m0@1"], "C_m0@1": []}


def test_three_microbatches_have_a_whole_slot_beside_every_communication():
    found = overlaps("mlp_shared_overlap_3")
    assert {key: found[key][:2] for key in found} == {
        "D_m0@1": ["A0_m1@1", "A1_m1@1"],
        "D_m1@1": ["A0_m2@1", "A1_m2@1"],
        "D_m2@1": ["MLP_m0@1", *found["D_m2@1"][1:2]],
        "C_m0@1": ["S_m0@1", "MLP_m1@1"],
        "C_m1@1": ["S_m1@1", "MLP_m2@1"],
        "C_m2@1": ["S_m2@1", "A0_m0@2"],
    }


def test_high_throughput_order_is_the_low_latency_cycle_with_a_later_shared_expert():
    def phases(name: str, lead: int) -> list[str]:
        kept = [a for a in load(name).order if a.half is not Half.RECV and a.phase.value != "S"]
        return [str(a).replace(f"_{lead}", "_lead") for a in kept]

    throughput, latency = phases("vllm_high_throughput", 0), phases("mlp_shared_overlap", 1)
    assert [t.replace("_1", "_other") for t in throughput] == [
        t.replace("_0", "_other") for t in latency
    ]


def equal_to_sequential(rank: int, name: str, shared_hidden: int) -> list[str]:
    """Odd and tiny batches through the schedule and through `sequential`, and through the model."""
    import torch

    import dbo_fx
    from dbo_fx.models.moe import MoeConfig, MoeDecoder

    net = MoeDecoder(MoeConfig(layers=2, hidden=32, shared_hidden=shared_hidden)).eval()
    count = load(name).num_microbatches
    runs = {}
    for options in (
        {"schedule": name},
        {"schedule": "sequential", "num_microbatches": count, "verify": "static"},
    ):
        torch._dynamo.reset()
        compiled = dbo_fx.wrap(
            torch.compile(net, backend="dbo_fx", fullgraph=True, options=options),
            num_microbatches=count,
        )
        with torch.no_grad():
            runs[options["schedule"]] = [
                compiled(torch.randint(0, 256, (size, 5), generator=_seeded(size + rank)))
                for size in (13, 7 + rank, 1)
            ]
        assert compiled.statistics.split_steps == 3, str(compiled.statistics)
    return [
        f"{name}: batch {i}"
        for i, (a, b) in enumerate(zip(runs[name], runs["sequential"], strict=True))
        if not torch.equal(a, b)
    ]


def _seeded(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("name", "shared_hidden"),
    [
        ("mlp_shared_overlap_3", 48),
        pytest.param("vllm_high_throughput", 0, marks=pytest.mark.slow),
        pytest.param("single_batch_overlap", 48, marks=pytest.mark.slow),
        pytest.param("vllm_high_throughput", 48, marks=pytest.mark.slow),
        pytest.param("single_batch_overlap_dispatch", 48, marks=pytest.mark.slow),
        pytest.param("single_batch_overlap", 0, marks=pytest.mark.slow),
        pytest.param("mlp_shared_overlap_3", 0, marks=pytest.mark.slow),
    ],
)
def test_bit_identical_to_sequential(ranks: Any, name: str, shared_hidden: int) -> None:
    """With and without a shared expert; numeric verification compares with the unsplit model."""
    assert ranks(equal_to_sequential, name, shared_hidden, timeout_s=300) == [[], []]


def test_a_file_loads_by_its_path(tmp_path: Path):
    path = tmp_path / "mine.dbo"
    path.write_text(read("sequential").replace("name sequential", "name mine"), encoding="utf-8")
    assert load(str(path)).name == "mine"


def test_unknown_name_lists_the_names():
    with pytest.raises(
        ScheduleError, match=r"'nope'; there are mlp_shared_overlap, .*, vllm_.*; or"
    ):
        load("nope")


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ScheduleError, match=r"gone\.dbo: cannot be read \(No such file"):
        load(str(tmp_path / "gone.dbo"))


def test_binary_file_is_refused(tmp_path: Path):
    path = tmp_path / "binary.dbo"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="not UTF-8 text"):
        load(str(path))


def test_errors_name_the_file(tmp_path: Path):
    path = tmp_path / "bad.dbo"
    path.write_text("schedule 1\nnames x\n", encoding="utf-8")
    with pytest.raises(ScheduleError, match=r"bad\.dbo, line 2: unknown line 'names x'"):
        load(str(path))
