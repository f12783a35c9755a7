"""`dbo-fx explain`: what is split how, and refusals that say what to mend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_fx.errors import DboError, OptionError
from dbo_fx.explain import explain

MODELS = """
import torch
from dbo_fx.models import MoeConfig, MoeDecoder
from small_moe import CachedMoe, PlainMoe, arguments

def plain():
    return MoeDecoder(MoeConfig(layers=2, shared_hidden=64)), (torch.randint(256, (6, 16)),)

def cached():
    model = CachedMoe(2)
    x, counter, caches = arguments(model)
    torch._dynamo.mark_dynamic(x, 0)
    return model, (x, counter, caches)

def mixing():
    model = PlainMoe()
    return (lambda x: model(x - x.mean(0))), (torch.randn(6, 8),)

def nothing():
    return 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "explained_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("explained_models", None)
    return "explained_models"


def test_what_is_split_and_what_is_not(models: str) -> None:
    found = explain(f"{models}:plain")
    assert found.inputs == {"l_tokens_": "token:0"}
    assert found.weights > 10
    assert set(found.verdicts) == {"independent", "replicated"}
    text = str(found)
    assert "MoE layers: 2, microbatches: 2" in text
    assert "certificate:\n  hazards: " in text


def test_written_inputs_are_static(models: str) -> None:
    found = explain(f"{models}:cached", dim=None)
    kinds = {kind for name, kind in found.inputs.items() if "cache" in name or "counter" in name}
    assert kinds == {"static"}
    assert found.inputs["l_x_"] == "token:0"


def test_a_refusal_names_the_op(models: str) -> None:
    with pytest.raises(DboError, match=r"mean .*reduces dim 0"):
        explain(f"{models}:mixing")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("explained_models", "is not module:callable"),
        ("explained_models:other", "has no attribute 'other'"),
        ("no_such_module:build", "No module named"),
        ("explained_models:nothing", r"returned int, wanted \(model, args\)"),
    ],
)
def test_targets_that_cannot_be_used(models: str, target: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        explain(target)


def test_the_command_prints_json_and_exits_with_2_on_usage(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODELS.replace("from small_moe", "# from small_moe"))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dbo_fx.cli", "explain", *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("mine:plain", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == {"l_tokens_": "token:0"}
    wrong = run("mine:nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("dbo-fx explain: mine:nothing() returned int")
