"""The torch.compile entry point: options, refusals, fallbacks, agreement, dumps."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dbo_fx
from dbo_fx import backend
from dbo_fx.backend import compile_captured, graph_digest
from dbo_fx.errors import AgreementError, SoundnessError, UnsupportedGraphError
from dbo_fx.options import Options
from rank_pool import RankPool
from small_moe import (
    CachedMoe,
    H,
    PlainMoe,
    arguments,
    one_rank,
    rows,
    traced_model,
)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled code, no programs and no messages from other tests; a real group of one."""
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_TOLD", set())
    backend._COMPILATIONS.clear()
    with one_rank():
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages of dbo_fx so far."""
    caplog.set_level(logging.INFO, logger="dbo_fx")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "dbo_fx"]


def marked(count: int = 6) -> Tensor:
    x = rows(count)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def call(model: Callable[..., Any], *args: Any, fullgraph: bool = True, **options: Any) -> Any:
    """One call of the compiled model; what the backend raised, without Dynamo's wrapping."""
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=fullgraph, options=options)
    try:
        with torch.no_grad():
            return compiled(*args)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None


def test_a_model_is_compiled_once_for_all_batch_sizes() -> None:
    model = PlainMoe(2)
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True)
    with torch.no_grad():
        for count in (6, 4, 11, 32):
            x = marked(count)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    (program,) = dbo_fx.compilations()
    assert program.checked is not None
    assert program.checked.startswith("agrees: ")


class Sequences(PlainMoe):
    """[B, S, H] tokens."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x.flatten(0, 1)).view(x.shape)


@pytest.mark.parametrize("split_dim", [0, 1])
def test_one_of_two_marked_dims_is_split_and_the_other_stays_dynamic(split_dim: int) -> None:
    model = Sequences(2)
    compiled = torch.compile(
        model, backend="dbo_fx", fullgraph=True, options={"split_dim": split_dim}
    )
    with torch.no_grad():
        for sizes in ((4, 6), (5, 7), (9, 4)):
            x = torch.randn(*sizes, H, generator=torch.Generator().manual_seed(1))
            torch._dynamo.mark_dynamic(x, [0, 1])
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(dbo_fx.compilations()) == 1


def test_written_inputs_are_the_models() -> None:
    model = CachedMoe(2)
    ours, theirs = arguments(model), arguments(model)
    torch._dynamo.mark_dynamic(ours[0], 0)
    out = call(model, *ours)
    torch.testing.assert_close(out, model(*theirs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedul": "sequential"}, "unknown option 'schedul'. Did you mean 'schedule'?"),
        ({"schedule": "nothing"}, "no schedule is called 'nothing'; there are "),
        ({"num_microbatches": 0}, "option num_microbatches=0 is not allowed"),
        ({"num_microbatches": 3}, "does not fit schedule 'mlp_shared_overlap'"),
        ({"verify": "hope"}, "option verify='hope' is not allowed"),
        ({"on_unsupported": None}, "option on_unsupported=None is not allowed"),
        ({"inner_backend": "dbo_fx"}, "option inner_backend='dbo_fx' is not allowed"),
        ({"agree_timeout_s": -1}, "option agree_timeout_s=-1 is not allowed"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        call(PlainMoe(), marked(), **options)
    assert dbo_fx.compilations() == []


def test_a_mode_is_refused() -> None:
    compiled = torch.compile(PlainMoe(), backend="dbo_fx", mode="reduce-overhead")
    with pytest.raises(Exception, match="mode='reduce-overhead' belongs to Inductor"):
        compiled(marked())


class Random(PlainMoe):
    """Noise in front."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x + torch.rand_like(x))


class Doubled(PlainMoe):
    """An output that has no rows."""

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return y, y.sum()


class HalfLayer(PlainMoe):
    """A dispatch without a combine."""

    def forward(self, x: Tensor) -> Any:
        got, _, _ = torch.ops.dbo_fx.dispatch(x, x, x, self.group)
        return got * 2


