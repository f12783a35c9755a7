"""Predicted memory against what the emitted module really holds, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import dbo_fx
from dbo_fx.backend import compile_captured
from dbo_fx.certificates.measure import LiveStorages, measure_segments, peak_of
from dbo_fx.certificates.memory import MemoryCertificate, memory_certificate, microbatch_sizes
from dbo_fx.certificates.memory_report import Alive, MemoryReport, Moment, readable
from dbo_fx.emit import Emit
from dbo_fx.errors import OptionError, VerificationError
from dbo_fx.models import MoeConfig, MoeDecoder
from dbo_fx.options import Options
from dbo_fx.passes.memory import Memory
from dbo_fx.pipeline import State
from dbo_fx.symbols import ConcreteSizes
from small_moe import CachedMoe, PlainMoe, Traced, TwoLaunches, one_rank, run_passes, traced_model

SCHEDULES = ("sequential", "mlp_shared_overlap")
SMALL = MoeConfig(
    vocab=32, hidden=16, layers=3, heads=2, experts=4, expert_hidden=24, shared_hidden=16,
    dense_hidden=24, dense_layers=(0,), positions=16,
)  # fmt: skip


class Tracker(Interpreter):
    """Runs a module as its Python does, values dropped after their last use, and counts storages.

    Attributes:
        held: Bytes of what the module created and still holds, by the call that has just run.
    """

    def held_by(self, args: Sequence[Any]) -> dict[str, int]:
        self.held: dict[str, int] = {}
        self.live = LiveStorages(args)
        with torch.no_grad():
            self.run(*args)
        return self.held

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op.startswith("call"):
            self.held[n.name] = self.live.note(result)
        return result if n.users else None


def lowered(model: type[PlainMoe], layers: int, schedule: str) -> tuple[Traced, State]:
    trace = traced_model(model, layers, 1)
    return trace, run_passes(trace.fresh(), "lower", schedule)


def assert_exact(module: GraphModule, report: MemoryReport, args: Sequence[Any]) -> None:
    held = Tracker(module).held_by(args)
    predicted = [(m.name, m.held_bytes) for m in report.curve]
    assert predicted == [(m.name, held[m.name]) for m in report.curve]
    assert report.held_peak_bytes == max(held.values()) > 0


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_curve_is_exact(model: type[PlainMoe], schedule: str, layers: int) -> None:
    with one_rank():
        trace, state = lowered(model, layers, schedule)
        certificate = memory_certificate(state)
        module = Emit().apply(state)[0].module
        assert module is not None
        for count in (6, 7, 9):  # Even and odd; 6 is the traced size.
            assert_exact(module, certificate.at(count), trace.args(count))
    assert certificate.reports == (certificate.at(6),)
    assert certificate.layers == layers


class Views(PlainMoe):
    """Returns parts of its result, which are merged like any other value."""

    def forward(self, x: Tensor) -> Any:
        """[T, H] -> [T, H], [T, 2], [T, H - 1]."""
        y = super().forward(x)
        return y, x[:, :2], y[:, 1:]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_merged_views_have_memory_of_their_own(schedule: str) -> None:
    """A view's storage is its base's, but the merge of views is as large as it looks."""
    test_the_curve_is_exact(Views, schedule, 1)


@cache
def decoder() -> dbo_fx.CompiledProgram:
    """A decoder with dense, shared and routed experts; one rank's group must be there."""
    tokens = torch.zeros(4, 8, dtype=torch.long)
    captured = dbo_fx.trace(MoeDecoder(SMALL), (tokens,), mark=0)
    return compile_captured(captured, Options(verify="static"))


@pytest.mark.parametrize("batch", [4, 5])
def test_a_decoder_of_three_layers_is_exact(batch: int) -> None:
    with one_rank():
        compiled = decoder()
        args = [value(n, batch) for n in compiled.captured.placeholders]
        assert_exact(compiled.module, compiled.memory(batch), args)


def value(node: Node, batch: int) -> Any:
    """A graph input: token ids, or weights of the traced shape."""
    fake = node.meta["val"]
    if not isinstance(fake, Tensor):
        return batch
    shape = [s if isinstance(s, int) else batch for s in fake.shape]
    return torch.zeros(shape, dtype=fake.dtype)


