"""Layouts op by op, on the models of the test suite, and against DTensor's opinion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import dbo_fx
from dbo_fx.errors import OptionError, SoundnessError
from dbo_fx.layouts import Inside, Layout, Mixed, Replicated, Split, reshaped
from dbo_fx.models.moe import MoeConfig, MoeDecoder
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.positions import positions
from dbo_fx.passes.regions import Regions
from dbo_fx.passes.sharding import finding_of, propagate
from dbo_fx.passes.sharding_rules import RULES, rule_of
from dbo_fx.passes.soundness import Soundness
from dbo_fx.pipeline import State
from dbo_fx.rules import REGISTERED
from dbo_fx.symbols import ConcreteSizes
from dtensor_opinion import Opinion, SecondOpinion
from graphs import B, S, captured, hidden, hugging_face, normalized

pytestmark = pytest.mark.usefixtures("fake_group")
OPINION = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="DTensor had no rule for some of these ops before torch 2.13",
)
B0, B1 = Split(0), Split(1)
SEQUENCE, TABLE = (4, 3, 8), (16, 8)


def result(function: Callable[..., Any], *shapes: tuple[int, ...], dim: int = 0) -> Layout:
    """The layout of the only output of a function of tensors, the first one split along `dim`."""
    args = [torch.zeros(shape) for shape in shapes or (SEQUENCE,)]
    torch._dynamo.mark_dynamic(args[0], dim)
    state, _ = Normalize().apply(_state(function, args))
    analysis = propagate(state, positions(state))
    output = next(n for n in reversed(state.graph.nodes) if n.op == "output")
    layout = analysis.layouts[output.args[0][0]]
    assert not isinstance(layout, tuple)
    return layout


def _state(function: Callable[..., Any], args: list[Tensor]) -> State:
    graph = captured(function, *args, mark=None)
    return State(graph, graph.graph)


def reason(function: Callable[..., Any], *shapes: tuple[int, ...], dim: int = 0) -> str:
    """Why a function mixes rows."""
    layout = result(function, *shapes, dim=dim)
    assert isinstance(layout, Mixed), layout
    return f"{layout.node.name} {layout.reason}"


# Views.


@pytest.mark.parametrize(
    ("function", "dim", "layout"),
    [
        (lambda x: x.flatten(0, 1) * 1, 0, Split(0, 1, 3)),
        (lambda x: x.flatten(0, 1) * 1, 1, Split(0, 4, 1)),
        (lambda x: x.flatten() * 1, 1, Split(0, 4, 8)),
        (lambda x: x.flatten(0, 1).view(x.shape) * 1, 1, B1),
        (lambda x: x.view(x.shape[0], -1, 4) * 1, 0, B0),
        (lambda x: x.unsqueeze(0).squeeze() * 1, 0, B0),
        (lambda x: x.unflatten(-1, (2, 4)).transpose(0, 2) * 1, 0, Split(2)),
        (lambda x: x.permute(2, 0, 1) * 1, 1, Split(2)),
        (lambda x: x.movedim(0, -1) * 1, 0, Split(2)),
        (lambda x: x.expand(5, -1, -1, -1) * 1, 0, B1),
        (lambda x: x.repeat(2, 1, 1), 0, Split(0, 2, 1)),
        (lambda x: x.repeat_interleave(2, 0), 0, Split(0, 1, 2)),
        (lambda x: x.repeat_interleave(2, 1), 0, B0),
        (lambda x: x[:, 1] * 1, 0, B0),
        (lambda x: x[0] * 1, 1, B0),
        (lambda x: x.split(4, -1)[1] * 1, 0, B0),
        (lambda x: x.unbind(1)[1] * 1, 0, B0),
        (lambda x: torch.stack([x, x], 0), 0, B1),
        (lambda x: torch.cat([x, x], -1), 0, B0),
        (lambda x: torch.cat([x, x], 0), 0, Split(0, 2, 1)),
        (lambda x: F.pad(x, (1, 1)), 0, B0),
        (lambda x: x.mean(0), 1, B0),
        (lambda x: x.mean(-1, keepdim=True), 1, B1),
        (lambda x: x.flatten(0, 1).sum(-1), 1, Split(0, 4, 1)),
        (lambda x: x @ x.transpose(1, 2), 0, B0),
        (lambda x: torch.einsum("bsh,bth->tsb", x, x), 0, Split(2)),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), 0, B0),
        (lambda x: x.max(-1)[0] + x.argmin(1).sum(-1, keepdim=True), 0, B0),
        (lambda x: torch.maximum(x, x.cos()), 0, B0),
        (lambda x: torch.where(x > 0, x, 0).masked_fill(x < -1, 1), 0, B0),
        (lambda x: torch.zeros_like(x), 0, Replicated()),
        (lambda x: x.new_ones(x.shape[0], 2).view(-1) * 1, 0, Split(0, 1, 2)),
    ],
)
def test_dims_are_followed(function: Any, dim: int, layout: Layout) -> None:
    assert result(function, dim=dim) == layout


def test_a_view_keeps_the_rows_or_gives_up() -> None:
    assert reshaped((7, 6), (42,), Split(0)) == Split(0, 1, 6)
    assert reshaped((6, 7), (42,), Split(1)) == Split(0, 6, 1)
    assert reshaped((42,), (2, 3, 7), Split(0, 6, 1)) == Split(2)
    assert reshaped((42,), (2, 21), Split(0, 6, 1)) == Split(1, 3, 1)
    assert reshaped((7, 6), (2, 21), Split(0)) is None


# Mixing.


@pytest.mark.parametrize(
    ("function", "dim", "message"),
    [
        (lambda x: x.sum(), 0, "sum_1 reduces dim 0 of l_x_, which holds the rows of the batch"),
        (lambda x: x.amax((0, 2)), 0, "reduces dim 0"),
        (lambda x: x.cumsum(1), 1, "accumulates along dim 1"),
        (lambda x: x.softmax(1), 1, "normalises along dim 1"),
        (lambda x: x.sort(0)[0], 0, "sorts dim 0"),
        (lambda x: x.flip(0), 0, "turns round dim 0"),
        (lambda x: x[1:] * 1, 0, "takes some rows of dim 0"),
        (lambda x: x[::2] * 1, 0, "takes some rows of dim 0"),
        (lambda x: x[-1] * 1, 0, "takes one row of dim 0"),
        (lambda x: x.flatten(0, 1).sum(0), 1, "reduces dim 0"),
        (lambda x: x.flatten(0, 1).view(2, -1, 8) * 1, 0, "cuts across dim 0"),
        (lambda x: x[:, 0] @ x[:, 0].T, 0, "meets every row with every other row"),
        (lambda x: x[:, 0].T @ x[:, 0], 0, "sums over dim 1"),
        (lambda x: F.linear(x, x[0]), 1, "meets every row with every other row"),
        (lambda x: x * x.shape[0], 0, "computes with the number of rows"),
        (lambda x: torch.ones(x.shape[0]).sum() * x, 0, "reduces dim 0"),
        (
            lambda x: x[:, 0, :1] * torch.eye(x.shape[0]),
            0,
            "compares rows of the batch by their place",
        ),
        (lambda x: torch.cat([x, x.new_zeros(1, 3, 8)]), 0, "puts new_zeros beside the rows"),
        (lambda x: x.diff(dim=0), 0, "takes differences along dim 0"),
    ],
)
def test_mixing_is_found_with_its_reason(function: Any, dim: int, message: str) -> None:
    assert message in reason(function, dim=dim)


def test_a_value_that_mixes_taints_what_follows_and_keeps_its_origin() -> None:
    assert reason(lambda x: (x + x.mean(0)).cos().sum(-1)).startswith("mean reduces dim 0")


def test_attention_is_told_by_the_dim_that_is_split() -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert result(attend) == B0
    assert "lets every row of the split dim attend" in reason(attend, dim=1)


# Indices.


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (lambda x, t: x[:, 0] + t[torch.arange(x.shape[0])], B0),
        (lambda x, t: x[torch.arange(x.shape[0])], B0),
        (lambda x, t: x[torch.arange(x.shape[0]), 1], B0),
        (lambda x, t: x[:, torch.arange(2)], B0),
        (lambda x, t: x[:, :, torch.tensor([1, 0])], B0),
        (lambda x, t: x.flatten(0, 1)[torch.arange(x.shape[0]) * 3 + 1], B0),
        (lambda x, t: F.embedding(x.long().clamp(0, 3), t), B0),
        (lambda x, t: x.gather(2, x.argsort(-1)), B0),
        (lambda x, t: torch.zeros_like(x).scatter(2, x.argsort(-1), x), B0),
        (lambda x, t: x.index_select(1, torch.tensor([1])), B0),
        (lambda x, t: F.one_hot(x.long().clamp(0, 3), 4), B0),
        (lambda x, t: x[:, 0] + t[: x.shape[0]], B0),
        (lambda x, t: x[:, :2].flatten(0, 1) + t[: 2 * x.shape[0]], Split(0, 1, 2)),
    ],
)
def test_indices_are_followed(function: Any, layout: Layout) -> None:
    assert result(function, SEQUENCE, TABLE) == layout


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, t: x[torch.tensor([0, 1])], "looks up rows of dim 0 of l_x_, which is split"),
        (lambda x, t: x[x[:, 0, 0].argsort()], "sorts dim 0"),
        (
            lambda x, t: t.index_add(0, x[:, 0, 0].long(), x[:, 0]),
            "puts rows of the batch anywhere",
        ),
        (lambda x, t: x.flatten(0, 1)[torch.arange(x.shape[0]) * 2], "looks up rows of dim 0"),
    ],
)
def test_foreign_indices_mix(function: Any, message: str) -> None:
    assert message in reason(function, SEQUENCE, TABLE)


# Writes.


def test_a_write_through_a_view_gives_its_rows_to_the_whole_buffer() -> None:
    def halves(x: Tensor) -> Tensor:
        buffer = x.new_empty(3, x.shape[0], 16)
        buffer[..., :8].copy_(x.transpose(0, 1))
        return buffer.sin()

    assert result(halves) == B1


def test_a_view_taken_before_the_write_has_the_rows_after_it() -> None:
    def early(x: Tensor) -> Tensor:
        buffer = torch.zeros(x.shape[0], 3, 8)
        view = buffer.flatten(0, 1)
        buffer.add_(x)
        return view.sin()

    assert result(early) == Split(0, 1, 3)


def test_a_write_of_mixed_rows_spoils_the_buffer() -> None:
    def spoiled(x: Tensor) -> Tensor:
        buffer = x.clone()
        buffer[:, 0].copy_(x.mean((0, 1)))
        return buffer.sin()

    assert "mean reduces dim 0" in reason(spoiled)


# Users' rules.


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A custom op without a rule."""
    monkeypatch.setattr("dbo_fx.rules.REGISTERED", REGISTERED)
    if not hasattr(torch.ops.sharding, "double"):
        torch.library.define("sharding::double", "(Tensor x) -> Tensor")
        torch.library.register_fake("sharding::double", torch.empty_like)
    dbo_fx.register_local("sharding::double")
    yield torch.ops.sharding.double
    REGISTERED.pop("sharding::double", None)


