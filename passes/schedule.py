"""Put the nodes into the order of a schedule.

needs:    communications in halves, tags with microbatches, `state.dependencies`
ensures:  sizes and slices first, then the actions in the schedule's order, merges last; shared
          nodes right before the first action that needs them; every dependency holds in the new
          order
before -> after: all of m0, all of m1 ->
                 `A0_m0@0 A1_m0@0 D_m0.send@0 A0_m1@0 A1_m1@0 D_m0.recv@0 ...`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.fx import Node

from dbo_fx.capture import where
from dbo_fx.effects import Dependency
from dbo_fx.errors import ScheduleError
from dbo_fx.ir import Action, Half, Phase, Schedule, bind, mark
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.pipeline import State
from dbo_fx.tag import tag_of

FIRST_ROLES = ("total", "size", "slice")


@dataclass(frozen=True, slots=True)
class Order:
    """See the module's contract.

    Attributes:
        schedule: The steady state to unroll.
    """

    schedule: Schedule
    name: str = "schedule"

    def apply(self, state: State) -> tuple[State, str]:
        """Reorder the graph in place; fill `actions`.

        Raises:
            ScheduleError: the schedule breaks a dependency of this graph.
        """
        members = nodes_by_action(state.graph.nodes)
        bound = bind(self.schedule, state.layers, state.microbatches)
        actions = tuple(a for a in bound if a in members)
        missing = set(members) - set(actions)
        assert not missing, f"schedule leaves out {sorted(a.bound() for a in missing)}"
        self._check(state, actions)
        self._reorder(state, [n for a in actions for n in members[a]])
        state.graph.lint()
        empty = len(bound) - len(actions)
        text = f"{self.schedule.name}: {len(actions)} actions, {empty} empty ones left out"
        return replace(state, actions=actions, calls=_calls(state)), text

    def _check(self, state: State, actions: tuple[Action, ...]) -> None:
        step = {action: i for i, action in enumerate(actions)}
        for dependency in state.dependencies:
            before, after = action_of(dependency.before), action_of(dependency.after)
            if before is None or after is None or step[before] <= step[after]:
                continue
            raise ScheduleError(self._message(dependency, actions, step[after]))

    def _message(self, dependency: Dependency, actions: tuple[Action, ...], at: int) -> str:
        before, after = action_of(dependency.before), action_of(dependency.after)
        assert before is not None
        assert after is not None
        reason = (
            "its result" if dependency.kind == "data" else f"the same storage ({dependency.kind})"
        )
        low = max(0, at - 8)
        return (
            f"{self.schedule.name}, layer {after.layer}, step {at + 1} (counted from 1): "
            f"{after.bound()} runs before {before.bound()}\n"
            f"{mark(actions[low:at], after.bound(), after.lane, Action.bound)}\n"
            f"  {where(dependency.after)} needs {where(dependency.before)}: {reason}. "
            f"See the lanes: dbo-fx show {self.schedule.name}"
        )

    def _reorder(self, state: State, ordered: list[Node]) -> None:
        graph = state.graph
        first, shared, last = _outside_actions(graph.nodes)
        position = {n: i for i, n in enumerate(graph.nodes)}
        needs: defaultdict[Node, list[Node]] = defaultdict(list)
        for dependency in state.dependencies:
            if dependency.before in shared:
                needs[dependency.after].append(dependency.before)
        placed: set[Node] = set()
        order = list(first)
        for group in _by_action(ordered):
            wanted = _closure(group, needs, placed)
            order += sorted(wanted, key=position.__getitem__)
            placed |= wanted
            order += group
        # Shared nodes that no action needs: writes to inputs, asserts, what only outputs need.
        order += sorted(shared - placed, key=position.__getitem__)
        order += last
        here = graph._root
        for node in order:
            if here._next is not node:
                here.append(node)
            here = node


def _calls(state: State) -> tuple[tuple[Node, int | None], ...]:
    source = {copy: (node, m) for m, env in enumerate(state.copies) for node, copy in env.items()}
    found = []
    for node in state.graph.nodes:
        tag = tag_of(node)
        if tag is not None and tag.role in ("compute", "shared"):
            found.append((source[node][0], tag.microbatch))
    return tuple(found)


def is_same_segment(one: Node, other: Node) -> bool:
    """Whether two nodes that follow each other may share a segment: one action, or A0 and A1."""
    a, b = action_of(one), action_of(other)
    if a is None or b is None or a == b:
        return a == b
    both_attention = {a.phase, b.phase} == {Phase.A0, Phase.A1}
    return both_attention and (a.microbatch, a.layer) == (b.microbatch, b.layer)


def nodes_by_action(nodes: Iterable[Node]) -> dict[Action, list[Node]]:
    """The nodes of every action, in graph order."""
    members: defaultdict[Action, list[Node]] = defaultdict(list)
    for node in nodes:
        action = action_of(node)
        if action is not None:
            members[action].append(node)
    for action, group in members.items():
        if action.half is Half.SEND:  # All buffers first, so that one event serves all launches.
            group.sort(key=lambda n: n.target is not BUFFERS)
    return dict(members)


def action_of(node: Node) -> Action | None:
    """The action a node belongs to; None for sizes, slices, shared and merge nodes."""
    tag = tag_of(node)
    return None if tag is None or tag.phase is None or tag.microbatch is None else tag.action


def _outside_actions(nodes: Iterable[Node]) -> tuple[list[Node], set[Node], list[Node]]:
    first, shared, last = [], set(), []
    for node in nodes:
        tag = tag_of(node)
        if node.op in ("placeholder", "get_attr") or (tag and tag.role in FIRST_ROLES):
            first.append(node)
        elif tag is not None and tag.role == "shared":
            shared.add(node)
        elif node.op == "output" or (tag and tag.role == "merge"):
            last.append(node)
    return first, shared, last


def _by_action(ordered: Iterable[Node]) -> Iterable[list[Node]]:
    group: list[Node] = []
    for node in ordered:
        if group and not is_same_segment(group[0], node):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _closure(group: Iterable[Node], needs: dict[Node, list[Node]], placed: set[Node]) -> set[Node]:
    """The shared nodes that a group needs and that do not stand yet."""
    found: set[Node] = set()
    todo = list(group)
    while todo:
        for node in needs.get(todo.pop(), ()):
            if node not in placed and node not in found:
                found.add(node)
                todo.append(node)
    return found
