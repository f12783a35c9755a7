"""Trace files keep to the Trace Event Format, as far as viewers rely on it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from dbo_fx.backend import compile_captured
from dbo_fx.contracts import DEEPEP_LL, NCCL
from dbo_fx.inspect.timeline import Timeline, timeline_of_compiled, timeline_of_program
from dbo_fx.inspect.trace_file import trace_json
from dbo_fx.ir_bind import bound_program
from dbo_fx.options import Options
from dbo_fx.schedules import load
from small_moe import CachedMoe, one_rank, traced_model

TIMES = {"A0": 10, "A1": 30, "D": 25, "MLP": 40, "C": 35, "S": 15, "TAIL": 5}
Event = dict[str, Any]


def simulated(schedule: str = "mlp_shared_overlap", contract: Any = NCCL) -> Timeline:
    return timeline_of_program(bound_program(load(schedule), 3, contract, 2), TIMES)


@pytest.fixture(scope="module")
def compiled() -> Timeline:
    with one_rank():
        found = compile_captured(traced_model(CachedMoe, 2, 1).fresh(), Options())
    return timeline_of_compiled(found, TIMES, tokens=64)


def events_of(*timelines: Timeline) -> dict[str, list[Event]]:
    trace = json.loads(trace_json(timelines))
    by_phase: defaultdict[str, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


def test_every_event_has_what_its_phase_needs(compiled: Timeline):
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"name", "cat", "pid", "tid", "ts", "id"},
        "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
        "C": {"name", "pid", "ts", "args"},
    }
    found = events_of(compiled)
    assert set(found) == set(needed)
    for phase, events in found.items():
        for event in events:
            assert set(event) == needed[phase] | {"ph"}
            assert event.get("ts", 0) >= 0
            assert event.get("dur", 0) >= 0
            assert event.get("bp", "e") == "e"


def test_items_are_complete_events_on_named_threads(compiled: Timeline):
    found = events_of(compiled)
    names = {e["tid"]: e["args"]["name"] for e in found["M"] if e["name"] == "thread_name"}
    assert tuple(names.values()) == compiled.streams
    assert [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in found["X"]] == [
        (i.name, i.stream, i.start_us, i.duration_us) for i in compiled.items
    ]
    first = found["X"][0]
    assert first["args"]["microbatch"] == 0
    assert first["args"]["bytes"] == compiled.items[0].bytes
    assert first["args"]["nodes"][0] == "arange  arange  [32] i64  256 B"


@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
def test_flows_join_the_item_before_the_record_to_the_one_behind_the_wait(schedule: str):
    timeline = simulated(schedule)
    found = events_of(timeline)
    starts = {e["id"]: e for e in found["s"]}
    ends = {e["id"]: e for e in found["f"]}
    assert starts.keys() == ends.keys()
    assert len(found["s"]) == len(found["f"]) == len(starts) == len(timeline.arrows)
    for arrow, key in zip(timeline.arrows, starts, strict=True):
        start, end = starts[key], ends[key]
        assert start["name"] == end["name"] == f"e{arrow.event}"
        assert start["ts"] <= end["ts"]
        source, target = enclosing(found["X"], start), enclosing(found["X"], end)
        # What takes no time cannot enclose anything; the neighbour that does stands for it.
        assert source["ts"] + source["dur"] == arrow.from_us
        assert target["ts"] == arrow.to_us
        if arrow.before.startswith(("D_m0.send", "C_m0.send")):
            assert target["name"] == arrow.before


def enclosing(complete: list[Event], flow: Event) -> Event:
    """The one slice of the thread around this time."""
    (found,) = (
        e for e in complete if e["tid"] == flow["tid"] and e["ts"] < flow["ts"] < e["ts"] + e["dur"]
    )
    return found


def test_memory_is_a_counter(compiled: Timeline):
    counters = events_of(compiled)["C"]
    assert compiled.memory is not None
    assert [e["ts"] for e in counters] == list(compiled.memory.at_us)
    peak = max(sum(e["args"].values()) for e in counters)
    assert peak == compiled.memory.report.peak_bytes
    assert max(e["args"]["held"] for e in counters) == compiled.memory.report.held_peak_bytes


def test_every_timeline_is_a_process_with_flows_of_its_own():
    found = events_of(simulated(), simulated("sequential"), simulated(contract=DEEPEP_LL))
    names = {e["pid"]: e["args"]["name"] for e in found["M"] if e["name"] == "process_name"}
    assert sorted(names) == [0, 1, 2]
    assert names[1].startswith("sequential: 3 layers")
    ids = [e["id"] for e in found["s"]]
    assert len(ids) == len(set(ids))
    assert {e["pid"] for e in found["s"]} == {0, 1}
    lanes = {(e["pid"], e["args"]["name"]) for e in found["M"] if e["name"] == "thread_name"}
    assert (2, "in flight") in lanes


def test_a_trace_without_times_says_so():
    timeline = timeline_of_program(bound_program(load("sequential"), 1, NCCL, 2))
    trace = json.loads(trace_json([timeline]))
    assert "order only: one unit per action" in trace["otherData"]["process 0"]
    name = next(e for e in trace["traceEvents"] if e["name"] == "process_name")
    assert "order only" in name["args"]["name"]
