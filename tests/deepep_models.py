"""Small models on the layouts of DeepEP, and what their experts compute without any layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo_fx.comm import groups
from dbo_fx.comm.expert_layouts import dequantised, quantised
from dbo_fx.experts import is_there
from small_moe import EXPERTS, OPS, PlainMoe

MOST = 16  # Tokens of a rank in one operation.


class RowsMoe(PlainMoe):
    """Rows in any order; the experts leave garbage alone. Expert e multiplies by e + 1."""

    def __init__(self, layers: int = 1) -> None:
        """Know which experts are here."""
        super().__init__(layers)
        assert self.group is not None
        self.local = EXPERTS // groups.world_size(self.group)
        first = torch.tensor(self.local * groups.rank(self.group))
        self.register_buffer("first", first)

    def experts(self, layer: int, h: Tensor) -> Tensor:
        scores, ids = F.linear(h, self.gate[layer]).softmax(-1).topk(2, -1)
        rows, ids, scores = OPS.dispatch(h, ids, scores, self.group, EXPERTS)
        ids = ids - self.first
        mine = (ids >= 0) & (ids < self.local)
        factor = torch.where(mine, scores * (ids + self.first + 1), 0).sum(-1, keepdim=True)
        y = torch.where(mine.any(-1, keepdim=True), F.linear(rows, self.expert[layer]), 0)
        return OPS.combine(y * factor, h.shape[0], self.group)


class BatchedMoe(RowsMoe):
    """Rows by expert, `MOST` tokens of a rank at most."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        scores, ids = F.linear(h, self.gate[layer]).softmax(-1).topk(2, -1)
        found = OPS.dispatch_batched(h, ids, self.group, MOST, EXPERTS)
        rows, _, counts, src, ranges = found
        number = torch.arange(self.local) + self.first + 1
        x = torch.where(is_there(rows, counts), rows, 0)
        y = F.linear(x, self.expert[layer]) * number.view(-1, 1, 1)
        return OPS.combine_batched(y, ids, scores, src, ranges, self.group, MOST, EXPERTS)


class RowsFp8Moe(RowsMoe):
    """Rows that travel as float8."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        scores, ids = F.linear(h, self.gate[layer]).softmax(-1).topk(2, -1)
        wide = h.repeat_interleave(16, -1)  # 128 values: one scale.
        small, scales = quantised(wide)
        sent = OPS.dispatch_fp8(small, scales, ids, scores, self.group, EXPERTS)
        rows = dequantised(sent[0], sent[1], h.dtype)[:, ::16]
        ids = sent[2] - self.first
        mine = (ids >= 0) & (ids < self.local)
        factor = torch.where(mine, sent[3] * (ids + self.first + 1), 0).sum(-1, keepdim=True)
        y = torch.where(mine.any(-1, keepdim=True), F.linear(rows, self.expert[layer]), 0)
        return OPS.combine(y * factor, h.shape[0], self.group)


def reference(model: PlainMoe, layer: int, h: Tensor) -> Tensor:
    """[T, H] -> [T, H]: what the experts of all ranks make of a rank's tokens, as they travel."""
    scores, ids = F.linear(h, model.gate[layer]).softmax(-1).topk(2, -1)
    if isinstance(model, RowsFp8Moe):
        h = dequantised(*quantised(h.repeat_interleave(16, -1)), h.dtype)[:, ::16]
    return F.linear(h, model.expert[layer]) * (scores * (ids + 1)).sum(-1, keepdim=True)
