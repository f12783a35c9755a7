"""What stands for DeepEP's CUDA transports on a machine without GPUs: checks, order, lifetimes."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from dbo_fx import CudaGraphs, doctor
from dbo_fx.comm import (
    deepep_cuda_ll,
    deepep_cuda_rows,
    deepep_groups,
    deepep_ibgda,
    groups,
    protocol,
)
from dbo_fx.comm import deepep_package as package
from dbo_fx.comm.deepep_cuda_ll import LowLatency, Shape, check_shape
from dbo_fx.comm.deepep_cuda_rows import Elastic, HighThroughput
from dbo_fx.comm.expert_layouts import FP8, Batched, rows_dispatch
from dbo_fx.communication import Launch
from dbo_fx.contracts import DEEPEP_HT, DEEPEP_LL, DEEPEP_LL_ASYNC, DEEPEP_V2, NCCL, Contract
from dbo_fx.errors import CommunicationError, UnsupportedGraphError
from dbo_fx.graph_device import TwinDevice
from dbo_fx.launch import Ranks
from dbo_fx.passes import halves
from rank_pool import RankPool
from small_moe import one_rank

H, E, M, K, T = 2048, 8, 64, 2, 4


# The package.


@pytest.mark.parametrize(
    ("found", "torch_version", "said"),
    [
        (("tokenspeed-deepep", "2.1.0.post20260810"), "2.11.0+cu130", "built for torch >= 2.13"),
        (("tokenspeed-deepep", "2.1.0.post20260801"), "2.13.1", "built for torch 2.11"),
        (("tokenspeed-deepep", "2.1.0.post20260801"), "2.11.0", None),
        (("deep-ep", "1.0"), "2.11.0", None),
        (None, "2.11.0", None),
    ],
)
def test_a_build_for_another_torch_is_named(
    found: tuple[str, str] | None, torch_version: str, said: str | None
) -> None:
    why = package._abi(found, torch_version)
    if said is None:
        assert why is None
        return
    assert why is not None
    assert said in why.found
    assert why.mend.startswith("pip install ")


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A torch that says that it has a device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(package, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(package, "distribution", lambda: None)
    monkeypatch.setattr(package, "nvshmem", lambda: Path("libnvshmem_host.so.3"))
    monkeypatch.setattr(package, "cuda_home", lambda: tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.delenv("EP_JIT_NVCC_COMPILER", raising=False)
    monkeypatch.setattr(package, "missing_symbols", list)
    monkeypatch.setattr(package, "nccl_version", lambda: "2.28.9")
    return monkeypatch


def test_every_reason_names_a_package(with_cuda: pytest.MonkeyPatch) -> None:
    assert package.reason("deepep_ll") is None
    with_cuda.setattr(package, "missing_symbols", lambda: ["ncclCommQueryProperties"])
    assert package.reason("deepep_ht") is None
    why = package.reason("deepep_v2")
    assert str(why) == (
        "the loaded NCCL 2.28.9 has no ncclCommQueryProperties. "
        "pip install 'nvidia-nccl-cu13>=2.30'"
    )
    with_cuda.setattr(package, "nvshmem", lambda: None)
    assert "nvidia-nvshmem-cu13" in str(package.reason("deepep_ll"))
    with_cuda.setattr(package, "find_spec", lambda name: None)
    assert package.build_for(torch.__version__) in str(package.reason("deepep_ht"))
    with pytest.raises(CommunicationError, match="deep_ep is not installed"):
        package.load()
    with_cuda.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in str(package.reason("deepep_ht"))
    with_cuda.setattr(torch.version, "cuda", None)
    assert "built for the CPU" in str(package.reason("deepep_ht"))


def test_a_toolkit_is_needed_and_v2_needs_its_compiler(
    with_cuda: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert package.reason("deepep_v2") is None
    (tmp_path / "bin" / "nvcc").unlink()
    assert package.reason("deepep_ll") is None
    assert f"{tmp_path / 'bin' / 'nvcc'} is not there" in str(package.reason("deepep_v2"))
    assert "CPU twin only: deepep_v2 compiles" in doctor._has_deepep("deepep_v2").found
    (tmp_path / "nvcc").touch()
    with_cuda.setenv("EP_JIT_NVCC_COMPILER", str(tmp_path / "nvcc"))
    assert package.reason("deepep_v2") is None
    with_cuda.setattr(package, "cuda_home", lambda: None)
    assert "CPU twin only: no CUDA toolkit" in doctor._has_deepep("deepep_ll").found


def test_the_toolkit_is_where_deep_ep_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(package, "USUAL_CUDA", tmp_path / "usual")
    monkeypatch.setattr(package.shutil, "which", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert package.cuda_home() is None
    (tmp_path / "usual").mkdir()
    assert package.cuda_home() == tmp_path / "usual"
    monkeypatch.setattr(
        package.shutil, "which", lambda name: str(tmp_path / "cuda" / "bin" / "nvcc")
    )
    assert package.cuda_home() == tmp_path / "cuda"
    monkeypatch.setenv("CUDA_PATH", "/named")
    assert package.cuda_home() == Path("/named")


def test_what_the_loader_says_is_explained() -> None:
    assert "built for another torch" in package._why("_C.so: undefined symbol: _ZN3c106detail")
    assert "nvidia-nvshmem-cu13" in package._why("libnvshmem_host.so.3: cannot open")
    assert "nvidia-nccl-cu13" in package._why("Invalid NCCL versions: a v.s. b")
    assert "--force-reinstall" in package._why("")


def test_the_doctor_tells_the_same(with_cuda: pytest.MonkeyPatch) -> None:
    assert doctor.DEEPEP_BUILD == package.BUILD == package.build_for("2.11.0+cu130")
    assert package.build_for("2.13.1") == "'tokenspeed-deepep>=2.1.0.post20260810'"
    assert doctor._has_deepep("deepep_ht").state == "ok"
    with_cuda.setattr(package, "missing_symbols", lambda: ["ncclTeamLsa"])
    found = doctor._has_deepep("deepep_v2")
    assert (found.state, found.mend) == ("missing", "pip install 'nvidia-nccl-cu13>=2.30'")
    assert found.found.startswith("CPU twin only: the loaded NCCL 2.28.9 has no ncclTeamLsa")


# Checks.


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(64, 8, 1024), "found hidden size 1024"),
        (Shape(63, 8, 2048), r"not a multiple of 4. Choose max_tokens=64"),
    ],
)
def test_sizes_that_the_kernels_do_not_have(shape: Shape, said: str) -> None:
    check_shape("dispatch", Shape(64, 8, 2048), 2)
    with pytest.raises(CommunicationError, match=said):
        check_shape("dispatch", shape, 2)


@pytest.mark.parametrize(
    ("transport", "hidden", "top_k", "fp8", "said"),
    [
        (DEEPEP_HT, 7168, 32, False, None),
        (DEEPEP_HT, 8192, 2, False, "take at most 16368 bytes a row. Send float8"),
        (DEEPEP_HT, 8192, 2, True, None),
        (DEEPEP_V2, 8192, 2, False, None),
        (DEEPEP_HT, 128, 33, False, "found 33 experts a token, wanted at most 32"),
        (DEEPEP_V2, 128, 33, False, "found 33 experts a token, wanted at most 32"),
    ],
)
def test_rows_that_the_kernels_would_trap_on(
    transport: Contract, hidden: int, top_k: int, fp8: bool, said: str | None
) -> None:
    kind = FP8 if fp8 else torch.bfloat16
    rows = [torch.empty(2, hidden, dtype=kind)] + [torch.empty(2, hidden // 128)] * fp8
    inputs = [*rows, torch.zeros(2, top_k).long(), torch.ones(2, top_k)]
    carrier = (HighThroughput if transport is DEEPEP_HT else Elastic)(transport)
    if said is None:
        carrier.check("dispatch", inputs)
        return
    with pytest.raises(CommunicationError, match=said):
        carrier.check("dispatch", inputs)


def test_types_that_the_kernels_do_not_take() -> None:
    x, ids, weights = torch.empty(2, 128).bfloat16(), torch.empty(2, 1).long(), torch.empty(2, 1)
    deepep_groups.check_rows("dispatch", x, ids, weights)
    for bad, said in (
        ((x.float(), ids, weights), "rows of torch.float32, DeepEP wants bfloat16"),
        ((x.to(FP8), ids, weights), "rows of torch.float8_e4m3fn, DeepEP wants bfloat16"),
        ((x, ids.int(), weights), "ids of torch.int32"),
        ((x, ids, weights.double()), "other weights"),
        ((x[:, :64], ids, weights), "hidden size 64"),
    ):
        with pytest.raises(CommunicationError, match=said):
            deepep_groups.check_rows("dispatch", *bad)


def test_on_gpus_a_model_of_rows_is_told_how_to_use_the_low_latency_kernels() -> None:
    graph = Graph()
    with FakeTensorMode():
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(4, 3, device="cuda")
    launch = Launch(node, "all_gather", "0", (node,), ((),), rows=True, experts=8)
    halves._refuse_layout(launch, NCCL)
    halves._refuse_layout(launch, DEEPEP_HT)
    with pytest.raises(UnsupportedGraphError) as refused:
        halves._refuse_layout(launch, DEEPEP_LL)
    said = str(refused.value)
    assert "'deepep_ll' does not carry all_gather" in said
    assert 'expert_parallel(model, layout="batched", max_tokens=M)' in said


# The low-latency transport over a Buffer that counts.


class FakeBuffer:
    """Notes what is called; index and counters as in DeepEP's Buffer."""

    made: list[FakeBuffer] = []  # noqa: RUF012 (cleared by the fixture)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options, self.said, self.index, self.fails = options, [], 0, False
        FakeBuffer.made.append(self)

    @staticmethod
    def get_low_latency_rdma_size_hint(*sizes: int) -> int:
        return 1 << 20

    def low_latency_dispatch(
        self, x: Tensor, ids: Tensor, most: int, experts: int, **options: Any
    ) -> Any:
        self.said.append(f"dispatch {self.index}")
        self.index ^= 1
        hooked = options.get("return_recv_hook", False)
        rows = torch.full((experts, most, x.shape[1]), 3.0).bfloat16()
        handle = (torch.zeros(experts, most, dtype=torch.int32), torch.zeros(experts, 1).long())
        counts = torch.ones(experts, dtype=torch.int32)
        hook = (lambda: self.said.append("hook")) if hooked else None
        return rows, counts, handle, None, hook

    def low_latency_combine(
        self, y: Tensor, ids: Tensor, weights: Tensor, handle: Any, **options: Any
    ) -> Any:
        self.said.append(f"combine {self.index}")
        self.index ^= 1
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        options["out"].fill_(5.0)
        hook = (lambda: self.said.append("hook")) if options["return_recv_hook"] else None
        return options["out"], None, hook

    def get_comm_stream(self) -> str:
        return "theirs"

    def clean_low_latency_buffer(self, *sizes: int) -> None:
        self.said.append("clean")

    def destroy(self) -> None:
        self.said.append("destroy")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank, and Buffers that count."""
    monkeypatch.setattr(package, "load", lambda: SimpleNamespace(Buffer=FakeBuffer))
    monkeypatch.setattr(deepep_cuda_ll, "enable_without_infiniband", lambda local: None)
    monkeypatch.setattr(deepep_cuda_ll, "wait_for_compute", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(deepep_groups, "_OPEN", [])
    monkeypatch.setattr(deepep_cuda_ll, "_BUFFERS", {})
    FakeBuffer.made.clear()
    with one_rank() as name:
        yield name


EXCHANGE = Batched(M, E)


def dispatch(carrier: LowLatency, group: str, slot: int, hidden: int = H, top_k: int = K) -> Any:
    """Send a dispatch; what was sent, and the outputs."""
    from dbo_fx.comm.buffers import comm_buffers

    sent = [torch.ones(T, hidden).bfloat16(), torch.zeros(T, top_k).long()]
    out = comm_buffers(sent, EXCHANGE.dispatch(), group)
    return carrier.launch(sent, out, EXCHANGE.dispatch(), group, slot, "dispatch"), out


def combine(carrier: LowLatency, group: str, slot: int) -> Any:
    """Send a combine."""
    y = torch.ones(E, M, H).bfloat16()
    rest = torch.zeros(T, K).long(), torch.ones(T, K)
    src, ranges = torch.zeros(E, M, dtype=torch.int32), torch.zeros(E, 1).long()
    out = [torch.zeros(T, H).bfloat16()]
    sent = [y, *rest, src, ranges]
    return carrier.launch(sent, out, EXCHANGE.combine(), group, slot, "combine"), out


def test_halves_hook_and_outputs(group: str) -> None:
    carrier = LowLatency(DEEPEP_LL)
    carrier.begin(group)
    flight, out = dispatch(carrier, group, 0)
    (buffer,) = FakeBuffer.made
    assert buffer.said == ["dispatch 0"]
    assert buffer.options["num_qps_per_rank"] == E
    carrier.finish(flight, out)
    assert out[0].eq(3).all()
    assert out[0].data_ptr() == flight.arrived[0].data_ptr()
    flight, out = combine(carrier, group, 1)
    carrier.finish(flight, out)
    assert out[0].eq(5).all()
    assert buffer.said == ["dispatch 0", "hook", "combine 1", "hook"]
    carrier.begin(group)
    deepep_groups.close_buffers()
    assert buffer.said[-1] == "destroy"
    flight, out = dispatch(carrier, group, 0)  # Over a new one.
    assert len(FakeBuffer.made) == 2


def test_without_hooks_nothing_is_left_to_do(group: str) -> None:
    carrier = LowLatency(DEEPEP_LL_ASYNC)
    flight, out = dispatch(carrier, group, 0)
    other, back = combine(carrier, group, 1)
    carrier.finish(flight, out)
    carrier.finish(other, back)
    assert FakeBuffer.made[0].said == ["dispatch 0", "combine 1"]
    assert out[0].eq(3).all()


def test_a_second_send_and_a_wrong_slot_are_refused_before_a_kernel_runs(group: str) -> None:
    carrier = LowLatency(DEEPEP_LL)
    with pytest.raises(CommunicationError, match=r"sends in slot 1, the Buffer .* is at slot 0"):
        dispatch(carrier, group, 1)
    dispatch(carrier, group, 0)
    with pytest.raises(CommunicationError, match="not received, and this send would destroy it"):
        combine(carrier, group, 1)
    assert FakeBuffer.made[0].said == ["dispatch 0"]
    with pytest.raises(CommunicationError, match="starts at slot 0"):
        carrier.begin(group)


def test_a_step_that_failed_is_mended_by_the_next_eager_one(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = LowLatency(DEEPEP_LL)
    dispatch(carrier, group, 0)
    carrier.realign("another group")
    carrier.realign(group)
    (buffer,) = FakeBuffer.made
    assert buffer.said == ["dispatch 0"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CommunicationError, match="cannot be mended under capture"):
        carrier.begin(group)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(deepep_cuda_ll, "DEVICE", "cpu")
    carrier.begin(group)
    assert buffer.said == ["dispatch 0", "clean", "dispatch 1", "clean"]
    assert buffer.index == 0
    flight, out = dispatch(carrier, group, 0)
    carrier.finish(flight, out)


def test_both_low_latency_transports_share_a_buffer_and_its_index(group: str) -> None:
    halves_of, whole = LowLatency(DEEPEP_LL), LowLatency(DEEPEP_LL_ASYNC)
    flight, out = dispatch(halves_of, group, 0)
    with pytest.raises(CommunicationError, match=r"at slot 1, .* deepep_ll_async program starts"):
        whole.begin(group)
    halves_of.finish(flight, out)
    combine(whole, group, 1)
    halves_of.begin(group)
    (buffer,) = FakeBuffer.made
    assert buffer.said == ["dispatch 0", "hook", "combine 1"]


def test_too_many_choices_are_refused_where_a_buffer_is_there_already(group: str) -> None:
    carrier = LowLatency(DEEPEP_LL)
    flight, out = dispatch(carrier, group, 0)
    carrier.finish(flight, out)
    with pytest.raises(CommunicationError, match="found 12 experts a token, wanted at most 11"):
        dispatch(carrier, group, 1, top_k=12)
    assert FakeBuffer.made[0].said == ["dispatch 0", "hook"]


def test_a_launch_that_fails_within_deepep_makes_the_buffer_unusable(group: str) -> None:
    carrier = LowLatency(DEEPEP_LL)
    flight, out = dispatch(carrier, group, 0)
    carrier.finish(flight, out)
    (buffer,) = FakeBuffer.made
    buffer.fails = True
    with pytest.raises(CommunicationError, match=r"deepep_ll, group .*: combine failed with Out"):
        combine(carrier, group, 1)
    buffer.fails = False
    for later in (
        lambda: combine(carrier, group, 1),
        lambda: carrier.begin(group),
    ):
        with pytest.raises(CommunicationError, match=r"cannot be used any more.*close_buffers\(\)"):
            later()
    carrier.realign(group)
    with pytest.raises(CommunicationError, match="cannot be used any more"):
        carrier.begin(group)
    deepep_groups.close_buffers()
    carrier.begin(group)
    dispatch(carrier, group, 0)
    assert [len(b.said) for b in FakeBuffer.made] == [4, 1]


@pytest.mark.parametrize("start", range(5))
def test_deepep_takes_a_stream_that_no_program_has(start: int) -> None:
    ring = itertools.cycle(range(5))
    for _ in range(start):
        next(ring)
    deepep_groups.pass_by([3, 4], lambda: next(ring))  # type: ignore[list-item,arg-type,return-value]
    assert next(ring) not in (3, 4)


def test_a_buffer_on_a_programs_stream_is_refused(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepep_groups, "_streams_of_programs", lambda: ["theirs"])
    streams = iter("abcabc")
    monkeypatch.setattr(deepep_groups, "_next_stream", lambda: next(streams))
    carrier = LowLatency(DEEPEP_LL)
    with pytest.raises(CommunicationError, match="DeepEP took the stream that this program runs"):
        dispatch(carrier, group, 0)
    assert FakeBuffer.made[0].said == []


def test_a_replay_mends_what_a_failed_step_left(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = LowLatency(DEEPEP_LL)
    monkeypatch.setitem(protocol._TRANSPORTS, ("cuda", "deepep_ll"), carrier)
    monkeypatch.setattr(deepep_cuda_ll, "DEVICE", "cpu")

    def program(x: Tensor) -> Tensor:
        protocol.begin_region("deepep_ll", [group])
        return x * 2

    graphs = CudaGraphs(program)
    graphs.capture([4], torch.ones(3, H))
    dispatch(carrier, group, 0)
    carrier.realign(group)
    (buffer,) = FakeBuffer.made
    monkeypatch.setattr(TwinDevice, "replay", lambda self, graph: buffer.said.append("replay"))
    graphs(torch.ones(3, H))
    graphs(torch.ones(3, H))
    assert buffer.said == ["dispatch 0", "clean", "dispatch 1", "clean", "replay", "replay"]


def test_one_shape_for_a_group_and_no_buffer_under_capture(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = LowLatency(DEEPEP_LL)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CommunicationError, match="Run the program once with these sizes"):
        dispatch(carrier, group, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    flight, out = dispatch(carrier, group, 0)
    carrier.finish(flight, out)
    with pytest.raises(CommunicationError, match=r"found M=64 E=8 H=4096, but .*M=64 E=8 H=2048"):
        dispatch(carrier, group, 1, hidden=4096)


# Rows.


class FakeRows:
    """A high-throughput Buffer of one rank with half of the rows garbage."""

    said: list[str] = []  # noqa: RUF012 (cleared by the test)

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda width, ranks: 100)

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(sms: int) -> None:
        FakeRows.said.append(f"sms {sms}")

    def __init__(self, members: Any, size: int, rdma: int, **options: Any) -> None:
        FakeRows.said.append(f"buffer {size}")

    def get_dispatch_layout(self, ids: Tensor, experts: int) -> Any:
        return (None,) * 5

    def dispatch(self, x: Any, **given: Any) -> Any:
        FakeRows.said.append(f"dispatch, worst {given['num_worst_tokens']}")
        ids = given["topk_idx"].clone()
        ids[2:] = -1
        return x, ids, given["topk_weights"], [], "handle", None

    def combine(self, y: Tensor, handle: Any, config: Any) -> Any:
        FakeRows.said.append(f"combine, {handle}")
        return y * 2, None, None

    def destroy(self) -> None:
        FakeRows.said.append("destroy")


def test_high_throughput_is_told_the_worst_and_keeps_the_handle(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbo_fx.comm.buffers import comm_buffers

    FakeRows.said.clear()
    monkeypatch.setattr(package, "load", lambda: SimpleNamespace(Buffer=FakeRows))
    monkeypatch.setattr(
        deepep_cuda_rows, "wait_for_compute", lambda d: FakeRows.said.append("wait")
    )
    monkeypatch.setattr(deepep_cuda_rows, "check_ranks", lambda name, group, allowed: 1)
    carrier = HighThroughput(DEEPEP_HT)
    sent = [torch.ones(T, 128).bfloat16(), torch.arange(T * K).view(T, K), torch.ones(T, K)]
    name = rows_dispatch(E)
    out = comm_buffers(sent, name, group)
    flight = carrier.launch_pair(sent, out, name, group, "dispatch", ("dispatch", 3))
    carrier.finish(flight, out)
    assert out[1].tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1]]
    assert out[0].data_ptr() == sent[0].data_ptr()
    back = comm_buffers([out[0]], "rows_combine", group)
    flight = carrier.launch_pair([out[0]], back, "rows_combine", group, "combine", ("combine", 3))
    carrier.finish(flight, back)
    assert back[0].eq(2).all()
    size = deepep_cuda_rows.LEAST_BYTES
    assert FakeRows.said == [
        "wait", "sms 20", f"buffer {size}", f"dispatch, worst {T}",
        "wait", "sms 20", "combine, handle",
    ]  # fmt: skip
    carrier.begin(group)
    monkeypatch.setattr(deepep_cuda_rows, "comm_sms", lambda: 8)
    carrier.launch_pair(sent, out, name, group, "dispatch", ("dispatch", 3))
    assert FakeRows.said[7:] == ["wait", "sms 8", f"dispatch, worst {T}"]
    monkeypatch.setattr(deepep_cuda_rows, "comm_sms", lambda: 7)
    with pytest.raises(CommunicationError, match=r"comm_sms=7, .* Use an even number"):
        carrier.launch_pair(sent, out, name, group, "dispatch", ("dispatch", 4))


def test_rows_are_made_contiguous_behind_the_wait(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute stream may still write them."""
    from dbo_fx.comm.buffers import comm_buffers

    wide = torch.ones(T, 256).bfloat16()
    monkeypatch.setattr(package, "load", lambda: SimpleNamespace(Buffer=FakeRows))
    monkeypatch.setattr(deepep_cuda_rows, "wait_for_compute", lambda device: wide.add_(1))
    monkeypatch.setattr(deepep_cuda_rows, "check_ranks", lambda name, group, allowed: 1)
    carrier = HighThroughput(DEEPEP_HT)
    sent = [wide[:, ::2], torch.arange(T * K).view(T, K), torch.ones(T, K)]
    name = rows_dispatch(E)
    out = comm_buffers(sent, name, group)
    flight = carrier.launch_pair(sent, out, name, group, "dispatch", ("dispatch", 0))
    assert flight.work.arrived[0].eq(2).all()
    carrier.finish(flight, out)
    back = comm_buffers([out[0]], "rows_combine", group)
    y = [wide[:, ::2]]
    flight = carrier.launch_pair(y, back, "rows_combine", group, "combine", ("combine", 0))
    assert flight.work.arrived[0].eq(6).all()


