"""Graphs of a call by bucket: buffers, addresses, outputs, state, failures; on CPU by the twin."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_fx import Bucket, CudaGraphs, GraphOptions
from dbo_fx.agree import agree_batch
from dbo_fx.capturing import what_captures
from dbo_fx.comm import in_flight
from dbo_fx.decision import BatchKind
from dbo_fx.errors import AgreementError, OptionError, SoundnessError
from dbo_fx.graph_arguments import Arguments
from dbo_fx.graph_inputs import StaticInputs
from dbo_fx.graph_weights import Weights
from dbo_fx.padding import STEP, Padding

H = 4


class Model(nn.Module):
    """Rows times a weight; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, H + 1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor, table: Tensor | None = None, factor: float = 1.0) -> Any:
        """x [T, H], table [N]."""
        self.calls += 1
        self.seen.add_(1)
        return {"rows": x * self.scale * factor, "count": x.shape[0], "table": table}


class Ops(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def captured(buckets: list[Any], **options: Any) -> tuple[Model, CudaGraphs]:
    model = Model()
    graphs = CudaGraphs(model, options=GraphOptions(**options))
    graphs.capture(buckets, rows(3))
    return model, graphs


# --- replays


def test_a_replay_pads_to_the_smallest_bucket_and_cuts() -> None:
    model, graphs = captured([8, 4])
    for count, bucket in ((1, 4), (4, 4), (5, 8), (8, 8), (0, 4)):
        x = rows(count, seed=count)
        out = graphs(x)
        assert torch.equal(out["rows"], x * model.scale)
        assert out["count"] == bucket
    assert graphs.statistics.hits == {Bucket(4): 3, Bucket(8): 2}


def test_the_largest_is_captured_first_and_once() -> None:
    _, graphs = captured([4, 16, Bucket(8, BatchKind.DECODE), 16])
    order = [16, 8, 4]
    assert [b.rows for b in graphs.statistics.captured] == order
    assert [b.rows for b in graphs.buckets] == order


def test_a_bucket_without_a_graph_runs_eager() -> None:
    model, graphs = captured([4])
    before = model.calls
    x = rows(5)
    assert torch.equal(graphs(x)["rows"], x * model.scale)
    assert model.calls == before + 1
    assert graphs.statistics.eager == {"no graph for 5 rows": 1}
    assert not graphs.statistics.hits


def test_statistics_print_readably() -> None:
    _, graphs = captured([4, Bucket(2, BatchKind.DECODE)])
    graphs(rows(3))
    graphs(rows(9))
    assert str(graphs.statistics) == (
        "1 replays, 1 eager runs\n"
        "  1 replays: 4 rows, with prefill, split\n"
        "  0 replays: 2 rows, decode-only, split\n"
        "  1 eager: no graph for 9 rows"
    )


def test_outputs_are_valid_until_the_next_replay_of_any_graph() -> None:
    _, graphs = captured([8, 4])
    small = graphs(rows(4))["rows"]
    assert torch.equal(small, graphs(rows(4))["rows"])
    graphs(rows(8))
    assert small.isnan().all()


def test_outputs_are_cloned_on_request() -> None:
    model, graphs = captured([8, 4], clone_outputs=True)
    x = rows(3)
    first = graphs(x)["rows"]
    graphs(rows(8))
    assert torch.equal(first, x * model.scale)


def test_outputs_are_poison_before_the_first_replay_and_after_the_release() -> None:
    _, graphs = captured([4])
    (graph,) = graphs._graphs.values()
    out = graph.captured.outputs["rows"]
    assert out.isnan().all()
    graphs(rows(4))
    assert not out.isnan().any()
    graphs.reset()
    assert out.isnan().all()
    assert graphs.buckets == ()


def test_padded_rows_hold_zeros_or_the_named_value_not_the_last_steps_rows() -> None:
    seen = []

    def call(x: Tensor, slots: Tensor) -> Tensor:
        seen.append((x.clone(), slots.clone()))
        return x

    graphs = CudaGraphs(call, pad={"slots": -1})
    graphs.capture([4], rows(4), torch.arange(4))
    graphs(rows(4), torch.arange(4))
    graphs(rows(2), slots=torch.tensor([7, 8]))
    x, slots = seen[-1]
    assert torch.equal(x, torch.cat([rows(2), torch.zeros(2, H)]))
    assert slots.tolist() == [7, 8, -1, -1]


def test_smaller_buckets_use_the_largest_ones_buffer() -> None:
    _, graphs = captured([4, 8])
    pointers = {g.inputs.buffers["x"][0].data_ptr() for g in graphs._graphs.values()}
    assert len(pointers) == 1


def test_a_replay_runs_only_copies_and_one_launch() -> None:
    model, graphs = captured([4])
    launched: list[Any] = []
    graphs._device.replay = launched.append  # type: ignore[method-assign, union-attr]
    before = model.calls
    x = rows(3)
    with Ops() as ops:
        graphs(x)
    assert model.calls == before
    assert len(launched) == 1
    views = {"aten.slice.Tensor"}
    assert [n for n in ops.names if n not in views] == ["aten.copy_.default", "aten.fill_.Scalar"]


def test_the_split_dim_may_be_another_one() -> None:
    graphs = CudaGraphs(lambda x: x * 2, split_dim=1)
    graphs.capture([6, 4], torch.ones(3, 5))
    x = torch.arange(9.0).view(3, 3)
    assert torch.equal(graphs(x), x * 2)


def test_plans_are_captured_apart() -> None:
    graphs = CudaGraphs({"split": lambda x: x * 2, "unsplit": lambda x: x * 3})
    graphs.capture([4, Bucket(4, plan="unsplit")], rows(4))
    assert torch.equal(graphs(rows(4)), rows(4) * 2)
    unsplit = graphs.replay(Bucket(4, plan="unsplit"), (rows(4),), {}, padded=False)
    assert torch.equal(unsplit, rows(4) * 3)
    with pytest.raises(OptionError, match=r"plan 'other', wanted one of \['split', 'unsplit'\]"):
        graphs.capture([Bucket(2, plan="other")], rows(4))


# --- static inputs


@dataclass
class Meta:
    """What an engine passes beside the tokens."""

    caches: list[Tensor]
    longest: int


class Past:
    """A plain object, no container to pytree."""

    def __init__(self) -> None:
        self.layers = {"keys": torch.zeros(6, H), "values": torch.zeros(6, H)}


def attend(x: Tensor, meta: Meta, past: Past | None = None, **more: Any) -> Tensor:
    return x + meta.caches[0][0] + (0 if past is None else past.layers["keys"].sum(0))


def moved(meta: Meta, past: Past, /, **changes: Any) -> str:
    """What a replay says after a change."""
    graphs = CudaGraphs(attend)
    graphs.capture([4], rows(4), meta, past=past, flag=True)
    again = {"meta": meta, "past": past, "flag": True}
    graphs(rows(2), **again)
    for name, change in changes.items():
        again[name] = change(again[name]) if callable(change) else change
    with pytest.raises(SoundnessError) as error:
        graphs(rows(2), **again)
    assert graphs.statistics.hits.total() == 1
    return str(error.value)


def parts() -> tuple[Meta, Past]:
    return Meta([torch.ones(6, H), torch.ones(6, H)], 5), Past()


def test_a_moved_cache_is_named() -> None:
    meta, past = parts()
    error = moved(meta, past, meta=lambda m: Meta([m.caches[0], m.caches[1].clone()], 5))
    assert "static argument 'meta.caches[1]' lies at 0x" in error
    assert "capture again" in error


def test_a_moved_tensor_in_a_plain_object_is_named() -> None:
    def change(past: Past) -> Past:
        past.layers["values"] = past.layers["values"].clone()
        return past

    assert "static argument \"past.layers['values']\" lies at" in moved(*parts(), past=change)


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("keys", "length")

    def __init__(self, keys: Tensor | None, length: float) -> None:
        self.keys, self.length = keys, length


def test_a_moved_tensor_in_an_object_with_slots_is_named() -> None:
    graphs = CudaGraphs(lambda x, cache: x + cache.keys[0])
    cache = Slotted(torch.zeros(2), 1)
    graphs.capture([4], rows(3), cache)
    graphs(rows(3), cache)
    cache.keys = torch.zeros(2)
    with pytest.raises(SoundnessError, match=r"'cache\.keys' lies at"):
        graphs(rows(3), cache)


@pytest.mark.parametrize("kind", [Slotted, SimpleNamespace])
def test_a_changed_value_in_an_object_without_tensors_is_named(kind: Any) -> None:
    graphs = CudaGraphs(lambda x, info: x * info.length)
    info = kind(keys=None, length=math.nan)
    graphs.capture([4], rows(3), info)
    graphs(rows(3), info)
    info.length = 2
    with pytest.raises(SoundnessError, match=r"'info\.length': found 2, the capture had nan"):
        graphs(rows(3), info)


def test_a_static_tensor_of_another_shape_is_named() -> None:
    error = moved(*parts(), meta=lambda m: Meta([m.caches[0][:3], m.caches[1]], 5))
    assert "'meta.caches[0]' has shape [3, 4]" in error


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"meta": lambda m: Meta(m.caches, 6)},
            "argument 'meta.longest': found 6, the capture had 5",
        ),
        ({"meta": lambda m: Meta(m.caches[:1], 5)}, "argument 'meta.caches': found list of 1"),
        ({"past": None}, "argument 'past': found None, the capture had Past"),
        ({"flag": 1}, "argument 'flag': found 1, the capture had True"),
    ],
)
def test_a_changed_value_is_named(change: dict[str, Any], wanted: str) -> None:
    assert wanted in moved(*parts(), **change)


