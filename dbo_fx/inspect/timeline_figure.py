"""The traces and the layout of a timeline page, as plain values that plotly.js takes.

Few traces, each with arrays: one of bars for every microbatch, two of lines for the events, four
for memory. So a page of 61 layers stays smooth. Labels are left to the page's script, which writes
those that fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dbo_fx.certificates.memory_report import readable
from dbo_fx.inspect.timeline import ORDER_ONLY, Timeline
from dbo_fx.inspect.timeline_bars import HALF_BAR, bar_traces
from dbo_fx.inspect.timeline_items import Arrow, is_on_comp

_LANE_PX, _MEMORY_PX, _LEGEND_PX, _TOP_PX, _BOTTOM_PX = 100, 210, 30, 60, 46
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def figure(timeline: Timeline) -> dict[str, Any]:
    """Everything that plotly.js draws.

    Args:
        timeline: What to draw.

    Returns:
        `data` and `layout`. Traces carry in `meta.role` what they are: `bars`, `arrows` or
        `memory`.
    """
    return _Figure(timeline).drawn()


@dataclass
class _Figure:
    timeline: Timeline

    def __post_init__(self) -> None:
        count = len(self.timeline.streams)
        self.lane = {s: count - 1 - i for i, s in enumerate(self.timeline.streams)}
        self.top = count - 0.38

    def drawn(self) -> dict[str, Any]:
        memory = self._memory() if self.timeline.memory is not None else []
        data = [*bar_traces(self.timeline, self.lane), *self._arrows(), *memory]
        return {"data": data, "layout": self._layout()}

    def _arrows(self) -> Iterable[dict[str, Any]]:
        holding = [a for a in self.timeline.arrows if _holds_comp(a)]
        others = [a for a in self.timeline.arrows if not _holds_comp(a)]
        if others:
            yield self._arrow_trace("event", "#9ca3af", 1, others)
        if holding:
            yield self._arrow_trace("event that comp stands still for", "#dc2626", 1.6, holding)

    def _arrow_trace(self, name: str, colour: str, width: float, arrows: Sequence[Arrow]) -> Any:
        x: list[float | None] = []
        y: list[float | None] = []
        symbols: list[str] = []
        texts: list[str | None] = []
        for arrow in arrows:
            start, end = self.lane[arrow.from_stream], self.lane[arrow.to_stream]
            down = start > end
            edge = HALF_BAR if start != end else 0.0
            x += [arrow.from_us, arrow.to_us, None]
            y += [start - edge if down else start + edge, end + edge if down else end - edge, None]
            symbols += ["circle", "triangle-down" if down else "triangle-up", "circle"]
            texts += [self._arrow_text(arrow)] * 2 + [None]
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": x,
            "y": y,
            "line": {"color": colour, "width": width},
            "marker": {"symbol": symbols, "size": [3, 8, 3] * len(arrows), "color": colour},
            "text": texts,
            "hovertemplate": "%{text}<extra></extra>",
            "hoverlabel": {"bordercolor": colour},
            "meta": {"role": "arrows", "at": [[a.from_us, a.to_us] for a in arrows]},
        }

    def _arrow_text(self, arrow: Arrow) -> str:
        unit = self.timeline.unit
        held = f"held up {arrow.held_us:,.6g} {unit}" if arrow.held_us else "not held up"
        return (
            f"<b>e{arrow.event}</b>  {arrow.from_stream} to {arrow.to_stream}<br>"
            f"recorded behind {arrow.after} at {arrow.from_us:,.6g} {unit}<br>"
            f"waited for before {arrow.before} at {arrow.to_us:,.6g} {unit}, {held}"
        )

    def _shading(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "rect",
                "layer": "below",
                "xref": "x",
                "yref": "paper",
                "x0": band.start_us,
                "x1": band.end_us,
                "y0": 0,
                "y1": 1,
                "fillcolor": "#f1f3f5",
                "line": {"width": 0},
            }
            for band in self.timeline.layers[::2]
        ]

    def _memory(self) -> Iterable[dict[str, Any]]:
        memory = self.timeline.memory
        assert memory is not None
        size, _ = _scale(memory.report.peak_bytes)
        points = list(memory.points)
        curves = (
            ("while a call runs", "rgba(86,180,233,0.35)", "during_bytes", "#56b4e9"),
            ("between calls", "rgba(0,0,0,0)", "held_bytes", "#111827"),
        )
        texts = [
            f"<b>{escape(str(m))}</b><br>while it runs {readable(m.during_bytes)}<br>"
            f"held behind it {readable(m.held_bytes)}"
            for _, m in points
        ]
        end = self.timeline.end_us
        for name, fill, key, colour in curves:
            values = [getattr(m, key) / size for _, m in points]
            yield {
                "type": "scatter",
                "mode": "lines",
                "name": f"memory {name}",
                "x": [*memory.at_us, end],
                "y": [*values, *values[-1:]],
                "line": {"shape": "hv", "color": colour, "width": 1.2},
                "fill": "tozeroy",
                "fillcolor": fill,
                "text": [*texts, *texts[-1:]],
                "hovertemplate": "%{text}<extra></extra>",
                "xaxis": "x2",
                "yaxis": "y2",
                "legend": "legend2",
                "meta": {"role": "memory"},
            }
        unsplit = memory.report.unsplit_peak_bytes / size
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": f"peak of the unsplit graph, {readable(memory.report.unsplit_peak_bytes)}",
            "x": [0, end],
            "y": [unsplit, unsplit],
            "line": {"color": "#d55e00", "width": 1.2, "dash": "dash"},
            "hoverinfo": "skip",
            "xaxis": "x2",
            "yaxis": "y2",
            "legend": "legend2",
            "meta": {"role": "memory"},
        }
        peak, at_peak = max(points, key=lambda point: point[1].during_bytes)
        yield {
            "type": "scatter",
            "mode": "markers+text",
            "name": "peak",
            "x": [peak],
            "y": [at_peak.during_bytes / size],
            "marker": {"symbol": "triangle-down", "size": 9, "color": "#111827"},
            "text": [f"peak {readable(at_peak.during_bytes)} in {at_peak}"],
            "textposition": "top right" if peak < end / 2 else "top left",
            "cliponaxis": False,
            "hoverinfo": "skip",
            "showlegend": False,
            "xaxis": "x2",
            "yaxis": "y2",
            "meta": {"role": "memory"},
        }

    def _memory_top(self) -> float:
        memory = self.timeline.memory
        if memory is None:
            return 1.0
        size, _ = _scale(memory.report.peak_bytes)
        return 1.25 * max(memory.report.peak_bytes, memory.report.unsplit_peak_bytes, 1) / size

    def _margin_px(self) -> int:
        """Room for the longest name of a lane."""
        return max(92, 30 + 9 * max(map(len, self.timeline.streams), default=0))

    def _layout(self) -> dict[str, Any]:
        timeline = self.timeline
        lanes_px = _LANE_PX * len(timeline.streams)
        memory_px = _MEMORY_PX if timeline.memory is not None else 0
        height = lanes_px + memory_px + _TOP_PX + _BOTTOM_PX
        whole_px = lanes_px + memory_px
        title = "time, us" if timeline.has_times else ORDER_ONLY
        x_axis = {
            "range": [0, timeline.end_us or 1],
            "showgrid": True,
            "gridcolor": "#e5e7eb",
            "zeroline": False,
            "showspikes": False,
            "tickformat": ",~r" if timeline.has_times else ",d",
            "minallowed": -0.02 * timeline.end_us,
            "maxallowed": 1.02 * timeline.end_us,
        }
        layout: dict[str, Any] = {
            "height": height,
            "margin": {"l": self._margin_px(), "r": 24, "t": _TOP_PX, "b": _BOTTOM_PX},
            "font": {"family": _FONT, "size": 12, "color": "#111827"},
            "paper_bgcolor": "#ffffff",
            "plot_bgcolor": "#ffffff",
            "barmode": "overlay",
            "bargap": 0,
            "dragmode": "pan",
            "hovermode": "closest",
            "hoverlabel": {
                "align": "left",
                "bgcolor": "#ffffff",
                "namelength": 0,
                "font": {"family": _FONT, "size": 12, "color": "#111827"},
            },
            "legend": _legend(1),
            "showlegend": True,
            "shapes": self._shading(),
            "xaxis": {**x_axis, "anchor": "y"},
            "yaxis": {
                "domain": [memory_px / whole_px, 1],
                "range": [-0.5, self.top],
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
                "tickvals": list(self.lane.values()),
                "ticktext": list(self.lane),
                "tickfont": {"size": 14},
                "ticklabelstandoff": 8,
            },
        }
        if timeline.memory is None:
            layout["xaxis"]["title"] = {"text": title, "standoff": 8}
            return layout
        _, unit = _scale(timeline.memory.report.peak_bytes)
        layout["xaxis"]["showticklabels"] = False
        layout["legend2"] = _legend((memory_px - _LEGEND_PX) / whole_px)
        layout["xaxis"]["matches"] = "x2"
        layout["xaxis2"] = {**x_axis, "anchor": "y2", "title": {"text": title, "standoff": 8}}
        layout["yaxis2"] = {
            "domain": [0, (memory_px - _LEGEND_PX) / whole_px],
            "range": [0, self._memory_top()],
            "fixedrange": True,
            "gridcolor": "#e5e7eb",
            "zeroline": False,
            "title": {"text": f"memory, {unit}"},
        }
        return layout


def _holds_comp(arrow: Arrow) -> bool:
    return bool(arrow.held_us) and is_on_comp(arrow.to_stream)


def _legend(y: float) -> dict[str, Any]:
    """A row of entries on top of a subplot."""
    return {
        "orientation": "h",
        "x": 0,
        "y": y,
        "xanchor": "left",
        "yanchor": "bottom",
        "bgcolor": "rgba(0,0,0,0)",
    }


def _scale(count: int) -> tuple[int, str]:
    """What to divide bytes by, and the unit."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return 1024**power, unit
    return 1, "B"
