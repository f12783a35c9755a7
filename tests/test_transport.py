"""Fakes with symbolic sizes, contracts, poison, and the adapter around torch's private parts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbo_fx.comm import contract, groups, in_flight, register_transport, transport_for
from dbo_fx.comm.gloo import GlooReference, poison
from dbo_fx.comm.protocol import DEFAULTS
from dbo_fx.contracts import CONTRACTS, GLOO, Contract, register_contract
from dbo_fx.errors import CommunicationError, OptionError
from rank_pool import RankPool

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "transports.md"
BEGIN, END = (f"<!-- table of contracts: {word} -->\n" for word in ("begin", "end"))
BUILT_IN = (
    "gloo", "nccl", "copy_engine", "loopback",
    "deepep_ll", "deepep_ll_async", "deepep_ht", "deepep_v2",
)  # fmt: skip
T, H, K, R = 3, 4, 2, 2
OPS = torch.ops.dbo_fx


@pytest.fixture
def fake_group() -> Any:
    """A default group of eight pretended ranks in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield groups.name_of(None)
    dist.destroy_process_group()


def test_fakes_keep_symbolic_sizes(fake_group: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = torch.empty(6, H)
    torch._dynamo.mark_dynamic(x, 0)
    fake = mode.from_tensor(x, static_shapes=False)
    rows = fake.shape[0]
    with mode:
        gathered, ids, _ = OPS.dispatch(
            fake, fake.new_empty((rows, K), dtype=torch.int64), fake, fake_group
        )
        combined = OPS.combine(gathered, rows, fake_group)
        buffers = OPS.comm_buffers([fake, gathered], "all_gather", fake_group)
        scattered = OPS.comm_buffers([gathered], "reduce_scatter_sum", fake_group)
        exchanged = OPS.comm_buffers([fake], "all_to_all", fake_group)
        OPS.dispatch_send([fake], buffers[:1], "all_gather", fake_group, "gloo", 0)
        OPS.dispatch_recv(buffers[:1], fake_group, "gloo", 0)
    assert str(gathered.shape[0]) == f"8*{rows}"
    assert ids.dtype == torch.int64
    assert str(buffers[1].shape[0]) == f"64*{rows}"
    assert (
        str(combined.shape[0])
        == str(scattered[0].shape[0])
        == str(exchanged[0].shape[0])
        == str(rows)
    )
    assert in_flight() == ()
    assert not mode.shape_env.guards


def test_fake_group_runs_without_peers(fake_group: str) -> None:
    assert groups.is_fake(fake_group)
    assert groups.world_size(fake_group) == 8
    assert OPS.dispatch(*[torch.ones(T, H)] * 3, fake_group)[0].shape == (8 * T, H)


def test_transports_and_contracts() -> None:
    assert transport_for("cpu").contract == contract("gloo")
    assert transport_for("cuda").contract == contract("nccl")
    assert contract("nccl").capturable
    assert contract("nccl").recv_is == "event"
    assert contract("gloo").recv_is == "host"
    assert not contract("gloo").capturable
    assert transport_for("cpu", "deepep_ll").contract == contract("deepep_ll")
    assert transport_for("cpu", "deepep_ll") is transport_for("cpu", "deepep_ll")
    with pytest.raises(CommunicationError, match="'nccl' carries no tensors on 'cpu'"):
        transport_for("cpu", "nccl")
    with pytest.raises(CommunicationError, match="no transport carries tensors on 'meta'"):
        transport_for("meta")
    with pytest.raises(
        OptionError, match=r"unknown transport 'smoke'.*'deepep_ll', .*'gloo', .*'nccl'\]"
    ):
        contract("smoke")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slots": 2, "parity": 1}, "make parity a multiple of slots"),
        ({"slots": 3, "parity": 2}, "make parity a multiple of slots"),
        ({"slots": 0}, "slots=0, wanted 1 or more"),
        ({"max_in_flight": 0}, "max_in_flight=0, wanted 1 or more"),
        ({"parity": 0}, "parity=0, wanted 1 or more"),
    ],
)
def test_a_contract_that_no_program_can_keep_is_refused(
    change: dict[str, int], reason: str
) -> None:
    with pytest.raises(OptionError, match=f"contract 'gloo': .*{reason}"):
        replace(GLOO, **change)  # type: ignore[arg-type]