def test_token_rows_of_another_type_are_refused() -> None:
    _, graphs = captured([4])
    with pytest.raises(SoundnessError, match=r"argument 'x' is torch.float64 \[2, 4\]"):
        graphs(rows(2).double())
    with pytest.raises(SoundnessError, match=r"argument 'x' is torch.float32 \[2, 5\]"):
        graphs(torch.zeros(2, 5))


def test_a_moved_weight_is_named() -> None:
    model, graphs = captured([4])
    model.scale.data = model.scale.data.clone()
    with pytest.raises(SoundnessError, match="weight 'scale' lies at"):
        graphs(rows(2))
    model, graphs = captured([4], check_weights=False)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    graphs(rows(2))


def test_a_capture_anew_takes_the_new_memory() -> None:
    model, graphs = captured([4])
    model.scale.data = model.scale.data * 2
    graphs.capture([4], rows(4))
    assert torch.equal(graphs(rows(4))["rows"], rows(4) * model.scale)
    assert graphs.statistics.captured == {Bucket(4): 2}


def test_a_replaced_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(H, H), nn.Sequential(nn.Linear(H, H))).requires_grad_(False)
    graphs = CudaGraphs(model)
    graphs.capture([4], rows(4))
    graphs(rows(4))
    model[1][0] = nn.Linear(H, H)
    with pytest.raises(SoundnessError, match=r"module '1\.0' is another one"):
        graphs(rows(4))


