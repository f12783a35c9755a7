"""Run a program's streams and events on paper: who starts when, given how long each action takes.

No torch. A stream runs its steps in order. `wait` holds the stream until the latest record of its
event before it, in host order. The host runs ahead without limit; a recv that blocks the host
delays everything that the host enqueues later. Where the recv is a kernel, the transfer occupies
no stream: it has a lane of its own, from the end of the send, and the recv cannot end before it.

Every item knows what it started behind, so that a longest path can be read off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dbo_fx.contracts import Contract
from dbo_fx.inspect.action_times import ActionTimes
from dbo_fx.inspect.timeline_items import Arrow, Item
from dbo_fx.ir import STREAMS, Action, Half, Keepalive, Merge, Program, Record, Run, Wait

IN_FLIGHT = "in flight"


@dataclass(frozen=True)
class Lanes:
    """What a simulation found.

    Attributes:
        items: What ran, in host order.
        arrows: Every wait for a recorded event.
        streams: The lanes in use, top to bottom.
        causes: For every item the indices of those that it had to wait for: it starts when the last
            of them ends, at 0 without any.
    """

    items: tuple[Item, ...]
    arrows: tuple[Arrow, ...]
    streams: tuple[str, ...]
    causes: tuple[tuple[int, ...], ...] = ()


def simulate(program: Program, contract: Contract, times: Mapping[str, float] | None) -> Lanes:
    """Run a program on paper.

    Args:
        program: Any program.
        contract: Its transport's.
        times: Microseconds by action; None: one unit for every action.

    Raises:
        OptionError: A time is missing or malformed.
    """
    run = _Simulation(program, contract, ActionTimes(times))
    run.all()
    used = {item.stream for item in run.items}
    streams = tuple(stream for stream in (*STREAMS, IN_FLIGHT) if stream in used)
    return Lanes(tuple(run.items), tuple(run.arrows), streams, tuple(run.causes))


@dataclass(frozen=True, slots=True)
class _Recorded:
    stream: str
    at_us: float
    after: str
    source: int | None
    behind: frozenset[int]


@dataclass
class _Simulation:
    program: Program
    contract: Contract
    times: ActionTimes
    items: list[Item] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    clock: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_us: float = 0.0
    marker: int = 0
    recorded: dict[int, _Recorded] = field(default_factory=dict)
    # Per stream the items so far, waits that do not know yet what they stand in front of, and
    # waits that have met no item that takes time.
    done: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    unnamed: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    untied: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    arrived: dict[Action, int] = field(default_factory=dict)
    # Items that what comes next on a stream stands behind, and what the host enqueues from now on.
    causes: list[tuple[int, ...]] = field(default_factory=list)
    behind: defaultdict[str, frozenset[int]] = field(default_factory=lambda: defaultdict(frozenset))
    host_behind: frozenset[int] = frozenset()

    def all(self) -> None:
        """Fill items and arrows."""
        self.parts = Counter(s.action for s in self.program.steps if isinstance(s, Run))
        self.has_flights = self.contract.recv_is == "kernel"
        for step in self.program.steps:
            match step:
                case Run(stream, action, _):
                    self._meet(stream, action.bound())
                    self._run(stream, action)
                case Record(stream, event):
                    self._record(stream, event)
                    self.marker += 1
                case Wait(stream, event):
                    self._wait(stream, event)
                    self.marker += 1
                case Merge(stream):
                    self._meet(stream, "merge")
                    self._add(stream, "merge", None, self.times.of_merge())
                case Keepalive(stream, action):
                    self._meet(stream, str(step).partition("  ")[2])

    def _now(self, stream: str) -> float:
        """When the stream can go on."""
        return max(self.clock[stream], self.host_us)

    def _run(self, stream: str, action: Action) -> None:
        name = action.bound()
        if action.half is None:
            self._add(stream, name, action, self.times.of_compute(action) / self.parts[action])
            return
        whole = action.communication
        if action.half is Half.SEND:
            transfer_us = self.times.of_transfer(action, is_apart=self.has_flights)
            if self.has_flights:
                sent = self._add(stream, name, action, self.times.of_half(action))
                end = self.items[sent].end_us
                flight = Item(IN_FLIGHT, end, end + transfer_us, whole.bound(), whole)
                self.arrived[whole] = len(self.items)
                self.items.append(replace(flight, marker=self.marker))
                self.causes.append((sent,))
            else:
                self.arrived[whole] = self._add(stream, name, action, transfer_us)
            return
        if self.contract.recv_is != "event" and whole in self.arrived:
            arrived = self.arrived[whole]
            self.clock[stream] = max(self._now(stream), self.items[arrived].end_us)
            self.behind[stream] |= {arrived}
        received = self._add(stream, name, action, self.times.of_half(action))
        if self.contract.blocks_host:
            self.host_us = self.items[received].end_us
            self.host_behind = frozenset({received})

    def _add(self, stream: str, name: str, action: Action | None, duration_us: float) -> int:
        """Run something at the end of a stream.

        Returns:
            Its index.
        """
        start = self._now(stream)
        end = start + duration_us
        index = len(self.items)
        self.items.append(Item(stream, start, end, name, action, marker=self.marker))
        self.causes.append(tuple(sorted(self.behind[stream] | self.host_behind)))
        self.behind[stream] = frozenset({index})
        self.clock[stream] = end
        self.done[stream].append(index)
        for arrow in self.untied[stream]:
            self.arrows[arrow] = replace(self.arrows[arrow], target=index)
        if duration_us:
            self.untied[stream].clear()
        return index

    def _record(self, stream: str, event: int) -> None:
        done = self.done[stream]
        timed = (index for index in reversed(done) if self.items[index].duration_us)
        source = next(timed, done[-1] if done else None)
        after = self.items[done[-1]].name if done else "the start"
        behind = self.behind[stream] | self.host_behind
        self.recorded[event] = _Recorded(stream, self._now(stream), after, source, behind)

    def _wait(self, stream: str, event: int) -> None:
        found = self.recorded.get(event)
        if found is None:
            return  # A wait for an event that nobody recorded waits for nothing.
        now = self._now(stream)
        self.clock[stream] = max(now, found.at_us)
        self.behind[stream] |= found.behind | self.host_behind
        held = max(found.at_us - now, 0.0)
        self.unnamed[stream].append(len(self.arrows))
        self.untied[stream].append(len(self.arrows))
        self.arrows.append(
            Arrow(
                event,
                found.stream,
                found.at_us,
                stream,
                self.clock[stream],
                held,
                found.after,
                "the end",
                found.source,
            )
        )

    def _meet(self, stream: str, name: str) -> None:
        """Tell the stream's last waits what they stand in front of."""
        for index in self.unnamed.pop(stream, ()):
            self.arrows[index] = replace(self.arrows[index], before=name)
