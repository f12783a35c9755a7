"""Random schedules of real graphs: small traced models, lowered in any order that is valid.

Each kind of model is traced once. A `GraphCase` is a kind, a number of layers and microbatches, a
transport, and the seed of an order; `lowered` runs the compiler's passes on a fresh copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from damage_order import Shape
from dbo_fx import schedules
from dbo_fx.contracts import DEEPEP_LL, GLOO, Contract
from dbo_fx.ir import Action, Phase, bind
from dbo_fx.passes.halves import Halves
from dbo_fx.passes.lower import Lower
from dbo_fx.passes.schedule import Order, _calls, nodes_by_action
from dbo_fx.passes.streams import Streams
from dbo_fx.pipeline import State
from generated import is_allowed, random_order
from small_moe import CachedMoe, PlainMoe, TwoLaunches, run_passes, traced_model


class NoShared(PlainMoe):
    """Without a shared expert."""

    def body(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H] through all layers."""
        for layer in range(len(self.qkv)):
            h = self.attend(layer, x)
            x = h + self.experts(layer, h)
        return x


class NoTail(PlainMoe):
    """Returns what the last layer leaves."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.body(x)


class Normed(PlainMoe):
    """Sends something else than the residual."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return super().experts(layer, F.rms_norm(h, h.shape[-1:]))


class Cached(CachedMoe):
    """Attention over a key cache, over which no row of the softmax is ever zero.

    So every key that is missing shows in the result, in every layer.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, counter: Tensor, caches: Sequence[Tensor]
    ) -> Tensor:
        """x [T, H]; counter [1] and caches [N, H] are written in place."""
        slots = counter + torch.arange(x.shape[0])
        for layer in range(len(self.qkv)):
            h = self.attend_cached(layer, F.rms_norm(x, x.shape[-1:]), caches[layer], slots)
            x = h + self.experts(layer, h) + F.silu(F.linear(h, self.shared[layer]))
        counter.add_(x.shape[0])
        return F.linear(x, self.head)

    def attend_cached(self, layer: int, x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """[T, H] -> [T, H]; appends to the cache."""
        q, k, v = F.linear(x, self.qkv[layer]).chunk(3, -1)
        cache.index_copy_(0, slots, k + v)
        seen = torch.arange(cache.shape[0]) <= slots[:, None]
        scores = (q @ cache.T * 0.1).masked_fill(~seen, float("-inf"))
        return x + scores.softmax(-1) @ cache


class CachedTwoLaunches(Cached):
    """A cache, and two all-gathers for each dispatch."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        got = funcol.all_gather_tensor(h, 0, self.group)
        weights = funcol.all_gather_tensor(h.softmax(-1), 0, self.group)
        return funcol.reduce_scatter_tensor(got * weights, "sum", 0, self.group)


class CachedNormed(Cached):
    """A cache, and something else sent than the residual."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return super().experts(layer, F.rms_norm(h, h.shape[-1:]))


TWO_LAUNCHES = (TwoLaunches, CachedTwoLaunches)
KINDS = (PlainMoe, NoShared, NoTail, Normed, Cached, CachedNormed, *TWO_LAUNCHES)
TRANSPORTS = (GLOO, DEEPEP_LL)  # Those that run on CPU.


@dataclass(frozen=True, slots=True)
class Given(Order):
    """The pass of the compiler, with all actions given instead of unrolled."""

    actions: tuple[Action, ...] = ()
    checked: bool = True

    def apply(self, state: State) -> tuple[State, str]:
        """Reorder the graph in place."""
        members = nodes_by_action(state.graph.nodes)
        actions = tuple(a for a in self.actions if a in members)
        assert set(actions) == set(members)
        if self.checked:
            self._check(state, actions)
        self._reorder(state, [n for a in actions for n in members[a]])
        state.graph.lint()
        return replace(state, actions=actions, calls=_calls(state)), "given"


@dataclass(frozen=True, slots=True)
class GraphCase:
    """A model and a way to schedule it.

    Attributes:
        kind: The model.
        layers: Its MoE layers.
        microbatches: How many.
        contract: The transport's.
        schedule: A schedule's name, or None for a random order.
        seed: Of the random order.
    """

    kind: type[PlainMoe]
    layers: int
    microbatches: int
    contract: Contract
    schedule: str | None
    seed: int = 0

    def __str__(self) -> str:
        """`CachedMoe, 2 layers, 2 microbatches, deepep_ll, order of seed 3`."""
        order = self.schedule or f"order of seed {self.seed}"
        parts = f"{self.layers} layers, {self.microbatches} microbatches"
        return f"{self.kind.__name__}, {parts}, {self.contract.name}, {order}"

    @property
    def inputs(self) -> list[object]:
        """Fresh inputs."""
        return traced_model(self.kind, self.layers, 1).args(3 * self.microbatches)

    def lowered(self, swapped: int | None = None) -> State:
        """The state behind `lower`; needs a group of one rank.

        Args:
            swapped: A layer whose cache edges are lost, and whose attention runs the microbatches
                in the opposite order.
        """
        captured = traced_model(self.kind, self.layers, 1).fresh()
        state = run_passes(captured, "microbatch", count=self.microbatches)
        state = Halves(self.contract).apply(state)[0]
        any_order = schedules.load(self.schedule or "sequential")
        actions = self._actions(state, swapped)
        state = Given(any_order, actions=actions, checked=swapped is None).apply(state)[0]
        state = Streams(any_order.name, self.contract).apply(state)[0]
        return Lower().apply(state)[0]

    def _actions(self, state: State, swapped: int | None) -> tuple[Action, ...]:
        if self.schedule is not None and swapped is None:
            return bind(schedules.load(self.schedule), self.layers, self.microbatches)
        present = set(nodes_by_action(state.graph.nodes))
        shared = frozenset(
            (a.microbatch, a.layer)
            for a in present
            if a.phase is Phase.S and a.microbatch is not None and a.layer is not None
        )
        tail = any(a.phase is Phase.TAIL for a in present)
        shape = Shape(self.layers, self.microbatches, shared, tail)
        return tuple(random_order(Random(self.seed), shape, self.contract, swapped))


def graph_case(
    rng: Random,
    kinds: Sequence[type[PlainMoe]] = KINDS,
    layers: Sequence[int] = (1, 2, 3, 4),
    named: float = 0.2,
) -> GraphCase:
    """A random case.

    Args:
        rng: Draws.
        kinds: Models to choose from.
        layers: Numbers of layers to choose from.
        named: Share of the cases with a named schedule.
    """
    kind = rng.choice(list(kinds))
    contract = GLOO if kind in TWO_LAUNCHES else rng.choice(TRANSPORTS)
    names = [n for n in schedules.names() if schedules.load(n).num_microbatches != 1]
    fitting = [name for name in names if fits(name, contract)]
    name = rng.choice(fitting) if rng.random() < named else None
    count = rng.choice((2, 3))
    if name is not None:
        count = schedules.load(name).num_microbatches or count
    return GraphCase(kind, rng.choice(list(layers)), count, contract, name, rng.randrange(1 << 30))


def fits(name: str, contract: Contract) -> bool:
    """Whether a contract allows as many operations in flight as a schedule has."""
    schedule = schedules.load(name)
    return is_allowed(bind(schedule, 2, schedule.num_microbatches or 2), contract)


@cache
def reference_of(kind: type[PlainMoe], layers: int, microbatches: int) -> GraphModule:
    """The undamaged model, microbatch after microbatch."""
    captured = traced_model(kind, layers, 1).fresh()
    state = run_passes(captured, "emit", "sequential", microbatches)
    assert state.module is not None
    return state.module
