"""Every error that dbo_fx raises. One base class; mistakes a user can mend are also `ValueError`s.

A message says where, what was found, what was wanted and what to do next.
"""

from __future__ import annotations

from typing import Any, Protocol


class DboError(Exception):
    """Base class of all errors raised on purpose by dbo_fx."""


class ScheduleError(DboError, ValueError):
    """A schedule or program text is malformed, incomplete, or breaks a dependency."""


class OptionError(DboError, ValueError):
    """An option is unknown, of the wrong type, or impossible beside another one."""


class UnsupportedGraphError(DboError, ValueError):
    """The captured graph has something that dbo_fx cannot schedule; the message names it."""


class SoundnessError(DboError, ValueError):
    """Splitting this batch would change results, or may: the message says which node and why."""


class Refutation(Protocol):
    """Why a program is refused, as a value: printable, and as plain values for JSON."""

    @property
    def rule(self) -> str:
        """Name of the broken rule."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""


class VerificationError(DboError, RuntimeError):
    """A scheduled program breaks an ordering, lifetime or communication rule.

    Attributes:
        counterexample: What breaks it, where the verifier has put that together.
    """

    def __init__(self, message: str, *, counterexample: Refutation | None = None) -> None:
        """Keep the counterexample beside its text."""
        super().__init__(message)
        self.counterexample = counterexample


class CommunicationError(DboError, RuntimeError):
    """A communication op was used against its transport's contract."""


class AgreementError(DboError, RuntimeError):
    """The ranks disagree, or one of them did not answer in time; the message names them."""


class ProgressError(DboError, ValueError):
    """A progress dump cannot be read, or is damaged."""


class GraphFileError(DboError, ValueError):
    """A saved graph or program cannot be read, is damaged, or does not fit this process."""
