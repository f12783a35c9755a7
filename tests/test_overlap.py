"""The overlap report: equal to the schedule's lanes, one reason for every lost overlap."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from damage_class import beside as closure
from dbo_fx import schedules
from dbo_fx.certificates.execution import Execution, Kind, Operation, Required
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.order import HappensBefore
from dbo_fx.certificates.overlap import OverlapReport, overlap_report
from dbo_fx.contracts import CONTRACTS, DEEPEP_LL, NCCL, Contract
from dbo_fx.ir import (
    COMM,
    COMP,
    Action,
    Half,
    Keepalive,
    Merge,
    Program,
    Record,
    Run,
    Step,
    Wait,
    bind,
    lanes,
)
from generated import case, contracts

TRANSPORTS = sorted(CONTRACTS)
TOLD = ("gloo", "nccl", "deepep_ll")


def program(schedule: str, layers: int, transport: str) -> Program:
    """A schedule on a transport's streams, each event at the tightest place."""
    contract = CONTRACTS[transport]
    steps: list[Step] = []
    arrived: dict[Action, int] = {}
    events = itertools.count()
    order = schedules.load(schedule)
    count = order.num_microbatches or 2
    for action in bind(order, layers, count):
        whole = action.communication
        if contract.send_stream == contract.recv_stream:
            steps.append(Run(COMP, action))
        elif action.half is Half.SEND:
            ready, arrived[whole] = next(events), next(events)
            steps += [Record(COMP, ready), Wait(COMM, ready), Run(COMM, action)]
            steps.append(Record(COMM, arrived[whole]))
        elif action.half is Half.RECV:
            steps += [Wait(COMP, arrived[whole]), Run(COMP, action)]
        else:
            steps.append(Run(COMP, action))
        if action.half is Half.RECV:
            steps.append(Keepalive(COMP, whole))
    return Program(schedule, count, layers, transport, (*steps, Merge(COMP)))


def report_of(steps: Program) -> OverlapReport:
    return overlap_report(execution_of_program(steps))


def beside(report: OverlapReport, action: str) -> str:
    return " ".join(map(str, report.of(Action.parse_bound(action)).beside))


def execution(lines: str, needs: str, contract: Contract = NCCL) -> Execution:
    """Operations `comp A0_m0@0`, `comp record 0`; needs `A0_m0@0 RAW A1_m0@0`, one a line."""
    operations = []
    for line in lines.split("\n"):
        stream, name, *event = line.split()
        if event:
            kind, action = Kind(name), None
        else:
            action = Action.parse_bound(name.rstrip("'"))
            kind = Kind.COMPUTE if action.half is None else Kind(action.half.value)
        number = int(event[0]) if event else None
        operations.append(Operation(name, kind, stream, event=number, action=action))
    at = {o.name: i for i, o in enumerate(operations) if o.kind not in (Kind.RECORD, Kind.WAIT)}
    required = []
    for line in needs.split("\n"):
        before, kind_, after = line.split()
        required.append(Required(at[before], at[after], kind_, "x"))
    return Execution(tuple(operations), tuple(required), contract)


def reasons(case: Execution, action: str) -> str:
    found = overlap_report(case).of(Action.parse_bound(action))
    return "\n".join(map(str, found.prevented))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", schedules.names())
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_is_beside_is_what_the_lanes_show(schedule: str, layers: int, transport: str) -> None:
    bound = program(schedule, layers, transport)
    shown: defaultdict[Action, list[Action]] = defaultdict(list)
    for column in lanes(bound.actions):
        for communication in column.comm:
            shown[communication] += column.comp
    report = report_of(bound)
    found = {o.communication: [b.action for b in o.beside] for o in report.overlaps}
    assert found == dict(shown)
    assert len(report.overlaps) == 2 * bound.microbatches * layers


@pytest.mark.parametrize("transport", TOLD)
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
def test_the_report_of_four_layers(
    schedule: str, transport: str, golden: Callable[[str, str], None]
) -> None:
    text = str(report_of(program(schedule, 4, transport)))
    golden(f"overlap_{schedule}_{transport}.txt", f"{text}\n")


def test_nothing_is_beside_when_one_follows_the_other() -> None:
    report = report_of(program("sequential", 3, "nccl"))
    assert len(report.alone) == len(report.overlaps) == 12
    assert str(report).startswith("0 of 12 communications have compute beside them")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_json_is_plain_and_says_what_the_report_says(transport: str) -> None:
    report = report_of(program("mlp_shared_overlap", 2, transport))
    values = report.to_json()
    assert (values["communications"], values["alone"]) == (8, [])
    first = values["overlaps"][0]
    assert first["communication"] == "D_m0@0"
    assert first["beside"] == [
        {"action": "A0_m1@0", "operations": 1, "of": 1},
        {"action": "A1_m1@0", "operations": 1, "of": 1},
    ]


