"""Order, lifetimes, events, forks and joins: what is certified, and what each rule refuses."""

from __future__ import annotations

import json

import pytest

from dbo_fx.certificates.counterexample import counterexample, shortest
from dbo_fx.certificates.execution import Execution, Kind, Operation, Required
from dbo_fx.certificates.hazards import prove, violations
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.violation import RULES
from dbo_fx.contracts import NCCL
from dbo_fx.errors import VerificationError
from dbo_fx.ir import Action, Keepalive, Phase, Record, Run, Wait
from program_edits import at, bound, changed, doubled, moved, refusal, rules_of, with_steps, without

BEGIN = Operation("begin", Kind.BEGIN, "comp", writes=frozenset({"x", "w"}))
END = Operation("end", Kind.END, "comp", frozenset({"r"}), frozenset({"x", "w"}))


def compute(name: str, reads: str = "", writes: str = "", stream: str = "comp") -> Operation:
    """An operation that touches storages of one letter."""
    return Operation(name, Kind.COMPUTE, stream, frozenset(reads), frozenset(writes))


def allocate(storage: str, stream: str = "comp") -> Operation:
    return Operation(f"allocate {storage}", Kind.ALLOCATE, stream, writes=frozenset({storage}))


def free(storage: str, stream: str = "comp") -> Operation:
    return Operation(f"free {storage}", Kind.FREE, stream, writes=frozenset({storage}))


def record(event: int, stream: str) -> Operation:
    return Operation(f"record e{event}", Kind.RECORD, stream, event=event)


def wait(event: int, stream: str) -> Operation:
    return Operation(f"wait e{event}", Kind.WAIT, stream, event=event)


def execution(*operations: Operation, required: tuple[Required, ...] = ()) -> Execution:
    return Execution((BEGIN, *operations, END), required, NCCL)


def found(*operations: Operation, required: tuple[Required, ...] = ()) -> list[tuple[str, str]]:
    return [(v.rule, v.missing) for v in violations(execution(*operations, required=required))]


FORK = [record(0, "comp"), wait(0, "side")]
JOIN = [record(1, "side"), wait(1, "comp")]


def test_a_side_stream_that_forks_and_joins_is_certified():
    steps = [*FORK, compute("a", "x", "r", "side"), *JOIN]
    certificate = prove(execution(*steps, required=(Required(0, 3, "RAW", "x"),)))
    assert (certificate.dependencies, certificate.cross_stream) == (1, 1)
    assert (certificate.storages, certificate.events, certificate.communications) == (3, 2, 0)
    assert certificate.capturable


def test_the_certificate_in_words_and_as_json():
    certificate = prove(execution_of_program(bound(layers=2)))
    assert str(certificate) == (
        "50 dependencies hold, 16 of them across streams; 35 storages without a race, 30 lifetimes "
        "cover their readers; 8 sends have one recv each, at most 1 in flight; 16 events; all "
        "streams joined; capturable"
    )
    shown = certificate.to_json()
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["communications"], shown["max_in_flight"], shown["capturable"]) == (8, 1, True)
    eager = prove(execution_of_program(bound("gloo")))
    assert eager.reason == "D_m0.send@0 on comm goes over gloo, which cannot be captured"
    assert str(eager).endswith(f"not capturable: {eager.reason}")


def test_a_required_order_in_the_wrong_direction_is_refused():
    """The pair is ordered on its stream, so only the reference can tell."""
    steps = [compute("b", "x", "r"), compute("a", "x", "x")]
    assert ("dependency", "b on comp runs before a on comp (WAR)") in found(
        *steps, required=(Required(2, 1, "WAR", "x"),)
    )
    assert not found(*steps)


def test_conflicts_that_nobody_required_must_be_ordered_too():
    steps = [*FORK, compute("a", "x", "w", "side"), compute("b", "w", "r"), *JOIN]
    assert found(*steps) == [("dependency", "b on comp is not ordered behind a on side")]
    assert not found(*FORK, compute("a", "x", "", "side"), compute("b", "x", "r"), *JOIN)


def test_a_required_pair_is_reported_once():
    steps = [*FORK, compute("a", "x", "w", "side"), compute("b", "w", "r"), *JOIN]
    reports = found(*steps, required=(Required(3, 4, "RAW", "w"),))
    assert reports == [("dependency", "b on comp is not ordered behind a on side (RAW)")]


def test_a_reader_is_not_overwritten_while_it_may_run():
    steps = [*FORK, compute("a", "x", "", "side"), compute("b", "", "xr"), *JOIN]
    assert found(*steps) == [("dependency", "b on comp is not ordered behind a on side")]


def test_what_is_read_must_have_been_written():
    assert found(compute("a", "z", "r")) == [
        ("dependency", "a on comp reads z, which nothing writes before it")
    ]


