"""Attention metadata of one microbatch, computed from the batch's tensors on their device.

Only tensor ops with fixed shapes: nothing is read back to the host, so a CUDA graph can capture
`MetadataBuilder.build`. Results go to buffers that are allocated once. Which requests a microbatch
holds depends on values; so every microbatch has a fixed number of request slots, and slots that it
does not need have no query tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dbo_fx.errors import OptionError

PAD_SLOT = -1
_OVERFLOW = "MetadataBuilder: the microbatch is not in the batch, or has more than its slots hold"
_SHAREABLE = frozenset({"block_table"})


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """Metadata of the whole batch, as an engine has it (R request slots, T padded tokens).

    Attributes:
        query_start_loc: [R + 1] integers: first token of each request, then the number of tokens,
            repeated for slots without a request.
        seq_lens: [R] integers: tokens of each request after this step.
        block_table: [R, P] integers: pages of each request; None: the engine has none.
        slot_mapping: [T] integers: where each token's key and value go; None: it has none.
        positions: [T] or [N, T] integers; None: it has none.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    positions: Tensor | None = None

    @property
    def request_slots(self) -> int:
        """R."""
        return self.seq_lens.shape[0]

    @property
    def token_slots(self) -> int | None:
        """T, or None where no tensor says."""
        for tensor in (self.slot_mapping, self.positions):
            if tensor is not None:
                return tensor.shape[-1]
        return None

    def signature(self) -> tuple[tuple[object, ...] | None, ...]:
        """Shape, dtype and device of every tensor."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return tuple(None if t is None else (*t.shape, t.dtype, t.device) for t in tensors)


@dataclass(frozen=True, slots=True)
class MicrobatchTensors:
    """Metadata of one microbatch (r request slots, t token slots). The tensors never move.

    Attributes:
        token_range: [2] int64: the microbatch is the tokens `start:stop` of the padded batch.
        num_tokens: [] int64: query tokens, without padding.
        query_start_loc: [r + 1], counted from the microbatch's first token.
        seq_lens: [r]: ends with the request's last token in this microbatch; 0 without a query.
        num_computed_tokens: [r]: seq_lens - query lengths.
        block_table: [r, P].
        slot_mapping: [t]; `PAD_SLOT` in the padding.
        positions: [t] or [N, t]; 0 in the padding.
    """

    token_range: Tensor
    num_tokens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    block_table: Tensor | None
    slot_mapping: Tensor | None
    positions: Tensor | None

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie; the same for the life of the builder."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def clip_query_start_loc(query_start_loc: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Cumulative lengths of the tokens `start:stop`: every query is clamped to them.

    Args:
        query_start_loc: [R + 1] integers.
        start: 0-dim integer.
        stop: 0-dim integer.

    Returns:
        [R + 1], counted from `start`.
    """
    return query_start_loc.clamp(start, stop) - start


def clip_seq_lens(seq_lens: Tensor, query_start_loc: Tensor, stop: Tensor) -> Tensor:
    """Sequence lengths without the tokens from `stop` on: shortened at the tail only.

    Args:
        seq_lens: [R] integers.
        query_start_loc: [R + 1] integers.
        stop: 0-dim integer.

    Returns:
        [R]; meaningful where the request has a query token before `stop`.
    """
    ends = query_start_loc[1:]
    return seq_lens - (ends - ends.clamp(max=stop))