def test_a_communication_is_found_by_either_half() -> None:
    report = report_of(program("mlp_shared_overlap", 2, "nccl"))
    whole = report.of(Action.parse_bound("C_m1@1"))
    assert report.of(Action.parse_bound("C_m1.recv@1")) is whole
    assert beside(report, "C_m1@1") == "S_m1@1 TAIL_m0"
    with pytest.raises(KeyError, match="C_m1@7 is no communication of this program"):
        report.of(Action.parse_bound("C_m1@7"))


# --- damage


def moved(base: Program, step: str, before: str) -> Program:
    """One step moved to stand directly before another one."""
    steps = list(base.steps)
    texts = [str(s) for s in steps]
    taken = steps.pop(texts.index(step))
    steps.insert([str(s) for s in steps].index(before), taken)
    return replace(base, steps=tuple(steps))


def test_a_record_moved_later_is_seen() -> None:
    base = program("mlp_shared_overlap", 2, "nccl")
    text = "\n".join(map(str, base.steps))
    # C_m0.send@0 in host order behind S_m0@0, its record where MLP_m0@0 ends: nothing is lost.
    steps = list(base.steps)
    texts = text.split("\n")
    group = slice(texts.index("comm  wait e4"), texts.index("comm  record e5") + 1)
    sent = steps[group]
    del steps[group]
    here = [str(s) for s in steps].index("comp  S_m0@0") + 1
    later = replace(base, steps=(*steps[:here], *sent, *steps[here:]))
    assert report_of(later) == report_of(base)
    damaged = moved(later, "comp  record e4", "comm  wait e4")
    assert report_of(damaged) != report_of(base)
    assert beside(report_of(damaged), "C_m0@0") == "MLP_m1@0"
    reason = report_of(damaged).of(Action.parse_bound("C_m0@0")).prevented[0]
    assert str(reason) == (
        "not S_m0@0: late event (e4: C_m0.send@0 needs MLP_m0@0, its record stands behind S_m0@0)"
    )


def test_a_wait_moved_earlier_is_seen() -> None:
    base = program("mlp_shared_overlap", 2, "nccl")
    damaged = moved(base, "comp  wait e1", "comp  A1_m1@0")
    assert report_of(damaged) != report_of(base)
    reason = report_of(damaged).of(Action.parse_bound("D_m0@0")).prevented[0]
    assert str(reason) == "not A1_m1@0: early wait (e1: the first use of D_m0@0 is MLP_m0@0)"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_recv_moved_earlier_is_seen(transport: str) -> None:
    base = program("mlp_shared_overlap", 2, transport)
    damaged = moved(base, "comp  D_m0.recv@0", "comp  A1_m1@0")
    if transport != "deepep_ll":
        damaged = moved(damaged, "comp  wait e1", "comp  D_m0.recv@0")
    assert report_of(damaged) != report_of(base)
    assert report_of(damaged).to_json() != report_of(base).to_json()
    assert beside(report_of(damaged), "D_m0@0") == "A0_m1@0"


def test_a_redundant_event_changes_nothing() -> None:
    base = program("mlp_shared_overlap", 2, "nccl")
    texts = [str(step) for step in base.steps]
    for place in (texts.index("comp  wait e1"), texts.index("comp  wait e1") + 1):
        steps = list(base.steps)
        steps.insert(place, Wait(COMP, 100))
        steps.insert(texts.index("comm  record e1"), Record(COMM, 100))
        report = report_of(replace(base, steps=tuple(steps)))
        assert report == report_of(base)
        assert report.to_json() == report_of(base).to_json()


# --- one reason each, on streams written by hand

STREAMS = """\
comp A1_m0@0
comp record 0
comm wait 0
comm D_m0.send@0
comm record 1
comp S_m1@0
comp wait 1
comp D_m0.recv@0
comp MLP_m0@0"""
NEEDS = """\
A1_m0@0 RAW D_m0.send@0
D_m0.send@0 RAW D_m0.recv@0
D_m0.recv@0 RAW MLP_m0@0"""


def without(lines: str, *dropped: str) -> str:
    return "\n".join(line for line in lines.split("\n") if line not in dropped)


def with_line(lines: str, line: str, before: str) -> str:
    return without(lines, line).replace(before, f"{line}\n{before}")


def test_beside() -> None:
    case = execution(STREAMS, NEEDS)
    assert beside(overlap_report(case), "D_m0@0") == "S_m1@0"
    assert reasons(case, "D_m0@0") == ""


