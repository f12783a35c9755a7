"""The witness for program texts: its streams, its classes, whole programs, and damaged ones."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dbo_fx.witness
from dbo_fx.contracts import DEEPEP_LL, GLOO, NCCL, Contract
from dbo_fx.ir import COMP, Action, Half, Keepalive, Phase, Program, Record, Run, Step, Wait
from dbo_fx.witness import ProgramWitness, Region, TooManyClasses, Verdict, choosers, classes
from dbo_fx.witness.explore import Skeleton
from dbo_fx.witness.interleave import Chooser, Host, Machine, Plan, Task, execute
from small_moe import CachedMoe, PlainMoe, run_passes, traced_model

World = list[str]


def meet(world: World, parts: Sequence[Task]) -> None:
    world.append(parts[0].name)


def says(name: str) -> Callable[[World], None]:
    return lambda world: world.append(name)


def plan_of(*tasks: tuple[str, str, set[str], set[str]]) -> Plan:
    """One rank's tasks: stream, name, reads, writes."""
    plan = Plan(1, meet)
    host = Host(plan, 0)
    for stream, name, reads, writes in tasks:
        host.run(stream, name, says(name), reads, writes)
    return plan


def seen(plan: Plan, limit: int = 1000) -> list[str]:
    """What ran in which order, in every class."""
    runs = classes(plan, lambda: Machine(plan, []), limit)
    return sorted("".join(run.machine.world) for run in runs)


def test_independent_tasks_are_one_class() -> None:
    plan = plan_of(*[(s, f"{s}{i}", set(), {f"{s}{i}"}) for s in "abc" for i in range(4)])
    assert len(seen(plan)) == 1
    assert Skeleton.of(plan).pairs() == []


def test_readers_of_one_cell_are_one_class() -> None:
    assert len(seen(plan_of(("a", "x", {"c"}, set()), ("b", "y", {"c"}, set())))) == 1


def test_a_racing_pair_is_two_classes() -> None:
    plan = plan_of(("a", "x", set(), {"c"}), ("b", "y", {"c"}, set()), ("b", "z", set(), {"d"}))
    assert [text.replace("z", "") for text in seen(plan)] == ["xy", "yx"]
    assert Skeleton.of(plan).pairs() == [(0, 1)]


def test_pairs_that_do_not_touch_each_other_multiply() -> None:
    plan = plan_of(
        ("a", "p", set(), {"c"}),
        ("b", "q", set(), {"c"}),
        ("x", "r", set(), {"d"}),
        ("y", "s", {"d"}, set()),
    )
    assert len(seen(plan)) == 4


def test_every_order_of_three_tasks_that_all_conflict() -> None:
    assert len(seen(plan_of(*[(s, s, set(), {"c"}) for s in "abc"]))) == 6


def test_a_reader_between_two_writers_of_another_stream() -> None:
    """The reader is before, between or behind: three classes, not four interleavings."""
    plan = plan_of(("a", "x", set(), {"c"}), ("a", "y", set(), {"c"}), ("b", "r", {"c"}, set()))
    assert seen(plan) == ["rxy", "xry", "xyr"]


@pytest.mark.parametrize(("records", "expected"), [(1, ["xy"]), (0, ["xy", "yx"])])
def test_an_event_orders_and_one_never_recorded_does_not(records: int, expected: list[str]) -> None:
    plan = Plan(1, meet)
    host = Host(plan, 0)
    host.run("a", "x", says("x"), (), {"c"})
    for _ in range(records):
        host.record("a", 0)
    host.wait("b", 0)
    host.run("b", "y", says("y"), {"c"}, ())
    host.record("a", 0)
    assert seen(plan) == expected


def test_a_wait_means_the_latest_record_before_it() -> None:
    plan = Plan(1, meet)
    host = Host(plan, 0)
    host.record("a", 0)
    host.run("a", "x", says("x"), (), {"c"})
    host.record("a", 0)
    host.wait("b", 0)
    host.run("b", "y", says("y"), {"c"}, ())
    assert seen(plan) == ["xy"]