def unsplit_peak(state: State, args: Sequence[Any]) -> int:
    """The least of three runs: a thread of gloo may still hold what it has carried."""

    def peak() -> int:
        mine = [a.clone() if isinstance(a, Tensor) else a for a in args]  # Caches are written.
        return max(Tracker(state.captured.module).held_by(mine).values())

    return min(peak() for _ in range(3))


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
def test_the_unsplit_peak_is_exact(model: type[PlainMoe]) -> None:
    with one_rank():
        trace, state = lowered(model, 2, "mlp_shared_overlap")
        certificate = memory_certificate(state)
        for count in (6, 7):
            report = certificate.at(count)
            assert report.unsplit_peak_bytes == unsplit_peak(state, trace.args(count))


def test_a_program_of_one_microbatch_holds_what_the_unsplit_graph_holds() -> None:
    """Nearly: a segment's inputs stay alive until it returns."""
    with one_rank():
        trace = traced_model(PlainMoe, 2, 1)
        state = run_passes(trace.fresh(), "lower", "sequential", 1)
        report = memory_certificate(state).at(8)
        assert report.microbatches == (8,)
        assert 1 <= report.ratio < 2


def test_where_the_peak_is_and_who_is_alive() -> None:
    with one_rank():
        _, state = lowered(PlainMoe, 2, "mlp_shared_overlap")
        report = memory_certificate(state).at(8)
    assert (report.held.name, report.held.layer) == ("A_m0_l1", 1)
    assert (report.during.name, report.during.layer) == ("A_m0_l1", 1)
    assert sum(a.bytes for a in report.alive) == report.peak_bytes
    assert list(report.alive) == sorted(report.alive, key=lambda a: -a.bytes)
    names = {a.name: a for a in report.alive}
    assert names["C_m1_l0_out0"] == Alive("C_m1_l0_out0", 128, "C_m1_l0_buffers", "A_m1_l1")
    assert names["mul_1_m1"].dies == "C_m1_l0_recv"  # The keepalive behind it.


def test_segments_are_measured_once_each() -> None:
    """Ops of which composite ones are made need memory too: measured is never below computed."""
    with one_rank():
        _, state = lowered(PlainMoe, 2, "mlp_shared_overlap")
        measured = measure_segments(state, 7)
        certificate = memory_certificate(state, [7])
    assert {name for name, _ in measured} == set(state.segments)
    assert {rows for _, rows in measured} == {3, 4}
    computed, known = certificate.reports[1], certificate.with_measured(measured).reports[1]
    assert [m.held_bytes for m in computed.curve] == [m.held_bytes for m in known.curve]
    assert all(
        one.during_bytes <= other.during_bytes
        for one, other in zip(computed.curve, known.curve, strict=True)
    )


@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_measured_segments_the_whole_peak_is_exact(
    model: type[PlainMoe], schedule: str
) -> None:
    """The module's own Python runs here, and every op that allocates is followed."""
    with one_rank():
        trace, state = lowered(model, 2, schedule)
        certificate = memory_certificate(state)
        measured = {n: measure_segments(state, n) for n in (6, 9)}
        module = Emit().apply(state)[0].module
        assert module is not None
        for count in (6, 9):
            args = trace.args(count)
            live = LiveStorages(args)
            with torch.no_grad(), live:
                module(*args)
            report = certificate.with_measured(measured[count]).at(count)
            assert report.peak_bytes == live.peak_bytes


def test_a_segment_of_plain_ops_is_measured_as_computed() -> None:
    with one_rank():
        _, state = lowered(TwoLaunches, 1, "mlp_shared_overlap")
        node = next(n for n in state.graph.nodes if n.name == "MLP_m0_l0")
        sizes = ConcreteSizes(state.captured.symbol, 4)
        measured = peak_of(state.segments[str(node.target)], sizes, None)
        moment = next(m for m in memory_certificate(state).at(8).curve if m.name == node.name)
    assert moment.during_bytes == moment.held_bytes
    assert measured == 4 * 8 * 4


