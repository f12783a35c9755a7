"""What the compiler makes of the model: no weights are loaded, no other rank and no GPU needed."""

from pathlib import Path

import torch

import dbo_fx
from dbo_fx.testing import (
    assert_certified,
    assert_overlaps,
    assert_peak_below,
    assert_same_schedule,
    compile_model,
)
from moe_model import example_tokens, moe_model

SCHEDULE = Path(__file__).parent.parent / "shared_with_dispatch.dbo"
OPTIONS = {"schedule": str(SCHEDULE)}


def test_the_program(golden, pretended_ranks):
    compiled = compile_model(moe_model(pretended_ranks), example_tokens(), options=OPTIONS)
    golden(compiled)
    golden.lanes(compiled, layer=1)
    assert_same_schedule(compiled, SCHEDULE, events=False)
    assert_certified(compiled)
    assert_overlaps(compiled, comm="D m1", compute="S m0")
    assert_peak_below(compiled, ratio=2.0)


def test_one_rank_computes_what_the_model_computes(compiled_programs, one_rank):
    model, tokens = moe_model(one_rank, layers=1), torch.randn(8, 16)
    torch._dynamo.mark_dynamic(tokens, 0)
    split = torch.compile(model, backend="dbo_fx", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(split(tokens), model(tokens))
    assert isinstance(compiled_programs[-1], dbo_fx.CompiledProgram)
    assert len(compiled_programs) == 1
