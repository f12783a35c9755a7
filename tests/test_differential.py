"""The split program against the unsplit graph, on the first call's inputs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dbo_fx
from dbo_fx.backend import compile_captured
from dbo_fx.comm.gloo import GlooReference
from dbo_fx.compiled import CompiledProgram
from dbo_fx.differential import Differential, has_values
from dbo_fx.errors import CommunicationError, SoundnessError
from dbo_fx.options import Options
from small_moe import (
    OPS,
    CachedMoe,
    H,
    PlainMoe,
    Traced,
    one_rank,
    rows,
    run_passes,
    traced,
    traced_model,
)


def compiled_of(trace: Traced, verify: str = "numeric") -> CompiledProgram:
    with nullcontext() if dist.is_initialized() else one_rank():
        return compile_captured(trace.fresh(), Options(verify=verify))


def traced_here(model: PlainMoe, *more: Any) -> Traced:
    return traced(model, (rows(), *more))


def test_equal_programs_run_and_say_so() -> None:
    trace = traced_model(CachedMoe, 2, ranks=1)
    compiled = compiled_of(trace)
    args, whole = trace.args(7), trace.args(7)
    with one_rank():
        out = compiled(*args)
        expected = trace.captured.module(*whole)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(args, whole, rtol=1e-4, atol=1e-4)
    assert compiled.checked is not None
    assert compiled.checked.startswith("agrees: 4 tensors, largest relative difference ")
    assert compiled.checked.endswith(", 0 near-tie top-k ids replayed")


def test_written_inputs_are_written_once_by_the_first_call_as_by_later_ones() -> None:
    trace = traced_model(CachedMoe, 1, ranks=1)
    compiled, args, reference = compiled_of(trace), trace.args(), trace.args()
    with one_rank():
        for _ in range(2):
            compiled(*args)
            compiled.module(*reference)
            torch.testing.assert_close(args, reference, rtol=0, atol=0)


def test_it_runs_once() -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    compiled = compiled_of(trace)
    assert compiled.checked is None
    with one_rank():
        compiled(*trace.args())
        first = compiled.checked
        compiled.checked = None
        compiled(*trace.args())
    assert first is not None
    assert compiled.checked is None


def test_a_refused_program_stays_refused_and_its_inputs_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that tries again must not get the wrong result without a word."""
    trace = traced_model(CachedMoe, 1, ranks=1)
    compiled, args, untouched = compiled_of(trace), trace.args(), trace.args()
    monkeypatch.setattr("dbo_fx.differential.TOLERANCE", {torch.float32: -1.0})
    with one_rank():
        for _ in range(2):
            with pytest.raises(SoundnessError, match=r"^splitting this batch changes results"):
                compiled(*args)
            torch.testing.assert_close(args, untouched, rtol=0, atol=0)


def test_a_first_call_that_failed_for_another_reason_leaves_the_comparison_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("peer lost")

    trace = traced_model(PlainMoe, 1, ranks=1)
    compiled = compiled_of(trace)
    with one_rank():
        with monkeypatch.context() as broken:
            broken.setattr(GlooReference, "finish", lost)
            with pytest.raises(CommunicationError, match="peer lost"):
                compiled(*trace.args())
        assert compiled.checked is None
        compiled(*trace.args())
    assert compiled.checked is not None


def test_static_verification_compares_nothing() -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    compiled = compiled_of(trace, "static")
    with one_rank():
        compiled(*trace.args())
    assert compiled.checked is None


torch.library.define("differential::whiten", "(Tensor x) -> Tensor")
torch.library.define("differential::lean", "(Tensor x) -> Tensor")
torch.library.register_fake("differential::whiten", torch.empty_like)
torch.library.register_fake("differential::lean", lambda x: x.new_empty(1, 1))
# These rules are wrong: a user may promise what is not so, and the comparison must find out.
dbo_fx.register_rule("differential::whiten", dbo_fx.elementwise)
dbo_fx.register_rule("differential::lean", dbo_fx.replicated)


@torch.library.impl("differential::whiten", "CPU")
def whiten(x: Tensor) -> Tensor:
    """Subtract the mean of the batch, only where the feature's sum is large."""
    return torch.where(x.sum(1, keepdim=True) > 100, x - x.mean(0, keepdim=True), x.clone())


@torch.library.impl("differential::lean", "CPU")
def lean(x: Tensor) -> Tensor:
    """A tiny number that has another sign for half of the batch."""
    return x.new_full((1, 1), (x.shape[0] - 4.5) * 1e-6)


class Whitening(PlainMoe):
    """Mixes rows in an op of its own."""

    def forward(self, x: Tensor) -> Any:
        return self.body(torch.ops.differential.whiten(x))


def test_a_graph_that_mixes_rows_is_refused_and_the_rows_are_named() -> None:
    with one_rank():
        trace = traced_here(Whitening())
        compiled, args = compiled_of(trace), trace.args()
        token = trace.captured.token_inputs[0].index
        args[token][1] = 50.0
        args[token][4] = 60.0
        with pytest.raises(SoundnessError) as caught:
            compiled(*args)
    text = str(caught.value)
    assert text.startswith("splitting this batch changes results: output 0 differs by ")
    assert "(allowed for torch.float32: 1e-04). Rows of dim 0 that differ: 1, 4. " in text
    assert text.endswith("(option split_dim), or keep the op out of the region.")
    assert compiled.checked is not None
    assert compiled.checked.startswith("differs: ")


