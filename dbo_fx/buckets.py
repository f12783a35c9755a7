"""What CUDA graphs are captured for, how, and how often each one ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dbo_fx.decision import BatchKind
from dbo_fx.errors import OptionError

SPLIT, UNSPLIT = "split", "unsplit"


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one CUDA graph is good for.

    Attributes:
        rows: Token rows on every rank, padding included.
        kind: What the rows are.
        plan: Which call was captured, for example "split" or "unsplit".
    """

    rows: int
    kind: BatchKind = BatchKind.PREFILL
    plan: str = SPLIT

    def __post_init__(self) -> None:
        """Refuse what is no number of rows.

        Raises:
            OptionError: `rows` is below 1 or no integer.
        """
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise OptionError(f"Bucket: rows={self.rows!r}, wanted an integer from 1 on.")

    def __str__(self) -> str:
        """`64 rows, decode-only, split`."""
        return f"{self.rows} rows, {self.kind}, {self.plan}"


def several(buckets: Iterable[int | Bucket]) -> Iterable[int | Bucket]:
    """Refuse one bucket where several are wanted.

    Raises:
        OptionError: It is no list.
    """
    if not isinstance(buckets, Iterable):
        raise OptionError(f"capture: found buckets={buckets!r}, wanted a list: [{buckets!r}].")
    return buckets


def largest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Each bucket once, in the order in which every rank captures them.

    The largest goes first: what it leaves free in the pool is enough for all others.
    """
    return sorted(set(buckets), key=lambda b: (-b.rows, -b.kind, b.plan))


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """How graphs are captured and replayed.

    Attributes:
        clone_outputs: Return copies. Otherwise outputs are valid until the next replay of any
            graph of the same `CudaGraphs`.
        copied: Names of further arguments whose tensors change with every step: they are copied
            into static buffers, too, with the sizes that they have at the capture.
        warmup: Runs before a capture, at least one.
        keep_state: Put back after every warm-up what the call writes into static arguments and
            module buffers. Takes a copy of them for the time of the capture; without it they hold
            whatever the warm-up wrote.
        check_weights: Check at every replay that no weight has moved.
        timeout_s: How long a capture waits for the other ranks, in seconds.
    """

    clone_outputs: bool = False
    copied: tuple[str, ...] = ()
    warmup: int = 2
    keep_state: bool = True
    check_weights: bool = True
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse numbers out of range.

        Raises:
            OptionError: `warmup` is below 1 or `timeout_s` not above 0.
        """
        if self.warmup < 1 or not self.timeout_s > 0:
            raise OptionError(
                f"GraphOptions: warmup={self.warmup!r} and timeout_s={self.timeout_s!r}, wanted 1 "
                "or more, and seconds above 0."
            )


@dataclass(slots=True)
class GraphStatistics:
    """What the graphs of one model did so far.

    Attributes:
        captured: How often each bucket was captured.
        hits: Replays of each bucket.
        eager: Runs without a graph, by reason.
    """

    captured: Counter[Bucket] = field(default_factory=Counter)
    hits: Counter[Bucket] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """One line, one more for each captured bucket and for each reason to run eagerly."""
        lines = [f"{self.hits.total()} replays, {self.eager.total()} eager runs"]
        lines += [f"  {self.hits[bucket]} replays: {bucket}" for bucket in self.captured]
        lines += [f"  {count} eager: {why}" for why, count in self.eager.items()]
        return "\n".join(lines)
