"""Unequal rows on two ranks, agreement, padding, and refusals that leave nobody waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dbo_fx.comm import groups
from dbo_fx.decision import AgreementPolicy, BatchKind
from dbo_fx.errors import AgreementError, OptionError
from dbo_fx.wrapping import WrappedModel, WrapStatistics, original_of, wrap
from rank_pool import RankPool

H = 4
OPS = torch.ops.dbo_fx
CAPTURED: list[torch.fx.GraphModule] = []


class Layer(nn.Module):
    """Rows times a weight, sent to all ranks and summed back; R times `x * scale` per row."""

    def __init__(self) -> None:
        """Take the default group."""
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, H + 1), requires_grad=False)
        self.group = groups.name_of(None)

    def forward(self, x: Tensor, ids: Tensor, table: Tensor | None = None) -> dict[str, Any]:
        """x [T, H], ids [T, 1], table [N, H] of any N."""
        rows, all_ids, _ = OPS.dispatch(x * self.scale, ids, ids, self.group)
        summed = OPS.combine(rows + all_ids, x.shape[0], self.group)
        total = None if table is None else table.sum()
        return {"rows": summed, "seen": (x.shape[0], x), "table": table, "total": total}


def capturing(gm: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    """A backend that runs what Dynamo captured and remembers it."""
    CAPTURED.append(gm)
    return gm.forward


def compiled_layer() -> tuple[Layer, Any]:
    """A layer and its compiled form, with no graphs remembered."""
    torch._dynamo.reset()
    CAPTURED.clear()
    layer = Layer()
    return layer, torch.compile(layer, backend=capturing, fullgraph=True)


def batch(rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """x [T, H] and ids [T, 1], rank visible."""
    x = torch.arange(rows * H, dtype=torch.float32).view(rows, H) + 100 * rank
    return x, torch.arange(rows)[:, None] + rank


def run_unequal(rank: int, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Many steps with sizes given for each rank."""
    layer, compiled = compiled_layer()
    model = wrap(compiled, unsplit=layer)
    right, seen = [], []
    for pair in sizes:
        x, ids = batch(rank, pair[rank])
        out = model(x, ids=ids)
        right.append(torch.equal(out["rows"], 2 * (x * layer.scale + ids)))
        right.append(torch.equal(out["seen"][1], x))
        seen.append(out["seen"][0])
    return {
        "right": all(right),
        "seen": seen,
        "graphs": len(CAPTURED),
        "statistics": model.statistics,
    }


def test_unequal_rows_from_none_to_three(ranks: RankPool) -> None:
    sizes = [(a, b) for a in range(4) for b in range(4)] + [(9, 2), (0, 6), (5, 5)]
    results = ranks(run_unequal, sizes)
    for rank, result in enumerate(results):
        assert result["right"]
        assert result["seen"] == [4] * 16 + [9, 6, 5]
        assert result["graphs"] == 1
        rows = sum(pair[rank] for pair in sizes)
        assert result["statistics"].split_steps == len(sizes)
        assert result["statistics"].rows == rows
        assert result["statistics"].padding_rows == 4 * 16 + 20 - rows


def run_not_allowed(rank: int) -> dict[str, Any]:
    """Rank 1 allows only batches of three rows and more."""
    layer, compiled = compiled_layer()
    called = []

    def unsplit(x: Tensor, ids: Tensor) -> Any:
        called.append(x.shape[0])
        return layer(x, ids)

    model = wrap(compiled, allow=(lambda rows: rows >= 3) if rank == 1 else True, unsplit=unsplit)
    right = True
    for rows in (5, 2, 3, 0):
        x, ids = batch(rank, rows)
        right &= torch.equal(model(x, ids)["rows"], 2 * (x * layer.scale + ids))
    return {"right": right, "called": called, "statistics": model.statistics}


def test_one_rank_that_does_not_allow_it_decides_for_all(ranks: RankPool) -> None:
    for result in ranks(run_not_allowed):
        assert result["right"]
        assert result["called"] == [4, 4]
        assert result["statistics"].split_steps == 2
        assert result["statistics"].unsplit_steps == {"ranks [1] did not allow it": 2}
        assert str(result["statistics"]).splitlines() == [
            "2 steps split, 2 not split; 10 rows, 7 rows of padding",
            "  2 not split: ranks [1] did not allow it",
        ]


