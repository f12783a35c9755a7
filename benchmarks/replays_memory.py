"""The memory section of `replays.py`: the certificate against the allocator's peak.

With eager segments the certificate counts what the allocator is asked for, op by op. With compiled
ones it is an upper bound: it does not know what a compiler fuses away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import compile_time
import torch
from torch import Tensor, nn

import dbo_fx
from dbo_fx.comm import copy_engine, transport_for
from dbo_fx.comm.peer_exchange import needed_bytes
from dbo_fx.comm.peer_links import LEAST_BYTES
from dbo_fx.comm.staging import HALVES
from dbo_fx.models import MoeConfig, MoeDecoder

if TYPE_CHECKING:
    from replays import Rank

# Two halves, each less than twice the largest operation; and smaller memory from before, which all
# together is no more than that again.
STAGING = 2 * 2 * HALVES
TOLERANCE = 0.05
# No model here has fewer ids.
VOCAB = 128
# The allocator rounds every piece up to 512 bytes.
ROUNDING = 0.001


def memory(rank: Rank, tokens: int) -> list[dict[str, Any]]:
    """Predicted and measured peak of large calls.

    Args:
        rank: Where to run.
        tokens: Tokens of a sequence.

    Returns:
        One row for each model, transport and compiler of segments. What `copy_engine` stages is
        neither in the certificate nor in the allocator's counters, as symmetric memory has an
        allocator of its own: it stands beside them, with its bound.
    """
    rows = []
    first, *others = rank.transports()
    with operations() as sizes:
        for batch, hidden in rank.settings.shapes:
            model = decoder(rank, hidden, tokens)
            rows.append(row(rank, model, f"decoder {hidden}", batch, "eager", first, sizes))
        preset, batch = ("v2lite", 512) if rank.is_cuda else ("tiny", 8)
        model = compile_time.build(preset, 2, rank.device)
        for segments in dict.fromkeys(("eager", rank.segments)):
            for transport in (first, *others):
                rows.append(row(rank, model, preset, batch, segments, transport, sizes))
    return rows


def decoder(rank: Rank, hidden: int, tokens: int) -> nn.Module:
    """The plain decoder, whose experts are one matmul."""
    config = MoeConfig(
        hidden=hidden, layers=3, heads=hidden // 128 or 1, experts=8, expert_hidden=hidden // 2,
        shared_hidden=hidden, positions=tokens, vocab=1024,
    )  # fmt: skip
    return MoeDecoder(config).to(rank.device, rank.dtype).requires_grad_(False)


def row(
    rank: Rank,
    model: nn.Module,
    name: str,
    batch: int,
    segments: str,
    transport: str | None,
    sizes: list[int],
) -> dict[str, Any]:
    """One program, run twice: memory is measured when all is compiled and staged."""
    torch._dynamo.reset()
    given = {} if transport is None else {"transport": transport}
    compiled = rank.compile(model, segment_backend=segments, **given)
    tokens = rank.tokens(batch) % VOCAB
    torch._dynamo.mark_dynamic(tokens, 0)
    compiled(tokens)
    report = dbo_fx.compilations()[-1].memory(batch)
    found: dict[str, Any] = {
        "model": name,
        "segments": segments,
        "transport": transport or "default",
        "batch": batch,
        "tokens": tokens.numel(),
        "predicted_bytes": report.peak_bytes,
        "predicted_at": report.during.name,
        "uncounted": list(report.uncounted),
    }
    if not rank.is_cuda:
        return found
    before = rank.settled()["allocated"]
    torch.cuda.reset_peak_memory_stats(rank.device)
    compiled(tokens)
    torch.cuda.synchronize()
    found["measured_bytes"] = torch.cuda.max_memory_allocated(rank.device) - before
    found["ratio"] = round(report.peak_bytes / found["measured_bytes"], 4)
    if transport == "copy_engine":
        found["staging_bytes"] = staging_bytes()
        found["staging_bound_bytes"] = STAGING * max([LEAST_BYTES, *sizes])
    return found


@contextmanager
def operations() -> Iterator[list[int]]:
    """What every operation stages that copy_engine launches in the body, in bytes."""
    sizes: list[int] = []

    def noted(inputs: Sequence[Tensor]) -> int:
        sizes.append(needed_bytes(inputs))
        return sizes[-1]

    with mock.patch.object(copy_engine, "needed_bytes", noted):
        yield sizes


def staging_bytes() -> int:
    """What this process has for its peers to read and write."""
    carrier: Any = transport_for("cuda", "copy_engine")
    links = carrier._links.known(None)
    held = [s for link in links for s in (link.staging, *link.outgrown) if s is not None]
    return sum(HALVES * s.half_bytes for s in held)


def is_certified(row: dict[str, Any]) -> bool:
    """Whether a row is as it must be: close with eager segments, no less than used with others."""
    if row["uncounted"] or row.get("staging_bytes", 0) > row.get("staging_bound_bytes", 0):
        return False
    ratio = row.get("ratio", 1.0)
    if row["segments"] == "eager":
        return bool(abs(ratio - 1) <= TOLERANCE)
    return bool(ratio >= 1 - ROUNDING)
