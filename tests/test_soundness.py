"""What may not be split is refused with the node and the reason; what looks alike is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbo_fx.capture import value_of
from dbo_fx.errors import SoundnessError
from dbo_fx.fake_rerun import FakeRerun
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.passes.soundness import Soundness, sizes_refused, token_dependent
from dbo_fx.pipeline import State
from dbo_fx.row_dependence import RowDependence
from graphs import B, H, S, captured, find, hidden, layer, run
from small_moe import Appends, CachedMoe, arguments, one_rank, rows, run_passes, traced
from small_moe import H as H8

pytestmark = pytest.mark.usefixtures("fake_group")


def check(model: Any, *args: Any, dim: int = 0) -> State:
    """Run the passes up to this one; `args` are the model's inputs, the first one is split."""
    torch._dynamo.mark_dynamic(args[0], dim)
    return run(model, *args, passes=(Normalize(), Regions(), Soundness()), mark=None)


# Random numbers.


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (torch.rand_like, "rand_like"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
        (lambda x: torch.randn(x.shape), "randn"),
        (lambda x: torch.multinomial(x[0, :, :].exp(), 1).sum(), "multinomial"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "scaled_dot_product"),
    ],
)
def test_random_ops_are_refused(draw: Any, name: str) -> None:
    with pytest.raises(SoundnessError, match=f"{name}.* draws random numbers.*model.eval()"):
        check(lambda x: layer(x + draw(x)), hidden())


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0, training=True),
    ],
)
def test_dropout_that_drops_nothing_is_accepted(draw: Any) -> None:
    check(lambda x: layer(x + draw(x)), hidden())


# Writes.


