"""Every mutation of the compiler makes the test named beside it fail, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutations import MUTATIONS, VARIABLE

TESTS = Path(__file__).parent
PYTEST = [sys.executable, "-m", "pytest", "-p", "mutations", "-x", "-o", "addopts="]
PARTS = {
    "normalize", "regions", "soundness", "positions", "microbatch", "halves", "schedule", "streams",
    "lower", "verify", "memory", "emit", "comm/gloo", "comm/deepep_ll",
    "differential", "graphs", "poison_on_free",
}  # fmt: skip


def run(ids: list[str], name: str | None) -> subprocess.CompletedProcess[str]:
    """Run tests in a process of their own, on the mutated compiler if a name is given."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    environment.pop(VARIABLE, None)
    if name is not None:
        environment[VARIABLE] = name
    return subprocess.run(
        [*PYTEST, *[str(TESTS / test) for test in ids]],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_pass_has_a_mutation() -> None:
    assert {m.part for m in MUTATIONS.values()} >= PARTS


def test_every_named_test_exists() -> None:
    for name, mutation in MUTATIONS.items():
        file, _, function = mutation.test.partition("::")
        assert f"def {function}(" in (TESTS / file).read_text(), name


@pytest.mark.slow
def test_the_named_tests_pass_without_a_mutation() -> None:
    result = run(sorted({m.test for m in MUTATIONS.values()}), None)
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_mutation_is_noticed(name: str) -> None:
    result = run([MUTATIONS[name].test], name)
    assert result.returncode == 1, result.stdout[-4000:] + result.stderr[-2000:]
    assert "error" not in result.stdout.splitlines()[-1]
