"""Where a batch is cut: pure functions of the batch's shape, in Python integers.

A batch is requests one after another, then padding. Cutting it at a token keeps the order:
microbatch 0 holds the earlier tokens. A request that straddles a cut appears on both sides.

`docs/splitting.md` has the rules, the ties and a table of examples.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dbo_fx.errors import OptionError

RULES = ("midpoint", "request", "query_multiple", "aligned", "balanced")
# Rules that `multiple` means something to.
_TAKES_MULTIPLE = ("query_multiple", "aligned", "balanced")
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a split needs to know of a batch.

    Attributes:
        query_lens: Tokens of each request in this step, at least 1.
        seq_lens: Tokens of each request after this step: computed before, plus the query.
        padded_tokens: T, the size of the batch's token dim: all queries, then padding.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    padded_tokens: int

    def __post_init__(self) -> None:
        """Check that the numbers fit together.

        Raises:
            OptionError: They do not.
        """
        if len(self.query_lens) != len(self.seq_lens):
            raise OptionError(
                f"BatchShape: {len(self.query_lens)} query lengths and {len(self.seq_lens)} "
                "sequence lengths, wanted one of each per request."
            )
        for request, (query, seq) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if not 1 <= query <= seq:
                raise OptionError(
                    f"BatchShape: request {request} has query length {query} and sequence length "
                    f"{seq}, wanted 1 <= query <= sequence. Leave idle requests out; a sequence "
                    "length counts the query too."
                )
        if self.padded_tokens < self.num_tokens:
            raise OptionError(
                f"BatchShape: padded_tokens={self.padded_tokens}, wanted at least the "
                f"{self.num_tokens} tokens of the queries."
            )

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all queries, without padding."""
        return sum(self.query_lens)

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        """First token of each request, then `num_tokens`."""
        return (0, *accumulate(self.query_lens))


@dataclass(frozen=True, slots=True)
class Slice:
    """One microbatch: the tokens `start:stop` of the padded batch.

    Attributes:
        start: First token.
        stop: One past the last token, padding included.
        request_start: First request with a query token here.
        request_stop: One past the last such request; equal to `request_start` if there is none.
        num_tokens: Query tokens, without padding. 0: the microbatch lies wholly in the padding; it
            has nothing to attend to and still takes part in all communication.
    """

    start: int
    stop: int
    request_start: int
    request_stop: int
    num_tokens: int

    @property
    def width(self) -> int:
        """Tokens including padding."""
        return self.stop - self.start

    def __str__(self) -> str:
        """`tokens 0:8 (5 real), requests 0:2`."""
        return (
            f"tokens {self.start}:{self.stop} ({self.num_tokens} real), "
            f"requests {self.request_start}:{self.request_stop}"
        )


