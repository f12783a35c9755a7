"""How many SMs communication gets and matmuls leave: as options, as text, and applied."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbo_fx import schedules, sm_limits
from dbo_fx.backend import compile_captured
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.comm import nccl
from dbo_fx.contracts import CONTRACTS, NCCL, check_sms
from dbo_fx.errors import CommunicationError, OptionError, ScheduleError
from dbo_fx.inspect.diff import diff
from dbo_fx.ir import Program, parse_program
from dbo_fx.ir_bind import bound_program
from dbo_fx.options import Options
from dbo_fx.runtime import Runtime
from dbo_fx.sm_limits import SmLimits, comm_sms
from dbo_fx.sm_sharing import SmSharing, parse_sm_sharing
from dbo_fx.subjects import Request, read_program
from small_moe import PlainMoe, fake_ranks, one_rank, traced_model

LINES = {
    SmSharing(4, 8): "sms comm 4 left 8",
    SmSharing(4): "sms comm 4",
    SmSharing(left=8): "sms left 8",
}


def program(sharing: SmSharing, transport: str = "nccl") -> Program:
    order = schedules.load("mlp_shared_overlap")
    return replace(bound_program(order, 1, CONTRACTS[transport], 2), sms=sharing)


@pytest.mark.parametrize(("sharing", "line"), LINES.items())
def test_it_stands_in_the_header(sharing: SmSharing, line: str) -> None:
    found = program(sharing)
    assert str(found).splitlines()[5] == line
    assert parse_program(str(found)) == found
    assert parse_sm_sharing(line) == sharing
    assert found.digest != program(SmSharing()).digest


def test_nothing_said_is_nothing_written() -> None:
    assert "sms" not in str(program(SmSharing()))
    assert str(SmSharing()) == ""
    assert not SmSharing()


@pytest.mark.parametrize(
    "line",
    ["sms", "sms comm", "sms comm 0", "sms left 8 comm 4", "sms comm x", "sms left -1", "smss"],
)
def test_another_line_is_refused(line: str) -> None:
    with pytest.raises(ScheduleError, match=r"wanted a line like 'sms comm 4 left 8'"):
        parse_sm_sharing(line)


def test_the_line_is_named() -> None:
    text = str(program(SmSharing(4))).replace("sms comm 4", "sms comm none")
    with pytest.raises(ScheduleError, match=r"^mine, line 6: found 'sms comm none'"):
        parse_program(text, "mine")


def test_steps_keep_their_line_numbers(tmp_path: Any) -> None:
    file = tmp_path / "mine.dbo"
    file.write_text(str(program(SmSharing(4, 8))), encoding="utf-8")
    bound = read_program(Request(str(file)))
    assert bound.lines[0] == 7
    assert len(bound.lines) == len(bound.program.steps)


def test_a_difference_is_told() -> None:
    found = [str(c) for c in diff(program(SmSharing()), program(SmSharing(4, 8))).changes]
    assert found == ["header sms: comm 4 left 8 added"]


@pytest.mark.parametrize("transport", ["gloo", "copy_engine", "loopback"])
def test_a_transport_that_cannot_limit_itself_refuses(transport: str) -> None:
    reason = rf"comm_sms=4: transport '{transport}' does not let .* use one of: nccl"
    with pytest.raises(OptionError, match=reason):
        check_sms(CONTRACTS[transport], SmSharing(4))
    with pytest.raises(OptionError, match=reason):
        execution_of_program(program(SmSharing(4), transport))
    check_sms(CONTRACTS[transport], SmSharing(left=8))
    check_sms(NCCL, SmSharing(4))


@pytest.mark.parametrize("key", ["comm_sms", "matmul_carveout"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_a_number_is_wanted(key: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"option {key}={value!r} is not allowed"):
        Options.parse({key: value})


def compiled(options: dict[str, Any], *, runs: bool = False) -> Any:
    """The plain model, compiled to look at."""
    with fake_ranks():
        found = compile_captured(
            traced_model(PlainMoe, 1).fresh(), Options.parse(options), runs=runs
        )
        return found, str(found.plan)


def test_options_reach_the_text_and_the_plan() -> None:
    options = {"transport": "nccl", "comm_sms": 4, "matmul_carveout": 8}
    limited, plan = compiled(options)
    plain, other = compiled({"transport": "nccl"})
    assert limited.program.sms == limited.runtime.limits.sharing == SmSharing(4, 8)
    assert str(limited.program).splitlines()[5] == "sms comm 4 left 8"
    assert plan != other
    assert replace(limited.program, sms=SmSharing()) == plain.program
    with pytest.raises(OptionError, match="comm_sms=4: transport 'gloo'"):
        compiled({"comm_sms": 4})


def test_only_a_program_that_shares_ends_its_calls() -> None:
    def calls(found: Any) -> list[str]:
        return [n.target for n in found.module.graph.nodes if n.op == "call_method"]

    limited, plain = (compiled(o)[0] for o in ({"matmul_carveout": 8}, {}))
    assert calls(limited) == [*calls(plain), "end"]
    assert list(limited.module.graph.nodes)[-1].prev.target == "end"


@pytest.fixture
def carveout(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """A CUDA device's carve-out without one: what it was set to, the present value last."""
    values: list[int | None] = [None]
    monkeypatch.setattr(sm_limits, "set_matmul_carveout", values.append)
    monkeypatch.setattr(sm_limits, "matmul_carveout", lambda: values[-1])
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    return values