def test_a_write_that_no_token_reaches_is_refused() -> None:
    def model(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return layer(x + counter)

    with pytest.raises(SoundnessError, match=r"add_ .* once per microbatch instead of once"):
        check(model, hidden(), torch.tensor([0]))


def test_a_copy_between_inputs_is_refused() -> None:
    def model(x: Tensor, old: Tensor, new: Tensor) -> Tensor:
        old.copy_(new)
        return layer(x + old)

    with pytest.raises(SoundnessError, match=r"copy_ .* does not depend on the tokens"):
        check(model, hidden(), hidden(S, H), hidden(S, H))


def test_a_counter_of_tokens_is_accepted() -> None:
    def model(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(x.shape[0])
        return layer(x)

    state = check(model, hidden(), torch.tensor([0]))
    assert find(state, "add_") in token_dependent(state)


def test_writes_into_new_tensors_are_accepted() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        buffer = torch.zeros_like(table)
        buffer.add_(1)
        return layer(x + buffer)

    check(model, hidden(), hidden(S, H))


def test_a_write_into_the_split_input_is_accepted_along_dim_0() -> None:
    def model(x: Tensor) -> Tensor:
        x.mul_(2)
        return layer(x)

    check(model, hidden())


def test_a_write_into_an_input_that_is_split_along_an_inner_dim_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        x.mul_(2)
        return layer(x, torch.cos)

    with pytest.raises(SoundnessError, match="split along dim 1 and written in place"):
        check(model, hidden(), dim=1)


def test_a_write_through_a_view_of_such_an_input_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        x[0].mul_(2)
        return layer(x, torch.cos)

    with pytest.raises(SoundnessError, match="split along dim 1 and written in place"):
        check(model, hidden(), dim=1)


def test_an_input_that_is_split_along_an_inner_dim_and_only_read_is_accepted() -> None:
    check(lambda x: layer(x, torch.cos), hidden(), dim=1)


# What depends on tokens.


def test_sizes_count_as_tokens_and_weights_do_not() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        return layer(x * weight.exp2() + torch.ones(x.shape[0], 1, 1).tanh())

    state = check(model, hidden(), hidden(S, H))
    token = token_dependent(state)
    assert find(state, "exp2") not in token
    assert {find(state, "tanh"), find(state, "mul"), find(state, "dispatch")} <= token


def test_the_report() -> None:
    def model(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(x.shape[0])
        return layer(x)

    state = check(model, hidden(), torch.tensor([0]))
    _, text = Soundness().apply(state)
    assert text.endswith(" replicated; 1 inputs written, in order; left to a test: nothing")
    assert " independent, " in text


# Guards and ranges at the sizes of the microbatches.


def branches(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] > 10 else x.cos()


def needs_quarters(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] % 4 == 0 else x.cos()


def excludes_one_size(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] != 9 else x.cos()


def caps_the_batch(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] < 100 else x.cos()


def refusal(model: Any, sizes: list[int]) -> str:
    rules = captured(model, hidden(16, H)).rules
    return sizes_refused(rules, sizes) or "accepted"


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (branches, [11, 12], "accepted"),
        (branches, [8, 8], "microbatch 0 has 8 rows, but the graph was traced for "),
        (branches, [11, 10], "microbatch 1 has 10 rows"),
        (needs_quarters, [8, 8], "accepted"),
        (needs_quarters, [8, 6], "microbatch 1 has 6 rows, but the graph was traced for Eq(Mod("),
        (excludes_one_size, [8, 10], "accepted"),
        (excludes_one_size, [10, 9], "microbatch 1 has 9 rows, but the graph was traced for Ne("),
        (caps_the_batch, [99, 2], "accepted"),
        (caps_the_batch, [100, 2], "microbatch 0 has 100 rows"),
        (torch.sin, [2, 2], "accepted"),
        (torch.sin, [2, 1], "microbatch 1 has 1 rows"),
    ],
)
def test_guards_are_evaluated_at_every_size(model: Any, sizes: list[int], message: str) -> None:
    assert refusal(model, sizes).startswith(message)


def test_a_refused_size_says_what_to_do() -> None:
    assert "pad with dbo_fx.wrap" in refusal(branches, [8, 8])


def test_the_graph_is_not_changed() -> None:
    before = run(layer, hidden(B, S, H))
    nodes = [(n.name, n.args) for n in before.graph.nodes]
    after, _ = Soundness().apply(before)
    assert after == before
    assert [(n.name, n.args) for n in after.graph.nodes] == nodes


# Shapes at the sizes of the microbatches.


def test_shapes_are_computed_again_for_distinct_calls_only() -> None:
    graph = captured(lambda x: layer(layer(x)), hidden(16, S, H))
    rerun = FakeRerun(graph)
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    assert len(rerun.nodes) < len(calls) / 1.5
    args = [16 if isinstance(value_of(n), torch.SymInt) else hidden(16, S, H) for n in
            graph.placeholders]  # fmt: skip
    assert rerun.refused(args, 7) is None


# The row-dependence test.


@pytest.fixture
def real_group(fake_group: str) -> Iterator[None]:
    """A group whose collectives really move rows, instead of the pretended one."""
    dist.destroy_process_group()
    with one_rank():
        yield
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def row_test(model: Any, count: int, *args: Any) -> tuple[RowDependence, list[Any]]:
    """The test of a compiled model, and its real inputs."""
    trace = traced(model, args)
    state = run_passes(trace.fresh(), "microbatch", "sequential", count)
    return RowDependence(state), trace.args()


class Masked(CachedMoe):
    """The cache of `CachedMoe`; a subclass, so that its trace is this test's own."""


@pytest.mark.usefixtures("real_group")
@pytest.mark.parametrize("count", [2, 3])
def test_a_masked_cache_passes_and_its_inputs_stay(count: int) -> None:
    model = Masked(2)
    test, args = row_test(model, count, *arguments(model))
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    assert {o.kind for o in test.obligations.values()} == {"state"}
    assert test.run(args) is None
    torch.testing.assert_close(args, before, rtol=0, atol=0)


@pytest.mark.usefixtures("real_group")
def test_a_cache_that_is_read_whole_is_named_with_the_node() -> None:
    model = Appends()
    test, args = row_test(model, 2, rows(), torch.zeros(16, H8))
    error = test.run(args)
    assert error is not None
    assert "mixes rows of the batch" in error
    assert "earlier rows move when the contents of later ones change" in error
    assert "matmul" in error
