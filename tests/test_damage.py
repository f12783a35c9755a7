"""Damaged programs: the verifier and the witness must see what every operator declares.

The matrix holds every schedule and every contract that is registered, generated programs beside
them. A disagreement prints the program, the verifier's word and the witness's interleaving.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

import damage_actions  # noqa: F401 - registers its operators.
import damage_events  # noqa: F401 - registers its operators.
import damage_ranks  # noqa: F401 - registers its operators.
from damage import HARMLESS, OPERATORS, Cell, Mutant, classed, jumbled, matrix, sample
from damage_judges import Judgement, judge, refusal, witness_of
from dbo_fx import schedules
from dbo_fx.contracts import CONTRACTS, NCCL
from dbo_fx.ir import parse_program
from generated import case, scheduled

WANTED = 100  # Unsafe mutants of every operator; of a harmless one, mutants.
MOST_SAFE = 60  # Safe mutants cost the witness all its runs.
QUICK = 6
Tally = Counter[str]


def judged(mutant: Mutant, tally: Tally, runs: int) -> None:
    """Count a mutant, or fail with all that is known of it."""
    found = judge(mutant, runs)
    assert found.disagrees is None, str(found)
    assert mutant.damage.expected is not None
    tally[mutant.damage.expected] += 1


def test_there_are_enough_operators() -> None:
    assert len(OPERATORS) >= 25
    assert set(OPERATORS) > HARMLESS


def test_the_matrix_has_every_schedule_and_contract() -> None:
    cells = {(cell.schedule, cell.contract.name) for cell in matrix()}
    assert cells >= {(s, c) for s in schedules.names() for c in CONTRACTS}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_a_damaged_program_is_what_it_is_declared_to_be(name: str) -> None:
    tally: Tally = Counter()
    rng = Random(name)
    for _ in range(3):
        for mutant in sample(name, rng, matrix(layers=(1, 2))):
            judged(mutant, tally, runs=12)
            if tally.total() >= QUICK:
                return
    assert tally, f"{name} found nothing to damage"


@pytest.mark.slow
def test_the_whole_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    """Every operator in every cell, then generated programs until there are enough mutants."""
    lines = [f"{'operator':<38}{'unsafe':>8}{'redundant':>11}{'slower':>8}"]
    for name in sorted(OPERATORS):
        tally = whole_matrix(name)
        counts = tally["unsafe"], tally["redundant"], tally["slower"]
        lines.append("{:<38}{:>8}{:>11}{:>8}".format(name, *counts))
        assert tally["unsafe"] >= (0 if name in HARMLESS else WANTED), lines[-1]
        assert tally["unsafe"] == 0 or name not in HARMLESS
    with capsys.disabled():
        print("", *lines, "disagreements: 0", sep="\n")


def whole_matrix(name: str) -> Tally:
    """Judge an operator's mutants; every one that disagrees fails the test."""
    tally: Tally = Counter()
    rng = Random(name)
    cells = matrix()
    generated = [Cell("generated", cell.contract, 0) for cell in cells if not cell.layers]
    for turn in range(100):
        for mutant in sample(name, rng, cells if turn == 0 else generated):
            unsafe = mutant.damage.expected == "unsafe"
            if unsafe or tally["redundant"] + tally["slower"] < MOST_SAFE:
                judged(mutant, tally, runs=20)
        if tally["unsafe"] >= WANTED or (name in HARMLESS and tally.total() >= MOST_SAFE):
            break
    return tally


def test_generated_programs_print_and_parse_back() -> None:
    for seed in range(100):
        program = case(seed).program
        assert parse_program(str(program)) == program


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)], ids=len
)
def test_no_valid_program_is_refused(seeds: range) -> None:
    for seed in seeds:
        given = case(seed)
        found = refusal((given.program,) * 2, given.contract)
        assert found is None, f"seed {seed}, {given.contract.name}: {found}\n{given.program}"


@pytest.mark.parametrize("seed", range(20))
def test_a_valid_program_is_right_under_every_interleaving_that_is_tried(seed: int) -> None:
    given = case(seed)
    verdict = witness_of((given.program,) * 2, given.contract, given.program).confirm(12)
    assert verdict.safe, f"{given.contract.name}: {verdict}\n{given.program}"


@pytest.mark.parametrize("seed", range(40))
def test_what_is_certified_is_right_whatever_was_edited(seed: int) -> None:
    """Random edits have no class; a certificate must be right all the same."""
    rng = Random(seed)
    base = case(seed)
    program = jumbled(base, rng, edits=rng.choice((1, 1, 2)))
    found = refusal((program,) * 2, base.contract)
    witness = witness_of((program,) * 2, base.contract, base.program)
    verdict = witness.confirm(12)
    assert found is not None or verdict.safe, f"{base.contract.name}: {verdict}\n{program}"


def test_a_disagreement_is_reported_with_program_verifier_and_witness() -> None:
    base = scheduled("mlp_shared_overlap", 1, NCCL)
    assert base is not None
    steps = [s for s in base.program.steps if str(s) != "comp  wait e1"]
    damage = classed(base, steps, "without comp  wait e1")
    wrong = Mutant("wait dropped", base, damage.as_class("redundant"))
    found: Judgement = judge(wrong)
    assert found.disagrees == "the verifier and the witness"
    text = str(found)
    assert "comp  D_m0.recv@0" in text
    assert "verifier: dependency: " in text
    assert "witness: unsafe, found in run" in text
