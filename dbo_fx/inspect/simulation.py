"""What a program would take: its time, where it stands still, and the path that decides it.

No torch. The streams are run on paper by `dbo_fx.inspect.simulate`; here the result is read: how
long every stream works, how long communication runs with no compute beside it, which actions lie on
the longest path, and how much longer every other one may take before anything ends later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo_fx.contracts import Contract
from dbo_fx.contracts import contract as contract_named
from dbo_fx.errors import OptionError
from dbo_fx.inspect.action_times import given_times
from dbo_fx.inspect.facts import layers_text
from dbo_fx.inspect.scheduled import Scheduled
from dbo_fx.inspect.simulate import Lanes
from dbo_fx.inspect.simulate import simulate as run_on_paper
from dbo_fx.inspect.spans import Span, inside, length, union, without
from dbo_fx.inspect.timeline import layer_ranges
from dbo_fx.inspect.timeline_items import Item
from dbo_fx.ir import Program

if TYPE_CHECKING:
    from dbo_fx.inspect.measured import Measured

# Sums of the same times in another order differ by rounding.
_SAME = 1e-9
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class StreamUse:
    """How a stream spends the program's time.

    Attributes:
        stream: Its name; `in flight` for transfers that occupy none.
        busy_us: How long it runs something.
        bubble_us: How long it runs nothing.
    """

    stream: str
    busy_us: float
    bubble_us: float


@dataclass(frozen=True, slots=True)
class Period:
    """The stretch in which the leading microbatch is in one layer.

    Attributes:
        layer: Index of the MoE layer.
        start_us: From the layer's first action.
        end_us: To the next layer's.
        compute_us: How long something computes.
        exposed_us: How long something communicates while nothing computes.
    """

    layer: int
    start_us: float
    end_us: float
    compute_us: float
    exposed_us: float


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its place in time.

    Attributes:
        name: `A1_m0@3`; `merge`.
        stream: Its lane.
        start_us: When it starts.
        end_us: When it ends.
        slack_us: How much longer it may take, alone, before the program takes longer.
    """

    name: str
    stream: str
    start_us: float
    end_us: float
    slack_us: float


@dataclass(frozen=True)
class Simulation:
    """One program on paper; prints readably.

    Attributes:
        program: The program.
        lanes: What runs when, and behind what.
        has_times: Whether times are microseconds; otherwise they are units, one per action.
    """

    program: Program
    lanes: Lanes
    has_times: bool

    @cached_property
    def total_us(self) -> float:
        """When everything is done."""
        return max((item.end_us for item in self.lanes.items), default=0.0)

    @cached_property
    def streams(self) -> tuple[StreamUse, ...]:
        """How every lane spends that time, top to bottom."""
        uses = []
        for stream in self.lanes.streams:
            # Several transfers may be in flight at once.
            busy_us = length(union(i for i in self.lanes.items if i.stream == stream))
            uses.append(StreamUse(stream, busy_us, self.total_us - busy_us))
        return tuple(uses)

    @cached_property
    def compute_us(self) -> float:
        """How long something computes."""
        return length(self._computing)

    @cached_property
    def communication_us(self) -> float:
        """How long something communicates."""
        return length(self._communicating)

    @cached_property
    def exposed_us(self) -> float:
        """How long something communicates while nothing computes."""
        return length(self._exposed)

    @cached_property
    def periods(self) -> tuple[Period, ...]:
        """The time layer by layer; of a program without overlap a period for each microbatch."""
        return tuple(
            Period(
                band.layer,
                band.start_us,
                band.end_us,
                length(inside(self._computing, (band.start_us, band.end_us))),
                length(inside(self._exposed, (band.start_us, band.end_us))),
            )
            for band in layer_ranges(self.lanes.items)
        )

    @cached_property
    def actions(self) -> tuple[Timed, ...]:
        """Every item with its slack, in host order."""
        return tuple(
            Timed(item.name, item.stream, item.start_us, item.end_us, slack)
            for item, slack in zip(self.lanes.items, self._slack, strict=True)
        )

    @cached_property
    def critical_path(self) -> tuple[Timed, ...]:
        """A chain of actions without a gap from the start to the end: it takes all the time."""
        items, causes = self.lanes.items, self.lanes.causes
        path: list[Timed] = []
        at = max(range(len(items)), key=lambda i: (items[i].end_us, i), default=None)
        while at is not None:
            path.append(self.actions[at])
            at = max(causes[at], key=lambda i: (items[i].end_us, i), default=None)
        return tuple(timed for timed in reversed(path) if timed.end_us > timed.start_us)

    @cached_property
    def _slack(self) -> list[float]:
        items, causes = self.lanes.items, self.lanes.causes
        latest = [self.total_us] * len(items)
        for index in reversed(range(len(items))):
            start = latest[index] - items[index].duration_us
            for cause in causes[index]:
                latest[cause] = min(latest[cause], start)
        rounding = _SAME * max(self.total_us, 1.0)
        slack = [end - item.end_us for end, item in zip(latest, items, strict=True)]
        return [0.0 if abs(left) < rounding else left for left in slack]

    @cached_property
    def _computing(self) -> list[Span]:
        return union(item for item in self.lanes.items if not _is_communication(item))

    @cached_property
    def _communicating(self) -> list[Span]:
        return union(item for item in self.lanes.items if _is_communication(item))

    @cached_property
    def _exposed(self) -> list[Span]:
        return without(self._communicating, self._computing)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": "simulation",
            "schedule": self.program.schedule,
            "layers": self.program.layers,
            "microbatches": self.program.microbatches,
            "transport": self.program.transport,
            "unit": "us" if self.has_times else "units",
            "total": self.total_us,
            "compute": self.compute_us,
            "communication": self.communication_us,
            "exposed": self.exposed_us,
            "streams": [
                {"stream": use.stream, "busy": use.busy_us, "bubble": use.bubble_us}
                for use in self.streams
            ],
            "periods": [
                {
                    "layer": period.layer,
                    "start": period.start_us,
                    "end": period.end_us,
                    "compute": period.compute_us,
                    "exposed": period.exposed_us,
                }
                for period in self.periods
            ],
            "critical_path": [timed.name for timed in self.critical_path],
            "actions": [
                {
                    "action": timed.name,
                    "stream": timed.stream,
                    "start": timed.start_us,
                    "end": timed.end_us,
                    "slack": timed.slack_us,
                }
                for timed in self.actions
            ],
        }

    def __str__(self) -> str:
        """The total, the streams, the periods, and what the critical path consists of."""
        unit = "us" if self.has_times else "units"
        program, total = self.program, self.total_us
        lines = [
            f"{program.schedule}: {layers_text(program.layers)}, {program.microbatches} "
            f"microbatch{'es' if program.microbatches > 1 else ''}, {program.transport}: "
            f"{total:.6g} {unit}"
        ]
        for use in self.streams:
            share = use.bubble_us / total if total else 0.0
            lines.append(
                f"  {use.stream}: busy {use.busy_us:.6g}, bubbles {use.bubble_us:.6g} ({share:.1%})"
            )
        lines.append(
            f"  communication {self.communication_us:.6g}, of which {self.exposed_us:.6g} exposed"
        )
        lines += [*_period_lines(self.periods), *_path_lines(self.critical_path)]
        return "\n".join(lines)


