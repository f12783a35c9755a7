"""Replace every dispatch and combine by buffers, a send and a recv.

needs:    the microbatched graph, each communication still in one piece
ensures:  send directly followed by recv; the buffers are allocated by a node of their own on the
          compute stream; `state.dependencies` lists what must run before what from here on
before -> after: `rx, ri, rw = dispatch(x, ids, w)` ->
                 `b = comm_buffers([x, ids, w]); dispatch_send([x, ids, w], b, ..., flight);
                 dispatch_recv(b, ..., flight); rx = b[0]`

The halves name the transport that carries them. Which of its slots they use depends on the order;
the streams pass adds it.

Allocating on the compute stream, before the event that the communication stream waits for, makes
the buffers safe to reuse without `record_stream`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from dbo_fx.capture import value_of, where
from dbo_fx.comm.expert_layouts import ROWS_COMBINE, kind_of, rows_dispatch
from dbo_fx.communication import Communication, Launch
from dbo_fx.contracts import Contract
from dbo_fx.effects import Access, Key
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.ir import Half, Phase
from dbo_fx.pipeline import State
from dbo_fx.tag import Tag, set_tag

BUFFERS = torch.ops.dbo_fx.comm_buffers.default
OPS: dict[tuple[Phase, Half], Any] = {
    (Phase.D, Half.SEND): torch.ops.dbo_fx.dispatch_send.default,
    (Phase.D, Half.RECV): torch.ops.dbo_fx.dispatch_recv.default,
    (Phase.C, Half.SEND): torch.ops.dbo_fx.combine_send.default,
    (Phase.C, Half.RECV): torch.ops.dbo_fx.combine_recv.default,
}


@dataclass(frozen=True, slots=True)
class Halves:
    """See the module's contract.

    Attributes:
        contract: What the halves' transport promises.
    """

    contract: Contract
    name: str = "halves"

    def apply(self, state: State) -> tuple[State, str]:
        """Split every copy of every communication; the graph is changed in place.

        Raises:
            UnsupportedGraphError: The transport cannot carry a communication's launches together,
                or not this layout of rows.
        """
        for comm in state.communications:
            _refuse_too_many(comm, self.contract)
            for launch in comm.launches:
                _refuse_layout(launch, self.contract)
        for m in range(state.microbatches):
            for comm in state.communications:
                _split(state, comm, m, self.contract)
        state.graph.lint()
        dependencies = tuple(state.effects.dependencies(state.graph.nodes))
        text = (
            f"{len(state.communications) * state.microbatches} communications in two halves; "
            f"{len(dependencies)} dependencies"
        )
        return replace(state, dependencies=dependencies), text


def argument(node: Node, name: str) -> Any:
    """What a node of one of this pass's ops is given, by the name in the op's schema.

    Args:
        node: A send, a recv, or the allocation of buffers.
        name: For example `flight`, `slot`, `transport` or `group`.

    Returns:
        The argument; None where it is left out.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    index = names.index(name)
    return node.args[index] if index < len(node.args) else None


def _refuse_too_many(comm: Communication, contract: Contract) -> None:
    """Launches that travel together are all un-received until the last one is received."""
    count = len(comm.launches)
    limit = contract.max_in_flight if contract.slots is None else 1
    if limit is not None and count > limit:
        raise UnsupportedGraphError(
            f"{where(comm.launches[1].node)}: {comm} is {count} operations, all un-received "
            f"at once; transport {contract.name!r} allows {limit} un-received operation(s) of a "
            "communication over a group. Send all its tensors in one operation "
            "(torch.ops.dbo_fx.dispatch), or choose another transport."
        )


def _refuse_layout(launch: Launch, contract: Contract) -> None:
    """Kernels that move one layout only must not be given another one."""
    carries = contract.carries
    if launch.rows and "rows" in carries:
        if launch.collective == "all_gather" and launch.experts is None:
            raise UnsupportedGraphError(
                f"{where(launch.node)}: transport {contract.name!r} sends a token only where it is "
                "wanted, so it must know the number of experts. Pass num_experts=E to "
                "torch.ops.dbo_fx.dispatch."
            )
        return
    if kind_of(launch.collective) in carries or _is_twin(launch, contract):
        return
    wanted = {
        "batched": "the batched layout: torch.ops.dbo_fx.dispatch_batched / combine_batched; for a "
        'Hugging Face model expert_parallel(model, layout="batched", max_tokens=M)',
        "rows": "rows: torch.ops.dbo_fx.dispatch / combine; for a Hugging Face model "
        "expert_parallel(model)",
        "collectives": "collectives: torch.ops.dbo_fx.dispatch / combine",
    }
    raise UnsupportedGraphError(
        f"{where(launch.node)}: transport {contract.name!r} does not carry {launch.collective}. "
        f"It carries {'; or '.join(wanted[c] for c in carries)}. Change the model so, or choose "
        "another transport."
    )


