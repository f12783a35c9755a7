"""The demo's input: the project's own README, as bytes."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import dbo_fx
from dbo_fx.errors import DboError, OptionError

SEQUENCES = 16
SEQUENCE_BYTES = 64
DISTRIBUTION = "dbo-fx"


def read_text() -> tuple[bytes, str]:
    """Find the project's README beside the package, or in an installed wheel's metadata.

    Returns:
        The text, and where it came from.

    Raises:
        DboError: Neither has any text.
    """
    readme = Path(dbo_fx.__file__).parent.parent / "README.md"
    if readme.is_file() and (text := readme.read_bytes()):
        return text, readme.name
    try:
        payload = metadata.metadata(DISTRIBUTION).get_payload()  # type: ignore[attr-defined]
    except metadata.PackageNotFoundError:
        payload = None
    if isinstance(payload, str) and payload.strip():
        return payload.encode(), "the installed package's description"
    raise DboError(
        f"the demo reads the project's README, but {readme} is missing or empty and the installed "
        "package has no description. Reinstall dbo-fx, or run from a checkout."
    )


def cut(text: bytes, first: int, count: int = SEQUENCES, length: int = SEQUENCE_BYTES) -> Tensor:
    """Cut text into sequences of byte tokens, beginning anew where it ends.

    Args:
        text: The text.
        first: Index of the first sequence.
        count: Number B of sequences.
        length: Their length S.

    Returns:
        [B, S] token ids in 0..255.

    Raises:
        OptionError: There is no text.
    """
    if not text:
        raise OptionError(
            "the demo's text is empty; wanted at least one byte to cut sequences from"
        )
    at = torch.arange(first * length, (first + count) * length) % len(text)
    return torch.tensor(list(text))[at].view(count, length)
