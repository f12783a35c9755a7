"""Give every node a stream, and every cross-stream dependency an event.

needs:    an ordered graph with dependencies
ensures:  recvs at the first use of what they bring, where the contract allows it (`sinking`);
          sends and recvs on the streams that the contract names, all else on the compute stream; a
          record behind the last needed node and a wait before the needing one, none of them
          redundant, and none at all where the contract names one stream; inputs and buffers of
          every communication kept alive on the compute stream until behind its recv; the n-th send
          over a group in slot n modulo the contract's slots, its recv in the same;
          `state.program` is bound
before -> after: `send; ...; recv` -> `record e0; wait e0 (comm); send (comm); record e1 (comm);
                 ...; wait e1; recv; keepalive`
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from dbo_fx import sync
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMP, Action, Half, Keepalive, Merge, Program, Record, Run, Step, Wait
from dbo_fx.passes.halves import BUFFERS, OPS, argument
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.sinking import sink_recvs
from dbo_fx.pipeline import State
from dbo_fx.sm_sharing import SmSharing
from dbo_fx.tag import Tag, retag, set_tag, tag_of

SENDS = {op for (_, half), op in OPS.items() if half is Half.SEND}
RECVS = {op for (_, half), op in OPS.items() if half is Half.RECV}


@dataclass(frozen=True, slots=True)
class Streams:
    """See the module's contract.

    Attributes:
        schedule: Name for the program's header.
        contract: What the transport of the sends and recvs promises.
        sms: How the program shares SMs; stands in its header.
    """

    schedule: str
    contract: Contract
    sms: SmSharing = field(default=SmSharing())
    name: str = "streams"

    def apply(self, state: State) -> tuple[State, str]:
        """Insert the markers in place and fill `program`."""
        state = sink_recvs(state, self.contract)
        for node in state.graph.nodes:
            if node.op == "call_function":
                retag(node, stream=self._stream(node))
        if self.contract.slots is not None:
            _give_slots(state, self.contract.slots)
        kept = _keep_alive(state)
        events = _Events(state)
        events.insert(kept)
        state.graph.lint()
        program = replace(bound_program(state, self.schedule, self.contract), sms=self.sms)
        text = f"{events.count} events, {len(kept)} keepalives, {len(program.steps)} steps"
        return replace(state, program=program), text

    def _stream(self, node: Node) -> str:
        if node.target in SENDS:
            return self.contract.send_stream
        return self.contract.recv_stream if node.target in RECVS else COMP


def stream_of(node: Node) -> str:
    """The stream a node runs on."""
    tag = tag_of(node)
    return COMP if tag is None or tag.stream is None else tag.stream


@dataclass
class _Events:
    state: State
    count: int = 0
    known: defaultdict[tuple[str, str], int] = field(
        default_factory=lambda: defaultdict(lambda: -1)
    )

    def insert(self, kept: dict[Node, Node]) -> None:
        nodes = list(self.state.graph.nodes)
        position = {n: i for i, n in enumerate(nodes)}
        last = self._last_of_action(nodes)
        first = self._last_of_action(nodes[::-1])
        needs: defaultdict[Node, list[Node]] = defaultdict(list)
        pairs = [(d.before, d.after) for d in self.state.dependencies]
        for before, after in [*pairs, *((recv, keepalive) for keepalive, recv in kept.items())]:
            if stream_of(before) != stream_of(after):
                # All launches of an action stand side by side, so the first one waits for all.
                needs[first.get(_sent(after), after)].append(before)
        for node in nodes:
            befores = [last.get(_sent(before), before) for before in needs[node]]
            befores = [b for b in befores if b.op not in ("placeholder", "get_attr")]
            if befores:
                self._sync(max(befores, key=position.__getitem__), node, position)

    def _last_of_action(self, nodes: list[Node]) -> dict[Any, Node]:
        """The last send of every send action: one event covers all its launches."""
        return {_sent(n): n for n in nodes if n.target in SENDS}

    def _sync(self, before: Node, after: Node, position: dict[Node, int]) -> None:
        key = (stream_of(after), stream_of(before))
        if self.known[key] >= position[before]:
            return
        self.known[key] = position[before]
        graph, event = self.state.graph, self.count
        self.count += 1
        with graph.inserting_after(before):
            self._marker(graph.call_function(sync.record, (event, key[1])), key[1])
        with graph.inserting_before(after):
            self._marker(graph.call_function(sync.wait, (event, key[0])), key[0])

    def _marker(self, node: Node, stream: str) -> None:
        set_tag(node, Tag("sync", stream=stream))


def _sent(node: Node) -> Action | None:
    return action_of(node) if node.target in SENDS else None


def _give_slots(state: State, slots: int) -> None:
    """Bake in what the transport counts at run time: every send over a group takes the next."""
    count = Counter[str]()
    taken: dict[Any, int] = {}
    for node in state.graph.nodes:
        action = action_of(node)
        if action is None or node.target not in SENDS | RECVS:
            continue
        key = (action.communication, argument(node, "flight"))
        if node.target in SENDS:
            group = argument(node, "group")
            taken[key] = count[group] % slots
            count[group] += 1
        node.args = (*node.args, taken[key])


def _keep_alive(state: State) -> dict[Node, Node]:
    """Behind the recv of every communication, name its inputs and buffers once more.

    Returns:
        The recv of every keepalive.
    """
    sends: defaultdict[Any, list[Node]] = defaultdict(list)
    recvs: dict[Any, Node] = {}
    last: dict[Any, Node] = {}
    for node in state.graph.nodes:
        action = action_of(node)
        if node.target in SENDS and action is not None:
            sends[action.communication].append(node)
        elif action is not None and action.half is Half.RECV:
            last[action.communication] = node  # The items of what arrives have its tag too.
            if node.target in RECVS:
                recvs[action.communication] = node
    kept: dict[Node, Node] = {}
    for communication, recv in recvs.items():
        held = [a for n in sends[communication] for a in tree_leaves(n.args) if isinstance(a, Node)]
        with state.graph.inserting_after(last[communication]):
            node = state.graph.call_function(sync.keepalive, tuple(dict.fromkeys(held)))
        tag = tag_of(recv)
        assert tag is not None
        set_tag(node, replace(tag, role="sync", stream=COMP))
        kept[node] = recv
    return kept


def bound_program(state: State, schedule: str, contract: Contract) -> Program:
    """Read the program off the graph, which is the one place that says what runs."""
    halves = [n for n in state.graph.nodes if n.target in SENDS | RECVS]
    slots = {action_of(n): argument(n, "slot") for n in halves}
    steps: list[Step] = []
    for node in state.graph.nodes:
        step = _step(node, slots)
        if step is not None and (not steps or steps[-1] != step):
            steps.append(step)
    return Program(schedule, state.microbatches, state.layers, contract.name, tuple(steps))


def _step(node: Node, slots: dict[Action | None, int | None]) -> Step | None:
    tag, action = tag_of(node), action_of(node)
    if tag is None or node.target is BUFFERS:
        return None
    if node.target is sync.record:
        return Record(stream_of(node), node.args[0])  # type: ignore[arg-type]
    if node.target is sync.wait:
        return Wait(stream_of(node), node.args[0])  # type: ignore[arg-type]
    if action is not None and node.target is sync.keepalive:
        return Keepalive(stream_of(node), action.communication)
    if action is not None:
        return Run(stream_of(node), action, slots.get(action))
    return Merge(stream_of(node)) if tag.role == "merge" else None
