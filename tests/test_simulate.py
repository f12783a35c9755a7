"""What a program would take: by hand for small ones, by its properties for any."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_fx import efficiency, simulate
from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError
from dbo_fx.inspect.simulation import Simulation
from dbo_fx.ir import Phase, Program, parse_program
from dbo_fx.ir_bind import bound_program
from dbo_fx.schedules import load, names

TIMES = {"A0": 60, "A1": 140, "D": 90, "MLP": 180, "C": 150, "S": 50, "TAIL": 30}


def bound(name: str, layers: int = 2, transport: str = "nccl") -> Program:
    schedule = load(name)
    return bound_program(
        schedule, layers, contract(transport), 2 if schedule.num_microbatches is None else None
    )


def test_two_streams_by_hand():
    program = parse_program(
        "program 1\nschedule hand\nmicrobatches 2\nlayers 1\ntransport nccl\n"
        "comp  A0_m0@0\ncomp  record e0\ncomm  wait e0\ncomm  D_m0.send@0\ncomm  record e1\n"
        "comp  A0_m1@0\ncomp  wait e1\ncomp  D_m0.recv@0\ncomp  MLP_m0@0\n"
    )
    found = simulate(program, {"A0_m0": 10, "A0_m1": 4, "D": 7, "MLP": 5})
    # comp: 0-10 A0_m0, 10-14 A0_m1, waits to 17, 17-22 MLP; comm: 10-17 D.
    assert found.total_us == 22
    assert [(u.stream, u.busy_us, u.bubble_us) for u in found.streams] == [
        ("comp", 19, 3), ("comm", 7, 15),
    ]  # fmt: skip
    assert (found.compute_us, found.communication_us, found.exposed_us) == (19, 7, 3)
    assert [t.name for t in found.critical_path] == ["A0_m0@0", "D_m0.send@0", "MLP_m0@0"]
    assert {t.name: t.slack_us for t in found.actions} == {
        "A0_m0@0": 0, "D_m0.send@0": 0, "A0_m1@0": 3, "D_m0.recv@0": 0, "MLP_m0@0": 0,
    }  # fmt: skip


def test_a_period_by_hand():
    found = simulate(bound("mlp_shared_overlap", 3), TIMES)
    # A slot each: A0 A1 (200) over D (90), MLP (180) over D, S MLP (230) over C, S A0 A1 over C.
    assert [(p.layer, p.end_us - p.start_us, p.exposed_us) for p in found.periods] == [
        (0, 200 + 200 + 180 + 230 + 50, 0), (1, 860, 0), (2, 860 + 70 + 30, 70),
    ]  # fmt: skip
    # The last combine hides behind S and one tail only, then comes the other tail.
    assert found.total_us == 3 * 2 * (60 + 140 + 180 + 50) + 2 * 30 + 70
    assert found.exposed_us == 150 - 50 - 30
    assert [u.bubble_us for u in found.streams if u.stream == "comp"] == [70]
    assert [t.name for t in found.critical_path if t.stream == "comm"] == ["C_m1.send@2"]


def test_sequential_hides_nothing():
    found = simulate(bound("sequential", 2), TIMES)
    layer = 60 + 140 + 90 + 180 + 150 + 50
    assert found.total_us == 2 * (2 * layer + 30)
    assert found.exposed_us == found.communication_us == 4 * (90 + 150)
    assert sum(t.end_us - t.start_us for t in found.critical_path) == found.total_us


@pytest.mark.parametrize(
    ("name", "communication"),
    [("single_batch_overlap", "C"), ("single_batch_overlap_dispatch", "D")],
)
def test_single_batch_overlap_saves_what_the_shared_expert_covers(name, communication):
    unsplit = bound_program(load("sequential"), 2, contract("nccl"), 1)
    saved = simulate(unsplit, TIMES).total_us - simulate(bound(name, 2), TIMES).total_us
    assert saved == 2 * min(TIMES["S"], TIMES[communication])


def test_three_microbatches_carry_transfers_longer_than_a_slot():
    """Where recv is an event wait a transfer has two slots; two microbatches have one."""
    slot = 100.0
    times = {"A0": 0, "A1": slot, "MLP": slot, "D": slot, "C": slot, "S": 0, "TAIL": 0}
    two = simulate(bound("mlp_shared_overlap", 8), times | {"D_m0": 150, "C_m0": 50})
    assert two.exposed_us > 8 * 49
    for name, count in (("mlp_shared_overlap", 2), ("mlp_shared_overlap_3", 3)):
        even = simulate(bound(name, 8), times)
        compute = count * 8 * 2 * slot
        assert even.total_us == pytest.approx(compute + slot)


def test_a_transfer_that_is_no_stream_has_a_lane():
    found = simulate(bound("mlp_shared_overlap", 2, "deepep_ll"), TIMES)
    assert [use.stream for use in found.streams] == ["comp", "in flight"]
    assert found.exposed_us == 70


def test_a_recv_that_blocks_the_host_delays_what_is_enqueued_later():
    program = bound("mlp_shared_overlap", 2, "gloo")
    free = replace(contract("gloo"), blocks_host=False)
    slow = TIMES | {"D": 400}
    assert simulate(program, slow).total_us >= simulate(program, slow, free).total_us
    other = parse_program(
        "program 1\nschedule host\nmicrobatches 1\nlayers 2\ntransport gloo\n"
        "comm  D_m0.send@0\ncomp  D_m0.recv@0\ncomm  D_m0.send@1\n"
    )
    times = {"D.send": 5, "D.recv": 3}
    assert simulate(other, times).total_us == 13
    assert simulate(other, times, free).total_us == 10


SECONDS = st.floats(0, 1e4, allow_nan=False)


@st.composite
def timed_programs(draw: st.DrawFn) -> tuple[Program, dict[str, float]]:
    transport = draw(st.sampled_from(["nccl", "gloo", "deepep_ll"]))
    name = draw(st.sampled_from(names()))
    program = bound(name, draw(st.integers(1, 4)), transport)
    keys = {a.bound() for a in program.actions} if draw(st.booleans()) else set()
    times = {key: draw(SECONDS) for key in [p.value for p in Phase] + sorted(keys)}
    return program, times


def longest_path(found: Simulation) -> float:
    """The longest chain of causes, without start times."""
    ends: list[float] = []
    for item, causes in zip(found.lanes.items, found.lanes.causes, strict=True):
        ends.append(item.duration_us + max((ends[i] for i in causes), default=0.0))
    return max(ends)


@given(timed_programs())
def test_the_total_lies_between_the_busiest_lane_and_the_sum(case):
    program, times = case
    found = simulate(program, times)
    slack = 1e-6 * max(1.0, found.total_us)
    for use in found.streams:
        assert use.busy_us <= found.total_us + slack
        assert use.bubble_us >= -slack
    assert found.total_us == pytest.approx(longest_path(found))
    assert found.total_us <= sum(i.duration_us for i in found.lanes.items) + slack
    assert found.compute_us + found.exposed_us <= found.total_us + slack
    assert -slack <= found.exposed_us <= found.communication_us + slack


@given(timed_programs())
def test_items_start_when_their_last_cause_ends_and_the_path_has_no_gap(case):
    found = simulate(*case)
    items = found.lanes.items
    for item, causes in zip(items, found.lanes.causes, strict=True):
        assert item.start_us == pytest.approx(max((items[i].end_us for i in causes), default=0.0))
    path = found.critical_path
    assert sum(t.end_us - t.start_us for t in path) == pytest.approx(found.total_us)
    assert all(t.slack_us == 0 for t in path)


@given(timed_programs(), st.data())
def test_slack_is_what_an_action_may_take_longer(case, data):
    program, times = case
    found = simulate(program, times)
    timed = data.draw(st.sampled_from(found.actions))
    exact = {t.name: t.end_us - t.start_us for t in found.actions}
    if list(exact) != [t.name for t in found.actions] or timed.name not in exact:
        return  # An action in several parts has one time.
    if contract(program.transport).recv_is == "kernel":
        exact = {**times, **exact}
    later = simulate(program, exact | {timed.name: exact[timed.name] + timed.slack_us})
    assert later.total_us == pytest.approx(found.total_us, abs=1e-6)
    if timed.slack_us < 1e3:
        longer = exact | {timed.name: exact[timed.name] + timed.slack_us + 100}
        assert simulate(program, longer).total_us == pytest.approx(found.total_us + 100, abs=1e-6)


def test_efficiency():
    assert efficiency(100, 60, 50) == 0.8
    assert efficiency(100, 110, 50) == -0.2
    with pytest.raises(OptionError, match="the bound, 100 us, is not below"):
        efficiency(100, 90, 100)


def test_without_times_a_unit_each():
    found = simulate(bound("sequential", 1))
    assert (found.total_us, found.has_times) == (14, False)
    assert "units" in str(found)


def test_wrong_arguments_are_refused():
    with pytest.raises(OptionError, match="found Schedule; wanted a program"):
        simulate(load("sequential"))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"none for A1_m0@0"):
        simulate(bound("sequential"), {"A0": 3})


def test_it_prints_readably():
    assert str(simulate(bound("mlp_shared_overlap", 4), TIMES)).splitlines() == [
        "mlp_shared_overlap: 4 layers, 2 microbatches, nccl: 3570 us",
        "  comp: busy 3500, bubbles 70 (2.0%)",
        "  comm: busy 1920, bubbles 1650 (46.2%)",
        "  communication 1920, of which 70 exposed",
        "  layers 0 to 2: 860, exposed 0",
        "  layer 3: 960, exposed 70",
        "  critical path: A0 480, A1 1120, MLP 1440, S 350, C.send 150, TAIL 30",
        "  communication on it: C_m1.send@3",
    ]


def test_it_needs_no_torch():
    code = (
        "import sys, dbo_fx; from dbo_fx.ir import parse\n"
        "from dbo_fx.ir_bind import bound_program\nfrom dbo_fx.contracts import NCCL\n"
        "from dbo_fx.schedules import load\n"
        "print(dbo_fx.simulate(bound_program(load('sequential'), 1, NCCL, 1)).total_us)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["7.0", "False"], done.stderr


def test_show_prints_the_simulation(tmp_path: Path):
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from typer.testing import CliRunner

    from dbo_fx.cli import app

    times = tmp_path / "times.json"
    times.write_text(json.dumps(TIMES), encoding="utf-8")
    wanted = simulate(bound("mlp_shared_overlap", 4), TIMES)
    arguments = ["show", "mlp_shared_overlap", "--layers", "4", "--times", str(times)]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, f"{wanted}\n")
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, wanted.to_json())
