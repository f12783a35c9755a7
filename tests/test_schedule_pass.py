"""The graph in the order of a schedule, or a refusal that shows the lanes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dbo_fx import schedules
from dbo_fx.errors import ScheduleError, SoundnessError
from dbo_fx.ir import Action, Half, Phase, Schedule, bind, parse_schedule
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.passes.schedule import action_of, nodes_by_action
from dbo_fx.pipeline import State
from dbo_fx.tag import tag_of
from small_moe import (
    Appends,
    CachedMoe,
    H,
    PlainMoe,
    Traced,
    TwoLaunches,
    fake_ranks,
    one_rank,
    rows,
    run_passes,
    traced,
    traced_model,
)

ORDER = schedules.load("mlp_shared_overlap")


def ordered(
    trace: Traced, schedule: str | Schedule = "mlp_shared_overlap", count: int = 2
) -> State:
    return run_passes(trace.fresh(), "schedule", schedule, count)


def runs(state: State) -> list[Action]:
    """The actions of the graph's nodes, each as often as it is entered."""
    found: list[Action] = []
    for node in state.graph.nodes:
        action = action_of(node)
        if action is not None and found[-1:] != [action]:
            found.append(action)
    return found


def text(order: str, lead: int = 1) -> Schedule:
    return parse_schedule(f"schedule 1\nname mine\nlead {lead}\norder {order}\n")


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("model", [PlainMoe, CachedMoe])
def test_the_graph_has_the_order_of_the_schedule(model: type[PlainMoe], layers: int) -> None:
    state = ordered(traced_model(model, layers))
    assert runs(state) == list(bind(ORDER, layers)) == list(state.actions)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sequential_runs_one_microbatch_after_the_other(count: int) -> None:
    state = ordered(traced_model(PlainMoe, 2), "sequential", count)
    assert runs(state) == list(bind(schedules.load("sequential"), 2, count))
    assert sorted(runs(state), key=lambda a: a.microbatch or 0) == runs(state)


def test_the_program_has_the_same_order() -> None:
    state = run_passes(traced_model(PlainMoe, 2).fresh(), "emit")
    assert state.program is not None
    assert state.program.actions == bind(ORDER, 2)


def test_within_an_action_the_captured_order_is_kept() -> None:
    before = run_passes(traced_model(PlainMoe, 2).fresh(), "halves")
    names = {a: [n.name for n in g] for a, g in nodes_by_action(before.graph.nodes).items()}
    after = ordered(traced_model(PlainMoe, 2))
    assert {a: [n.name for n in g] for a, g in nodes_by_action(after.graph.nodes).items()} == names


def test_sizes_and_slices_come_first_and_merges_last() -> None:
    roles = [t.role for n in ordered(traced_model()).graph.nodes if (t := tag_of(n)) is not None]
    work = [i for i, role in enumerate(roles) if role in ("compute", "comm")]
    assert set(roles[: work[0]]) <= {"total", "size", "slice"}
    assert set(roles[work[-1] + 1 :]) == {"merge"}


class Rotary(PlainMoe):
    """Angles that no token reaches; the second table is needed by the last layer only."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return self.body(x * table.cos()) + table.sin()


def shared_names(state: State) -> list[tuple[str, Action | None]]:
    """Shared nodes with the next action behind them."""
    found = []
    nodes = list(state.graph.nodes)
    for index, node in enumerate(nodes):
        tag = tag_of(node)
        if tag is not None and tag.role == "shared":
            later = (a for n in nodes[index:] if (a := action_of(n)) is not None)
            found.append((str(node.target), next(later, None)))
    return found


def test_shared_nodes_stand_before_the_first_action_that_needs_them() -> None:
    with fake_ranks():
        trace = traced(Rotary(), (rows(), torch.ones(H)))
    found = shared_names(ordered(trace))
    assert ("aten.cos.default", Action.parse_bound("A0_m0@0")) in found
    assert ("aten.sin.default", Action.parse_bound("TAIL_m0")) in found


def test_every_dependency_holds_in_the_new_order() -> None:
    state = ordered(traced_model(CachedMoe, 3))
    position = {n: i for i, n in enumerate(state.graph.nodes)}
    assert state.dependencies
    assert all(position[d.before] < position[d.after] for d in state.dependencies)


def test_calls_list_every_compute_call_with_its_microbatch() -> None:
    trace = traced_model()
    captured = trace.fresh()
    state = run_passes(captured, "schedule")
    assert all(node.graph is captured.graph for node, _ in state.calls)
    choices = [m for node, m in state.calls if node.target is torch.ops.aten.topk.default]
    assert choices == [0, 1]
    nodes: list[Node] = [
        n
        for n in state.graph.nodes
        if (t := tag_of(n)) is not None and t.role in ("compute", "shared")
    ]
    assert [n.target for n in nodes] == [n.target for n, _ in state.calls]


class NoShared(PlainMoe):
    """A layer without a shared expert and without an attention core."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(0, x * 2)


