"""Every command's `--json` fits its shipped schema, and the schemas are strict enough to notice."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")
pytest.importorskip("jsonschema", reason="the dev extra is not installed")
import jsonschema
from typer.testing import CliRunner

from dbo_fx.cli import app

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = str(GOLDEN / "saved_program.dbo")
COMMANDS = ("show", "explain", "check", "diff", "doctor", "demo")


def schema(command: str) -> dict[str, Any]:
    text = files("dbo_fx").joinpath("schemas", f"{command}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def validate(command: str, value: Any) -> None:
    jsonschema.Draft202012Validator(schema(command)).validate(value)


def fails(command: str, value: Any) -> bool:
    return not jsonschema.Draft202012Validator(schema(command)).is_valid(value)


def output(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_every_command_has_a_schema_and_no_schema_is_left_over():
    shipped = {Path(str(p)).stem for p in files("dbo_fx").joinpath("schemas").iterdir()}
    assert shipped == {c.name or c.callback.__name__ for c in app.registered_commands}
    assert shipped == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_schema_is_valid_and_named_after_its_command(command):
    found = schema(command)
    jsonschema.Draft202012Validator.check_schema(found)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["title"] == f"dbo-fx {command} --json"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "mlp_shared_overlap"], 0),
        (["show", "sequential"], 0),
        (["show", "sequential", "--layers", "3", "--microbatches", "3"], 0),
        (["show", PROGRAM], 0),
        (["show", "mlp_shared_overlap", "--times", str(GOLDEN / "times.json")], 0),
        (["show", "--progress", str(GOLDEN / "hang")], 0),
        (["explain", "mlp_shared_overlap", "--layers", "3"], 0),
        (["explain", PROGRAM, "--layer", "0"], 0),
        (["check", "mlp_shared_overlap"], 0),
        (["check", PROGRAM, "--capture"], 1),
        (["diff", "mlp_shared_overlap", "mlp_shared_overlap"], 0),
        (["diff", "sequential", PROGRAM], 1),
        (["doctor"], 0),
    ],
)
def test_output_fits_the_schema(arguments, code):
    validate(arguments[0], output(*arguments, code=code))


def test_a_refused_program_fits_the_schema(tmp_path):
    path = tmp_path / "damaged.dbo"
    text = Path(PROGRAM).read_text(encoding="utf-8")
    path.write_text(text.replace("comp  wait e5\n", ""), encoding="utf-8")
    found = output("check", str(path), code=1)
    validate("check", found)
    assert found["counterexample"]["rule"] == "dependency"
    assert found["counterexample"]["first"]["line"] is not None


MODEL = """
import torch
from dbo_fx.models import MoeConfig, MoeDecoder

def build():
    return MoeDecoder(MoeConfig(layers=2, shared_hidden=64)), (torch.randint(256, (6, 16)),)

class Mixes(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def mixing():
    return Mixes(), (torch.zeros(4, 8),)
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    (tmp_path / "model_for_json.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "model_for_json"


@pytest.mark.parametrize("command", ["show", "explain", "check"])
def test_output_for_a_model_fits_the_schema(command, model):
    validate(command, output(command, f"{model}:build"))


def test_a_refused_model_fits_the_schema(model):
    found = output("check", f"{model}:mixing", code=1)
    validate("check", found)
    assert found["refusal"]
    assert found["certificate"] is None


def test_the_demos_findings_fit_the_schema():
    from dbo_fx.demo import Findings, Outcome

    outcomes = (Outcome(True, 1e-6, 2.5), Outcome(False, 1e-6, 2.5, False))
    found = Findings("gloo", outcomes, (Path("x/program.dbo"),)).to_json()
    validate("demo", json.loads(json.dumps(found)))
    assert found["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["show", "mlp_shared_overlap"], ("order",)),
        (["show", PROGRAM], ("steps",)),
        (["explain", PROGRAM], ("layers", 0, "overlap", 0, "beside")),
        (["check", PROGRAM], ("certificate", "hazards", "events")),
        (["diff", "mlp_shared_overlap", "mlp_shared_overlap"], ("equal",)),
        (["doctor"], ("transports", 0, "state")),
    ],
)
def test_a_missing_or_unknown_value_does_not_fit(arguments, path):
    whole = output(*arguments)
    without, more = copy.deepcopy(whole), copy.deepcopy(whole)
    inner, other = without, more
    for key in path[:-1]:
        inner, other = inner[key], other[key]
    del inner[path[-1]]
    other["a_new_key"] = 1
    assert fails(arguments[0], without)
    assert fails(arguments[0], more)
