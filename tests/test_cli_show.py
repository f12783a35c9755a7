"""`dbo-fx show`: its output is golden, its refusals are one message and exit 2.

A golden file is the command's output: `dbo-fx show sequential > tests/golden/show_sequential.txt`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")
from typer.testing import CliRunner

from dbo_fx.cli import app
from dbo_fx.ir import parse, parse_program
from dbo_fx.schedules import load

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = str(GOLDEN / "saved_program.dbo")


def show(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["show", *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["show", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    return done.stderr


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["mlp_shared_overlap"], "show_mlp_shared_overlap.txt"),
        (["mlp_shared_overlap", "--layers", "2"], "show_mlp_shared_overlap_layers_2.txt"),
        (
            ["mlp_shared_overlap", "--layers", "2", "--json"],
            "show_mlp_shared_overlap_layers_2.json",
        ),
        (["sequential"], "show_sequential.txt"),
        (["sequential", "--layers", "2"], "show_sequential_layers_2.txt"),
        (["sequential", "--layers", "2", "--json"], "show_sequential_layers_2.json"),
        ([PROGRAM], "show_program.txt"),
        ([PROGRAM, "--json"], "show_program.json"),
    ],
)
def test_output_is_golden(arguments, name, golden):
    golden(name, show(*arguments))


def test_a_shown_schedule_reads_back():
    assert parse(show("mlp_shared_overlap")) == load("mlp_shared_overlap")


def test_a_shown_program_reads_back():
    assert parse(show(PROGRAM)) == parse_program(Path(PROGRAM).read_text(encoding="utf-8"))


def test_json_of_a_steady_state():
    shown = json.loads(show("sequential", "--json"))
    assert shown["lanes"]["comm"] == [[], ["D_i"], [], ["C_i"]]
    assert "periods" not in shown


def test_one_microbatch_has_no_merge():
    shown = show("sequential", "--layers", "1", "--microbatches", "1")
    assert shown.splitlines() == [
        "microbatch 0  A0_0@0 A1_0@0 S_0@0 D_0.send@0 D_0.recv@0 MLP_0@0 C_0.send@0 C_0.recv@0 "
        "TAIL_0"
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nope"], "no schedule is called 'nope'; there are mlp_shared_overlap, mlp_shared_"),
        (["gone.dbo"], "gone.dbo: cannot be read"),
        (["mlp_shared_overlap", "--layers", "0"], "0 layers; wanted at least 1 MoE layer"),
        (["mlp_shared_overlap", "--layers", "2", "--microbatches", "3"], "of 2 microbatches, not"),
        (["sequential", "--layers", "2", "--microbatches", "0"], "say how many"),
        (["sequential", "--microbatches", "2"], "give --layers too"),
        ([PROGRAM, "--layers", "2"], "already, unrolled over 1 layers and 2 microbatches"),
        (["sequential", "--layers", "two"], "'--layers'"),
        ([], "Missing argument 'SUBJECT'"),
    ],
)
def test_wrong_input_exits_2_with_one_message(arguments, reason):
    message = refused(*arguments)
    assert reason in message
    assert "Traceback" not in message


def test_broken_file_exits_2_and_marks_the_line(tmp_path: Path):
    path = tmp_path / "broken.dbo"
    text = Path(PROGRAM).read_text(encoding="utf-8")
    path.write_text(text.replace("comm  D_m0.send@0\n", ""), encoding="utf-8")
    message = refused(str(path))
    assert "D_m0.recv@0 runs before D_m0.send@0" in message
    assert "<-- here" in message


def test_show_imports_no_torch():
    code = (
        "import sys; from dbo_fx.cli import app; "
        "app(['show', 'mlp_shared_overlap'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (GOLDEN / "show_mlp_shared_overlap.txt").read_text(encoding="utf-8")


def test_without_typer_the_command_names_the_extra():
    done = run_python("import sys; sys.modules['typer'] = None; import dbo_fx.cli")
    assert done.returncode == 2
    assert done.stderr == "dbo-fx: the command needs typer; pip install 'dbo-fx[cli]'\n"


def test_a_closed_pipe_is_no_error():
    command = "from dbo_fx.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, "show", "sequential", "--layers", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        start = running.stdout.read(12)
        running.stdout.close()
        messages = running.stderr.read()
    assert (start, messages) == (b"microbatch 0", b"")


def test_output_has_no_colours():
    assert "\x1b" not in show("mlp_shared_overlap") + refused("nope") + show("--help")
