"""Ops that may communicate and of which nobody has said that they do not are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dbo_fx
from dbo_fx import capture, opaque
from dbo_fx.communication import communicating_groups
from dbo_fx.errors import OptionError, UnsupportedGraphError
from graphs import GROUP, OPS, B, H, captured, experts, hidden, layer, run

pytestmark = pytest.mark.usefixtures("fake_group")

NAMES = ("mystery", "riddle", "reduce_over")
for _name in NAMES:
    _group = ", str group_name" if _name == "reduce_over" else ""
    torch.library.define(f"opaque_tests::{_name}", f"(Tensor x{_group}) -> Tensor")
    torch.library.register_fake(f"opaque_tests::{_name}", lambda x, *_: torch.empty_like(x))
TESTS = torch.ops.opaque_tests


@pytest.fixture(autouse=True)
def undeclared() -> Iterator[None]:
    """What a test declares is forgotten."""
    yield
    for name in NAMES:
        opaque.DECLARED.discard(f"opaque_tests::{name}")
        opaque.WITH_RULE.pop(f"opaque_tests::{name}", None)


def refusal(model: Callable[..., Any]) -> str:
    """Why a model is refused."""
    with pytest.raises(UnsupportedGraphError) as caught:
        run(model, hidden())
    return str(caught.value)


class Attends(torch.nn.Module):
    """An unknown op in a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return TESTS.mystery(x)


class Holds(torch.nn.Module):
    """A layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attends()

    def forward(self, x: Tensor) -> Tensor:
        return layer(self.attention(x))


def mysteries(x: Tensor) -> Tensor:
    return layer(TESTS.mystery(TESTS.riddle(TESTS.mystery(x))))


def test_an_unknown_op_is_refused_with_its_place_the_reason_and_two_lines_to_write() -> None:
    message = refusal(Holds())
    assert message.startswith("mystery (opaque_tests.mystery.default) in attention at File ")
    assert "in forward is an op that dbo_fx does not know. It may communicate" in message
    assert "can deadlock" in message
    assert 'dbo_fx.register_local("opaque_tests::mystery")' in message
    assert 'dbo_fx.register_rule("opaque_tests::mystery", dbo_fx.row_wise(dim=0))' in message


def test_all_unknown_ops_are_named_at_once() -> None:
    message = refusal(mysteries)
    assert "Also unknown" in message
    for name in ("mystery", "riddle"):
        assert message.count(f'dbo_fx.register_local("opaque_tests::{name}")') == 1


def test_an_op_that_takes_a_group_is_refused_for_that() -> None:
    message = refusal(lambda x: layer(TESTS.reduce_over(x, GROUP)))
    assert "reduce_over" in message
    assert "takes a process group (argument group_name), so it communicates" in message
    assert "dispatch / combine or functional collectives" in message


def test_a_declared_op_is_accepted() -> None:
    dbo_fx.register_local("opaque_tests::mystery")
    assert 'dbo_fx.register_local("opaque_tests::riddle")' in refusal(mysteries)
    dbo_fx.register_local("opaque_tests::riddle")
    assert run(mysteries, hidden()).layers == 1


def test_a_rule_declares_an_op_too() -> None:
    dbo_fx.register_rule("opaque_tests::mystery", dbo_fx.row_wise(dim=0))
    assert run(Holds(), hidden()).layers == 1


def test_what_dbo_fx_brings_along_is_known() -> None:
    assert opaque.communicates(OPS.dispatch.default)
    assert not opaque.communicates(OPS.comm_buffers.default)
    assert not opaque.is_opaque(OPS.comm_buffers.default)


@pytest.mark.parametrize("name", ["mystery", "a::b::c", 3])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(OptionError, match="register_local: op="):
        dbo_fx.register_local(name)


def test_a_collective_cannot_be_declared_local() -> None:
    with pytest.raises(OptionError, match="register_local: _c10d_functional::all_reduce communic"):
        dbo_fx.register_local("_c10d_functional::all_reduce")
    with pytest.raises(OptionError, match="communicates"):
        dbo_fx.register_local("dbo_fx::dispatch")


def test_every_op_of_torch_that_takes_a_group_is_known_to_communicate() -> None:
    """A namespace that another version of torch adds is noticed here."""
    takes = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if not schema.name.startswith(("opaque_tests::", "dbo_fx::"))
        and any(
            "ProcessGroup" in str(argument.type)
            or argument.name == "group_name"
            or (argument.name in opaque.GROUPS and str(argument.type) == "str")
            for argument in schema.arguments
        )
    }
    assert len(takes) > 50
    assert {name for name in takes if name.split("::")[0] not in opaque.COMMUNICATING} == set()


# Higher-order ops.


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def branches(x: Tensor) -> Tensor:
    def reduces(y: Tensor) -> Tensor:
        return funcol.all_reduce(y, "sum", GROUP)

    return torch.cond(x.sum() > 0, reduces, torch.clone, (layer(x),))


def branches_twice(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return torch.cond(y.sum() > 1, experts, torch.clone, (y,))

    return torch.cond(x.sum() > 0, inner, torch.clone, (layer(x),))


def branches_with_mystery(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, TESTS.mystery, torch.clone, (layer(x),))


HIDDEN = [
    (checkpointed, "tag_activation_checkpoint", "dbo_fx::dispatch"),
    (branches, "cond", "_c10d_functional::all_reduce"),
    (branches_twice, "cond", "dbo_fx::dispatch"),
    (branches_with_mystery, "cond", "opaque_tests::mystery"),
]


@pytest.mark.parametrize(("model", "op", "inner"), HIDDEN, ids=[m.__name__ for m, *_ in HIDDEN])
def test_a_higher_order_op_that_holds_communication_is_refused_by_name(
    model: Callable[..., Any], op: str, inner: str
) -> None:
    message = refusal(model)
    assert message.startswith(f"{op} (")
    assert f"is a higher-order op that holds {inner}, which communicates or may" in message
    declares = 'or declare it: dbo_fx.register_local("opaque_tests::mystery")' in message
    assert declares == (model is branches_with_mystery)


def test_a_checkpointed_layer_does_not_slip_through_to_the_inner_backend() -> None:
    found: list[set[str]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(communicating_groups(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(checkpointed, backend=backend, fullgraph=True)(hidden(B, H, H))
    assert found == [{GROUP}]


def test_a_collective_that_tracing_loses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = capture._to_aten

    def loses(*args: Any) -> torch.fx.GraphModule:
        module = original(*args)
        combine = next(n for n in module.graph.nodes if n.target is OPS.combine.default)
        combine.replace_all_uses_with(combine.args[0])
        module.graph.erase_node(combine)
        return module

    captured(layer, hidden())
    monkeypatch.setattr(capture, "_to_aten", loses)
    with pytest.raises(UnsupportedGraphError, match=r"launches 2 collectives .* captured one 1"):
        captured(layer, hidden())
