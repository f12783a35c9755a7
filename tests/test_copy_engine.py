"""Peer copies: what is moved, which half it is staged in, and that one barrier each is enough.

The GPU's transport and its CPU twin run the same `exchange`. Here it runs on two real ranks through
shared memory, and on pretended ranks whose touches of each other's memory are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx.comm import abandon_in_flight, groups, in_flight, transport_for
from dbo_fx.comm.copy_engine import CopyEngine
from dbo_fx.comm.loopback import CHUNK_BYTES, Loopback
from dbo_fx.comm.peer_exchange import exchange, needed_bytes
from dbo_fx.comm.peer_links import Link
from dbo_fx.comm.protocol import begin_region
from dbo_fx.errors import CommunicationError
from rank_pool import RankPool
from small_moe import PlainMoe, fake_ranks, one_rank, rows, run_passes, traced_model

T, H, R = 3, 4, 2
OPS = torch.ops.dbo_fx
CE = "copy_engine"
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter_sum")


def world() -> str:
    """Name of the default group."""
    name = groups.name_of(None)
    assert name is not None
    return name


def given(collective: str, rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's input: whole numbers that tell rank and place."""
    count = T if collective == "all_gather" else T * ranks
    return (torch.arange(count * H).view(count, H) + 100 * rank).to(dtype)


def wanted(collective: str, inputs: list[Tensor], rank: int) -> Tensor:
    """What a rank gets, from everybody's inputs."""
    if collective == "all_gather":
        return torch.cat(inputs)
    parts = [x.chunk(len(inputs))[rank] for x in inputs]
    return torch.cat(parts) if collective == "all_to_all" else torch.stack(parts).sum(0)


# Pretended ranks: whose touches of a half could meet.


@dataclass
class Watched:
    """One rank's view of staging memory. It notes who touches which half in which interval.

    An interval lies between two barriers. Everything in an earlier one is done before everything in
    a later one, on all ranks; within one, ranks run in any order.
    """

    ranks: int
    touched: set[tuple[int, int, int, int]] = field(default_factory=set)
    half_bytes: int = 1 << 12
    interval: int = 0
    operation: int = 0

    def half(self, rank: int, index: int) -> Tensor:
        self.touched.add((rank, index, self.interval, self.operation))
        return torch.zeros(self.half_bytes, dtype=torch.uint8)

    def barrier(self) -> None:
        self.interval += 1


def meetings(ranks: int, regions: list[int], *, begins: bool = True) -> int:
    """How many halves two operations may use at once, over regions of so many operations."""
    touched: set[tuple[int, int, int, int]] = set()
    for rank in range(ranks):
        staging = Watched(ranks, touched)
        link = Link(None, staging)
        for count in regions:
            if begins:
                link.begin()
            else:
                link.next = 0
            for number in range(count):
                staging.operation += 1
                collective = COLLECTIVES[number % 3]
                x = given(collective, rank, ranks)
                output = torch.empty_like(wanted(collective, [x] * ranks, rank))
                exchange(staging, link.turn(staging), collective, [x], [output], rank, ranks)
    return len(touched) - len({place for *place, _ in touched for place in [tuple(place)]})


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("regions", [[7], [1, 1, 1], [4, 3, 5, 2]])
def test_one_barrier_an_operation_keeps_operations_apart(ranks: int, regions: list[int]) -> None:
    assert meetings(ranks, regions) == 0


def test_a_region_needs_a_barrier_before_its_first_operation() -> None:
    """Odd regions end in the half where the next one starts."""
    assert meetings(2, [3, 3], begins=False) > 0
    assert meetings(2, [4, 4], begins=False) == 0


def test_with_one_half_operations_would_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbo_fx.comm.peer_links.HALVES", 1)
    assert meetings(2, [4]) > 0