def simulate(
    program: Program | Scheduled,
    times: Mapping[str, float] | Measured | str | Path | None = None,
    contract: Contract | None = None,
) -> Simulation:
    """Run a program on paper: its time from the times of its actions.

    With times that were measured without overlap, of a `sequential` program, the total is the
    schedule's own bound: what it would take if actions beside each other did not slow each other
    down. Streams, events, a host that runs ahead and recvs that block it are as in `timeline`.

    Args:
        program: A program, or something compiled.
        times: Microseconds by action; a measurement, or the path of a JSON file of either; None:
            one unit for every action.
        contract: What the transport promises; None: that of the program's transport.

    Returns:
        The simulation.

    Raises:
        OptionError: A time is missing or malformed, a measurement is of another program, or the
            transport is unknown.
    """
    bound = program if isinstance(program, Program) else getattr(program, "program", None)
    if not isinstance(bound, Program):
        raise OptionError(
            f"simulate: found {type(program).__name__}; wanted a program or something compiled. "
            "Bind a schedule first: dbo_fx.ir_bind.bound_program"
        )
    carrier = contract_named(bound.transport) if contract is None else contract
    given = given_times(times, bound)
    return Simulation(bound, run_on_paper(bound, carrier, given), given is not None)


def efficiency(sequential_us: float, measured_us: float, bound_us: float) -> float:
    """How much of what a schedule could save it does save: 1 is all, 0 nothing.

    Args:
        sequential_us: The same work without overlap.
        measured_us: The schedule, measured.
        bound_us: The schedule's own bound: its simulated time from times without overlap.

    Raises:
        OptionError: The bound leaves nothing to save.
    """
    if not bound_us < sequential_us:
        raise OptionError(
            f"efficiency: the bound, {bound_us:g} us, is not below the sequential time, "
            f"{sequential_us:g} us: there is nothing to save, so no share of it"
        )
    return (sequential_us - measured_us) / (sequential_us - bound_us)


def _is_communication(item: Item) -> bool:
    return item.action is not None and item.action.phase.is_communication


def _period_lines(periods: Sequence[Period]) -> Iterator[str]:
    """A line for each layer; neighbours that take equally long share one."""

    def told(period: Period) -> str:
        return f"{period.end_us - period.start_us:.6g}, exposed {period.exposed_us:.6g}"

    for text, equal in groupby(periods, key=told):
        layers = [period.layer for period in equal]
        each = f"s {layers[0]} to {layers[-1]}" if len(layers) > 1 else f" {layers[0]}"
        yield f"  layer{each}: {text}"


def _path_lines(path: Sequence[Timed]) -> list[str]:
    """What lies on a path: by kind, and its communications by name."""
    by_kind: defaultdict[str, float] = defaultdict(float)
    sent: list[Timed] = []
    for timed in path:
        phase, _, rest = timed.name.partition("_")
        half = rest.partition("@")[0].partition(".")[2]
        by_kind[f"{phase}.{half}" if half else phase] += timed.end_us - timed.start_us
        if phase in ("D", "C"):
            sent.append(timed)
    kinds = ", ".join(f"{kind} {spent:.6g}" for kind, spent in by_kind.items())
    lines = [f"  critical path: {kinds}" if kinds else "  critical path: nothing takes time"]
    if sent:
        more = f" and {len(sent) - _SHOWN} more" if len(sent) > _SHOWN else ""
        lines.append(f"  communication on it: {' '.join(t.name for t in sent[:_SHOWN])}{more}")
    return lines