def limits(sharing: SmSharing, device: str = "cuda") -> SmLimits:
    found = SmLimits(torch.device(device))
    found.sharing = sharing
    return found


def test_what_held_before_is_put_back(carveout: list[int | None]) -> None:
    carveout.append(2)
    outer, inner = limits(SmSharing(6, 16)), limits(SmSharing(4, 8))
    outer.enter()
    inner.enter()
    assert (comm_sms(), carveout[-1]) == (4, 8)
    inner.leave()
    assert (comm_sms(), carveout[-1]) == (6, 16)
    outer.leave()
    outer.leave()
    assert (comm_sms(), carveout[-1]) == (None, 2)
    assert carveout == [None, 2, 16, 8, 16, 2]


def test_a_call_that_raised_is_undone_by_the_next(carveout: list[int | None]) -> None:
    here = limits(SmSharing(4, 8))
    here.enter()
    here.enter()
    here.leave()
    assert (comm_sms(), carveout[-1]) == (None, None)


def test_the_runtime_leaves_when_it_is_abandoned() -> None:
    runtime = Runtime(torch.device("cpu"))
    runtime.limits.sharing = SmSharing(4, 8)
    runtime.begin()
    assert comm_sms() == 4
    runtime.abandon()
    assert comm_sms() is None
    runtime.begin()
    runtime.end()
    assert comm_sms() is None


def test_matmuls_keep_some(carveout: list[int | None]) -> None:
    with pytest.raises(OptionError, match=r"matmul_carveout=132 leaves nothing.*has 132 SMs"):
        limits(SmSharing(left=132)).enter()
    assert carveout == [None]


def test_on_a_cpu_nothing_is_set(carveout: list[int | None]) -> None:
    here = limits(SmSharing(4, 8), "cpu")
    here.enter()
    assert comm_sms() == 4
    here.leave()
    assert carveout == [None]
    assert comm_sms() is None


def test_a_program_runs_with_a_carveout_on_a_cpu() -> None:
    with one_rank():
        trace = traced_model(PlainMoe, 1, 1)
        options = Options.parse({"matmul_carveout": 8, "verify": "static"})
        found = compile_captured(trace.fresh(), options)
        with torch.no_grad():
            assert found(*trace.args(6))[0].isfinite().all()
        assert found.program.sms == SmSharing(left=8)


def test_communicators_are_made_once_and_never_under_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for NCCL: one for each group and number, of the same ranks."""
    made: list[Any] = []
    capturing = [False]

    def new_group(ranks: list[int], **given: Any) -> Any:
        made.append(
            (ranks, given["pg_options"].config.max_ctas, given["use_local_synchronization"])
        )
        assert given["pg_options"].config.cga_cluster_size == 0
        return SimpleNamespace(group_name=f"limited {len(made)}")

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=0, max_ctas=0, cga_cluster_size=4)

    monkeypatch.setattr(nccl, "_LIMITED", {})
    monkeypatch.setattr(nccl.dist, "new_group", new_group)
    monkeypatch.setattr(
        nccl.dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with fake_ranks(4) as group:
        monkeypatch.setattr(nccl.groups, "name_of", lambda made: made.group_name)
        names = [nccl.limited(group, count) for count in (4, 8, 4)]
        capturing[0] = True
        assert nccl.limited(group, 8) == names[1]
        with pytest.raises(CommunicationError, match=r"no communicator of 2 SMs yet.*once eagerly"):
            nccl.limited(group, 2)
    assert names == ["limited 1", "limited 2", "limited 1"]
    assert made == [([0, 1, 2, 3], 4, True), ([0, 1, 2, 3], 8, True)]


@pytest.mark.parametrize(("ranks", "own"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_an_all_to_alls_own_block_is_copied(
    monkeypatch: pytest.MonkeyPatch, ranks: int, own: int, dtype: torch.dtype
) -> None:
    """NCCL gets the others' blocks, as bytes where it does not know the type."""
    monkeypatch.setattr(nccl.groups, "world_size", lambda group: ranks)
    monkeypatch.setattr(nccl.groups, "rank", lambda group: own)
    monkeypatch.setattr(nccl.groups, "process_group", lambda group: group)
    sizes: list[list[int]] = []

    def all_to_all(places: list[Tensor], blocks: list[Tensor], group: str) -> None:
        assert {t.dtype for t in (*places, *blocks)} <= {torch.float32, torch.uint8}
        sizes.extend([len(t) for t in part] for part in (places, blocks))
        for place, block in zip(places, blocks, strict=True):
            place.copy_(block)  # As if the others had sent what this rank sends them.

    monkeypatch.setattr(nccl.dist, "all_to_all", all_to_all)
    source = torch.arange(2.0 * ranks * 4).view(2 * ranks, 4).to(dtype)
    output = torch.zeros_like(source)
    nccl._exchange(output, source, "g")
    assert torch.equal(output.float(), source.float())
    assert sizes == [[0 if rank == own else 2 for rank in range(ranks)]] * 2
