"""The ops that models call, in one piece, and their fakes.

Which transport carries them is told in `plain.py`; the compiler replaces them by halves (`ops.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.batched import ByCollectives
from dbo_fx.comm.buffers import buffers, comm_buffers
from dbo_fx.comm.expert_layouts import Batched, kind_of
from dbo_fx.comm.plain import plain_carrier
from dbo_fx.errors import CommunicationError

SCHEMAS = (
    "dispatch(Tensor x, Tensor ids, Tensor weights, str group, int? num_experts=None)"
    " -> (Tensor, Tensor, Tensor)",
    "dispatch_fp8(Tensor x, Tensor scales, Tensor ids, Tensor weights, str group,"
    " int? num_experts=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "dispatch_batched(Tensor x, Tensor ids, str group, int max_tokens, int num_experts,"
    " bool fp8=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "combine_batched(Tensor y, Tensor ids, Tensor weights, Tensor src, Tensor ranges, str group,"
    " int max_tokens, int num_experts) -> Tensor",
    "combine(Tensor y, SymInt num_tokens, str group) -> Tensor",
)


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, group: str, num_experts: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring tokens to the ranks of their experts, with their routing.

    Args:
        x: [T, H] tokens of this rank; T must be the same on every rank.
        ids: [T, K] experts of each token, counted over all ranks.
        weights: [T, K] weights of these experts.
        group: Name of the process group of R ranks.
        num_experts: E. Transports that send a token only where it is wanted need it.

    Returns:
        The same three tensors with [R*T, ...] rows. Collectives bring every rank's rows, rank 0's
        first. Other transports bring those that have an expert here, in any order; the rest is
        garbage. Ids of garbage, and of experts elsewhere, are numbers of no expert of this rank.
    """
    x, ids, weights = run((x, ids, weights), "all_gather", group)
    return x, ids, weights


def dispatch_fp8(
    x: Tensor,
    scales: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    num_experts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bring tokens that were cast to float8 to the ranks of their experts.

    Args:
        x: [T, H] float8_e4m3fn, see `expert_layouts.quantised`.
        scales: [T, H / 128].
        ids: As for `dispatch`.
        weights: As for `dispatch`.
        group: As for `dispatch`.
        num_experts: As for `dispatch`.

    Returns:
        The same four tensors with [R*T, ...] rows, as `dispatch` returns them.
    """
    x, scales, ids, weights = run((x, scales, ids, weights), "all_gather", group)
    return x, scales, ids, weights


def combine(y: Tensor, num_tokens: int, group: str) -> Tensor:
    """Sum the ranks' contributions and keep those for this rank's tokens.

    Args:
        y: [R*T, H] contributions of this rank's experts to the rows that its dispatch returned.
        num_tokens: T, the tokens of this rank.
        group: Name of the process group of R ranks.

    Returns:
        [T, H] sums.

    Raises:
        CommunicationError: `y` does not have R*T rows.
    """
    wanted = num_tokens * groups.world_size(group)
    if y.shape[0] != wanted:
        raise CommunicationError(
            f"combine over group {group!r}: y has {y.shape[0]} rows, wanted {wanted} "
            f"({groups.world_size(group)} ranks of {num_tokens} tokens). Pass num_tokens of the "
            "dispatch that this combine belongs to."
        )
    return run((y,), "reduce_scatter_sum", group)[0]


def dispatch_batched(
    x: Tensor, ids: Tensor, group: str, max_tokens: int, num_experts: int, fp8: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring tokens to their experts: each expert of this rank has rows of its own.

    Args:
        x: [T, H] tokens of this rank, T <= M; T must be the same on every rank.
        ids: [T, K] experts of each token, counted over all ranks; -1 for none.
        group: Name of the process group of R ranks.
        max_tokens: M, the same on every rank.
        num_experts: E; R divides it.
        fp8: Send float8 with a float32 scale for 128 values.

    Returns:
        rows [E/R, R*M, H], scales [E/R, R*M, H / 128 or 0], counts [E/R]: expert e has `counts[e]`
        rows, those behind are garbage. And src, ranges, which `combine_batched` wants.

    Raises:
        CommunicationError: R does not divide E, or T > M.
    """
    exchange = Batched(max_tokens, num_experts, fp8).dispatch()
    rows, scales, counts, src, ranges = run((x, ids), exchange, group)
    return rows, scales, counts, src, ranges


def combine_batched(
    y: Tensor,
    ids: Tensor,
    weights: Tensor,
    src: Tensor,
    ranges: Tensor,
    group: str,
    max_tokens: int,
    num_experts: int,
) -> Tensor:
    """Bring what the experts made of a token back, weighted and summed.

    Args:
        y: [E/R, R*M, H], every row where `dispatch_batched` had it.
        ids: [T, K] as given to the dispatch.
        weights: [T, K] float32.
        src: From the dispatch.
        ranges: From the dispatch.
        group: Name of the process group of R ranks.
        max_tokens: M.
        num_experts: E.

    Returns:
        [T, H].

    Raises:
        CommunicationError: The sizes are not those of a dispatch.
    """
    exchange = Batched(max_tokens, num_experts).combine()
    return run((y, ids, weights, src, ranges), exchange, group)[0]


def run(inputs: Sequence[Tensor], collective: str, group: str) -> list[Tensor]:
    """Do a collective or exchange to its end; it is a region of its own to its transport."""
    outputs = comm_buffers(inputs, collective, group)
    transport = plain_carrier(inputs[0].device.type, group)
    # Nobody knows what stood before it: perhaps the replay of a graph.
    transport.begin(group)
    if kind_of(collective) == "batched":
        run = ByCollectives(transport, group, None, collective)
        run.launch(inputs, outputs, collective).finish(outputs)
        return outputs
    launched = transport.launch(inputs, outputs, collective, group, None, collective)
    transport.finish(launched, outputs)
    return outputs


def _fake_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, group: str, num_experts: int | None = None
) -> tuple[Tensor, ...]:
    return tuple(buffers((x, ids, weights), "all_gather", group))


def _fake_dispatch_fp8(
    x: Tensor,
    scales: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    num_experts: int | None = None,
) -> tuple[Tensor, ...]:
    return tuple(buffers((x, scales, ids, weights), "all_gather", group))


def _fake_combine(y: Tensor, num_tokens: int, group: str) -> Tensor:
    return y.new_empty((num_tokens, *y.shape[1:]))


def _fake_dispatch_batched(
    x: Tensor, ids: Tensor, group: str, max_tokens: int, num_experts: int, fp8: bool = False
) -> tuple[Tensor, ...]:
    return tuple(buffers((x, ids), Batched(max_tokens, num_experts, fp8).dispatch(), group))


def _fake_combine_batched(
    y: Tensor,
    ids: Tensor,
    weights: Tensor,
    src: Tensor,
    ranges: Tensor,
    group: str,
    max_tokens: int,
    num_experts: int,
) -> Tensor:
    inputs = (y, ids, weights, src, ranges)
    return buffers(inputs, Batched(max_tokens, num_experts).combine(), group)[0]


REAL: dict[str, Any] = {
    "dispatch": dispatch,
    "dispatch_fp8": dispatch_fp8,
    "dispatch_batched": dispatch_batched,
    "combine": combine,
    "combine_batched": combine_batched,
}
FAKE: dict[str, Any] = {
    "dispatch": _fake_dispatch,
    "dispatch_fp8": _fake_dispatch_fp8,
    "dispatch_batched": _fake_dispatch_batched,
    "combine": _fake_combine,
    "combine_batched": _fake_combine_batched,
}
