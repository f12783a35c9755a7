"""The value that marks an element as not yet received."""

from __future__ import annotations

import torch


def poison(dtype: torch.dtype) -> float | int | bool:
    """Return the value that marks an element as not yet received.

    Args:
        dtype: Type of the visible output.

    Returns:
        NaN for floating point and complex types, True for bool, the largest value for unsigned
        integers and -7 for signed ones.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    return -7 if torch.iinfo(dtype).min < 0 else torch.iinfo(dtype).max
