"""What stands for DeepEP's CUDA transports on a machine without GPUs: checks, order, lifetimes."""

from __future__ import annotations

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

from dbo_fx import doctor
from dbo_fx.comm import deepep_cuda_ll, deepep_cuda_rows, deepep_groups, deepep_ibgda
from dbo_fx.comm import deepep_package as package
from dbo_fx.comm.deepep_cuda_ll import LowLatency, Shape, check_shape
from dbo_fx.comm.deepep_cuda_rows import Elastic, HighThroughput
from dbo_fx.comm.expert_layouts import Batched, rows_dispatch
from dbo_fx.communication import Launch
from dbo_fx.contracts import DEEPEP_HT, DEEPEP_LL, DEEPEP_LL_ASYNC, DEEPEP_V2, NCCL
from dbo_fx.errors import CommunicationError, UnsupportedGraphError
from dbo_fx.passes import halves
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
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that says that it has a device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(package, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(package, "distribution", lambda: None)
    monkeypatch.setattr(package, "nvshmem", lambda: Path("libnvshmem_host.so.3"))
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
    ("shape", "top_k", "ranks", "said"),
    [
        (Shape(64, 8, 1024), 2, 2, "found hidden size 1024"),
        (Shape(64, 8, 2048), 12, 2, "found 12 experts a token, wanted at most 11"),
        (Shape(63, 8, 2048), 2, 2, r"not a multiple of 4. Choose max_tokens=64"),
    ],
)
def test_sizes_that_the_kernels_do_not_have(
    shape: Shape, top_k: int, ranks: int, said: str
) -> None:
    check_shape("dispatch", Shape(64, 8, 2048), 2, 2)
    with pytest.raises(CommunicationError, match=said):
        check_shape("dispatch", shape, top_k, ranks)


def test_types_that_the_kernels_do_not_take() -> None:
    x, ids, weights = torch.empty(2, 128).bfloat16(), torch.empty(2, 1).long(), torch.empty(2, 1)
    deepep_groups.check_rows("dispatch", x, ids, weights)
    for bad, said in (
        ((x.float(), ids, weights), "rows of torch.float32"),
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
        self.options, self.said, self.index = options, [], 0
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
        options["out"].fill_(5.0)
        hook = (lambda: self.said.append("hook")) if options["return_recv_hook"] else None
        return options["out"], None, hook

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
    FakeBuffer.made.clear()
    with one_rank() as name:
        yield name


EXCHANGE = Batched(M, E)


def dispatch(carrier: LowLatency, group: str, slot: int, hidden: int = H) -> Any:
    """Send a dispatch; what was sent, and the outputs."""
    from dbo_fx.comm.buffers import comm_buffers

    sent = [torch.ones(T, hidden).bfloat16(), torch.zeros(T, K).long()]
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


class FakeElastic:
    """V2 of one rank: room for more rows than there are, three of them real."""

    made: list[FakeElastic] = []  # noqa: RUF012 (cleared by the test)

    def __init__(self, group: Any, **sizes: Any) -> None:
        self.sizes = sizes
        FakeElastic.made.append(self)

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


def test_v2_masks_garbage_and_combines_as_many_rows_as_its_buffer_has(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbo_fx.comm.buffers import comm_buffers

    FakeElastic.made.clear()
    monkeypatch.setattr(package, "load", lambda: SimpleNamespace(ElasticBuffer=FakeElastic))
    monkeypatch.setattr(package, "reason", lambda mode: None)
    monkeypatch.setattr(deepep_cuda_rows, "wait_for_compute", lambda device: None)
    carrier = Elastic(DEEPEP_V2)
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
