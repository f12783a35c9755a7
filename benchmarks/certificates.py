"""Random MoE programs under random legal interleavings: what is certified must be right.

Most cases are program texts on two ranks (`tests/generated.py`), one in fifty is a lowered graph on
real tensors (`tests/generated_graphs.py`). A third of them is damaged by a random operator
(`tests/damage.py`, `tests/damage_graphs.py`). Every case that the verifier certifies is run under
random interleavings, and every result must equal the microbatched reference's bit for bit. For
those that it refuses the witness looks for an interleaving that goes wrong.

A case is drawn from `random.Random(case number)`, so that a failing one can be made again from its
number. Writes one JSON file. The recorded run:

    python benchmarks/certificates.py --cases 10000 --jobs 2 --output FILE
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import damage_actions  # noqa: E402, F401
import damage_events  # noqa: E402, F401
import damage_ranks  # noqa: E402, F401
from damage import OPERATORS, Mutant, mutants  # noqa: E402
from damage_graphs import (  # noqa: E402
    GRAPH_OPERATORS,
    LOST_EDGE,
    graph_mutant,
    graph_refusal,
    graph_witness,
)
from damage_judges import refusal, witness_of  # noqa: E402
from dbo_fx.witness import Witness, choosers  # noqa: E402
from generated import Case, case  # noqa: E402
from generated_graphs import KINDS, graph_case  # noqa: E402
from small_moe import one_rank  # noqa: E402

GRAPH_EVERY = 50
MODELS = [(kind, layers) for kind in KINDS for layers in (1, 2, 3, 4)]
DAMAGED = 1 / 3
RUNS = 4  # Random interleavings of a certified case.
SEARCH = 100  # Interleavings to try on a refused one, the most dangerous first.


@dataclass(frozen=True, slots=True)
class Result:
    """What one case showed.

    Attributes:
        number: The case.
        level: "program" or "graph".
        kind: The contract's name, or the model's.
        damage: The operator that damaged it, "" for a valid one.
        expected: The damage's class, "" for a valid one.
        refused: Why the verifier refuses, None if it certifies.
        wrong: What the witness saw go wrong, "" if nothing.
        runs: Interleavings that ran.
    """

    number: int
    level: str
    kind: str
    damage: str
    expected: str
    refused: str | None
    wrong: str
    runs: int

    @property
    def failure(self) -> str:
        """What speaks against the verifier, or against the declared class."""
        if self.refused is None and self.wrong:
            return f"certified, but {self.wrong}"
        if self.refused is not None and not self.damage:
            return f"valid, but refused: {self.refused}"
        if self.damage and (self.refused is not None) != (self.expected == "unsafe"):
            return f"declared {self.expected}, but {self.refused or 'certified'}"
        return ""


def program_case(number: int) -> Result:
    """One program, valid or damaged, on two ranks."""
    rng = Random(number)
    base = case(rng.randrange(1 << 40))
    mutant = _damaged(rng, base) if rng.random() < DAMAGED else None
    if mutant is None:
        refused = refusal((base.program,) * 2, base.contract)
        witness = witness_of((base.program,) * 2, base.contract, base.program)
        wrong, runs = _looked_for(witness, refused, rng)
        return Result(number, "program", base.contract.name, "", "", refused, wrong, runs)
    damage = mutant.damage
    more: dict[str, Any] = {
        "captured": damage.captured,
        "completed": damage.completed,
        "communicators": damage.communicators,
    }
    refused = refusal(mutant.programs, base.contract, **more)
    witness = witness_of(mutant.programs, base.contract, base.program, **more)
    wrong, runs = _looked_for(witness, refused, rng)
    name, expected = mutant.operator, str(damage.expected)
    return Result(number, "program", base.contract.name, name, expected, refused, wrong, runs)


def _damaged(rng: Random, base: Case) -> Mutant | None:
    """A mutant by the first operator, of a random order, that finds something to damage."""
    for name in rng.sample(sorted(OPERATORS), 5):
        for mutant in mutants(name, base, rng):
            return mutant
    return None


def graph_result(number: int) -> Result:
    """One lowered graph, valid or damaged, on real tensors."""
    rng = Random(number)
    kind, layers = MODELS[model_of(number)]
    given = graph_case(rng, [kind], [layers])
    name = rng.choice([LOST_EDGE, *sorted(GRAPH_OPERATORS)]) if rng.random() < DAMAGED else ""
    found = graph_mutant(name, given, rng) if name else None
    state, _, expected = found if found else (given.lowered(), "", "")
    refused = graph_refusal(state, given)
    wrong, runs = _looked_for(graph_witness(state, given), refused, rng)
    damage = name if found else ""
    return Result(number, "graph", kind.__name__, damage, expected, refused, wrong, runs)


def _looked_for(witness: Witness, refused: str | None, rng: Random) -> tuple[str, int]:
    """What goes wrong: under random interleavings if certified, else under dangerous ones."""
    if refused is not None:
        verdict = witness.confirm(SEARCH, seed=rng.randrange(1 << 30))
        return verdict.problem, verdict.runs
    digests = set()
    for run in range(RUNS):
        outcome = witness.run(choosers.drawn(rng.randrange(1 << 30)))
        digests.add(outcome.digest)
        if not outcome.ok:
            return outcome.problem, run + 1
    return ("" if len(digests) == 1 else "runs differ"), RUNS


def model_of(number: int) -> int:
    """Which model a graph case takes: each is traced in one process only."""
    return number // GRAPH_EVERY % len(MODELS)


def job_of(number: int, jobs: int) -> int:
    """Which process a case runs in."""
    is_graph = number % GRAPH_EVERY == 0
    return (model_of(number) if is_graph else number) % jobs


def run_job(cases: int, job: int, jobs: int) -> list[Result]:
    """One process's cases."""
    torch.set_num_threads(1)
    found = []
    with one_rank():
        for number in range(cases):
            if job_of(number, jobs) == job:
                is_graph = number % GRAPH_EVERY == 0
                found.append(graph_result(number) if is_graph else program_case(number))
    return found


