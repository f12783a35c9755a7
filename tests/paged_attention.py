"""Attention over a paged cache in plain PyTorch, run whole and microbatch by microbatch.

`make_case(integer)` draws a batch and a way to split it; `integer(low, high)` may be hypothesis' or
`random.Random(...).randint`. `differences(case)` says what the split changes: nothing, it should.
The integer attention records, for every query, which slots it reads, at which position of its
sequence, and which token wrote them. Slots that nobody has written yet hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from dbo_fx.batch_metadata import BatchTensors, MetadataBuilder
from dbo_fx.errors import OptionError
from dbo_fx.split import SplitSpec
from dbo_fx.split_points import RULES, BatchShape, Slice, cut, microbatch_shape, split_points

Integer = Callable[[int, int], int]

TOLERANCE = 1e-12
WIDTH = 4
# Codes of the integer attention: position * STRIDE + token that wrote the slot.
STRIDE = 1 << 32
EARLIER = 1 << 20
NUMBERS = torch.randn(
    3, 4096, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)
SPEC = SplitSpec.parse(
    {
        "query_start_loc": "cu_seqlens",
        "seq_lens": "seq_lens",
        "num_computed_tokens": "computed_lens",
        "block_table": "block_table",
        "slot_mapping": "slot_mapping",
        "positions": "positions",
    }
)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch, a cache that holds what was computed before, and a way to split."""

    shape: BatchShape
    batch: BatchTensors
    page: int
    computed_slots: tuple[int, ...]
    slots: int
    rule: str
    slices: tuple[Slice, ...]
    source: str
    writes_ahead: bool


class Metadata(NamedTuple):
    """What attention is given."""

    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor
    num_tokens: int | Tensor


class Cache(NamedTuple):
    """One row per slot, and one more that padding writes to."""

    writer: Tensor
    key: Tensor
    value: Tensor


class Reads(NamedTuple):
    """What each query did, and the result."""

    seen: Tensor
    position: Tensor
    given_position: Tensor
    output: Tensor


