"""Plans: what ranks compare after a compile and before every step, and what a difference names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import dbo_fx
from dbo_fx import backend
from dbo_fx.backend import compile_captured, graph_digest
from dbo_fx.certificates.of_graph import execution_of_graph
from dbo_fx.certificates.ranks import prove_ranks
from dbo_fx.certificates.variants import prove_variants, variants_of
from dbo_fx.contracts import GLOO, contract
from dbo_fx.errors import AgreementError, VerificationError
from dbo_fx.options import Options
from dbo_fx.plan_digest import Plan, Ran, fallback_digest, note
from dbo_fx.wrapping import wrap
from rank_pool import RankPool
from small_moe import CachedMoe, H, PlainMoe, TwoLaunches, fake_ranks, rows, traced_model

PLAN = Plan("sequential", 1, 2, GLOO, "aa", "bb", "verify static, 0 to test", "no limit")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks():
        yield


def plan_of(model: type[PlainMoe] = PlainMoe, layers: int = 1, **options: Any) -> Plan:
    """The plan of a freshly compiled model."""
    return compile_captured(traced_model(model, layers).fresh(), Options(**options)).plan


def test_a_plan_is_the_same_whenever_it_is_made_and_begins_with_its_hash() -> None:
    plan = plan_of()
    assert plan == plan_of()
    assert str(plan).startswith(f"{plan.digest}: mlp_shared_overlap, 1 layers in 2 microbatches")
    assert plan.split in str(plan)
    assert plan.unsplit in str(plan)
    compiled = compile_captured(traced_model().fresh(), Options())
    assert graph_digest(compiled) == plan.digest


def test_all_that_changes_communication_changes_the_hash() -> None:
    plan = plan_of()
    others = [
        plan_of(schedule="sequential"),
        plan_of(schedule="sequential", num_microbatches=3),
        plan_of(layers=2),
        plan_of(TwoLaunches),
        plan_of(verify="static"),
        plan_of(max_memory_ratio=50.0),
        replace(plan, contract=replace(GLOO, max_in_flight=1)),
    ]
    assert len({p.digest for p in (plan, *others)}) == 1 + len(others)
    assert plan.unsplit == others[0].unsplit
    assert plan.split != others[0].split
    assert "1 in flight" in str(others[-1])


def in_order(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", "0") + funcol.all_gather_tensor(x, 0, "0").sum()


def the_other_way(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, "0").sum() + funcol.all_reduce(x, "sum", "0")


def dynamo_graph(model: Any) -> torch.fx.Graph:
    """What Dynamo hands to a backend."""
    found: list[torch.fx.Graph] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(torch.zeros(2, H))
    return found[0]


def test_a_fallback_compares_the_order_of_its_collectives() -> None:
    one, other = (
        fallback_digest(dynamo_graph(in_order)),
        fallback_digest(dynamo_graph(the_other_way)),
    )
    assert one.startswith("fallback ")
    assert one.endswith(", 2 collectives")
    assert one != other
    assert one == fallback_digest(dynamo_graph(in_order))


def test_only_what_runs_inside_is_noted_and_each_plan_once() -> None:
    note(lambda: PLAN)
    ran = Ran()
    assert str(ran) == ""
    other = replace(PLAN, schedule="other")
    for _ in range(2):
        with ran:
            note(lambda: PLAN)
            note(lambda: other)
    note(lambda: replace(PLAN, layers=9))
    assert ran.plans == [str(PLAN), str(other)]
    assert str(ran) == f"{PLAN} | {other}"


# The variants of a compiled model.


@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
@pytest.mark.parametrize("model", [PlainMoe, TwoLaunches, CachedMoe])
def test_every_variant_of_a_compiled_model_is_proven(model: type[PlainMoe], schedule: str) -> None:
    compiled = compile_captured(traced_model(model, 2).fresh(), Options(schedule=schedule))
    state = compiled._state
    split = execution_of_graph(state, contract(compiled.program.transport)).execution
    certificate = prove_variants(state, split)
    names = [c.variant for c in certificate.variants]
    assert names[0] == "split"
    assert {"empty microbatch", "other batch sizes", "unsplit", "fallback"} < set(names)
    launches = {c.variant: sum(c.launches.values()) for c in certificate.variants}
    assert launches["split"] == 2 * launches["unsplit"]
    assert launches["unsplit"] == sum(len(c.launches) for c in state.communications)
    assert all(c.ranks == 2 for c in certificate.variants)
    variants = variants_of(state, split)
    with pytest.raises(VerificationError, match="two variants in one step"):
        prove_ranks([variants["split"], variants["unsplit"]])


def test_a_transport_with_slots_is_proven_too() -> None:
    options = Options(transport="deepep_ll", schedule="sequential")
    compiled = compile_captured(traced_model(PlainMoe, 2).fresh(), options)
    split = execution_of_graph(compiled._state, contract("deepep_ll")).execution
    assert len(prove_variants(compiled._state, split).variants) == 6
    assert "over deepep_ll, 1 in flight" in str(compiled.plan)


# Two ranks.


def marked(count: int) -> Tensor:
    x = rows(count)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def compiled_model(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)


def run_wrapped(_: int) -> tuple[list[str], list[str]]:
    """Two steps of a wrapped model; what was compared before the second one."""
    model = wrap(compiled_model(PlainMoe(), verify="static"))
    with torch.no_grad():
        model(rows(4))
        first = list(model.ran.plans)
        model(rows(6))
    assert model.ran.plans == [str(dbo_fx.compilations()[-1].plan)]
    return first, model.ran.plans


def test_a_wrapped_model_compares_the_plans_that_ran(ranks: RankPool) -> None:
    (first, second), other = ranks(run_wrapped, timeout_s=120)
    assert first == second
    assert len(first) == 1
    assert other == (first, second)


def run_changed_plan(rank: int) -> str:
    """Rank 1 runs another schedule from the second step on."""
    plans = [PLAN, replace(PLAN, schedule=f"schedule of rank {rank}")]

    def program(x: Tensor) -> Tensor:
        note(lambda: plans[0])
        return x

    model = wrap(program, unsplit=program)
    model(rows(4))
    plans.reverse()
    model(rows(4))
    with pytest.raises(AgreementError) as caught:
        model(rows(4))
    return str(caught.value)


def test_a_plan_that_changes_on_one_rank_is_named_before_the_next_step(ranks: RankPool) -> None:
    for message in ranks(run_changed_plan, timeout_s=60):
        assert message.startswith("plan, comparison ")
        assert "schedule of rank 0, 1 layers in 2 microbatches over gloo" in message
        assert "schedule of rank 1, 1 layers in 2 microbatches over gloo" in message
        assert "All ranks must run a step with the same one" in message


class Noisy(PlainMoe):
    """Cannot be split."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x + torch.rand_like(x))