class Scan(PlainMoe):
    """Keeps rows that saw each other."""

    def forward(self, x: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        state.index_copy_(0, torch.arange(x.shape[0]), torch.ops.differential.whiten(x * 100))
        return self.body(x)


def test_a_written_input_that_differs_is_refused_by_name() -> None:
    with one_rank():
        trace = traced_here(Scan(), torch.zeros(16, H))
        with pytest.raises(SoundnessError, match=r"changes results: input l_state_ differs by"):
            compiled_of(trace)(*trace.args())


class NearTie(PlainMoe):
    """Scores that tie up to 1e-6, and lean to another expert for whole batches than for halves."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        lean = torch.ops.differential.lean(h)
        scores = F.pad(h[:, :1] * 0 + lean, (0, 1)) + 0.5
        weights, ids = scores.topk(1, -1)
        got, ids, weights = OPS.dispatch(h, ids, weights, self.group)
        return OPS.combine(got * (ids * 10 + 1) * weights, h.shape[0], self.group)


def test_near_ties_in_the_router_are_replayed_and_counted() -> None:
    with one_rank():
        trace = traced_here(NearTie())
        compiled = compiled_of(trace)
        out = compiled(*trace.args())
        whole = trace.captured.module(*trace.args())
    assert compiled.checked is not None
    assert compiled.checked.startswith("agrees: ")
    assert compiled.checked.endswith(", 6 near-tie top-k ids replayed")
    assert (out[0] - whole[0]).abs().max() > 1


class Flat(PlainMoe):
    """[B, T, H] tokens, flattened for the gate."""

    def forward(self, x: Tensor) -> Any:
        return self.experts(0, self.attend(0, x.flatten(0, 1))).view(x.shape)


def test_top_k_ids_are_joined_along_an_inner_split_dim() -> None:
    with one_rank():
        x = torch.randn(3, 6, H, generator=torch.Generator().manual_seed(3))
        trace = traced(Flat(), (x,), dim=1)
        compiled = compiled_of(trace)
        out = compiled(*trace.args())
        torch.testing.assert_close(out, trace.captured.module(*trace.args()), rtol=1e-4, atol=1e-4)
    assert str(compiled.checked).endswith(" 0 near-tie top-k ids replayed")


class TopkByToken(PlainMoe):
    """Chooses in [T, B, E], so that the split dim moves to the front."""

    def forward(self, x: Tensor) -> Any:
        turned = x.transpose(0, 1)
        best = turned.softmax(-1).topk(2, -1)[0].transpose(0, 1).sum(-1, keepdim=True)
        return self.experts(0, (x * best).flatten(0, 1)).view(x.shape)


def test_top_k_ids_are_joined_where_the_split_dim_moved() -> None:
    with one_rank():
        x = torch.randn(3, 6, H, generator=torch.Generator().manual_seed(3))
        trace = traced(TopkByToken(), (x,), dim=1)
        compiled = compiled_of(trace)
        compiled(*trace.args())
    assert str(compiled.checked).startswith("agrees: ")
    assert str(compiled.checked).endswith(" 0 near-tie top-k ids replayed")


def test_a_wrong_unflattening_is_refused() -> None:
    """[B, T] leaves as [2, B * T]: the shape alone cannot say whether B or T is outside."""

    class Turned(PlainMoe):
        def forward(self, x: Tensor) -> Any:
            h = self.experts(0, x.flatten(0, 1))
            return h.T.contiguous()

    with one_rank():
        x = torch.randn(3, 6, H, generator=torch.Generator().manual_seed(3))
        trace = traced(Turned(), (x,), dim=1)
        with pytest.raises(SoundnessError, match="rows of one microbatch in several places"):
            compiled_of(trace)(*trace.args())


class Whole(PlainMoe):
    """Whole numbers and truth values beside floats, and a NaN."""

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return y, (y > 0).long(), y > 0, y[:, :1] * float("nan")


def test_integers_must_be_equal_and_nan_equals_nan() -> None:
    with one_rank():
        trace = traced_here(Whole())
        compiled = compiled_of(trace)
        compiled(*trace.args())
    assert str(compiled.checked).startswith("agrees: 4 tensors")


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_there_is_nothing_to_compare_without_values(kind: str) -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    real = tuple(trace.args())
    assert has_values(real)
    if kind == "meta":
        empty = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in real)
    else:
        mode = torch._subclasses.FakeTensorMode()
        empty = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in real)
    assert not has_values(empty)


def test_which_inputs_are_written_is_known_by_name() -> None:
    trace = traced_model(CachedMoe, 2, ranks=1)
    differential = Differential(run_passes(trace.fresh(), "emit"))
    names = [trace.captured.placeholders[i].name for i in differential.written]
    assert len(names) == 3
    assert sum("cache" in name for name in names) == 2
    assert sum("counter" in name for name in names) == 1
