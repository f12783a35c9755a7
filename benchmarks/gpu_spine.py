"""The whole path on two GPUs: one CUDA graph per batch size, replayed, against the serial run.

Every rank compiles a small DeepSeek-V3 (bfloat16, NCCL, eager segments, communication on its own
stream), captures the whole compiled call in one CUDA graph, replays it with new inputs, and
compares bit for bit with the sequential program run eagerly. Writes one JSON file.

    python benchmarks/gpu_spine.py --output benchmarks/results/gpu_spine.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dbo_fx
from dbo_fx.demo import build_model
from dbo_fx.launch import run_ranks
from dbo_fx.models import DEMO_CONFIG

# transformers looks for torchvision, whose build may not fit torch's.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

BATCHES = (4, 7, 16, 64, 255)
TOKENS = 64
REPLAYS = 50


@torch.no_grad()
def rank_main(rank: int) -> list[dict[str, Any]]:
    """All batch sizes on one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    model = build_model(DEMO_CONFIG, device, torch.bfloat16)
    generator = torch.Generator().manual_seed(rank)
    compile_ = lambda **options: torch.compile(  # noqa: E731
        model, backend="dbo_fx", fullgraph=True, options=options
    )
    split, serial = compile_(), compile_(schedule="sequential")

    def tokens(batch: int) -> torch.Tensor:
        ids = torch.randint(0, 256, (batch, TOKENS), generator=generator).to(device)
        torch._dynamo.mark_dynamic(ids, 0)
        return ids

    rows = []
    for batch in BATCHES:
        first = tokens(batch)
        half = batch // 2
        reference = torch.cat([model(first[:half]), model(first[half:])])
        eager_equal = torch.equal(split(first), reference)
        replay, serial_replay = (dbo_fx.CudaGraphs(call) for call in (split, serial))
        for graphs in (replay, serial_replay):
            graphs.capture([batch], first)
        equal = 0
        for _ in range(REPLAYS):
            new = tokens(batch)
            equal += torch.equal(replay(new), serial(new))
        rows.append(
            {
                "batch": batch,
                "tokens": TOKENS,
                "eager_equals_microbatched_eager": eager_equal,
                "replays_equal_to_serial": equal,
                "replays": REPLAYS,
                "graph_ms": median_ms(replay, first),
                "serial_graph_ms": median_ms(serial_replay, first),
            }
        )
    record = next(c for c in dbo_fx.compilations() if c.program.schedule == "mlp_shared_overlap")
    rows[0]["program"] = str(record.certificate)
    rows[0]["differential"] = record.checked
    rows[0]["compilations"] = len(dbo_fx.compilations())
    return rows


def median_ms(replay: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> float:
    """Median device time of a replay, milliseconds."""
    times = []
    for _ in range(20):
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(ids)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return round(statistics.median(times), 3)


def main() -> int:
    """Run on two GPUs, write the JSON, exit 1 if anything differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="default: what git says")
    args = parser.parse_args()
    ranks = run_ranks(rank_main, 2, backend="nccl", timeout_s=400)
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    result = {
        "command": f"python benchmarks/gpu_spine.py --output {args.output.name}",
        "device": f"2 x {torch.cuda.get_device_name(0)}",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "commit": commit,
        "ranks": ranks,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    good = all(
        row["eager_equals_microbatched_eager"] and row["replays_equal_to_serial"] == row["replays"]
        for rows in ranks
        for row in rows
    )
    print(json.dumps(result), "GOOD" if good else "DIFFERENT", sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