class FakeElastic:
    """V2 of one rank: room for more rows than there are, three of them real."""

    made: list[FakeElastic] = []  # noqa: RUF012 (cleared by the test)

    def __init__(self, group: Any, **sizes: Any) -> None:
        self.sizes, self.open = sizes, True
        FakeElastic.made.append(self)

    def destroy(self) -> None:
        self.open = False

    def dispatch(self, x: Tensor, **given: Any) -> Any:
        most = given["num_max_tokens_per_rank"]
        assert not given["do_cpu_sync"]
        wide = torch.full((most, x.shape[1]), float("nan")).bfloat16()
        wide[:3] = x[:3]
        ids = torch.full((most, K), 99)
        ids[:3] = given["topk_idx"][:3]
        handle = SimpleNamespace(psum_num_recv_tokens_per_scaleup_rank=torch.tensor([3]))
        return wide, ids, torch.ones(most, K), handle, None

    def combine(self, y: Tensor, handle: Any, num_sms: int) -> Any:
        # Only with this many rows does the kernel look up how many are there.
        assert y.shape[0] == self.sizes["num_max_tokens_per_rank"]
        return y[:T] * 2, None, None


def elastic(monkeypatch: pytest.MonkeyPatch) -> Elastic:
    """V2 over Buffers that are none."""
    FakeElastic.made.clear()
    monkeypatch.setattr(package, "load", lambda: SimpleNamespace(ElasticBuffer=FakeElastic))
    monkeypatch.setattr(package, "reason", lambda mode: None)
    monkeypatch.setattr(deepep_cuda_rows, "wait_for_compute", lambda device: None)
    return Elastic(DEEPEP_V2)


