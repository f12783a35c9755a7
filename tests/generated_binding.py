"""From an order of actions to a program: streams, slots, events and keepalives, without a model.

Events stand where an order between streams does not hold yet, and nowhere else, unless `Slack`
asks for more or moves them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from damage_order import Key, Shape, needed
from dbo_fx.contracts import Contract
from dbo_fx.ir import COMM, COMP, Action, Half, Keepalive, Merge, Program, Record, Run, Step, Wait


@dataclass
class Flights:
    """Slots and un-received operations of one region over one communicator."""

    contract: Contract
    count: int = 0
    slot: dict[Action, int | None] = field(default_factory=dict)
    flying: dict[Action, int | None] = field(default_factory=dict)

    def allows(self, action: Action) -> bool:
        """Whether the contract allows this action now."""
        if action.half is not Half.SEND:
            return True
        limit = self.contract.max_in_flight
        if limit is not None and len(self.flying) >= limit:
            return False
        return self.contract.slots is None or self._next() not in self.flying.values()

    def _next(self) -> int | None:
        return None if self.contract.slots is None else self.count % self.contract.slots

    def run(self, action: Action) -> int | None:
        """Account for an action; the slot it uses."""
        if action.half is None:
            return None
        whole = action.communication
        if action.half is Half.SEND:
            self.slot[whole] = self.flying[whole] = self._next()
            self.count += 1
        else:
            self.flying.pop(whole)
        return self.slot[whole]


def is_allowed(actions: Iterable[Action], contract: Contract) -> bool:
    """Whether an order keeps the contract's slots and in-flight limit."""
    flights = Flights(contract)
    for action in actions:
        if not flights.allows(action):
            return False
        flights.run(action)
    return True


@dataclass(frozen=True, slots=True)
class Slack:
    """Where markers go: right where they are needed, or later and earlier at random.

    Attributes:
        rng: Draws; None for the tight form.
        redundant: Events that nothing needs.
    """

    rng: Random | None = None
    redundant: int = 0

    def late(self, low: int, high: int) -> int:
        """A place for a record or keepalive, `low` unless there is slack."""
        if self.rng is None or low >= high or self.rng.random() < 0.5:
            return low
        return self.rng.randint(low, high)

    def early(self, low: int, high: int) -> int:
        """A place for a wait, `high` unless there is slack."""
        if self.rng is None or low >= high or self.rng.random() < 0.5:
            return high
        return self.rng.randint(low, high)


def program_of(
    actions: Sequence[Action],
    shape: Shape,
    contract: Contract,
    name: str = "generated",
    slack: Slack | None = None,
) -> Program:
    """Bind an order of actions: streams, slots, events, keepalives.

    Args:
        actions: Complete, in an order that the reference and the contract allow.
        shape: Their shape.
        contract: Says the streams and slots.
        name: The schedule's name in the header.
        slack: Where markers go; tight by default.

    Returns:
        The program.
    """
    return _Binder(tuple(actions), shape, contract, slack or Slack()).program(name)


