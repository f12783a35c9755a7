"""Everything that needs GPUs, in one command with a time limit: tests first, then measurements.

Steps run in the order of the list; one that no longer fits into the limit, or for which GPUs or
DeepEP are missing, is left out and named. Every step writes a log, and its results where the list
says, into one folder, so that steps can be run again one by one. Exit code 1 if one failed.

    python benchmarks/on_gpus.py --output gpu_results
    python benchmarks/on_gpus.py --output gpu_results --only overlap replays --limit-s 500
    python benchmarks/on_gpus.py --list
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTEST = "{python} -m pytest -q -p no:cacheprovider -o addopts= -m"
ON_ONE = (
    "tests/test_agree.py tests/test_batch_metadata.py tests/test_copy_engine.py "
    "tests/test_cuda_graphs_gpu.py tests/test_deepep_kernels.py tests/test_measured.py "
    "tests/test_packing.py tests/test_progress.py tests/test_segments_gpu.py "
    "tests/test_transformers.py"
)
ON_TWO = "tests/test_agree.py tests/test_progress.py tests/test_two_gpus.py"


@dataclass(frozen=True, slots=True)
class Step:
    """One command.

    Attributes:
        name: Name of its log.
        command: What runs; `{python}`, `{output}` and `{commit}` are filled in.
        seconds: How long it may take; it is not started if less is left.
        gpus: How many GPUs it needs.
        deep_ep: Whether it needs DeepEP.
    """

    name: str
    command: str
    seconds: int
    gpus: int = 1
    deep_ep: bool = False


def deep_ep_ops(transport: str, tokens: str) -> Step:
    """Our ops against direct calls of DeepEP, over one transport."""
    name = transport.replace("deepep_", "deep_ep_ops_")
    command = (
        f"{{python}} benchmarks/deepep_ops.py --transport {transport} --tokens {tokens} "
        "--output {output}/deepep_ops.json --commit {commit}"
    )
    return Step(name, command, 120, 2, True)


def overlap(name: str, points: str, seconds: int, file: str = "overlap", **needs: Any) -> Step:
    """A set of points of the overlap benchmark."""
    command = (
        f"{{python}} benchmarks/overlap.py --points {points} --output {{output}}/{file}.json "
        "--commit {commit}"
    )
    return Step(name, command, seconds, **needs)


def replays(name: str, ranks: int) -> Step:
    """Replays, poison, failed captures and memory on so many GPUs."""
    command = (
        f"{{python}} benchmarks/replays.py --ranks {ranks} --output {{output}}/{name}.json "
        "--commit {commit}"
    )
    return Step(name, command, 150, ranks)


STEPS = (
    Step("tests", f"{PYTEST} 'gpu and not slow' {ON_ONE}", 180),
    Step("tests_two", f"{PYTEST} 'multi_gpu and not slow' {ON_TWO}", 150, gpus=2),
    overlap("overlap", "targets", 480, gpus=2),
    replays("replays", 1),
    replays("replays_two", 2),
    Step(
        "compile_time",
        "{python} benchmarks/compile_time.py --device cuda --layers 27 --preset v2lite "
        "--commit {commit} --output {output}/compile_time.json",
        160,
    ),
    Step(
        "deep_ep_tests", f"{PYTEST} 'deep_ep and not slow' tests/test_deepep_gpu.py", 400, 2, True
    ),
    Step("deep_ep_steps", f"{PYTEST} 'deep_ep and slow' tests/test_deepep_gpu.py", 540, 2, True),
    deep_ep_ops("deepep_ll", "64 128"),
    deep_ep_ops("deepep_ll_async", "64 128"),
    deep_ep_ops("deepep_ht", "64 512 4096"),
    deep_ep_ops("deepep_v2", "64 512 4096"),
    overlap("overlap_deep_ep", "deepep", 540, gpus=2, deep_ep=True),
    overlap("overlap_host", "host", 540, "overlap_host"),
    overlap("overlap_required", "required", 540, gpus=2),
)


def obstacle(step: Step, gpus: int, has_deep_ep: bool, left_s: float) -> str | None:
    """Why a step cannot run now, or None.

    Args:
        step: The step.
        gpus: GPUs that are there.
        has_deep_ep: Whether DeepEP can be imported.
        left_s: Seconds until the limit.
    """
    if step.gpus > gpus:
        return f"needs {step.gpus} GPUs, found {gpus}"
    if step.deep_ep and not has_deep_ep:
        return "needs DeepEP; see dbo-fx doctor"
    if left_s < step.seconds:
        return f"needs {step.seconds} s, {left_s:.0f} s are left; name it with --only"
    return None


def run(step: Step, output: Path, commit: str) -> tuple[int, float]:
    """Run one step with its log; returns its exit code (124: took too long) and seconds."""
    filled = step.command.format(python=sys.executable, output=output, commit=commit)
    started = time.monotonic()
    with (output / f"{step.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                shlex.split(filled),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=step.seconds,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    return code, time.monotonic() - started


def main() -> int:
    """Run what fits; exit 1 if a step failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_results"), help="folder for logs and results"
    )
    parser.add_argument("--only", nargs="+", choices=[s.name for s in STEPS], help="which steps")
    parser.add_argument(
        "--limit-s", type=float, default=1800, help="start no step that may end later"
    )
    parser.add_argument("--commit", default="", help="what to write into the results")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    args = parser.parse_args()
    if args.list:
        for step in STEPS:
            print(f"{step.name:20} {step.gpus} GPU {step.seconds:4} s  {step.command}")
        return 0
    import torch

    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    has_deep_ep = importlib.util.find_spec("deep_ep") is not None
    deadline = time.monotonic() + args.limit_s
    failed = 0
    for step in (s for s in STEPS if not args.only or s.name in args.only):
        why = obstacle(step, gpus, has_deep_ep, deadline - time.monotonic())
        if why is not None:
            print(f"{step.name:20} left out: {why}", flush=True)
            continue
        code, seconds = run(step, output, args.commit or "unknown")
        failed += code != 0
        tail = (output / f"{step.name}.log").read_text(errors="replace").strip().splitlines()
        print(f"{step.name:20} exit {code} in {seconds:.0f} s: {tail[-1] if tail else ''}"[:400])
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