def test_v2_has_one_buffer_for_all_sizes_up_to_its_own(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, device = elastic(monkeypatch), torch.device("cpu")
    opened = carrier._buffer((group, H, K, False), 128, device)
    assert carrier._buffer((group, H, K, False), 64, device) is opened
    larger = carrier._buffer((group, H, K, False), 256, device)
    assert larger is not opened
    assert carrier._buffer((group, H, K, False), 64, device) is larger
    assert carrier._buffer((group, H, K, True), 64, device) is not larger
    assert [b.sizes["num_max_tokens_per_rank"] for b in FakeElastic.made] == [128, 256, 64]
    deepep_groups.close_buffers()
    assert [b.open for b in FakeElastic.made] == [False] * 3
    assert carrier._buffers == {}
    with pytest.raises(CommunicationError, match="cannot be used any more: it was closed"):
        opened.require()


@pytest.mark.parametrize(("first", "wanted"), [(0, [[0, -1], [-1, 1]]), (4, [[4, 3], [3, 5]])])
def test_ids_of_v2_become_those_of_all_experts(first: int, wanted: list[list[int]]) -> None:
    ids = torch.tensor([[0, -1], [-1, 1], [7, 0]])
    deepep_cuda_rows._renumber(ids, torch.tensor(2), first)
    assert ids.tolist() == [*wanted, [first - 1] * 2]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "top_k"), [(0, 4), (1, 1), (63, 6), (1000, 8)])