class _Binder:
    """Markers are collected by gap: gap `i` lies before action `i`, the last before the merge."""

    def __init__(
        self, actions: tuple[Action, ...], shape: Shape, contract: Contract, slack: Slack
    ) -> None:
        self.shape, self.contract, self.slack = shape, contract, slack
        flights = Flights(contract)
        self.runs = [Run(self._stream(a), a, flights.run(a)) for a in actions]
        self.gaps: list[list[Step]] = [[] for _ in range(len(actions) + 1)]
        self.at: dict[Key, int] = {("run", a): i for i, a in enumerate(actions)}
        self.at["merge",] = len(actions)
        self.events = 0
        self.known: defaultdict[tuple[str, str], int] = defaultdict(lambda: -1)

    def _stream(self, action: Action) -> str:
        if action.half is Half.SEND:
            return self.contract.send_stream
        return self.contract.recv_stream if action.half is Half.RECV else COMP

    def stream_at(self, index: int) -> str:
        return self.runs[index].stream if index < len(self.runs) else COMP

    def program(self, name: str) -> Program:
        bare = self._assembled(name)
        before: defaultdict[int, list[int]] = defaultdict(list)
        for one, other in needed(bare):
            if one in self.at and other in self.at:
                before[self.at[other]].append(self.at[one])
        for index, received in self._received().items():
            before[index].append(received)
        others = [i for i, run in enumerate(self.runs) if run.stream != COMP]
        before[len(self.runs)] += others[-1:]  # The join.
        for index in range(len(self.runs) + 1):
            self._order(index, before[index])
        self._keep_alive(before)
        for _ in range(self.slack.redundant):
            self._redundant()
        return self._assembled(name)

    def _received(self) -> dict[int, int]:
        """For every send the recv that its slot and the in-flight limit make it wait for."""
        limit, slots = self.contract.max_in_flight, self.contract.slots
        sends = [i for i in range(len(self.runs)) if self._is_send(i)]
        recvs = [i for i, run in enumerate(self.runs) if run.action.half is Half.RECV]
        found: dict[int, int] = {}
        for n, index in enumerate(sends):
            needs = []
            if limit is not None and n >= limit:
                needs.append(recvs[n - limit])  # Recvs run in this order, on one stream.
            if slots is not None and n >= slots:
                old = self.runs[sends[n - slots]].action
                needs.append(self.at["run", replace(old, half=Half.RECV)])
            needs = [i for i in needs if i < index]  # Orders that break the contract stay broken.
            if needs:
                found[index] = max(needs)
        return found

    def _assembled(self, name: str) -> Program:
        steps = [s for gap, run in zip(self.gaps, self.runs, strict=False) for s in (*gap, run)]
        steps += [*self.gaps[-1], Merge(COMP)]
        shape = self.shape
        return Program(name, shape.microbatches, shape.layers, self.contract.name, tuple(steps))

    def _order(self, index: int, before: list[int]) -> None:
        """An event for what lies on another stream and is not known to be complete yet."""
        stream = self.stream_at(index)
        crossing = [i for i in before if self.stream_at(i) != stream]
        allocates = stream != COMP and self._is_send(index)
        if not allocates and all(self.known[stream, self.stream_at(i)] >= i for i in crossing):
            return
        last = max(crossing, default=-1)
        source = COMP if last < 0 else self.stream_at(last)
        record = self.slack.late(last + 1, index)
        own = [i for i in range(index) if self.stream_at(i) == stream]
        # A send's own wait stands directly before it on its stream: it says where the landing
        # buffer is allocated.
        low = max(record, (max(own, default=-1) + 1) if allocates else record)
        wait = self.slack.early(low, index)
        self._event(record, source, wait, stream)
        self.known[stream, source] = max(self.known[stream, source], record - 1)

    def _is_send(self, index: int) -> bool:
        return index < len(self.runs) and self.runs[index].action.half is Half.SEND

    def _event(self, record: int, source: str, wait: int, stream: str) -> None:
        if self.slack.rng is None:
            self.gaps[record].insert(0, Record(source, self.events))
        else:
            self.gaps[record].append(Record(source, self.events))
        self.gaps[wait].append(Wait(stream, self.events))
        self.events += 1

    def _keep_alive(self, before: dict[int, list[int]]) -> None:
        for index, run in enumerate(self.runs):
            if run.action.half is not Half.RECV:
                continue
            known = index
            if run.stream != COMP:  # Until the compute stream has waited for it.
                known = min(
                    i for i, needs in before.items() if index in needs and self.stream_at(i) == COMP
                )
            gap = self.slack.late(min(known + 1, len(self.runs)), len(self.runs))
            keepalive = Keepalive(COMP, run.action.communication)
            if self.slack.rng is None:
                self.gaps[gap].insert(0, keepalive)
            else:
                self.gaps[gap].append(keepalive)

    def _redundant(self) -> None:
        """One more event; the communication stream waits only where a later send joins it."""
        rng = self.slack.rng
        sends = [i for i, run in enumerate(self.runs) if run.stream == COMM]
        if rng is None or not sends:
            return
        if rng.random() < 0.5:
            record = rng.randint(sends[0] + 1, len(self.runs))
            self._event(record, COMM, rng.randint(record, len(self.runs)), COMP)
            return
        wait = rng.choice(sends)
        own = [i for i, s in enumerate(self.gaps[wait]) if isinstance(s, Wait) and s.stream == COMM]
        if own and wait > 0:
            self.gaps[rng.randint(0, wait - 1)].append(Record(COMP, self.events))
            self.gaps[wait].insert(own[0], Wait(COMM, self.events))
            self.events += 1