class NoisyTwice(Noisy):
    """Communicates otherwise."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        return super().experts(layer, super().experts(layer, h))


def run_other_fallback(rank: int) -> str:
    model = (Noisy, NoisyTwice)[rank]()
    call = compiled_model(
        model, on_unsupported="fallback", inner_backend="eager", agree_timeout_s=30.0
    )
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        call(marked(6))
    assert isinstance(caught.value.inner_exception, AgreementError)
    return str(caught.value.inner_exception)


def test_ranks_that_fall_back_with_other_collectives_are_stopped(ranks: RankPool) -> None:
    for message in ranks(run_other_fallback, timeout_s=120):
        assert ", 2 collectives" in message
        assert ", 4 collectives" in message


def run_unproven(rank: int) -> str:
    """The verifier of rank 1 refuses the program."""
    original = backend.compile_captured

    def refuses(*_: Any) -> Any:
        raise VerificationError("step 5 reads what nobody wrote\n  the lanes")

    backend.compile_captured = refuses if rank == 1 else original
    try:
        call = compiled_model(PlainMoe(), on_unsupported="fallback", agree_timeout_s=60.0)
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            call(marked(6))
    finally:
        backend.compile_captured = original
    return str(caught.value.inner_exception)


def test_a_program_that_one_rank_cannot_prove_stops_the_others_at_once(ranks: RankPool) -> None:
    other, own = ranks(run_unproven, timeout_s=50)
    assert "rank 1 has 'refused: step 5 reads what nobody wrote'" in other
    assert own.startswith("step 5 reads what nobody wrote")
