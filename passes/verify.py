"""Prove that the program keeps every dependency on its streams, and that lifetimes are covered.

needs:    the lowered graph with markers, its dependencies
ensures:  a certificate, or a refusal that names the two nodes and the missing order
before -> after: the graph is not changed

Happens-before is computed with one clock per stream: a node's clock holds, per stream, the position
of the last node known to be complete before it starts. Streams run in order; a wait takes over the
clock of its event's record.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from torch.fx import Node

from dbo_fx import sync
from dbo_fx.errors import VerificationError
from dbo_fx.ir import COMP, Action, Half
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS, stream_of
from dbo_fx.pipeline import State

Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was proven for one program.

    Attributes:
        dependencies: Orders checked, over values and storages.
        cross_stream: How many of them cross streams.
        communications: Sends matched with their recv.
        max_in_flight: Most communications sent and not yet received at once.
        events: Events recorded and waited for.
    """

    dependencies: int
    cross_stream: int
    communications: int
    max_in_flight: int
    events: int

    def __str__(self) -> str:
        """One paragraph."""
        return (
            f"{self.dependencies} dependencies hold, {self.cross_stream} of them across streams; "
            f"{self.communications} sends have one recv each, at most {self.max_in_flight} in "
            f"flight; {self.events} events; all streams joined"
        )


@dataclass(frozen=True, slots=True)
class Verify:
    """See the module's contract.

    Attributes:
        max_in_flight: The transport's limit; None for no limit.
    """

    max_in_flight: int | None = None
    name: str = "verify"

    def apply(self, state: State) -> tuple[State, str]:
        """Check; the state stays as it is, the certificate is the report.

        Raises:
            VerificationError: the first broken rule.
        """
        nodes = list(state.graph.nodes)
        position = {n: i for i, n in enumerate(nodes)}
        clocks, events = _clocks(nodes)
        crossing = _check_dependencies(state, position, clocks)
        pairs, most = _check_communication(nodes, self.max_in_flight)
        _check_lifetimes(nodes, position, clocks)
        _check_joined(nodes, position, clocks)
        certificate = Certificate(len(state.dependencies), crossing, pairs, most, events)
        return replace(state, certificate=certificate), str(certificate)


def _clocks(nodes: list[Node]) -> tuple[dict[Node, Clock], int]:
    now: defaultdict[str, Clock] = defaultdict(dict)
    recorded: dict[int, Clock] = {}
    clocks: dict[Node, Clock] = {}
    for index, node in enumerate(nodes):
        stream = stream_of(node)
        if node.target is sync.wait:
            event = _event(node)
            if event not in recorded:
                raise VerificationError(
                    f"{stream} waits for e{event}, which is not recorded before. Put the record "
                    "behind the last node that the wait is for."
                )
            for other, seen in recorded[event].items():
                now[stream][other] = max(now[stream].get(other, -1), seen)
        clocks[node] = dict(now[stream])
        now[stream][stream] = index
        if node.target is sync.record:
            event = _event(node)
            if event in recorded:
                raise VerificationError(
                    f"e{event} is recorded twice; give the second its own event"
                )
            recorded[event] = dict(now[stream])
    return clocks, len(recorded)


def _event(node: Node) -> int:
    event = node.args[0]
    assert isinstance(event, int)
    return event


def _check_dependencies(state: State, position: dict[Node, int], clocks: dict[Node, Clock]) -> int:
    crossing = 0
    for d in state.dependencies:
        if d.before.op in ("placeholder", "get_attr"):
            continue
        crossing += stream_of(d.before) != stream_of(d.after)
        if clocks[d.after].get(stream_of(d.before), -1) < position[d.before]:
            raise VerificationError(
                f"{_named(d.after)} is not ordered behind {_named(d.before)} ({d.kind}). Record an "
                f"event on {stream_of(d.before)} behind {d.before.name} and wait for it on "
                f"{stream_of(d.after)} before {d.after.name}."
            )
    return crossing


def _named(node: Node) -> str:
    action = action_of(node)
    of = "" if action is None else f" of {action.bound()}"
    return f"{node.name}{of} on {stream_of(node)}"


def _check_communication(nodes: list[Node], limit: int | None) -> tuple[int, int]:
    open_: dict[Action, set[object]] = {}
    most = pairs = 0
    for node in nodes:
        action = action_of(node)
        if action is None or node.target not in SENDS | RECVS:
            continue
        slot, key = node.args[-1], action.communication
        if action.half is Half.SEND:
            if slot in open_.setdefault(key, set()):
                raise VerificationError(f"{_named(node)}: slot {slot} is sent twice")
            open_[key].add(slot)
            most = max(most, len(open_))
            if limit is not None and len(open_) > limit:
                raise VerificationError(
                    f"{_named(node)}: {len(open_)} communications in flight, the transport allows "
                    f"{limit}. Receive {next(iter(open_)).bound()} first."
                )
        else:
            if slot not in open_.get(key, set()):
                raise VerificationError(f"{_named(node)}: received, but not in flight")
            open_[key].discard(slot)
            if not open_[key]:
                del open_[key]
                pairs += 1
    if open_:
        raise VerificationError(f"{next(iter(open_)).bound()} is sent and never received")
    return pairs, most


def _check_lifetimes(
    nodes: list[Node], position: dict[Node, int], clocks: dict[Node, Clock]
) -> None:
    """What another stream touches is named on its own stream again, after that stream waited."""
    for node in nodes:
        stream = stream_of(node)
        if node.op == "placeholder" or node.op == "output" or stream == COMP:
            continue
        for argument in node.all_input_nodes:
            if argument.op in ("placeholder", "get_attr"):
                continue
            held = any(
                clocks[user].get(stream, -1) >= position[node]
                for user in argument.users
                if stream_of(user) == stream_of(argument)
            )
            if not held:
                raise VerificationError(
                    f"{argument.name} may be freed while {_named(node)} still uses it: no later "
                    f"use on {stream_of(argument)} waits for {stream}. Add a keepalive behind the "
                    "recv."
                )


def _check_joined(nodes: list[Node], position: dict[Node, int], clocks: dict[Node, Clock]) -> None:
    output = nodes[-1]
    last: dict[str, Node] = {}
    for node in nodes[:-1]:
        if node.target is not sync.record:
            last[stream_of(node)] = node
    for stream, node in last.items():
        if clocks[output].get(stream, -1) < position[node]:
            raise VerificationError(
                f"{stream} is not joined at the end: {_named(node)} may still run. Wait for it on "
                f"{COMP} before the output."
            )