def run_other_tensors(rank: int) -> dict[str, Any]:
    """A table that has as many rows as this rank has tokens, but holds none."""
    layer, compiled = compiled_layer()
    x, ids = batch(rank, 3)
    table = torch.ones(3, H)
    by_name = wrap(compiled, token_args=("ids", "x"), unsplit=layer)(x, ids, table)
    by_size = wrap(compiled, unsplit=layer)(x, ids, table=torch.ones(7, H))
    return {
        "by name": (by_name["rows"].shape[0], by_name["table"].shape[0], by_name["total"]),
        "by size": (by_size["rows"].shape[0], by_size["table"].shape[0], by_size["total"]),
        "untouched": x.shape[0],
    }


def test_tensors_that_hold_no_tokens_keep_their_size(ranks: RankPool) -> None:
    for result in ranks(run_other_tensors):
        assert result["by name"][:2] == (3, 3)
        assert result["by name"][2] == 3 * H
        assert result["by size"][:2] == (3, 7)
        assert result["by size"][2] == 7 * H
        assert result["untouched"] == 3


def run_bad_arguments(rank: int) -> tuple[str, str]:
    """Rank 1 forgets its tokens; the next step works again."""
    layer, compiled = compiled_layer()
    model = wrap(compiled, unsplit=layer)
    x, ids = batch(rank, 2)
    error: type[Exception] = AgreementError if rank == 0 else OptionError
    arguments = (x, ids) if rank == 0 else (None, None)
    with pytest.raises(error) as caught:
        model(*arguments)
    return str(caught.value), str(model(x, ids)["rows"].shape)


def test_a_rank_without_tokens_stops_all_ranks_and_nobody_waits(ranks: RankPool) -> None:
    (other, first), (own, second) = ranks(run_bad_arguments, timeout_s=60)
    assert "ranks [1] of 2 could not prepare their arguments" in other
    assert "found no tensor with a dimension 0 among the arguments" in own
    assert first == second == "torch.Size([2, 4])"


POLICY = AgreementPolicy(decode_threshold=4, prefill_threshold=8, buckets=(6, 16), timeout_s=60)


