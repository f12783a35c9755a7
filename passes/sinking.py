"""Let every recv sink to the first use of what it brings, where the contract allows it.

needs:    nodes in the order of a schedule, `state.dependencies`
ensures:  where a recv is only the program's own wait (`Contract.sinks`), it stands with the items
          of what arrives right before the segment, the send or the merge that needs them first;
          never behind the next send of its flight, nor behind any send over its group where the
          contract limits what is in flight; no segment is cut by it; `state.actions` in the new
          order. Other contracts change nothing
before -> after: `C_m1.recv; C_m0.send; S_m0; A0_m1` -> `C_m0.send; S_m0; C_m1.recv; A0_m1`

The streams pass calls it, so that events and keepalives follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from dbo_fx.contracts import Contract
from dbo_fx.ir import Action, Half
from dbo_fx.passes.halves import BUFFERS, OPS, argument
from dbo_fx.passes.schedule import action_of, is_same_segment, nodes_by_action
from dbo_fx.pipeline import State

_SENDS = {op for (_, half), op in OPS.items() if half is Half.SEND}
_RECVS = {op for (_, half), op in OPS.items() if half is Half.RECV}


def sink_recvs(state: State, contract: Contract) -> State:
    """Move the recvs in place.

    Args:
        state: The graph in its schedule's order.
        contract: What the transport promises.

    Returns:
        The state with its actions in the new order.
    """
    if not contract.sinks:
        return state
    order = list(state.graph.nodes)
    position = {node: index for index, node in enumerate(order)}
    later: defaultdict[Node, list[Node]] = defaultdict(list)
    for dependency in state.dependencies:
        later[dependency.before].append(dependency.after)
    limits = _Limits(order, contract)
    moves: list[tuple[list[Node], Node]] = []
    for action, group in nodes_by_action(order).items():
        if action.half is not Half.RECV:
            continue
        own = set(group)
        needing = {user for node in group for user in (*node.users, *later[node])} - own
        needing |= limits.of(group, position)
        if needing:
            moves.append((group, _start(order, min(map(position.__getitem__, needing)))))
    for group, target in moves:
        for node in group:
            target.prepend(node)
    state.graph.lint()
    found = (action_of(node) for node in state.graph.nodes)
    present: dict[Action, None] = dict.fromkeys(a for a in found if a is not None)
    return replace(state, actions=tuple(present))


class _Limits:
    """The sends that a recv must stay before."""

    def __init__(self, order: Iterable[Node], contract: Contract) -> None:
        self.by_flight: defaultdict[object, list[Node]] = defaultdict(list)
        self.by_group: defaultdict[object, list[Node]] = defaultdict(list)
        self.is_limited = contract.max_in_flight is not None or contract.slots is not None
        for node in order:
            if node.target in _SENDS:
                self.by_flight[_flight(node)].append(node)
                self.by_group[argument(node, "group")].append(node)

    def of(self, group: Iterable[Node], position: dict[Node, int]) -> set[Node]:
        """The next send of each recv's flight, and where needed the next one of its group."""
        found: set[Node] = set()
        for recv in group:
            if recv.target not in _RECVS:
                continue
            sends = [self.by_flight[_flight(recv)]]
            if self.is_limited:
                sends.append(self.by_group[argument(recv, "group")])
            for candidates in sends:
                behind = (n for n in candidates if position[n] > position[recv])
                found |= set([first] if (first := next(behind, None)) else [])
        return found


def _flight(half: Node) -> object:
    action = action_of(half)
    phase = None if action is None else action.phase
    return argument(half, "group"), phase, argument(half, "flight")


def _start(order: list[Node], index: int) -> Node:
    """The first node of what may not be cut around a node: its segment, or its launches."""
    while index and _belong_together(order[index - 1], order[index]):
        index -= 1
    return order[index]


def _belong_together(one: Node, other: Node) -> bool:
    here, there = action_of(one), action_of(other)
    if here is None or there is None or here.half is not there.half:
        return False
    if here.half is None:
        return is_same_segment(one, other)
    return here == there and {one.target, other.target} <= _SENDS | {BUFFERS}