def test_memory_alone_is_no_value():
    assert found(allocate("z"), compute("a", "z", "r")) == [
        ("dependency", "a on comp reads z, which nothing writes before it")
    ]


def test_a_storage_is_allocated_before_it_is_used():
    steps = [compute("a", "", "z"), allocate("z"), compute("b", "", "z"), compute("c", "z", "r")]
    assert ("dependency", "a on comp needs z, which is not allocated before it") in found(*steps)


def test_a_value_is_made_once():
    steps = [allocate("z"), compute("a", "", "z"), allocate("z"), compute("b", "", "z")]
    assert found(*steps, compute("c", "z", "r")) == [
        ("dependency", "b on comp makes z a second time")
    ]
    again = [allocate("z"), compute("a", "", "z"), free("z"), allocate("z"), compute("b", "", "z")]
    assert not found(*again, compute("c", "z", "r"))


def test_nothing_is_used_behind_its_end():
    steps = [allocate("z"), compute("a", "", "z"), free("z"), compute("b", "z", "r")]
    assert found(*steps) == [("lifetime", "b on comp comes behind the end of the lifetime of z")]


def test_memory_is_not_freed_while_another_stream_reads_it():
    steps = [allocate("z"), compute("a", "", "z"), *FORK, compute("b", "z", "r", "side")]
    assert found(*steps, free("z"), *JOIN) == [
        ("lifetime", "z may be freed while b on side still uses it")
    ]
    assert not found(*steps, *JOIN, free("z"))


def test_memory_is_not_used_before_its_stream_lets_it_go():
    """The allocator hands out memory that earlier operations of its stream may still use."""
    steps = [*FORK, allocate("z"), compute("a", "", "z", "side"), *JOIN, compute("b", "z", "r")]
    assert found(*steps) == [("lifetime", "a on side may use z before its memory is free for it")]
    assert not found(allocate("z"), *steps[:2], *steps[3:])


def test_a_wait_for_what_is_never_recorded():
    assert ("event", "side waits for e0, which is not recorded before") in found(
        wait(0, "side"), compute("a", "x", "r")
    )


def test_a_record_behind_its_wait():
    reports = [*violations(execution(wait(0, "comp"), compute("a", "x", "r"), record(0, "comp")))]
    assert [(v.rule, v.first, v.second) for v in reports] == [("event", 3, 1)]
    assert reports[0].fix == "move record e0 before its wait"


def test_an_event_recorded_twice():
    steps = [record(0, "comp"), compute("a", "x", "r"), record(0, "comp")]
    assert found(*steps) == [("event", "e0 is recorded twice")]


def test_an_event_that_nobody_waits_for_is_harmless():
    assert not found(compute("a", "x", "r"), record(0, "comp"))


def test_a_stream_that_never_waited_is_not_forked():
    reports = found(compute("a", "", "r", "side"), record(1, "side"), wait(1, "comp"))
    assert reports == [("fork", "side is not forked: a on side waits for nothing")]


def test_a_stream_may_fork_from_another_side_stream():
    steps = [*FORK, compute("a", "x", "", "side"), record(2, "side"), wait(2, "third")]
    steps += [compute("b", "x", "r", "third"), record(3, "third"), wait(3, "comp"), *JOIN]
    assert not found(*steps)


def test_a_stream_that_is_not_joined():
    steps = [*FORK, compute("a", "", "", "side"), compute("b", "x", "r")]
    assert found(*steps) == [("join", "side is not joined at the end: a on side may still run")]


def test_inputs_are_the_callers_again_only_when_their_readers_are_done():
    steps = [*FORK, compute("a", "x", "", "side"), compute("b", "x", "r")]
    assert ("join", "end on comp is not ordered behind a on side") in found(*steps)


def test_earlier_tokens_come_first_where_an_input_is_mutated():
    program = bound(layers=2)
    swapped = moved(program, "comp A0_m1@0", "comp A0_m0@0")
    assert "microbatch-order" in rules_of(swapped)
    text = refusal(swapped)
    assert text.rule == "microbatch-order"
    assert text.storage == "cache@0"
    assert text.missing == "A0_m1@0 on comp runs before A0_m0@0 on comp (RAW)"
    assert text.fix == "move A0_m1@0 behind A0_m0@0"
    assert "microbatch-order" not in rules_of(without(program, "comp wait e1"))


WAITS = ["comm wait e0", "comp wait e1", "comm wait e2", "comp wait e3", "comp wait e7"]


@pytest.mark.parametrize("line", WAITS)
def test_every_wait_of_the_overlapping_program_is_needed(line):
    assert rules_of(without(bound(), line)) & {"dependency", "lifetime"}


