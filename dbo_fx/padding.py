"""Says to a compiled program, for one step, whether some rank has padded its rows.

A program that writes state in place (KV cache, counters) would write it for padded rows, too. Only
the program knows that it writes; only `wrap` knows that it padded.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import Enum


class Padding(Enum):
    """What stands in the rows that were added on some rank.

    Attributes:
        NONE: Nothing: no rank padded.
        ZEROS: Zeros, which a write takes for tokens.
        NAMED: Values that the user named as harmless.
    """

    NONE = "none"
    ZEROS = "zeros"
    NAMED = "named"


STEP: ContextVar[Padding] = ContextVar("dbo_fx_padding", default=Padding.NONE)
