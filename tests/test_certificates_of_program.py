"""Reading a program text as an execution: accesses, lifetimes, the order of the reference."""

from __future__ import annotations

import random

import pytest

from dbo_fx.certificates.execution import Kind
from dbo_fx.certificates.hazards import prove, violations
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.contracts import CONTRACTS
from dbo_fx.errors import OptionError
from dbo_fx.ir import Action, Half, Keepalive, Merge, Phase, Program, Record, Run, Wait
from program_edits import at, bound, refusal, rules_of, with_steps, without

SENT = "comm D_m0.send@0"


def texts(program: Program) -> list[str]:
    return [str(o) for o in execution_of_program(program).operations]


def operations(program: Program) -> dict[str, tuple[frozenset[object], frozenset[object]]]:
    return {o.name: (o.reads, o.writes) for o in execution_of_program(program).operations}


def test_the_operations_of_a_small_program(golden):
    program = bound(layers=1)
    lines = []
    for o in execution_of_program(program).operations:
        reads, writes = (" ".join(sorted(map(str, names))) for names in (o.reads, o.writes))
        lines.append(f"{o!s:<24} {reads} -> {writes}".rstrip())
    golden("check_operations.txt", "\n".join(lines) + "\n")


def test_every_operation_has_its_step():
    program = bound()
    execution = execution_of_program(program)
    for operation, step in zip(execution.operations, execution.steps, strict=True):
        if operation.action is not None:
            assert step is not None
            assert program.steps[step - 1] == Run(
                operation.stream, operation.action, operation.slot
            )
    assert (execution.steps[0], execution.steps[-1]) == (None, None)


def test_a_landing_buffer_is_allocated_before_the_record_that_its_send_waits_for():
    found = texts(bound())
    place = found.index("allocate d_m0@0 on comp")
    assert found[place + 1 : place + 4] == [
        "record e0 on comp",
        "wait e0 on comm",
        "D_m0.send@0 on comm",
    ]


def test_an_earlier_wait_of_the_stream_covers_a_landing_buffer_too():
    """Two sends behind one wait: the host can allocate both buffers before its record."""
    steps = [Run("comp", Action(p, m, None, 0)) for m in (0, 1) for p in (Phase.A0, Phase.A1)]
    sends = [Run("comm", Action(Phase.D, m, Half.SEND, 0)) for m in (0, 1)]
    program = Program("two", 2, 1, "nccl", (*steps, Record("comp", 0), Wait("comm", 0), *sends))
    found = texts(program)
    place = found.index("record e0 on comp")
    assert found[place - 2 : place] == ["allocate d_m0@0 on comp", "allocate d_m1@0 on comp"]


def test_on_one_stream_a_landing_buffer_is_allocated_directly_before_its_send():
    found = texts(bound("deepep_ll"))
    place = found.index("allocate d_m0@0 on comp")
    assert found[place + 1] == "D_m0.send@0 on comp"


def test_values_end_behind_the_last_step_that_names_them():
    found = texts(bound())
    assert found[found.index("A1_m0@0 on comp") + 1] == "free q_m0@0 on comp"
    assert found[found.index("D_m0.recv@0 on comp") + 1] == "free x_m0@0 on comp"
    assert found[found.index("MLP_m0@0 on comp") + 1] == "free d_m0@0 on comp"
    dropped = texts(without(bound(), "comp keepalive D_m0@0"))
    assert dropped[dropped.index("D_m0.send@0 on comm") + 1] == "free x_m0@0 on comp"


def test_inputs_and_results_are_the_callers():
    execution = execution_of_program(bound(layers=2))
    begin, end = execution.operations[0], execution.operations[-1]
    assert begin.writes == end.writes == {"input_m0", "input_m1", "cache@0", "cache@1"}
    assert end.reads == {"result"}
    freed = {s for o in execution.operations if o.kind is Kind.FREE for s in o.writes}
    assert not freed & (begin.writes | end.reads)


def test_the_next_layer_joins_what_the_last_one_left():
    reads, writes = operations(bound(layers=2))["A0_m1@1"]
    assert reads == {"c_m1@0", "h_m1@0", "s_m1@0", "cache@1"}
    assert writes == {"q_m1@1", "cache@1"}


def test_without_a_shared_expert_nobody_reads_it():
    program = without(bound(layers=2), "comp S_m0@0", "comp S_m1@0")
    assert operations(program)["A0_m1@1"][0] == {"c_m1@0", "h_m1@0", "cache@1"}
    assert operations(program)["TAIL_m1"][0] == {"c_m1@1", "h_m1@1", "s_m1@1"}
    assert not rules_of(program)


def test_without_a_tail_the_merge_reads_the_last_layer():
    program = without(bound(), "comp TAIL_m0", "comp TAIL_m1")
    names = {f"{value}_m{m}@0" for value in "chs" for m in (0, 1)}
    assert operations(program)["merge"][0] == names
    assert not rules_of(program)


def test_one_microbatch_needs_no_merge():
    program = bound(schedule="sequential", count=1)
    assert not any(isinstance(step, Merge) for step in program.steps)
    assert execution_of_program(program).operations[-1].reads == {"out_m0"}
    assert not rules_of(program)