def test_a_ratio_above_the_limit_is_refused() -> None:
    with one_rank():
        state = run_passes(traced_model(PlainMoe, 2, 1).fresh(), "verify")
        ratio = memory_certificate(state).reports[0].ratio
        certificate = Memory(ratio).apply(state)[0].certificate
        assert certificate is not None
        assert certificate.memory is not None
        with pytest.raises(VerificationError) as caught:
            Memory(ratio - 0.01).apply(state)
    text = str(caught.value)
    assert text.startswith(f"memory at 6 rows: {ratio:.2f} times the unsplit graph's")
    assert "A_m0_l1 (layer 1)" in text
    assert "\n  inside A_m0_l1 " in text
    assert re.search(r"\n  add_m1 96 B \(A_m1_l0 to A_m1_l1\)\n", text)
    assert text.endswith("or a larger max_memory_ratio.")


def test_a_new_size_is_checked_on_its_first_call() -> None:
    """With few rows the caches' masks weigh more, so the ratio depends on the size."""
    with one_rank():
        trace = traced_model(PlainMoe, 2, 1)
        ratios = {n: memory_of(trace, n).ratio for n in (6, 7)}
        assert ratios[7] > ratios[6]
        limit = (ratios[6] + ratios[7]) / 2
        compiled = compile_captured(trace.fresh(), Options(verify="static", max_memory_ratio=limit))
        compiled(*trace.args(6))
        for _ in range(2):
            with pytest.raises(VerificationError, match="memory at 7 rows"):
                compiled(*trace.args(7))
        compiled(*trace.args(6))


def memory_of(trace: Traced, count: int) -> MemoryReport:
    return memory_certificate(run_passes(trace.fresh(), "lower")).at(count)


def test_a_program_tells_its_memory() -> None:
    with one_rank():
        compiled = compile_captured(traced_model(PlainMoe, 2, 1).fresh(), Options())
        assert compiled.memory() == compiled.memory(6)
        assert compiled.memory(8).tokens == 8
    assert any(r.name == "memory" for r in compiled.reports)


def test_text_and_json() -> None:
    with one_rank():
        _, state = lowered(PlainMoe, 2, "mlp_shared_overlap")
        certificate = memory_certificate(state, [8, 6])
    assert [r.tokens for r in certificate.reports] == [6, 8]
    first, second, third = str(certificate.reports[0]).splitlines()
    assert first.startswith("memory at 6 rows: peak ")
    assert second.startswith("  alive then: ")
    assert third.startswith("  between segments at most ")
    data = json.loads(json.dumps(certificate.to_json()))
    assert data["layers"] == 2
    report = data["sizes"][1]
    assert report["microbatches"] == [4, 4]
    assert max(m["held_bytes"] for m in report["curve"]) == report["held_peak_bytes"]
    assert report["ratio"] == certificate.reports[1].ratio


def test_no_size_known_while_tracing() -> None:
    with one_rank():
        _, state = lowered(PlainMoe, 1, "sequential")
        certificate = memory_certificate(state)
    nothing = MemoryCertificate(1, (), certificate._model)
    assert "ask for one with at(tokens)" in str(nothing)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True])
def test_a_size_is_a_number_of_rows(bad: Any) -> None:
    with one_rank():
        _, state = lowered(PlainMoe, 1, "sequential")
        with pytest.raises(OptionError, match="is no batch size; pass an integer >= 1"):
            memory_certificate(state).at(bad)


@pytest.mark.parametrize("bad", [0, -1.5, "2", True])
def test_the_option_is_a_number_above_zero(bad: object) -> None:
    with pytest.raises(OptionError, match="max_memory_ratio"):
        Options.parse({"max_memory_ratio": bad})
    assert Options(max_memory_ratio=1.5).max_memory_ratio == 1.5


def test_microbatches_are_cut_as_the_program_cuts_them() -> None:
    assert microbatch_sizes(7, 2) == (3, 4)
    assert microbatch_sizes(8, 3) == (2, 3, 3)


def test_bytes_read_well() -> None:
    sizes = (12, 2048, 3 * 2**20, 5 * 2**30, 2048 * 2**30)
    assert [readable(s) for s in sizes] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB", "2048.0 GiB"]
    assert str(Moment("A", None, 1, 1)) == "A"