@pytest.mark.parametrize("kind", ["WAR", "WAW"])
def test_false_dependency_on_what_is_behind(kind: str) -> None:
    lines = with_line(STREAMS, "comp wait 1", "comp S_m1@0")
    case = execution(lines, f"{NEEDS}\nD_m0.send@0 {kind} S_m1@0")
    assert reasons(case, "D_m0@0") == (
        f"not S_m1@0: dependency ({kind} on x: D_m0.send@0, then S_m1@0)"
    )


def test_false_dependency_on_what_is_before_through_another_operation() -> None:
    lines = f"comp A0_m0@0\n{with_line(STREAMS, 'comp S_m1@0', 'comp A1_m0@0')}"
    case = execution(lines, f"{NEEDS}\nA0_m0@0 RAW A1_m0@0\nS_m1@0 WAR A1_m0@0")
    assert reasons(case, "D_m0@0") == "not S_m1@0: dependency (WAR on x: S_m1@0, then A1_m0@0)"


def test_what_hands_over_a_value_is_not_lost_overlap() -> None:
    lines = with_line(STREAMS, "comp wait 1", "comp S_m1@0")
    assert reasons(execution(lines, f"{NEEDS}\nD_m0.recv@0 data S_m1@0"), "D_m0@0") == ""


def test_late_event_before_the_send() -> None:
    lines = with_line(STREAMS, "comp S_m1@0", "comp record 0")
    assert reasons(execution(lines, NEEDS), "D_m0@0") == (
        "not S_m1@0: late event (e0: D_m0.send@0 needs A1_m0@0, its record stands behind S_m1@0)"
    )


TWO = """\
comp A1_m0@0
comp record 0
comp A1_m1@0
comp record 1
comm wait 0
comm D_m0.send@0
comm record 2
comm wait 1
comm D_m1.send@0
comm record 3
comp wait 2
comp D_m0.recv@0
comp MLP_m0@0
comp wait 3
comp D_m1.recv@0
comp MLP_m1@0"""
TWO_NEEDS = f"{NEEDS}\n{NEEDS.replace('m0', 'm1')}"


def test_late_event_behind_another_send() -> None:
    assert reasons(execution(TWO, TWO_NEEDS), "D_m1@0") == ""
    late = with_line(TWO, "comm record 2", "comm record 3")
    assert reasons(execution(late, TWO_NEEDS), "D_m1@0") == (
        "not MLP_m0@0: late event (e2: the record that D_m0.recv@0 waits for stands behind "
        "D_m1.send@0)"
    )


def test_early_wait_on_an_event_and_on_the_host() -> None:
    lines = with_line(STREAMS, "comp wait 1", "comp S_m1@0")
    for recv_is, use in (("event", "MLP_m0@0"), ("host", "D_m0.recv@0")):
        case = execution(lines, NEEDS, replace(NCCL, recv_is=recv_is))
        assert reasons(case, "D_m0@0") == (
            f"not S_m1@0: early wait (e1: the first use of D_m0@0 is {use})"
        )


def test_segment_boundary_on_both_sides() -> None:
    # `A1_m0@0'` and `MLP_m0@0'` are further operations of the same actions.
    lines = f"comp A1_m0@0'\n{STREAMS}\ncomp MLP_m0@0'"
    assert reasons(execution(lines, NEEDS), "D_m0@0") == (
        "not A1_m0@0: segment boundary (in one run of compute with A1_m0@0)\n"
        "not MLP_m0@0: segment boundary (in one run of compute with MLP_m0@0)"
    )


def test_part_of_an_action_is_beside() -> None:
    lines = with_line(STREAMS, "comp wait 1", "comp D_m0.recv@0")
    report = overlap_report(execution(f"comp S_m1@0'\n{lines}", NEEDS))
    assert beside(report, "D_m0@0") == "S_m1@0 (1 of 2 operations)"


ONE_STREAM = """\
comp A1_m0@0
comp A1_m1@0
comp D_m0.send@0
comp {between}
comp D_m0.recv@0
comp D_m1.send@0
comp {behind}
comp D_m1.recv@0
comp MLP_m0@0
comp MLP_m1@0"""


def test_in_flight_limit_on_both_sides() -> None:
    lines = ONE_STREAM.format(between="S_m2@0", behind="S_m3@0")
    case = execution(lines, TWO_NEEDS, DEEPEP_LL)
    text = "D_m1.send@0 has to stand behind D_m0.recv@0: deepep_ll allows 1 in flight"
    assert reasons(case, "D_m0@0") == (
        f"not A1_m1@0: schedule (stands before D_m0.send@0)\nnot S_m3@0: in-flight limit ({text})"
    )
    assert f"not S_m2@0: in-flight limit ({text})" in reasons(case, "D_m1@0")
    free = replace(DEEPEP_LL, max_in_flight=2)
    assert "in-flight" not in reasons(execution(lines, TWO_NEEDS, free), "D_m1@0")


