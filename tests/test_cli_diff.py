"""`dbo-fx diff`: exit codes, output, a page, and that files need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")
from typer.testing import CliRunner, Result

from dbo_fx.cli import app
from program_edits import bound, moved, without

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = str(GOLDEN / "saved_program.dbo")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["diff", *arguments])


@pytest.fixture
def other(tmp_path: Path) -> str:
    """The text of a program with a wait missing and an action moved."""
    program = moved(bound("gloo"), "comp MLP_m1@0", "comp MLP_m0@0")
    path = tmp_path / "other.dbo"
    path.write_text(str(without(program, "comm wait e0")), encoding="utf-8")
    return str(path)


def test_no_difference_exits_0():
    done = run(PROGRAM, PROGRAM)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("no difference\n")


def test_a_difference_exits_1(other: str):
    done = run(PROGRAM, other)
    assert (done.exit_code, done.stderr) == (1, "")
    assert "moved MLP_m1@0 earlier" in done.stdout
    assert "event D_m0.send@0 after A1_m0@0: wait on comm removed" in done.stdout
    assert run(PROGRAM, other, "--exit-zero").exit_code == 0


def test_schedules_are_unrolled_over_layers():
    done = run("mlp_shared_overlap", "sequential", "--layers", "3")
    assert done.exit_code == 1
    assert done.stdout.startswith("--- mlp_shared_overlap (3 layers)\n+++ sequential (3 layers)\n")


def test_json(other: str):
    done = run(PROGRAM, other, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["equal"] is False
    assert {change["kind"] for change in found["changes"]} >= {"moved", "event"}


def test_html(other: str, tmp_path: Path):
    page = tmp_path / "page.html"
    done = run(PROGRAM, other, "--html", str(page))
    assert done.exit_code == 1
    assert done.stderr == f"dbo-fx diff: wrote {page}\n"
    assert "MLP_m1@0" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["", PROGRAM], "diff: the name of what to compare is empty"),
        (
            ["nope", PROGRAM],
            "dbo-fx diff: nope is neither a schedule (mlp_shared_overlap, mlp_shared_overlap_3, ",
        ),
        ([PROGRAM, "gone.dbo"], "gone.dbo: cannot be read"),
        (["gone.dbograph.json", PROGRAM], "gone.dbograph.json cannot be read"),
        ([PROGRAM, str(GOLDEN)], "is a folder; name a .dbo or a .dbograph.json file in it"),
        ([PROGRAM, PROGRAM, "--html", "no/such/folder.html"], "cannot be written"),
        ([PROGRAM, PROGRAM, "--layers", "0"], "'--layers'"),
        ([PROGRAM], "Missing argument 'B'"),
    ],
)
def test_wrong_input_exits_2_with_one_message(arguments: list[str], reason: str):
    done = run(*arguments)
    assert done.exit_code == 2
    assert reason in done.stderr
    assert "Traceback" not in done.output


def test_texts_and_graph_files_need_no_torch():
    code = (
        "import sys\n"
        "from dbo_fx.inspect.diff import diff\n"
        f"assert not diff({PROGRAM!r}, {PROGRAM!r})\n"
        "assert str(diff('mlp_shared_overlap', 'sequential'))\n"
        "import dbo_fx.inspect.graph_items\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
