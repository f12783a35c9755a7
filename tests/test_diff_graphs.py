"""The semantic diff of captured, scheduled and emitted graphs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from dbo_fx import sync
from dbo_fx.capture import CapturedGraph
from dbo_fx.graph_facts import parse_graph_facts, references
from dbo_fx.graph_file import graph_text, save_graph
from dbo_fx.inspect.changes import Change
from dbo_fx.inspect.comparing import compare
from dbo_fx.inspect.diff import GraphDiff, diff
from dbo_fx.inspect.graph_items import facts_of_nodes
from dbo_fx.ir import Phase
from dbo_fx.pipeline import State
from dbo_fx.tag import retag, tag_of
from small_moe import CachedMoe, PlainMoe, Traced, run_passes, traced_model

pytestmark = pytest.mark.usefixtures("fake_group")
aten = torch.ops.aten


class GeluInOneLayer(PlainMoe):
    """The shared expert of layer 1 has another activation."""

    def body(self, x: Tensor) -> Tensor:
        for layer in range(len(self.qkv)):
            h = self.attend(layer, x)
            activation = F.gelu if layer == 1 else F.silu
            x = h + self.experts(layer, h) + activation(F.linear(h, self.shared[layer]))
        return x


def model(layers: int = 3) -> Traced:
    return traced_model(PlainMoe, layers)


def nodes_of(graph: CapturedGraph | State, target: object) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target is target]


def with_other_names(captured: CapturedGraph) -> CapturedGraph:
    """Every node renamed, inputs too."""
    for index, node in enumerate(captured.graph.nodes):
        node.name = f"renamed_{index}"
        if node.op == "placeholder":
            node.target = node.name
    captured.module.recompile()
    return captured


def changes(was: object, now: object) -> tuple[Change, ...]:
    """The differences; that the mirror image is right is seen on the way."""
    found = diff(was, now)
    assert diff(now, was).changes == found.mirrored.changes
    return found.changes


def swap(graph: CapturedGraph | State, first: Node) -> Node:
    """Put a node behind the next one; which that is, is returned."""
    second = first.next
    assert first not in second.all_input_nodes
    second.append(first)
    return second


# What must be no difference.


def test_a_graph_does_not_differ_from_itself_or_a_copy():
    captured = model().fresh()
    assert not diff(captured, captured)
    assert not diff(captured, model().fresh())


def test_names_are_no_difference():
    assert not diff(model().fresh(), with_other_names(model().fresh()))


def test_a_file_does_not_differ_from_what_was_saved(tmp_path: Path):
    for one in (model().captured, traced_model(CachedMoe, 2).captured):
        path = save_graph(one, tmp_path / "one.dbograph.json")
        assert not diff(one, path)
        assert not diff(str(path), path)


@pytest.mark.parametrize("kind", [PlainMoe, CachedMoe])
def test_segments_and_emission_are_no_difference(kind: type[PlainMoe]):
    one = traced_model(kind, 2)
    streams = run_passes(one.fresh(), "streams")
    emitted = run_passes(one.fresh(), "emit")
    assert not diff(streams, run_passes(one.fresh(), "lower"))
    assert not diff(streams, emitted)
    assert isinstance(emitted.module, GraphModule)
    assert not diff(emitted, emitted.module)


def test_numbers_of_events_are_no_difference():
    one, other = (run_passes(model().fresh(), "streams") for _ in range(2))
    for node in other.graph.nodes:
        if node.target in (sync.record, sync.wait):
            node.args = (100 - node.args[0], node.args[1])
    assert not diff(one, other)


def test_a_compiled_program_is_compared_by_its_text_too():
    state = run_passes(model().fresh())
    assert not diff(state, str(state.program))
    assert diff(state, "sequential")


# What one known edit gives.


def test_another_activation_in_one_layer():
    captured = model().fresh()
    silu = nodes_of(captured, aten.silu.default)
    silu[1].target = aten.gelu.default
    (change,) = changes(model().fresh(), captured)
    assert (change.kind, change.was, change.now) == (
        "changed",
        "aten::silu.default(%)",
        "aten::gelu.default(%)",
    )
    assert silu[1].name in change.names


def test_a_constant():
    captured = model().fresh()
    slices = [n for n in captured.graph.nodes if n.op == "call_function" and _numbers(n)]
    node = slices[0]
    node.args = tuple(a + 5 if isinstance(a, int) else a for a in node.args)
    (change,) = changes(model().fresh(), captured)
    assert change.kind == "changed"
    assert change.names == (node.name, node.name)


def _numbers(node: Node) -> bool:
    return any(isinstance(a, int) and not isinstance(a, bool) for a in node.args)


def test_an_added_and_a_removed_node():
    captured = model().fresh()
    silu = nodes_of(captured, aten.silu.default)[1]
    with captured.graph.inserting_after(silu):
        more = captured.graph.call_function(aten.neg.default, (silu,))
    more.meta = dict(silu.meta)
    silu.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    kinds = {change.kind: change for change in changes(model().fresh(), captured)}
    assert set(kinds) == {"added", "changed"}
    assert kinds["added"].names == ("", more.name)
    assert str(kinds["changed"].now).endswith(": aten::neg.default")
    back = {change.kind for change in changes(captured, model().fresh())}
    assert back == {"removed", "changed"}


def test_swapped_arguments():
    captured = model().fresh()
    add = [n for n in captured.graph.nodes if n.target is aten.add.Tensor][2]
    assert add.args[0] is not add.args[1]
    add.args = (add.args[1], add.args[0])
    (change,) = changes(model().fresh(), captured)
    assert change.kind == "changed"
    assert change.names == (add.name, add.name)


def test_two_independent_neighbours_change_places():
    captured = model().fresh()
    first = next(
        n
        for n in captured.graph.nodes
        if n.op == n.next.op == "call_function" and n not in n.next.all_input_nodes
    )
    second = swap(captured, first)
    (change,) = changes(model().fresh(), captured)
    assert change.kind == "moved"
    assert set(change.names) <= {first.name, second.name}
    assert change.crossed == 1


def test_a_node_of_another_phase():
    def tagged() -> State:
        return run_passes(model().fresh(), "microbatch")

    state = tagged()
    node = next(n for n in state.graph.nodes if (t := tag_of(n)) and t.phase is Phase.A1)
    tag = tag_of(node)
    assert tag is not None
    retag(node, phase=Phase.A0)
    (change,) = changes(tagged(), state)
    assert (change.kind, change.was, change.now) == (
        "phase",
        f"A1_m{tag.microbatch}@{tag.layer}",
        f"A0_m{tag.microbatch}@{tag.layer}",
    )


def test_a_keepalive_is_a_lifetime():
    one, other = (run_passes(model().fresh(), "streams") for _ in range(2))
    keepalive = nodes_of(other, sync.keepalive)[0]
    other.graph.erase_node(keepalive)
    found = changes(one, other)
    assert [change.kind for change in found[:1]] == ["removed"]
    assert {change.kind for change in found[1:]} == {"lifetime"}
    assert {change.direction for change in found[1:]} == {"earlier"}


def test_another_stream_in_the_emitted_module():
    one, other = (run_passes(model().fresh()) for _ in range(2))
    assert other.module is not None
    use = next(n for n in other.graph.nodes if n.op == "call_method" and n.target == "use")
    assert use.args[1] == "comm"
    use.args = (use.args[0], "comp")
    found = changes(one, other.module)
    assert {(c.kind, c.was, c.now) for c in found} == {("stream", "comm", "comp")}


def test_a_dropped_wait():
    one, other = (run_passes(model().fresh(), "streams") for _ in range(2))
    other.graph.erase_node(nodes_of(other, sync.wait)[0])
    (change,) = changes(one, other)
    assert (change.kind, change.was) == ("event", "wait on comm")


def test_another_constant_tensor():
    def built(value: float) -> GraphModule:
        graph = torch.fx.Graph()
        x, c = graph.placeholder("x"), graph.get_attr("c")
        graph.output(graph.call_function(aten.add.Tensor, (x, c)))
        return GraphModule({"c": torch.full((3,), value)}, graph)

    assert not diff(built(1.0), built(1.0))
    (change,) = changes(built(1.0), built(2.0))
    assert change.kind == "changed"


def test_another_dtype_is_told_where_it_begins():
    text = graph_text(model().captured)
    was, now = (
        facts_of_nodes(parse_graph_facts(t)["nodes"], [], "graph")
        for t in (text, text.replace("float32", "float64"))
    )
    found = compare(was, now)
    inputs = [item for item in was.items if item.is_given]
    assert {change.kind for change in found} == {"changed"}
    assert sum(change.count for change in found) == len(inputs) - 1  # One is the number of rows.


# Any edits.


def random_edits(nodes: list[dict[str, Any]], rng: Random) -> list[dict[str, Any]]:
    """Other ops, constants and tags; calls doubled, bypassed, and moved where data allows."""
    nodes = json.loads(json.dumps(nodes))
    for _ in range(rng.randint(1, 6)):
        index = rng.randrange(len(nodes))
        node = nodes[index]
        if node["op"] != "call_function":
            continue
        kind = rng.randrange(6)
        if kind == 0:
            node["target"] = rng.choice(["aten::neg.default", "aten::abs.default"])
        elif kind == 1:
            node["args"].append(rng.randrange(3))
        elif kind == 2:
            node["tag"] = {"phase": rng.choice(["A0", "A1", "MLP", "S"]), "layer": rng.randrange(3)}
        elif kind == 3:
            nodes.insert(index, {**node, "name": f"{node['name']}_{rng.random()}"})
        elif kind == 4 and [*references(node["args"])]:
            given = next(references(node["args"]))
            text = json.dumps(nodes[index + 1 :]).replace(f'"%{node["name"]}"', f'"%{given}"')
            nodes[index:] = json.loads(text)
        else:
            following = nodes[index + 1]
            used = [*references(following["args"]), *references(list(following["kwargs"].values()))]
            if node["name"] not in used and following["op"] == "call_function":
                nodes[index : index + 2] = [following, node]
    return nodes


@given(st.integers(0, 2**32).map(Random))
@settings(max_examples=60, deadline=None)
def test_any_edits_are_seen_from_both_sides(rng: Random):
    nodes = parse_graph_facts(graph_text(model().captured))["nodes"]
    was = facts_of_nodes(nodes, [], "was")
    edited = random_edits(nodes, rng)
    now = facts_of_nodes(edited, [], "now")
    there, back = compare(was, now), compare(now, was)
    assert [change.mirrored for change in back] == list(there)
    assert compare(now, facts_of_nodes(edited, [], "again")) == ()
    assert not there or nodes != edited
    text = str(GraphDiff(was, now, there))
    assert text.count("\n") < 10 + 12 * len(there)


# Goldens.


def regions(one: Traced) -> CapturedGraph:
    """The captured graph with its layers and phases."""
    return run_passes(one.fresh(), "microbatch").captured


def test_two_variants_of_a_model(golden):
    both = model(), traced_model(GeluInOneLayer, 3)
    golden("diff_graphs_captured.txt", f"{diff(*map(regions, both))}\n")
    golden("diff_graphs_emitted.txt", f"{diff(*(run_passes(x.fresh()) for x in both))}\n")


def test_two_schedules_of_a_model(golden):
    one = traced_model(PlainMoe, 2)
    states = [run_passes(one.fresh(), schedule=s) for s in ("mlp_shared_overlap", "sequential")]
    golden("diff_graphs_schedules.txt", f"{diff(*states)}\n")
