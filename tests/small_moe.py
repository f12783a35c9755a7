"""Small MoE models for the pass tests, groups without peers, and the pipeline up to a pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbo_fx import schedules, sync
from dbo_fx.capture import CapturedGraph, from_dynamo
from dbo_fx.comm import groups
from dbo_fx.contracts import Contract, contract
from dbo_fx.emit import Emit
from dbo_fx.ir import Schedule
from dbo_fx.passes.halves import Halves
from dbo_fx.passes.lower import Lower, qualified_name
from dbo_fx.passes.microbatch import Microbatch
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.passes.schedule import Order
from dbo_fx.passes.soundness import Soundness
from dbo_fx.passes.streams import Streams
from dbo_fx.passes.verify import Verify
from dbo_fx.pipeline import Pipeline, State
from dbo_fx.tag import tag_of

H, HEADS, EXPERTS = 8, 2, 4
OPS = torch.ops.dbo_fx


@contextmanager
def fake_ranks(world_size: int = 2) -> Iterator[str]:
    """Pretended ranks: graphs have the right structure, results of collectives are garbage."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield str(groups.name_of(None))
    finally:
        dist.destroy_process_group()


@contextmanager
def one_rank() -> Iterator[str]:
    """A real gloo group of this process alone, for numbers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield str(groups.name_of(None))
    finally:
        dist.destroy_process_group()


class PlainMoe(nn.Module):
    """Layers of attention within a token, gate, dispatch, expert, combine and a shared expert."""

    def __init__(self, layers: int = 1) -> None:
        """The same weights every time, of the default group."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(values, requires_grad=False)

        self.qkv = nn.ParameterList(weight(3 * H, H) for _ in range(layers))
        self.gate = nn.ParameterList(weight(EXPERTS, H) for _ in range(layers))
        self.expert = nn.ParameterList(weight(H, H) for _ in range(layers))
        self.shared = nn.ParameterList(weight(H, H) for _ in range(layers))
        self.head = weight(H, H)
        self.group = groups.name_of(None)

    def attend(self, layer: int, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]; only the heads of one token see each other."""
        q, k, v = F.linear(x, self.qkv[layer]).view(-1, 3, HEADS, H // HEADS).unbind(1)
        return x + F.scaled_dot_product_attention(q, k, v).flatten(1)

    def experts(self, layer: int, h: Tensor) -> Tensor:
        """[T, H] -> [T, H] through dispatch and combine."""
        scores, ids = F.linear(h, self.gate[layer]).softmax(-1).topk(2, -1)
        rows, ids, scores = OPS.dispatch(h, ids, scores, self.group)
        y = F.linear(rows, self.expert[layer]) * (scores * (ids + 1)).sum(-1, keepdim=True)
        return OPS.combine(y, h.shape[0], self.group)

    def body(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H] through all layers."""
        for layer in range(len(self.qkv)):
            h = self.attend(layer, x)
            x = h + self.experts(layer, h) + F.silu(F.linear(h, self.shared[layer]))
        return x

    def forward(self, x: Tensor) -> Any:
        """[T, H] -> [T, H]."""
        return F.linear(self.body(x), self.head)


class CachedMoe(PlainMoe):
    """Attention over a key cache [N, H] a layer, which every step appends to at a counter [1]."""

    def forward(  # type: ignore[override]
        self, x: Tensor, counter: Tensor, caches: Sequence[Tensor]
    ) -> Any:
        """x [T, H]; counter [1] and caches [N, H] are written in place."""
        slots = counter + torch.arange(x.shape[0])
        for layer in range(len(self.qkv)):
            cache = caches[layer]
            q, k, v = F.linear(x, self.qkv[layer]).chunk(3, -1)
            cache.index_copy_(0, slots, k + v)
            seen = torch.arange(cache.shape[0]) <= slots[:, None]
            scores = (q @ cache.T).masked_fill(~seen, float("-inf"))
            h = x + scores.softmax(-1) @ cache
            x = h + self.experts(layer, h) + F.silu(F.linear(h, self.shared[layer]))
        counter.add_(x.shape[0])
        return F.linear(x, self.head)


class TwoLaunches(PlainMoe):
    """Rows and weights travel in two all-gathers, results come back by reduce-scatter."""

    def experts(self, layer: int, h: Tensor) -> Tensor:
        got = funcol.all_gather_tensor(h, 0, self.group)
        weights = funcol.all_gather_tensor(h.softmax(-1), 0, self.group)
        return funcol.reduce_scatter_tensor(got * weights, "sum", 0, self.group)


