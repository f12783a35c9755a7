"""Causal attention for Hugging Face models, without a dense mask where none is needed.

transformers builds no mask for an attention function whose name it does not know. A pre-hook of
the decoder therefore looks at the arguments that a mask would have come from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_fx.errors import UnsupportedGraphError


def check_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook of the decoder: refuse masks, and tell the attention function where queries stand.

    transformers drops the mask for an attention function that it does not know, so that padding
    would be attended to without a word.

    Raises:
        UnsupportedGraphError: There is a mask that hides something, or may.
    """
    if len(args) > 1:
        raise UnsupportedGraphError(
            f"{type(module).__name__}: pass everything after input_ids by keyword, so that "
            "dbo_fx's attention sees attention_mask, position_ids and past_key_values."
        )
    mask = kwargs.pop("attention_mask", None)
    # A traced mask may hide something in a later call, so it is refused whatever it holds now.
    if mask is not None and (torch.compiler.is_compiling() or mask.dim() != 2 or not mask.all()):
        raise UnsupportedGraphError(
            "dbo_fx's attention is causal and cannot hide padding, but attention_mask was given. "
            "Leave attention_mask out; batch sequences of equal length, or pack them and pass "
            "position_ids."
        )
    positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
    if cache is not None:
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = tokens if tokens is not None else kwargs["inputs_embeds"]
        slots = torch.arange(tokens.shape[1], device=tokens.device) + cache.get_seq_length()
        kwargs["dbo_fx_slots"] = slots.unsqueeze(0)
        if positions is None:
            kwargs["position_ids"] = kwargs["dbo_fx_slots"]
    elif positions is not None:
        jumps = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        kwargs["dbo_fx_sequences"] = jumps.cumsum(-1)
    return args, kwargs


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    dbo_fx_slots: Tensor | None = None,
    dbo_fx_sequences: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention; with a cache, each query sees the slots up to its own.

    Args:
        module: The attention module.
        query: [B, heads, S, head].
        key: [B, key heads, S or slots of the cache, head].
        value: Like key.
        attention_mask: Always None; masks are refused.
        scaling: Factor of the scores.
        dropout: Always 0.
        dbo_fx_slots: [1, S] the cache slot of each query; None without a cache.
        dbo_fx_sequences: [B, S] which packed sequence each token belongs to; None where rows are
            single sequences.
        **kwargs: What else transformers hands over.

    Returns:
        [B, S, heads, head], and None for the attention weights.

    Raises:
        UnsupportedGraphError: The model asks for dropout, a sliding window, sinks or soft-capping.
    """
    asked = {name: kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux")}
    asked |= {"attention_mask": attention_mask, "dropout": dropout or None}
    if any(found is not None for found in asked.values()):
        names = ", ".join(name for name, found in asked.items() if found is not None)
        raise UnsupportedGraphError(
            f"{type(module).__name__}: dbo_fx's attention is plain causal attention, but the model "
            f"asks for {names}. Turn it off in the model's config, or call model.eval()."
        )
    mask = None
    if dbo_fx_slots is not None or dbo_fx_sequences is not None:
        slots = torch.arange(key.shape[2], device=key.device)
    if dbo_fx_slots is not None:
        mask = (slots <= dbo_fx_slots.unsqueeze(-1)).unsqueeze(1)
    elif dbo_fx_sequences is not None:
        same = dbo_fx_sequences.unsqueeze(-1) == dbo_fx_sequences.unsqueeze(-2)
        mask = (same & (slots <= slots.unsqueeze(-1))).unsqueeze(1)
    shared = query.shape[1] != key.shape[1]
    y = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=shared
    )
    return y.transpose(1, 2).contiguous(), None
