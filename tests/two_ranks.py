"""Programs on two real ranks against their sequential form: over gloo on CPUs, on a GPU each.

Both forms have the same microbatches, so that every result must be the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import dbo_fx
from dbo_fx import CudaGraphs
from dbo_fx.comm import in_flight
from dbo_fx.packing import COUNTER, Packing
from dbo_fx.poison_on_free import poison_on_free
from small_moe import EXPERTS, PlainMoe, rows

LAYERS, BUCKET, INPUTS = 2, 8, 5
COUNTS = (6, 17, 64)
# About a millisecond of a GPU: longer than any segment here.
SLOW_CYCLES = 2_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One program.

    Attributes:
        transport: What carries dispatch and combine.
        capacity: Of the packed rows of an all-to-all; None: all-gather and reduce-scatter.
        schedule: Its name.
        options: Further options of the compiler, of the sequential program, too.
    """

    transport: str
    capacity: float | int | None = None
    schedule: str = "mlp_shared_overlap"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """The test's id."""
        how = "all_gather" if self.capacity is None else f"all_to_all {self.capacity}"
        more = [f"{key}={value}" for key, value in self.options]
        return " ".join([self.transport, how, self.schedule, *more])


class PackedMoe(PlainMoe):
    """The same layers; experts get packed rows over an all-to-all, a block for each rank."""

    def __init__(self, layers: int, capacity: float | int) -> None:
        """Rank r of R has the experts from r * E / R."""
        super().__init__(layers)
        self.packing = Packing(dist.get_world_size(), EXPERTS, "expert", capacity)
        self.counters = nn.ModuleList(nn.Module() for _ in range(layers))
        for counter in self.counters:
            counter.register_buffer(COUNTER, torch.zeros(1, dtype=torch.int64))

    def experts(self, layer: int, h: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        scores, ids = F.linear(h, self.gate[layer]).softmax(-1).topk(2, -1)
        packed, places, lost = self.packing.pack(h, ids, scores)
        torch.ops.dbo_fx.note_overflow(getattr(self.counters[layer], COUNTER), lost)
        arrived = funcol.all_to_all_single(packed, None, None, self.group)
        given, chosen, _ = self.packing.open(arrived, h, scores)
        y = F.linear(torch.where(chosen >= 0, given, 0), self.expert[layer]) * (chosen + 1)
        y = torch.unflatten(y, 0, (self.packing.ranks, -1))
        back = funcol.all_to_all_single(y.contiguous(), None, None, self.group)
        return self.packing.unpack(back, places, scores)


class Pair:
    """A case's model on this rank, its program and the sequential one.

    Args:
        case: What to compile.
        rank: For inputs that differ from rank to rank.
        device: Where it runs.
    """

    def __init__(self, case: Case, rank: int, device: str) -> None:
        """Compile at the first call only."""
        torch._dynamo.reset()
        self.case, self.rank, self.device = case, rank, device
        plain = PlainMoe(LAYERS) if case.capacity is None else PackedMoe(LAYERS, case.capacity)
        self.model = plain.to(device)
        # Not split in single-batch overlap, where the schedule has one microbatch.
        count = dbo_fx.schedules.load(case.schedule).num_microbatches
        options: dict[str, Any] = {
            "verify": "static",
            "segment_backend": "eager",
            "transport": case.transport,
            "num_microbatches": count,
            **dict(case.options),
        }
        compiled = partial(torch.compile, self.model, backend="dbo_fx", fullgraph=True)
        self.overlapped: Any = compiled(options={**options, "schedule": case.schedule})
        self.serial: Any = compiled(options={**options, "schedule": "sequential"})

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        """[T, H] rows of this rank."""
        x = rows(count, seed=10 * seed + self.rank).to(self.device)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    def program(self) -> Any:
        """The overlapped program, once it has run."""
        name = self.case.schedule
        return next(c for c in reversed(dbo_fx.compilations()) if c.program.schedule == name)

    def lost(self) -> int:
        """Rows that found no room since the last call of this."""
        return dbo_fx.overflow(self.model, reset=True).total

    def captured(self, call: Callable[[Tensor], Tensor]) -> CudaGraphs:
        """A graph of a call for one bucket."""
        graphs = CudaGraphs(call)
        graphs.capture([BUCKET], self.tokens(BUCKET))
        return graphs

    def equal(self, call: Callable[[Tensor], Tensor], count: int, seed: int) -> bool:
        """Whether a call gives what the sequential program gives, and loses as many rows.

        NaN stands in the outputs of tokens that lost one, and nowhere else.
        """
        x = self.tokens(count, seed)
        found, lost = call(x).clone(), self.lost()
        wanted = self.serial(x)
        is_lost = found.isnan()
        return (
            torch.equal(is_lost, wanted.isnan())
            and torch.equal(found.masked_fill(is_lost, 0), wanted.masked_fill(is_lost, 0))
            and lost == self.lost()
            and bool(is_lost.any()) == (lost > 0)
        )


def slow(stream: str) -> None:
    """Let the compute stream overtake the communication."""
    if stream == "comm" and torch.cuda.is_available():
        torch.cuda._sleep(SLOW_CYCLES)


@torch.no_grad()
def run_case(rank: int, case: Case, device: str) -> dict[str, Any]:
    """Eager and captured, as it is and with freed memory poisoned and communication slow."""
    pair = Pair(case, rank, device)
    found: dict[str, Any] = {
        "eager": [pair.equal(pair.overlapped, count, seed=1) for count in COUNTS]
    }
    graphs = pair.captured(pair.overlapped)
    found["captured"] = [pair.equal(graphs, BUCKET, seed) for seed in range(INPUTS)]
    graphs.reset()
    with poison_on_free(pair.program(), slow):
        found["poisoned"] = [pair.equal(pair.overlapped, count, seed=2) for count in COUNTS]
        graphs = pair.captured(pair.overlapped)
    found["poisoned captured"] = [pair.equal(graphs, BUCKET, seed) for seed in range(INPUTS)]
    graphs.reset()
    found["in flight"] = len(in_flight())
    found["text"] = str(pair.program().program)
    return found


def check_case(results: list[dict[str, Any]], case: Case) -> None:
    """All ranks ran the same program, and everything was equal."""
    assert len({found["text"] for found in results}) == 1
    for found in results:
        text = found.pop("text")
        assert f"transport {case.transport}" in text
        assert case.schedule in text
        assert found == {
            "eager": [True] * len(COUNTS),
            "captured": [True] * INPUTS,
            "poisoned": [True] * len(COUNTS),
            "poisoned captured": [True] * INPUTS,
            "in flight": 0,
        }


@torch.no_grad()
def run_overflow(rank: int, case: Case, device: str) -> dict[str, Any]:
    """A capacity that the batch does not fit into: counted, and NaN where it was lost."""
    pair = Pair(case, rank, device)
    x = pair.tokens(BUCKET)
    result = pair.overlapped(x)
    eager = dbo_fx.overflow(pair.model, reset=True)
    graphs = pair.captured(pair.overlapped)
    before = pair.lost()
    for _ in range(3):
        replayed = graphs(x)
    again = dbo_fx.overflow(pair.model, reset=True)
    same = torch.equal(replayed.nan_to_num(7.0), result.nan_to_num(7.0))
    graphs.reset()
    return {
        "layers": len(eager.lost),
        "lost": eager.total,
        "poisoned": bool(result.isnan().any()),
        "a capture counts": before,
        "replays count": again.total,
        "same": same,
        "equal": pair.equal(pair.overlapped, BUCKET, seed=1),
        "text": str(eager).split(";")[0],
    }


def check_overflow(results: list[dict[str, Any]]) -> None:
    """Every rank lost rows, and said so in every run."""
    for found in results:
        lost = found.pop("lost")
        assert lost > 0
        assert found == {
            "layers": LAYERS,
            "poisoned": True,
            "a capture counts": 0,
            "replays count": 3 * lost,
            "same": True,
            "equal": True,
            "text": f"{lost} rows found no room in their block",
        }