def test_two_arguments_stay_two_if_the_example_has_one_tensor_for_both() -> None:
    graphs = CudaGraphs(
        lambda x, y, other: x - 2 * y + other, options=GraphOptions(copied=("other",))
    )
    zeros = torch.zeros(4, H)
    graphs.capture([8], zeros, zeros, torch.zeros(1, H))
    x, y, other = rows(4, 1), rows(4, 2), torch.ones(1, H)
    assert torch.equal(graphs(x, y, other), x - 2 * y + other)
    assert torch.equal(graphs(x, x, other), x - 2 * x + other)


def test_a_graph_is_where_anything_is_on_cuda_and_so_is_all_that_changes() -> None:
    with FakeTensorMode():
        there = torch.empty(2, H, device="cuda")

    def inputs(copied: Tensor, weights: list[Tensor]) -> StaticInputs:
        held = Weights({})
        held.tensors += weights
        arguments = Arguments({"x": copied, "y": rows(2)}, {id(copied)})
        buffers = {"x": (copied, True)}
        return StaticInputs(2, CudaGraphs(Model()).tokens, arguments, held, buffers, {})

    assert inputs(rows(2), []).device().type == "cpu"
    assert inputs(there, []).device().type == "cuda"
    with pytest.raises(SoundnessError, match="'x', which changes with every step, lies on cpu"):
        inputs(rows(2), [there]).device()


