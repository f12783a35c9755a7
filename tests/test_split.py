"""SplitSpec: every kind, both ways through its text, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbo_fx.errors import OptionError, SoundnessError
from dbo_fx.split import KINDS, SplitSpec
from dbo_fx.split_points import BatchShape, cut, split_points

# Queries of 3, 5, 1 and 1 tokens after 0, 4, 6 and 1; two tokens of padding. Cut inside request 1.
SHAPE = BatchShape((3, 5, 1, 1), (3, 9, 7, 2), 12)
HALVES = split_points(SHAPE, 2)


def split(kind: Any, value: Any, pieces: Any = HALVES) -> list[Any]:
    spec = SplitSpec.parse({"x": kind})
    return [part["x"] for part in spec.split({"x": value}, SHAPE, pieces)]


def lists(kind: Any, value: Any, pieces: Any = HALVES) -> list[Any]:
    return [part.tolist() for part in split(kind, value, pieces)]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("token", range(12), [[*range(6)], [*range(6, 12)]]),
        ("token:0", range(12), [[*range(6)], [*range(6, 12)]]),
        ("positions", range(12), [[*range(6)], [*range(6, 12)]]),
        ("request", [10, 11, 12, 13], [[10, 11], [11, 12, 13]]),
        ("request", [10, 11, 12, 13, 0, 0], [[10, 11], [11, 12, 13]]),
        ("offsets", range(14), [[*range(14)], [*range(6, 14)]]),
        ("cu_seqlens", [0, 3, 8, 9, 10], [[0, 3, 6], [0, 2, 3, 4]]),
        ("cu_seqlens", [0, 3, 8, 9, 10, 10], [[0, 3, 6], [0, 2, 3, 4]]),
        ("seq_lens", [3, 9, 7, 2], [[3, 7], [9, 7, 2]]),
        ("query_lens", [3, 5, 1, 1], [[3, 3], [2, 1, 1]]),
        ("computed_lens", [0, 4, 6, 1], [[0, 4], [7, 6, 1]]),
        (
            "block_table",
            [[1, 2], [3, 4], [5, 6], [7, 8]],
            [[[1, 2], [3, 4]], [[3, 4], [5, 6], [7, 8]]],
        ),
        ("slot_mapping", range(12), [[*range(6)], [6, 7, 8, 9, -1, -1]]),
        ("slot_mapping", range(10), [[*range(6)], [6, 7, 8, 9, -1, -1]]),
    ],
)
def test_tensor_kind(kind: str, value: Any, expected: list[Any]):
    tensor = torch.tensor(list(value))
    before = tensor.clone()
    assert lists(kind, tensor) == expected
    assert torch.equal(tensor, before)


def test_one_request_in_three_microbatches():
    pieces = cut(SHAPE, [4, 6])
    assert lists("query_lens", torch.tensor([3, 5, 1, 1]), pieces) == [[3, 1], [2], [2, 1, 1]]
    assert lists("seq_lens", torch.tensor([3, 9, 7, 2]), pieces) == [[3, 5], [7], [9, 7, 2]]
    assert lists("computed_lens", torch.tensor([0, 4, 6, 1]), pieces) == [[0, 4], [5], [7, 6, 1]]
    assert lists("cu_seqlens", torch.tensor([0, 3, 8, 9, 10]), pieces) == [
        [0, 3, 4],
        [0, 2],
        [0, 2, 3, 4],
    ]


def test_microbatch_in_the_padding_has_no_request():
    pieces = cut(SHAPE, [10])
    assert lists("cu_seqlens", torch.tensor([0, 3, 8, 9, 10]), pieces)[1] == [0]
    assert lists("seq_lens", torch.tensor([3, 9, 7, 2]), pieces)[1] == []
    assert lists("slot_mapping", torch.arange(12), pieces)[1] == [-1, -1]
    assert lists("token", torch.arange(12), pieces)[1] == [10, 11]
    assert split("per_request_list", ["a", "b", "c", "d"], pieces)[1] == []


def test_both_layouts_of_positions():
    flat = torch.arange(12)
    stacked = torch.stack([flat, flat + 100, flat + 200])
    assert [p.shape for p in split("positions", flat)] == [(6,), (6,)]
    first, second = split("positions", stacked)
    assert torch.equal(first, stacked[:, :6])
    assert torch.equal(second, stacked[:, 6:])
    assert second.is_contiguous()


def test_other_dims():
    value = torch.arange(36).reshape(3, 12)
    assert torch.equal(split("token:1", value)[1], value[:, 6:])
    assert torch.equal(split("token:-1", value)[1], value[:, 6:])
    table = torch.arange(8).reshape(2, 4)
    assert torch.equal(split("request:1", table)[1], table[:, 1:])


def test_dim_0_is_a_view():
    value = torch.arange(12)
    first, second = split("token", value)
    assert first.data_ptr() == value.data_ptr()
    assert second.data_ptr() == value.data_ptr() + 6 * value.element_size()


def test_per_request_list_keeps_its_type():
    assert split("per_request_list", ["a", "b", "c", "d"]) == [["a", "b"], ["b", "c", "d"]]
    assert split("per_request_list", ("a", "b", "c", "d"))[0] == ("a", "b")


@pytest.mark.parametrize("kind", ["static", "replicated"])
def test_whole_values_are_the_same_objects(kind: str):
    caches = [torch.zeros(4), torch.zeros(4)]
    assert all(part is caches for part in split(kind, caches))


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "function"])
def test_none_stays_none(kind: str):
    assert split(kind, None) == [None, None]


def test_function_sees_batch_and_slice():
    assert split(lambda value, batch, piece: (value, batch.num_tokens, piece.start), "v") == [
        ("v", 10, 0),
        ("v", 10, 6),
    ]


def test_input_without_a_kind_is_an_error():
    spec = SplitSpec.parse({"input_ids": "token"})
    with pytest.raises(OptionError) as error:
        spec.split({"input_ids": torch.arange(12), "lora_ids": None, "more": 1}, SHAPE, HALVES)
    assert "no kind for input 'lora_ids' (nor for ['more'])" in str(error.value)
    assert all(kind in str(error.value) for kind in KINDS)


def test_input_of_the_spec_may_be_left_out():
    spec = SplitSpec.parse({"input_ids": "token", "deepstack": "token:1"})
    parts = spec.split({"input_ids": torch.arange(12)}, SHAPE, HALVES)
    assert [list(part) for part in parts] == [["input_ids"], ["input_ids"]]


def own(value: Any, batch: Any, piece: Any) -> Any:
    return value


def test_prints_and_parses():
    mapping = {"input_ids": "token", "rope": "offsets:1", "kv_cache": "static", "masks": own}
    spec = SplitSpec.parse(mapping)
    assert str(spec) == (
        "input_ids  token:0\nrope       offsets:1\nkv_cache   static\nmasks      function:own"
    )
    assert SplitSpec.parse(spec.as_mapping()) == spec


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tokens", "input 'x': unknown kind 'tokens'. Did you mean 'token'?"),
        ("nonsense", "Known: token:DIM, request:DIM, positions"),
        (None, "unknown kind None"),
        ("static:0", "'static' has no dim, drop :0"),
        ("token:first", "'first' is no dim"),
        ("token:", "'' is no dim"),
        ("function:own", "wanted the function itself"),
    ],
)
def test_wrong_kind_is_refused(kind: Any, message: str):
    with pytest.raises(OptionError) as error:
        SplitSpec.parse({"x": kind})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("token", torch.zeros(11), "found size 11, wanted 12"),
        ("token:1", torch.zeros(12), "found 1 dims, wanted a dim 1"),
        ("token", [1] * 12, "found list, wanted a tensor"),
        ("request", torch.zeros(3), "found size 3, wanted at least 4"),
        ("offsets", torch.zeros(11), "found size 11, wanted at least 12"),
        ("cu_seqlens", torch.zeros(4), "found size 4, wanted at least 5"),
        ("cu_seqlens", torch.zeros(5, 1), "found 2 dims, wanted 1"),
        ("seq_lens", torch.zeros(3), "found size 3, wanted at least 4"),
        ("block_table", torch.zeros(4), "found 1 dims, wanted 2"),
        ("slot_mapping", torch.zeros(11), "found size 11, wanted 10 or 12"),
        ("positions", torch.zeros(2, 2, 12), "found 3 dims, wanted 1 or 2"),
        ("per_request_list", ["a"], "found list of 1, wanted a list or tuple of 4"),
        ("per_request_list", torch.zeros(4), "found Tensor of 4, wanted a list or tuple of 4"),
    ],
)
def test_value_that_does_not_fit_its_kind_is_refused(kind: str, value: Any, message: str):
    with pytest.raises(SoundnessError) as error:
        split(kind, value)
    assert f"input 'x', kind {kind}" in str(error.value)
    assert message in str(error.value)


def test_static_inputs_must_not_move():
    spec = SplitSpec.parse({"kv_caches": "static", "x": "token"})
    caches = [torch.zeros(4), torch.zeros(4)]
    addresses = spec.static_addresses({"kv_caches": caches, "x": torch.zeros(12)})
    spec.check_static({"kv_caches": caches}, addresses)
    with pytest.raises(SoundnessError, match="static input 'kv_caches' lies at"):
        spec.check_static({"kv_caches": [caches[0], torch.zeros(4)]}, addresses)
    with pytest.raises(SoundnessError, match="'kv_caches'"):
        spec.check_static({}, addresses)


def test_document_lists_every_kind():
    document = Path(__file__).resolve().parent.parent / "docs" / "splitting.md"
    text = document.read_text(encoding="utf-8")
    for kind, meaning in KINDS.items():
        assert f"| {meaning} |" in text, kind
