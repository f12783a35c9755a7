"""Engine features that do not go with splitting: refused by name, documented from one list."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dbo_fx.errors import OptionError
from dbo_fx.features import (
    BATCH_WISE_SCALES,
    REFUSALS,
    ROW_WISE_SCALES,
    EngineFeatures,
    refuse,
    table,
)

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "limits.md"
BEGIN, END = (f"<!-- table of refusals: {word} -->\n" for word in ("begin", "end"))

REFUSED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": True},
    "pipeline parallelism": {"pipeline_parallel": 2},
    "prefill context parallelism": {"prefill_context_parallel": 2},
    "decode context parallelism": {"decode_context_parallel": 8},
    "multimodal inputs": {"multimodal": True},
    "encoder-decoder": {"encoder_decoder": True},
    "encoder-only": {"encoder_only": True},
    "hybrid recurrent state over a split": {"recurrent_state_over_split": True},
    "piecewise CUDA graphs": {"cuda_graphs": "piecewise"},
    "batch norm": {"batch_norm": True},
    "capacity routing that drops tokens": {"dropping_capacity": True},
    "expert load balancing under a captured graph": {
        "expert_load_balancing": True,
        "cuda_graphs": "full",
    },
    "expert parallelism on fewer than two ranks": {"expert_parallel": True, "expert_ranks": 1},
    "quantised weights with scales taken over the batch": {
        "quantization": "fp8",
        "activation_scales": "per_tensor",
    },
    "quantised weights of an unknown kind": {"quantization": "homegrown"},
}


def refusal(features: EngineFeatures) -> str:
    """Message of the OptionError that a record raises."""
    with pytest.raises(OptionError) as caught:
        refuse(features)
    return str(caught.value)


def test_every_refusal_has_a_case() -> None:
    assert list(REFUSED) == [refusal.feature for refusal in REFUSALS]


@pytest.mark.parametrize("entry", REFUSALS, ids=lambda entry: entry.feature)
def test_each_feature_is_refused_by_name_with_reason_and_remedy(entry: Any) -> None:
    values = REFUSED[entry.feature]
    first, second = refusal(EngineFeatures(**values)).splitlines()
    assert first == "the batch may not be split, because of:"
    assert second.startswith(f"  {entry.feature} (")
    for name, value in values.items():
        assert f"{name}={value!r}" in second
    assert second.endswith(f"): {entry.why}. {entry.remedy}.")


def test_all_features_that_are_on_are_named_at_once() -> None:
    said = refusal(EngineFeatures(lora=True, pipeline_parallel=4, multimodal=True)).splitlines()
    assert [line.split(" (")[0].strip() for line in said[1:]] == [
        "LoRA",
        "pipeline parallelism",
        "multimodal inputs",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"cuda_graphs": "full", "expert_parallel": True, "expert_ranks": 2},
        {"expert_load_balancing": True},
        {"expert_ranks": 1},
        {"activation_scales": "per_tensor"},
    ],
)
def test_other_records_are_accepted(values: dict[str, Any]) -> None:
    refuse(EngineFeatures(**values))


@pytest.mark.parametrize("scales", [*ROW_WISE_SCALES, *BATCH_WISE_SCALES])
def test_quantised_weights_are_accepted_if_rows_do_not_share_scales(scales: str) -> None:
    features = EngineFeatures(quantization="int8", activation_scales=scales)
    if scales in ROW_WISE_SCALES:
        refuse(features)
    else:
        assert f"quantization='int8', activation_scales={scales!r}" in refusal(features)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora": "yes"}, "lora='yes', wanted a value like False"),
        ({"pipeline_parallel": True}, "pipeline_parallel=True, wanted a value like 1"),
        ({"expert_ranks": 0}, "expert_ranks=0, wanted 1 or more"),
        ({"cuda_graphs": "partial"}, "cuda_graphs='partial', wanted one of"),
        ({"activation_scales": "odd"}, "activation_scales='odd', wanted one of"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        EngineFeatures(**values)


def test_refused_under_optimised_python_and_without_torch() -> None:
    code = (
        "import sys\n"
        "from dbo_fx.features import EngineFeatures, refuse\n"
        "try:\n    refuse(EngineFeatures(lora=True))\n"
        "except ValueError as error:\n    print(__debug__, 'torch' in sys.modules, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("False False the batch may not be split")
    assert "LoRA (lora=True)" in done.stdout


def test_every_field_leads_to_a_refusal() -> None:
    used = {name for refusal in REFUSALS for name in refusal.fields}
    assert used == {field.name for field in fields(EngineFeatures)}


def test_the_document_holds_the_table(request: pytest.FixtureRequest) -> None:
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    found, after = rest.split(END)
    if request.config.getoption("--update-golden"):
        DOCUMENT.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
        found = table()
    assert found == table(), "run pytest tests/test_features.py --update-golden"
