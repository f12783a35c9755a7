"""`dbo-fx check`: exit 0 certified, 1 refused with the shortest counterexample, 2 usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")
from typer.testing import CliRunner, Result

from dbo_fx.cli import app
from program_edits import bound, doubled, moved, without

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = str(GOLDEN / "saved_program.dbo")


def check(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["check", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


def refused_usage(*arguments: str) -> str:
    done = check(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def damaged(tmp_path) -> str:
    path = tmp_path / "damaged.dbo"
    path.write_text("# A comment moves the lines.\n\n" + str(without(bound(), "comp wait e5")))
    return str(path)


def test_a_saved_program_is_certified():
    done = check(PROGRAM)
    assert (done.exit_code, done.stderr) == (0, f"dbo-fx check: {PROGRAM} is certified\n")
    parts = [line.split(":")[0] for line in done.stdout.splitlines() if line[0] != " "]
    assert parts == ["hazards", "ranks", "overlap"]
    assert "26 dependencies hold" in done.stdout


def test_a_certificate_as_json():
    done = check("mlp_shared_overlap", "--json", "--ranks", "4", "--capture")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["certified"], found["counterexample"]) == (True, None)
    assert set(found["certificate"]) == {"hazards", "ranks", "overlap", "assumptions"}
    assert found["certificate"]["hazards"]["capturable"] is True
    assert found["certificate"]["ranks"]["variants"][0]["ranks"] == 4


def test_a_refused_program_shows_lines_of_its_file(damaged, golden):
    done = check(damaged)
    assert (done.exit_code, done.stderr) == (
        1,
        f"dbo-fx check: {damaged} is refused: dependency\n",
    )
    golden("check_refused.txt", done.stdout)


def test_a_refusal_as_json(damaged):
    done = check(damaged, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["certified"], found["certificate"]) == (False, None)
    shown = found["counterexample"]
    assert (shown["rule"], shown["storage"]) == ("dependency", "c_m0@0")
    assert shown["first"]["name"] == "C_m0.send@0"
    lines = Path(damaged).read_text(encoding="utf-8").splitlines()
    for place in ("first", "second"):
        assert lines[shown[place]["line"] - 1].split()[1] == shown[place]["name"]
    assert shown["picture"][1].endswith("<-- here")


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (without(bound(), "comp record e2"), "event"),
        (doubled(bound(), "comp D_m0.recv@0"), "pairing"),
        (without(bound(), "comm D_m0.send@0"), "pairing"),
        (doubled(bound(), "comp MLP_m0@0"), "dependency"),
    ],
)
def test_a_program_that_cannot_be_right_is_refused_and_not_unreadable(wrong, rule, tmp_path):
    path = tmp_path / "wrong.dbo"
    path.write_text(str(wrong))
    done = check(str(path))
    assert (done.exit_code, done.stderr) == (1, f"dbo-fx check: {path} is refused: {rule}\n")


def test_a_program_that_is_to_be_captured():
    done = check(PROGRAM, "--capture")
    assert done.exit_code == 1
    assert "goes over gloo, which cannot be captured" in done.stdout
    assert check(PROGRAM).exit_code == 0


def test_a_second_send_in_flight(tmp_path):
    path = tmp_path / "two.dbo"
    program = moved(bound("deepep_ll"), "comp D_m1.send@0 slot 1", "comp D_m0.recv@0 slot 0")
    path.write_text(str(program))
    done = check(str(path))
    assert (done.exit_code, done.stderr.split(": ")[-1]) == (1, "in-flight\n")


@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sequential"])
@pytest.mark.parametrize("transport", ["gloo", "nccl", "deepep_ll"])
def test_shipped_schedules_are_certified(schedule, transport):
    done = check(schedule, "--transport", transport, "--layers", "3")
    assert done.exit_code == 0
    assert "12 sends have one recv each" in done.stdout


def test_a_schedule_of_any_number_of_microbatches(tmp_path):
    assert "4 sends" in check("sequential", "--microbatches", "1").stdout
    assert "8 sends" in check("sequential").stdout
    path = tmp_path / "mine.dbo"
    path.write_text(
        "schedule 1\nname mine\norder A0_i A1_i S_i D_i.send D_i.recv MLP_i C_i.send C_i.recv\n"
    )
    assert "12 sends" in check(str(path), "--microbatches", "3").stdout


def test_usage_errors_are_one_message(tmp_path):
    assert "no schedule is called 'nothing'" in refused_usage("nothing")
    assert "cannot be read" in refused_usage(str(tmp_path / "none.dbo"))
    assert "unknown transport 'pigeons'" in refused_usage("sequential", "--transport", "pigeons")
    assert "schedule of 2 microbatches, not of 3" in refused_usage(
        "mlp_shared_overlap", "--microbatches", "3"
    )
    found = refused_usage(PROGRAM, "--layers", "2", "--transport", "nccl")
    assert "is a program already, unrolled over 1 layers and 2" in found
    assert "leave --layers and --transport out" in found
    assert "is no model; leave --schedule out" in refused_usage(
        "sequential", "--schedule", "sequential"
    )
    assert refused_usage(PROGRAM, "--ranks", "0")


def test_a_malformed_text_is_a_usage_error_that_names_the_line(tmp_path):
    path = tmp_path / "bad.dbo"
    path.write_text("program 1\nschedule x\nmicrobatches 1\nlayers 1\ntransport nccl\ncomp A9\n")
    assert f"{path}, line 6: 'A9' is not an action" in refused_usage(str(path))
    path.write_text(str(bound()).replace("transport nccl", "transport pigeons"))
    assert "unknown transport 'pigeons'" in refused_usage(str(path))


def test_a_model_that_cannot_be_loaded():
    assert "cannot be loaded" in refused_usage("no_such_module:build")
    assert "leave --layers out" in refused_usage("tests.x:build", "--layers", "2")


def test_a_model_that_fails_while_it_is_made(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("def build():\n    raise KeyError('gone')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "broken_model:build fails: KeyError: 'gone'" in refused_usage("broken_model:build")


MODEL = """
import torch
from small_moe import CachedMoe, PlainMoe, arguments, rows

