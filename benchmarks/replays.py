"""Captured programs over many replays: equal, flat in memory, clean under poison, as certified.

On every rank, in one run:

* replays   captured steps of changing inputs and sizes against the sequential program, bit for bit,
            with the allocator's counters throughout, and with host syncs forbidden;
* failures  captures that fail in three ways, the allocator's counters behind each, before them and
            when a good one is released;
* poison    the program with all freed memory overwritten at once and the communication stream
            slowed down; the same with the pool's free memory overwritten between replays; and, to
            see that this finds anything, the program without its keepalives;
* memory    the memory certificate against the allocator's peak (`replays_memory`).

`good` in the result says whether all of it was as it must be, on all ranks.

    python benchmarks/replays.py --output benchmarks/results/replays.json
    python benchmarks/replays.py --ranks 2 --output benchmarks/results/replays_two.json
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/replays.py --ranks 2 \
        --transport copy_engine --model decoder --replays 200 --output FILE

The second takes two GPUs, and adds copy_engine to the memory section; the third puts two ranks on
one GPU.

With `--device cpu` the CPU twin of the graphs is replayed: that tries the script out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replays_memory import is_certified, memory
from torch import Tensor
from torch.fx import GraphModule

import dbo_fx
from dbo_fx import CudaGraphs, sync
from dbo_fx.capturing import what_captures
from dbo_fx.demo import build_model
from dbo_fx.graph_device import CudaDevice
from dbo_fx.launch import run_ranks
from dbo_fx.models import DEMO_CONFIG, MoeConfig, MoeDecoder
from dbo_fx.poison_on_free import ONES, poison_on_free

# transformers looks for torchvision, whose build may not fit torch's.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

BUCKETS = (4, 8, 16)
SIZES = range(1, BUCKETS[-1] + 1)
TOKENS = 64
EAGER_EVERY = 100
TIMED = 100
FAILURES = 5
MEM = ("allocated", "reserved")
# About a tenth of a millisecond: longer than any segment of this model.
SLOW_CYCLES = 200_000


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    device: str
    transport: str | None
    model: str
    segments: str | None
    replays: int
    poisoned: int
    shapes: tuple[tuple[int, int], ...]


class Rank:
    """One rank's model, programs and random inputs."""

    def __init__(self, rank: int, settings: Settings) -> None:
        """Take the rank's device."""
        self.settings = settings
        self.device = torch.device(settings.device)
        if self.is_cuda:
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.sizes = torch.Generator().manual_seed(0)
        self.values = torch.Generator(self.device).manual_seed(rank)

    @property
    def is_cuda(self) -> bool:
        """Whether graphs are real."""
        return self.settings.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def segments(self) -> str:
        """What compiles segments: what the settings name, or the program's own choice."""
        return self.settings.segments or ("inductor" if self.is_cuda else "eager")

    def transports(self) -> list[str | None]:
        """What the memory section compares; None: the program's own choice."""
        if self.settings.transport is None and self.is_cuda and dist.get_world_size() > 1:
            return ["nccl", "copy_engine"]
        return [self.settings.transport]

    def compile(self, model: torch.nn.Module, **options: Any) -> Any:
        """Compile for the transport and the segments that the settings name."""
        if self.settings.transport is not None:
            options.setdefault("transport", self.settings.transport)
        options.setdefault("segment_backend", self.segments)
        options["verify"] = "static"
        return torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)

    def tokens(self, batch: int) -> Tensor:
        """[B, S] random ids, other ones on every rank."""
        shape = (batch, TOKENS)
        return torch.randint(0, 256, shape, generator=self.values, device=self.device)

    def size(self, smallest: int = 1) -> int:
        """The same on every rank."""
        return int(torch.randint(smallest, BUCKETS[-1] + 1, (), generator=self.sizes))

    def used(self) -> dict[str, int]:
        """The allocator's counters."""
        if not self.is_cuda:
            return {"allocated": 0, "reserved": 0}
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
        }

    def settled(self) -> dict[str, int]:
        """The counters with all garbage gone and what is free given back."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return self.used()

    @contextmanager
    def without_syncs(self) -> Iterator[None]:
        """Raise if the host waits for the device."""
        if self.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.is_cuda:
                torch.cuda.set_sync_debug_mode("default")

    def captured(self, call: Callable[..., Any], *buckets: int) -> CudaGraphs:
        """Graphs of a call, for all buckets if none is named."""
        graphs = CudaGraphs(call)
        graphs.capture(buckets or BUCKETS, self.tokens(5))
        return graphs


def bits(value: Tensor) -> Tensor:
    """A tensor's bits: NaN equals itself."""
    return value.contiguous().view(torch.uint8)


