"""Normalizing: one wait each, sizes at the start, no lost writes; and what nodes read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from dbo_fx.capture import value_of
from dbo_fx.effects import Dependency
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.models import MoeConfig, MoeDecoder
from dbo_fx.passes.normalize import WAIT, dedupe_waits, remove_dead, size_node
from dbo_fx.symbols import expression
from dbo_fx.tag import Tag, tag_of
from effects_oracle import differences
from graphs import GROUP, calls, captured, experts, find, hidden, hugging_face, layer, normalized

pytestmark = pytest.mark.usefixtures("fake_group")
T, N, H = 4, 10, 8


@torch.library.custom_op("dbo_fx_tests::scale_into", mutates_args=("y",))
def scale_into(x: Tensor, y: Tensor) -> None:
    y.copy_(2 * x)


@torch.library.custom_op("dbo_fx_tests::count_up", mutates_args=("n",))
def count_up(n: Tensor, by: int) -> Tensor:
    n.add_(by)
    return n.clone()


@count_up.register_fake
def _(n: Tensor, by: int) -> Tensor:
    return torch.empty_like(n)


# Waits.


def test_a_second_wait_goes_and_its_users_take_the_first() -> None:
    graph = captured(lambda x: funcol.all_gather_tensor(x, 0, GROUP) + 1, hidden()).graph
    wait = next(n for n in graph.nodes if n.target is WAIT)
    with graph.inserting_after(wait):
        again = graph.call_function(WAIT, (wait.args[0],))
    with graph.inserting_after(again):
        twice = graph.call_function(WAIT, (wait,))
    (user,) = (u for u in wait.users if u is not twice)
    user.replace_input_with(wait, again)
    graph.output_node().args = (((user, twice),),)
    assert dedupe_waits(graph) == 2
    graph.lint()
    assert [n for n in graph.nodes if n.target is WAIT] == [wait]
    assert set(wait.users) == {user, graph.output_node()}


def test_waits_of_two_launches_both_stay() -> None:
    def model(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, GROUP) - funcol.all_gather_tensor(x.sin(), 0, GROUP)

    assert calls(normalized(model, hidden())).count("wait_tensor") == 2


# Sizes.


def sizes(model: Callable[..., Any], *args: Any) -> list[str]:
    """Every size the graph computes, as an expression of the split size `s`."""
    state = normalized(model, *args)
    symbol = state.captured.symbol
    found = [n for n in state.graph.nodes if tag_of(n) == Tag("size")]
    for node in found:
        assert all(a.op == "placeholder" or a in found for a in node.all_input_nodes)
    first = next(n for n in state.graph.nodes if n.op == "call_function" and n not in found)
    assert all(n < first for n in found)
    return [str(expression(value_of(n)).subs(symbol, "s")) for n in found]


def test_sizes_of_later_tensors_are_computed_from_the_input_size_at_the_start() -> None:
    def model(x: Tensor) -> Tensor:
        y = torch.cat((x, x)).sin()
        return y.new_zeros(y.shape[0] * 3) + torch.arange(y.shape[0] * 3)

    assert sizes(model, hidden()) == ["6*s"]


def test_equal_sizes_are_computed_once() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat((x, x))
        return torch.arange(2 * x.shape[0]) + 1, torch.arange(y.shape[0])

    assert sizes(model, hidden()) == ["2*s"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (lambda s: s + 1, "s + 1"),
        (lambda s: s * s, "s**2"),
        (lambda s: (s + 3) // 4 * 4, "4*(((s + 3)//4))"),
        (lambda s: s % 3 + 1, "(Mod(s, 3)) + 1"),
        (lambda s: torch.sym_max(s, 6), "Max(6, s)"),
    ],
)
def test_size_arithmetic(size: Callable[[int], int], text: str) -> None:
    def model(x: Tensor) -> Tensor:
        return x.sum() + torch.arange(size(x.shape[0])).sum()

    assert sizes(model, hidden())[-1].replace(" ", "") == text.replace(" ", "")


def test_the_split_size_is_read_from_a_token_input_where_it_is_no_input() -> None:
    state = captured(torch.sin, hidden())
    (size,) = (n for n in state.placeholders if isinstance(value_of(n), torch.SymInt))
    state.graph.erase_node(size)
    token = replace(state.token_inputs[0], index=0)
    total = size_node(replace(state, token_inputs=(token,)))
    assert total.target is torch.ops.aten.sym_size.int
    assert total.args == (state.placeholders[0], 0)
    assert tag_of(total) == Tag("total")
    assert size_node(replace(state, token_inputs=(token,))) is total


def test_a_size_in_floating_point_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return x.new_zeros(int(x.shape[0] ** 0.5 + 1)) + x.sum()

    with pytest.raises(UnsupportedGraphError, match=r"a size is computed as .* not supported"):
        normalized(model, hidden())


# Dead code and writes.


def survivors(model: Callable[..., Any], *args: Any) -> list[str]:
    x = hidden(T, H)
    torch._dynamo.mark_dynamic(x, 0)
    return calls(normalized(model, x, *args, mark=None))


def index_copy(x: Tensor, cache: Tensor) -> Tensor:
    cache.index_copy_(0, torch.arange(x.shape[0]), x.cos())
    return x.sin()


def copy_into_a_view(x: Tensor, cache: Tensor) -> Tensor:
    cache[:2].copy_(x.cos()[:2])
    return x.sin()


def add_to_a_counter(x: Tensor, cache: Tensor) -> Tensor:
    cache.add_(x.shape[0])
    return x.sin()


def set_item(x: Tensor, cache: Tensor) -> Tensor:
    cache[torch.arange(x.shape[0])] = x.cos()
    return x.sin()


def call_a_custom_op(x: Tensor, cache: Tensor) -> Tensor:
    scale_into(x[:1].cos(), cache[:1])
    return x.sin()


def call_a_custom_op_with_a_result(x: Tensor, cache: Tensor) -> Tensor:
    count_up(cache, x.shape[0])
    return x.sin()


@pytest.mark.parametrize(
    ("model", "write"),
    [
        (index_copy, "index_copy_"),
        (copy_into_a_view, "copy_"),
        (add_to_a_counter, "add_"),
        (set_item, "index_put_"),
        (call_a_custom_op, "scale_into"),
        (call_a_custom_op_with_a_result, "count_up"),
    ],
)
def test_an_unread_write_to_an_input_stays_with_what_it_needs(model: Any, write: str) -> None:
    found = survivors(model, hidden(N, H))
    assert write in found
    assert "sin" in found
    assert ("cos" in found) == ("cos" in model.__code__.co_names)


def test_a_write_that_a_later_write_hides_from_nobody_stays() -> None:
    def model(x: Tensor, cache: Tensor) -> Tensor:
        cache.zero_()
        cache.add_(1)
        return x.sin()

    assert survivors(model, hidden(N, H))[:2] == ["zero_", "add_"]


def test_writes_into_a_new_tensor_stay_if_it_is_read_through_a_view() -> None:
    def model(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[0].add_(x[0].cos())
        return y.t() + 1

    found = survivors(model)
    assert found.index("zeros_like") < found.index("add_") < found.index("add")
    assert "cos" in found


def unused_value(x: Tensor) -> Tensor:
    x.cos().exp()
    return x.sin()


def unread_write_into_a_new_tensor(x: Tensor) -> Tensor:
    torch.zeros_like(x).add_(x.cos())
    return x.sin()


def unread_custom_write_into_a_new_tensor(x: Tensor) -> Tensor:
    count_up(torch.zeros_like(x), 2)
    return x.sin()


@pytest.mark.parametrize(
    "model", [unused_value, unread_write_into_a_new_tensor, unread_custom_write_into_a_new_tensor]
)
def test_dead_code_goes(model: Any) -> None:
    before = captured(model, hidden(T, H))
    assert len(before.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == 1
    assert sum(n.op == "call_function" for n in before.graph.nodes) > 1
    assert calls(normalized(model, hidden(T, H))) == ["sin"]


def test_collectives_stay_even_if_nobody_reads_them() -> None:
    def model(x: Tensor) -> Tensor:
        experts(x)
        return x.sin()

    assert {"dispatch", "combine"} <= set(calls(normalized(model, hidden())))


def test_nothing_but_dead_code_goes() -> None:
    state = normalized(lambda x: layer(layer(x)), hidden())
    assert remove_dead(state.graph, state.effects) == []


# Order.


def orders(model: Callable[..., Any], *args: Any) -> set[tuple[str, str, str]]:
    x = hidden(T, H)
    torch._dynamo.mark_dynamic(x, 0)
    state = normalized(model, x, *args, mark=None)
    found: list[Dependency] = list(state.effects.dependencies(state.graph.nodes))
    return {(d.before.name, d.kind, d.after.name) for d in found if d.kind != "data"}


def test_reads_and_writes_of_one_storage_keep_their_order() -> None:
    def model(x: Tensor, cache: Tensor) -> Tensor:
        early = cache.sum()
        cache[0].add_(x[0])
        late = cache[1].exp()
        cache.mul_(2)
        return early + late + x

    assert orders(model, hidden(N, H)) == {
        ("sum_1", "WAR", "add_"),
        ("add_", "RAW", "exp"),
        ("add_", "RAW", "mul_"),
        ("add_", "WAW", "mul_"),
        ("exp", "WAR", "mul_"),
    }


def test_two_storages_have_no_order() -> None:
    def model(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        one.add_(1)
        two.add_(1)
        return x.sin()

    assert orders(model, hidden(N, H), hidden(N, H)) == set()


def test_an_input_that_is_written_is_known_and_others_are_not() -> None:
    x = hidden(T, H)
    torch._dynamo.mark_dynamic(x, 0)
    state = normalized(copy_into_a_view, x, hidden(N, H), mark=None)
    (mutated,) = state.effects.mutated_live_in()
    cache = next(n for n in state.captured.placeholders if "cache" in n.name)
    assert state.effects.of(cache).results == {mutated}
    assert mutated in state.effects.of(find(state, "copy_")).writes


# Effects against the oracle: a zoo, then whole models.


def views(x: Tensor, cache: Tensor) -> Any:
    a, b = cache.chunk(2)
    c, d = cache.split([3, 7])
    e, *_ = cache.unbind(1)
    rest = (cache.t(), cache[1:3, ::2], cache.as_strided((2, 2), (8, 1)), cache.diagonal())
    more = (x.expand(2, -1, -1), x.unsqueeze(0).squeeze(0), x.movedim(0, 1), cache.view(2, 5, H))
    return [v.sum() for v in (a, b, c, d, e, *rest, *more)]


def views_that_may_copy(x: Tensor, cache: Tensor) -> Any:
    y = (x.contiguous(), x.t().contiguous(), x.reshape(-1), x.t().reshape(-1), x.to(x.dtype))
    return *y, x.to(torch.float64), x.flatten(), x.t().flatten(), x.view_as(x), x.clone().detach()


def writes_through_views(x: Tensor, cache: Tensor) -> Any:
    low, high = cache.chunk(2)
    low.add_(1)
    high[0].copy_(x[0])
    cache.t()[1].mul_(low.sum())
    cache[:, 0] = 3
    return cache[2:].sum() + x


def writes_by_index(x: Tensor, cache: Tensor) -> Any:
    at = torch.arange(x.shape[0])
    cache.index_copy_(0, at, x)
    cache.index_add_(0, at, x)
    cache[at] = x
    cache[at, 0] += 1
    cache.scatter_(0, at.unsqueeze(1), x)
    cache.masked_fill_(cache > 1, 0.0)
    cache.index_fill_(0, at, 2.0)
    return x.sin()


def writes_into_new_tensors(x: Tensor, cache: Tensor) -> Any:
    y = x.new_zeros(x.shape)
    z = y.view(-1)
    z.fill_(1).clamp_(0, 2)
    y[:, 1:].copy_(x[:, 1:])
    y.squeeze_().unsqueeze_(0)
    return y.sum(), z


def lists_of_tensors(x: Tensor, cache: Tensor) -> Any:
    parts = list(cache.split(5))
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul_(parts, [parts[1], parts[0]])
    return torch.cat([x, *parts]), torch.stack(parts)


def constants(x: Tensor, cache: Tensor) -> Any:
    one, many = torch.tensor([1.0]), torch.tensor([1, 2, 3])
    return x * one, many + x.shape[0], torch.tensor(2.0) * x


def composite_ops(x: Tensor, cache: Tensor) -> Any:
    y = F.linear(F.rms_norm(x, (H,)), cache[:8], cache[0])
    z = F.layer_norm(F.silu(y), (H,)).unflatten(-1, (2, 4)).transpose(0, 1)
    a = F.scaled_dot_product_attention(z, z, z, is_causal=True)
    values, ids = a.softmax(-1).topk(2)
    return torch.einsum("hti,hti->th", values, values), ids, F.embedding(ids, cache), y @ cache.t()


def several_results(x: Tensor, cache: Tensor) -> Any:
    values, ids = x.max(dim=0)
    low, high = torch.aminmax(x, dim=1)
    order = torch.sort(x, dim=0)
    return values + 1, ids, low + high, order.values, order.indices, torch.var_mean(x, dim=0)


def custom_ops(x: Tensor, cache: Tensor) -> Any:
    scale_into(x[:1], cache[:1])
    count = count_up(cache[2:], x.shape[0])
    return count + x.sum(), scale_into(x, y := torch.empty_like(x)), y


def communication(x: Tensor, cache: Tensor) -> Any:
    cache[0].copy_(experts(x)[0])
    gathered = funcol.all_gather_tensor(x, 0, GROUP)
    return funcol.reduce_scatter_tensor(gathered.sin(), "sum", 0, GROUP)


ZOO = [
    views,
    views_that_may_copy,
    writes_through_views,
    writes_by_index,
    writes_into_new_tensors,
    lists_of_tensors,
    constants,
    composite_ops,
    several_results,
    custom_ops,
    communication,
]


@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.__name__)
def test_effects_are_what_running_the_ops_shows(model: Any) -> None:
    x = hidden(T, H)
    torch._dynamo.mark_dynamic(x, 0)
    state = normalized(model, x, hidden(N, H), mark=None)
    assert differences(state.captured, state.effects) == []


def test_a_view_that_its_schema_hides_counts_as_a_read() -> None:
    state = normalized(lambda x: torch.meshgrid(x[:, 0], x[0], indexing="ij"), hidden(T, H))
    (line,) = differences(state.captured, state.effects)
    assert line == (
        "meshgrid: observed reads, writes, results ([], [], ['l_x_.0']), "
        "declared (['l_x_.0'], [], ['l_x_.0'])"
    )


def test_the_oracle_notices_a_missing_write() -> None:
    x = hidden(T, H)
    torch._dynamo.mark_dynamic(x, 0)
    state = normalized(writes_by_index, x, hidden(N, H), mark=None)
    del state.effects.access[find(state, "index_add_")]
    (line,) = differences(state.captured, state.effects)
    assert line.startswith("index_add_: observed reads, writes")


def test_effects_of_the_plain_model() -> None:
    sizes = MoeConfig(hidden=16, layers=3, shared_hidden=16, dense_layers=(0,))
    state = normalized(MoeDecoder(sizes), torch.zeros(T, H, dtype=torch.long))
    assert differences(state.captured, state.effects) == []


@pytest.mark.slow
def test_effects_of_deepseek_v3() -> None:
    pytest.importorskip("transformers")
    state = hugging_face("DeepseekV3", num_hidden_layers=3)
    assert len(state.graph.nodes) > 200
    assert differences(state.captured, state.effects) == []
