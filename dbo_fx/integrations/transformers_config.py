"""A Hugging Face model from its config alone: no weights, on the meta device, experts sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dbo_fx.errors import DboError, OptionError
from dbo_fx.subjects import config_file

SEQUENCES = 16
TOKENS = 128
LAYERS = "num_hidden_layers"


def build(
    path: str, layers: int | None = None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build the causal language model that a config describes, and inputs for it.

    Args:
        path: A config file, or the folder that it lies in.
        layers: How many decoder layers to keep; None keeps all.

    Returns:
        The model on the meta device, its experts shared by the ranks of the default group; no
        positional arguments; [16, 128] token ids, to be split along the sequences.

    Raises:
        OptionError: The config is of no model that transformers can build, or has fewer layers.
        DboError: transformers is missing or too old, or the model has no experts to share.
    """
    from dbo_fx.integrations.transformers import expert_parallel

    file = config_file(Path(path))
    facts = json.loads(file.read_text(encoding="utf-8"))
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(facts.pop("model_type"), **facts)
        if layers is not None:
            config = type(config).from_dict(with_layers(config.to_dict(), layers, str(file)))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except DboError:
        raise
    except ImportError as error:
        raise DboError(
            f"{file} needs transformers: {error}. Run: pip install 'dbo-fx[hf]'"
        ) from error
    except Exception as error:  # Every model has checks of its own.
        first = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first}"
        raise OptionError(f"transformers cannot build a model of {file}: {what}") from error
    model = expert_parallel(model.eval().requires_grad_(False))
    ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long, device="meta")
    return model, (), {"input_ids": ids, "use_cache": False}


def with_layers(facts: dict[str, Any], layers: int, where: str) -> dict[str, Any]:
    """Keep the first layers of a config, and of every list that has one item a layer.

    Raises:
        OptionError: The config has fewer layers, does not say how many, or would have no experts.
    """
    found = facts.get(LAYERS)
    if not isinstance(found, int):
        raise OptionError(f"{where} has no {LAYERS!r}; leave --layers out")
    if layers > found:
        raise OptionError(f"{where} has {found} layers, fewer than {layers}")
    dense = facts.get("first_k_dense_replace", 0)
    if isinstance(dense, int) and layers <= dense:
        raise OptionError(
            f"the first {dense} layers of {where} have no experts; keep at least {dense + 1}"
        )
    cut = {
        key: value[:layers] if _is_per_layer(value, found) else value
        for key, value in facts.items()
    }
    return {**cut, LAYERS: layers}


def _is_per_layer(value: Any, layers: int) -> bool:
    """Whether a list names something for each layer, such as the kind of its attention."""
    return isinstance(value, list) and len(value) == layers and all(type(v) is str for v in value)