def differing(one: Tensor, other: Tensor) -> Tensor:
    """1 if any bit differs; stays on the device."""
    return (bits(one) != bits(other)).any().long()


def eager(call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The call on rows padded as a replay pads them, cut again."""
    bucket = min(b for b in BUCKETS if b >= len(tokens))
    padded = torch.zeros(bucket, TOKENS, dtype=tokens.dtype, device=tokens.device)
    padded[: len(tokens)] = tokens
    torch._dynamo.mark_dynamic(padded, 0)
    return call(padded)[: len(tokens)]


def replays(rank: Rank, split: Any, serial: Any) -> dict[str, Any]:
    """Graph against graph in every step, and against the eager serial program in some."""
    graphs, serials = rank.captured(split), rank.captured(serial)
    different = torch.zeros((), dtype=torch.int64, device=rank.device)
    different_eager = torch.zeros_like(different)
    for size in SIZES:  # All that a step does: the allocator has seen every size then.
        tokens = rank.tokens(size)
        different += differing(graphs(tokens), serials(tokens))
        different_eager += differing(graphs(tokens), eager(serial, tokens))
    del tokens
    checked, host_us, memory_seen = len(SIZES), [], [rank.used()]
    for step in range(rank.settings.replays):
        tokens = rank.tokens(rank.size())
        if step < TIMED:
            rank.used()  # An empty queue, so that the launch does not wait for room in it.
        started = time.perf_counter()
        with rank.without_syncs():
            out = graphs(tokens)
        host_us.append((time.perf_counter() - started) * 1e6)
        different += differing(out, serials(tokens))
        if step % EAGER_EVERY == 0:
            checked += 1
            different_eager += differing(out, eager(serial, tokens))
        del tokens, out
        if step % EAGER_EVERY == EAGER_EVERY - 1:
            memory_seen.append(rank.used())
    memory_seen.append(rank.used())
    found = {
        "replays": rank.settings.replays,
        "different_from_serial_graph": int(different),
        "compared_with_eager_serial": checked,
        "different_from_eager_serial": int(different_eager),
        "host_us_per_step": round(statistics.median(host_us[:TIMED]), 1),
        "hits": {str(b): n for b, n in graphs.statistics.hits.items()},
        "eager": dict(graphs.statistics.eager),
        "segments": program_of("mlp_shared_overlap").plan.segments,
        "memory_sampled": len(memory_seen),
        "memory_early": memory_seen[0],
        "memory_late": memory_seen[-1],
        "memory_flat": all(seen == memory_seen[0] for seen in memory_seen),
    }
    graphs.reset()
    serials.reset()
    return found


def failures(rank: Rank, split: Any, serial: Any) -> dict[str, Any]:
    """Every kind of failure several times; then the program still runs, and can be captured.

    One good graph is captured and released before anything is counted: what libraries keep from
    then on, such as cuBLAS its workspaces for every stream that it was used on, is no failure's.
    """
    program = program_of("mlp_shared_overlap")
    mode = ""

    def call(tokens: Tensor) -> Tensor:
        out: Tensor = split(tokens)
        if what_captures() and mode == "behind the program":
            raise ZeroDivisionError(mode)
        if what_captures() and mode == "a host sync":
            out.sum().item()
            if not rank.is_cuda:
                raise ZeroDivisionError(mode)
        return out

    def breaks(event: int, stream: str) -> None:
        if what_captures() and event > 2:
            raise ZeroDivisionError("in the program")
        type(program.runtime).record(program.runtime, event, stream)

    def is_equal(run: Callable[[Tensor], Tensor]) -> bool:
        return not differing(run(tokens), eager(serial, tokens))

    graphs, example, tokens = CudaGraphs(call), rank.tokens(8), rank.tokens(7)
    found: dict[str, Any] = {"equal_before": is_equal(lambda t: eager(split, t)), "after": {}}
    graphs.capture([8], example)
    found["equal_before"] &= is_equal(graphs)
    graphs.reset()
    found["before"] = rank.settled()
    for mode in ("in the program", "behind the program", "a host sync"):
        if mode == "in the program":
            program.runtime.record = breaks
        used = []
        for _ in range(FAILURES):
            try:
                graphs.capture([8], example)
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            else:
                text = ""
            used.append({**rank.settled(), "error": text})
        vars(program.runtime).pop("record", None)
        found["after"][mode] = used
    mode = ""
    found["eager_equal"] = is_equal(lambda t: eager(split, t))
    graphs.capture([8], example)
    found["replay_equal"] = is_equal(graphs)
    graphs.reset()
    found["released"] = rank.settled()
    return found


def poison(rank: Rank, split: Any, serial: Any) -> dict[str, Any]:
    """Replays of the program as it is, with its freed memory poisoned, and without keepalives."""
    program = program_of("mlp_shared_overlap")
    plain, serials = program.module, rank.captured(serial, 8)

    def slow(stream: str) -> None:
        if rank.is_cuda and stream == "comm":
            torch.cuda._sleep(SLOW_CYCLES)

    def count(graphs: CudaGraphs, between: Callable[[], None] = lambda: None) -> int:
        different = torch.zeros((), dtype=torch.int64, device=rank.device)
        for _ in range(rank.settings.poisoned):
            tokens = rank.tokens(1 + rank.size() % 8)
            between()
            different += differing(graphs(tokens), serials(tokens))
        return int(different)

    found: dict[str, Any] = {"replays": rank.settings.poisoned}
    with poison_on_free(program, slow):
        graphs = rank.captured(split, 8)
    found["poison_on_free_different"] = count(graphs)
    graphs.reset()
    graphs = rank.captured(split, 8)
    fill, found["pool_bytes_poisoned"] = pool_poison(graphs)
    found["poison_between_replays_different"] = count(graphs, fill)
    graphs.reset()
    program.module, found["keepalives"] = without_keepalives(plain)
    with poison_on_free(program, slow):
        graphs = rank.captured(split, 8)
    program.module = plain
    found["without_keepalives_different"] = count(graphs)
    graphs.reset()
    serials.reset()
    return found


def without_keepalives(module: GraphModule) -> tuple[GraphModule, int]:
    """The module with nothing that keeps values alive, and how often it did."""
    graph = copy.deepcopy(module.graph)
    nodes = [n for n in graph.nodes if n.target is sync.keepalive]
    for node in nodes:
        graph.erase_node(node)
    return GraphModule(module, graph), len(nodes)


def pool_poison(graphs: CudaGraphs) -> tuple[Callable[[], None], int]:
    """A function that fills the free memory of the graphs' pool, and how much that is."""
    device = graphs._device
    if not isinstance(device, CudaDevice):
        return lambda: None, 0
    blocks = []
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) == tuple(device.pool):
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    blocks.append(raw(address, block["size"], device.device))
                address += block["size"]

    def fill() -> None:
        for block in blocks:
            block.fill_(ONES)

    return fill, sum(b.numel() for b in blocks)


