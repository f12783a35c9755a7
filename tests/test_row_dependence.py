"""The row-dependence test where a second size is dynamic: no layout says how large it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx.capture import value_of
from dbo_fx.comm import groups
from dbo_fx.row_dependence import RowDependence
from dbo_fx.symbols import expression
from small_moe import one_rank, run_passes, traced

H = 8
OPS = torch.ops.dbo_fx
WEIGHT = torch.randn(H, H, generator=torch.Generator().manual_seed(3)) * H**-0.5
TABLE = torch.randn(16, H, generator=torch.Generator().manual_seed(4))


def flipped(x: Tensor) -> Tensor:
    """The sums over the rows from each one on."""
    return x.flip(0).cumsum(0).flip(0)


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "by_row": lambda x: x * 2 + 1,
    "looks_back": lambda x: x.cumsum(0),
    "looks_ahead": flipped,
    "centers": lambda x: x - x.mean(0),
    "adds_up": lambda x: x.sum(0),
}
for _name, _function in UNKNOWN.items():
    torch.library.define(f"row_tests::{_name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"row_tests::{_name}", "CPU", _function)
    torch.library.register_fake(
        f"row_tests::{_name}",
        (lambda x: torch.empty_like(x[0])) if _name == "adds_up" else torch.empty_like,
    )
    dbo_fx.register_local(f"row_tests::{_name}")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A real group of one rank."""
    with one_rank():
        yield


