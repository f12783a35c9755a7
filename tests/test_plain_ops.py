"""What carries the ops that models call in one piece: eager models, tests of the first call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx.comm import groups, plain_ops_over, transport_for
from dbo_fx.comm.gloo import GlooReference
from dbo_fx.comm.plain import plain_carrier
from dbo_fx.comm.staging import SharedStaging
from dbo_fx.errors import OptionError
from rank_pool import RankPool
from small_moe import CachedMoe, PlainMoe, arguments, one_rank, rows

CE = "copy_engine"
OPS = torch.ops.dbo_fx


@pytest.fixture
def alone() -> Iterator[str]:
    """A gloo group of this process alone."""
    with one_rank() as name:
        yield name


@pytest.mark.parametrize(
    ("backend", "wanted"), [("nccl", "nccl"), ("gloo", CE), ("fake", CE), (None, CE)]
)
def test_on_cuda_the_group_decides(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, wanted: str
) -> None:
    monkeypatch.setattr(groups, "backend_name", lambda name, device_type: backend)
    assert plain_carrier("cuda", "any") is transport_for("cuda", wanted)


def test_a_gloo_group_carries_cuda_tensors_by_copies(alone: str) -> None:
    assert plain_carrier("cuda", alone) is transport_for("cuda", CE)
    assert plain_carrier("cpu", alone) is transport_for("cpu", "gloo")


def test_what_is_chosen_holds_within_the_body(alone: str) -> None:
    with plain_ops_over("loopback"):
        assert plain_carrier("cuda", alone) is transport_for("cuda", "loopback")
        with plain_ops_over(CE):
            assert plain_carrier("cpu", alone) is transport_for("cpu", CE)
        assert plain_carrier("cpu", alone) is transport_for("cpu", "loopback")
    assert plain_carrier("cpu", alone) is transport_for("cpu", "gloo")


@pytest.mark.parametrize("name", ["deepep_ll", "deepep_ht", "deepep_v2", "unknown"])
def test_what_carries_no_plain_op_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name), plain_ops_over(name):
        pass


@pytest.mark.parametrize(("model", "verify"), [(PlainMoe, "numeric"), (CachedMoe, "static")])
def test_the_tests_of_the_first_call_use_the_programs_transport(
    alone: str, monkeypatch: pytest.MonkeyPatch, model: type[PlainMoe], verify: str
) -> None:
    """The comparison, or the row-dependence test of a cache; neither goes over gloo."""

    def launch(*_: object) -> None:
        raise AssertionError("went over gloo")

    monkeypatch.setattr(GlooReference, "launch", launch)
    torch._dynamo.reset()
    layers = model(1)
    options = {"transport": CE, "verify": verify}
    compiled = torch.compile(layers, backend="dbo_fx", fullgraph=True, options=options)
    given = arguments(layers)
    torch._dynamo.mark_dynamic(given[0], 0)
    with torch.no_grad():
        compiled(*given)
    program = dbo_fx.compilations()[-1]
    found = program.checked if verify == "numeric" else program.tested
    assert found is not None
    assert ("agrees" if verify == "numeric" else "passed") in found


def test_a_plain_op_is_a_region_of_its_own(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood before it may have been a replay, which leaves no trace on the host."""
    barriers = []
    barrier = SharedStaging.barrier
    monkeypatch.setattr(
        SharedStaging, "barrier", lambda self: (barriers.append(1), barrier(self))[1]
    )
    x = rows(4)
    with plain_ops_over(CE):
        OPS.combine(x, 4, alone)
        first = len(barriers)
        OPS.combine(x, 4, alone)
    assert len(barriers) - first == 2


def run_eager(rank: int, transport: str) -> list[Tensor]:
    """An eager model."""
    model = PlainMoe(2)
    with torch.no_grad(), plain_ops_over(transport):
        return [model(rows(count, seed=rank)) for count in (3, 8)]


def test_an_eager_model_runs_over_copies(ranks: RankPool) -> None:
    for over_gloo, over_copies in zip(ranks(run_eager, "gloo"), ranks(run_eager, CE), strict=True):
        assert all(map(torch.equal, over_gloo, over_copies))
