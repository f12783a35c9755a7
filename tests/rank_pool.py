"""Ranks that stay up between tests, so that each test does not pay their start-up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dbo_fx.launch import RankError, Ranks

# transformers looks for torchvision, which no test needs and whose build may not fit torch's.
sys.modules["torchvision"] = None  # type: ignore[assignment]


def _in_rank(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn` where this module has been imported first, with its block of torchvision."""
    from dbo_fx.comm import abandon_in_flight

    try:
        return fn(rank, *args)
    finally:
        abandon_in_flight()


class RankPool:
    """Ranks that are started at the first call and again after a failure."""

    def __init__(self, world_size: int = 2, backend: str = "gloo") -> None:
        """Remember the size and the default group's backend; start nothing yet."""
        self.world_size = world_size
        self.backend = backend
        self._ranks: Ranks | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Run `fn(rank, *args)` on every rank.

        Args:
            fn: A function at the top level of a test module.
            args: Picklable arguments.
            timeout_s: Limit of the call; the pool is rebuilt when it runs out.

        Returns:
            What each rank returned, by rank.

        Raises:
            BaseException: What the rank that failed first raised, with its traceback as the cause.
            RankError: A rank died, time ran out, or its exception cannot be pickled.
        """
        if self._ranks is None or not self._ranks.alive:
            self._ranks = Ranks(self.world_size, backend=self.backend, threads=1)
        try:
            return self._ranks.call(_in_rank, (fn, *args), timeout_s=timeout_s)
        except RankError as failure:
            if failure.error is not None:
                raise failure.error from failure
            raise

    def close(self) -> None:
        """Stop the ranks if they run."""
        if self._ranks is not None:
            self._ranks.close()