class _Raw:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 2,
        }


def raw(address: int, size: int, device: torch.device) -> Tensor:
    """Device memory as bytes."""
    return torch.as_tensor(_Raw(address, size), device=device)


def program_of(schedule: str) -> Any:
    """The newest program of a schedule."""
    return next(c for c in reversed(dbo_fx.compilations()) if c.program.schedule == schedule)


@torch.no_grad()
def rank_main(number: int, settings: Settings) -> dict[str, Any]:
    """All sections on one rank."""
    rank = Rank(number, settings)
    started = time.perf_counter()
    if settings.model == "demo":
        model = build_model(DEMO_CONFIG, rank.device, rank.dtype)
    else:
        decoder = MoeDecoder(MoeConfig(layers=4, shared_hidden=64))
        model = decoder.to(rank.device, rank.dtype).requires_grad_(False)
    split, serial = rank.compile(model), rank.compile(model, schedule="sequential")
    found: dict[str, Any] = {}
    sections: dict[str, Callable[[], Any]] = {
        "replays": lambda: replays(rank, split, serial),
        "failures": lambda: failures(rank, split, serial),
        "poison": lambda: poison(rank, split, serial),
        "memory": lambda: memory(rank, TOKENS),
    }
    for name, section in sections.items():
        found[name] = section()
        found[f"{name}_s"] = round(time.perf_counter() - started, 1)
        print(f"rank {number}: {name} {json.dumps(found[name])}", flush=True)
    return found


