"""Windows over the split size: which move with the microbatch, which stay, which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.errors import SoundnessError
from dbo_fx.passes.positions import Position, positions
from dbo_fx.symbols import expression
from graphs import H, hidden, normalized

T, N = 4, 16


def windows(model: Any, *args: Any, dim: int = 0) -> list[Position]:
    """All windows of a model whose first argument is split along `dim`."""
    torch._dynamo.mark_dynamic(args[0], dim)
    return list(positions(normalized(model, *args, mark=None)).values())


def decision(model: Any, *args: Any, dim: int = 0) -> tuple[int, bool]:
    """The factor of a model's only window, and whether it moves."""
    (window,) = windows(model, *args, dim=dim)
    return window.factor, window.offset


LOCAL, MOVES = (1, False), (1, True)


def rows_of(x: Tensor, *_: Any) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


# Local windows.


def indexes_the_batch(x: Tensor) -> Tensor:
    return x[rows_of(x)]


def gathers_from_the_batch(x: Tensor) -> Tensor:
    return x.gather(0, rows_of(x).unsqueeze(1).expand(-1, H))


def copies_into_a_batch_buffer(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_copy_(0, rows_of(x), x)


def puts_into_a_batch_buffer(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[rows_of(x), 0] = 1
    return y


def compares_itself(x: Tensor) -> Tensor:
    at = rows_of(x)
    return x * (at[:, None] >= at[None, :]).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "model",
    [
        indexes_the_batch,
        gathers_from_the_batch,
        copies_into_a_batch_buffer,
        puts_into_a_batch_buffer,
        compares_itself,
    ],
    ids=lambda model: model.__name__,
)
def test_an_index_into_the_batch_stays(model: Any) -> None:
    assert decision(model, hidden(T, H)) == LOCAL


# Global windows.


def indexes_a_table(x: Tensor, table: Tensor) -> Tensor:
    return x + table[rows_of(x)]


def embeds(x: Tensor, table: Tensor) -> Tensor:
    return x + F.embedding(rows_of(x), table)


def selects_from_a_table(x: Tensor, table: Tensor) -> Tensor:
    return x + table.index_select(0, rows_of(x) % 7)


def writes_slots(x: Tensor, table: Tensor) -> Tensor:
    table.index_copy_(0, rows_of(x), x)
    return x + table[0]


def turns_by_an_angle(x: Tensor, table: Tensor) -> Tensor:
    return x * (rows_of(x).float().unsqueeze(1) * table[0]).cos()


def is_added_to_the_batch(x: Tensor, table: Tensor) -> Tensor:
    return x + rows_of(x).unsqueeze(1)


def is_compared_with_lengths(x: Tensor, table: Tensor) -> Tensor:
    return x * (rows_of(x) < table.sum()).unsqueeze(1)


def is_shifted_by_an_input(x: Tensor, table: Tensor) -> Tensor:
    return x + table[rows_of(x) + table.sum().long()]


def is_returned_as_an_output(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), rows_of(x)


@pytest.mark.parametrize(
    "model",
    [
        indexes_a_table,
        embeds,
        selects_from_a_table,
        writes_slots,
        turns_by_an_angle,
        is_added_to_the_batch,
        is_compared_with_lengths,
        is_shifted_by_an_input,
        is_returned_as_an_output,
    ],
    ids=lambda model: model.__name__,
)
def test_a_position_moves(model: Any) -> None:
    assert decision(model, hidden(T, H), hidden(N, H)) == MOVES


def test_a_window_that_does_not_start_at_zero_moves() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        return x + table[torch.arange(2, x.shape[0] + 2)]

    assert decision(model, hidden(T, H), hidden(N, H)) == MOVES


@pytest.mark.parametrize(
    "window",
    [
        lambda table, s: table[:s],
        lambda table, s: table[2 : s + 2],
        lambda table, s: table.narrow(0, 0, s),
        lambda table, s: table.t()[:, :s].t(),
    ],
)
def test_a_slice_of_a_table_moves(window: Any) -> None:
    assert decision(lambda x, t: x + window(t, x.shape[0]), hidden(T, H), hidden(N, H)) == MOVES


def test_a_slice_of_the_batch_is_no_window() -> None:
    assert windows(lambda x: x[: x.shape[0]].sin() + x[:2].sum(), hidden(T, H)) == []


def test_an_arange_over_another_size_is_no_window() -> None:
    assert windows(lambda x: x + torch.arange(x.shape[1]), hidden(T, H)) == []


# Counters.


def appends(x: Tensor, cache: Tensor, counter: Tensor) -> Tensor:
    cache.index_copy_(0, counter + rows_of(x), x)
    counter.add_(x.shape[0])
    return x + cache.sum()


def test_a_window_on_a_counter_that_the_graph_advances_stays() -> None:
    assert decision(appends, hidden(T, H), hidden(N, H), torch.tensor([0])) == LOCAL


def test_a_window_on_a_counter_that_nobody_advances_moves() -> None:
    def model(x: Tensor, cache: Tensor, counter: Tensor) -> Tensor:
        cache.index_copy_(0, counter + rows_of(x), x)
        return x + cache.sum()

    assert decision(model, hidden(T, H), hidden(N, H), torch.tensor([0])) == MOVES


# Flattened batches.


def test_positions_of_a_flattened_batch_move_by_whole_rows() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat + table[torch.arange(flat.shape[0])]

    assert decision(model, hidden(T, 3, H), hidden(N, H)) == (3, True)


def test_an_index_into_a_flattened_batch_stays() -> None:
    def model(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat[torch.arange(flat.shape[0])]

    assert decision(model, hidden(T, 3, H)) == (3, False)


def test_positions_of_a_sequence_that_is_split_move() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        return x + table[torch.arange(x.shape[1])]

    assert decision(model, hidden(2, T, H), hidden(N, H), dim=1) == MOVES


def test_positions_over_flattened_rows_of_a_split_sequence_are_refused() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat + table[torch.arange(flat.shape[0])]

    with pytest.raises(SoundnessError, match="numbers 2 positions per row of dim 1, over 2"):
        windows(model, hidden(2, T, H), hidden(N, H), dim=1)


# Refusals.


def test_a_window_that_is_index_and_position_at_once_is_refused() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        at = rows_of(x)
        return x[at] + table[at]

    with pytest.raises(SoundnessError, match=r"arange.* index within the microbatch \(index\) and"):
        windows(model, hidden(T, H), hidden(N, H))


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (lambda t, s: t[torch.arange(0, s, 2)].sum(), r"from 0 to s\d+ in steps of 2"),
        (lambda t, s: t[torch.arange(s + 1)].sum(), r"from 0 to s\d+ \+ 1 in steps of 1"),
        (lambda t, s: t[torch.arange(s, 2 * s)].sum(), r"from s\d+ to 2\*s\d+"),
        (lambda t, s: t[s:].sum(), r"from s\d+ to 9223372036854775807"),
        (lambda t, s: t[: s + 1].sum(), r"from 0 to s\d+ \+ 1"),
    ],
)
def test_windows_that_mean_nothing_for_a_microbatch_are_refused(window: Any, message: str) -> None:
    with pytest.raises(SoundnessError, match=message):
        windows(lambda x, t: x + window(t, x.shape[0]), hidden(T, H), hidden(N, H))