def test_the_in_flight_limit_holds_over_one_communicator() -> None:
    lines = ONE_STREAM.format(between="S_m2@0", behind="S_m3@0")
    case = execution(lines, TWO_NEEDS, DEEPEP_LL)
    apart = tuple(
        replace(o, communicator=str(o.action.microbatch)) if o.action and o.communicates else o
        for o in case.operations
    )
    assert "in-flight" in reasons(case, "D_m0@0") + reasons(case, "D_m1@0")
    free = replace(case, operations=apart)
    assert "in-flight" not in reasons(free, "D_m0@0") + reasons(free, "D_m1@0")


def test_stream_order_before_the_send() -> None:
    lines = "\n".join(
        ["comp A1_m1@0", "comp record 1", "comp S_m2@0", *TWO.split("\n")[:2], *TWO.split("\n")[4:]]
    )
    needs = f"{TWO_NEEDS}"
    assert "not S_m2@0: stream order (D_m1.send@0 follows D_m0.send@0 on comm)" in reasons(
        execution(lines, needs), "D_m1@0"
    )


def test_stream_order_behind_the_send() -> None:
    lines = TWO.split("\n")
    swapped = "\n".join([*lines[:10], *lines[13:], "comp S_m2@0", *lines[10:13]])
    assert reasons(execution(swapped, TWO_NEEDS), "D_m0@0") == (
        "not MLP_m1@0: stream order (e3: D_m1.send@0 follows on comm and is waited for first)\n"
        "not S_m2@0: stream order (e3: D_m1.send@0 follows on comm and is waited for first)"
    )


def test_schedule() -> None:
    before = f"comp A0_m0@0\n{with_line(STREAMS, 'comp S_m1@0', 'comp A1_m0@0')}"
    assert reasons(execution(before, f"{NEEDS}\nA0_m0@0 RAW A1_m0@0"), "D_m0@0") == (
        "not S_m1@0: schedule (stands before A1_m0@0)"
    )
    behind = f"{without(STREAMS, 'comp S_m1@0')}\ncomp S_m1@0\ncomp S_m0@0"
    assert reasons(execution(behind, f"{NEEDS}\nMLP_m0@0 RAW S_m0@0"), "D_m0@0") == (
        "not S_m1@0: schedule (stands behind MLP_m0@0)"
    )


def test_actions_of_other_periods_are_left_out() -> None:
    report = report_of(program("mlp_shared_overlap", 6, "nccl"))
    for overlap in report.overlaps:
        layer = overlap.communication.layer
        assert layer is not None
        near = {None, layer - 1, layer, layer + 1}
        assert {p.action.layer for p in overlap.prevented} <= near


@pytest.mark.parametrize("transport", TOLD)
@pytest.mark.parametrize("schedule", schedules.names())
def test_the_work_is_linear_in_layers(
    schedule: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def questions(layers: int) -> int:
        asked = 0
        before = HappensBefore.before

        def counted(self: HappensBefore, first: int, second: int) -> bool:
            nonlocal asked
            asked += 1
            return before(self, first, second)

        case = execution_of_program(program(schedule, layers, transport))
        with monkeypatch.context() as patch:
            patch.setattr(HappensBefore, "before", counted)
            overlap_report(case)
        return asked

    few: Sequence[int] = [questions(n) for n in (16, 64)]
    assert few[1] < 6 * few[0]  # Four times the layers; searches add a logarithm.


EVENTS = [c for c in contracts() if c.recv_is != "kernel"]


@pytest.mark.parametrize("seed", range(24))
def test_any_program_agrees_with_the_closure_of_its_streams_and_events(seed: int) -> None:
    base = case(seed, EVENTS[seed % len(EVENTS)])
    report = overlap_report(execution_of_program(base.program, base.contract))
    found = {(o.communication, b.action) for o in report.overlaps for b in o.beside}
    unordered = {(one[1], other[1]) for one, other in closure(base.program)}
    assert found == {(send.communication, action) for send, action in unordered}


@pytest.mark.parametrize("seed", range(24))
def test_any_program_on_one_stream_has_beside_what_stands_between(seed: int) -> None:
    base = case(seed, DEEPEP_LL)
    report = overlap_report(execution_of_program(base.program, base.contract))
    actions = base.program.actions
    for overlap in report.overlaps:
        first, last = (
            actions.index(replace(overlap.communication, half=half))
            for half in (Half.SEND, Half.RECV)
        )
        between = [a for a in actions[first:last] if not a.phase.is_communication]
        assert [b.action for b in overlap.beside] == between