def build():
    return PlainMoe(2), arguments(PlainMoe(1))

class Mixes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = PlainMoe()

    def forward(self, x):
        return self.model(x - x.mean(0))

def mixing():
    return Mixes(), (rows(),)
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    (tmp_path / "checked_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "checked_model"


def test_a_model_is_compiled_and_its_certificate_shown(model):
    done = check(f"{model}:build")
    assert (done.exit_code, done.stderr) == (0, f"dbo-fx check: {model}:build is certified\n")
    assert "8 sends have one recv each" in done.stdout
    found = json.loads(check(f"{model}:build", "--json", "--schedule", "sequential").stdout)
    assert found["certificate"]["hazards"]["communications"] == 8


def test_a_model_over_a_transport_that_cannot_be_captured(model):
    done = check(f"{model}:build", "--capture")
    assert done.exit_code == 1
    assert "rule capture" in done.stdout


def test_a_model_that_is_refused_says_why(model):
    done = check(f"{model}:mixing")
    assert done.exit_code == 1
    assert "mean" in done.stdout
    assert f"dbo-fx check: {model}:mixing is refused: " in done.stderr
    found = json.loads(check(f"{model}:mixing", "--json").stdout)
    assert "mean" in found.pop("refusal")
    assert found == {
        "what": f"{model}:mixing",
        "certified": False,
        "certificate": None,
        "counterexample": None,
    }


def test_programs_are_checked_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['dbo-fx', 'check', sys.argv[1]]\n"
        "from dbo_fx.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, f"dbo-fx check: {PROGRAM} is certified\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers 1", "layers 99999", "wanted a line like 'layers 2', at most 9999"),
        ("layers 1", f"layers {'9' * 5000}", "at most 9999"),
        ("microbatches 2", "microbatches 99999999", "at most 9999"),
        ("record e0", f"record e{'9' * 5000}", "is not an event"),
        ("comp  A0_m0@0", f"comp  A0_m{'9' * 5000}@0", "is no microbatch here"),
        ("comp  A0_m0@0", f"comp  A0_m0@{'9' * 5000}", "is not an action"),
        ("keepalive D_m0@0", "keepalive D_m0.send@0", "D_m0.send@0 is no communication"),
        ("comp  merge", "comp  keepalive D_m0@0\ncomp  merge", "D_m0@0 is released twice"),
    ],
)
def test_a_text_that_no_command_would_run_is_not_certified(tmp_path, old, new, said):
    path = tmp_path / "odd.dbo"
    text = Path(PROGRAM).read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert said in refused_usage(str(path))
