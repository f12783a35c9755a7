"""Copying the graph per microbatch: slices, sizes, shared nodes, positions, merged outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from dbo_fx.errors import SoundnessError
from dbo_fx.passes.microbatch import Microbatch
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.pipeline import Pipeline, State
from dbo_fx.tag import Tag, tag_of
from small_moe import (
    CachedMoe,
    H,
    Traced,
    module_of,
    nodes_of,
    rows,
    run_passes,
    text_of,
    traced,
    traced_model,
)

aten = torch.ops.aten


def both(
    function: Callable[..., Any], *args: Tensor, dim: int = 0, count: int = 2
) -> tuple[Any, Any, list[Any], list[Any]]:
    """Outputs of the copied and of the whole graph, and the inputs as each left them."""
    trace = traced(function, args, dim)
    return outcome(trace, count)


def outcome(trace: Traced, count: int) -> tuple[Any, Any, list[Any], list[Any]]:
    split_args, whole_args = trace.args(), trace.args()
    whole = trace.captured.module(*whole_args)
    state = run_passes(trace.fresh(), "microbatch", count=count)
    return module_of(state)(*split_args), whole, split_args, whole_args


def agrees(function: Callable[..., Any], *args: Tensor, dim: int = 0, count: int = 2) -> None:
    split, whole, split_args, whole_args = both(function, *args, dim=dim, count=count)
    torch.testing.assert_close(list(split), list(whole))
    torch.testing.assert_close(split_args, whole_args)


def test_the_plain_layer_is_copied(golden: Callable[[str, str], None]) -> None:
    state = run_passes(traced_model().fresh(), "microbatch")
    golden("microbatch_plain.txt", text_of(state.graph))
    assert state.microbatches == 2
    assert len(state.copies) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [4, 7, 8, 11])
def test_slices_are_neighbours_and_cover_the_batch(count: int, total: int) -> None:
    trace = traced_once(double)
    state = run_passes(trace.fresh(), "microbatch", count=count)
    seen: list[int] = []
    for node in nodes_of(state.graph, aten.mul.Tensor):
        seen.append(rows_of(state, node, trace.args(total)))
    assert seen == [total * (i + 1) // count - total * i // count for i in range(count)]
    (out,) = module_of(state)(*trace.args(total))
    assert torch.equal(out, rows(total) * 2)


def double(x: Tensor) -> Tensor:
    return x * 2


_KEPT: dict[Callable[..., Any], Traced] = {}


def traced_once(function: Callable[..., Any]) -> Traced:
    if function not in _KEPT:
        _KEPT[function] = traced(function, (rows(8),))
    return _KEPT[function]


def rows_of(state: State, node: Node, args: list[Any]) -> int:
    """How many rows the node's result has when the graph runs."""

    class Rows(Interpreter):
        found = 0

        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if n is node:
                self.found = result.shape[0]
            return result

    interpreter = Rows(module_of(state))
    interpreter.run(*args)
    return interpreter.found


def test_one_microbatch_has_no_slice_and_no_merge() -> None:
    state = run_passes(traced_once(double).fresh(), "microbatch", count=1)
    roles = {t.role for n in state.graph.nodes if (t := tag_of(n)) is not None}
    assert not roles & {"slice", "merge"}
    assert [tag(n).microbatch for n in nodes_of(state.graph, aten.mul.Tensor)] == [0]


def tag(node: Node) -> Tag:
    found = tag_of(node)
    assert found is not None
    return found


def test_sizes_are_rebound_to_the_microbatch() -> None:
    trace = traced(lambda x: x.new_ones(x.shape[0], 3).view(3 * x.shape[0]) * 2, (rows(),))
    state = run_passes(trace.fresh(), "microbatch")
    (out,) = module_of(state)(*trace.args(7))
    assert out.shape == (21,)
    assert torch.equal(out, torch.full((21,), 2.0))
    agrees(lambda x: x.view(2 * x.shape[0], -1).sum(1).view(x.shape[0], 2), rows())


