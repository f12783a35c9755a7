"""How much every schedule hides: shapes, sizes, transports and link classes, in Full CUDA graphs.

Each point compiles a Hugging Face MoE model with every schedule, captures each in one CUDA graph,
checks that schedules over the same microbatches give equal bits, and times the replays in turn.
Points that the output file already holds for this commit are skipped, so that a run which was cut
off goes on where it stopped.

    python benchmarks/overlap.py --points required --output benchmarks/results/overlap.json
    python benchmarks/overlap.py --points host --output host.json   one GPU, peers imitated
    python benchmarks/overlap.py --points tryout --output tryout.json   two CPU ranks
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from overlap_points import SETS, Point
from overlap_rank import Processes

from dbo_fx.launch import RankError

# transformers looks for torchvision, whose build may not fit torch's.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

MOST_POINTS = 60


def main() -> int:
    """Measure what is missing; exit 1 if a result that must be equal was not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--points",
        choices=SETS,
        nargs="+",
        default=["required"],
        help="which sets (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        help="only points whose key contains one of these, or is matched by it (* stands for any)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each")
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file to write, or to go on with"
    )
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument(
        "--limit-s", type=float, default=540, help="start no group of points after this"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=4,
        help="families of points that compile at a time; none is measured meanwhile",
    )
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: wanted 1 or more")
    commit = args.commit or _commit()
    results = _load(args.output)
    run = {
        "command": f"python benchmarks/overlap.py --points {' '.join(args.points)} "
        f"--ranks {args.ranks}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "device": _device(),
        "torch": torch.__version__,
        "commit": commit,
    }
    if torch.cuda.is_available():
        run["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    done = {
        p["key"]
        for p in results["points"]
        if "failed" not in p and _same(results["runs"][p["run"]], run)
    }
    given = [p for name in args.points for p in SETS[name]()]
    wanted = [p for p in dict.fromkeys(given) if _is_meant(p.key, args.only)]
    if not wanted:
        parser.error(f"--only {' '.join(args.only)}: no point of {' '.join(args.points)} is meant")
    missing = [p for p in wanted if p.key not in done][:MOST_POINTS]
    print(f"{len(wanted)} points, {len(wanted) - len(missing)} done", flush=True)
    started = time.monotonic()
    good = True
    families = _families(missing)
    for first in range(0, len(families), args.jobs):
        wave = families[first : first + args.jobs]
        running = [Processes(args.ranks, args.limit_s, groups[0][0]) for groups in wave]
        try:
            with ThreadPoolExecutor(len(wave)) as pool:  # They wait for their ranks.
                list(pool.map(_prepare, running, wave))
            for processes, points in _in_order(running, wave):
                if time.monotonic() - started > args.limit_s:
                    print(f"time is up before {points[0].key}; run again to go on", flush=True)
                    return 0 if good else 1
                rows = _measured(processes, points)
                _add(results, run, rows)
                args.output.write_text(json.dumps(results, indent=1) + "\n")
                for row in rows:
                    good &= all(row.get("equal", {}).values())
                    print(_line(row), flush=True)
        finally:
            for processes in running:
                processes.close()
    return 0 if good else 1


def _in_order(
    running: list[Processes], wave: list[list[list[Point]]]
) -> Iterator[tuple[Processes, list[Point]]]:
    for processes, groups in zip(running, wave, strict=True):
        for points in groups:
            yield processes, points


def _is_meant(key: str, patterns: list[str]) -> bool:
    return any(pattern in key or fnmatchcase(key, pattern) for pattern in patterns)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs differ in nothing but the set of points and the time."""
    apart = ("command", "started")
    return {k: v for k, v in one.items() if k not in apart} == {
        k: v for k, v in other.items() if k not in apart
    }


def _families(points: list[Point]) -> list[list[list[Point]]]:
    """Points by group, groups by family, in the order of the set otherwise."""
    families: dict[Point, dict[Point, list[Point]]] = {}
    for point in points:
        groups = families.setdefault(point.family, {})
        groups.setdefault(point.group, []).append(point)
    return [list(groups.values()) for groups in families.values()]


def _prepare(processes: Processes, groups: list[list[Point]]) -> None:
    """Compile all groups of a family; what fails here is told where it is measured."""
    with suppress(RankError):
        for points in groups:
            processes.prepare(points)


def _measured(processes: Processes, points: list[Point]) -> list[dict[str, Any]]:
    """A failure of one group is a row that says so, and no reason to lose the others."""
    try:
        return processes.measure(points)
    except Exception as error:
        text = str(error)
        return [{"key": p.key, "point": p.to_json(), "failed": text[-1500:]} for p in points]


def _load(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    return {"runs": [], "points": []}


def _add(results: dict[str, Any], run: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Newer rows replace older ones of the same key; runs nobody refers to go."""
    runs = [*results["runs"], *([] if run in results["runs"] else [run])]
    keys = {row["key"] for row in rows}
    kept = [p for p in results["points"] if p["key"] not in keys]
    kept += [{**row, "run": runs.index(run)} for row in rows]
    used = sorted({p["run"] for p in kept})
    results["runs"] = [runs[i] for i in used]
    results["points"] = [{**p, "run": used.index(p["run"])} for p in kept]


def _line(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return f"{row['key']}: {str(row.get('refused') or row.get('failed'))[-400:]}"
    ms = "  ".join(f"{name} {value}" for name, value in row["ms"].items())
    told = f"equal {row['equal']}  unsteady {row['unsteady']}"
    return f"{row['key']}: {ms}  bound {row.get('bound_ms')}  {told}"


def _device() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