def test_an_unknown_op_is_refused_with_the_line_that_gives_it_a_rule(op: Any) -> None:
    from small_moe import PlainMoe, rows

    class Model(PlainMoe):
        def forward(self, x: Tensor) -> Any:
            return self.body(op(x))

    graph = dbo_fx.trace(Model(), (rows(),), mark=0)
    line = r'dbo_fx.register_rule\("sharding::double", dbo_fx.row_wise\(dim=0\)\)'
    with pytest.raises(SoundnessError, match=rf"double .* has no rule; {line}"):
        dbo_fx.compile_graph(graph)
    dbo_fx.register_rule("sharding::double", dbo_fx.row_wise(dim=0))
    dbo_fx.compile_graph(dbo_fx.trace(Model(), (rows(),), mark=0))


def test_ready_made_rules(op: Any) -> None:
    dbo_fx.register_rule("sharding::double", dbo_fx.elementwise)
    assert result(op, dim=1) == B1
    dbo_fx.register_rule("sharding::double", dbo_fx.replicated)
    assert result(op) == Replicated()
    dbo_fx.register_rule("sharding::double", dbo_fx.row_wise(dim=1))
    assert result(op, dim=1) == B1
    assert "works on rows along dim 1, but l_x_ is split along 0" in reason(lambda x: op(x))