def make_case(integer: Integer) -> Case:
    k, page = integer(2, 4), (1, 2, 3, 8)[integer(0, 3)]
    requests = _requests(integer)
    queries, computed = [q for q, _ in requests], [c for _, c in requests]
    seqs = [q + c for q, c in requests]
    total = max(sum(queries) + integer(0, 1) * integer(0, 12), 2 * k)
    shape = BatchShape(tuple(queries), tuple(seqs), total)
    rule, slices = _slices(integer, shape, k)
    idle = max(integer(0, 2), 1 - len(requests))
    table, pages = _block_table(integer, computed, seqs, page)
    computed_slots = {
        row[j // page] * page + j % page
        for row, count in zip(table, computed, strict=True)
        for j in range(count)
    }
    mapping, positions = [], []
    for row, query, seq in zip(table, queries, seqs, strict=True):
        positions += range(seq - query, seq)
        mapping += [row[j // page] * page + j % page for j in range(seq - query, seq)]
    padding = total - len(mapping)
    width = max(map(len, table), default=1)
    unused = Random(integer(0, 1 << 16))
    rows = [row + [unused.randrange(pages) for _ in range(width - len(row))] for row in table]
    last = sum(queries)
    batch = BatchTensors(
        query_start_loc=torch.tensor([*shape.query_start_loc, *[last] * idle], dtype=torch.int32),
        seq_lens=torch.tensor(seqs + [0] * idle, dtype=torch.int32),
        block_table=torch.tensor(rows + [[0] * width] * idle, dtype=torch.int32),
        slot_mapping=torch.tensor(mapping + [-1] * padding),
        positions=torch.tensor(positions + [unused.randrange(99) for _ in range(padding)]),
    )
    if integer(0, 1):
        # The layout of models with several position axes.
        plain = batch.positions
        layout = torch.stack([plain, plain + 1, plain * 2])
        batch = BatchTensors(
            batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping, layout
        )
    return Case(
        shape,
        batch,
        page,
        tuple(sorted(computed_slots - set(mapping))),
        pages * page,
        rule,
        slices,
        source=("compact", "tensor points", "rows in place", "tight", "spec")[integer(0, 4)],
        writes_ahead=bool(integer(0, 1)),
    )


def _requests(integer: Integer) -> list[tuple[int, int]]:
    """(query length, computed tokens) of each request."""
    uniform = integer(0, 3) == 0
    drafts = integer(1, 4)
    requests = []
    for _ in range(integer(0, 7)):
        kind = 3 if uniform else integer(0, 3)
        if kind == 0:  # prefill
            requests.append((integer(1, 12), 0))
        elif kind == 1:  # prefill after a cached prefix, or a later chunk
            requests.append((integer(1, 12), integer(1, 12)))
        elif kind == 2:  # decode
            requests.append((1, integer(1, 16)))
        else:  # speculative verification
            requests.append((drafts, integer(1, 16)))
    return requests


def _slices(integer: Integer, shape: BatchShape, k: int) -> tuple[str, tuple[Slice, ...]]:
    rule = (*RULES, "random")[integer(0, len(RULES))]
    multiple, cost, least = integer(2, 4), integer(0, 3), integer(1, 2)
    if rule != "random":
        try:
            return rule, split_points(
                shape,
                k,
                rule,
                multiple=multiple if rule == "aligned" else None,
                token_cost=cost,
                min_tokens=least,
            )
        except OptionError:
            rule = f"random, {rule} refused"
    points: list[int] = []
    for i in range(1, k):
        points.append(integer((points or [0])[-1] + 1, shape.padded_tokens - k + i))
    return rule, cut(shape, points)


def _block_table(
    integer: Integer, computed: list[int], seqs: list[int], page: int
) -> tuple[list[list[int]], int]:
    """Pages of each request, in no order; some begin with pages of a request before them.

    Such a page may be one that the other request fills in this very step.
    """
    count = sum(-(-seq // page) for seq in seqs) + 2
    free = list(range(count))
    Random(integer(0, 1 << 16)).shuffle(free)
    table: list[list[int]] = []
    for request, seq in enumerate(seqs):
        row = [free.pop() for _ in range(-(-seq // page))]
        if request and integer(0, 2) == 0:
            other = integer(0, request - 1)
            shared = min(computed[request], seqs[other]) // page
            row[:shared] = table[other][:shared]
        table.append(row)
    return table, count


def order(case: Case) -> list[tuple[str, int]]:
    """Writes in the order of the microbatches; each attends after its write."""
    numbers = range(len(case.slices))
    if case.writes_ahead:
        return [("write", m) for m in numbers] + [("attend", m) for m in numbers]
    return [(step, m) for m in numbers for step in ("write", "attend")]


def metadata(case: Case, piece: Slice) -> Metadata:
    """One microbatch's metadata, from the library."""
    batch = case.batch
    if case.source == "spec":
        inputs = whole_metadata(case)._asdict()
        del inputs["num_tokens"]
        (split,) = SPEC.split(inputs, case.shape, [piece])
        return Metadata(**split, num_tokens=piece.num_tokens)
    slots = None
    if case.source == "tight":
        slots = max(piece.request_stop - piece.request_start, 1)
    points = (piece.start, piece.stop)
    width = piece.width
    if case.source == "tensor points":
        points = tuple(torch.tensor(point) for point in points)
        width = case.shape.padded_tokens
    in_place = case.source == "rows in place"
    builder = MetadataBuilder(
        batch,
        width,
        request_slots=slots,
        compact=not in_place,
        shared=("block_table",) if in_place else (),
    )
    out = builder.build(batch, *points)
    return Metadata(
        out.query_start_loc,
        out.seq_lens,
        out.num_computed_tokens,
        out.block_table,
        out.slot_mapping,
        out.positions,
        out.num_tokens,
    )


def whole_metadata(case: Case) -> Metadata:
    """The batch's own metadata."""
    batch, loc = case.batch, case.batch.query_start_loc
    computed = batch.seq_lens - (loc[1:] - loc[:-1])
    return Metadata(
        loc,
        batch.seq_lens,
        computed,
        batch.block_table,
        batch.slot_mapping,
        batch.positions,
        case.shape.num_tokens,
    )


def new_cache(case: Case) -> Cache:
    """Computed slots hold numbers of their own, all others NaN."""
    slots = case.slots + 1
    writer = torch.full((slots,), 2 * EARLIER)
    key, value = torch.full((2, slots, WIDTH), torch.nan, dtype=torch.float64)
    held = torch.tensor(case.computed_slots, dtype=torch.int64)
    writer[held] = EARLIER + held
    key[held], value[held] = NUMBERS[0, held], NUMBERS[1, held]
    return Cache(writer, key, value)


def write(cache: Cache, given: Metadata, start: int) -> None:
    """Put the tokens' keys and values where the slot mapping says."""
    slots = given.slot_mapping % cache.writer.shape[0]
    token = torch.arange(start, start + len(slots))
    cache.writer[slots] = token
    cache.key[slots], cache.value[slots] = NUMBERS[0, 2048 + token], NUMBERS[1, 2048 + token]


def attend(cache: Cache, given: Metadata, page: int, start: int, rows: int) -> Reads:
    """Causal attention, aligned at the ends of query and sequence as varlen kernels do."""
    trash = cache.writer.shape[0] - 1
    if not len(given.seq_lens):
        nothing = torch.zeros(rows, dtype=torch.int64)
        empty = torch.zeros(rows, trash, dtype=torch.int64)
        return Reads(empty, nothing, nothing, torch.zeros(rows, WIDTH, dtype=torch.float64))
    row = torch.arange(rows)
    real = row < given.num_tokens
    loc = given.query_start_loc.long()
    request = torch.searchsorted(loc[1:], row, right=True).clamp(max=len(given.seq_lens) - 1)
    position = given.seq_lens[request] - (loc[request + 1] - row)
    computed = given.num_computed_tokens[request] + row - loc[request]
    j = torch.arange(given.block_table.shape[1] * page)
    slot = given.block_table[request][:, j // page].long() * page + j % page
    visible = (j <= position[:, None]) & real[:, None]
    slot = slot.where(visible, trash)
    seen = torch.zeros(rows, trash + 1, dtype=torch.int64)
    seen.scatter_(1, slot, (j + 1) * STRIDE + cache.writer[slot])
    query = NUMBERS[2, start : start + rows]
    key = cache.key[slot].where(visible[..., None], 0)
    score = (query[:, None] * key).sum(-1).where(visible, -torch.inf)
    weight = score.softmax(-1).where(visible, 0)
    output = (weight[..., None] * cache.value[slot].where(visible[..., None], 0)).sum(1)
    given_position = given.positions.expand(3, -1)[:, :rows].sum(0)
    return Reads(
        seen[:, :trash],
        (position * STRIDE + computed).where(real, 0),
        given_position.where(real, 0),
        output,
    )


def run_whole(case: Case) -> tuple[Cache, Reads]:
    cache, given = new_cache(case), whole_metadata(case)
    write(cache, given, 0)
    return cache, attend(cache, given, case.page, 0, case.shape.padded_tokens)


def run_split(case: Case, given: list[Metadata]) -> tuple[Cache, Reads]:
    cache = new_cache(case)
    reads: dict[int, Reads] = {}
    for step, m in order(case):
        piece = case.slices[m]
        if step == "write":
            write(cache, given[m], piece.start)
        else:
            reads[m] = attend(cache, given[m], case.page, piece.start, piece.width)
    parts = zip(*(reads[m] for m in sorted(reads)), strict=True)
    return cache, Reads(*(torch.cat(part) for part in parts))


def lengths_fit(case: Case, given: Metadata, piece: Slice) -> bool:
    """The requests are those of the shape: a kernel's grid and its reads of queries follow them."""
    shape, loc = microbatch_shape(case.shape, piece), given.query_start_loc.tolist()
    queries = [high - low for low, high in pairwise(loc)]
    rows = zip(queries, given.seq_lens.tolist(), given.num_computed_tokens.tolist(), strict=True)
    expected = [(q, s, s - q) for q, s in zip(shape.query_lens, shape.seq_lens, strict=True)]
    return loc[0] == 0 and [row for row in rows if row != (0, 0, 0)] == expected


def differences(case: Case) -> list[str]:
    """What differs between the split and the unsplit run."""
    given = [metadata(case, piece) for piece in case.slices]
    (whole_cache, whole), (cache, split) = run_whole(case), run_split(case, given)
    found = [
        name
        for name in ("seen", "position", "given_position")
        if not torch.equal(getattr(whole, name), getattr(split, name))
    ]
    if not torch.equal(whole_cache.writer[:-1], cache.writer[:-1]):
        found.append("cache")
    if not bool(((whole.output - split.output).abs() <= TOLERANCE).all()):
        found.append("output")
    if not all(lengths_fit(case, g, piece) for g, piece in zip(given, case.slices, strict=True)):
        found.append("lengths")
    return found