def run_policy(rank: int, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Many steps under a policy; a rank with more than 9 rows has prefill among them."""
    layer, compiled = compiled_layer()

    def kind(rows: int) -> BatchKind:
        return BatchKind.PREFILL if rows > 9 else BatchKind.DECODE

    model = wrap(compiled, unsplit=layer, policy=POLICY, kind=kind, plan="the same")
    right, decisions, seen = True, [], []
    for pair in sizes:
        x, ids = batch(rank, pair[rank])
        out = model(x, ids)
        right &= torch.equal(out["rows"], 2 * (x * layer.scale + ids))
        decisions.append(model.statistics.decision)
        seen.append(out["seen"][0])
    return {"right": right, "decisions": decisions, "seen": seen, "statistics": model.statistics}


def test_a_policy_decides_by_kind_and_pads_to_buckets(ranks: RankPool) -> None:
    sizes = [(4, 5), (3, 5), (9, 0), (10, 7), (10, 8), (20, 9), (0, 0)]
    first, second = ranks(run_policy, sizes)
    for result in (first, second):
        assert result["right"]
        assert result["seen"] == [6, 6, 16, 16, 16, 20, 6]
        assert [d.split for d in result["decisions"]] == [1, 0, 0, 0, 1, 1, 0]
        assert result["statistics"].split_steps == 3
        assert result["statistics"].unsplit_steps == {
            "ranks [0] have fewer than 4 rows (decode-only)": 1,
            "ranks [1] have fewer than 4 rows (decode-only)": 1,
            "ranks [1] have fewer than 8 rows (with prefill)": 1,
            "ranks [0, 1] have fewer than 4 rows (decode-only)": 1,
        }
    assert first["decisions"] == second["decisions"]


def run_other_options(rank: int) -> tuple[str, str, bool]:
    """Models that were wrapped otherwise on each rank, then one that was not."""
    layer, compiled = compiled_layer()
    x, ids = batch(rank, 4)
    said = []
    for options in ({"plan": f"plan {rank}"}, {"num_microbatches": 2 + rank}):
        with pytest.raises(AgreementError) as caught:
            wrap(compiled, unsplit=layer, **options)(x, ids)
        said.append(str(caught.value))
    out = wrap(compiled, unsplit=layer, plan="the same")(x, ids)
    return said[0], said[1], torch.equal(out["rows"], 2 * (x * layer.scale + ids))


def test_models_wrapped_otherwise_stop_all_ranks(ranks: RankPool) -> None:
    for plan, policy, right in ranks(run_other_options):
        assert "'plan 0'" in plan
        assert "'plan 1'" in plan
        assert "least_rows=4" in policy
        assert "least_rows=6" in policy
        assert right


def run_bad_kind(rank: int) -> str:
    """The kind cannot be told on rank 1."""
    layer, compiled = compiled_layer()

    def kind(rows: int) -> BatchKind:
        if rank == 1:
            raise KeyError("no such request")
        return BatchKind.DECODE

    with pytest.raises(AgreementError if rank == 0 else KeyError) as caught:
        wrap(compiled, unsplit=layer, kind=kind)(*batch(rank, 4))
    return str(caught.value)


def test_a_rank_that_cannot_tell_the_kind_stops_all_ranks(ranks: RankPool) -> None:
    other, own = ranks(run_bad_kind, timeout_s=60)
    assert "ranks [1] of 2 could not prepare their arguments" in other
    assert "no such request" in own


def double(x: Tensor, **rest: Tensor) -> Tensor:
    """A function of columns of tokens."""
    return 2 * x + rest["y"]


def alone(**options: Any) -> WrappedModel:
    """The function in this process, without torch.distributed."""
    torch._dynamo.reset()
    return wrap(torch.compile(double, backend="eager", fullgraph=True), unsplit=double, **options)


@pytest.mark.parametrize("columns", [0, 1, 3, 8])
def test_another_dimension_may_hold_the_rows(columns: int) -> None:
    x = torch.arange(5.0 * columns).view(5, columns)
    model = alone(split_dim=1, num_microbatches=3, token_args=["y", "x"])
    assert torch.equal(model(x, y=x), 3 * x)
    assert model.statistics.padding_rows == max(0, 6 - columns)


def test_token_args_must_be_passed_and_have_one_size() -> None:
    with pytest.raises(OptionError, match=r"token_args \['z'\] were not passed, found"):
        alone(token_args=["z"])(torch.ones(2, 2), y=torch.ones(2, 2))
    with pytest.raises(OptionError, match=r"have sizes \[1, 2\] along dimension 0"):
        alone(token_args=["x", "y"])(torch.ones(2, 2), y=torch.ones(1, 2))


def test_unsplit_is_the_original_behind_the_compiled_model() -> None:
    module = nn.Linear(2, 2)
    assert original_of(torch.compile(module, backend="eager")) is module
    assert original_of(torch.compile(double, backend="eager")) is double
    assert original_of(double) is None
    assert original_of(wrap(torch.compile(module, backend="eager")).unsplit) is module
    with pytest.raises(OptionError, match="found no original behind function"):
        wrap(double)


@pytest.mark.parametrize("options", [{"num_microbatches": 0}, {"split_dim": -1}])
def test_arguments_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="wanted 1 or more microbatches"):
        alone(**options)


def test_new_statistics_are_empty() -> None:
    assert str(WrapStatistics()) == "0 steps split, 0 not split; 0 rows, 0 rows of padding"


@dataclass
class Plain:
    """A dataclass that pytree does not know."""

    rows: torch.Tensor
    note: str


def in_a_dataclass(rank: int) -> tuple[int, str]:
    model = wrap(lambda x: Plain(x + 1, "kept"), unsplit=lambda x: x)
    result = model(torch.zeros(rank + 1, 2))
    return len(result.rows), result.note


def test_rows_in_a_dataclass_are_cut(ranks: Any) -> None:
    assert ranks(in_a_dataclass) == [(1, "kept"), (2, "kept")]


def padded_with(rank: int) -> list[int]:
    model = wrap(lambda x, slots: slots, unsplit=lambda x: x, pad={"slots": -1})
    seen: list[int] = []
    model.compiled = lambda x, slots: seen.extend(slots.tolist())
    model(torch.zeros(rank + 1, 2), slots=torch.arange(rank + 1))
    return seen


def test_added_rows_hold_the_named_value(ranks: Any) -> None:
    assert ranks(padded_with) == [[0, -1, -1, -1], [0, 1, -1, -1]]


def unknown_pad(rank: int) -> None:
    wrap(lambda x: x, unsplit=lambda x: x, pad={"slot": -1})(torch.zeros(1, 2))


def test_a_pad_value_for_no_argument_is_refused(ranks: Any) -> None:
    with pytest.raises(OptionError, match=r"pad \['slot'\] were not passed"):
        ranks(unknown_pad)