def test_values_on_the_host_are_part_of_a_graph_on_a_device() -> None:
    length, x = torch.tensor([3.0, math.nan]), rows(2)
    arguments = Arguments({"x": x, "length": length}, {id(x)})
    inputs = StaticInputs(
        2, CudaGraphs(Model()).tokens, arguments, Weights({}), {"x": (x, True)}, {}
    )
    inputs.note_host(torch.device("cpu"))
    assert not inputs.host
    inputs.note_host(torch.device("cuda"))
    inputs.check({"x": x, "length": length})
    length[0] = 4
    with pytest.raises(SoundnessError, match="'length' lies on the CPU and has changed"):
        inputs.check({"x": x, "length": length})


def test_further_arguments_are_copied_on_request() -> None:
    graphs = CudaGraphs(
        lambda x, bias: x + bias, options=GraphOptions(copied=("bias",)), token_args=["x"]
    )
    graphs.capture([4], rows(4), torch.zeros(H))
    assert torch.equal(graphs(rows(2), torch.ones(H)), rows(2) + 1)
    with pytest.raises(SoundnessError, match=r"argument 'bias' is torch.float32 \[1\]"):
        graphs(rows(2), torch.ones(1))


def test_static_arguments_are_never_copied() -> None:
    table = torch.zeros(6)
    model = Model()
    graphs = CudaGraphs(model)
    graphs.capture([4], rows(4), table)
    assert graphs(rows(4), table)["table"] is table


# --- state


def append(x: Tensor, cache: Tensor, counter: Tensor) -> Tensor:
    cache.index_copy_(0, counter + torch.arange(x.shape[0]), x)
    counter.add_(x.shape[0])
    return x + 1


def test_warm_up_and_capture_leave_caches_and_counters_as_they_were() -> None:
    cache, counter = torch.zeros(4, H), torch.zeros(1, dtype=torch.int64)
    graphs = CudaGraphs(append, options=GraphOptions(warmup=5))
    # Without putting the counter back the third warm-up would write behind the cache.
    graphs.capture([2], rows(2), cache, counter)
    assert counter.item() == 0
    assert not cache.any()
    graphs(rows(2, seed=1), cache, counter)
    graphs(rows(2, seed=2), cache, counter)
    assert counter.item() == 4
    assert torch.equal(cache, torch.cat([rows(2, seed=1), rows(2, seed=2)]))


def test_module_buffers_are_put_back_too() -> None:
    model, graphs = captured([4])
    assert model.seen.item() == 0
    graphs(rows(4))
    assert model.seen.item() == 1
    model, _ = captured([4], keep_state=False)
    assert model.seen.item() > 0


@pytest.mark.parametrize("how", ["closure", "method", "partial", "compiled"])
def test_modules_behind_functions_are_found(how: str) -> None:
    torch._dynamo.reset()
    model = Model()
    calls: dict[str, Any] = {
        "closure": lambda x: model(x),
        "method": model.forward,
        "partial": functools.partial(model.forward, factor=2.0),
        "compiled": torch.compile(model.forward, backend="eager"),
    }
    graphs = CudaGraphs(calls[how])
    graphs.capture([4], rows(2))
    assert model.seen.item() == 0
    model.scale.data = model.scale.data.clone()
    with pytest.raises(SoundnessError, match="weight 'scale' lies at"):
        graphs(rows(2))


def test_writes_into_token_rows_are_refused() -> None:
    cache, counter = torch.zeros(2, H), torch.zeros(1, dtype=torch.int64)
    graphs = CudaGraphs(append)
    with pytest.raises(SoundnessError, match=r"writes 'cache' in place.*token_args"):
        graphs.capture([2], rows(2), cache, counter)
    CudaGraphs(append, token_args=["x"]).capture([2], rows(2), cache, counter)


def test_a_step_is_not_padded_if_the_call_refuses_padding() -> None:
    def call(x: Tensor) -> Tensor:
        if STEP.get() is not Padding.NONE:
            raise SoundnessError("rows would be written")
        return x

    graphs = CudaGraphs(call)
    graphs.capture([4], rows(4))
    graphs(rows(4))
    with pytest.raises(SoundnessError, match="rows would be written"):
        graphs(rows(3))


# --- failures


