"""Metadata per microbatch: right values, in place, without asking the device."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_fx.batch_metadata import PAD_SLOT, BatchTensors, MetadataBuilder, MicrobatchTensors
from dbo_fx.errors import OptionError
from dbo_fx.split_points import cut
from paged_attention import make_case

aten = torch.ops.aten
# Ops whose result or shape must be known to the host, and those that bring a value from it.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_unique2",
    "aten::repeat_interleave",
    "aten::scalar_tensor",
    "aten::lift_fresh",
    "aten::_to_copy",
}


class NoWait(TorchDispatchMode):
    """Refuses ops that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in WAITS, name
        self.ops.append(name)
        return func(*args, **(kwargs or {}))


def batch(device: str = "cpu") -> BatchTensors:
    """Queries of 3, 5, 1 and 1 tokens, two idle slots, two tokens of padding."""
    tensors = BatchTensors(
        query_start_loc=torch.tensor([0, 3, 8, 9, 10, 10, 10], dtype=torch.int32),
        seq_lens=torch.tensor([3, 9, 7, 2, 0, 0], dtype=torch.int32),
        block_table=torch.arange(12, dtype=torch.int32).reshape(6, 2) + 1,
        slot_mapping=torch.arange(20, 32),
        positions=torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 6, 1, 77, 77]),
    )
    return BatchTensors(*(getattr(tensors, f.name).to(device) for f in fields(tensors)))


def values(out: MicrobatchTensors) -> dict[str, object]:
    return {
        f.name: value.tolist() for f in fields(out) if (value := getattr(out, f.name)) is not None
    }


def test_both_halves_of_a_straddling_request():
    first, second = (MetadataBuilder(batch(), 6) for _ in range(2))
    assert values(first.build(batch(), 0, 6)) == {
        "token_range": [0, 6],
        "num_tokens": 6,
        "query_start_loc": [0, 3, 6, 6, 6, 6, 6],
        "seq_lens": [3, 7, 0, 0, 0, 0],
        "num_computed_tokens": [0, 4, 0, 0, 0, 0],
        "block_table": [[1, 2], [3, 4], [0, 0], [0, 0], [0, 0], [0, 0]],
        "slot_mapping": [20, 21, 22, 23, 24, 25],
        "positions": [0, 1, 2, 4, 5, 6],
    }
    assert values(second.build(batch(), 6, 12)) == {
        "token_range": [6, 12],
        "num_tokens": 4,
        "query_start_loc": [0, 2, 3, 4, 4, 4, 4],
        "seq_lens": [9, 7, 2, 0, 0, 0],
        "num_computed_tokens": [7, 6, 1, 0, 0, 0],
        "block_table": [[3, 4], [5, 6], [7, 8], [0, 0], [0, 0], [0, 0]],
        "slot_mapping": [26, 27, 28, 29, PAD_SLOT, PAD_SLOT],
        "positions": [7, 8, 6, 1, 0, 0],
    }


def test_rows_in_place_keep_their_requests_and_may_share_the_block_table():
    given = batch()
    builder = MetadataBuilder(given, 6, compact=False, shared=["block_table"])
    out = builder.build(given, 6, 12)
    assert out.query_start_loc.tolist() == [0, 0, 2, 3, 4, 4, 4]
    assert out.seq_lens.tolist() == [0, 9, 7, 2, 0, 0]
    assert out.block_table is given.block_table
    with pytest.raises(OptionError, match="block_table is shared"):
        builder.build(batch(), 6, 12)


def test_microbatch_in_the_padding_has_no_query():
    out = MetadataBuilder(batch(), 2).build(batch(), 10, 12)
    assert out.num_tokens.item() == 0
    assert not out.query_start_loc.any()
    assert not out.seq_lens.any()
    assert not out.num_computed_tokens.any()
    assert out.slot_mapping.tolist() == [PAD_SLOT] * 2


def test_every_microbatch_has_buffers_of_its_own():
    given = batch()
    outs = [MetadataBuilder(given, 6).build(given, s, s + 6) for s in (0, 6)]
    storages = [
        {getattr(out, f.name).untyped_storage().data_ptr() for f in fields(out)}
        for out in (*outs, given)
    ]
    assert not storages[0] & storages[1]
    assert not (storages[0] | storages[1]) & storages[2]


def test_addresses_stay_over_100_steps_and_no_value_lingers():
    builder, addresses = None, None
    for step in range(100):
        case = make_case(Random(step).randint)
        given = padded(case.batch)
        builder = builder or MetadataBuilder(given, 128)
        piece = case.slices[step % len(case.slices)]
        out = builder.build(given, torch.tensor(piece.start), torch.tensor(piece.stop))
        addresses = addresses or out.addresses()
        assert out.addresses() == addresses
        fresh = MetadataBuilder(given, 128).build(given, piece.start, piece.stop)
        assert values(out) == values(fresh)


