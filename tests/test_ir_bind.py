"""Binding a schedule without a model gives the program that the streams pass makes of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dbo_fx import schedules
from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.contracts import CONTRACTS, GLOO, NCCL
from dbo_fx.errors import ScheduleError
from dbo_fx.ir import COMM, Merge, Record, Run, Wait, parse_program
from dbo_fx.ir_bind import bound_program

GOLDEN = Path(__file__).parent / "golden"


def test_the_saved_program():
    program = bound_program(schedules.load("mlp_shared_overlap"), 1, GLOO)
    assert str(program) == (GOLDEN / "saved_program.dbo").read_text(encoding="utf-8")


# The small model does not say how many experts it has, which transports of rows must know.
@pytest.mark.parametrize("transport", [n for n, c in CONTRACTS.items() if "rows" not in c.carries])
@pytest.mark.parametrize("schedule", schedules.names())
@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_the_program_of_the_compiled_model(transport, schedule, layers):
    pytest.importorskip("torch")
    from small_moe import run_passes, traced_model

    order = schedules.load(schedule)
    contract = CONTRACTS[transport]
    count = order.num_microbatches or 2
    compiled = run_passes(
        traced_model(layers=layers).fresh(), "streams", schedule, count, transport=transport
    )
    assert str(bound_program(order, layers, contract, count)) == str(compiled.program)


def test_every_program_reads_back():
    for contract in CONTRACTS.values():
        program = bound_program(schedules.load("sequential"), 2, contract, 3)
        assert parse_program(str(program)) == program


def test_on_one_stream_there_are_no_events_and_slots_alternate():
    program = bound_program(schedules.load("mlp_shared_overlap"), 2, CONTRACTS["deepep_ll"])
    assert not any(isinstance(step, Record | Wait) for step in program.steps)
    sends = [s.slot for s in program.steps if isinstance(s, Run) and s.action.half is not None]
    assert sends == [0, 0, 1, 1] * 4


def test_one_microbatch_is_not_merged():
    program = bound_program(schedules.load("sequential"), 1, NCCL, 1)
    assert not any(isinstance(step, Merge) for step in program.steps)


def test_a_transport_whose_recvs_run_beside_compute():
    contract = replace(NCCL, name="beside", recv_stream=COMM)
    program = bound_program(schedules.load("mlp_shared_overlap"), 2, contract)
    assert prove(execution_of_program(program, contract)).communications == 8


def test_numbers_that_do_not_fit():
    with pytest.raises(ScheduleError, match="0 layers"):
        bound_program(schedules.load("sequential"), 0, NCCL, 2)
