"""What the ranks decide together.

`compare_over_store` runs after a compilation and must never be a collective: a rank that did not
compile would never come. `agree_batch` runs once per step, outside any CUDA graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dbo_fx.comm import groups
from dbo_fx.errors import AgreementError

_ALLOWS, _REFUSES, _FAILS = 0, 1, 2


def compare_over_store(group_name: str, what: str, value: str, timeout_s: float) -> None:
    """Raise unless every rank of the group brings the same value to its n-th comparison.

    Args:
        group_name: Name of the process group.
        what: What is compared, for the message and the key, for example "program digest".
        value: This rank's value.
        timeout_s: How long to wait for the other ranks.

    Raises:
        AgreementError: A rank did not write its value in time, or wrote another one.
    """
    ranks, mine = groups.world_size(group_name), groups.rank(group_name)
    if ranks == 1 or groups.is_fake(group_name):
        return
    store = groups.store(group_name)
    # The counter lives in the store, so it starts anew with the process group that owns it.
    step = store.add(f"dbo_fx/{what}/steps of {mine}", 1)
    keys = [f"dbo_fx/{what}/{step}/{rank}" for rank in range(ranks)]
    store.set(keys[mine], value)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank in range(ranks) if not store.check([keys[rank]])]
        if missing:
            raise AgreementError(
                f"{what}, comparison {step} in group {group_name!r}: {_named(missing)} of {ranks} "
                f"wrote nothing within {timeout_s:g} s; rank {mine} has {value!r}. All ranks must "
                "compile together: look for an error there, or for an input size or option that "
                "only some ranks saw (TORCH_LOGS=recompiles shows why a rank compiled)."
            ) from error
    values = [store.get(key).decode() for key in keys]
    others = {rank: other for rank, other in enumerate(values) if other != value}
    if others:
        told = "; ".join(f"rank {rank} has {other!r}" for rank, other in others.items())
        raise AgreementError(
            f"{what}, comparison {step} in group {group_name!r}: rank {mine} has {value!r}, but "
            f"{told}. All ranks must compile the same program: compare their options, versions "
            "and input sizes, and keep rank numbers out of the graph."
        )


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
    """

    max_rows: int
    min_rows: int
    allowed: bool
    ranks: int
    refusing: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()


def agree_batch(
    rows: int,
    allowed: bool,
    group: dist.ProcessGroup | str | None = None,
    *,
    failed: bool = False,
) -> BatchDecision:
    """Tell all ranks each other's state with one all-reduce of R + 2 integers.

    Args:
        rows: Rows that this rank has.
        allowed: Whether this rank allows the batch to be split.
        group: The process group, its name, or None for the default group; without an initialised
            torch.distributed this rank decides alone.
        failed: This rank cannot run the step; it takes part so that the others learn of it.

    Returns:
        The same decision on every rank.

    Raises:
        AgreementError: Called under CUDA graph capture.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise AgreementError(
            "agree_batch was called while a CUDA graph is being captured, wanted before it: a "
            "captured decision would be replayed for every later batch. Decide first, capture then."
        )
    state = _FAILS if failed else _ALLOWS if allowed else _REFUSES
    name = groups.name_of(group)
    ranks, mine = (1, 0) if name is None else (groups.world_size(name), groups.rank(name))
    cells = [rows, -rows, *([_ALLOWS] * ranks)]
    cells[2 + mine] = state
    if name is not None and ranks > 1:
        device = "cpu" if groups.backend_name(name, "cpu") else "cuda"
        tensor = torch.tensor(cells, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=groups.process_group(name))
        cells = [int(cell) for cell in tensor.tolist()]
    max_rows, negative_min, *states = cells
    refusing = tuple(rank for rank, state in enumerate(states) if state == _REFUSES)
    failing = tuple(rank for rank, state in enumerate(states) if state == _FAILS)
    allows = not refusing and not failing
    return BatchDecision(max_rows, -negative_min, allows, ranks, refusing, failing)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