def faults(found: dict[str, Any], is_cuda: bool) -> list[str]:
    """What of one rank's results is not as it must be."""
    r, f, p = found["replays"], found["failures"], found["poison"]
    failed = [u for after in f["after"].values() for u in after]
    wanted = {
        "replays equal the serial graph": not r["different_from_serial_graph"],
        "replays equal the eager serial program": not r["different_from_eager_serial"],
        "every step was a replay": not r["eager"],
        "memory is flat over the replays": r["memory_flat"],
        "every capture failed that should": all(u["error"] for u in failed),
        "failed captures leave no memory": all(u[k] == f["before"][k] for u in failed for k in MEM),
        "released graphs leave no memory": all(f["released"][k] == f["before"][k] for k in MEM),
        "programs are equal around failures": all(
            f[k] for k in ("equal_before", "eager_equal", "replay_equal")
        ),
        "poison on free changes nothing": not p["poison_on_free_different"],
        "poison between replays changes nothing": not p["poison_between_replays_different"],
        "poison finds missing keepalives": not is_cuda or p["without_keepalives_different"] > 0,
        "certificates fit": all(map(is_certified, found["memory"])),
    }
    return [what for what, is_so in wanted.items() if not is_so]


def main() -> int:
    """Run, write the JSON, exit 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--transport", help="default: NCCL on CUDA")
    parser.add_argument(
        "--model", choices=("demo", "decoder"), default="demo",
        help="Hugging Face's DeepSeek-V3 in small, or the plain decoder, which needs no first-call "
        "test over NCCL",
    )  # fmt: skip
    parser.add_argument("--segments", help="segment_backend; default: the program's own")
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--poisoned", type=int, default=200)
    parser.add_argument(
        "--shape", nargs=2, type=int, action="append", metavar=("BATCH", "HIDDEN"),
        help="of plain decoders in the memory section",
    )  # fmt: skip
    parser.add_argument("--commit", help="default: what git says")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    shared = is_cuda and torch.cuda.device_count() < args.ranks
    # NCCL refuses two ranks on one GPU.
    backend = "nccl" if is_cuda and not shared else "gloo"
    shapes = tuple(map(tuple, args.shape or [(768, 2048) if is_cuda else (8, 128)]))
    settings = Settings(
        args.device, args.transport, args.model, args.segments, args.replays, args.poisoned, shapes
    )
    started = time.perf_counter()
    ranks = run_ranks(rank_main, args.ranks, (settings,), backend=backend, timeout_s=500)
    # Where one machine keeps its files is nobody's business.
    words = [args.output.name if word == str(args.output) else word for word in sys.argv[1:]]
    git = ["git", "rev-parse", "--short", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    wrong = [f"rank {i}: {w}" for i, found in enumerate(ranks) for w in faults(found, is_cuda)]
    result = {
        "command": f"python benchmarks/replays.py {' '.join(words)}",
        "device": torch.cuda.get_device_name(0) if is_cuda else "cpu",
        "gpus": min(args.ranks, torch.cuda.device_count()),
        "group": backend,
        "torch": torch.__version__,
        "commit": args.commit or said,
        "wall_s": round(time.perf_counter() - started, 1),
        "good": not wrong,
        "wrong": wrong,
        "ranks": ranks,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print("NOT GOOD: " + "; ".join(wrong) if wrong else "GOOD")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