@pytest.mark.parametrize(
    ("model", "error", "expected"),
    [
        (Random, SoundnessError, "draws random numbers"),
        (Doubled, SoundnessError, "cannot be put together from microbatches"),
        (HalfLayer, UnsupportedGraphError, "the last dispatch has no combine in this graph"),
    ],
)
def test_what_cannot_be_split_is_refused_or_left_whole(
    model: type[PlainMoe],
    error: type[Exception],
    expected: str,
    log: Callable[[], list[str]],
) -> None:
    with pytest.raises(error, match=expected):
        call(model(), marked())
    torch._dynamo.reset()
    options = {"on_unsupported": "fallback", "inner_backend": "eager"}
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        out = call(model(), marked(), **options)
        torch.manual_seed(0)
        torch.testing.assert_close(out, model()(marked()))
    told = [m for m in log() if m.startswith("dbo_fx does not split this graph, eager takes it: ")]
    assert len(told) == 1
    assert expected in told[0]
    assert dbo_fx.compilations() == []


def test_random_numbers_are_refused() -> None:
    with pytest.raises(SoundnessError, match="draws random numbers"):
        call(Random(), marked(), verify="static")


def test_an_unmarked_batch_is_refused_with_the_line_to_add() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"torch\._dynamo\.mark_dynamic\(x, 0\)"):
        call(PlainMoe(), rows())


def test_a_graph_without_moe_goes_to_the_inner_backend(log: Callable[[], list[str]]) -> None:
    out = call(lambda x: x * 2, marked(), inner_backend="eager")
    assert torch.equal(out, rows() * 2)
    assert dbo_fx.compilations() == []
    assert log() == ["no MoE communication in this graph: it goes to backend 'eager'"]


def test_an_unknown_inner_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"inner_backend='nothing'.*Known: .*inductor"):
        call(lambda x: x * 2, marked(), inner_backend="nothing")


def test_a_training_graph_is_refused() -> None:
    model = PlainMoe()
    model.head.requires_grad_(True)
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True)
    with pytest.raises(Exception, match=r"this is a training graph: input .*head.* requires grad"):
        compiled(marked())


class Broken(PlainMoe):
    """A graph break between dispatch and combine."""

    def forward(self, x: Tensor) -> Any:
        h = self.attend(0, x)
        got, _, _ = torch.ops.dbo_fx.dispatch(h, h, h, self.group)
        torch._dynamo.graph_break()
        return torch.ops.dbo_fx.combine(got, h.shape[0], self.group)


def test_a_graph_break_inside_a_layer_is_reported_with_its_place(
    log: Callable[[], list[str]],
) -> None:
    with pytest.raises(UnsupportedGraphError, match="has no combine in this graph"):
        call(Broken(), marked(), fullgraph=False)
    (told,) = [m for m in log() if m.startswith("graph break")]
    assert told.startswith(f"graph break at {__file__}:")
    line = int(told.removeprefix(f"graph break at {__file__}:").split(":")[0])
    assert "graph_break()" in Path(__file__).read_text().splitlines()[line - 1]
    assert told.endswith("Layers on both sides are compiled apart; use fullgraph=True.")


def test_programs_print_readably() -> None:
    compiled = compile_captured(traced_model(PlainMoe, 2, ranks=1).fresh(), Options())
    digest = compiled.program.digest
    assert repr(compiled) == (
        f"CompiledProgram(mlp_shared_overlap, layers=2, microbatches=2, digest={digest})"
    )
    lines = str(compiled).splitlines()
    assert lines[0] == "MoE layers: 2, microbatches: 2"
    assert lines[1].startswith("ops per phase: A0 ")
    assert lines[2] == "segments: 14 calls of 5 distinct ones"
    assert lines[3] == (
        "communication per layer: D all_gather x3 over group 0; "
        "C reduce_scatter_sum x1 over group 0"
    )
    assert lines[4] == "certificate:"
    parts = [line.strip().split(":")[0] for line in lines if line.startswith("  ")]
    assert [p for p in parts if " " not in p] == ["hazards", "ranks", "overlap", "memory"]
    names = [line.split()[0] for line in lines[5:] if not line.startswith(" ")]
    assert names == (
        [
            "normalize",
            "regions",
            "soundness",
            "microbatch",
            "halves",
            "schedule",
            "streams",
            "lower",
            "verify",
            "memory",
            "segments",
            "emit",
        ]
    )
    assert not any(" at 0x" in line for line in lines)
    assert str(compiled.captured).startswith("captured graph: ")