# Moving.


def moved(model: Any, *args: Any) -> list[Any]:
    """The arguments of a model's only window after a move by the split size itself."""
    torch._dynamo.mark_dynamic(args[0], 0)
    state = normalized(model, *args, mark=None)
    (position,) = positions(state).values()
    (size,) = (n for n in state.captured.placeholders if isinstance(value_of(n), torch.SymInt))
    position.shift(position.node, size)
    state.graph.lint()
    return [str(_evaluate(a, size)) if isinstance(a, Node) else a for a in position.node.args]


def _evaluate(node: Any, size: Node) -> Any:
    """A size node's expression, computed from its arguments, with the split size as `s`."""
    if node is size:
        return sympy.Symbol("s")
    if not isinstance(node, Node):
        return node
    if node.op != "call_function":
        return node.name
    if isinstance(value_of(node), torch.Tensor):
        return node.name
    return node.target(*(_evaluate(a, size) for a in node.args))


def test_moving_an_arange() -> None:
    assert moved(indexes_a_table, hidden(T, H), hidden(N, H)) == ["s", "2*s"]


def test_moving_an_arange_that_does_not_start_at_zero() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        return x + table[torch.arange(2, x.shape[0] + 2)]

    assert moved(model, hidden(T, H), hidden(N, H)) == ["s + 2", "2*s + 2"]


def test_moving_positions_of_a_flattened_batch() -> None:
    def model(x: Tensor, table: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat + table[torch.arange(flat.shape[0])]

    assert moved(model, hidden(T, 3, H), hidden(N, H)) == ["3*s", "6*s"]


def test_moving_slices() -> None:
    sliced = moved(lambda x, t: x + t[: x.shape[0]], hidden(T, H), hidden(N, H))
    narrowed = moved(lambda x, t: x + t.narrow(0, 0, x.shape[0]), hidden(T, H), hidden(N, H))
    assert sliced[1:] == [0, "s", "2*s"]
    assert narrowed[1:] == [0, "s", "s"]


def test_the_size_of_a_window_is_known() -> None:
    (window,) = windows(indexes_a_table, hidden(T, H), hidden(N, H))
    size = expression(value_of(window.node).shape[0])
    assert size.is_Symbol
