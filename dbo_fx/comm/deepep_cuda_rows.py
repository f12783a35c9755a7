"""DeepEP's high-throughput kernels and V2: rows in any order, on the communication stream.

The program makes its communication stream current; DeepEP forks its own from it and joins it again.
Neither blocks the host: high throughput is told the worst number of rows, in captured programs and
in eager ones alike, since the graph's shapes are static; V2 runs without CPU synchronisation. What
arrives lies where DeepEP allocated it; the program's tensors are made to be it at the recv.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import deepep_package, groups
from dbo_fx.comm.deepep_groups import (
    Opened,
    check_ranks,
    check_rows,
    open_buffer,
    show,
    wait_for_compute,
)
from dbo_fx.comm.expert_layouts import FP8, experts_of
from dbo_fx.comm.pairing import Pair, PairingTransport
from dbo_fx.errors import CommunicationError
from dbo_fx.sm_limits import comm_sms

LEAST_BYTES = 1 << 28
LEAST_TOKENS = 64
# High throughput keeps half a row and a barrier in what a warp has of shared memory.
MOST_ROW_BYTES = 2 * (8192 - 8)
# Both kinds of kernels keep a token's choices in the lanes of a warp.
MOST_CHOICES = 32


@dataclass(frozen=True, slots=True)
class Sent:
    """A kernel that runs: what it writes, and what it reads."""

    arrived: tuple[Tensor, ...]
    held: tuple[Tensor, ...]


@dataclass
class _Rows(PairingTransport):
    """What both kinds of kernels have in common."""

    def unusable(self) -> str | None:
        """Why it cannot be used on this machine; None if nothing speaks against it."""
        why = deepep_package.reason(self.contract.name)
        return None if why is None else str(why)

    def sms(self, name: str) -> int:
        """How many SMs a dispatch and its combine take.

        Raises:
            CommunicationError: An odd number.
        """
        asked = comm_sms()
        found = self.contract.num_sms if asked is None else asked
        assert found is not None
        if found % 2:
            raise CommunicationError(
                f"{name}: found comm_sms={found}, but DeepEP's kernels work in pairs of SMs. Use "
                "an even number."
            )
        return found

    def dispatch(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pair: Pair, group: str, name: str
    ) -> Sent:
        """Launch the kernels of a dispatch.

        Args:
            inputs: x, scales where x is float8, ids, weights.
            outputs: What `comm_buffers` gave for them.
            pair: Gets the handle that the combine needs.
            group: Name of the process group.
            name: What to call the operation in errors.

        Returns:
            What `finish_work` needs.

        Raises:
            CommunicationError: Types or sizes that the kernels do not take.
        """
        experts, ranks = experts_of(pair.exchange), groups.world_size(group)
        self.check(name, inputs)
        if experts % ranks:
            raise CommunicationError(
                f"{name}: {experts} experts cannot be shared evenly by {ranks} ranks."
            )
        wait_for_compute(inputs[0].device)
        *rows, ids, weights = (t.contiguous() for t in inputs)
        x = tuple(rows) if len(rows) > 1 else rows[0]
        found, chosen, given = self._dispatch(x, ids, weights, experts, group, pair, name)
        arrived = found if isinstance(found, tuple) else (found,)
        return Sent((*arrived, chosen, given), (*rows, ids, weights))

    def check(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Refuse a dispatch that the kernels do not take.

        Args:
            name: What to call the operation in errors.
            inputs: x, scales where x is float8, ids, weights.

        Raises:
            CommunicationError: Types or sizes.
        """
        *rows, ids, weights = inputs
        check_rows(name, rows[0], ids, weights, FP8 if len(rows) > 1 else torch.bfloat16)
        if ids.shape[1] > MOST_CHOICES:
            raise CommunicationError(
                f"{name}: found {ids.shape[1]} experts a token, wanted at most {MOST_CHOICES}."
            )

    def combine(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pair: Pair, group: str, name: str
    ) -> Sent:
        """Launch the kernels of a combine.

        Args:
            inputs: y.
            outputs: What `comm_buffers` gave for it.
            pair: Its dispatch.
            group: Name of the process group.
            name: What to call the operation in errors.

        Returns:
            What `finish_work` needs.

        Raises:
            CommunicationError: y is not bfloat16.
        """
        y = inputs[0]
        if y.dtype != torch.bfloat16:
            raise CommunicationError(f"{name}: found rows of {y.dtype}, DeepEP wants bfloat16.")
        wait_for_compute(y.device)
        y = y.contiguous()
        return Sent((self._combine(y, pair.handle, group, name),), (y,))

    def finish_work(self, work: Sent, outputs: Sequence[Tensor], pair: Pair) -> None:
        """Show what has arrived; the program's wait for the event made it usable.

        Args:
            work: What the launch returned.
            outputs: The program's outputs.
            pair: The pair.
        """
        show(outputs, work.arrived)

    @abstractmethod
    def _dispatch(
        self,
        x: Tensor | tuple[Tensor, ...],
        ids: Tensor,
        weights: Tensor,
        experts: int,
        group: str,
        pair: Pair,
        name: str,
    ) -> tuple[Any, Tensor, Tensor]:
        """Launch; return rows (with scales), ids of all ranks' experts, weights: R*T rows."""

    @abstractmethod
    def _combine(self, y: Tensor, handle: Any, group: str, name: str) -> Tensor:
        """Launch; return [T, H]."""