def test_more_classes_than_wanted() -> None:
    plan = plan_of(*[(s, s, set(), {"c"}) for s in "abcd"])
    with pytest.raises(TooManyClasses, match="more than 20 interleavings"):
        seen(plan, limit=20)


@pytest.mark.parametrize(
    ("chooser", "expected"),
    [
        (choosers.in_order, "a0b0a1b1"),
        (choosers.late("a"), "b0b1a0a1"),
        (choosers.eager("b"), "b0b1a0a1"),
        (choosers.late("b"), "a0a1b0b1"),
        (choosers.delayed(0), "b0b1a0a1"),
        (choosers.delayed(1), "a0a1b0b1"),
        (choosers.hastened(3, frozenset({1})), "b0b1a0a1"),
        (choosers.after(0, 1), "b0a0a1b1"),
        (choosers.after(1, 2), "a0a1b0b1"),
    ],
)
def test_choosers(chooser: Chooser, expected: str) -> None:
    order = [("a", "a0"), ("b", "b0"), ("a", "a1"), ("b", "b1")]
    plan = plan_of(*[(stream, name, set(), set()) for stream, name in order])
    machine = Machine(plan, [])
    assert execute(machine, chooser) is None
    assert "".join(machine.world) == expected


def test_a_seed_gives_the_same_run_again() -> None:
    plan = plan_of(*[(s, f"{s}{i}", set(), set()) for i in range(9) for s in "abc"])

    def draw(seed: int) -> World:
        machine = Machine(plan, [])
        execute(machine, choosers.drawn(seed))
        return machine.world

    assert draw(1) == draw(1) != draw(2)


def meetings(*ranks: Sequence[tuple[str, str]], exclusive: bool, blocks: bool = False) -> Plan:
    """Per rank: stream and communicator of its collectives."""
    plan = Plan(len(ranks), meet)
    for rank, order in enumerate(ranks):
        host = Host(plan, rank, exclusive)
        for stream, communicator in order:
            host.meet(stream, communicator, communicator, None, blocks=blocks)
    return plan


def stuck(plan: Plan, blocking: bool = False) -> str | None:
    return execute(Machine(plan, [], blocking), choosers.in_order)


def test_two_communicators_in_opposite_order() -> None:
    one, other = [("s", "x"), ("s", "y")], [("s", "y"), ("s", "x")]
    assert stuck(meetings(one, one, exclusive=False)) is None
    text = stuck(meetings(one, other, exclusive=False))
    assert text == (
        "stuck; the heads of the queues are\n"
        "  rank 0 s  x (waits for the other ranks on x)\n"
        "  rank 1 s  y (waits for the other ranks on y)"
    )


def test_streams_of_their_own_do_not_help_where_a_device_runs_one_collective_at_a_time() -> None:
    one, other = [("s", "x"), ("t", "y")], [("t", "y"), ("s", "x")]
    assert stuck(meetings(one, other, exclusive=False)) is None
    text = stuck(meetings(one, other, exclusive=True))
    assert text is not None
    assert "rank 0 t  y arrives (the device runs x arrives)" in text
    plan = meetings(one, one, exclusive=True)
    ends = [run.stuck is None for run in classes(plan, lambda: Machine(plan, []))]
    assert sorted(ends) == [False, False, True, True]


def test_hosts_that_wait_can_deadlock_where_streams_alone_do_not() -> None:
    one, other = [("s", "x"), ("t", "y")], [("t", "y"), ("s", "x")]
    plan = meetings(one, other, exclusive=False, blocks=True)
    assert stuck(plan) is None
    assert "stuck" in (stuck(plan, blocking=True) or "")


@cache
def program(
    schedule: str = "mlp_shared_overlap",
    model: type[PlainMoe] = CachedMoe,
    contract: Contract = GLOO,
    count: int = 2,
) -> Program:
    trace = traced_model(model, 2, ranks=1)
    found = run_passes(trace.fresh(), "streams", schedule, count, contract.name).program
    assert found is not None
    return found