class Fails(Model):
    """Raises while it is captured, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True

    def forward(self, x: Tensor, table: Tensor | None = None, factor: float = 1.0) -> Any:
        out = super().forward(x, table, factor)
        if self.broken and what_captures():
            raise ZeroDivisionError("half-way")
        return out


def test_a_failed_capture_leaves_nothing_behind() -> None:
    model = Fails()
    graphs = CudaGraphs(model)
    with pytest.raises(ZeroDivisionError, match="half-way") as error:
        graphs.capture([4, 2], rows(3))
    assert error.value.__notes__ == [
        "while capturing the CUDA graph of 4 rows, with prefill, split"
    ]
    assert graphs.buckets == ()
    assert not graphs.statistics.captured
    assert not in_flight()
    assert not what_captures()
    assert not graphs._buffers.storages
    assert model.seen.item() == 0
    assert graphs(rows(3))["count"] == 3
    model.broken = False
    graphs.capture([4, 2], rows(3))
    assert graphs(rows(3))["count"] == 4


def test_a_failed_capture_keeps_no_tensors_alive_through_its_error() -> None:
    import weakref

    kept: list[weakref.ref[Tensor]] = []

    def call(x: Tensor) -> Tensor:
        y = x + 1
        kept.append(weakref.ref(y))
        if what_captures():
            raise ZeroDivisionError
        return y

    with pytest.raises(ZeroDivisionError) as error:
        CudaGraphs(call).capture([4], rows(4))
    assert error.value.__traceback__ is not None
    assert [ref() for ref in kept] == [None] * len(kept)


def test_nor_through_an_error_that_it_was_raised_from() -> None:
    import weakref

    kept: list[weakref.ref[Tensor]] = []

    def below(x: Tensor) -> None:
        y = x + 1
        kept.append(weakref.ref(y))
        raise ZeroDivisionError

    def call(x: Tensor) -> Tensor:
        if what_captures():
            try:
                below(x)
            except ZeroDivisionError as error:
                raise OptionError("above") from error
        return x + 1

    with pytest.raises(OptionError) as error:
        CudaGraphs(call).capture([4], rows(4))
    assert error.value.__cause__ is not None
    assert [ref() for ref in kept] == [None]


def test_a_larger_graph_survives_a_smaller_ones_failure() -> None:
    def call(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise ZeroDivisionError
        return x * 2

    graphs = CudaGraphs(call)
    with pytest.raises(ZeroDivisionError):
        graphs.capture([4, 2], rows(4))
    assert graphs.buckets == (Bucket(4),)
    assert torch.equal(graphs(rows(2)), rows(2) * 2)
    assert graphs._buffers.storages
    graphs.release(Bucket(4))
    assert not graphs._buffers.storages


def test_nothing_is_decided_or_captured_inside_a_capture() -> None:
    with pytest.raises(AgreementError, match="agree_batch was called while the CPU twin"):
        CudaGraphs(lambda x: agree_batch(len(x), True) and x).capture([4], rows(4))
    inner = CudaGraphs(lambda x: x)

    def call(x: Tensor) -> Tensor:
        if what_captures():
            inner.capture([2], rows(2))
        return x

    with pytest.raises(AgreementError, match="a capture inside another one"):
        CudaGraphs(call).capture([4], rows(4))


def test_inside_another_capture_the_call_itself_runs() -> None:
    inner = CudaGraphs(lambda x: x * 2)
    inner.capture([4], rows(4))
    outer = CudaGraphs(lambda x: inner(x))
    outer.capture([4], rows(4))
    assert inner.statistics.eager["captured by the caller"] > 0
    assert math.isclose(outer(torch.ones(4, H)).sum(), 8.0 * H / H * H)


@pytest.mark.parametrize("bad", [4, Bucket(4)])
def test_one_bucket_is_no_list(bad: Any) -> None:
    with pytest.raises(OptionError, match="wanted a list"):
        CudaGraphs(Model()).capture(bad, rows(3))


@pytest.mark.parametrize("bad", [{"warmup": 0}, {"timeout_s": 0.0}])
def test_options_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="GraphOptions"):
        GraphOptions(**bad)
    with pytest.raises(OptionError, match="rows=0"):
        Bucket(0)