def test_one_kernel_does_the_same(rows: int, top_k: int) -> None:
    ids = torch.randint(-1, 4, (rows, top_k))
    count = torch.tensor([5, rows // 2], dtype=torch.int32)
    found = ids.cuda()
    deepep_cuda_rows._renumber(found, count.cuda()[-1], 12)
    deepep_cuda_rows._renumber(ids, count[-1], 12)
    assert torch.equal(found.cpu(), ids)


def test_v2_has_the_groups_communicator_made_first(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, device, said = elastic(monkeypatch), torch.device("cpu"), []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda t, group: said.append(len(FakeElastic.made))
    )
    carrier._buffer((group, H, K, False), 64, device)
    assert said == []
    monkeypatch.setattr(groups, "backend_name", lambda name, device: "nccl")
    carrier._buffer((group, H, K, False), 128, device)
    assert said == [1]


def test_v2_masks_garbage_and_combines_as_many_rows_as_its_buffer_has(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbo_fx.comm.buffers import comm_buffers

    carrier = elastic(monkeypatch)
    sent = [torch.ones(T, 128).bfloat16(), torch.arange(T * K).view(T, K), torch.ones(T, K)]
    name = rows_dispatch(E)
    out = comm_buffers(sent, name, group)
    flight = carrier.launch_pair(sent, out, name, group, "dispatch", ("dispatch", 0))
    carrier.finish(flight, out)
    assert out[1].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    back = comm_buffers([out[0]], "rows_combine", group)
    flight = carrier.launch_pair([out[0]], back, "rows_combine", group, "combine", ("combine", 0))
    carrier.finish(flight, back)
    assert back[0][:3].eq(2).all()
    assert FakeElastic.made[0].sizes["num_max_tokens_per_rank"] == deepep_cuda_rows.LEAST_TOKENS


def test_a_number_of_ranks_without_kernels_is_refused() -> None:
    with one_rank() as name, pytest.raises(CommunicationError, match=r"has 1 ranks, .* 2, 4, 8"):
        deepep_groups.check_ranks("dispatch", name, (2, 4, 8))


def run_other_sizes(rank: int) -> str:
    """Ranks ask for Buffers of other sizes: none is made."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with pytest.raises(CommunicationError) as refused:
            deepep_groups.open_buffer(
                "deepep_ht",
                str(groups.name_of(None)),
                f"{64 << rank} bytes",
                lambda: made.append("Buffer"),
                lambda: None,
            )
    assert made == []
    return str(refused.value)


def test_ranks_that_want_other_sizes_make_no_buffer(ranks: RankPool) -> None:
    for said in ranks(run_other_sizes):
        assert said.startswith("deepep_ht: ")
        assert "64 bytes" in said
        assert "128 bytes" in said


class NotesTheGroup:
    """A Buffer that says in a file whether there is a group when it is destroyed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def destroy(self) -> None:
        self.path.write_text(str(torch.distributed.is_initialized()))


def run_left_open(rank: int, path: Path) -> None:
    """Leave a Buffer to the end of the process."""
    opened = deepep_groups.Opened(NotesTheGroup(path), "deepep_v2", lambda: None)
    deepep_groups._OPEN.append(opened)


def test_ranks_close_their_buffers_before_the_group(tmp_path: Path) -> None:
    rank = Ranks(1)
    rank.call(run_left_open, (tmp_path / "closed",))
    rank.close()
    assert (tmp_path / "closed").read_text() == "True"


# The word of NVSHMEM's state.


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_local_symbol_is_found_in_a_library(tmp_path: Path) -> None:
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text("static int here[4] = {1}; int *other(void) { return here; }\n")
    subprocess.run(["g++", "-x", "c", "-shared", "-o", library, source], check=True, timeout=60)
    image = library.read_bytes()
    assert deepep_ibgda.symbol_value(image, "here") > 0
    assert deepep_ibgda.symbol_value(image, "not there") == 0


def test_with_infiniband_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepep_ibgda, "INFINIBAND", tmp_path)
    deepep_ibgda.enable_without_infiniband(8)
    monkeypatch.setattr(deepep_ibgda, "INFINIBAND", tmp_path / "none")
    with pytest.raises(CommunicationError, match=r"deep_ep is not loaded. .* use deepep_ht"):
        deepep_ibgda.enable_without_infiniband(8)