def split_points(
    batch: BatchShape,
    k: int = 2,
    rule: str = "midpoint",
    *,
    multiple: int | None = None,
    token_cost: int = 0,
    min_tokens: int = 1,
) -> tuple[Slice, ...]:
    """Cut a batch into k microbatches.

    Args:
        batch: The batch of this rank.
        k: Number of microbatches.
        rule: `midpoint`: at T * i // k, as the compiled program does. `request`: no request
            straddles. `query_multiple`: every query has the same length, cut at a multiple of it.
            `aligned`: at a multiple of `multiple`. `balanced`: equal attention cost.
        multiple: Cuts are multiples of it. None means 16 for `aligned`, 1 for `balanced`, and the
            query length for `query_multiple`, which needs it when the batch has no request.
        token_cost: For `balanced`: cost of a token, padding too, beside the keys that it reads; in
            units of one key.
        min_tokens: Least width of a microbatch.

    Returns:
        k slices, in order, that cover the padded batch.

    Raises:
        OptionError: An argument is wrong, or the batch has no such cut. Then do not split it.
    """
    if rule not in RULES:
        raise OptionError(f"split_points: unknown rule {rule!r}. Known: {', '.join(RULES)}.")
    if multiple is not None and rule not in _TAKES_MULTIPLE:
        raise OptionError(
            f"split_points: rule {rule!r} has no multiple, found multiple={multiple}. "
            f"Leave it out, or use {' or '.join(_TAKES_MULTIPLE)}."
        )
    for name, value, least in (
        ("k", k, 1),
        ("multiple", 1 if multiple is None else multiple, 1),
        ("token_cost", token_cost, 0),
        ("min_tokens", min_tokens, 1),
    ):
        if value < least:
            raise OptionError(f"split_points: {name}={value}, wanted at least {least}.")
    total = batch.padded_tokens
    candidates = _candidates(batch, rule, multiple)
    latest = _latest(batch, k, rule, candidates, min_tokens)
    measure = _attention_cost(batch, token_cost) if rule == "balanced" else _tokens
    points: list[int] = []
    for i in range(1, k):
        low, high = (points[-1] if points else 0) + min_tokens, latest[i - 1]
        if rule == "midpoint":
            points.append(min(max(total * i // k, low), high))
            continue
        first, last = bisect_left(candidates, low), bisect_right(candidates, high)
        for of in (measure, _tokens):
            first, last = _nearest(candidates, first, last, _times(k, of), i * of(total))
        points.append(candidates[first])
    return cut(batch, points)


def cut(batch: BatchShape, points: Sequence[int]) -> tuple[Slice, ...]:
    """Cut a batch at given tokens, for example at those that the ranks agreed on.

    Args:
        batch: The batch of this rank.
        points: Where the microbatches after the first begin, ascending, inside the padded batch.

    Returns:
        `len(points) + 1` slices.

    Raises:
        OptionError: The points do not ascend, or a microbatch would have no row at all.
    """
    bounds = [0, *points, batch.padded_tokens]
    if any(low >= high for low, high in pairwise(bounds)):
        raise OptionError(
            f"cut: points {list(points)} in a batch of {batch.padded_tokens} padded tokens, wanted "
            f"ascending points from 1 to {batch.padded_tokens - 1}. Pad the batch, or cut less."
        )
    starts, end = batch.query_start_loc, batch.num_tokens
    slices = []
    for start, stop in pairwise(bounds):
        real = max(min(stop, end) - start, 0)
        # A request is here if its last token is at or after start and its first before stop.
        first = bisect_right(starts, start, 1) - 1 if real else batch.num_requests
        last = bisect_left(starts, min(stop, end))
        slices.append(Slice(start, stop, first, last if real else first, real))
    return tuple(slices)


def microbatch_shape(batch: BatchShape, piece: Slice) -> BatchShape:
    """The shape of one microbatch.

    A straddling request's query is clamped to the slice. Its sequence ends with its last token
    here: what later microbatches will write is hidden. Tokens of earlier ones count as computed.

    Args:
        batch: The whole batch.
        piece: The microbatch.

    Returns:
        The requests of the slice, padded to its width.
    """
    starts = batch.query_start_loc
    queries, seqs = [], []
    for request in range(piece.request_start, piece.request_stop):
        low, high = max(starts[request], piece.start), min(starts[request + 1], piece.stop)
        queries.append(high - low)
        seqs.append(batch.seq_lens[request] - (starts[request + 1] - high))
    return BatchShape(tuple(queries), tuple(seqs), piece.width)


def _candidates(batch: BatchShape, rule: str, multiple: int | None) -> Sequence[int]:
    """Where the rule allows a cut, ascending."""
    total = batch.padded_tokens
    if rule == "request":
        # No request straddles a cut in the padding.
        return [*batch.query_start_loc[1:-1], *range(max(batch.num_tokens, 1), total)]
    if rule == "query_multiple":
        step = _query_len(batch, multiple)
    else:
        step = multiple or (_ALIGNMENT if rule == "aligned" else 1)
    return range(step, total, step)


def _query_len(batch: BatchShape, multiple: int | None) -> int:
    lengths = sorted({*batch.query_lens, *([] if multiple is None else [multiple])})
    if len(lengths) == 1:
        return lengths[0]
    found = f"lengths {lengths}" if lengths else "no request"
    raise OptionError(
        f"split_points: rule 'query_multiple' found {found}, wanted one query length for the whole "
        "batch. For a mixed batch use 'request' or 'midpoint'; for an idle rank pass multiple."
    )


def _latest(
    batch: BatchShape, k: int, rule: str, candidates: Sequence[int], min_tokens: int
) -> list[int]:
    """For each of the k - 1 points the last candidate that leaves room for those after it."""
    latest: list[int] = []
    limit = batch.padded_tokens
    for _ in range(k - 1):
        index = bisect_right(candidates, limit - min_tokens) - 1
        limit = candidates[index] if index >= 0 else 0
        latest.append(limit)
    if limit < min_tokens * (k > 1):
        raise OptionError(
            f"split_points: rule {rule!r} cannot make {k} microbatches, each of {min_tokens} or "
            f"more of {batch.padded_tokens} padded tokens, out of {batch.num_requests} requests. "
            "Do not split this batch, or pad it."
        )
    return latest[::-1]


def _nearest(
    candidates: Sequence[int],
    first: int,
    last: int,
    measure: Callable[[int], int],
    goal: int,
) -> tuple[int, int]:
    """The candidates of `first:last` whose measure, which never falls, is nearest to the goal."""
    i = bisect_left(candidates, goal, first, last, key=measure)
    near = min(abs(measure(candidates[j]) - goal) for j in (i - 1, i) if first <= j < last)
    return (
        bisect_left(candidates, goal - near, first, last, key=measure),
        bisect_right(candidates, goal + near, first, last, key=measure),
    )


def _tokens(point: int) -> int:
    return point


def _times(factor: int, measure: Callable[[int], int]) -> Callable[[int], int]:
    return lambda point: factor * measure(point)


def _attention_cost(batch: BatchShape, token_cost: int) -> Callable[[int], int]:
    """Cost of the tokens before a point: the keys they read, and `token_cost` each."""
    starts = batch.query_start_loc

    def keys(request: int, tokens: int) -> int:
        computed = batch.seq_lens[request] - batch.query_lens[request]
        return tokens * computed + tokens * (tokens + 1) // 2

    lengths = enumerate(batch.query_lens)
    before = (0, *accumulate(keys(request, length) for request, length in lengths))

    def cost(point: int) -> int:
        request = bisect_right(starts, point) - 1
        inside = keys(request, point - starts[request]) if request < batch.num_requests else 0
        return before[request] + inside + token_cost * point

    return cost
