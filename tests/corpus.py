"""Small MoE graphs, half of which must not be split, each for a reason of its own.

Every model takes its tokens first, [T, H] or [B, S, H], split along dim `dim`, then its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dbo_fx

OPS = torch.ops.dbo_fx
GROUP = "0"
T, H, N, HEADS, EXPERTS = 8, 8, 32, 2, 4


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Seeded values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


W = noise(H, H, seed=3) * H**-0.5
GATE = noise(EXPERTS, H, seed=4)
KERNEL, WIDE_KERNEL = noise(2, 4, 3), noise(H, H, 3)


def experts(x: Tensor, inside: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """[..., H] -> [..., H] through gate, dispatch, an expert, and combine."""
    flat = x.reshape(-1, H)
    weights, ids = F.linear(flat, GATE).softmax(-1).topk(2, -1)
    rows, ids, weights = OPS.dispatch(flat, ids, weights, GROUP)
    y = inside(rows, ids) if inside is not None else F.linear(rows, W).relu()
    return OPS.combine(y * weights.sum(-1, keepdim=True), flat.shape[0], GROUP).view_as(x)


def layer(x: Tensor) -> Tensor:
    """Routed experts beside a residual."""
    return x + experts(x)


@dataclass(frozen=True)
class Case:
    """One graph.

    Attributes:
        model: The function.
        why: What a refusal says, as a pattern; None for a graph that may be split.
        at: When it is refused: `trace`, `compile`, or `call` (a test on real values).
        args: Makes the arguments.
        dim: The split dim of the first one.
        moves: It is sound because a window moves with the microbatch.
    """

    model: Callable[..., Any]
    why: str | None = None
    at: str = "compile"
    args: Callable[[], tuple[Any, ...]] = lambda: (noise(T, H),)
    dim: int = 0
    moves: bool = False

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.__name__


CASES: list[Case] = []


def case(why: str | None = None, **fields: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add a model to the corpus."""

    def add(model: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(model, why, **fields))
        return model

    return add


def batch() -> tuple[Tensor]:
    """[B, S, H]."""
    return (noise(T, 4, H),)


def table() -> tuple[Tensor, Tensor]:
    """Tokens and a table [N, H]."""
    return noise(T, H), noise(N, H, seed=2)


