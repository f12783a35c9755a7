"""Many random batches, split in many ways: paged attention must see what the unsplit run sees.

The cases are those of `tests/paged_attention.py`, drawn from `random.Random(case number)`, so that
a failing one can be made again from its number. Writes one JSON file. The recorded run:

    python benchmarks/split_property.py --cases 100000 --output FILE
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from paged_attention import differences, make_case  # noqa: E402


def run(cases: int) -> dict[str, object]:
    """Check the cases 0 to `cases` - 1.

    Args:
        cases: How many.

    Returns:
        The record: counts, and number and differences of every failing case.
    """
    torch.set_num_threads(1)
    rules: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    microbatches: Counter[int] = Counter()
    straddling = empty = 0
    failures = []
    begin = time.perf_counter()
    for number in range(cases):
        case = make_case(Random(number).randint)
        rules[case.rule] += 1
        sources[case.source] += 1
        microbatches[len(case.slices)] += 1
        starts = set(case.shape.query_start_loc)
        cuts = [piece.start for piece in case.slices[1:]]
        straddling += any(c < case.shape.num_tokens and c not in starts for c in cuts)
        empty += any(not piece.num_tokens for piece in case.slices)
        found = differences(case)
        if found:
            failures.append({"case": number, "differs": found})
    return {
        "cases": cases,
        "failures": len(failures),
        "failing": failures[:100],
        "rules": dict(sorted(rules.items())),
        "metadata_from": dict(sorted(sources.items())),
        "microbatches": dict(sorted(microbatches.items())),
        "cases_with_a_straddling_request": straddling,
        "cases_with_a_microbatch_in_the_padding": empty,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> int:
    """Run, write the record, exit 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = f"python benchmarks/split_property.py --cases {options.cases}"
    if options.output:
        command += f" --output {options.output}"
    record = {
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **run(options.cases),
    }
    text = json.dumps(record, indent=1) + "\n"
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