class Appends(PlainMoe):
    """Writes its rows into a cache and reads all of it."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:  # type: ignore[override]
        cache.index_copy_(0, torch.arange(x.shape[0]), x)
        return self.body(x @ cache.T @ cache)


def rows(count: int = 6, seed: int = 1) -> Tensor:
    """[T, H] random rows."""
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def arguments(model: nn.Module, count: int = 6) -> tuple[Any, ...]:
    """What the model takes: x, and for a cached one the counter and caches with 2 rows filled."""
    if not isinstance(model, CachedMoe):
        return (rows(count),)
    caches = [torch.cat([rows(2, seed=2), torch.zeros(14, H)]) for _ in model.qkv]
    return rows(count), torch.tensor([2]), caches


@dataclass(frozen=True)
class Traced:
    """A captured graph, and the real inputs that it was captured with."""

    captured: CapturedGraph
    inputs: tuple[Any, ...]

    def fresh(self) -> CapturedGraph:
        """A copy that a pipeline may take over."""
        return replace(self.captured, module=copy.deepcopy(self.captured.module))

    def args(self, count: int | None = None) -> list[Any]:
        """Copies of the inputs, with another number of rows on request."""
        token = self.captured.token_inputs[0]
        old = self.inputs[token.index].shape[token.dim]
        new = []
        for index, value in enumerate(self.inputs):
            if isinstance(value, int):
                value = value if count is None or value != old else count
            elif index == token.index and count is not None:
                value = rows(count)
            else:
                value = value.clone()
            new.append(value)
        return new


def traced(
    model: Callable[..., Any], args: Sequence[Any], dim: int = 0, split_dim: int | None = None
) -> Traced:
    """Capture a model; the first argument holds the tokens."""
    found: list[Any] = []

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        found.append(from_dynamo(gm, split_dim))

        def call(*inputs: Any) -> Any:
            found.append(inputs)
            return gm(*[i.clone() if isinstance(i, Tensor) else i for i in inputs])

        return call

    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(args[0], dim)
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    captured, inputs = found
    return Traced(captured, inputs)


@cache
def _traced_once(kind: type[PlainMoe], layers: int, ranks: int) -> Traced:
    if dist.is_initialized():
        assert dist.get_world_size() == ranks
        group: AbstractContextManager[object] = nullcontext()
    else:
        group = one_rank() if ranks == 1 else fake_ranks(ranks)
    with group:
        model = kind(layers)
        return traced(model, arguments(model))


def traced_model(kind: type[PlainMoe] = PlainMoe, layers: int = 1, ranks: int = 2) -> Traced:
    """The captured model, traced once in a test run."""
    return _traced_once(kind, layers, ranks)


UNTIL = ("microbatch", "halves", "schedule", "streams", "lower", "verify", "emit")


def run_passes(
    captured: CapturedGraph,
    until: str = "emit",
    schedule: str | Schedule = "mlp_shared_overlap",
    count: int = 2,
    transport: str | Contract = "gloo",
) -> State:
    """The pipeline's state after the named pass, for two pretended ranks if there is no group."""
    order = schedules.load(schedule) if isinstance(schedule, str) else schedule
    carrier = contract(transport) if isinstance(transport, str) else transport
    passes = [
        Microbatch(count),
        Halves(carrier),
        Order(order),
        Streams(order.name, carrier),
        Lower(),
        Verify(carrier),
        Emit(),
    ]
    chosen = passes[: UNTIL.index(until) + 1]
    group = nullcontext() if dist.is_initialized() else fake_ranks()
    with group:
        return Pipeline([Normalize(), Regions(), Soundness(), *chosen]).run(captured)[0]


def module_of(state: State) -> GraphModule:
    """The state's graph, runnable as long as it holds no markers."""
    root = {n.target: n for n in state.graph.nodes if n.op == "get_attr"}
    constants = {name: getattr(state.captured.module, name) for name in root}
    return GraphModule({**constants, **state.segments}, state.graph)


def text_of(graph: Graph) -> str:
    """The graph with numbers for names, so that it is the same under every version of torch."""
    number: dict[Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":  # Numbered at first use: Dynamo's order of inputs may change.
            continue
        args = ", ".join(_argument(a, number) for a in node.args)
        number[node] = f"%{sum(n.startswith('%') for n in number.values())}"
        tag = tag_of(node)
        place = ""
        if tag is not None:
            action = tag.action.bound() if tag.phase and tag.microbatch is not None else ""
            place = " ".join(filter(None, [tag.stream, tag.role, action]))
        left = f"{number[node]} = " if node.users else ""
        target = node.target if node.op != "call_function" else qualified_name(node.target)
        lines.append(f"{place:<28}{left}{node.op} {target}({args})")
    return "\n".join(lines) + "\n"


def _argument(value: Any, number: dict[Node, str]) -> str:
    if isinstance(value, Node):
        inputs = sum(n.startswith("in") for n in number.values())
        return number.setdefault(value, f"in{inputs}")
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(v, number) for v in value)}]"
    return str(value)


def nodes_of(graph: Graph, target: Any) -> list[Node]:
    """All calls of a target, in order."""
    return [n for n in graph.nodes if n.target is target]


def markers(graph: Graph) -> list[Node]:
    """Records, waits and keepalives in order."""
    return [n for n in graph.nodes if n.target in (sync.record, sync.wait, sync.keepalive)]
