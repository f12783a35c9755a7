"""The ops that put rows into blocks for an all-to-all, and take them out again.

`pack` puts the rows that a rank's experts need into that rank's block, together with their routing,
so that one launch carries everything. `unpack` takes what comes back out of the blocks and adds it
up in the order of the tokens. Neither uses atomics, and both are made of plain ops: in a graph each
is one call, which a compiler of segments takes apart and fuses.

Empty slots hold bits that are NaN in every floating-point type, and no expert id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dbo_fx.errors import UnsupportedGraphError

UNIT = 1024  # Capacities are counted in 1/1024 rows per token, so that they need no floats.
NOWHERE, LOST, SPOILT = -1, -2, -3
_WORD = torch.int32  # NCCL carries no 16-bit integers.
_ALIGN = 4  # A packed row is a multiple of 16 bytes.
_SCHEMAS = (
    "pack(Tensor x, Tensor ids, Tensor weights, bool once, int ranks, int experts, int share,"
    " int rows) -> (Tensor, Tensor, Tensor)",
    "unpack(Tensor y, Tensor places, Tensor? weights) -> Tensor",
    "note_overflow(Tensor(a!) counter, Tensor lost) -> ()",
)


def words_of(elements: int, dtype: torch.dtype) -> int:
    """How many words so many elements fill.

    Raises:
        UnsupportedGraphError: They do not fill whole words.
    """
    size = elements * dtype.itemsize
    if size % _WORD.itemsize:
        raise UnsupportedGraphError(
            f"pack: a row of {elements} {dtype} elements is {size} bytes, wanted a multiple of "
            f'{_WORD.itemsize}. Use an even hidden size, or routing="all_gather".'
        )
    return size // _WORD.itemsize


def wide_type(weights: torch.dtype, rows: torch.dtype) -> torch.dtype:
    """A type of whole words that holds the weights exactly, no narrower than 64-bit rows."""
    wide = torch.promote_types(weights, torch.float32)
    return torch.promote_types(wide, rows) if rows.itemsize > _WORD.itemsize else wide


def pack(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    once: bool,
    ranks: int,
    experts: int,
    share: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Put rows into one block for every rank.

    (1) Find the rank of each choice. (2) Number the rows of a block in the order of the tokens;
    in the worst case every token has a place of its own and nothing is counted. (3) Invert that:
    which choice is in which slot. (4) Gather rows and routing as integers, whose bits no compiler
    rounds.

    Args:
        x: [T, H] rows.
        ids: [T, K] experts of each row, counted over all ranks; others than 0..E-1 go nowhere.
        weights: [T, K]; they travel with a row that goes once to a rank. Otherwise they stay, and
            are named here so that they are made before the rows leave, not in a piece of their own.
        once: A row goes once to each rank, not once for each choice.
        ranks: R.
        experts: E, a multiple of R.
        share: Capacity in 1/1024 rows per token.
        rows: Capacity in rows, added to that.

    Returns:
        Blocks [R, C, W] of words; the slot [T, K] of each choice in them, -1 where it needs none,
        -2 where it found no room, and -3 where its weight is NaN, so that its token is lost
        already and takes no room; and how many found no room, as a scalar.
    """
    top_k, local = ids.shape[1], experts // ranks
    places, capacity = _places(ids, weights, once, ranks, local, share, rows)
    # One slot more takes what does not travel; nobody reads it.
    slots = torch.where(places >= 0, places, ranks * capacity).flatten()
    empty = torch.full((ranks * capacity + 1,), -1, dtype=torch.int64, device=ids.device)
    choices = torch.arange(ids.shape[0] * top_k, device=ids.device)
    choice = empty.scatter(0, slots, choices).narrow(0, 0, ranks * capacity)
    filled, choice = choice >= 0, choice.clamp_min(0)
    token = choice // top_k
    parts = [_words(x)[token]]
    if once:
        rank = torch.arange(ranks, device=ids.device).unsqueeze(1).expand(-1, capacity).flatten()
        chosen = ids[token]
        there = _is_routed(chosen, experts) & (chosen // local == rank.unsqueeze(1))
        wide = weights.to(wide_type(weights.dtype, x.dtype))
        parts += [_words(wide)[token], torch.where(there, chosen % local, -1).to(_WORD)]
    else:
        parts.append((ids.flatten()[choice] % local).to(_WORD).unsqueeze(1))
    missing = -sum(part.shape[1] for part in parts) % _ALIGN
    if missing:
        parts.append(parts[-1][:, :1].expand(-1, missing))
    packed = torch.where(filled.unsqueeze(1), torch.cat(parts, 1), -1)
    return torch.unflatten(packed, 0, (ranks, -1)), places, (places == LOST).sum()


def _places(
    ids: Tensor, weights: Tensor, once: bool, ranks: int, local: int, share: int, rows: int
) -> tuple[Tensor, int]:
    """The slot of each choice [T, K], and the rows of a block."""
    tokens, top_k = ids.shape
    spoilt = weights.isnan()
    wanted = _is_routed(ids, ranks * local) & ~spoilt
    to = torch.where(wanted, ids // local, ranks)
    if once:  # The first of a token's choices on a rank takes the row there.
        numbers = torch.arange(top_k, device=ids.device)
        before = numbers.unsqueeze(0) < numbers.unsqueeze(1)
        wanted = wanted & ~((to.unsqueeze(2) == to.unsqueeze(1)) & before).any(-1)
    worst = 1 if once else top_k
    if share >= worst * UNIT:
        capacity = tokens * worst
        choices = torch.arange(tokens * top_k, device=ids.device)
        place = (choices // top_k if once else choices).view_as(ids)
    else:
        capacity = (tokens * share + UNIT - 1) // UNIT + rows
        place = _counted(to, wanted, ranks)
    nowhere = torch.where(spoilt, SPOILT, torch.where(wanted, LOST, NOWHERE))
    return torch.where(wanted & (place < capacity), to * capacity + place, nowhere), capacity


def _is_routed(ids: Tensor, experts: int) -> Tensor:
    return (ids >= 0) & (ids < experts)


def _counted(to: Tensor, wanted: Tensor, ranks: int) -> Tensor:
    """How many earlier rows go where each choice goes: [T, K]."""
    numbers = torch.arange(ranks, device=to.device).unsqueeze(1)
    goes = (to.flatten() == numbers) & wanted.flatten()
    counts = goes.to(torch.int64).cumsum(1)
    mine = counts.gather(0, to.flatten().clamp_max(ranks - 1).unsqueeze(0))
    return mine.view_as(to) - 1


def _words(x: Tensor) -> Tensor:
    words_of(x.shape[1], x.dtype)
    return x.contiguous().view(_WORD)


def unpack(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Add up what came back for every token, choice by choice.

    Args:
        y: [R, C, H] what each rank's experts made of their block.
        places: [T, K] from `pack`.
        weights: [T, K] a factor for each choice, or None.

    Returns:
        [T, H]; NaN for a token one of whose rows did not travel. Other slots are not read.
    """
    rows, exact = y.flatten(0, 1), torch.promote_types(y.dtype, torch.float32)
    total: Tensor | None = None
    for k in range(places.shape[1]):
        place = places.select(1, k).unsqueeze(1)
        row = rows[place.squeeze(1).clamp_min(0)].to(exact)
        if weights is not None:
            row = row * weights.select(1, k).unsqueeze(1)
        nothing = torch.where(place <= LOST, torch.nan, 0.0).to(row.dtype)
        row = torch.where(place >= 0, row, nothing)
        total = row if total is None else total + row
    assert total is not None
    return total.to(y.dtype)


def note_overflow(counter: Tensor, lost: Tensor) -> None:
    """Add to a counter on the device.

    Args:
        counter: [1] integers, written in place. The order of such additions does not matter.
        lost: A scalar.
    """
    counter.add_(lost)


def _register(library: Any) -> None:
    for schema in _SCHEMAS:
        library.define(schema)
    for function in (pack, unpack, note_overflow):
        library.impl(function.__name__, function, "CompositeImplicitAutograd")


# The registrations live as long as this object.
_LIBRARY = torch.library.Library("dbo_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_register(_LIBRARY)
