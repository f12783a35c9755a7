"""DTensor's sharding rules as a second opinion: the one place that touches its private parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from dbo_fx.capture import value_of
from dbo_fx.layouts import Layout, Split
from dbo_fx.symbols import ConcreteSizes


@dataclass(frozen=True)
class Opinion:
    """What DTensor makes of one call whose arguments have the given layouts.

    Attributes:
        verdict: `independent`, `replicated`, `mixing`, or `none` where it has no rule.
        dims: The sharded dim of every result; None for a replicated one.
    """

    verdict: str
    dims: tuple[int | None, ...] = ()


class SecondOpinion:
    """Asks DTensor's propagator about single ATen calls, with concrete sizes and no ranks."""

    def __init__(self, sizes: ConcreteSizes) -> None:
        """A mesh of two pretended ranks."""
        self.sizes = sizes
        self.mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
        self.propagator = DTensor._op_dispatcher.sharding_propagator

    def of(self, node: Node, layouts: Mapping[Node, Layout]) -> Opinion:
        """DTensor's opinion on a call of an ATen op."""

        def argument(source: Node) -> Any:
            value = value_of(source)
            if not isinstance(value, torch.Tensor):
                return self.sizes.number(value)
            return self._spec(value, layouts[source])

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), argument)
        args, kwargs = tree_map_only(
            torch.fx.immutable_collections.immutable_list, list, (args, kwargs)
        )
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        info = self.propagator.op_to_schema_info.get(target)
        try:
            found = self.propagator.propagate_op_sharding_non_cached(
                OpSchema(target, tuple(args), dict(kwargs), info)
            )
        except Exception as error:
            return Opinion(f"none: {type(error).__name__}")
        if found.redistribute_schema is not None and self._moves((args, kwargs), found):
            return Opinion("mixing")
        specs = [s for s in tree_leaves(found.output_spec) if isinstance(s, DTensorSpec)]
        placements = [s.placements[0] for s in specs]
        if any(isinstance(p, Partial) for p in placements):
            return Opinion("mixing")
        dims = tuple(p.dim if isinstance(p, Shard) else None for p in placements)
        return Opinion("independent" if any(d is not None for d in dims) else "replicated", dims)

    def _spec(self, value: torch.Tensor, layout: Layout) -> DTensorSpec:
        shape = self.sizes.shape(value)
        steps = tuple(self.sizes.number(s) for s in value.stride())
        placement = Shard(layout.dim) if isinstance(layout, Split) else Replicate()
        meta = TensorMeta(torch.Size(shape), steps, value.dtype)
        return DTensorSpec(self.mesh, (placement,), meta)

    def _moves(self, given: Any, found: Any) -> bool:
        """Whether a sharded argument would have to be gathered; slicing a whole one is local."""
        wanted = found.redistribute_schema
        before = [s for s in tree_leaves(given) if isinstance(s, DTensorSpec)]
        after = tree_leaves((wanted.args_schema, wanted.kwargs_schema))
        specs = [s for s in after if isinstance(s, DTensorSpec)]
        pairs = zip(before, specs, strict=True)
        return any(
            isinstance(b.placements[0], Shard) and a.placements != b.placements for b, a in pairs
        )