def test_trace_and_compile_graph_do_the_same_without_a_backend() -> None:
    captured = dbo_fx.trace(PlainMoe(2), (rows(),), mark=0)
    program, module = dbo_fx.compile_graph(captured, {"schedule": "sequential"})
    assert program.schedule == "sequential"
    assert dbo_fx.compilations()[-1].module is module
    with pytest.raises(UnsupportedGraphError, match="no input has a symbolic size"):
        dbo_fx.trace(PlainMoe(1), (rows(),))


def test_the_digest_tells_programs_and_graphs_apart() -> None:
    def digest(model: type[PlainMoe], schedule: str) -> str:
        options = Options(schedule=schedule)
        return graph_digest(compile_captured(traced_model(model, ranks=1).fresh(), options))

    assert digest(PlainMoe, "sequential") == digest(PlainMoe, "sequential")
    schedules = ("sequential", "mlp_shared_overlap")
    assert len({digest(m, s) for m in (PlainMoe, CachedMoe) for s in schedules}) == 4


def test_a_batch_that_is_too_small_is_refused() -> None:
    model = PlainMoe()
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True)
    with torch.no_grad():
        compiled(marked(4))
        with pytest.raises(
            SoundnessError, match=r"a batch of 3 rows cannot be split: microbatch 0"
        ):
            compiled(marked(3))
        torch.testing.assert_close(compiled(marked(5)), model(rows(5)), rtol=1e-4, atol=1e-4)


class Flagged(PlainMoe):
    """Another graph for every value of a Python flag, over a group of the test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.group = str(dist.new_group().group_name)

    def forward(self, x: Tensor, twice: bool) -> Any:  # type: ignore[override]
        return self.body(x * 2 if twice else x)


def refused(rank: int, wait: bool, *args: Any, **options: Any) -> str:
    """What stopped the compilation."""
    compiled = torch.compile(Flagged(), backend="dbo_fx", fullgraph=True, options=options)
    with torch.no_grad():
        if wait:
            compiled(marked(), False)
            if rank == 0:
                dist.barrier()
                return ""
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            compiled(marked(), *args)
    if wait:
        dist.barrier()
    assert isinstance(caught.value.inner_exception, AgreementError)
    return str(caught.value.inner_exception)


def recompile_alone(rank: int) -> str:
    """Rank 1 sees another flag and compiles anew; rank 0 does not."""
    torch._dynamo.reset()
    return refused(rank, True, True, agree_timeout_s=1.0)


def test_a_rank_that_compiles_alone_is_stopped_and_named(ranks: RankPool) -> None:
    nothing, message = ranks(recompile_alone, timeout_s=60)
    assert nothing == ""
    assert "rank 0 of 2 wrote nothing within 1 s" in message
    assert "TORCH_LOGS=recompiles shows why a rank compiled" in message


def disagree(rank: int) -> str:
    """The ranks ask for different schedules."""
    torch._dynamo.reset()
    schedule = ("sequential", "mlp_shared_overlap")[rank]
    return refused(rank, False, False, agree_timeout_s=20.0, schedule=schedule)


def test_ranks_with_different_programs_are_stopped(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks(disagree, timeout_s=60)):
        assert f"rank {rank} has " in message
        assert f"but rank {1 - rank} has " in message


def one_refuses(rank: int) -> str:
    """Rank 0's model draws random numbers; rank 1 must not wait for it until the timeout."""
    torch._dynamo.reset()
    model = PlainMoe()
    noisy = (lambda x: model(x + torch.rand_like(x))) if rank == 0 else model
    compiled = torch.compile(
        noisy, backend="dbo_fx", fullgraph=True, options={"agree_timeout_s": 600.0}
    )
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(marked())
    return f"{type(caught.value.inner_exception).__name__}: {caught.value.inner_exception}"


def test_a_rank_that_refuses_does_not_keep_the_others_waiting(ranks: RankPool) -> None:
    own, other = ranks(one_refuses, timeout_s=60)
    assert own.startswith("SoundnessError: ")
    assert "draws random numbers" in own
    assert other.startswith("AgreementError: ")
    assert "but rank 0 has 'refused: rand_like" in other


def split_on_two_ranks(rank: int) -> bool:
    """The whole path with a real peer."""
    torch._dynamo.reset()
    model: nn.Module = PlainMoe(2)
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True)
    x = rows(6, seed=rank)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        return torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_two_ranks_agree_with_the_unsplit_model(ranks: RankPool) -> None:
    assert ranks(split_on_two_ranks, timeout_s=120) == [True, True]
