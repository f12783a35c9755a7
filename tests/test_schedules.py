"""The shipped schedules are the seed's, and the loader says what it wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_fx.errors import ScheduleError
from dbo_fx.ir import Half, bind, draw, lanes, parse_schedule, unroll
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
    assert names() == ["mlp_shared_overlap", "sequential"]


@pytest.mark.parametrize("name", names())
def test_shipped_schedule_has_its_files_name_and_parses_back(name):
    schedule = load(name)
    assert schedule.name == name
    assert parse_schedule(str(schedule)) == schedule


def test_shipped_text_is_what_the_printer_writes():
    lines = read("mlp_shared_overlap").splitlines()
    assert [line for line in lines if not line.startswith("#")] == (
        str(load("mlp_shared_overlap")).splitlines()
    )


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
    layers = "A0_{m}@{k} A1_{m}@{k} D_{m}.send@{k} D_{m}.recv@{k} MLP_{m}@{k} C_{m}.send@{k} "
    layers += "C_{m}.recv@{k} S_{m}@{k} "
    assert [" ".join(map(str, period)) for period in unrolled.periods] == [
        layers.format(m=m, k=0) + layers.format(m=m, k=1) + f"TAIL_{m}" for m in range(microbatches)
    ]
    assert bind(schedule, 2, microbatches) == unrolled.actions


def test_a_file_loads_by_its_path(tmp_path: Path):
    path = tmp_path / "mine.dbo"
    path.write_text(read("sequential").replace("name sequential", "name mine"), encoding="utf-8")
    assert load(str(path)).name == "mine"


def test_unknown_name_lists_the_names():
    with pytest.raises(ScheduleError, match="'nope'; there are mlp_shared_overlap, sequential; or"):
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
