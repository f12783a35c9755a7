"""Where batches are cut: the table of the document, ties, refusals, and what always holds."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_fx.errors import OptionError
from dbo_fx.split_points import RULES, BatchShape, Slice, cut, microbatch_shape, split_points

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "splitting.md"


def parse_requests(text: str) -> list[tuple[int, int]]:
    """`4+5` is a query of 5 tokens after 4 computed ones, `3` one of 3 after none."""
    pairs = [word.split("+") for word in text.split()]
    return [(int(pair[-1]), int(pair[0]) if len(pair) == 2 else 0) for pair in pairs]


def shape_of(requests: str, padded: int) -> BatchShape:
    pairs = parse_requests(requests)
    return BatchShape(tuple(q for q, _ in pairs), tuple(q + c for q, c in pairs), padded)


def show(shape: BatchShape, piece: Slice) -> str:
    part = microbatch_shape(shape, piece)
    pairs = zip(part.query_lens, part.seq_lens, strict=True)
    words = [f"{s - q}+{q}" if s > q else f"{q}" for q, s in pairs]
    return f"{piece.start}:{piece.stop} [{' '.join(words)}]"


def examples() -> list[list[str]]:
    """Cells of the rows of the table of examples."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index("| requests |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`").strip() for cell in row.split("|")[1:-1]] for row in table]


@pytest.mark.parametrize("row", examples(), ids=lambda row: " ".join(row[:5]).replace(" ", "-"))
def test_example_in_the_document(row: list[str]):
    requests, padded, k, rule, options, expected = row
    shape = shape_of(requests, int(padded))
    given = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", options)}
    if expected.startswith("refused"):
        with pytest.raises(OptionError, match=re.escape(expected.partition(": ")[2])):
            split_points(shape, int(k), rule, **given)
        return
    found = "  ".join(show(shape, piece) for piece in split_points(shape, int(k), rule, **given))
    assert re.sub(r" +", " ", expected) == re.sub(r" +", " ", found)


def test_document_has_an_example_of_every_rule():
    assert {row[3] for row in examples()} == set(RULES)


shapes = st.builds(
    lambda pairs, padding: BatchShape(
        tuple(q for q, _ in pairs),
        tuple(q + c for q, c in pairs),
        sum(q for q, _ in pairs) + padding,
    ),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=6),
    st.integers(0, 20),
)
cuts = given(
    shape=shapes,
    k=st.integers(1, 5),
    rule=st.sampled_from(RULES),
    multiple=st.integers(1, 5),
    token_cost=st.integers(0, 4),
    min_tokens=st.integers(1, 3),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@cuts
def test_slices_cover_the_batch_and_keep_to_the_rule(
    shape: BatchShape, k: int, rule: str, multiple: int, token_cost: int, min_tokens: int
):
    aligned = multiple if rule == "aligned" else None
    try:
        slices = split_points(
            shape, k, rule, multiple=aligned, token_cost=token_cost, min_tokens=min_tokens
        )
    except OptionError:
        return
    points = [piece.start for piece in slices[1:]]
    assert len(slices) == k
    assert (slices[0].start, slices[-1].stop) == (0, shape.padded_tokens)
    assert all(a.stop == b.start for a, b in pairwise(slices))
    assert k == 1 or min(piece.width for piece in slices) >= min_tokens
    assert sum(piece.num_tokens for piece in slices) == shape.num_tokens
    starts = shape.query_start_loc
    if rule == "request":
        assert all(point in starts or point >= shape.num_tokens for point in points)
    if rule == "aligned":
        assert all(point % multiple == 0 for point in points)
    if rule == "query_multiple":
        assert all(point % shape.query_lens[0] == 0 for point in points)
    for piece in slices:
        here = [
            r
            for r in range(shape.num_requests)
            if starts[r] < piece.stop and starts[r + 1] > piece.start
        ]
        empty = piece.request_start == piece.request_stop
        assert here == list(range(piece.request_start, piece.request_stop))
        assert empty == (piece.num_tokens == 0)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(shape=shapes, token_cost=st.integers(0, 4))
def test_balanced_is_as_balanced_as_can_be(shape: BatchShape, token_cost: int):
    if shape.padded_tokens < 2:
        return
    costs = [
        computed + i + 1 + token_cost
        for query, seq in zip(shape.query_lens, shape.seq_lens, strict=True)
        for computed in [seq - query]
        for i in range(query)
    ] + [token_cost] * (shape.padded_tokens - shape.num_tokens)
    total, middle = sum(costs), shape.padded_tokens
    wanted = min(
        range(1, shape.padded_tokens),
        key=lambda p: (abs(2 * sum(costs[:p]) - total), abs(2 * p - middle), p),
    )
    assert split_points(shape, 2, "balanced", token_cost=token_cost)[1].start == wanted


def test_midpoint_is_where_the_compiled_program_cuts():
    for total in range(4, 40):
        for k in (1, 2, 3, 4):
            slices = split_points(BatchShape((), (), total), k)
            bounds = [total * i // k for i in range(k + 1)]
            assert [(piece.start, piece.stop) for piece in slices] == list(pairwise(bounds))


def test_cut_takes_points_of_another_rank():
    shape = shape_of("3 2+5", 16)
    assert [show(shape, piece) for piece in cut(shape, [5, 12])] == [
        "0:5 [3 2+2]",
        "5:12 [4+3]",
        "12:16 []",
    ]


def test_prints_readably():
    first, second = split_points(shape_of("3 2+5", 16))
    assert str(first) == "tokens 0:8 (8 real), requests 0:2"
    assert str(second) == "tokens 8:16 (0 real), requests 2:2"


@pytest.mark.parametrize("points", [[0], [16], [9, 9], [9, 4], [-1]])
def test_points_that_do_not_ascend_inside_are_refused(points: list[int]):
    with pytest.raises(OptionError, match="wanted ascending points from 1 to 15"):
        cut(shape_of("3 5", 16), points)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "middle"}, "unknown rule 'middle'. Known: midpoint, request"),
        ({"multiple": 4}, "rule 'midpoint' has no multiple"),
        ({"k": 0}, "k=0, wanted at least 1"),
        ({"rule": "aligned", "multiple": 0}, "multiple=0, wanted at least 1"),
        ({"rule": "balanced", "token_cost": -1}, "token_cost=-1, wanted at least 0"),
        ({"min_tokens": 0}, "min_tokens=0, wanted at least 1"),
        (
            {"k": 9, "min_tokens": 2},
            "cannot make 9 microbatches, each of 2 or more of 16",
        ),
    ],
)
def test_wrong_argument_is_refused(options: dict[str, object], message: str):
    with pytest.raises(OptionError, match=message):
        split_points(shape_of("3 5", 16), **options)


@pytest.mark.parametrize(
    ("queries", "seqs", "padded", "message"),
    [
        ((1, 2), (3,), 8, "2 query lengths and 1 sequence lengths"),
        ((0,), (3,), 8, "request 0 has query length 0"),
        ((1, 4), (1, 3), 8, "request 1 has query length 4 and sequence length 3"),
        ((5, 4), (5, 4), 8, "padded_tokens=8, wanted at least the 9"),
    ],
)
def test_impossible_shape_is_refused(
    queries: tuple[int, ...], seqs: tuple[int, ...], padded: int, message: str
):
    with pytest.raises(OptionError, match=message):
        BatchShape(queries, seqs, padded)