def test_empty_actions_are_left_out() -> None:
    with fake_ranks():
        trace = traced(NoShared(), (rows(),))
    state = ordered(trace)
    phases = {a.phase.value for a in state.actions}
    assert phases == {"A0", "D", "MLP", "C"}
    assert [a for a in bind(ORDER, 1) if a.phase.value in phases] == list(state.actions)
    program = run_passes(trace.fresh(), "emit").program
    assert program is not None
    assert "S_m0" not in str(program)


def test_a_later_microbatch_may_not_write_the_cache_first() -> None:
    """The same order with the other label leading: m1 fills the cache before m0 has."""
    wrong = Schedule("swapped", ORDER.order, 0)
    with fake_ranks():
        trace = traced(Appends(), (rows(), torch.zeros(16, H)))
    with pytest.raises(ScheduleError) as caught:
        ordered(trace, wrong)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("swapped, layer 0, step ")
    assert lines[0].endswith("(counted from 1): A0_m1@0 runs before A0_m0@0")
    assert lines[1].startswith("  comp")
    assert lines[1].endswith("A0_m1@0   <-- here")
    assert lines[2].startswith("  comm")
    assert "index_copy_" in lines[3]
    assert "the same storage (" in lines[3]
    assert lines[3].endswith("See the lanes: dbo-fx show swapped")
    assert ordered(trace).actions
    assert ordered(traced_model(PlainMoe, 1), wrong).actions


class Stacked(CachedMoe):
    """The caches of all layers in one storage."""

    def forward(self, x: Tensor, counter: Tensor, caches: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, counter, self.views(caches))
        return out

    def views(self, caches: Tensor) -> tuple[Tensor, ...]:
        return caches.unbind(0)


class Overlapping(Stacked):
    """The second layer's cache begins inside the first one's."""

    def views(self, caches: Tensor) -> tuple[Tensor, ...]:
        flat = caches.flatten(0, 1)
        return flat[:16], flat[8:24]


def stacked(model: type[Stacked]) -> Traced:
    with fake_ranks():
        return traced(model(2), (rows(), torch.tensor([2]), torch.zeros(2, 16, H)))


def test_caches_apart_in_one_storage_do_not_wait_for_each_other() -> None:
    assert ordered(stacked(Stacked)).actions


def test_overlapping_caches_are_refused() -> None:
    """m0's second layer would overtake m1's first, whatever the schedule."""
    with pytest.raises(SoundnessError, match=r"index_copy__1 .* writes what .* has read"):
        ordered(stacked(Overlapping))


SEPARATE = (
    "D_1.send A0_0 D_1.recv A1_0 D_0.send MLP_1 D_0.recv C_1.send S_1 MLP_0 C_1.recv C_0.send S_0 "
    "A0_1 C_0.recv A1_1"
)


def test_a_schedule_may_cut_between_a0_and_a1() -> None:
    mine = text(SEPARATE)
    state = run_passes(traced_model(PlainMoe, 2).fresh(), "emit", mine)
    assert state.program is not None
    assert state.program.actions == bind(mine, 2)
    trace = traced_model(PlainMoe, 2, ranks=1)
    with one_rank():
        module = run_passes(trace.fresh(), "emit", mine).module
        assert module is not None
        torch.testing.assert_close(
            module(*trace.args(7)), trace.captured.module(*trace.args(7)), rtol=1e-4, atol=1e-4
        )


def test_buffers_stand_before_all_sends_of_their_action() -> None:
    with fake_ranks():
        trace = traced(TwoLaunches(), (rows(),))
    for action, group in nodes_by_action(ordered(trace).graph.nodes).items():
        if action.half is Half.SEND and action.phase is Phase.D:
            assert [n.target is BUFFERS for n in group] == [True, True, False, False]
