"""Models to try dbo_fx on: a plain PyTorch MoE decoder, and the demo's Hugging Face config."""

from __future__ import annotations

from pathlib import Path

from dbo_fx.models.moe import MoeConfig, MoeDecoder

DEMO_CONFIG = Path(__file__).with_name("deepseek_v3_demo.json")
"""A DeepSeek-V3 architecture in small: a config of `transformers`, no weights."""

__all__ = ["DEMO_CONFIG", "MoeConfig", "MoeDecoder"]
