"""Rules for rows in blocks of static capacity: what is packed, and what comes back.

That a microbatch packs other slots than the whole batch changes nothing as long as every row finds
room, or is reported where it does not: that is the promise of `dbo_fx.packing_ops`, and the reason
why these ops have rules although they number the rows of a batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import dbo_fx.packing_ops  # noqa: F401  (registers the ops)
from dbo_fx.layouts import REPLICATED, Call, Inside, Layouts, mixes
from dbo_fx.rules import Rule

PACK = torch.ops.dbo_fx.pack.default
UNPACK = torch.ops.dbo_fx.unpack.default
NOTE = torch.ops.dbo_fx.note_overflow.default


def packed(call: Call) -> Layouts:
    """Rows in an order of their own; their places have the layout of the choices."""
    layouts = [call.layout(node) for node in call.tensors()]
    first = call.split(call.args["ids"])
    if first is None or first.dim or first.region or any(x != first for x in layouts):
        mixes("packs rows, ids and weights that are not split alike along dim 0")
    return Inside(), first, Inside(place=True)


def unpacked(call: Call) -> Layouts:
    """Rows in the order that they were packed from."""
    back, places = call.layout(call.args["y"]), call.split(call.args["places"])
    weights = call.args["weights"]
    alike = weights is None or call.split(weights) == places
    if not isinstance(back, Inside) or places is None or not alike:
        mixes("unpacks rows that were not packed, or not with these places")
    return replace(places, shift=0)


def noted(_: Call) -> Layouts:
    """A sum over rows, which no row reads."""
    return REPLICATED


RULES: dict[str, Rule] = {
    "dbo_fx::pack": packed,
    "dbo_fx::unpack": unpacked,
    "dbo_fx::note_overflow": noted,
}
