"""May this step be split, and to how many rows is it padded: the rule, without communication.

Every rank brings a `Vote`. `decide` turns the votes of all ranks into one `BatchDecision`; it is a
pure function, so ranks that see the same votes under the same policy decide the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from dbo_fx.errors import OptionError


class BatchKind(IntEnum):
    """What the rows of a batch are; the thresholds differ."""

    DECODE = 0
    PREFILL = 1

    def __str__(self) -> str:
        """Return the words that messages use."""
        return "decode-only" if self is BatchKind.DECODE else "with prefill"


class Consent(IntEnum):
    """What a rank says to splitting the step."""

    ALLOWS = 0
    REFUSES = 1
    FAILS = 2


@dataclass(frozen=True, slots=True)
class AgreementPolicy:
    """When a step is split, and how rows are padded; must be the same on every rank.

    Attributes:
        decode_threshold: Fewest rows that every rank must have to split a decode-only step.
        prefill_threshold: The same for a step in which a rank has prefill rows.
        buckets: Row counts, ascending, to which steps are padded, for example those that were
            captured as CUDA graphs; a step beyond the largest is padded to its largest rank only.
        least_rows: Fewest rows that any rank is padded to.
        timeout_s: How long a step waits for the other ranks, in seconds.
    """

    decode_threshold: int = 32
    prefill_threshold: int = 512
    buckets: tuple[int, ...] = ()
    least_rows: int = 0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Validate every value.

        Raises:
            OptionError: A number is out of range, or the buckets do not ascend.
        """
        for key in ("decode_threshold", "prefill_threshold", "least_rows"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"AgreementPolicy: {key}={value!r}, wanted an integer >= 0.")
        sizes = tuple(self.buckets)
        if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
            raise OptionError(
                f"AgreementPolicy: buckets={self.buckets!r}, wanted row counts from 1 on, each "
                "larger than the one before. Sort them and drop the repeated ones."
            )
        # A list is as good, but only a tuple can be hashed.
        object.__setattr__(self, "buckets", sizes)
        if not self.timeout_s > 0:
            raise OptionError(
                f"AgreementPolicy: timeout_s={self.timeout_s!r}, wanted seconds above 0."
            )

    def threshold(self, kind: BatchKind) -> int:
        """Return the fewest rows that every rank must have to split a step of this kind."""
        return self.decode_threshold if kind is BatchKind.DECODE else self.prefill_threshold

    def bucket_for(self, rows: int) -> int | None:
        """Return the smallest bucket with this many rows, None if there is none."""
        index = bisect_left(self.buckets, rows)
        return self.buckets[index] if index < len(self.buckets) else None


NO_THRESHOLDS = AgreementPolicy(decode_threshold=0, prefill_threshold=0)
"""Split whenever every rank allows it."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank brings to a step.

    Attributes:
        rows: Rows that it has, 0 if it is idle.
        consent: Whether it allows the split, or cannot run the step at all.
        kind: What its rows are.
    """

    rows: int
    consent: Consent = Consent.ALLOWS
    kind: BatchKind = BatchKind.PREFILL


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What all ranks know about the step that they are about to run.

    Attributes:
        max_rows: Largest number of rows that a rank has.
        min_rows: Smallest number of rows that a rank has.
        allowed: Every rank allows the split.
        ranks: R, the number of ranks.
        refusing: Ranks that do not allow it.
        failing: Ranks that cannot run the step at all.
        below: Ranks with fewer rows than `threshold`.
        kind: The strictest kind among the ranks that have rows.
        threshold: Fewest rows that every rank must have to split a step of this kind.
        bucket: Smallest bucket that holds the step; None without one.
        least_rows: Fewest rows that any rank is padded to.
    """

    max_rows: int
    min_rows: int
    allowed: bool
    ranks: int
    refusing: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()
    below: tuple[int, ...] = ()
    kind: BatchKind = BatchKind.PREFILL
    threshold: int = 0
    bucket: int | None = None
    least_rows: int = 0

    @property
    def split(self) -> bool:
        """Whether every rank splits this step; if not, none does."""
        return self.allowed and not self.below

    @property
    def padded_rows(self) -> int:
        """Rows that every rank is padded to, split or not."""
        return max(self.max_rows, self.least_rows) if self.bucket is None else self.bucket

    @property
    def reason(self) -> str:
        """Which ranks keep the step from being split, and why; empty if it is split."""
        reasons = (
            (self.failing, "cannot run the step"),
            (self.refusing, "did not allow it"),
            (self.below, f"have fewer than {self.threshold} rows ({self.kind})"),
        )
        return "; ".join(f"ranks {list(ranks)} {why}" for ranks, why in reasons if ranks)

    def __str__(self) -> str:
        """Return one line: split or not, why, and the rows."""
        verdict = "split" if self.split else f"not split: {self.reason}"
        bucket = "no bucket" if self.bucket is None else f"bucket {self.bucket}"
        return (
            f"{verdict}; {self.min_rows} to {self.max_rows} rows on {self.ranks} ranks, "
            f"padded to {self.padded_rows} ({bucket})"
        )


def decide(votes: Sequence[Vote], policy: AgreementPolicy = NO_THRESHOLDS) -> BatchDecision:
    """Decide from the votes of all ranks.

    Args:
        votes: One for each rank, by rank; at least one.
        policy: Thresholds and buckets, the same on every rank.

    Returns:
        The decision. The kind is the strictest, the one with the higher threshold, among the ranks
        that have rows: one rank with prefill rows makes it a step with prefill. The thresholds
        apply to the rows before padding, so with one above 0 an idle rank keeps all from splitting.
    """
    rows = [vote.rows for vote in votes]
    busy = [vote for vote in votes if vote.rows] or votes
    threshold, kind = max((policy.threshold(vote.kind), vote.kind) for vote in busy)
    consents = [vote.consent for vote in votes]
    refusing = tuple(rank for rank, word in enumerate(consents) if word is Consent.REFUSES)
    failing = tuple(rank for rank, word in enumerate(consents) if word is Consent.FAILS)
    most = max(rows)
    return BatchDecision(
        max_rows=most,
        min_rows=min(rows),
        allowed=not refusing and not failing,
        ranks=len(votes),
        refusing=refusing,
        failing=failing,
        below=tuple(rank for rank, count in enumerate(rows) if count < threshold),
        kind=kind,
        threshold=threshold,
        bucket=policy.bucket_for(max(most, policy.least_rows)),
        least_rows=policy.least_rows,
    )