def test_two_marked_inputs_have_one_size() -> None:
    """Each brings a size of its own, which tracing then found equal."""

    def scaled(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.zeros(scale.shape[0], 2 * H) + 1
        return x * scale, wide.view(x.shape[0], 2, -1)

    x, scale = rows(7), rows(7, seed=2)
    torch._dynamo.mark_dynamic(scale, 0)
    agrees(scaled, x, scale)


def test_rebinding_adds_no_guard_to_dynamos_graph() -> None:
    trace = traced(lambda x: x.view(2 * x.shape[0], -1).relu(), (rows(),))
    shapes = trace.captured.fake_mode.shape_env
    assert shapes is not None
    before = len(shapes.guards)
    run_passes(trace.fresh(), "microbatch", count=3)
    assert len(shapes.guards) == before


def test_shared_nodes_exist_once() -> None:
    table = torch.arange(H, dtype=torch.float32)

    def function(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        angles = t.cos() * 3
        return x * angles, angles

    trace = traced(function, (rows(), table))
    state = run_passes(trace.fresh(), "microbatch", count=3)
    assert len(nodes_of(state.graph, aten.cos.default)) == 1
    assert len({env[n] for env in state.copies for n in env if n.target is aten.cos.default}) == 1
    agrees(function, rows(), table, count=3)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_positions_move_with_the_microbatch(count: int) -> None:
    table = rows(32, seed=3)

    def by_table(x: Tensor, table: Tensor) -> Tensor:
        return x + table[torch.arange(x.shape[0])] + table[: x.shape[0]]

    agrees(by_table, rows(7), table, count=count)
    agrees(lambda x: x * torch.arange(x.shape[0])[:, None], rows(7), count=count)


def test_a_local_index_does_not_move() -> None:
    agrees(lambda x: x[torch.arange(x.shape[0])] * 2, rows())


def test_positions_with_a_factor_move_by_it() -> None:
    def function(x: Tensor, table: Tensor) -> Tensor:
        return x.repeat_interleave(2, 0) + table[torch.arange(2 * x.shape[0])]

    agrees(function, rows(7), rows(32, seed=3))


def test_a_tuple_with_none_and_the_same_tensor_twice() -> None:
    def function(x: Tensor) -> Any:
        y = x.relu()
        return y, None, y, (x.sum(1), None)

    split, whole, *_ = both(function, rows())
    assert len(split) == len(whole)
    torch.testing.assert_close(list(split), list(whole))
    state = run_passes(traced(lambda x: (x.relu(), x.exp()), (rows(),)).fresh(), "microbatch")
    assert len(nodes_of(state.graph, aten.cat.default)) == 2
    twice = traced(function, (rows(),)).fresh()
    assert len(nodes_of(run_passes(twice, "microbatch").graph, aten.cat.default)) == 2


def test_an_input_is_returned_as_it_is() -> None:
    trace = traced(lambda x, w: x * 2 + w, (rows(), rows(1)))
    captured, args = trace.fresh(), trace.args()
    *_, output = captured.graph.nodes
    output.args = ((*captured.placeholders, *output.args[0]),)
    outputs = module_of(run_passes(captured, "microbatch"))(*args)
    assert all(a is b for a, b in zip(args, outputs, strict=False))
    assert torch.equal(outputs[-1], trace.captured.module(*trace.args())[0])


def test_a_view_of_the_tokens_has_all_rows() -> None:
    agrees(lambda x: (x[:, :4], x.unsqueeze(1), x * 2), rows())


def test_a_shared_output_is_not_merged() -> None:
    agrees(lambda x, w: (x * 2, w.cos()), rows(), rows(3, seed=2))


def append(x: Tensor, cache: Tensor, counter: Tensor) -> Any:
    slots = counter + torch.arange(x.shape[0])
    cache.index_copy_(0, slots, x)
    counter.add_(x.shape[0])
    return x @ cache.T, cache[:4], counter


def test_a_view_of_a_written_input_shows_every_write() -> None:
    agrees(append, rows(), torch.zeros(12, H), torch.tensor([1]), count=1)
    split, whole, split_args, whole_args = both(
        lambda x, c, n: append(x, c, n)[1:], rows(), torch.zeros(12, H), torch.tensor([1])
    )
    torch.testing.assert_close(list(split), list(whole))
    torch.testing.assert_close(split_args, whole_args)


def test_an_in_place_change_of_the_tokens_reaches_the_input() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.mul_(2)
        return y, y + 1

    agrees(function, rows(), count=3)


def test_a_size_in_the_output_is_the_whole_batchs() -> None:
    def function(x: Tensor) -> Any:
        return x * 2, x.shape[0], x.shape[0] * 3

    trace = traced(function, (rows(),))
    outputs = module_of(run_passes(trace.fresh(), "microbatch", count=3))(*trace.args(7))
    assert [o for o in outputs if isinstance(o, int)] in ([7, 21], [])
    assert any(isinstance(o, Tensor) and o.shape == (7, H) for o in outputs)


def test_an_output_without_token_dim_is_refused() -> None:
    with pytest.raises(SoundnessError) as caught:
        both(lambda x: (x * 2, x.sum()), rows())
    text = str(caught.value)
    assert "sum" in text
    assert "cannot be put together from microbatches" in text
    assert "Compute it outside the compiled region" in text


def test_an_output_with_the_token_dim_twice_is_refused() -> None:
    with pytest.raises(SoundnessError, match="meets every row with every other row"):
        both(lambda x: x @ x.T, rows())


def test_an_output_whose_size_is_no_multiple_is_refused() -> None:
    with pytest.raises(SoundnessError, match="puts new_ones beside the rows of the batch"):
        both(lambda x: torch.cat([x, x.new_ones(1, H)]), rows())


def batch(outer: int, count: int) -> Tensor:
    return torch.randn(outer, count, H, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("outer", [1, 2, 3])
def test_the_split_dim_may_be_an_inner_one(outer: int, count: int) -> None:
    def function(x: Tensor) -> Any:
        flat = x.flatten(0, 1)
        return x * 2, flat.relu(), flat.sum(1), flat.relu().view(x.shape).exp()

    agrees(function, batch(outer, 7), dim=1, count=count)


def test_a_moved_split_dim_is_joined_where_it_is() -> None:
    agrees(lambda x: (x * 2).transpose(0, 1).contiguous(), batch(2, 7), dim=1)


def test_other_symbolic_sizes_stay_symbolic() -> None:
    def traced_twice(function: Callable[[Tensor], Any]) -> Traced:
        x = batch(3, 7)
        torch._dynamo.mark_dynamic(x, 0)
        return traced(function, (x,), dim=1, split_dim=1)

    trace = traced_twice(lambda x: (x * 2, x.sum(2)))
    shapes = trace.captured.fake_mode.shape_env
    assert shapes is not None
    before = len(shapes.guards)
    out = module_of(run_passes(trace.fresh(), "microbatch"))(*trace.args())
    torch.testing.assert_close(list(out), list(trace.captured.module(*trace.args())))
    assert len(shapes.guards) == before
    with pytest.raises(SoundnessError, match="of one microbatch in several places of dim 0"):
        run_passes(traced_twice(lambda x: x.flatten(0, 1) * 2).fresh(), "microbatch")


def test_inner_slices_are_contiguous() -> None:
    trace = traced(lambda x: x * 2, (batch(2, 6),), dim=1)
    state = run_passes(trace.fresh(), "microbatch")
    assert len(nodes_of(state.graph, aten.contiguous.default)) == 2


def test_effects_of_the_copies_are_apart_and_those_of_inputs_are_not() -> None:
    state = run_passes(traced_model(CachedMoe, 2).fresh(), "microbatch")
    writes = [n for n in state.graph.nodes if n.target is aten.index_copy_.default]
    assert [tag(n).microbatch for n in writes] == [0, 0, 1, 1]
    keys = [state.effects.of(n).writes for n in writes]
    assert keys[0] == keys[2] != keys[1] == keys[3]
    own = [n for n in state.graph.nodes if n.target is aten.silu.default]
    results = [state.effects.of(n).results for n in own]
    assert len(frozenset().union(*results)) == len(own) == 4
    first, second = (set(env.values()) for env in state.copies)
    kinds = {
        d.kind
        for d in state.effects.dependencies(state.graph.nodes)
        if (d.before in first and d.after in second)
    }
    assert {"RAW", "WAR", "WAW"} <= kinds


def test_the_report_counts() -> None:
    def function(x: Tensor, table: Tensor) -> Any:
        return x + table.cos()[torch.arange(x.shape[0])], x.sum(1)

    trace = traced(function, (rows(), rows(9)))
    _, reports = Pipeline([Normalize(), Regions(), Microbatch(2)]).run(trace.fresh())
    assert reports[-1].text.endswith("1 shared, 1 positions offset, 2 outputs merged")
