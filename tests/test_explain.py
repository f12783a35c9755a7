"""`dbo-fx explain`: what is split how, and refusals that say what to mend."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dbo_fx import phase_rules as rules
from dbo_fx.errors import DboError, OptionError, VerificationError
from dbo_fx.explain import Explanation, explain, folded_inputs
from dbo_fx.explain_program import explain_program
from dbo_fx.inspect.layers import Op, folded
from dbo_fx.ir import Phase
from dbo_fx.tables import plain
from program_edits import bound, without

MODELS = """
import torch
import graphs
from dbo_fx.models import MoeConfig, MoeDecoder
from small_moe import CachedMoe, PlainMoe, arguments

def plain():
    return MoeDecoder(MoeConfig(layers=2, shared_hidden=64)), (torch.randint(256, (6, 16)),)

def cached():
    model = CachedMoe(2)
    x, counter, caches = arguments(model)
    torch._dynamo.mark_dynamic(x, 0)
    return model, (x, counter, caches)

def deep():
    return MoeDecoder(MoeConfig(layers=5, shared_hidden=64)), (torch.randint(256, (6, 16)),)

def without_attention():
    return (lambda x: graphs.experts(x * 2) + x), (torch.randn(6, 8),)

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


def taken(found: Explanation, layer: int) -> dict[tuple[str, str], tuple[Op, ...]]:
    facts = found.layers[layer]
    return {(t.phase, t.rule): t.ops for t in facts.taken}


def test_every_op_of_a_layer_has_a_phase_and_a_rule(models: str) -> None:
    found = explain(f"{models}:plain")
    assert [facts.layer for facts in found.layers] == [0, 1, None]
    ops = taken(found, 1)
    cores = ops["A1", rules.CORE]
    assert [op.op for op in cores] == ["aten.scaled_dot_product_attention.default"]
    assert cores[0].module.startswith("layers.1.attention")
    assert cores[0].at.startswith("dbo_fx/models/moe.py:")
    before = [op.op for op in ops["A0", rules.FOR_CORE]]
    assert "aten.linear.default" in before
    assert [op.op for op in ops["D", rules.SENDS]] == [
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.wait_tensor.default",
    ]
    assert {op.module for op in ops["S", rules.BESIDE]} >= {"layers.1.mlp.shared.up"}
    assert ("MLP", rules.EXPERTS) in ops
    assert ("A1", rules.FEEDS) in ops
    assert {phase for phase, _ in ops} == {"A0", "A1", "D", "MLP", "C", "S"}
    assert [(t.phase, t.rule) for t in found.layers[-1].taken] == [("TAIL", rules.AFTER)]


def test_a_layer_without_attention_says_so(models: str) -> None:
    found = explain(f"{models}:without_attention")
    assert ("A0", rules.NO_CORE) in taken(found, 0)


def test_the_numbers_of_ops_are_those_of_the_summary(models: str) -> None:
    found = explain(f"{models}:plain")
    counts = Counter[str]()
    for facts in found.layers:
        for item in facts.taken:
            counts[item.phase] += len(item.ops)
    assert f"ops per phase: {', '.join(f'{p.value} {counts[p.value]}' for p in Phase)}" in str(
        found
    )


def test_equal_layers_are_folded(models: str) -> None:
    found = explain(f"{models}:deep")
    assert [len(run) for run in folded(found.layers)] == [1, 3, 1, 1]
    text = str(found)
    assert "\nlayers 1 to 3 (layers.1 to layers.3), alike" in text
    assert "D_m0@l" in text
    assert "\nlayer 2 " not in text


def test_why_a_layer_does_not_overlap(models: str) -> None:
    found = explain(f"{models}:deep", schedule="sequential")
    text = plain(found.blocks(3))
    assert "\nlayer 3 (layers.3)\n" in text
    assert "\nlayer 2" not in text
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["D_m0@3"]]
    assert row.split(maxsplit=1)[1] == "nothing"
    assert "C_m0@3: nothing: schedule (only what it needs, and what needs it, stands" in text
    assert "D_m0@3: not S_m0@3: late event (" in text


def test_a_layer_that_is_not_there(models: str) -> None:
    found = explain(f"{models}:plain")
    with pytest.raises(OptionError, match="there is no MoE layer 2; they count from 0 to 1"):
        found.blocks(2)


def test_names_of_inputs_that_differ_in_numbers_are_folded() -> None:
    kinds = {"x_1": "token:0", "b_0": "replicated", "b_1": "replicated", "b_2": "static"}
    assert folded_inputs(kinds) == [
        "x_1: token:0",
        "b_*: replicated (2 of them)",
        "b_2: static",
    ]


def test_a_program_text_is_explained_without_torch() -> None:
    code = (
        "import sys; from dbo_fx.cli import app\n"
        "app(['explain', 'mlp_shared_overlap', '--layers', '9', '--layer', '7',"
        " '--transport', 'deepep_ll'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "\nlayer 7\n" in done.stdout
    assert "C_m1@7: not S_m0@7: schedule (stands before MLP_m1@7)" in done.stdout


def test_a_program_that_is_not_safe_has_no_explanation() -> None:
    wrong = without(bound(), "comp wait e5")
    with pytest.raises(VerificationError):
        explain_program(wrong)


def test_a_refused_file_is_shown_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "wrong.dbo"
    path.write_text(f"# One line more.\n{without(bound(), 'comp wait e5')}")
    command = [sys.executable, "-m", "dbo_fx.cli", "explain", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.match(r"dbo-fx explain: wrong\.dbo, line \d+: ", done.stderr)


def test_a_refusal_names_the_op(models: str) -> None:
    with pytest.raises(DboError, match=r"mean .*reduces dim 0"):
        explain(f"{models}:mixing")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("explained_models", "or module:callable"),
        ("explained_models:", "is not module:callable"),
        ("explained_models:other", "has no attribute 'other'"),
        ("no_such_module:build", "No module named"),
        ("explained_models:nothing", r"returned int, wanted \(model, args\)"),
    ],
)
def test_targets_that_cannot_be_used(models: str, target: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        explain(target)


@pytest.mark.slow
def test_the_command_prints_json_and_exits_with_2_on_usage(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        MODELS.replace("from small_moe", "# from small_moe").replace("import graphs", "")
    )

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dbo_fx.cli", "explain", *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("mine:plain", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == {"l_tokens_": "token:0"}
    wrong = run("mine:nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("dbo-fx explain: mine:nothing() returned int")