@pytest.mark.parametrize("contract", [GLOO, NCCL, DEEPEP_LL], ids=lambda c: c.name)
@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
@pytest.mark.parametrize(
    ("schedule", "count"),
    [("mlp_shared_overlap", 2), ("sequential", 1), ("sequential", 2), ("sequential", 3)],
)
def test_every_shipped_schedule_is_safe_in_every_interleaving(
    schedule: str, count: int, model: type[PlainMoe], contract: Contract
) -> None:
    witness = ProgramWitness(program(schedule, model, contract, count))
    assert witness.confirm(30) == Verdict(True, 30)
    assert witness.exhaustive() == Verdict(True, 1)


@pytest.mark.parametrize("contract", [NCCL, DEEPEP_LL], ids=lambda c: c.name)
def test_programs_of_capturable_transports_are_safe_under_capture(contract: Contract) -> None:
    assert ProgramWitness(program(contract=contract), ranks=3, capture=True).confirm(12).safe


def test_the_result_does_not_depend_on_the_interleaving_but_on_every_rank() -> None:
    witness = ProgramWitness(program())
    digests = {witness.run(choosers.drawn(seed)).digest for seed in range(5)}
    assert len(digests) == 1
    assert digests != {ProgramWitness(program(), ranks=3).run().digest}


def edited(found: Program, edit: Callable[[list[Step]], Any]) -> Program:
    steps = list(found.steps)
    edit(steps)
    return replace(found, steps=tuple(steps))


def at(steps: Sequence[Step], text: str) -> int:
    return [str(step) for step in steps].index(text)


def unsafe(
    found: Program | Sequence[Program], contract: Contract | None = None, **more: Any
) -> str:
    """What is wrong with a damaged program; the exhaustive search must find something as well."""
    witness = ProgramWitness(found, contract, **more)
    verdict = witness.confirm(60)
    assert not verdict.safe
    assert not witness.exhaustive(2000).safe
    assert verdict.interleaving
    assert str(verdict).startswith(f"unsafe, found in run {verdict.runs}: {verdict.problem}")
    return verdict.problem


@pytest.mark.parametrize("contract", [GLOO, NCCL], ids=lambda c: c.name)
@pytest.mark.parametrize("kind", [Record, Wait, Keepalive])
def test_every_event_and_keepalive_is_needed(kind: type[Step], contract: Contract) -> None:
    good = program(contract=contract)
    places = [i for i, step in enumerate(good.steps) if isinstance(step, kind)]
    assert len(places) in (8, 16)
    for place in places:
        bad = edited(good, lambda steps, place=place: steps.pop(place))
        assert not ProgramWitness(bad).confirm(40).safe, good.steps[place]


@pytest.mark.parametrize("contract", [GLOO, NCCL, DEEPEP_LL], ids=lambda c: c.name)
def test_every_action_is_needed(contract: Contract) -> None:
    good = program(contract=contract)
    for place, step in enumerate(good.steps):
        if isinstance(step, Run):
            bad = edited(good, lambda steps, place=place: steps.pop(place))
            assert not ProgramWitness(bad, reference=good).confirm(40).safe, step


def test_a_recv_that_does_not_wait_is_seen_by_what_it_reads() -> None:
    good = program(contract=NCCL)

    def drop(steps: list[Step]) -> None:
        del steps[at(steps, "comp  wait e2")]

    assert "D_m0.recv@0 on rank 0 runs before its send" in unsafe(edited(good, drop))


def test_a_value_that_is_freed_while_the_other_stream_reads_it() -> None:
    def drop(steps: list[Step]) -> None:
        del steps[at(steps, "comp  keepalive D_m0@0")]

    assert unsafe(edited(program(), drop)).startswith("wrong result of call 0 on rank 0: ")


def test_a_keepalive_before_the_wait_is_too_early() -> None:
    def early(steps: list[Step]) -> None:
        keepalive = steps.pop(at(steps, "comp  keepalive D_m1@0"))
        steps.insert(at(steps, "comp  wait e3"), keepalive)

    assert "wrong result" in unsafe(edited(program(), early))


