"""Run every test file in a process of its own, several at a time, and record what came out.

For hosts without pytest-xdist, such as one with GPUs. Files whose subject is this repository's
packaging, documents and mutations are left out. Goldens are compared as everywhere: a golden that
differs there is a failure. The recorded run:

    python benchmarks/test_files.py --jobs 10 --output benchmarks/results/test_files.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"packaging", "docs", "mutations", "timeline_browser"}
LIMIT_S = 500
NO_TESTS = 5  # pytest's exit status for a file of which all is skipped


def run(file: Path) -> tuple[str, dict[str, int]]:
    """Run one file.

    Args:
        file: The test file.

    Returns:
        Its name, and counts by outcome (`passed`, `failed`, `skipped`, `error`).
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return file.name, {"error": 1}
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    found = {w: int(count) for count, w in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if done.returncode not in (0, NO_TESTS):
        found.setdefault("failed", 1)
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-2000:])
    return file.name, found


def main() -> int:
    """Run, write the record, exit 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="", help="what was tested, where git cannot say")
    options = parser.parse_args()
    files = sorted(ROOT.glob("tests/test_*.py"))
    files = [f for f in files if f.stem.removeprefix("test_") not in LEFT_OUT]
    begin = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(pool.map(run, files))
    totals: dict[str, int] = {}
    for counts in found.values():
        for outcome, count in counts.items():
            totals[outcome] = totals.get(outcome, 0) + count
    devices = torch.cuda.device_count()
    record = {
        "command": f"python benchmarks/test_files.py --jobs {options.jobs}",
        "commit": options.commit,
        "device": f"{devices} x {torch.cuda.get_device_name(0)}" if devices else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "left_out": sorted(LEFT_OUT),
        "totals": totals,
        "files": found,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    text = json.dumps(record, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if totals.get("failed") or totals.get("error") else 0


if __name__ == "__main__":
    sys.exit(main())