def _is_twin(launch: Launch, contract: Contract) -> bool:
    """On CPU the twin of batched kernels also carries collectives: any program can be tested."""
    on_cpu = value_of(launch.inputs[0]).device.type != "cuda"
    return on_cpu and contract.carries == ("batched",)


def _exchange(launch: Launch, contract: Contract) -> str:
    """What the halves do: collectives, or the exchange that the transport has kernels for."""
    if not launch.rows or "rows" not in contract.carries:
        return launch.collective
    dispatch = launch.collective == "all_gather"
    return rows_dispatch(launch.experts or 0) if dispatch else ROWS_COMBINE


def _split(state: State, comm: Communication, m: int, contract: Contract) -> None:
    for index, launch in enumerate(comm.launches):
        flight = m + index * state.microbatches
        _split_launch(state, comm, launch, m, contract, flight)


def _split_launch(
    state: State, comm: Communication, launch: Launch, m: int, contract: Contract, flight: int
) -> None:
    transport, exchange = contract.name, _exchange(launch, contract)
    graph, effects, env = state.graph, state.effects, state.copies[m]
    inputs = [env[n] for n in launch.inputs]
    tag = Tag("comm", comm.phase, comm.layer, m)
    stem = f"{comm.phase.value}_m{m}_l{comm.layer}"
    landing = [_landing_keys(state, launch, i, m) for i in range(len(launch.results))]
    sent = frozenset(k for n in inputs for k in effects.of(n).results)
    arrived = frozenset(k for keys in landing for k in keys)

    def call(function: Any, args: tuple[Any, ...], half: Half, name: str, access: Access) -> Node:
        node = graph.call_function(function, args)
        node.name = f"{stem}_{name}" + (f"_{flight}" if flight != m else "")
        node.meta.update(val=None, stack_trace=launch.node.meta.get("stack_trace"))
        set_tag(node, replace(tag, half=half))
        effects.access[node] = access
        return node

    old = env[launch.node]
    with graph.inserting_before(old):
        args: tuple[Any, ...] = (inputs, exchange, launch.group)
        buffers = call(BUFFERS, args, Half.SEND, "buffers", Access(results=arrived))
        buffers.meta["val"] = [_value(launch, i) for i in range(len(launch.results))]
        args = (inputs, buffers, exchange, launch.group, transport, flight)
        access = Access(sent, arrived)
        call(OPS[comm.phase, Half.SEND], args, Half.SEND, "send", access)
        args = (buffers, launch.group, transport, flight)
        call(OPS[comm.phase, Half.RECV], args, Half.RECV, "recv", Access(arrived, arrived))
        for i, results in enumerate(launch.results):
            for result in results:
                access = Access(results=landing[i])
                item = call(operator.getitem, (buffers, i), Half.RECV, f"out{i}", access)
                item.meta["val"] = value_of(result)
                env[result].replace_all_uses_with(item)
                if result is not launch.node:
                    _erase(state, env[result])
                env[result] = item
    if not old.users:
        _erase(state, old)


def _erase(state: State, node: Node) -> None:
    state.graph.erase_node(node)
    state.effects.access.pop(node, None)


def _landing_keys(state: State, launch: Launch, index: int, m: int) -> frozenset[Key]:
    """The storages that stand for what arrives: those of the results, which readers depend on."""
    copies = [state.copies[m][n] for n in launch.results[index]]
    keys = [state.effects.of(c).results for c in copies]
    own = frozenset[Key]({("landing", launch.node.name, index, m)})
    return own.union(*keys)


def _value(launch: Launch, index: int) -> Any:
    """The fake tensor that arrives; where no result is used, its shape does not matter."""
    results = launch.results[index]
    value = value_of(results[0]) if results else None
    if value is None:
        values = value_of(launch.node)
        value = values[index] if isinstance(values, tuple | list) else values
    return value
