"""What transports demand: one certified program and one refusal per rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbo_fx.certificates.hazards import prove, violations
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.rules import Region, check_regions
from dbo_fx.contracts import DEEPEP_LL, NCCL, Contract
from dbo_fx.ir import Action, Half, Phase, Program, Run
from dbo_fx.witness import ProgramWitness
from program_edits import at, bound, changed, doubled, moved, refusal, rules_of, with_steps, without


def ll(layers: int = 1) -> Program:
    return bound("deepep_ll", layers)


def without_slots(program: Program) -> Program:
    steps = [replace(s, slot=None) if isinstance(s, Run) else s for s in program.steps]
    return with_steps(program, steps)


def renumbered(program: Program, slots: int = 2) -> Program:
    """The program with the slots that its order of sends gives."""
    taken: dict[Action, int] = {}
    steps = []
    for step in program.steps:
        if isinstance(step, Run) and step.action.half is not None:
            key = step.action.communication
            step = replace(step, slot=taken.setdefault(key, len(taken) % slots))
        steps.append(step)
    return with_steps(program, steps)


SEND = Action(Phase.D, 1, Half.SEND, 0)


@pytest.mark.parametrize(
    ("transport", "half", "stream", "wanted"),
    [
        ("nccl", "comm D_m1.send@0", "comp", "nccl wants its sends on comm"),
        ("nccl", "comp D_m1.recv@0", "comm", "nccl wants its recvs on comp"),
        ("deepep_ll", "comp D_m1.send@0 slot 1", "comm", "deepep_ll wants its sends on comp"),
    ],
)
def test_halves_stand_on_the_contracts_streams(transport, half, stream, wanted):
    program = bound(transport)
    step = program.steps[at(program, half)]
    assert isinstance(step, Run)
    damaged = execution_of_program(changed(program, half, replace(step, stream=stream)))
    texts = [v.missing for v in violations(damaged) if v.rule == "stream"]
    assert texts == [f"{step.action.bound()} on {stream} stands on the wrong stream; {wanted}"]


def test_a_dropped_recv():
    found = refusal(without(bound(), "comp C_m1.recv@0"))
    assert (found.rule, found.missing) == (
        "pairing",
        "C_m1.send@0 on comm is sent and never received",
    )


def test_a_dropped_send():
    found = refusal(without(bound(), "comm D_m0.send@0"))
    assert (found.rule, found.missing) == (
        "pairing",
        "D_m0.recv@0 on comp is received, but not in flight",
    )


def test_a_doubled_recv():
    found = refusal(doubled(bound(), "comp D_m0.recv@0"))
    assert (found.rule, found.fix) == ("pairing", "remove the second recv")


def test_a_doubled_send():
    found = refusal(doubled(bound(), "comm D_m0.send@0"))
    assert (found.rule, found.missing) == (
        "pairing",
        "D_m0.send@0 on comm is launched again while it is in flight",
    )


def test_a_send_that_runs_again_behind_its_recv():
    program = bound()
    index = at(program, "comp MLP_m0@0")
    again = [
        program.steps[at(program, "comm D_m0.send@0")],
        program.steps[at(program, "comp D_m0.recv@0")],
    ]
    damaged = with_steps(program, [*program.steps[:index], *again, *program.steps[index:]])
    assert "dependency" in rules_of(damaged)


def test_a_recv_before_its_send():
    assert "pairing" in rules_of(moved(bound(), "comp D_m0.recv@0", "comm D_m0.send@0"))


def two_in_flight() -> Program:
    return moved(ll(), "comp D_m1.send@0 slot 1", "comp D_m0.recv@0 slot 0")


def test_a_second_send_in_flight_over_low_latency_buffers():
    found = refusal(two_in_flight())
    assert (found.rule, found.missing) == (
        "in-flight",
        "D_m1.send@0 on comp may be launched while D_m0.send@0 is in flight over experts; "
        "deepep_ll allows 1 at once",
    )
    assert found.fix == "move D_m1.send@0 behind D_m0.recv@0"


def test_without_a_limit_several_may_be_in_flight():
    program = without_slots(two_in_flight())
    free_ = replace(DEEPEP_LL, name="free", max_in_flight=None, slots=None, parity=1)
    assert not rules_of(program, free_)
    assert prove(execution_of_program(program, free_)).max_in_flight == 2


def test_as_many_as_there_are_slots_without_a_limit_of_their_own():
    slotted = replace(DEEPEP_LL, name="slotted", max_in_flight=None)
    assert not rules_of(two_in_flight(), slotted)
    one = replace(slotted, slots=1)
    assert rules_of(renumbered(two_in_flight(), 1), one) == {"slot"}


def test_a_slot_is_taken_again_only_when_it_is_received():
    """Two in flight are allowed, but the later one is received first."""
    slotted = replace(DEEPEP_LL, name="slotted", max_in_flight=2)
    program = bound("deepep_ll", schedule="sequential")
    order = [
        *("comp A0_m1@0", "comp A1_m1@0", "comp D_m1.send@0 slot 0", "comp D_m1.recv@0 slot 0"),
        *("comp keepalive D_m1@0", "comp MLP_m1@0", "comp C_m1.send@0 slot 1"),
    ]
    for line in order:
        program = moved(program, line, "comp D_m0.recv@0 slot 0")
    found = refusal(renumbered(program), slotted)
    assert (found.rule, found.missing) == (
        "slot",
        "C_m1.send@0 on comp takes the slot of D_m0.send@0, which may be in flight still",
    )


def test_a_limit_counts_what_is_received_for_certain():
    """In host order one after the other; but nothing makes the second send wait for the recv."""
    limited = replace(NCCL, name="limited", max_in_flight=1)
    program = bound()
    assert not rules_of(program, limited)
    late = moved(program, "comp wait e1", "comp MLP_m0@0")
    late = moved(late, "comp D_m0.recv@0", "comp MLP_m0@0")
    late = moved(late, "comp keepalive D_m0@0", "comp MLP_m0@0")
    assert rules_of(late, limited) == {"in-flight"}
    assert not rules_of(late)


def test_slots_follow_the_order_of_the_sends():
    wrong = changed(ll(), "comp D_m1.send@0 slot 1", Run("comp", SEND, 0))
    texts = [v.missing for v in violations(execution_of_program(wrong)) if v.rule == "slot"]
    assert texts == [
        "D_m1.send@0 on comp uses slot 0, but as send 2 over experts it gets slot 1",
        "D_m1.recv@0 on comp reads slot 1, its send fills slot 0",
    ]
    assert not rules_of(ll(3))


def test_a_recv_reads_its_sends_slot():
    recv = replace(SEND, half=Half.RECV)
    wrong = changed(ll(), "comp D_m1.recv@0 slot 1", Run("comp", recv, 0))
    assert rules_of(wrong) == {"slot"}


def test_a_transport_without_slots_is_given_none():
    base = bound("nccl", 1)
    send = next(s for s in base.steps if isinstance(s, Run) and s.action.half is Half.SEND)
    wrong = changed(base, str(send).replace("  ", " "), replace(send, slot=0))
    found = [v for v in violations(execution_of_program(wrong)) if v.rule == "slot"]
    assert [v.missing for v in found] == ["D_m0.send@0 on comm uses slot 0; nccl has no slots"]
    assert not ProgramWitness(wrong, reference=base).confirm(1).safe


def test_slots_that_the_text_leaves_out_are_the_transports():
    assert not rules_of(without_slots(ll()))


def one_microbatch(layers: int, tail: Contract) -> set[str]:
    program = bound("deepep_ll", layers, "sequential", 1)
    return rules_of(program, tail)


def test_the_number_of_sends_is_even():
    by_four = replace(DEEPEP_LL, name="rounds", parity=4)
    assert not one_microbatch(2, by_four)
    assert one_microbatch(1, by_four) == {"parity"}
    found = refusal(bound("deepep_ll", 1, "sequential", 1), by_four)
    assert found.missing == (
        "2 sends over experts; rounds wants a multiple of 4, so that the next region starts at "
        "slot 0"
    )


def test_an_odd_number_of_sends_is_refused_by_the_shipped_contract():
    program = without(ll(), "comp C_m1.send@0 slot 1", "comp C_m1.recv@0 slot 1")
    assert {"parity"} <= rules_of(program)


def test_a_host_that_waits_cannot_be_captured():
    found = refusal(bound("gloo"), captured=True)
    assert found.rule == "capture"
    assert not rules_of(bound("gloo"))
    blocking = replace(NCCL, name="blocking", blocks_host=True)
    assert rules_of(bound(), blocking, captured=True) == {"capture"}
    assert not prove(execution_of_program(bound(), blocking)).capturable
    reason = prove(execution_of_program(bound(), blocking)).reason
    assert reason == "D_m0.recv@0 on comp makes the host wait"


def test_capturable_transports_are_captured():
    for transport in ("nccl", "deepep_ll"):
        assert not rules_of(bound(transport), captured=True)


def region(completed: int | None = None, realigned: bool = True) -> Region:
    return Region(execution_of_program(ll()), completed, realigned)


def test_whole_regions_leave_the_slots_aligned():
    assert not list(check_regions([region(), region(), region()]))


def test_a_failed_capture_leaves_the_slots_off():
    (found,) = check_regions([region(), region(3, realigned=False), region()])
    assert (found.rule, found.first, found.second) == ("slot", 1, 2)
    assert found.missing == (
        "region 2 (mlp_shared_overlap) assumes slot 0 of experts and starts at slot 1, where "
        "region 1 (mlp_shared_overlap), which failed after 3 sends left it"
    )
    assert found.fix == "re-align experts to slot 0 behind region 1, before region 2"


def test_a_failed_capture_that_is_realigned_or_stopped_at_an_even_send_does_no_harm():
    assert not list(check_regions([region(3), region()]))
    assert not list(check_regions([region(2, realigned=False), region()]))
    assert not list(check_regions([region(3, realigned=False)]))


def test_two_failures_may_cancel_out_only_for_the_region_behind_both():
    history = [region(1, realigned=False), region(1, realigned=False), region()]
    assert [(v.first, v.second) for v in check_regions(history)] == [(0, 1), (1, 2)]


def test_an_odd_region_misaligns_the_next_one():
    odd = without(ll(), "comp C_m1.send@0 slot 1", "comp C_m1.recv@0 slot 1")
    history = [Region(execution_of_program(odd)), region()]
    (found,) = check_regions(history)
    assert found.fix.endswith("; or give region 0 an even number of sends")


def test_transports_without_slots_have_no_start_state():
    nccl = Region(execution_of_program(bound()), 1, realigned=False)
    assert not list(check_regions([nccl, nccl]))