def _renumber(ids: Tensor, count: Tensor, first: int) -> None:
    """Ids of here or -1, and behind `count` rows anything: make them those of all ranks' experts.

    Garbage and choices of experts elsewhere become an expert of the rank before.
    """
    if ids.is_cuda:
        from dbo_fx.comm.deepep_ids import renumber

        renumber(ids, count, first)
        return
    places = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
    ids.masked_fill_(places >= count, -1).add_(first)


@dataclass
class HighThroughput(_Rows):
    """DeepEP high throughput within a node."""

    _buffers: dict[str, tuple[int, Opened]] = field(default_factory=dict)

    def check(self, name: str, inputs: Sequence[Tensor]) -> None:
        """See the base; rows must not be too wide either."""
        super().check(name, inputs)
        x = inputs[0]
        if x.shape[1] * x.element_size() > MOST_ROW_BYTES:
            raise CommunicationError(
                f"{name}: found rows of {x.shape[1]} values of {x.dtype}, DeepEP's high-throughput "
                f"kernels take at most {MOST_ROW_BYTES} bytes a row. Send float8 (dispatch_fp8), "
                "or use deepep_v2."
            )

    def _dispatch(
        self,
        x: Tensor | tuple[Tensor, ...],
        ids: Tensor,
        weights: Tensor,
        experts: int,
        group: str,
        pair: Pair,
        name: str,
    ) -> tuple[Any, Tensor, Tensor]:
        ranks = check_ranks(name, group, (2, 4, 8))
        hidden = (x[0] if isinstance(x, tuple) else x).shape[1]
        sms = self.sms(name)
        opened = self._buffer(group, hidden, ranks, sms)
        with opened.launching(name) as buffer:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, experts)
            rows, chosen, given, _, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                num_worst_tokens=ids.shape[0] * ranks,
                config=buffer.get_dispatch_config(ranks),
            )
        pair.handle = handle, opened, sms
        first = experts // ranks * groups.rank(group)
        if first:  # -1 becomes an expert of the rank before, which is not here either.
            chosen.add_(first)
        return rows, chosen, given

    def _combine(self, y: Tensor, handle: Any, group: str, name: str) -> Tensor:
        kept, opened, sms = handle
        with opened.launching(name) as buffer:
            buffer.set_num_sms(sms)  # As its dispatch had: the handle counts channels.
            config = buffer.get_combine_config(groups.world_size(group))
            found: Tensor = buffer.combine(y, kept, config=config)[0]
        return found

    def _buffer(self, group: str, hidden: int, ranks: int, sms: int) -> Opened:
        """The group's Buffer; a larger one beside it where that is needed: graphs keep theirs."""
        deep_ep = deepep_package.load()
        deep_ep.Buffer.set_num_sms(sms)
        kinds = deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config
        need = max(kind(ranks).get_nvl_buffer_size_hint(hidden * 2, ranks) for kind in kinds)
        size = -(-max(need, LEAST_BYTES) // 128) * 128
        if group in self._buffers and self._buffers[group][0] >= size:
            return self._buffers[group][1]
        members = groups.process_group(group)
        opened = open_buffer(
            self.contract.name,
            group,
            f"{size} bytes",
            lambda: deep_ep.Buffer(members, size, 0, explicitly_destroy=True),
            lambda: self._buffers.pop(group, None),
        )
        self._buffers[group] = size, opened
        return opened


# Group, hidden size, top-k, float8.
ShapeClass = tuple[str, int, int, bool]


@dataclass
class Elastic(_Rows):
    """DeepEP V2.

    A Buffer takes any number of tokens up to its own: every kernel begins with a barrier.
    """

    _buffers: dict[ShapeClass, tuple[int, Opened]] = field(default_factory=dict)

    def _dispatch(
        self,
        x: Tensor | tuple[Tensor, ...],
        ids: Tensor,
        weights: Tensor,
        experts: int,
        group: str,
        pair: Pair,
        name: str,
    ) -> tuple[Any, Tensor, Tensor]:
        tokens, top_k = ids.shape
        sms = self.sms(name)
        ranks = groups.world_size(group)
        fp8 = isinstance(x, tuple)
        hidden = (x[0] if isinstance(x, tuple) else x).shape[1]
        # Kernels are compiled for it, which takes seconds: not one for every T.
        most = max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        opened = self._buffer((group, hidden, top_k, fp8), most, ids.device)
        with opened.launching(name) as buffer:
            found, chosen, given, handle, _ = buffer.dispatch(
                x,
                topk_idx=ids,
                topk_weights=weights,
                num_experts=experts,
                num_max_tokens_per_rank=most,
                num_sms=sms,
                do_cpu_sync=False,
            )
        rows = tokens * ranks
        parts = found if isinstance(found, tuple) else (found,)
        chosen = chosen[:rows]
        first = experts // ranks * groups.rank(group)
        _renumber(chosen, handle.psum_num_recv_tokens_per_scaleup_rank[-1], first)
        pair.handle = handle, opened, most * ranks, sms
        return tuple(p[:rows] for p in parts), chosen, given[:rows]

    def _combine(self, y: Tensor, handle: Any, group: str, name: str) -> Tensor:
        kept, opened, rows, sms = handle
        if y.shape[0] != rows:  # Only for this many does the kernel look how many are there.
            wide = y.new_empty((rows, y.shape[1]))
            wide[: y.shape[0]] = y
            y = wide
        with opened.launching(name) as buffer:
            found: Tensor = buffer.combine(y, kept, num_sms=sms)[0]
        return found

    def _buffer(self, key: ShapeClass, most: int, device: torch.device) -> Opened:
        """The Buffer of a shape class; a larger one where needed."""
        if key in self._buffers and self._buffers[key][0] >= most:
            return self._buffers[key][1]
        group, hidden, top_k, fp8 = key
        why = deepep_package.reason(self.contract.name)
        if why is not None:
            raise CommunicationError(f"{self.contract.name} cannot be used: {why}")
        deep_ep = deepep_package.load()
        members = groups.process_group(group)
        sizes = f"{most} tokens, H={hidden} K={top_k}{' fp8' if fp8 else ''}"

        def make() -> Any:
            # V2 uses the group's communicator, which the group's first collective makes.
            if groups.backend_name(group, "cuda") == "nccl":
                torch.distributed.all_reduce(torch.zeros(1, device=device), group=members)
            return deep_ep.ElasticBuffer(
                members,
                num_max_tokens_per_rank=most,
                hidden=hidden,
                num_topk=top_k,
                use_fp8_dispatch=fp8,
                allow_hybrid_mode=False,  # It is for several hosts.
                explicitly_destroy=True,
            )

        opened = open_buffer(
            self.contract.name, group, sizes, make, lambda: self._buffers.pop(key, None)
        )
        self._buffers[key] = most, opened
        return opened