def table(contracts: list[Contract]) -> str:
    """All fields of the contracts as a Markdown table."""
    lines = [
        f"| field | {' | '.join(f'`{c.name}`' for c in contracts)} |",
        f"|---|{'---|' * len(contracts)}",
    ]
    for field in fields(Contract)[1:]:
        values = " | ".join(f"`{getattr(c, field.name)}`" for c in contracts)
        lines.append(f"| `{field.name}` | {values} |")
    return "\n".join(lines) + "\n"


def test_the_document_has_every_contract_and_explains_every_field(
    request: pytest.FixtureRequest,
) -> None:
    contracts = [CONTRACTS[name] for name in BUILT_IN]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    shown, after = rest.split(END)
    if request.config.getoption("--update-golden"):
        DOCUMENT.write_text(before + BEGIN + table(contracts) + END + after, encoding="utf-8")
    else:
        assert shown == table(contracts)
    for field in fields(Contract):
        assert f"\n| `{field.name}` | " in after, (
            f"docs/transports.md does not explain {field.name}"
        )


def test_every_device_has_its_usual_transport() -> None:
    assert {device: transport_for(device).contract.name for device in DEFAULTS} == DEFAULTS


class Renamed(GlooReference):
    """Gloo under another name."""

    def __init__(self, **changes: Any) -> None:
        object.__setattr__(self, "contract", replace(GLOO, **changes))


def test_a_transport_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_fx.comm import protocol

    monkeypatch.setattr(protocol, "_TRANSPORTS", dict(protocol._TRANSPORTS))
    monkeypatch.setitem(CONTRACTS, "mine", replace(GLOO, name="mine"))
    mine = Renamed(name="mine")
    register_transport(mine, "cpu")
    register_transport(mine, "cpu")
    assert transport_for("cpu", "mine") is mine
    with pytest.raises(OptionError, match="another transport for 'cpu' is called 'mine'"):
        register_transport(Renamed(name="mine"), "cpu")
    with pytest.raises(OptionError, match="another transport is called 'mine'"):
        register_transport(Renamed(name="mine", max_in_flight=1), "cuda")
    with pytest.raises(CommunicationError, match="'mine' carries no tensors on 'cuda'"):
        transport_for("cuda", "mine")


def test_a_contract_cannot_be_declared_twice() -> None:
    register_contract(GLOO)
    with pytest.raises(OptionError, match="another transport is called 'gloo'"):
        register_contract(replace(GLOO, max_in_flight=1))


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int32, -7), (torch.uint8, 255), (torch.bool, True)]
)
def test_poison_fits_the_type(dtype: torch.dtype, value: int) -> None:
    assert torch.empty(2, dtype=dtype).fill_(poison(dtype)).tolist() == [value, value]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_poison_is_nan_where_there_is_one(dtype: torch.dtype) -> None:
    filled = torch.empty(2, dtype=dtype).fill_(poison(dtype))
    assert filled.to(torch.complex64).isnan().all()


def run_group_adapter(rank: int) -> dict[str, Any]:
    """Everything that groups.py takes from torch's private parts."""
    name = groups.name_of(None)
    assert name is not None
    with pytest.raises(CommunicationError) as caught:
        groups.name_of(dist.GroupMember.NON_GROUP_MEMBER)
    groups.store(name).set(f"seen {rank}", "yes")
    groups.store(name).wait([f"seen {r}" for r in range(R)])
    return {
        "size": groups.world_size(name),
        "rank": groups.rank(name),
        "cpu": groups.backend_name(name, "cpu"),
        "cuda": groups.backend_name(name, "cuda"),
        "fake": groups.is_fake(name),
        "by name": groups.name_of(name) == name,
        "outsider": str(caught.value),
    }


def test_private_parts_of_torch_are_where_groups_expects_them(ranks: RankPool) -> None:
    for rank, seen in enumerate(ranks(run_group_adapter)):
        assert seen["size"] == R
        assert seen["rank"] == rank
        assert seen["cpu"] == "gloo"
        assert seen["cuda"] in (None, "gloo")
        assert not seen["fake"]
        assert seen["by name"]
        assert "not a member" in seen["outsider"]


def test_without_torch_distributed_there_is_no_default_group() -> None:
    assert groups.name_of(None) is None
    assert in_flight() == ()