def padded(given: BatchTensors) -> BatchTensors:
    """The same batch in the buffers of one bucket: 10 request slots, 64 pages, 128 tokens."""

    def grow(tensor: torch.Tensor, *shape: int, fill: int = 0) -> torch.Tensor:
        big = tensor.new_full(shape, fill)
        big[tuple(slice(size) for size in tensor.shape)] = tensor
        return big

    last = int(given.query_start_loc[-1])
    return BatchTensors(
        grow(given.query_start_loc, 11, fill=last),
        grow(given.seq_lens, 10),
        grow(given.block_table, 10, 64),
        grow(given.slot_mapping, 128, fill=PAD_SLOT),
        grow(given.positions if given.positions.dim() == 1 else given.positions[0], 128),
    )


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("tensor_points", [True, False])
def test_nothing_passes_through_the_host(compact: bool, tensor_points: bool):
    given = batch()
    slots = 4 if compact else None
    builder = MetadataBuilder(given, 8, request_slots=slots, compact=compact)
    points = (torch.tensor(2), torch.tensor(9)) if tensor_points else (2, 9)
    with NoWait() as mode:
        builder.build(given, *points)
    assert mode.ops
    # The mode does see what it is there to refuse.
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWait():
        given.seq_lens[0].item()
    with pytest.raises(AssertionError, match="nonzero"), NoWait():
        given.seq_lens.nonzero()
    with pytest.raises(AssertionError, match="scalar_tensor"), NoWait():
        given.seq_lens.where(given.seq_lens > 0, 0)


def test_builds_the_same_ops_whatever_the_values():
    traces = []
    given = batch()
    for points in ((0, 1), (3, 8), (10, 12)):
        builder = MetadataBuilder(given, 6)
        with NoWait() as mode:
            builder.build(given, *points)
        traces.append(mode.ops)
    assert traces[0] == traces[1] == traces[2]


def test_engine_without_paged_cache_or_positions():
    given = BatchTensors(batch().query_start_loc, batch().seq_lens)
    out = MetadataBuilder(given, 6).build(given, 0, 6)
    assert (out.block_table, out.slot_mapping, out.positions) == (None, None, None)
    assert out.seq_lens.tolist() == [3, 7, 0, 0, 0, 0]


def test_tight_request_slots_hold_just_the_requests_of_the_slice():
    out = MetadataBuilder(batch(), 4, request_slots=2).build(batch(), 8, 12)
    assert out.query_start_loc.tolist() == [0, 1, 2]
    assert out.seq_lens.tolist() == [7, 2]


def test_more_requests_than_slots_is_found_on_the_device():
    builder = MetadataBuilder(batch(), 6, request_slots=1)
    with pytest.raises(RuntimeError, match="more than its slots hold"):
        builder.build(batch(), 0, 6)


@pytest.mark.parametrize("points", [(-1, 3), (4, 3), (0, 7), (7, 13)])
def test_points_outside_are_found_on_either_side(points: tuple[int, int]):
    builder = MetadataBuilder(batch(), 6)
    with pytest.raises(OptionError, match="tokens"):
        builder.build(batch(), *points)
    with pytest.raises(RuntimeError, match="not in the batch"):
        builder.build(batch(), *map(torch.tensor, points))


def test_another_bucket_needs_another_builder():
    builder = MetadataBuilder(batch(), 6)
    with pytest.raises(OptionError, match="one builder per bucket"):
        builder.build(replace(batch(), slot_mapping=torch.zeros(16, dtype=torch.int64)), 0, 6)


@pytest.mark.parametrize("point", [torch.tensor([1]), torch.tensor(1.0)])
def test_point_must_be_a_0_dim_integer(point: torch.Tensor):
    with pytest.raises(OptionError, match="0-dim integer"):
        MetadataBuilder(batch(), 6).build(batch(), point, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": torch.zeros(5, dtype=torch.int32)}, "query_start_loc has shape"),
        ({"block_table": torch.zeros(5, 2, dtype=torch.int32)}, "block_table has shape"),
        ({"positions": torch.zeros(12)}, "wanted integers"),
        ({"positions": torch.zeros(3, 11, dtype=torch.int64)}, "the last one of 12 tokens"),
        ({"slot_mapping": torch.zeros(1, 12, dtype=torch.int64)}, "slot_mapping has shape"),
    ],
)
def test_batch_that_does_not_fit_itself_is_refused(change: dict[str, torch.Tensor], message: str):
    with pytest.raises(OptionError, match=message):
        MetadataBuilder(replace(batch(), **change), 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": ["block_table"]}, "only with compact=False"),
        ({"shared": ["seq_lens"], "compact": False}, "Only block_table"),
        ({"request_slots": 2, "compact": False}, "without compact"),
        ({"request_slots": 0}, "at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str):
    with pytest.raises(OptionError, match=message):
        MetadataBuilder(batch(), 6, **options)


@pytest.mark.gpu
def test_captured_once_and_replayed_with_other_batches():
    shown = padded(make_case(Random(0).randint).batch)
    live = BatchTensors(*(getattr(shown, f.name).cuda() for f in fields(shown)))
    points = torch.zeros(3, dtype=torch.int64, device="cuda")
    builders = [MetadataBuilder(live, 128) for _ in range(2)]

    def build() -> None:
        for m, builder in enumerate(builders):
            builder.build(live, points[m], points[m + 1])

    build()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build()
    for number in range(1, 50):
        case = make_case(Random(number).randint)
        given = padded(case.batch)
        for field in fields(given):
            getattr(live, field.name).copy_(getattr(given, field.name))
        pieces = cut(case.shape, [case.slices[0].stop])
        bounds = [0, pieces[0].stop, pieces[1].stop]
        points.copy_(torch.tensor(bounds))
        graph.replay()
        for builder, piece in zip(builders, pieces, strict=True):
            expected = MetadataBuilder(given, 128).build(given, piece.start, piece.stop)
            assert values(builder.out) == values(expected)
