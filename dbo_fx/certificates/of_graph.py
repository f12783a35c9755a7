"""Read a lowered graph as an execution: what the host enqueues, with the storages it touches.

needs:    the state behind `lower`: a graph with streams, markers and segments, `effects`, `members`
ensures:  operations in host order, lifetimes included; the required order comes from the captured
          graph (`reference.py`), so that an edge that a pass lost is missed here

Emitted Python drops a variable after its last use, so a storage is freed behind the last node that
names a value in it. Views, tuples and keepalives name it too. What the caller holds (inputs,
weights, results) is never freed.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from dbo_fx import sync
from dbo_fx.certificates.execution import Execution, Kind, Operation, Storage
from dbo_fx.certificates.host import blocks_host, is_blocking
from dbo_fx.certificates.lifetimes import Lifetime, lifetimes_of
from dbo_fx.certificates.reference import Reference, Step
from dbo_fx.communication import is_communication
from dbo_fx.contracts import Contract
from dbo_fx.effects import Access, Effects, Member
from dbo_fx.ir import COMP
from dbo_fx.passes.halves import BUFFERS
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS, stream_of
from dbo_fx.pipeline import State
from dbo_fx.tag import tag_of

_INPUTS = ("placeholder", "get_attr")
_MARKERS = {sync.record: Kind.RECORD, sync.wait: Kind.WAIT}


@dataclass(frozen=True)
class GraphExecution:
    """An execution with the nodes that it was read off.

    Attributes:
        execution: The operations and the order they must keep.
        nodes: Per operation its node; None for the begin. A FREE has the node behind which it is.
        lifetimes: What the program obtains and lets go of, by birth.
    """

    execution: Execution
    nodes: tuple[Node | None, ...]
    lifetimes: tuple[Lifetime, ...] = ()


def execution_of_graph(state: State, contract: Contract) -> GraphExecution:
    """Read a lowered graph.

    Args:
        state: The state behind `lower` (and before `emit`).
        contract: The transport's contract.
    """
    return _Reader(state, contract).read()


@dataclass
class _Reader:
    state: State
    contract: Contract
    operations: list[Operation] = field(default_factory=list)
    nodes: list[Node | None] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    rename: dict[Storage, Storage] = field(default_factory=dict)
    live_in: frozenset[Storage] = frozenset()

    def __post_init__(self) -> None:
        self.blocking = {
            name: blocks_host(segment.graph.nodes) for name, segment in self.state.segments.items()
        }

    def read(self) -> GraphExecution:
        order = list(self.state.graph.nodes)
        lifetimes = lifetimes_of(self.state.effects, order)
        self.rename = _names(order, self.state.effects, lifetimes)
        self.live_in = frozenset(self.rename.get(k, k) for k in self.state.effects.live_in)
        ending: defaultdict[Node, list[Lifetime]] = defaultdict(list)
        for lifetime in lifetimes:
            if lifetime.dies is not None:
                ending[lifetime.dies].append(lifetime)
        self._add(Operation("begin", Kind.BEGIN, COMP), None)
        for node in order:
            self._read(node)
            for lifetime in ending[node]:
                stream = stream_of(lifetime.born)
                keys = frozenset(self.rename[k] for k in lifetime.storages)
                name = f"free {min(map(str, keys))}"
                self._add(Operation(name, Kind.FREE, stream, writes=keys), node)
        reference = Reference(self.steps, self.live_in)
        self._create(reference)
        execution = Execution(
            tuple(self.operations),
            reference.required(list(self.state.captured.graph.nodes)),
            self.contract,
            self._source(),
        )
        return GraphExecution(execution, tuple(self.nodes), lifetimes)

    def _source(self) -> str:
        schedule = "graph" if self.state.program is None else self.state.program.schedule
        return f"{schedule}, {self.state.layers} layers"

    def _renamed(self, access: Access) -> Access:
        named = access.reads | access.writes | access.results
        return access if self.rename.keys().isdisjoint(named) else access.renamed(self.rename)

    def _access(self, node: Node) -> Access:
        """What a node touches; a node that no pass described reads what it is given."""
        known = self.state.effects.access.get(node)
        if known is None:
            given = {n: self.state.effects.of(n).results for n in node.all_input_nodes}
            landing = [keys for n, keys in given.items() if n.target is BUFFERS]
            known = Access(frozenset().union(*given.values()), frozenset().union(*landing))
        return self._renamed(known or Access())

    def _is_known(self, node: Node) -> bool:
        """Whether a pass said what the node touches; sizes touch nothing."""
        tag = tag_of(node)
        size = tag is not None and tag.role in ("size", "total")
        return size or node in self.state.effects.access

    def _add(self, operation: Operation, node: Node | None) -> None:
        self.operations.append(operation)
        self.nodes.append(node)

    def _read(self, node: Node) -> None:
        if node.op in _INPUTS or node.target is operator.getitem or node.target is sync.keepalive:
            return
        if node.target in _MARKERS:
            kind = _MARKERS[node.target]
            event = node.args[0]
            assert isinstance(event, int)
            self._add(Operation(f"{kind.value} e{event}", kind, stream_of(node), event=event), node)
            return
        operation = self._operation(node)
        if operation is None:
            return
        tag = tag_of(node)
        role = "end" if operation.kind is Kind.END else "" if tag is None else tag.role
        index = len(self.operations)
        members = self.state.members.get(node, ())
        if operation.kind is Kind.END:
            last = len(self.state.captured.graph.nodes) + 1
            members = (Member(last, None, self._access(node)),)
        for member in members:
            access = self._renamed(member.access)
            if access is not member.access:
                member = Member(member.position, member.microbatch, access)
            self.steps.append(Step(index, operation.kind, role, member))
        self._add(operation, node)

    def _operation(self, node: Node) -> Operation | None:
        access, action = self._access(node), action_of(node)
        stream = stream_of(node)
        if node.op == "output":
            return Operation("end", Kind.END, COMP, access.reads)
        if node.target is BUFFERS:
            return Operation(node.name, Kind.ALLOCATE, stream, writes=access.results, action=action)
        if is_communication(node) or node.target in SENDS or node.target in RECVS:
            return self._communication(node, access)
        if node.op == "call_module":
            blocking = self.blocking[str(node.target)]
        elif access.reads or access.writes or not self._is_known(node):
            blocking = is_blocking(node)
        else:
            return None  # Sizes, and views of what is there already.
        return Operation(
            node.name,
            Kind.COMPUTE,
            stream,
            access.reads,
            access.writes,
            action=action,
            blocks_host=blocking,
        )

    def _communication(self, node: Node, access: Access) -> Operation:
        given = named_arguments(node)
        kind = _kind_of_communication(node)
        created = frozenset() if kind is not Kind.COLLECTIVE else access.results - access.reads
        flight = None
        if kind is not Kind.COLLECTIVE:  # The buffers that it is given, whatever `effects` say.
            given_to = self._renamed(self.state.effects.of(given["outputs"])).results
            access = replace(access, writes=access.writes | given_to)
            flight = f"{_op_name(node).rpartition('_')[0]} {given['flight']}"
        return Operation(
            node.name,
            kind,
            stream_of(node),
            access.reads,
            access.writes | created,
            action=action_of(node),
            communicator=str(given.get("group", given.get("group_name", ""))),
            transfer=_transfer(node, given),
            flight=flight,
            slot=given.get("slot"),
            blocks_host=kind is Kind.RECV and self.contract.blocks_host,
        )

    def _create(self, reference: Reference) -> None:
        """What comes into being in an operation is written by it, if another one touches it."""
        created: defaultdict[int, set[Storage]] = defaultdict(set)
        for key, index in reference.creator.items():
            created[index].add(key)
        counts = Counter(
            key
            for index, o in enumerate(self.operations)
            for key in o.reads | o.writes | created[index]
        )
        outer = self.live_in | {key for key, count in counts.items() if count > 1}
        for index, o in enumerate(self.operations):
            reads, writes = o.reads & outer, (o.writes | created[index]) & outer
            if o.kind in (Kind.BEGIN, Kind.END):
                writes |= self.live_in & counts.keys()
            self.operations[index] = replace(o, reads=reads, writes=writes)


def _names(
    order: Sequence[Node], effects: Effects, lifetimes: Iterable[Lifetime]
) -> dict[Storage, Storage]:
    """Readable names for storages, the same in every process.

    Landing buffers go by the keys of the results too, always together: they get one name. Other
    keys of one storage are parts of it.
    """
    names: dict[Storage, Storage] = {}
    for node in order:
        if node.op in _INPUTS:
            keys = sorted(effects.of(node).results, key=str)
            for index, key in enumerate(keys):
                names.setdefault(key, node.name if len(keys) == 1 else f"{node.name}.{index}")
    taken = set(names.values())
    for lifetime in lifetimes:
        short = lifetime.name.rstrip("_")
        name = lifetime.name if short in taken else short
        keys = sorted(lifetime.storages, key=str)
        one = len(keys) == 1 or lifetime.born.target is BUFFERS
        for index, key in enumerate(keys):
            names[key] = name if one else f"{name}.{index}"
    return names


def named_arguments(node: Node) -> dict[str, Any]:
    """An op's arguments by the names in its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = (a.name for a in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _kind_of_communication(node: Node) -> Kind:
    if node.target in SENDS:
        return Kind.SEND
    return Kind.RECV if node.target in RECVS else Kind.COLLECTIVE


def _transfer(node: Node, given: Mapping[str, Any]) -> str:
    """`all_gather x3`: a recv says it through its buffers, which are its send's."""
    outputs = given.get("outputs")
    if isinstance(outputs, Node) and outputs.target is BUFFERS:
        given = named_arguments(outputs)
    sent = given.get("inputs", given.get("outputs", [None]))
    count = len(sent) if isinstance(sent, Sequence) else 1
    return f"{given.get('collective', _op_name(node))} x{count}"


def _op_name(node: Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return str(node.target._schema.name).split("::")[1]