def run(cases: int, jobs: int) -> dict[str, object]:
    """Check the cases 0 to `cases` - 1.

    Args:
        cases: How many.
        jobs: In how many processes.

    Returns:
        The record: counts, and number and reason of every failing case.
    """
    begin = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(run_job, cases, job, jobs) for job in range(jobs)]
        results = sorted((r for p in parts for r in p.result()), key=lambda r: r.number)
    failures = [(r.number, r.failure) for r in results if r.failure]
    return {
        "cases": cases,
        "failures": len(failures),
        "failing": [{"case": n, "reason": reason} for n, reason in failures[:100]],
        "programs": _counts([r for r in results if r.level == "program"]),
        "graphs": _counts([r for r in results if r.level == "graph"]),
        "kinds": dict(sorted(Counter(r.kind for r in results).items())),
        "damaged_by": dict(sorted(Counter(r.damage for r in results if r.damage).items())),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _counts(results: list[Result]) -> dict[str, int]:
    refused = [r for r in results if r.refused is not None]
    certified = [r for r in results if r.refused is None]
    return {
        "cases": len(results),
        "valid": sum(not r.damage for r in results),
        "damaged": sum(bool(r.damage) for r in results),
        "certified": len(certified),
        "certified_runs": sum(r.runs for r in certified),
        "certified_and_bit_identical": sum(not r.wrong for r in certified),
        "refused": len(refused),
        "refused_and_seen_to_go_wrong": sum(bool(r.wrong) for r in refused),
        "valid_and_refused": sum(not r.damage for r in refused),
    }


def main() -> int:
    """Run, write the record, exit 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = f"python benchmarks/certificates.py --cases {options.cases} --jobs {options.jobs}"
    if options.output:
        command += f" --output {options.output}"
    record = {
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **run(options.cases, options.jobs),
    }
    text = json.dumps(record, indent=1) + "\n"
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