@pytest.mark.parametrize(("name", "rule"), [("double", dbo_fx.elementwise), ("a::b", None)])
def test_a_rule_that_is_none_is_refused(name: str, rule: Any) -> None:
    with pytest.raises(OptionError, match="register_rule: "):
        dbo_fx.register_rule(name, rule)


# The models of the test suite.

FAMILIES = ("DeepseekV3", "Mixtral", "Qwen3Moe", "Glm4Moe")


def plain() -> State:
    """The plain PyTorch decoder."""
    model = MoeDecoder(MoeConfig(layers=2, shared_hidden=32, dense_layers=(0,)))
    return normalized(model.requires_grad_(False), torch.zeros(B, S, dtype=torch.long))


def model(family: str) -> State:
    """A real model, with its findings."""
    state = plain() if family == "plain" else hugging_face(family)
    return Soundness().apply(Regions().apply(state)[0])[0]


def ops(state: State) -> Counter[str]:
    """How often every op with a schema is called."""
    targets = [n.target for n in state.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return Counter(t._schema.name for t in targets)


@pytest.mark.parametrize("family", [*FAMILIES, "plain"])
def test_real_models_are_accepted_without_a_test_and_every_op_has_a_rule(family: str) -> None:
    state = model(family)
    found = ops(state)
    print(f"{family}: {', '.join(f'{name} {count}' for name, count in sorted(found.items()))}")
    assert state.obligations == ()
    # Handled where they are walked over: what is sent, and what is stored.
    exchanged = {"dispatch", "combine", "all_to_all_single", "copy_"}
    assert {o for o in found if rule_of(o) is None and o.split("::")[1] not in exchanged} == set()
    verdicts = Counter(f.verdict for n in state.graph.nodes if (f := finding_of(n)))
    assert set(verdicts) <= {"independent", "replicated", "slice-with-offset"}


def test_rows_between_dispatch_and_combine_are_those_of_all_ranks() -> None:
    state = model("Mixtral")
    dispatch = next(n for n in state.graph.nodes if "dispatch" in n.name)
    found = finding_of(dispatch)
    assert found is not None
    assert found.layout == (Split(0, 2, S, region=True),) * 3


def test_grouped_experts_reorder_rows_and_leave_it_to_a_test() -> None:
    from dbo_fx.integrations.transformers import _grouped_experts

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 16, 8), requires_grad=False)
            self.down_proj = torch.nn.Parameter(torch.zeros(4, 8, 8), requires_grad=False)

        def _apply_gate(self, x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

    mine = Experts().to(torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        weights, ids = x.topk(2, -1)
        rows, ids, weights = torch.ops.dbo_fx.dispatch(x, ids, weights, "0")
        return torch.ops.dbo_fx.combine(_grouped_experts(mine, rows, ids, weights), x.shape[0], "0")

    x = torch.zeros(16, 8, dtype=torch.bfloat16)
    state = Regions().apply(normalized(forward, x))[0]
    state, _ = Soundness().apply(state)
    assert {o.kind for o in state.obligations} == {"region"}
    layouts = [f.layout for n in state.graph.nodes if (f := finding_of(n))]
    assert Inside() in layouts
    assert Inside(place=True) in layouts


# DTensor's opinion.

# Ops that DTensor has no rule for, or asks in a form that it does not know, before decomposition.
NO_RULE = "none"
# Where both have a verdict and differ, with the reason.
DIFFER = {
    "aten::new_empty": "its values are constant, so we call it replicated; DTensor: like its model",
    "aten::zeros_like": "the same",
    "aten::scatter_": "writes rows into such a tensor, which has its rows from then on",
    "aten::scatter": "the same; DTensor was told that it is replicated, and would gather the rows",
    "aten::copy_": "the same",
}


@OPINION
@pytest.mark.parametrize("family", ["DeepseekV3", "Mixtral", "plain"])
def test_dtensor_agrees(family: str) -> None:
    state = model(family)
    second = SecondOpinion(ConcreteSizes(state.captured.symbol, 16))
    compared, apart = 0, []
    for node in state.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            continue
        opinion = second.of(node, _arguments(node))
        if opinion.verdict.startswith(NO_RULE) or target._schema.name in DIFFER:
            continue
        if any("new_empty" in n.name for n in node.all_input_nodes):
            continue  # The finding of a buffer is that of its first, constant content.
        compared += 1
        if not _agree(node, opinion):
            apart.append((node.name, opinion, finding_of(node)))
    assert apart == []
    assert compared > 40


@OPINION
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0),
        lambda x: x.cumsum(0),
        lambda x: x.softmax(0),
        lambda x: x[:, 0] @ x[:, 0].t(),
        lambda x: x.sort(0)[0],
        lambda x: x.amax(0),
    ],
)
def test_dtensor_finds_the_same_mixing(function: Any) -> None:
    x = hidden()
    torch._dynamo.mark_dynamic(x, 0)
    state, _ = Normalize().apply(_state(function, [x]))
    propagate(state, positions(state))
    second = SecondOpinion(ConcreteSizes(state.captured.symbol, 16))
    (mixing,) = (n for n in state.graph.nodes if (f := finding_of(n)) and f.reason)
    assert second.of(mixing, _arguments(mixing)).verdict == "mixing"


def _arguments(node: Node) -> dict[Node, Layout]:
    found = {n: finding_of(n) for n in node.all_input_nodes}
    return {n: f.layout for n, f in found.items() if f and not isinstance(f.layout, tuple)}


def _agree(node: Node, opinion: Opinion) -> bool:
    found = finding_of(node)
    assert found is not None
    layouts = found.layout if isinstance(found.layout, tuple) else (found.layout,)
    dims = tuple(x.dim if isinstance(x, Split) else None for x in layouts)
    return opinion.verdict != "mixing" and dims[: len(opinion.dims)] == opinion.dims


def test_the_table_names_every_op_once() -> None:
    assert len(RULES) > 250
    assert replace(Split(0), dim=1) == B1