@pytest.mark.parametrize("communication", ["D_m0@0", "D_m1@0", "C_m0@0", "C_m1@0"])
def test_every_keepalive_is_needed(communication):
    program = without(bound(), f"comp keepalive {communication}")
    assert rules_of(program) == {"lifetime"}
    assert "may be freed while" in refusal(program).missing


def test_a_keepalive_before_the_wait_is_too_early():
    program = moved(bound(), "comp keepalive D_m0@0", "comp wait e1")
    assert rules_of(program) == {"lifetime"}


def test_a_keepalive_of_something_else_keeps_nothing():
    wrong = Keepalive("comp", Action(Phase.C, 0, None, 0))
    assert rules_of(changed(bound(), "comp keepalive D_m0@0", wrong)) == {"lifetime"}


def test_compute_on_the_other_stream_must_wait_like_any_other():
    program = bound()
    moved_to = changed(program, "comp S_m0@0", Run("comm", Action(Phase.S, 0, None, 0)))
    assert {"dependency", "lifetime"} <= rules_of(moved_to)


def test_redundant_steps_are_certified():
    program = bound()
    index = at(program, "comp MLP_m0@0")
    more = [Record("comp", 90), Wait("comm", 90)]
    for redundant in (
        doubled(program, "comm wait e2"),
        doubled(program, "comp keepalive D_m0@0"),
        with_steps(program, [*program.steps[:index], *more, *program.steps[index:]]),
    ):
        assert not rules_of(redundant)


def test_the_shortest_counterexample_is_shown_and_the_earliest_of_equals():
    far = [*FORK, compute("a", "x", "w", "side"), compute("n"), compute("b", "w", "r"), *JOIN]
    near = [*FORK, compute("c", "x", "", "side"), compute("d", "", "x"), *JOIN]
    renamed = [
        Operation(
            o.name, o.kind, o.stream, o.reads, o.writes, None if o.event is None else 9 + o.event
        )
        for o in near
    ]
    both = execution(*far, *renamed, *[renamed[2], renamed[3]])
    shown = shortest(both, violations(both))
    assert shown is not None
    assert shown.missing == "d on comp is not ordered behind c on side"
    assert shown.second is not None
    assert shown.second.operation == 1 + len(far) + 3


def test_a_refusal_carries_its_counterexample():
    damaged = execution_of_program(without(bound(), "comp wait e1"))
    with pytest.raises(VerificationError) as caught:
        prove(damaged)
    shown = caught.value.counterexample
    assert shown is not None
    assert str(caught.value) == str(shown)
    assert shown.rule == "dependency"
    assert json.loads(json.dumps(shown.to_json())) == shown.to_json()


COUNTEREXAMPLES = {
    "counterexample_dropped_wait.txt": without(bound(layers=3), "comp wait e9"),
    "counterexample_dropped_keepalive.txt": without(bound(), "comp keepalive C_m0@0"),
    "counterexample_dropped_record.txt": without(bound(), "comp record e2"),
    "counterexample_missing_action.txt": without(
        bound(layers=2, schedule="sequential"), "comp merge", "comp S_m0@0"
    ),
    "counterexample_second_in_flight.txt": moved(
        bound("deepep_ll"), "comp D_m1.send@0 slot 1", "comp D_m0.recv@0 slot 0"
    ),
}


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_counterexamples_are_golden(name, golden):
    golden(name, f"{refusal(COUNTEREXAMPLES[name])}\n")


def test_a_long_picture_keeps_both_ends():
    program = bound(layers=3, schedule="sequential")
    damaged = execution_of_program(program)
    names = [o.name for o in damaged.operations]
    first, second = names.index("A0_m0@0"), names.index("TAIL_m1")
    violation = next(violations(execution(wait(5, "comp"), compute("a", "x", "r"))))
    placed = type(violation)("dependency", first, second, "h_m1@0", "x", "y")
    shown = counterexample(damaged, placed).picture
    assert "[A0_m0@0]" in shown
    assert " ... " in shown
    assert shown.splitlines()[0].endswith("TAIL_m1   <-- here")
    assert max(map(len, shown.splitlines())) < 110


def test_a_picture_marks_the_later_operation_also_if_it_should_come_first():
    found_ = refusal(moved(bound(), "comp MLP_m0@0", "comp wait e1"))
    assert found_.missing == "MLP_m0@0 on comp runs before D_m0.recv@0 on comp (RAW)"
    assert "[MLP_m0@0]" in found_.picture
    assert "D_m0.recv@0   <-- here" in found_.picture


def test_rules_have_stable_names():
    assert RULES == (
        "dependency",
        "microbatch-order",
        "lifetime",
        "event",
        "fork",
        "join",
        "stream",
        "pairing",
        "in-flight",
        "slot",
        "parity",
        "capture",
    )