def test_microbatches_that_write_the_cache_in_the_wrong_order() -> None:
    good = program("sequential")

    def swap(step: Step) -> Step:
        if isinstance(step, Run | Keepalive):
            assert step.action.microbatch is not None
            return replace(step, action=replace(step.action, microbatch=1 - step.action.microbatch))
        return step

    bad = replace(good, steps=tuple(map(swap, good.steps)))
    assert "A0_m1@0 on rank 0 makes a wrong cache@0" in unsafe(bad)


def test_a_second_send_in_flight_destroys_the_first() -> None:
    def early(steps: list[Step]) -> None:
        send = steps.pop(at(steps, "comp  D_m1.send@0 slot 1"))
        steps.insert(at(steps, "comp  D_m0.recv@0 slot 0"), send)

    text = unsafe(edited(program(contract=DEEPEP_LL), early))
    assert text == "D_m0.recv@0 on rank 0 would wait for ever: D_m1.send@0 cleared its data"


def test_a_program_that_starts_at_the_odd_slot() -> None:
    good = program(contract=DEEPEP_LL)
    steps = [
        replace(s, slot=1 - s.slot) if isinstance(s, Run) and s.slot is not None else s
        for s in good.steps
    ]
    text = unsafe(replace(good, steps=tuple(steps)))
    assert text == "D_m0.send@0 on rank 0 takes slot 1, the transport is at slot 0"


def test_a_recv_of_the_wrong_slot() -> None:
    def other(steps: list[Step]) -> None:
        place = at(steps, "comp  D_m0.recv@0 slot 0")
        steps[place] = replace(steps[place], slot=1)

    text = unsafe(edited(program(contract=DEEPEP_LL), other))
    assert text == "D_m0.recv@0 on rank 0 reads slot 1, which holds nothing"


def test_an_odd_number_of_operations_leaves_the_next_call_at_the_wrong_slot() -> None:
    good = program("sequential", contract=DEEPEP_LL, count=1)
    odd = replace(DEEPEP_LL, name="thirds", slots=3, parity=3, max_in_flight=1)
    steps = tuple(replace(s, slot=None) if isinstance(s, Run) else s for s in good.steps)
    text = unsafe(replace(good, steps=steps), odd)
    assert text == "D_m0.send@0 on rank 0 takes slot 0, the transport is at slot 1"


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(
    ("sends", "realign", "safe"), [(1, False, False), (1, True, True), (2, False, True)]
)
def test_regions_behind_one_that_failed(
    sends: int, realign: bool, safe: bool, captured: bool
) -> None:
    good = program(contract=DEEPEP_LL)
    failed = Region(good, captured, stop_after=sends, realign=realign)
    verdict = ProgramWitness.run_regions([failed, Region(good, captured)]).confirm(10)
    assert verdict.safe == safe
    assert safe or verdict.problem.endswith("takes slot 0, the transport is at slot 1")


def test_a_call_behind_one_that_failed_on_two_streams() -> None:
    good = program(contract=NCCL)
    regions = [Region(good, stop_after=3), Region(good)]
    assert ProgramWitness.run_regions(regions).confirm(30).safe


def test_what_blocks_the_host_may_not_be_captured() -> None:
    text = unsafe(program(), capture=True)
    assert text == "D_m0.send@0: gloo may not run under capture"


def test_a_side_stream_that_did_not_fork_from_the_capture() -> None:
    good = program(contract=NCCL)

    def drop(steps: list[Step]) -> None:
        del steps[at(steps, "comm  wait e0")]

    text = unsafe(edited(good, drop), capture=True)
    assert text.startswith("D_m0.send@0 on comm runs outside the capture")


def test_a_side_stream_that_is_not_joined() -> None:
    good = program(contract=NCCL)
    stray = Run("comm", Action(Phase.S, 1, layer=1))
    bad = edited(good, lambda steps: steps.append(stray))
    assert "the caller goes on while rank 0 comm  S_m1@1 has not run" in unsafe(bad)


def test_ranks_that_send_in_another_order() -> None:
    good = program("sequential", contract=DEEPEP_LL, count=2)
    other = program(contract=DEEPEP_LL)
    text = unsafe([good, other])
    assert text.startswith("ranks meet at different collectives over ep: rank 0 at ")


