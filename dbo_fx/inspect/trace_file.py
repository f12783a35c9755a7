"""A timeline as a trace file for Perfetto and `chrome://tracing`.

One process for each timeline (a rank, or a program beside another), one thread for each lane, one
complete event for each item, a flow from every record to the wait, a counter for memory. Times are
microseconds; where only the order is known a unit is written as one microsecond, and the process's
name says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dbo_fx.inspect.timeline import Timeline
from dbo_fx.inspect.timeline_bars import node_row
from dbo_fx.inspect.timeline_items import Arrow, Item

Event = dict[str, Any]
_INSIDE = 1e-3


def trace_json(timelines: Sequence[Timeline]) -> str:
    """Write timelines as one trace.

    Args:
        timelines: One for each rank or program; process numbers follow this order.

    Returns:
        JSON in the Trace Event Format, an object with `traceEvents`.
    """
    ids = iter(range(1, 1 + sum(len(t.arrows) for t in timelines)))
    events = [
        e for pid, timeline in enumerate(timelines) for e in _Process(timeline, pid, ids).all()
    ]
    about = {f"process {pid}": f"{t.title}; {t.source}" for pid, t in enumerate(timelines)}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


@dataclass
class _Process:
    timeline: Timeline
    pid: int
    ids: Iterator[int]

    def all(self) -> Iterable[Event]:
        """Everything of one timeline."""
        self.thread = {stream: n for n, stream in enumerate(self.timeline.streams)}
        note = "" if self.timeline.has_times else f" ({self.timeline.source})"
        yield self._meta("process_name", 0, name=self.timeline.title + note)
        yield self._meta("process_sort_index", 0, sort_index=self.pid)
        for stream, thread in self.thread.items():
            yield self._meta("thread_name", thread, name=stream)
            yield self._meta("thread_sort_index", thread, sort_index=thread)
        for item in self.timeline.items:
            yield self._complete(item)
        for arrow in self.timeline.arrows:
            yield from self._flow(arrow)
        yield from self._memory()

    def _meta(self, what: str, thread: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": thread, "args": args}

    def _complete(self, item: Item) -> Event:
        args: dict[str, object] = {"measured": item.is_measured}
        if item.action is not None:
            args |= {"microbatch": item.microbatch, "layer": item.layer}
        if item.bytes is not None:
            args["bytes"] = item.bytes
        if item.nodes:
            args["nodes"] = ["  ".join(node_row(node)).rstrip() for node in item.nodes]
        return {
            "ph": "X",
            "name": item.name,
            "cat": item.phase,
            "pid": self.pid,
            "tid": self.thread[item.stream],
            "ts": item.start_us,
            "dur": item.duration_us,
            "args": args,
        }

    def _flow(self, arrow: Arrow) -> Iterable[Event]:
        """A start at the end of the item before the record, an end in the item that waited.

        Viewers tie a flow to the slice around its time, so it must not lie on a border.
        """
        if arrow.source is None or arrow.target is None:
            return  # Nothing stands before the record, or nothing behind the wait.
        source, target = self.timeline.items[arrow.source], self.timeline.items[arrow.target]
        common = {"name": f"e{arrow.event}", "cat": "event", "id": next(self.ids), "pid": self.pid}
        start_us = source.end_us - source.duration_us * _INSIDE
        end_us = target.start_us + target.duration_us * _INSIDE
        yield {"ph": "s", **common, "tid": self.thread[source.stream], "ts": start_us}
        yield {"ph": "f", "bp": "e", **common, "tid": self.thread[target.stream], "ts": end_us}

    def _memory(self) -> Iterable[Event]:
        if self.timeline.memory is None:
            return
        for at_us, moment in self.timeline.memory.points:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": self.pid,
                "ts": at_us,
                "args": {
                    "held": moment.held_bytes,
                    "while it runs": moment.during_bytes - moment.held_bytes,
                },
            }
