"""One step's agreement against a bare all-reduce of the same size, on two gloo ranks of this host.

The two are measured in turns within one run, so that both see the same machine. Writes one JSON
file; exits 1 if the medians' ratio is above the limit.

    python benchmarks/agreement.py --output benchmarks/results/agreement.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbo_fx.agree import agree_batch
from dbo_fx.decision import AgreementPolicy, BatchKind
from dbo_fx.launch import run_ranks

RANKS = 2
STEPS = 5000
WARM_UP = 500
LIMIT = 1.3
# What `agree_batch` sends: four 64-bit integers for each rank.
CELLS = 4 * RANKS
POLICY = AgreementPolicy(buckets=tuple(range(8, 520, 8)))


def elapsed_us(call: Callable[[], object]) -> float:
    """Microseconds that one call takes."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def rank_main(rank: int) -> dict[str, float]:
    """Medians of one rank, in microseconds."""
    table = torch.zeros(CELLS, dtype=torch.int64)

    def bare() -> None:
        dist.all_reduce(table)

    def agree() -> None:
        agree_batch(64 + rank, True, kind=BatchKind.DECODE, plan="0123456789abcdef", policy=POLICY)

    bare_us, agree_us = [], []
    for step in range(WARM_UP + STEPS):
        pair = [(bare, bare_us), (agree, agree_us)]
        # Each is first as often as second.
        for call, times in pair if step % 2 else reversed(pair):
            times.append(elapsed_us(call))
    return {
        "bare_us": statistics.median(bare_us[WARM_UP:]),
        "agree_us": statistics.median(agree_us[WARM_UP:]),
    }


def git_commit() -> str:
    """The commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Measure, write, print; exit 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    ranks = run_ranks(rank_main, RANKS, timeout_s=300)
    # The slower rank decides when the step begins.
    ratio = max(rank["agree_us"] / rank["bare_us"] for rank in ranks)
    record: dict[str, Any] = {
        "device": f"CPU, {torch.multiprocessing.cpu_count()} cores, {platform.machine()}",
        "load_average_before": load,
        "torch": torch.__version__,
        "commit": git_commit(),
        "command": " ".join(["python", *sys.argv]),
        "backend": "gloo",
        "ranks": RANKS,
        "steps": STEPS,
        "bytes": 8 * CELLS,
        "medians_by_rank": ranks,
        "ratio": ratio,
        "limit": LIMIT,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