def test_a_capture_is_a_region_of_its_own() -> None:
    staging = Watched(2)
    link = Link(None, staging)
    halves = [link.turn(staging, capturing) for capturing in (False, True, True, True, False)]
    assert halves == [0, 0, 1, 0, 0]
    assert staging.interval == 3


def test_room_is_made_before_a_capture_and_never_in_one() -> None:
    class Group:
        group_name = "experts"

    link = Link(Group())
    made: list[tuple[int, int]] = []

    def make(size: int, number: int) -> Watched:
        made.append((size, number))
        return Watched(2, half_bytes=size)

    with pytest.raises(CommunicationError, match=r"'experts' has room for 0.*once eagerly"):
        link.room(10, make, True)
    first = link.room(10, make, False)
    assert link.room(1 << 20, make, True) is first
    with pytest.raises(CommunicationError, match=r"stages 1048577 bytes.*has room for 1048576"):
        link.room((1 << 20) + 1, make, True)
    second = link.room((1 << 20) + 1, make, False)
    assert link.room(5, make, True) is second
    assert made == [(1 << 20, 0), (1 << 21, 1)]
    assert link.outgrown == [first]  # Captured graphs may still use it.


# Two real ranks through shared memory.


def run_collectives(rank: int, dtype: torch.dtype) -> list[bool]:
    """Every collective, two tensors an operation, three operations in flight, twice."""
    found, group = [], world()
    for repeat in range(2):
        begin_region(CE, [group])
        sent = []
        for flight, collective in enumerate(COLLECTIVES):
            x = given(collective, rank, R, dtype) + repeat
            inputs = [x, x[:, :1].long()]
            out = OPS.comm_buffers(inputs, collective, group)
            OPS.dispatch_send(inputs, out, collective, group, CE, flight)
            x.fill_(0)  # Behind the send it may be overwritten.
            poison = torch.isnan(out[0]) if dtype.is_floating_point else out[0] == -7
            found.append(bool(poison.all()) and bool((out[1] == -7).all()))
            sent.append((collective, out))
        for flight in (1, 0, 2):  # Received in another order than sent.
            collective, out = sent[flight]
            OPS.dispatch_recv(out, group, CE, flight)
            want = [given(collective, r, R, dtype) + repeat for r in range(R)]
            found.append(torch.equal(out[0], wanted(collective, want, rank).to(dtype)))
            ints = [x[:, :1].long() for x in want]
            found.append(torch.equal(out[1], wanted(collective, ints, rank)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_collectives_through_shared_memory(ranks: RankPool, dtype: torch.dtype) -> None:
    for found in ranks(run_collectives, dtype):
        assert found == [True] * 18


def run_growing(rank: int) -> list[bool]:
    """Each operation needs more room than the one before it, in one region."""
    group, found = world(), []
    begin_region(CE, [group])
    for count in (1 << 10, 1 << 19, 1 << 20):
        x = torch.arange(count, dtype=torch.float32).view(-1, 2) + rank
        out = OPS.comm_buffers([x], "all_gather", group)
        OPS.dispatch_send([x], out, "all_gather", group, CE, 0)
        OPS.dispatch_recv(out, group, CE, 0)
        found.append(torch.equal(out[0], torch.cat([x - rank, x - rank + 1])))
    return found


def test_staging_memory_grows(ranks: RankPool) -> None:
    assert ranks(run_growing) == [[True] * 3] * R


def run_given_up(rank: int) -> tuple[str, bool]:
    """A step fails on both ranks between the halves; the next one starts over what is pending."""
    group, x = world(), given("all_gather", rank, R)
    out = OPS.comm_buffers([x], "all_gather", group)
    OPS.dispatch_send([x], out, "all_gather", group, CE, 0)
    with pytest.raises(CommunicationError) as caught:
        begin_region(CE, [group])
    abandon_in_flight()
    begin_region(CE, [group])
    OPS.dispatch_send([x], out, "all_gather", group, CE, 0)
    OPS.dispatch_recv(out, group, CE, 0)
    return str(caught.value), torch.equal(
        out[0], torch.cat([given("all_gather", r, R) for r in (0, 1)])
    )


def test_a_step_that_fails_leaves_nothing_behind(ranks: RankPool) -> None:
    for said, equal in ranks(run_given_up):
        assert said.startswith("dispatch, flight 0, group '0' is not received")
        assert "abandon_in_flight() on every rank" in said
        assert equal


def run_program(rank: int, transport: str) -> tuple[list[Tensor], str]:
    """A compiled model over a transport, on two batch sizes, and its program."""
    torch._dynamo.reset()
    model = PlainMoe(2)
    options = {"transport": transport, "verify": "static"}
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
    results = []
    with torch.no_grad():
        for count in (6, 17):
            x = rows(count, seed=rank)
            torch._dynamo.mark_dynamic(x, 0)
            results.append(compiled(x))
    assert in_flight() == ()
    return results, str(dbo_fx.compilations()[-1].program)


def test_a_program_over_peer_copies_equals_the_one_over_gloo(ranks: RankPool) -> None:
    over_gloo, over_copies = ranks(run_program, "gloo"), ranks(run_program, CE)
    for (one, _), (other, program) in zip(over_gloo, over_copies, strict=True):
        assert all(map(torch.equal, one, other))
        assert "transport copy_engine" in program


# Refusals, and what needs no peers.


@pytest.fixture
def alone() -> Iterator[str]:
    """A gloo group of this process alone."""
    with one_rank() as name:
        yield name
        abandon_in_flight()


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("transport", [CE, "loopback"])
def test_one_rank_gets_its_own(alone: str, collective: str, transport: str) -> None:
    x = given(collective, 0, 1)
    out = OPS.comm_buffers([x], collective, alone)
    OPS.combine_send([x], out, collective, alone, transport, 0)
    assert out[0].isnan().all()
    OPS.combine_recv(out, alone, transport, 0)
    assert torch.equal(out[0], x)


def test_pretended_peers_have_no_memory() -> None:
    x = torch.ones(2, 3)
    with fake_ranks() as group:
        out = OPS.comm_buffers([x], "all_gather", group)
        with pytest.raises(CommunicationError, match=r"only pretends.*Use transport='loopback'"):
            OPS.dispatch_send([x], out, "all_gather", group, CE, 0)
    assert in_flight() == ()


def test_an_operation_takes_aligned_bytes() -> None:
    assert needed_bytes([torch.empty(1), torch.empty(65), torch.empty(0, 4)]) == 256 + 512


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_loopback_takes_every_peer_for_a_copy_of_this_rank(collective: str) -> None:
    """More than one chunk, and a tail; three peers."""
    with fake_ranks(4) as group:
        x = torch.randn(4 * (CHUNK_BYTES // 64), 6).to(torch.bfloat16)
        out = OPS.comm_buffers([x], collective, group)
        OPS.dispatch_send([x], out, collective, group, "loopback", 0)
        assert out[0].isnan().all()
        OPS.dispatch_recv(out, group, "loopback", 0)
        own = x if collective == "all_gather" else x.chunk(4)[0]
        if collective == "reduce_scatter_sum":
            assert torch.equal(out[0], own * 4)
        else:
            assert torch.equal(out[0], own.repeat(4, 1))


def run_loopback(rank: int) -> str:
    """Loopback over a group that has peers."""
    x = given("all_gather", rank, R)
    out = OPS.comm_buffers([x], "all_gather", world())
    with pytest.raises(CommunicationError) as caught:
        OPS.dispatch_send([x], out, "all_gather", world(), "loopback", 0)
    return str(caught.value)


def test_loopback_refuses_real_peers(ranks: RankPool) -> None:
    for said in ranks(run_loopback):
        assert "group '0' has 2 real ranks" in said
        assert "it measures overlap on one GPU" in said


def test_a_compiled_program_runs_over_loopback() -> None:
    torch._dynamo.reset()
    with fake_ranks(2):
        options = {"transport": "loopback", "verify": "static"}
        compiled = torch.compile(PlainMoe(2), backend="dbo_fx", fullgraph=True, options=options)
        again = torch.compile(
            PlainMoe(2),
            backend="dbo_fx",
            fullgraph=True,
            options={**options, "schedule": "sequential"},
        )
        x = rows(8)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            result = compiled(x)
            assert result.isfinite().all()
            torch._dynamo.reset()
            assert torch.equal(result, again(x))


@pytest.mark.parametrize("transport", [CE, "loopback"])
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
def test_sunk_recvs_find_what_an_unsunk_program_finds(transport: str, schedule: str) -> None:
    """Outputs hold poison until their recv, so one that had sunk too far would show."""
    results = []
    for carrier in (transport, "gloo"):
        with one_rank():
            trace = traced_model(PlainMoe, 3, 1)
            module = run_passes(trace.fresh(), "emit", schedule, transport=carrier).module
            assert module is not None
            with torch.no_grad():
                results.append(module(*trace.args(10)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("transport", [CE, "loopback"])
def test_the_transports_are_there_for_both_devices(transport: str) -> None:
    for device in ("cpu", "cuda"):
        carrier = transport_for(device, transport)
        assert carrier.contract.name == transport
        assert carrier.contract.recv_is == "event"
        carrier.realign(None)
    assert isinstance(transport_for("cuda", CE), CopyEngine)
    assert isinstance(transport_for("cuda", "loopback"), Loopback)


# On GPUs: both ranks may share one.


def run_on_gpus(rank: int) -> list[bool]:
    """Every collective eager and in one graph, which is replayed with new inputs."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group, found = world(), []

    def inputs(step: int, of: int) -> list[Tensor]:
        return [(given(c, of, R) + step).cuda() for c in COLLECTIVES]

    def run(given_: list[Tensor], outputs: list[list[Tensor]]) -> None:
        for flight, (collective, x, out) in enumerate(
            zip(COLLECTIVES, given_, outputs, strict=True)
        ):
            OPS.dispatch_send([x], out, collective, group, CE, flight)
            OPS.dispatch_recv(out, group, CE, flight)

    def is_right(outputs: list[list[Tensor]], step: int) -> bool:
        every = [inputs(step, of) for of in range(R)]
        wants = [wanted(c, [x[i] for x in every], rank) for i, c in enumerate(COLLECTIVES)]
        return all(torch.equal(out[0], want) for out, want in zip(outputs, wants, strict=True))

    static = inputs(0, rank)
    outputs = [OPS.comm_buffers([x], c, group) for c, x in zip(COLLECTIVES, static, strict=True)]
    begin_region(CE, [group])
    run(static, outputs)
    found.append(is_right(outputs, 0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    begin_region(CE, [group])
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run(static, outputs)
    for step in range(1, 21):
        for tensor, new in zip(static, inputs(step, rank), strict=True):
            tensor.copy_(new)
        graph.replay()
        found.append(is_right(outputs, step))
    return found


@pytest.mark.gpu
def test_peer_copies_eager_and_replayed(ranks: RankPool) -> None:
    assert ranks(run_on_gpus) == [[True] * 21] * R


@pytest.mark.gpu
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_loopback_on_a_gpu_gives_what_its_twin_gives(collective: str) -> None:
    with fake_ranks(2) as group:
        x = torch.arange(2 * (CHUNK_BYTES // 16) * 6).view(-1, 6).to(torch.bfloat16)
        results = []
        for device in ("cpu", "cuda"):
            moved = x.to(device)
            out = OPS.comm_buffers([moved], collective, group)
            OPS.dispatch_send([moved], out, collective, group, "loopback", 0)
            OPS.dispatch_recv(out, group, "loopback", 0)
            results.append(out[0].cpu())
        assert torch.equal(*results)
