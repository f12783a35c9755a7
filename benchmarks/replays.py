"""Captured programs over many replays: equal, flat in memory, clean under poison, as certified.

On every rank, in one run:

* replays   captured steps of changing inputs and sizes against the sequential program, bit for bit,
            with the allocator's counters before and behind, and with host syncs forbidden;
* failures  captures that fail in three ways, the allocator's counters behind each, and a good one;
* poison    the program with all freed memory overwritten at once and the communication stream
            slowed down; the same with the pool's free memory overwritten between replays; and, to
            see that this finds anything, the program without its keepalives;
* memory    the memory certificate against the allocator's peak.

    python benchmarks/replays.py --output benchmarks/results/replays.json
    python benchmarks/replays.py --ranks 2 --output FILE
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/replays.py --ranks 2 \
        --transport copy_engine --model decoder --replays 200 --output FILE

The second takes two GPUs if they are there, the third puts two ranks on one.

With `--device cpu` the CPU twin of the graphs is replayed: that tries the script out.
"""

from __future__ import annotations

import argparse
import copy
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
TOKENS = 64
EAGER_EVERY = 100
TIMED = 100
FAILURES = 5
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

    def compile(self, model: torch.nn.Module, **options: Any) -> Any:
        """Compile for the transport and the segments that the settings name."""
        if self.settings.transport is not None:
            options["transport"] = self.settings.transport
        if self.settings.segments is not None:
            options.setdefault("segment_backend", self.settings.segments)
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
    before, checked, host_us = {}, 0, []
    for step in range(rank.settings.replays):
        if step == min(10, rank.settings.replays // 2):
            before = rank.used()
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
    found = {
        "replays": rank.settings.replays,
        "different_from_serial_graph": int(different),
        "compared_with_eager_serial": checked,
        "different_from_eager_serial": int(different_eager),
        "host_us_per_step": round(statistics.median(host_us[:TIMED]), 1),
        "hits": {str(b): n for b, n in graphs.statistics.hits.items()},
        "eager": dict(graphs.statistics.eager),
        "memory_early": before,
        "memory_late": rank.used(),
    }
    graphs.reset()
    serials.reset()
    return found


def failures(rank: Rank, split: Any, serial: Any) -> dict[str, Any]:
    """Every kind of failure several times; then the program still runs, and can be captured."""
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

    graphs = CudaGraphs(call)
    found: dict[str, Any] = {"before": rank.used(), "after": {}}
    for mode in ("in the program", "behind the program", "a host sync"):
        if mode == "in the program":
            program.runtime.record = breaks  # type: ignore[method-assign]
        used = []
        for _ in range(FAILURES):
            try:
                graphs.capture([8], rank.tokens(8))
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            else:
                text = "nothing was raised"
            used.append({**rank.used(), "error": text})
        vars(program.runtime).pop("record", None)
        found["after"][mode] = used
    tokens = rank.tokens(7)
    found["eager_equal"] = not differing(eager(split, tokens), eager(serial, tokens))
    mode = ""
    graphs.capture([8], rank.tokens(8))
    found["replay_equal"] = not differing(graphs(tokens), eager(serial, tokens))
    graphs.reset()
    found["released"] = rank.used()
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


def memory(rank: Rank) -> list[dict[str, Any]]:
    """Predicted and measured peak of large calls."""
    rows = []
    for batch, hidden in rank.settings.shapes:
        config = MoeConfig(
            hidden=hidden, layers=3, heads=hidden // 128 or 1, experts=8, expert_hidden=hidden // 2,
            shared_hidden=hidden, positions=TOKENS, vocab=1024,
        )  # fmt: skip
        dtype = torch.bfloat16 if rank.is_cuda else torch.float32
        model = MoeDecoder(config).to(rank.device, dtype).requires_grad_(False)
        torch._dynamo.reset()
        # The certificate counts op by op; a fused segment holds less.
        compiled = rank.compile(model, segment_backend="eager")
        tokens = rank.tokens(batch)
        torch._dynamo.mark_dynamic(tokens, 0)
        compiled(tokens)
        program = dbo_fx.compilations()[-1]
        report = program.memory(batch)
        row = {"batch": batch, "tokens": batch * TOKENS, "hidden": hidden}
        row["predicted_bytes"], row["measured_bytes"] = report.peak_bytes, 0
        row["predicted_at"] = report.during.name
        if rank.is_cuda:
            torch.cuda.empty_cache()
            before = rank.used()["allocated"]
            torch.cuda.reset_peak_memory_stats(rank.device)
            compiled(tokens)
            torch.cuda.synchronize()
            row["measured_bytes"] = torch.cuda.max_memory_allocated(rank.device) - before
            row["ratio"] = round(report.peak_bytes / row["measured_bytes"], 4)
        rows.append(row)
    return rows


def program_of(schedule: str) -> Any:
    """The newest program of a schedule."""
    return next(c for c in reversed(dbo_fx.compilations()) if c.program.schedule == schedule)


@torch.no_grad()
def rank_main(number: int, settings: Settings) -> dict[str, Any]:
    """All sections on one rank."""
    rank = Rank(number, settings)
    started = time.perf_counter()
    dtype = torch.bfloat16 if rank.is_cuda else torch.float32
    if settings.model == "demo":
        model = build_model(DEMO_CONFIG, rank.device, dtype)
    else:
        decoder = MoeDecoder(MoeConfig(layers=4, shared_hidden=64))
        model = decoder.to(rank.device, dtype).requires_grad_(False)
    split, serial = rank.compile(model), rank.compile(model, schedule="sequential")
    found: dict[str, Any] = {}
    sections: dict[str, Callable[[], Any]] = {
        "replays": lambda: replays(rank, split, serial),
        "failures": lambda: failures(rank, split, serial),
        "poison": lambda: poison(rank, split, serial),
        "memory": lambda: memory(rank),
    }
    for name, section in sections.items():
        found[name] = section()
        found[f"{name}_s"] = round(time.perf_counter() - started, 1)
        print(f"rank {number}: {name} {json.dumps(found[name])}", flush=True)
    return found


def is_good(found: dict[str, Any], is_cuda: bool) -> bool:
    """Whether one rank's results are what they must be."""
    r, f, p = found["replays"], found["failures"], found["poison"]
    used = [u["allocated"] for after in f["after"].values() for u in after]
    equal = [
        r["different_from_serial_graph"], r["different_from_eager_serial"],
        p["poison_on_free_different"], p["poison_between_replays_different"],
    ]  # fmt: skip
    return (
        not any(equal)
        and r["memory_early"] == r["memory_late"]
        and len(set(used)) == 1
        and f["eager_equal"]
        and f["replay_equal"]
        and (not is_cuda or p["without_keepalives_different"] > 0)
        and all(abs(row.get("ratio", 1.0) - 1) <= 0.05 for row in found["memory"])
    )


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
        help="of the memory section",
    )  # fmt: skip
    parser.add_argument("--commit", help="default: what git says")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    shared = is_cuda and torch.cuda.device_count() < args.ranks
    # NCCL refuses two ranks on one GPU.
    backend = "nccl" if is_cuda and not shared else "gloo"
    shapes = tuple(map(tuple, args.shape or [(768, 2048), (768, 3072)]))
    settings = Settings(
        args.device, args.transport, args.model, args.segments, args.replays, args.poisoned, shapes
    )
    ranks = run_ranks(rank_main, args.ranks, (settings,), backend=backend, timeout_s=500)
    # Where one machine keeps its files is nobody's business.
    words = [args.output.name if word == str(args.output) else word for word in sys.argv[1:]]
    git = ["git", "rev-parse", "--short", "HEAD"]
    said = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    good = all(is_good(found, is_cuda) for found in ranks)
    result = {
        "command": f"python benchmarks/replays.py {' '.join(words)}",
        "device": torch.cuda.get_device_name(0) if is_cuda else "cpu",
        "gpus": min(args.ranks, torch.cuda.device_count()),
        "group": backend,
        "torch": torch.__version__,
        "commit": args.commit or said,
        "good": good,
        "ranks": ranks,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print("GOOD" if good else "NOT GOOD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
