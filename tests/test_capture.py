"""Capturing: what the graph is made of, what is known about it, and what is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import dbo_fx
from dbo_fx.capture import TokenInput, from_dynamo, trace, value_of, where
from dbo_fx.errors import UnsupportedGraphError
from graphs import H, calls, captured, hidden, normalized

T = 4


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.register_buffer("cache", hidden(16, H))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.silu(self.linear(x))
        self.cache.index_copy_(0, torch.arange(x.shape[0]), y)
        return y + self.cache.sum(0)


# What the graph is made of.


def test_calls_are_ops_with_schemas_and_in_place_ops_stay() -> None:
    graph = captured(Tiny(), hidden(T, H)).graph
    ops = [n.target for n in graph.nodes if n.op == "call_function"]
    assert all(isinstance(op, torch._ops.OpOverload) for op in ops)
    names = [str(op) for op in ops]
    assert "aten.linear.default" in names
    assert "aten.index_copy_.default" in names
    assert not any("grad_enabled" in name for name in names)


def test_inputs_are_dynamos_in_dynamos_order() -> None:
    graph = captured(Tiny(), hidden(T, H))
    dynamo = [n for n in graph.dynamo.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in graph.placeholders] == [n.name for n in dynamo]
    for mine, theirs in zip(graph.placeholders, dynamo, strict=True):
        assert getattr(value_of(mine), "shape", 0) == getattr(value_of(theirs), "shape", 0)


def test_the_graph_computes_what_the_model_does() -> None:
    model = Tiny()
    graph, x = captured(model, hidden(T, H)), torch.randn(6, H)
    tensors = {"l_x_": x, "l_self_buffers_cache_": model.cache.clone()}
    for kind in ("weight", "bias"):
        name = f"l_self_modules_linear_parameters_{kind}_"
        tensors[name] = model.linear.get_parameter(kind)
    with torch.no_grad():
        (found,) = graph.module(*(tensors.get(n.name, len(x)) for n in graph.placeholders))
        assert torch.equal(found, model(x))


def test_the_split_size_its_range_and_its_guards_are_known() -> None:
    def model(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] > 2 and x.shape[0] % 2 == 0 else x

    graph = captured(model, hidden(T, H))
    assert (graph.rules.symbol, graph.rules.lower, graph.rules.upper) == (graph.symbol, 3, None)
    assert f"Eq(Mod({graph.symbol}, 2), 0)" in map(str, graph.rules.guards)


def test_token_inputs_are_found_by_the_size() -> None:
    def model(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return x @ weight + ids.t()

    x, ids = hidden(T, H), hidden(1, T)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(ids, 1)
    graph = captured(model, x, hidden(H, H), ids, mark=None)
    names = [n.name for n in graph.placeholders]
    assert graph.token_inputs == tuple(
        TokenInput(name, names.index(name), dim) for name, dim in (("l_x_", 0), ("l_ids_", 1))
    )


def test_it_prints_its_facts() -> None:
    graph = captured(lambda x: x.sin().cos(), hidden(T, H))
    assert str(graph) == (
        "captured graph: 2 calls, 2 inputs\n"
        f"split along {graph.symbol}, 2 to inf: l_x_ dim 0\n"
        "guards on it: none"
    )


def test_constants_belong_to_the_fake_mode_of_the_graph() -> None:
    graph = captured(lambda x: x * torch.tensor([1.0, 2.0] * 4), hidden(T, H))
    (constant,) = (n for n in graph.graph.nodes if n.op == "get_attr")
    assert value_of(constant).fake_mode is graph.fake_mode
    assert value_of(constant).shape == (8,)


def test_results_in_tuples_are_known_calls() -> None:
    graph = captured(lambda x: x.topk(2)[0] + x.shape[0] * 2, hidden(T, H)).graph
    assert {operator.getitem, operator.mul} <= {n.target for n in graph.nodes}


def test_a_place_names_the_node_and_the_line_of_the_model() -> None:
    (node,) = captured(torch.sin, hidden(T, H)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.sin.default
    )
    assert where(node).startswith("sin (aten.sin.default)")
    (node,) = captured(lambda x: x.sin(), hidden(T, H)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.sin.default
    )
    assert f'at File "{__file__}", line ' in where(node)


# Ways to call it.


def test_keyword_arguments_are_marked_and_traced() -> None:
    graph = dbo_fx.trace(lambda x, scale: x * scale, (), {"x": hidden(T, H), "scale": 2.0}, mark=0)
    assert [t.name for t in graph.token_inputs] == ["l_x_"]


def test_nothing_is_run() -> None:
    meta = torch.zeros(T, H, device="meta")
    assert calls(normalized(lambda x: x.sin(), meta)) == ["sin"]


def test_the_split_dim_may_be_chosen_among_marked_ones() -> None:
    def marked() -> Tensor:
        x = hidden(T, 6, H)
        torch._dynamo.mark_dynamic(x, [0, 1])
        return x

    for dim in (0, 1):
        graph = trace(lambda x: x.sin(), (marked(),), split_dim=dim)
        assert [t.dim for t in graph.token_inputs] == [dim]
    with pytest.raises(UnsupportedGraphError, match=r"several sizes are symbolic.* or set option"):
        trace(lambda x: x.sin(), (marked(),))
    with pytest.raises(UnsupportedGraphError, match="no input has a symbolic size at dim 2"):
        trace(lambda x: x.sin(), (marked(),), split_dim=2)


def test_disabled_autocast_and_nested_grad_modes_go() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            y = x.sin()
        with torch.autocast("cpu", enabled=False):
            return y.cos()

    assert calls(normalized(model, hidden(T, H))) == ["sin", "cos"]


# Refusals.


def bakes_in_the_size(x: Tensor) -> Tensor:
    return x.view(4, -1).sin() if int(x.shape[0]) == 4 else x


def turns_autocast_on(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


def selects_by_value(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0].sum() + x


def branches_on_a_value(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def does_nothing(x: Tensor) -> int:
    return 3


def refused(model: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(UnsupportedGraphError) as refusal:
        trace(model, args, **options)
    return str(refusal.value)


def test_no_marked_input() -> None:
    message = refused(lambda x: x.sin(), hidden(T, H))
    assert message.startswith("no input has a symbolic size.")
    assert "torch._dynamo.mark_dynamic(x, 0)" in message


def test_a_specialised_size() -> None:
    message = refused(bakes_in_the_size, hidden(T, H), mark=0)
    assert "dim 0 of input l_x_ is marked dynamic, but is fixed to 4" in message


def test_no_tensor_input() -> None:
    assert "no tensor input" in refused(lambda n: torch.zeros(3) + n, 2.5)


def test_a_size_that_depends_on_data() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        message = refused(selects_by_value, hidden(T, H), mark=0)
    assert "makes a size that depends on data" in message
    assert f'at File "{__file__}"' in message


def test_a_higher_order_op() -> None:
    message = refused(branches_on_a_value, hidden(T, H), mark=0)
    assert "is not an op with a schema" in message


def test_autocast_inside_the_model() -> None:
    assert "turns autocast on inside the model" in refused(turns_autocast_on, hidden(T, H), mark=0)


def test_autocast_around_the_model() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast is active" in refused(lambda x: x @ x.t(), hidden(T, H), mark=0)


def test_a_size_that_stands_twice_in_one_input() -> None:
    x = hidden(T, T)
    torch._dynamo.mark_dynamic(x, [0, 1])
    with torch.fx.experimental._config.patch(use_duck_shape=True):
        assert "must stand alone in exactly one dim" in refused(lambda x: x + x.t(), x)


def test_a_model_without_ops() -> None:
    assert "called no torch op" in refused(does_nothing, hidden(T, H), mark=0)


def test_training() -> None:
    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        with pytest.raises(UnsupportedGraphError, match=r"training graph: input .* requires grad"):
            from_dynamo(gm)
        return gm.forward

    x = hidden(T, H)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    torch.compile(Tiny().requires_grad_(), backend=backend, fullgraph=True)(x)


def test_weights_that_want_gradients_are_fine_under_no_grad() -> None:
    assert "linear" in calls(normalized(Tiny().requires_grad_(), hidden(T, H)))


def test_an_error_of_the_model_comes_through() -> None:
    def model(x: Tensor) -> Tensor:
        raise ZeroDivisionError("the model's own")

    with pytest.raises(Exception, match="the model's own"):
        trace(model, (hidden(T, H),), mark=0)


def test_marked_inputs_of_one_size_are_one_symbol() -> None:
    """No op needs them to be equal, so Dynamo would keep them apart."""

    def model(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache.index_put_((slots,), x.new_ones(1, H))
        return x * 2

    x, slots = hidden(T, H), torch.arange(T)
    for tensor in (x, slots):
        torch._dynamo.mark_dynamic(tensor, 0)
    graph = trace(model, (x, slots, torch.zeros(16, H)))
    assert {(t.name, t.dim) for t in graph.token_inputs} == {("l_x_", 0), ("l_slots_", 0)}


def test_marked_inputs_of_two_sizes_are_refused() -> None:
    x, y = hidden(T, H), hidden(T + 1, H)
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 0)
    with pytest.raises(UnsupportedGraphError, match="several sizes are symbolic"):
        trace(lambda x, y: (x * 2, y * 2), (x, y))
