"""The list of steps that need GPUs leaves no marked test out."""

from __future__ import annotations

import re
from pathlib import Path

import on_gpus
import pytest

TESTS = Path(__file__).parent
MARK = r"\bmark\.{}\b"


@pytest.mark.parametrize("mark", ["gpu", "multi_gpu", "deep_ep"])
def test_every_marked_file_is_in_a_step(mark: str) -> None:
    files = [f for f in TESTS.glob("test_*.py") if f != Path(__file__)]
    marked = [f for f in files if re.search(MARK.format(mark), f.read_text())]
    steps = [s.command for s in on_gpus.STEPS if f"'{mark} and not slow'" in s.command]
    named = {word for command in steps for word in command.split() if word.startswith("tests/")}
    # Of DeepEP's file it depends on the machine whether it is marked for one GPU or two.
    if mark != "deep_ep":
        marked = [f for f in marked if "mark.deep_ep" not in f.read_text()]
    assert named == {f"tests/{f.name}" for f in marked}


def test_steps_have_names_and_logs_of_their_own() -> None:
    names = [step.name for step in on_gpus.STEPS]
    assert len(set(names)) == len(names)
    assert all("{python}" in step.command for step in on_gpus.STEPS)
