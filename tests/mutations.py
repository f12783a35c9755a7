"""Named ways to break the compiler, each with the test that must notice.

A pytest plugin: `DBO_FX_MUTATION=NAME pytest -p mutations TEST` runs a test on the broken compiler.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

VARIABLE = "DBO_FX_MUTATION"
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to break a part.

    Attributes:
        part: The pass or module that is broken.
        test: Id of the test that must fail, below `tests/`.
        apply: Breaks it.
    """

    part: str
    test: str
    apply: Patch


MUTATIONS: dict[str, Mutation] = {}


def mutation(part: str, test: str) -> Callable[[Patch], Patch]:
    """Register a function as a mutation under its own name."""

    def register(apply: Patch) -> Patch:
        MUTATIONS[apply.__name__] = Mutation(part, test, apply)
        return apply

    return register


def pytest_configure(config: pytest.Config) -> None:
    """Apply the mutation that the environment names, before any test module is imported."""
    name = os.environ.get(VARIABLE)
    if name is not None:
        patch = pytest.MonkeyPatch()
        MUTATIONS[name].apply(patch)
        config.add_cleanup(patch.undo)


def nothing(*_: object, **__: object) -> None:
    """What a forgotten check does."""


@mutation("normalize", "test_emit.py::test_written_inputs_change_once_per_call")
def unread_writes_are_dead(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import normalize

    is_root = normalize.is_root

    def only_outputs(node: Any, effects: Any) -> bool:
        return bool(is_root(node, replace_live_in(effects)))

    def replace_live_in(effects: Any) -> Any:
        return replace(effects, live_in=frozenset())

    patch.setattr(normalize, "is_root", only_outputs)


@mutation("effects", "test_verify.py::test_two_segments_that_share_a_cache_in_the_wrong_order")
def no_war_edges(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.effects import Effects

    dependencies = Effects.dependencies

    def without(self: Any, nodes: Any) -> Iterator[Any]:
        return (d for d in dependencies(self, nodes) if d.kind != "WAR")

    patch.setattr(Effects, "dependencies", without)


@mutation("regions", "test_schedule_pass.py::test_the_program_has_the_same_order")
def a0_and_a1_swapped(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.ir import Phase
    from dbo_fx.passes import regions

    apply = regions.Regions.apply
    other = {Phase.A0: Phase.A1, Phase.A1: Phase.A0}

    def swapped(self: Any, state: Any) -> Any:
        result = apply(self, state)
        for node in state.graph.nodes:
            tag = regions.tag_of(node)
            if tag is not None and tag.phase in other:
                regions.set_tag(node, replace(tag, phase=other[tag.phase]))
        return result

    patch.setattr(regions.Regions, "apply", swapped)


@mutation("regions", "test_lower.py::test_names_say_phase_microbatch_and_layer")
def the_shared_expert_is_routed(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.ir import Phase
    from dbo_fx.passes import regions

    apply = regions.Regions.apply

    def no_s(self: Any, state: Any) -> Any:
        result = apply(self, state)
        for node in state.graph.nodes:
            tag = regions.tag_of(node)
            if tag is not None and tag.phase is Phase.S:
                regions.set_tag(node, replace(tag, phase=Phase.A1))
        return result

    patch.setattr(regions.Regions, "apply", no_s)


@mutation("soundness", "test_backend.py::test_random_numbers_are_refused")
def random_numbers_are_allowed(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import soundness

    patch.setattr(soundness, "_refuse_random", nothing)


@mutation("soundness", "test_backend.py::test_a_batch_that_is_too_small_is_refused")
def ranges_are_not_evaluated_again(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import guards

    patch.setattr(guards, "sizes_refused", nothing)


@mutation("soundness", "test_sharding.py::test_mixing_is_found_with_its_reason")
def reductions_over_the_batch_are_allowed(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import sharding_shapes

    patch.setattr(sharding_shapes, "refuse_along", nothing)


@mutation("soundness", "test_corpus.py::test_an_unsound_graph_is_refused_with_its_reason")
def moved_rows_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import row_dependence

    patch.setattr(row_dependence, "_differ", nothing)


@mutation("soundness", "test_corpus.py::test_an_unsound_graph_is_refused_with_its_reason")
def shapes_are_not_computed_again(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.fake_rerun import FakeRerun

    patch.setattr(FakeRerun, "refused", nothing)


@mutation("positions", "test_microbatch.py::test_positions_move_with_the_microbatch")
def no_offset(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.positions import Position

    patch.setattr(Position, "shift", nothing)


@mutation("positions", "test_microbatch.py::test_a_local_index_does_not_move")
def every_window_moves(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import microbatch

    positions = microbatch.positions

    def moved(state: Any) -> Any:
        return {n: replace(p, offset=True) for n, p in positions(state).items()}

    patch.setattr(microbatch, "positions", moved)


@mutation("microbatch", "test_microbatch.py::test_slices_are_neighbours_and_cover_the_batch")
def every_slice_starts_at_zero(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.microbatch import _Copier

    slice_inputs = _Copier._slice_inputs

    def from_zero(self: Any, m: int) -> None:
        bounds, self.bounds = self.bounds, [0, *self.bounds[1:]]
        self.bounds[m] = 0
        slice_inputs(self, m)
        self.bounds = bounds

    patch.setattr(_Copier, "_slice_inputs", from_zero)


@mutation("microbatch", "test_microbatch.py::test_sizes_are_rebound_to_the_microbatch")
def sizes_are_not_rebound(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.microbatch import _Copier

    slice_inputs = _Copier._slice_inputs

    def whole_size(self: Any, m: int) -> None:
        slice_inputs(self, m)
        self.env[m][self.total_source] = self.total

    patch.setattr(_Copier, "_slice_inputs", whole_size)


@mutation("microbatch", "test_microbatch.py::test_a_view_of_the_tokens_has_all_rows")
def views_of_inputs_are_not_merged(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.microbatch import _Copier

    merge = _Copier._merge

    def last(self: Any, node: Any) -> Any:
        is_view = self.state.effects.of(node).results & self.state.effects.live_in
        return self.env[-1][node] if is_view else merge(self, node)

    patch.setattr(_Copier, "_merge", last)


@mutation(
    "microbatch",
    "test_microbatch.py::test_effects_of_the_copies_are_apart_and_those_of_inputs_are_not",
)
def copies_share_their_storages(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.microbatch import _Copier

    patch.setattr(_Copier, "_private_keys", lambda self: frozenset())


@mutation("halves", "test_halves.py::test_every_microbatch_has_its_own_flight")
def one_flight_for_all_microbatches(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import halves

    split = halves._split_launch

    def same(state: Any, comm: Any, launch: Any, m: int, transport: str, flight: int) -> None:
        split(state, comm, launch, m, transport, 0)

    patch.setattr(halves, "_split_launch", same)


@mutation("halves", "test_halves.py::test_readers_depend_on_the_recv_and_the_recv_on_the_send")
def the_recv_writes_nothing(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import halves

    access = halves.Access

    def reads_only(reads: Any = frozenset(), writes: Any = frozenset(), results: Any = ()) -> Any:
        own = frozenset() if reads == writes else writes
        return access(reads, own, frozenset(results))

    patch.setattr(halves, "Access", reads_only)


@mutation(
    "schedule", "test_schedule_pass.py::test_a_later_microbatch_may_not_write_the_cache_first"
)
def broken_orders_are_accepted(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.schedule import Order

    patch.setattr(Order, "_check", nothing)


@mutation("schedule", "test_schedule_pass.py::test_the_graph_has_the_order_of_the_schedule")
def the_order_is_not_applied(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.schedule import Order

    patch.setattr(Order, "_reorder", nothing)


@mutation(
    "streams", "test_streams.py::test_a_send_waits_for_the_compute_stream_and_a_recv_for_the_send"
)
def the_compute_stream_never_waits(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import sync
    from dbo_fx.passes.streams import _Events, stream_of

    insert = _Events.insert

    def forgetful(self: Any, kept: Any) -> None:
        insert(self, kept)
        for node in list(self.state.graph.nodes):
            if node.target is sync.wait and stream_of(node) == "comp":
                self.state.graph.erase_node(node)

    patch.setattr(_Events, "insert", forgetful)


@mutation("streams", "test_streams.py::test_no_event_and_no_keepalive_is_redundant")
def every_dependency_has_its_own_event(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.streams import _Events

    sync_ = _Events._sync

    def again(self: Any, before: Any, after: Any, position: Any) -> None:
        sync_(self, before, after, position)
        self.known.clear()
        sync_(self, before, after, position)

    patch.setattr(_Events, "_sync", again)


@mutation(
    "streams",
    "test_streams.py::test_a_keepalive_stands_behind_the_recv_and_names_inputs_and_buffers",
)
def nothing_is_kept_alive(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import streams

    patch.setattr(streams, "_keep_alive", lambda state: 0)


@mutation("lower", "test_lower.py::test_layers_that_differ_in_a_constant_do_not_share_a_segment")
def structure_ignores_constants(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import lower

    def blind(graph: Any) -> str:
        index = {node: i for i, node in enumerate(graph.nodes)}
        lines = [f"{n.op} {n.target} {[index[a] for a in n.all_input_nodes]}" for n in graph.nodes]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    patch.setattr(lower, "structure", blind)


@mutation("lower", "test_lower.py::test_dependencies_speak_of_the_lowered_graph")
def dependencies_stay_with_the_old_nodes(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes.lower import _Lowering

    patch.setattr(_Lowering, "dependencies", lambda self: self.state.dependencies)


def no_violation(*_: object, **__: object) -> Iterator[Any]:
    """What a forgotten check of the hazard certificate finds."""
    return iter(())


@mutation("verify", "test_verify.py::test_a_dropped_wait_of_a_recv")
def orders_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates import hazards

    patch.setattr(hazards, "_required", no_violation)


@mutation("verify", "test_verify.py::test_a_dropped_keepalive")
def nothing_is_ever_freed(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates import of_graph

    patch.setattr(of_graph, "lifetimes_of", lambda *_: ())


@mutation("verify", "test_verify.py::test_a_launch_that_touches_nothing_must_be_waited_for_too")
def the_join_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates import hazards

    patch.setattr(hazards, "_forks_and_joins", no_violation)


@mutation("verify", "test_verify.py::test_more_in_flight_than_the_transport_allows")
def flights_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates import rules

    patch.setattr(rules, "_in_flight", no_violation)


@mutation("verify", "test_verify.py::test_a_record_moved_before_what_it_is_for")
def a_wait_waits_for_everything(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates.order import HappensBefore

    patch.setattr(HappensBefore, "before", lambda self, first, second: first < second)


@mutation("verify", "test_verify.py::test_a_lost_war_edge_is_missed")
def the_reference_forgets_readers(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates.reference import Reference

    required = Reference.required

    def without(self: Any, captured: Any) -> Any:
        return tuple(r for r in required(self, captured) if r.kind != "WAR")

    patch.setattr(Reference, "required", without)


@mutation("memory", "test_memory.py::test_the_curve_is_exact")
def keepalives_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import sync
    from dbo_fx.certificates import lifetimes

    found = lifetimes._Lifetimes.found

    def without(self: Any) -> Any:
        for node in self.order:
            if node.target is sync.keepalive:
                self.position[node] = -1
        return found(self)

    patch.setattr(lifetimes._Lifetimes, "found", without)


@mutation("memory", "test_memory.py::test_the_curve_is_exact")
def every_microbatch_has_half_of_the_rows(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.certificates import memory

    patch.setattr(memory, "microbatch_sizes", lambda tokens, count: (tokens // count,) * count)


@mutation("emit", "test_emit.py::test_the_comm_stream_is_current_for_sends_only")
def streams_are_not_switched_back(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.emit import _Streams

    call = _Streams._call

    def one_way(self: Any, method: str, *args: Any) -> None:
        if (method, args) != ("use", ("comp",)):
            call(self, method, *args)

    patch.setattr(_Streams, "_call", one_way)


@mutation("emit", "test_emit.py::test_the_trace_on_cpu_is_the_program")
def waits_are_not_emitted(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.emit import _Streams

    call = _Streams._call

    def silent(self: Any, method: str, *args: Any) -> None:
        if method != "wait":
            call(self, method, *args)

    patch.setattr(_Streams, "_call", silent)


@mutation("compiled", "test_emit.py::test_a_call_that_fails_half_way_leaves_nothing_in_flight")
def failed_calls_leave_operations_in_flight(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import compiled

    patch.setattr(compiled, "abandon_in_flight", nothing)


@mutation("comm/gloo", "test_emit.py::test_who_reads_before_the_recv_sees_poison")
def results_are_visible_at_once(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm.gloo import GlooReference

    launch = GlooReference.launch

    def eager(self: Any, inputs: Any, outputs: Any, *others: Any) -> Any:
        flight = launch(self, inputs, outputs, *others)
        self.finish(flight, outputs)
        return flight

    patch.setattr(GlooReference, "launch", eager)


@mutation(
    "comm/gloo",
    "test_emit.py::test_results_and_written_inputs_equal_the_microbatched_reference_bit_for_bit",
)
def received_data_stays_hidden(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm.gloo import GlooReference

    patch.setattr(GlooReference, "finish", nothing)


@mutation("comm/deepep_ll", "test_deepep_ll.py::test_a_second_send_destroys_the_first_operation")
def a_send_clears_nothing(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm.deepep_ll import _Buffer

    patch.setattr(_Buffer, "receive", nothing)


@mutation(
    "comm/deepep_ll",
    "test_deepep_ll.py::test_a_send_in_another_slot_is_refused_and_changes_nothing",
)
def the_index_is_whatever_the_program_says(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm.deepep_ll import LowLatencyTwin

    launch = LowLatencyTwin.launch

    def willing(
        self: Any, inputs: Any, outputs: Any, collective: str, group: str, slot: Any, name: str
    ) -> Any:
        self._buffers[group].index = slot
        return launch(self, inputs, outputs, collective, group, slot, name)

    patch.setattr(LowLatencyTwin, "launch", willing)


@mutation("comm/deepep_ll", "test_deepep_ll.py::test_a_region_starts_at_slot_0_or_is_refused")
def a_region_starts_anywhere(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm.deepep_ll import LowLatencyTwin

    patch.setattr(LowLatencyTwin, "begin", nothing)


@mutation("comm/deepep_ll", "test_deepep_ll.py::test_a_region_starts_at_slot_0_or_is_refused")
def a_failed_step_is_not_realigned(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm.deepep_ll import LowLatencyTwin

    patch.setattr(LowLatencyTwin, "realign", nothing)


@mutation("streams", "test_deepep_ll.py::test_one_stream_no_events_and_slots_in_turn")
def every_send_takes_slot_0(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.passes import streams

    give = streams._give_slots
    patch.setattr(streams, "_give_slots", lambda state, slots: give(state, 1))


@mutation(
    "differential",
    "test_differential.py::test_a_graph_that_mixes_rows_is_refused_and_the_rows_are_named",
)
def every_difference_is_rounding(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import differential

    patch.setattr(differential, "_relative", lambda *_: 0.0)


@mutation(
    "differential",
    "test_differential.py::test_written_inputs_are_written_once_by_the_first_call_as_by_later_ones",
)
def written_inputs_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.differential import Differential

    patch.setattr(Differential, "_restore", staticmethod(nothing))


@mutation(
    "differential", "test_differential.py::test_near_ties_in_the_router_are_replayed_and_counted"
)
def near_ties_are_not_replayed(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.differential import _Replay

    def plain(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    patch.setattr(_Replay, "__torch_dispatch__", plain)


@mutation("graphs", "test_cuda_graphs.py::test_a_moved_cache_is_named")
def addresses_of_static_arguments_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import graph_arguments

    patch.setattr(graph_arguments, "place_of", lambda tensor: (0, tensor.shape))


@mutation("graphs", "test_cuda_graphs.py::test_a_moved_weight_is_named")
def weights_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.graph_weights import Weights

    patch.setattr(Weights, "check", nothing)


@mutation(
    "graphs",
    "test_cuda_graphs.py::test_padded_rows_hold_zeros_or_the_named_value_not_the_last_steps_rows",
)
def padding_keeps_the_last_steps_rows(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.graph_inputs import StaticInputs

    def copy(self: Any, found: Any) -> None:
        for path, tensor in found.items():
            self.buffers[path][0].narrow(0, 0, tensor.shape[0]).copy_(tensor)

    patch.setattr(StaticInputs, "copy", copy)


@mutation(
    "graphs",
    "test_cuda_graphs.py::test_warm_up_and_capture_leave_caches_and_counters_as_they_were",
)
def warm_up_writes_stay(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import graphs

    patch.setattr(graphs, "kept_state", lambda tensors: nullcontext(lambda: None))


@mutation("graphs", "test_graph_device.py::test_a_spoilt_capture_lets_go_of_the_pool")
def a_spoilt_capture_holds_the_pool(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx import graph_device

    patch.setattr(graph_device, "end_spoilt_capture", nothing)


@mutation(
    "graphs", "test_graph_device.py::test_a_call_that_fails_under_capture_joins_what_has_forked"
)
def a_failed_capture_leaves_a_stream_loose(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.runtime import StreamPool

    patch.setattr(StreamPool, "abandon", nothing)


@mutation(
    "poison_on_free",
    "test_poison_on_free.py::test_memory_that_is_still_read_behind_its_last_use_reads_as_nan",
)
def freed_memory_keeps_its_values(patch: pytest.MonkeyPatch) -> None:
    from dbo_fx.poison_on_free import _Memory

    patch.setattr(_Memory, "dies", nothing)
