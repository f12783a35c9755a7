"""What may not be split is refused with the node and the reason; what looks alike is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbo_fx.errors import SoundnessError
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.passes.soundness import Soundness, sizes_refused, token_dependent
from dbo_fx.pipeline import State
from graphs import B, H, S, captured, find, hidden, layer, run

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
        return layer(x)

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
    assert (
        text == f"{len(token_dependent(state))} nodes depend on tokens; 1 inputs written, in order"
    )


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
    after, _ = Soundness().apply(before)
    assert after is before
