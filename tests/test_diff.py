"""The semantic diff of schedules and programs: known edits give exactly their entries."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dbo_fx
from dbo_fx import schedules
from dbo_fx.errors import OptionError, ScheduleError
from dbo_fx.inspect.changes import Change
from dbo_fx.inspect.diff import GraphDiff, diff
from dbo_fx.inspect.order import heaviest_increasing
from dbo_fx.ir import COMM, COMP, Keepalive, Program, Record, Run, Step, Wait, parse_program
from generated import case
from program_edits import at, bound, changed, moved, with_steps, without

SCHEMA = Path(dbo_fx.__file__).parent / "schemas" / "diff.json"
TRANSPORTS = ("nccl", "gloo", "deepep_ll")
SCHEDULES = ("mlp_shared_overlap", "sequential")

programs = st.builds(
    bound, st.sampled_from(TRANSPORTS), st.integers(1, 3), st.sampled_from(SCHEDULES)
)
randoms = st.integers(0, 2**32).map(Random)


def entries(was: object, now: object) -> list[str]:
    return [str(change) for change in diff(was, now).changes]


def renumbered(program: Program, rng: Random) -> Program:
    events = sorted({s.event for s in program.steps if isinstance(s, Record | Wait)})
    names = rng.sample(range(1000), len(events))
    new = dict(zip(events, names, strict=True))
    steps = [
        replace(s, event=new[s.event]) if isinstance(s, Record | Wait) else s for s in program.steps
    ]
    return with_steps(program, steps)


def edited(program: Program, rng: Random, edits: int) -> Program:
    """A program with steps moved, dropped, doubled, or put on the other stream."""
    steps = list(program.steps)
    for _ in range(edits):
        index = rng.randrange(len(steps))
        step = steps.pop(index)
        kind = rng.randrange(4)
        if kind == 0:
            steps.insert(rng.randrange(len(steps) + 1), step)
        elif kind == 1:
            steps.insert(index, replace(step, stream=COMM if step.stream == COMP else COMP))
        elif kind == 2:
            steps[index:index] = [step, step]
    return with_steps(program, steps)


def text(step: Step) -> str:
    return str(step).partition("  ")[2].partition(" slot")[0]


# What must be no difference.


@given(randoms)
@settings(max_examples=40, deadline=None)
def test_nothing_differs_from_itself(rng: Random):
    program = case(rng.randrange(10**6)).program
    assert not diff(program, program)
    assert not diff(program, renumbered(program, rng))
    damaged = edited(program, rng, 5)
    assert not diff(damaged, str(damaged))


@given(programs, randoms)
@settings(max_examples=40, deadline=None)
def test_the_other_way_round_is_the_mirror_image(program: Program, rng: Random):
    other = edited(program, rng, rng.randint(1, 6))
    there, back = diff(program, other), diff(other, program)
    assert back.changes == there.mirrored.changes
    assert back.mirrored.mirrored == back


def test_comments_and_spaces_are_no_difference():
    program = bound()
    assert not diff(program, str(program).replace("comp  A0_m0@0", "comp   A0_m0@0   # first"))


def test_names_of_schedules_are_no_difference():
    program = bound()
    assert not diff(program, replace(program, schedule="other"))


def test_labels_of_schedules_are_no_difference():
    source = schedules.load("mlp_shared_overlap")
    lines = [line for line in str(source).splitlines() if not line.startswith((COMP, COMM))]
    swapped = "\n".join(lines).replace("lead 1", "lead 0").replace("_0", "_x").replace("_1", "_0")
    assert not diff(source, swapped.replace("_x", "_1"))


# What one known edit gives.


@given(programs, st.data())
@settings(max_examples=80, deadline=None)
def test_two_neighbours_change_places(program: Program, data: st.DataObject):
    index = data.draw(st.integers(0, len(program.steps) - 2))
    one, other = program.steps[index : index + 2]
    steps = [*program.steps[:index], other, one, *program.steps[index + 2 :]]
    found = diff(program, with_steps(program, steps)).changes
    markers = [isinstance(step, Record | Wait) for step in (one, other)]
    if not any(markers):
        (change,) = found
        assert change.kind == "moved"
        assert {change.what, change.across} == {(text(one),), (text(other),)}
        assert change.direction == ("later" if change.what == (text(one),) else "earlier")
    elif all(markers):
        assert isinstance(one, Record | Wait)
        assert isinstance(other, Record | Wait)
        if one.event == other.event:
            assert {change.kind for change in found} == {"event"}
        elif type(one) is type(other) or one.stream != other.stream:
            assert found == ()
        else:
            assert [change.kind for change in found] == ["event"]
    elif one.stream != other.stream:
        assert found == ()
    else:
        (change,) = found
        assert change.kind == "event"
        item = other if markers[0] else one
        assert change.across == (text(item),)


@given(programs, st.data())
@settings(max_examples=40, deadline=None)
def test_a_dropped_marker(program: Program, data: st.DataObject):
    markers = [i for i, s in enumerate(program.steps) if isinstance(s, Record | Wait)]
    if not markers:
        return
    index = data.draw(st.sampled_from(markers))
    step = program.steps[index]
    steps = [s for i, s in enumerate(program.steps) if i != index]
    (change,) = diff(program, with_steps(program, steps)).changes
    side = "record" if isinstance(step, Record) else "wait"
    assert (change.kind, change.was, change.now) == ("event", f"{side} on {step.stream}", None)


@given(programs, st.data())
@settings(max_examples=40, deadline=None)
def test_another_stream(program: Program, data: st.DataObject):
    runs = [i for i, s in enumerate(program.steps) if isinstance(s, Run | Keepalive)]
    index = data.draw(st.sampled_from(runs))
    step = program.steps[index]
    stream = COMM if step.stream == COMP else COMP
    steps = [*program.steps[:index], replace(step, stream=stream), *program.steps[index + 1 :]]
    (change,) = diff(program, with_steps(program, steps)).changes
    assert (change.kind, change.was, change.now) == ("stream", step.stream, stream)
    assert change.what == (text(step),)


def test_a_dropped_action_is_removed():
    program = bound()
    assert entries(program, without(program, "comp S_m1@0"))[0] == "removed S_m1@0"


def test_an_action_that_runs_twice_is_added():
    program = bound()
    index = at(program, "comp S_m1@0")
    twice = with_steps(program, [*program.steps[: index + 1], *program.steps[index:]])
    assert entries(program, twice) == ["added S_m1@0"]


def test_a_moved_action_takes_its_markers_along():
    program = bound(layers=2)
    later = program
    for line in ("comp wait e1", "comp D_m0.recv@0", "comp keepalive D_m0@0"):
        later = moved(later, line, "comp MLP_m1@0")
    found = diff(program, later)
    assert found.changes[0].kind == "moved"
    assert found.changes[0].what == ("D_m0.recv@0", "keepalive D_m0@0")
    assert "MLP_m0@0" in found.changes[0].across


def test_another_slot_is_a_change():
    program = bound("deepep_ll")
    index = at(program, "comp D_m0.send@0 slot 0")
    step = program.steps[index]
    assert isinstance(step, Run)
    other = changed(program, "comp D_m0.send@0 slot 0", replace(step, slot=1))
    assert entries(program, other) == ["changed D_m0.send@0: slot 0 -> slot 1"]


def test_without_a_keepalive_memory_is_freed_earlier():
    program = bound()
    found = diff(program, without(program, "comp keepalive D_m0@0")).changes
    assert [str(change) for change in found] == [
        "removed keepalive D_m0@0",
        "lifetime x_m0@0 earlier, across A0_m1@0 A1_m1@0 D_m0.recv@0: "
        "until keepalive D_m0@0 -> until D_m0.send@0",
    ]


def test_the_header_counts():
    assert entries(bound(), replace(bound(), transport="gloo")) == [
        "header transport: nccl -> gloo"
    ]


# Subjects.


def test_a_program_against_a_schedule():
    program = bound(layers=3)
    assert not diff(program, "mlp_shared_overlap")
    assert not diff("mlp_shared_overlap", program)
    assert diff(program, "sequential")


def test_schedules_by_their_order():
    source = schedules.load("mlp_shared_overlap")
    order = list(source.order)
    index = next(i for i, a in enumerate(order) if str(a) == "S_1")
    order[index], order[index + 1] = order[index + 1], order[index]
    found = diff(source, replace(source, order=tuple(order)))
    assert len(found.changes) == 1
    assert found.changes[0].kind == "moved"
    assert "@@ steady state @@" in str(found)


@pytest.mark.parametrize(
    ("subject", "error"),
    [("nothing.txt", OptionError), ("gone.dbo", ScheduleError), (3, OptionError)],
)
def test_what_cannot_be_compared(subject: object, error: type[Exception]):
    with pytest.raises(error):
        diff(bound(), subject)


def test_damaged_programs_are_read():
    program = bound()
    damaged = without(program, "comm wait e0", "comp keepalive D_m0@0")
    damaged = moved(damaged, "comp MLP_m1@0", "comp wait e3")
    with pytest.raises(ScheduleError):
        parse_program(str(moved(damaged, "comp D_m0.recv@0", "comm D_m0.send@0")))
    assert not diff(damaged, str(damaged))


# Text, JSON, HTML.


def damaged() -> Program:
    """Two layers with a wait and a keepalive gone, an action moved, one on the other stream."""
    program = without(bound(layers=2), "comm wait e0", "comp keepalive D_m0@0")
    program = moved(program, "comp MLP_m1@1", "comp MLP_m0@1")
    send = program.steps[at(program, "comm C_m0.send@0")]
    return changed(program, "comm C_m0.send@0", replace(send, stream=COMP))


def shared_later() -> Program:
    """61 layers, the shared expert of microbatch 0 a little later in all but the last."""
    program = bound(layers=61)
    for layer in range(60):
        program = moved(program, f"comp S_m0@{layer}", f"comp keepalive C_m0@{layer}")
    return program


@cache
def example(name: str) -> GraphDiff:
    match name:
        case "overlap_sequential":
            return diff(bound(layers=2), bound(layers=2, schedule="sequential"))
        case "damaged":
            return diff(bound(layers=2), damaged())
        case "folded":
            return diff(bound(layers=61), shared_later())
    return diff("mlp_shared_overlap", "sequential")


EXAMPLES = ("overlap_sequential", "damaged", "folded", "schedules")


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_is_golden(name: str, golden):
    golden(f"diff_{name}.txt", f"{example(name)}\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_fits_its_schema(name: str):
    jsonschema = pytest.importorskip("jsonschema", reason="the dev extra is not installed")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    written = json.loads(json.dumps(example(name).to_json()))
    jsonschema.validate(written, schema)
    assert len(written["changes"]) == len(example(name).changes)


def test_equal_changes_of_many_layers_are_folded():
    found = example("folded")
    assert len(found.changes) == 60
    assert str(found).count("\n") < 20


def test_html_is_one_page_that_needs_nothing():
    page = diff(bound(), bound(schedule="sequential")).to_html()
    assert page.startswith("<!doctype html>")
    assert page.count('<div class="sides">') == page.count("<section>") == 2
    for needed in ("http:", "https:", "src=", "href=", "<script"):
        assert needed not in page
    assert "A0_m1@0" in page


def test_html_escapes():
    change = Change("changed", ("<b>",), "a & b", "<i>")
    side = diff(bound(), bound())
    page = GraphDiff(side.was, side.now, (change,)).to_html()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


# The order.


@given(st.lists(st.integers(1, 3), max_size=7), randoms)
def test_heaviest_increasing_is_the_heaviest(weights: list[int], rng: Random):
    values = rng.sample(range(100), len(weights))
    chosen = sorted(heaviest_increasing(values, weights))
    assert [values[i] for i in chosen] == sorted(values[i] for i in chosen)
    possible = (
        sum(weights[i] for i in subset)
        for size in range(len(values) + 1)
        for subset in combinations(range(len(values)), size)
        if [values[i] for i in subset] == sorted(values[i] for i in subset)
    )
    assert sum(weights[i] for i in chosen) == max(possible)