def cached() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a counter and a cache [N, H] with two rows in it."""
    return noise(T, H), torch.tensor([2]), torch.cat([noise(2, H, seed=2), torch.zeros(N - 2, H)])


# Sound.


@case()
def plain(x: Tensor) -> Tensor:
    return layer(layer(x))


@case(args=batch)
def batch_attention(x: Tensor) -> Tensor:
    return layer(x + F.scaled_dot_product_attention(x, x, x, is_causal=True))


@case(args=batch)
def attention_in_plain_ops(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return layer(x + scores.softmax(-1) @ x)


@case(args=batch)
def einsum_attention(x: Tensor) -> Tensor:
    scores = torch.einsum("bih,bjh->bij", x, x).softmax(-1)
    return layer(torch.einsum("bij,bjh->bih", scores, x))


@case()
def norms(x: Tensor) -> Tensor:
    return layer(F.layer_norm(F.rms_norm(x, (H,)), (H,)) + F.normalize(x, dim=-1))


@case()
def heads_by_view(x: Tensor) -> Tensor:
    q = x.view(-1, HEADS, H // HEADS).transpose(0, 1)
    return layer(q.softmax(-1).transpose(0, 1).reshape(x.shape[0], H))


@case(args=batch)
def mean_over_the_sequence(x: Tensor) -> Tensor:
    return layer(x - x.mean(1, keepdim=True))


@case(args=batch)
def cumsum_over_the_sequence(x: Tensor) -> Tensor:
    return layer(x.cumsum(1))


@case(args=table, moves=True)
def position_table(x: Tensor, positions: Tensor) -> Tensor:
    return layer(x + positions[torch.arange(x.shape[0])])


@case(args=table, moves=True)
def position_slice(x: Tensor, positions: Tensor) -> Tensor:
    return layer(x + positions[: x.shape[0]])


@case(moves=True)
def rotary_angles(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * torch.arange(H)
    return layer(x * angle.cos())


@case()
def local_index(x: Tensor) -> Tensor:
    return layer(x[torch.arange(x.shape[0]), :])


@case(args=batch)
def last_token_by_index(x: Tensor) -> Tensor:
    y = layer(x)
    return y[torch.arange(x.shape[0]), 2]


@case()
def in_place_on_a_fresh_buffer(x: Tensor) -> Tensor:
    buffer = x.new_empty(x.shape[0], 2 * H)
    buffer[:, :H].copy_(x)
    buffer[:, H:].copy_(x.sin())
    return layer(buffer.view(-1, 2, H).sum(1))


@case()
def masked_routing(x: Tensor) -> Tensor:
    scores = F.linear(x, GATE)
    keep = torch.zeros_like(scores).scatter_(1, scores.topk(1, -1)[1], 1)
    return layer(x + scores.masked_fill(keep == 0, 0).sum(-1, keepdim=True))


@case()
def one_hot_routing(x: Tensor) -> Tensor:
    ids = F.linear(x, GATE).argmax(-1)
    return layer(x + F.one_hot(ids, EXPERTS).float() @ GATE)


@case()
def experts_sorted_by_id(x: Tensor) -> Tensor:
    def grouped(rows: Tensor, ids: Tensor) -> Tensor:
        _, order = torch.sort(ids[:, 0], stable=True)
        return F.linear(rows[order], W)[torch.argsort(order)]

    return layer(experts(x, grouped))


def append(x: Tensor, counter: Tensor, cache: Tensor, compare: Callable[..., Tensor]) -> Tensor:
    """Write the rows by slot, and let every row see some slots."""
    slots = counter + torch.arange(x.shape[0])
    cache.index_copy_(0, slots, x.sin())
    seen = compare(torch.arange(N), slots[:, None])
    scores = (x @ cache.T).masked_fill(~seen, float("-inf"))
    counter.add_(x.shape[0])
    return x + scores.softmax(-1) @ cache


@case(args=cached)
def key_value_cache(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    return layer(append(x, counter, cache, torch.le))


@case(args=cached)
def counter_of_tokens(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    counter.add_(x.shape[0])
    return layer(x + cache[0])


@case(args=cached)
def step_counter(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    counter.add_(1)
    return layer(x)


@case(args=lambda: (noise(3, T, H),), dim=1)
def split_sequence_without_attention(x: Tensor) -> Tensor:
    return layer(x.flatten(0, 1)).view(x.shape)


@case(args=lambda: (noise(T, 4, 6),))
def convolution_within_a_row(x: Tensor) -> Tensor:
    return experts(F.conv1d(x, KERNEL).flatten(1))


@case()
def mixing_that_ends_inside(x: Tensor) -> Tensor:
    unused = x.mean(0)
    return layer(x + torch.zeros_like(unused))


@case()
def cat_of_the_batch_with_itself(x: Tensor) -> Tensor:
    both = torch.cat([x, x.sin()], 0).view(2, -1, H)
    return layer(both.sum(0))


torch.library.define("corpus::by_row", "(Tensor x) -> Tensor")
torch.library.define("corpus::look_back", "(Tensor x) -> Tensor")
torch.library.define("corpus::center", "(Tensor x) -> Tensor")
torch.library.define("corpus::known", "(Tensor x) -> Tensor")
torch.library.define("corpus::baked", "(Tensor x) -> Tensor")
for _name, _function in {
    "by_row": lambda x: x * x.sum(-1, keepdim=True),
    "known": lambda x: x * x.sum(-1, keepdim=True),
    "look_back": lambda x: x + F.pad(x, (0, 0, 1, 0))[:-1],
    "center": lambda x: x - x.mean(0, keepdim=True),
    "baked": lambda x: x.clone(),
}.items():
    torch.library.impl(f"corpus::{_name}", "CPU", _function)
    if _name != "baked":
        torch.library.register_fake(f"corpus::{_name}", torch.empty_like)


@torch.library.register_fake("corpus::baked")
def _baked(x: Tensor) -> Tensor:
    """Right for every size but 3, half of the batch that it is called with."""
    known = isinstance(x.shape[0], int) and x.shape[0] == 3
    return x.new_empty(4, H) if known else torch.empty_like(x)


for _name in ("by_row", "look_back", "center"):
    dbo_fx.register_local(f"corpus::{_name}")
dbo_fx.register_rule("corpus::known", dbo_fx.row_wise(dim=0))
dbo_fx.register_rule("corpus::baked", dbo_fx.elementwise)


@case()
def unknown_op_by_row(x: Tensor) -> Tensor:
    return layer(torch.ops.corpus.by_row(x))


@case()
def registered_op(x: Tensor) -> Tensor:
    return layer(torch.ops.corpus.known(x))


# Unsound.


@case("reduces dim 0")
def mean_over_the_batch(x: Tensor) -> Tensor:
    return layer(x - x.mean(0, keepdim=True))


@case("accumulates along dim 0")
def cumsum_over_the_batch(x: Tensor) -> Tensor:
    return layer(x.cumsum(0))


@case("sorts dim 0")
def sorted_batch(x: Tensor) -> Tensor:
    return layer(x.sort(0)[0])


@case("sorts dim 0")
def topk_over_tokens(x: Tensor) -> Tensor:
    """Expert choice: every expert takes its best tokens."""
    scores = F.linear(x, GATE).topk(2, 0)[0]
    return layer(x + scores.sum())


@case("normalises along dim 0")
def global_softmax(x: Tensor) -> Tensor:
    return layer(x * x.softmax(0))


@case("meets every row with every other row")
def rows_meet_rows(x: Tensor) -> Tensor:
    return layer((x @ x.T).softmax(-1) @ x)


@case("lets every row of the split dim attend to others", args=batch, dim=1)
def attention_over_the_split_dim(x: Tensor) -> Tensor:
    return layer(x + F.scaled_dot_product_attention(x, x, x, is_causal=True))


@case("takes some rows of dim 0")
def look_back_by_slices(x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]], 0)
    return layer(x + before)


@case("pads dim 0")
def look_back_by_padding(x: Tensor) -> Tensor:
    return layer(x + F.pad(x, (0, 0, 1, 0))[: x.shape[0]])


@case("turns round dim 0")
def rolled_batch(x: Tensor) -> Tensor:
    return layer(x + x.roll(1, 0))


@case("looks at neighbours along dim 2", args=lambda: (noise(4, H, T),), dim=2)
def convolution_along_the_batch(x: Tensor) -> Tensor:
    return layer(F.conv1d(x, WIDE_KERNEL, padding=1).transpose(1, 2))


@case("takes statistics of the whole batch")
def batch_norm_in_training(x: Tensor) -> Tensor:
    return layer(F.batch_norm(x, None, None, training=True))


@case("computes with the number of rows")
def batch_size_as_a_number(x: Tensor) -> Tensor:
    return layer(x / x.shape[0])


@case("draws random numbers")
def random_numbers(x: Tensor) -> Tensor:
    return layer(x + torch.rand_like(x))


@case("draws random numbers")
def dropout_in_training(x: Tensor) -> Tensor:
    return layer(F.dropout(x, 0.3, training=True))


@case("a branch or shape in the model depends on the batch size", at="call")
def branch_on_the_batch_size(x: Tensor) -> Tensor:
    return layer(x.sin() if x.shape[0] > 6 else x.cos())


@case("fixed to 8", at="trace")
def view_with_a_baked_size(x: Tensor) -> Tensor:
    return layer(x.view(T, H))


@case("Mod", at="call")
def groups_of_eight(x: Tensor) -> Tensor:
    return layer(x) if x.shape[0] % 8 == 0 else x


@case(r"baked.* has shape .*a size is baked into it", at="call", args=lambda: (noise(6, H),))
def fake_implementation_with_a_baked_size(x: Tensor) -> Tensor:
    return layer(torch.ops.corpus.baked(x))


def scratch() -> tuple[Tensor, Tensor]:
    """Tokens and a scratch buffer [H]."""
    return noise(T, H), torch.zeros(H)


@case("reduces dim 0", args=scratch)
def scratch_with_a_mean(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.copy_(x.mean(0))
    return layer(x + buffer)


@case("microbatches overwrite each other|takes one row", args=scratch)
def scratch_written_in_layer_0_and_read_in_layer_1(x: Tensor, buffer: Tensor) -> Tensor:
    x = layer(x)
    buffer.copy_(x[0])
    return layer(x + buffer)


@case("writes what .* has read", args=cached)
def cache_shared_by_two_layers(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    slots = counter + torch.arange(x.shape[0])
    for _ in range(2):
        cache.index_copy_(0, slots, x)
        seen = torch.arange(N) <= slots[:, None]
        scores = (x @ cache.T).masked_fill(~seen, float("-inf"))
        x = layer(x + scores.softmax(-1) @ cache)
    counter.add_(x.shape[0])
    return x


@case("writes what .* has read", args=cached)
def cache_read_before_it_is_written(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    slots = counter + torch.arange(x.shape[0])
    y = x + (x @ cache.T).softmax(-1) @ cache
    cache.index_copy_(0, slots, x)
    counter.add_(x.shape[0])
    return layer(y)


@case("earlier rows move", at="call", args=cached)
def cache_without_a_mask(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    return layer(append(x, counter, cache, lambda at, slots: (at >= 0) | (slots < 0)))


@case("earlier rows move", at="call", args=cached)
def cache_that_looks_one_slot_ahead(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    return layer(append(x, counter, cache, lambda at, slots: at <= slots + 1))


@case("advances a counter that is read afterwards", args=cached)
def counter_read_after_it_is_advanced(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    counter.add_(x.shape[0])
    return layer(x * counter)


@case("once per microbatch instead of once", args=cached)
def step_counter_that_rows_read(x: Tensor, counter: Tensor, cache: Tensor) -> Tensor:
    counter.add_(1)
    return layer(x * counter)


@case("decides about rows by their place")
def capacity_that_drops_tokens(x: Tensor) -> Tensor:
    def limited(rows: Tensor, ids: Tensor) -> Tensor:
        place = F.one_hot(ids[:, 0], EXPERTS).cumsum(0)
        kept = place.gather(1, ids[:, :1]) <= 2
        return F.linear(rows, W) * kept

    return layer(experts(x, limited))


@case("reduces dim 0")
def batch_mean_inside_the_experts(x: Tensor) -> Tensor:
    return layer(experts(x, lambda rows, ids: rows - rows.mean(0, keepdim=True)))


@case("accumulates along dim 0|decides")
def capacity_before_dispatch(x: Tensor) -> Tensor:
    chosen = F.one_hot(F.linear(x, GATE).argmax(-1), EXPERTS)
    return layer(x * ((chosen.cumsum(0) * chosen).sum(-1, keepdim=True) <= 2))


@case("takes one row of dim 0")
def in_place_on_one_row(x: Tensor) -> Tensor:
    y = x.clone()
    y[0].zero_()
    return layer(y)


@case("takes some rows of dim 0")
def in_place_experts_on_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[: x.shape[0] // 2].mul_(2)
    return layer(y)


@case("is used as an index|counts from the microbatch's own start|meets every row")
def place_in_the_microbatch(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[0])
    return layer(x * (at[:, None] >= at[None, :]).sum(1, keepdim=True))


def coarse() -> tuple[Tensor, Tensor]:
    """Tokens, and lengths [1] that are kept once for the whole batch, not per microbatch."""
    return noise(T, H), torch.tensor([float(T)])


@case("the microbatches overwrite each other", args=coarse)
def metadata_under_too_coarse_a_key(x: Tensor, lengths: Tensor) -> Tensor:
    lengths.fill_(x.shape[0])
    return layer(x / lengths)


@case("cannot be put together from microbatches")
def loss_over_the_batch(x: Tensor) -> Any:
    y = layer(x)
    return y, y.square().mean()


@case("moves? when the contents of|looks? back|rows move", at="call")
def unknown_op_that_looks_back(x: Tensor) -> Tensor:
    return layer(torch.ops.corpus.look_back(x))


@case("rows move", at="call")
def unknown_op_that_centers(x: Tensor) -> Tensor:
    return layer(torch.ops.corpus.center(x))


@case("in several places", args=lambda: (noise(3, T, H),), dim=1)
def output_with_interleaved_rows(x: Tensor) -> Tensor:
    return layer(x.flatten(0, 1)).T.contiguous()


@case("takes one row of dim 0")
def last_row_of_the_batch(x: Tensor) -> Tensor:
    return layer(x + x[-1])
