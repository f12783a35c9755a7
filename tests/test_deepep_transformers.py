"""Hugging Face models on DeepEP's layouts, over the twins, against the same models whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbo_fx
from dbo_fx.errors import OptionError
from rank_pool import RankPool

transformers = pytest.importorskip("transformers", minversion="5.17")

from dbo_fx.integrations import transformers as integration  # noqa: E402 (needs transformers)
from dbo_fx.integrations.transformers_layouts import check_layout  # noqa: E402 (likewise)
from test_transformers import build, forward, tokens  # noqa: E402 (likewise)


@torch.no_grad()
def compare(rank: int, family: str, transport: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Overlapped against serial, bit for bit, and against the whole model."""
    x = tokens(rank)
    sizes = {"hidden_size": 128} if changes.get("fp8") else {}
    whole = forward(build(family, **sizes), x)
    model = integration.expert_parallel(build(family, **sizes), **changes)
    found = {}
    for schedule in ("sequential", "mlp_shared_overlap"):
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(x, 0)
        options = {"transport": transport, "schedule": schedule}
        if schedule == "sequential":
            options["verify"] = "static"
        compiled = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
        found[schedule] = forward(compiled, x).clone()
    same = torch.equal(found["sequential"], found["mlp_shared_overlap"])
    error = float((found["sequential"] - whole).norm() / whole.norm())
    return {"same": same, "error": error, "used": dbo_fx.compilations()[-1].program.transport}


BATCHED = {"layout": "batched", "max_tokens": 32}


@pytest.mark.parametrize(
    ("family", "transport", "changes", "most"),
    [
        ("Mixtral", "deepep_ll", BATCHED, 1e-5),
        ("DeepseekV3", "deepep_ll", BATCHED, 1e-5),
        ("DeepseekV3", "deepep_ht", {}, 1e-5),
        ("Qwen3Moe", "deepep_v2", {}, 1e-5),
        ("Mixtral", "deepep_ht", {"fp8": True}, 0.1),
        ("Mixtral", "deepep_ll", BATCHED | {"fp8": True}, 0.1),
    ],
)
@pytest.mark.slow
def test_a_model_without_change_on_deepep(
    ranks: RankPool, family: str, transport: str, changes: dict[str, Any], most: float
) -> None:
    for seen in ranks(compare, family, transport, changes, timeout_s=300):
        assert seen["same"], seen
        assert seen["error"] < most, seen
        assert seen["used"] == transport


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("columns", None, False, "all_gather", 128), "layout='columns'"),
        (("batched", None, False, "all_gather", 128), "max_tokens=None: wanted the most tokens"),
        (("batched", 0, False, "all_gather", 128), "max_tokens=0"),
        (("rows", 8, False, "all_gather", 128), "max_tokens=8 belongs to layout='batched'"),
        (("batched", 8, False, "all_to_all", 128), "Leave routing out"),
        (("rows", None, True, "all_gather", 96), "multiple of 128, found 96"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: Any, said: str) -> None:
    check_layout("batched", 8, True, "all_gather", 128)
    with pytest.raises(OptionError, match=said):
        check_layout(*arguments)