def experts(flat: Tensor, inside: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """[T, H] -> [T, H] through gate, dispatch, an expert and combine."""
    weights, ids = flat.sigmoid().topk(2)
    rows, ids, weights = OPS.dispatch(flat, ids, weights, groups.name_of(None))
    y = rows @ WEIGHT if inside is None else inside(rows, ids)
    return OPS.combine(y * weights.sum(-1, keepdim=True), flat.shape[0], groups.name_of(None))


def on_rows(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """[..., H] -> [..., H]: a change of the flattened rows, then experts."""

    def model(x: Tensor) -> Tensor:
        flat = change(x.reshape(-1, x.shape[-1]))
        return (flat + experts(flat)).view_as(x)

    return model


def unknown(name: str) -> Callable[[Tensor], Tensor]:
    """A model with an op that has no rule, on flattened rows."""
    return on_rows(lambda flat: getattr(torch.ops.row_tests, name)(flat))


def found(
    model: Callable[[Tensor], Tensor], x: Tensor, dims: list[int], split: int, count: int = 2
) -> tuple[RowDependence, str | None]:
    """The row test of a model whose input is dynamic along some dims, and what it says."""
    trace = traced(model, (x,), dims, split)  # type: ignore[arg-type]
    test = RowDependence(run_passes(trace.fresh(), "microbatch", "sequential", count))
    assert test.obligations, "nothing is left to the test"
    return test, test.run(trace.args())


def noise(*shape: int) -> Tensor:
    """Seeded values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# Rows [B*S], both sizes dynamic. Dim 0 is split: S lies inside of it; dim 1: B lies outside of it.
EITHER = pytest.mark.parametrize("split", [0, 1], ids=["inner", "outer"])


@EITHER
@pytest.mark.parametrize("count", [2, 3])
def test_an_unknown_op_that_works_by_row_is_cleared(split: int, count: int) -> None:
    test, error = found(unknown("by_row"), noise(6, 9, H), [0, 1], split, count)
    assert {o.kind for o in test.obligations.values()} == {"unknown"}
    assert error is None


@EITHER
def test_a_result_without_rows_is_found_to_come_from_rows(split: int) -> None:
    model = on_rows(lambda flat: flat + torch.ops.row_tests.adds_up(flat))
    _, error = found(model, noise(4, 6, H), [0, 1], split)
    assert error is not None
    assert "its result has no rows, but moves with their contents" in error


@EITHER
@pytest.mark.parametrize("name", ["looks_back", "looks_ahead", "centers"])
def test_an_unknown_op_that_looks_at_other_rows_is_found(split: int, name: str) -> None:
    _, error = found(unknown(name), noise(4, 6, H), [0, 1], split)
    assert error is not None
    assert f"{name} (row_tests.{name}.default)" in error
    assert "rows move when the contents of" in error
    assert "has no rule" in error


@EITHER
def test_rows_that_are_sorted_by_expert_and_put_back_are_cleared(split: int) -> None:
    test, error = found(on_rows(lambda f: experts(f, put_back)), noise(4, 6, H), [0, 1], split)
    assert {o.kind for o in test.obligations.values()} == {"region"}
    assert error is None


@EITHER
def test_rows_that_are_sorted_and_not_put_back_are_found(split: int) -> None:
    test, error = found(on_rows(lambda f: experts(f, left_sorted)), noise(4, 6, H), [0, 1], split)
    assert {o.kind for o in test.obligations.values()} == {"region"}
    assert error is not None
    assert "mixes rows of the batch" in error
    assert "between dispatch and combine in another order" in error


def put_back(rows: Tensor, ids: Tensor) -> Tensor:
    """The experts in groups, as grouped matmuls want them."""
    _, order = torch.sort(ids[:, 0], stable=True)
    return (rows[order] @ WEIGHT)[torch.argsort(order)]


def left_sorted(rows: Tensor, ids: Tensor) -> Tensor:
    """What forgets to undo the order."""
    _, order = torch.sort(ids[:, 0], stable=True)
    return rows[order] @ WEIGHT


@EITHER
def test_a_lookup_of_flattened_ids_gives_rows_to_change(split: int) -> None:
    ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(1))

    def looks_up(name: str) -> Callable[[Tensor], Tensor]:
        def model(x: Tensor) -> Tensor:
            rows = getattr(torch.ops.row_tests, name)(TABLE[x.reshape(-1)])
            return (rows + experts(rows)).view(*x.shape, H)

        return model

    assert found(looks_up("by_row"), ids, [0, 1], split)[1] is None
    error = found(looks_up("centers"), ids, [0, 1], split)[1]
    assert error is not None
    assert "centers (row_tests.centers.default)" in error


@pytest.mark.parametrize(
    ("shape", "dims", "split"),
    [
        ((3, 4, 2, H), [1], 1),
        ((3, 4, 5, H), [1, 2], 1),
        ((5, 4, 3, H), [0, 1], 1),
        ((4, 3, 5, H), [0, 2], 0),
    ],
    ids=["static", "dynamic inside", "dynamic outside", "half of what is inside"],
)
def test_static_sizes_may_lie_around_the_rows_as_well(
    shape: tuple[int, ...], dims: list[int], split: int
) -> None:
    assert found(unknown("by_row"), noise(*shape), dims, split)[1] is None
    error = found(unknown("looks_back"), noise(*shape), dims, split)[1]
    assert error is not None
    assert "looks_back (row_tests.looks_back.default)" in error


@EITHER
@pytest.mark.parametrize("name", ["by_row", "looks_back"])
def test_a_part_of_a_dynamic_size_is_dynamic(split: int, name: str) -> None:
    def model(x: Tensor) -> Tensor:
        part = x[:, ::2] if split == 0 else x[::2]
        flat = getattr(torch.ops.row_tests, name)(part.reshape(-1, H))
        return (flat + experts(flat)).view_as(part)

    _, error = found(model, noise(4, 6, H), [0, 1], split)
    assert (error is None) == (name == "by_row")
    assert error is None or "looks_back (row_tests.looks_back.default)" in error


@pytest.mark.parametrize("name", ["by_row", "adds_up"])
def test_rows_between_two_dynamic_sizes_are_refused_with_what_to_do(name: str) -> None:
    change = getattr(torch.ops.row_tests, name)
    model = on_rows(lambda flat: flat + change(flat))
    _, error = found(model, noise(3, 4, 5, H), [0, 1, 2], 1)
    assert error is not None
    assert "its rows lie between two dynamic sizes; mark one of them static" in error
    assert f"{name} (row_tests.{name}.default)" in error


# A model of transformers whose sequences change their length.

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "max_position_embeddings": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@torch.no_grad()
def test_a_second_sequence_length_is_tested_like_the_first() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from dbo_fx.integrations.transformers import expert_parallel

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**TINY)
    whole = transformers.DeepseekV3ForCausalLM(config).eval()
    model = expert_parallel(whole, routing="all_to_all", copies="expert")

    def logits(x: Tensor) -> Tensor:
        return model(input_ids=x, use_cache=False).logits

    options = {"verify": "static", "transport": "gloo"}
    step = torch.compile(logits, backend="dbo_fx", fullgraph=True, options=options)
    for shape in ((16, 32), (8, 16)):
        x = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(1))
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(step(x), logits(x))
    first, second = dbo_fx.compilations()[-2:]
    # The length of the sequences is a number at first, then a symbol.
    tokens = [p.captured.placeholders[p.captured.token_inputs[0].index] for p in (first, second)]
    lengths = [expression(value_of(node).shape[1]) for node in tokens]
    assert [length.is_number for length in lengths] == [True, False]
    assert first.tested is not None
    assert first.tested == second.tested