def test_a_rank_that_has_one_collective_less() -> None:
    good = program(contract=DEEPEP_LL)
    last = [at(good.steps, f"comp  C_m1.{half}@1 slot 1") for half in ("send", "recv")]
    less = replace(good, steps=tuple(s for i, s in enumerate(good.steps) if i not in last))
    witness = ProgramWitness([good, less], calls=1)
    text = execute(witness.fresh(), choosers.in_order)
    assert text == (
        "stuck; the heads of the queues are\n"
        "  rank 0 comp  C_m1.send@1 (waits for the other ranks on ep)"
    )
    assert not witness.confirm(2).safe


def tensor_parallel(action: Action) -> str | None:
    """Attention ends in an all-reduce over a communicator of its own."""
    if action.phase is Phase.A1:
        return "tp"
    return "ep" if action.phase.is_communication else None


def test_a_second_communicator_on_the_same_stream_is_safe() -> None:
    good = program(contract=DEEPEP_LL)
    witness = ProgramWitness(good, communicator_of=tensor_parallel)
    assert witness.confirm(30).safe
    assert witness.exhaustive() == Verdict(True, 1)


def test_a_second_communicator_that_nothing_orders_against_the_first_gets_stuck() -> None:
    text = unsafe(program(contract=NCCL), communicator_of=tensor_parallel)
    assert text.startswith("stuck; the heads of the queues are\n")
    assert "the device runs" in text


def test_communicators_in_opposite_order_on_two_ranks_get_stuck() -> None:
    good = program(contract=DEEPEP_LL)

    def later(steps: list[Step]) -> None:
        send = steps.pop(at(steps, "comp  D_m0.send@0 slot 0"))
        steps.insert(at(steps, "comp  A1_m1@0") + 1, send)

    other = edited(good, later)
    for same in (good, other):
        assert ProgramWitness(same, communicator_of=tensor_parallel).confirm(5).safe
    assert unsafe([good, other], communicator_of=tensor_parallel) == (
        "stuck; the heads of the queues are\n"
        "  rank 0 comp  D_m0.send@0 (waits for the other ranks on ep)\n"
        "  rank 1 comp  A1_m1@0 (waits for the other ranks on tp)"
    )


def test_a_send_on_another_stream_than_the_contract_names() -> None:
    good = program(contract=NCCL)
    steps = [replace(s, stream=COMP) if not isinstance(s, Record | Wait) else s for s in good.steps]
    assert unsafe(replace(good, steps=tuple(steps))) == "D_m0.send@0 on comp; nccl wants it on comm"


def test_damaged_programs_are_executed_whatever_they_look_like() -> None:
    """Nothing that can be written as steps may break the witness itself."""
    draw = random.Random(0)
    for contract in (GLOO, DEEPEP_LL):
        good = program(contract=contract)
        for _ in range(60):
            steps = [s for s in good.steps if draw.random() > 0.1]
            steps += draw.choices(good.steps, k=3)
            for _ in range(4):
                one, other = draw.randrange(len(steps)), draw.randrange(len(steps))
                steps[one], steps[other] = steps[other], steps[one]
            steps.append(Run(COMP, Action(Phase.D, 7, Half.RECV, 9)))
            verdict = ProgramWitness(replace(good, steps=tuple(steps)), reference=good).confirm(5)
            assert not verdict.safe
    empty = replace(program(), steps=())
    assert not ProgramWitness(empty, reference=program()).confirm(2).safe


def test_the_witness_knows_nothing_of_the_verifier() -> None:
    """No import of the certificates, of the passes, or of the effects that they read."""
    folder = Path(dbo_fx.witness.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong = ("dbo_fx.certificates", "dbo_fx.passes", "dbo_fx.effects", "dbo_fx.check")
            assert not [n for n in names if n.startswith(wrong)], file.name


def test_programs_are_witnessed_without_torch() -> None:
    code = "import sys, dbo_fx.witness; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