def test_required_orders_come_from_the_reference_not_from_the_program():
    def named(program: Program) -> set[tuple[str, str, str, object]]:
        execution = execution_of_program(program)
        name = [o.name for o in execution.operations]
        return {(name[r.before], name[r.after], r.kind, r.storage) for r in execution.required}

    program = bound(layers=2)
    backwards = with_steps(program, program.steps[::-1])
    assert named(program) == named(backwards) == named(bound(layers=2, schedule="sequential"))
    assert ("A1_m0@0", "A0_m1@0", "WAR", "cache@0") in named(program)
    assert ("A0_m0@0", "A0_m1@0", "RAW", "cache@0") in named(program)
    assert ("C_m1.recv@1", "TAIL_m1", "RAW", "c_m1@1") in named(program)
    assert ("TAIL_m1", "merge", "RAW", "out_m1") in named(program)


def test_only_a_recv_over_gloo_blocks_the_host():
    blocking = [o for o in execution_of_program(bound("gloo")).operations if o.blocks_host]
    assert {o.kind for o in blocking} == {Kind.RECV}
    assert not any(o.blocks_host for o in execution_of_program(bound("nccl")).operations)


def test_halves_of_one_communication_share_flight_and_slot():
    program = bound("deepep_ll", layers=2)
    flights: dict[object, set[tuple[str, int | None]]] = {}
    for o in execution_of_program(program).operations:
        if o.communicates:
            assert o.communicator == "experts"
            flights.setdefault(o.flight, set()).add((o.transfer, o.slot))
    assert len(flights) == 8
    assert all(len(halves) == 1 for halves in flights.values())
    assert {slot for halves in flights.values() for _, slot in halves} == {0, 1}


def test_an_unknown_transport_is_an_option_error():
    program = Program("x", 1, 1, "pigeons", ())
    with pytest.raises(OptionError, match="unknown transport 'pigeons'"):
        execution_of_program(program)


MISSING = {
    "comp A0_m1@0": "q_m1@0",
    "comp A1_m0@0": "x_m0@0",
    "comp MLP_m0@0": "y_m0@0",
    "comp S_m1@0": "s_m1@0",
    "comp TAIL_m0": "out_m0",
    "comp merge": "result",
}


@pytest.mark.parametrize("line", MISSING)
def test_a_missing_action_is_a_value_that_nobody_wrote(line):
    found = refusal(without(bound(), line))
    assert (found.rule, found.first, found.storage) == ("dependency", None, MISSING[line])
    assert f"reads {MISSING[line]}, which nothing writes before it" in found.missing


def test_a_missing_layer_is_found_by_the_next_one():
    program = bound(layers=3)
    lacking = [s for s in program.steps if not str(s).endswith("@1")]
    assert "dependency" in rules_of(with_steps(program, lacking))


def test_a_missing_microbatch_is_found_by_the_merge():
    program = bound(schedule="sequential")
    lacking = [s for s in program.steps if "_m1" not in str(s)]
    assert "reads out_m1, which nothing writes" in refusal(with_steps(program, lacking)).missing


@pytest.mark.parametrize(
    "action",
    [
        Action(Phase.D, 0, None, 0),
        Action(Phase.A0, 0, None, None),
        Action(Phase.A0, 5, None, 0),
        Action(Phase.A0, 0, None, 7),
        Action(Phase.A0, None, None, 0),
    ],
)
def test_an_action_that_cannot_be_in_the_program_is_refused(action):
    program = bound()
    found = refusal(with_steps(program, [Run("comp", action), *program.steps]))
    assert found.missing.endswith("which nothing writes before it")
    assert "operands of" in found.missing


def test_damaged_programs_never_crash_and_are_never_certified_without_a_result():
    """Random deletions, repetitions, swaps and strange steps."""
    rng = random.Random(7)
    strange = [
        Run("side", Action(Phase.A0, 0, None, 0)),
        Run("comm", Action(Phase.C, 1, Half.RECV, 3), 9),
        Run("comp", Action(Phase.TAIL, None)),
        Keepalive("comp", Action(Phase.MLP, None)),
        Keepalive("comm", Action(Phase.D, 4, None, 9)),
        Record("side", 0),
        Wait("comp", 99),
        Merge("comm"),
    ]
    refused = 0
    for _ in range(300):
        steps = list(bound(rng.choice([*CONTRACTS]), rng.choice([1, 2])).steps)
        for _ in range(rng.randint(1, 6)):
            index = rng.randrange(len(steps))
            match rng.randrange(4):
                case 0:
                    del steps[index]
                case 1:
                    steps.insert(rng.randrange(len(steps)), steps[index])
                case 2:
                    other = rng.randrange(len(steps))
                    steps[index], steps[other] = steps[other], steps[index]
                case 3:
                    steps.insert(index, rng.choice(strange))
        program = with_steps(bound(layers=2), steps)
        found = list(violations(execution_of_program(program), captured=True))
        refused += bool(found)
        if not found:
            assert any(isinstance(step, Merge) for step in steps)
    assert refused > 250


@pytest.mark.parametrize(
    "program", [Program("none", 2, 1, "nccl", ()), Program("x", 1, 1, "nccl", ())]
)
def test_a_program_without_steps_is_refused(program):
    assert rules_of(program) == {"dependency"}


@pytest.mark.parametrize("transport", [*CONTRACTS])
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
@pytest.mark.parametrize("layers", [1, 3])
def test_shipped_schedules_are_certified_over_every_transport(transport, schedule, layers):
    program = bound(transport, layers, schedule)
    certificate = prove(execution_of_program(program))
    assert certificate.communications == 4 * layers
    assert certificate.capturable == (transport != "gloo")
    assert at(program, "comp merge") == len(program.steps) - 1