class MetadataBuilder:
    """Computes one microbatch's metadata into buffers of its own.

    Make one per microbatch and bucket: the shapes, and so the buffers, are fixed.
    """

    def __init__(
        self,
        batch: BatchTensors,
        token_slots: int,
        *,
        request_slots: int | None = None,
        compact: bool = True,
        shared: Iterable[str] = (),
    ) -> None:
        """Allocate the buffers.

        Args:
            batch: Tensors with the shapes, dtypes and device of every later batch.
            token_slots: t, the most tokens that the microbatch will have, padding included.
            request_slots: r, the most requests that it will have; None: R, which always suffices.
            compact: The microbatch's requests are its first rows. Otherwise each stays at its row
                of the batch, and rows of requests that are elsewhere have no query tokens.
            shared: Names of tensors that are the batch's own instead of copies. Only `block_table`,
                and only without `compact`: then the rows are the same.

        Raises:
            OptionError: The arguments do not fit the batch or each other.
        """
        slots = batch.request_slots if request_slots is None else request_slots
        shared = frozenset(shared)
        _check_batch(batch)
        if not compact and slots != batch.request_slots:
            raise OptionError(
                f"MetadataBuilder: request_slots={slots} without compact, wanted the batch's "
                f"{batch.request_slots}. Leave request_slots out."
            )
        if shared and (compact or not shared <= _SHAREABLE):
            raise OptionError(
                f"MetadataBuilder: shared={sorted(shared)} with compact={compact}. Only "
                "block_table can be shared, and only with compact=False."
            )
        for name, value in (("token_slots", token_slots), ("request_slots", slots)):
            if value < 1:
                raise OptionError(f"MetadataBuilder: {name}={value}, wanted at least 1.")
        self._signature = batch.signature()
        self._token_slots, self._compact, self._shared = token_slots, compact, shared
        self._may_overflow = slots < batch.request_slots
        device = batch.seq_lens.device
        self._token = torch.arange(token_slots, device=device)
        self._row = torch.arange(slots + 1, device=device)
        self.out = _buffers(batch, slots, token_slots, shared)

    def build(
        self, batch: BatchTensors, start: int | Tensor, stop: int | Tensor
    ) -> MicrobatchTensors:
        """Compute the metadata of the tokens `start:stop`.

        Args:
            batch: The whole batch; shapes as at construction. A captured call reads these tensors.
            start: First token; a 0-dim integer tensor on the batch's device, or an int, which a
                captured call keeps.
            stop: One past the last token, padding included.

        Returns:
            The builder's tensors, the same at every call.

        Raises:
            OptionError: The batch has other shapes, or `start:stop` does not fit.
            RuntimeError: More requests than request slots, or with tensors more tokens than token
                slots. On CUDA a device-side assertion.
        """
        self._check(batch, start, stop)
        out = self.out
        for cell, point in zip(out.token_range, (start, stop), strict=True):
            if isinstance(point, Tensor):
                cell.copy_(point)
            else:
                cell.fill_(point)
        self._requests(batch)
        self._tokens(batch)
        self._assert_fits(batch, isinstance(start, Tensor) or isinstance(stop, Tensor))
        return out

    def _check(self, batch: BatchTensors, start: int | Tensor, stop: int | Tensor) -> None:
        """Check what the host knows."""
        if batch.signature() != self._signature:
            raise OptionError(
                f"MetadataBuilder: the batch's tensors are {batch.signature()}, wanted "
                f"{self._signature} as at construction. Make one builder per bucket."
            )
        if self._shared and batch.block_table is not self.out.block_table:
            raise OptionError(
                "MetadataBuilder: block_table is shared, wanted the tensor given at construction. "
                "Write each batch's pages into that one."
            )
        for name, point in (("start", start), ("stop", stop)):
            if isinstance(point, Tensor) and (
                point.dim() or point.is_floating_point() or point.device != self._token.device
            ):
                raise OptionError(
                    f"MetadataBuilder: {name} is a {point.dtype} tensor with {point.dim()} dims on "
                    f"{point.device}, wanted an int, or a 0-dim integer on {self._token.device}."
                )
        if isinstance(start, int) and isinstance(stop, int):
            total = batch.token_slots
            if not 0 <= start <= stop <= (stop if total is None else total):
                raise OptionError(
                    f"MetadataBuilder: tokens {start}:{stop} of a batch of {total} tokens."
                )
            if stop - start > self._token_slots:
                raise OptionError(
                    f"MetadataBuilder: tokens {start}:{stop} need {stop - start} token slots, "
                    f"found {self._token_slots}. Make the builder with more."
                )

    def _requests(self, batch: BatchTensors) -> None:
        out, last = self.out, batch.request_slots
        start, stop = out.token_range.unbind()
        loc = clip_query_start_loc(batch.query_start_loc, start, stop)
        seq_lens = clip_seq_lens(batch.seq_lens, batch.query_start_loc, stop)
        out.num_tokens.copy_(loc[-1])
        rows = self._row
        if self._compact:
            # Requests that end at or before start belong to earlier microbatches.
            rows = rows + (batch.query_start_loc[1:] <= start).sum()
        # Rows past the last request repeat the last cumulative length: no query tokens.
        loc = loc.index_select(0, rows.clamp(max=last))
        slots = rows[:-1].clamp(max=last - 1)
        query_lens = loc[1:] - loc[:-1]
        idle = query_lens <= 0
        out.query_start_loc.copy_(loc)
        out.seq_lens.copy_(seq_lens.index_select(0, slots).masked_fill(idle, 0))
        out.num_computed_tokens.copy_(out.seq_lens - query_lens)
        if batch.block_table is not None and "block_table" not in self._shared:
            assert out.block_table is not None
            pages = batch.block_table.index_select(0, slots)
            out.block_table.copy_(pages.masked_fill(idle.unsqueeze(1), 0))

    def _tokens(self, batch: BatchTensors) -> None:
        out = self.out
        tokens = out.token_range[0] + self._token
        padded = self._token >= out.num_tokens
        for source, target, padding in (
            (batch.slot_mapping, out.slot_mapping, PAD_SLOT),
            (batch.positions, out.positions, 0),
        ):
            if source is not None and target is not None:
                index = tokens.clamp(0, source.shape[-1] - 1)
                target.copy_(source.index_select(-1, index).masked_fill(padded, padding))

    def _assert_fits(self, batch: BatchTensors, unknown: bool) -> None:
        """Check on the device what the host cannot know."""
        out, conditions = self.out, []
        start, stop = out.token_range.unbind()
        if unknown:
            conditions += [start >= 0, start <= stop, stop - start <= self._token_slots]
            if batch.token_slots is not None:
                conditions.append(stop <= batch.token_slots)
        if self._may_overflow:
            conditions.append(out.query_start_loc[-1] == out.num_tokens)
        if conditions:
            torch._assert_async(torch.stack(conditions).all(), _OVERFLOW)


