"""When every action runs: a program laid out on a time axis, as plain values without torch.

The same values hold a simulated program (`timeline_of_program`), a compiled one with its nodes and
its memory (`timeline_of_compiled`), and what was measured on a device. `timeline_html` draws them,
`trace_file` writes them for trace viewers. Without times every action takes one unit: such a
timeline shows the order, not how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dbo_fx.certificates.hazards import prove
from dbo_fx.certificates.memory_report import MemoryReport, Moment
from dbo_fx.certificates.of_program import execution_of_program
from dbo_fx.certificates.overlap import overlap_report
from dbo_fx.errors import VerificationError
from dbo_fx.inspect.facts import layers_text
from dbo_fx.inspect.simulate import simulate
from dbo_fx.inspect.timeline_items import Arrow, Inside, Item
from dbo_fx.ir import COMP, Program

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram

__all__ = [
    "Arrow",
    "Inside",
    "Item",
    "LayerRange",
    "MemoryCurve",
    "Timeline",
    "layer_ranges",
    "timeline_of_compiled",
    "timeline_of_program",
]

ORDER_ONLY = "order only: one unit per action"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The stretch in which the leading microbatch is in one layer.

    Attributes:
        layer: Index of the MoE layer.
        start_us: From the layer's first action.
        end_us: To the next layer's.
    """

    layer: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class MemoryCurve:
    """Predicted memory on the timeline's axis.

    Attributes:
        report: The prediction for one size of the batch.
        at_us: When each call of `report.curve` begins. What is allocated belongs to the compute
            stream, so a call of another stream stands where the compute stream is then.
    """

    report: MemoryReport
    at_us: tuple[float, ...]

    @property
    def points(self) -> Iterator[tuple[float, Moment]]:
        """Every call with its time."""
        return zip(self.at_us, self.report.curve, strict=True)


@dataclass(frozen=True)
class Timeline:
    """One rank's program on a time axis.

    Attributes:
        title: What it is.
        items: What runs, in host order.
        arrows: What waits for what.
        streams: The lanes, top to bottom.
        layers: Where the leading microbatch changes layer.
        has_times: Whether times are microseconds; otherwise they are units, one per action.
        certificate: What was proven, or why it was not.
        overlap: What the order lets run beside each communication, one line each.
        memory: The memory curve, where the program's sizes are known.
    """

    title: str
    items: tuple[Item, ...]
    arrows: tuple[Arrow, ...]
    streams: tuple[str, ...]
    layers: tuple[LayerRange, ...]
    has_times: bool
    certificate: str = ""
    overlap: tuple[str, ...] = ()
    memory: MemoryCurve | None = field(default=None)

    @property
    def unit(self) -> str:
        """`us`, or `units` if only the order is known."""
        return "us" if self.has_times else "units"

    @property
    def source(self) -> str:
        """Where the times come from, for a reader."""
        if not self.has_times:
            return ORDER_ONLY
        measured = sum(item.is_measured for item in self.items)
        if measured == 0:
            return "predicted from given times"
        return "measured" if measured == len(self.items) else "partly measured, partly predicted"

    @property
    def end_us(self) -> float:
        """When everything is done."""
        return max((item.end_us for item in self.items), default=0.0)

    def busy_us(self, stream: str) -> float:
        """How long a stream runs something."""
        return sum(i.duration_us for i in self.items if i.stream == stream)

    def of(self, stream: str) -> tuple[Item, ...]:
        """The items of one stream, in its order."""
        return tuple(item for item in self.items if item.stream == stream)

    def __str__(self) -> str:
        """A few lines."""
        lines = [f"{self.title}: {self.end_us:g} {self.unit} ({self.source})"]
        for stream in self.streams:
            busy = self.busy_us(stream)
            lines.append(f"  {stream}: {len(self.of(stream))} items, busy {busy:g} {self.unit}")
        held = sum(arrow.held_us > 0 and arrow.to_stream == COMP for arrow in self.arrows)
        lines.append(f"  {len(self.arrows)} events, comp stands still for {held} of them")
        return "\n".join(lines)


def timeline_of_program(program: Program, times: Mapping[str, float] | None = None) -> Timeline:
    """Lay a program out in time.

    Streams run what they are given in order. A wait holds its stream until the latest record of
    the event that stands before it. The host runs ahead, unless the transport's recv blocks it.

    Args:
        program: Any program, also a wrong one; the certificate then says what is wrong.
        times: Microseconds by action, `docs/timeline.md` says which key wins; None: every action
            takes one unit.

    Returns:
        The timeline, without nodes and memory.

    Raises:
        OptionError: A time is missing or malformed, or the transport is unknown.
    """
    execution = execution_of_program(program)
    lanes = simulate(program, execution.contract, times)
    try:
        certificate = str(prove(execution))
    except VerificationError as error:
        certificate = f"refused: {error}"
    title = (
        f"{program.schedule}: {layers_text(program.layers)}, {program.microbatches} microbatches, "
        f"{program.transport}"
    )
    return Timeline(
        title=title,
        items=lanes.items,
        arrows=lanes.arrows,
        streams=lanes.streams,
        layers=layer_ranges(lanes.items),
        has_times=times is not None,
        certificate=certificate,
        overlap=tuple(str(overlap_report(execution)).splitlines()),
    )


def timeline_of_compiled(
    compiled: CompiledProgram,
    times: Mapping[str, float] | None = None,
    tokens: int | None = None,
) -> Timeline:
    """Lay a compiled program out in time, with its nodes, its memory and its own certificate.

    Args:
        compiled: The compiled program.
        times: As in `timeline_of_program`.
        tokens: Size of the whole batch, for shapes and bytes; the traced one if None.

    Returns:
        The timeline.

    Raises:
        OptionError: As `timeline_of_program`; or tracing knew no size and `tokens` is None.
    """
    # Timelines of programs need no torch.
    from dbo_fx.inspect.compiled_nodes import calls_of, memory_of, with_nodes

    report, certificate = compiled.memory(tokens), compiled.certificate
    bare = timeline_of_program(compiled.program, times)
    calls = calls_of(compiled, report)
    items = with_nodes(bare.items, calls)
    return replace(
        bare,
        title=f"{bare.title}, {report.tokens} rows",
        items=items,
        certificate=f"{certificate.hazards}\n{certificate.ranks}",
        overlap=tuple(str(certificate.overlap).splitlines()),
        memory=memory_of(report, calls, bare.items),
    )


def layer_ranges(items: Iterable[Item]) -> tuple[LayerRange, ...]:
    """Cut the time axis where the leading microbatch goes on to another layer.

    Once the leading microbatch is done, the next one leads: under `sequential` every layer has a
    range for each microbatch.

    Args:
        items: The items of all streams.
    """
    computes = [i for i in items if i.layer is not None and i.stream == COMP]
    computes.sort(key=lambda i: i.start_us)
    done = {i.microbatch: i.start_us for i in computes}
    starts: list[tuple[int, float]] = []
    for item in computes:
        leader = min(m for m, last in done.items() if m is not None and last >= item.start_us)
        if item.microbatch != leader or item.layer is None:
            continue
        if not starts or starts[-1][0] != item.layer:
            starts.append((item.layer, item.start_us))
    return _closed(starts, max((i.end_us for i in computes), default=0.0))


def _closed(starts: Sequence[tuple[int, float]], end: float) -> tuple[LayerRange, ...]:
    borders = pairwise([*(at for _, at in starts), end])
    return tuple(LayerRange(layer, *span) for (layer, _), span in zip(starts, borders, strict=True))