def _buffers(
    batch: BatchTensors, slots: int, token_slots: int, shared: frozenset[str]
) -> MicrobatchTensors:
    counts = torch.zeros(3, dtype=torch.int64, device=batch.seq_lens.device)
    table, mapping, positions = batch.block_table, batch.slot_mapping, batch.positions
    if table is not None and "block_table" not in shared:
        table = table.new_zeros(slots, table.shape[1])
    return MicrobatchTensors(
        token_range=counts[:2],
        num_tokens=counts[2],
        query_start_loc=batch.query_start_loc.new_zeros(slots + 1),
        seq_lens=batch.seq_lens.new_zeros(slots),
        num_computed_tokens=batch.seq_lens.new_zeros(slots),
        block_table=table,
        slot_mapping=None if mapping is None else mapping.new_full((token_slots,), PAD_SLOT),
        positions=None
        if positions is None
        else positions.new_zeros(*positions.shape[:-1], token_slots),
    )


def _check_batch(batch: BatchTensors) -> None:
    slots = batch.request_slots
    wanted = {
        "query_start_loc": (batch.query_start_loc.dim() == 1, slots + 1),
        "seq_lens": (batch.seq_lens.dim() == 1, slots),
    }
    if batch.block_table is not None:
        wanted["block_table"] = (batch.block_table.dim() == 2, slots)
    for name, (dims_fit, rows) in wanted.items():
        tensor = getattr(batch, name)
        if not dims_fit or tensor.shape[0] != rows or not slots:
            raise OptionError(
                f"BatchTensors: {name} has shape {list(tensor.shape)}, wanted {rows} rows for "
                f"{slots} request slots, at least one slot."
            )
    for name, dims in (("slot_mapping", (1,)), ("positions", (1, 2))):
        tensor = getattr(batch, name)
        if tensor is None:
            continue
        if tensor.dim() not in dims or tensor.shape[-1] != batch.token_slots:
            raise OptionError(
                f"BatchTensors: {name} has shape {list(tensor.shape)}, wanted "
                f"{' or '.join(map(str, dims))} dims, the last one of {batch.token_slots} tokens."
            )
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if tensor is None:
            continue
        if tensor.is_floating_point() or tensor.device != batch.seq_lens.device:
            raise OptionError(
                f"BatchTensors: {field.name} is {tensor.dtype} on {tensor.device}, wanted integers "
                f"on {batch.seq_lens.device} like seq_lens."
            )
