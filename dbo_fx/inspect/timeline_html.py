"""A timeline as one HTML page that needs no network: plotly.js and the data are inside it."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from dbo_fx.certificates.memory_report import readable
from dbo_fx.errors import OptionError
from dbo_fx.inspect.timeline import Timeline
from dbo_fx.inspect.timeline_bars import node_row
from dbo_fx.inspect.timeline_figure import figure

_FOLDER = Path(__file__).parent
_HOW_TO_READ = (
    "Scroll to zoom, drag to pan, double-click for everything. Hover a bar for what is inside it, "
    "click it for the whole list. A shade of a microbatch's colour is a phase. Shading changes "
    "where the leading microbatch goes on to the next layer. A click in the legend hides what it "
    "names."
)


def timeline_html(timeline: Timeline) -> str:
    """Draw a timeline as a page.

    Args:
        timeline: What to draw.

    Returns:
        The page's HTML, self-contained.

    Raises:
        OptionError: plotly is not installed.
    """
    page = (_FOLDER / "timeline_page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": escape(timeline.title),
        "SOURCE": escape(timeline.source),
        "SOURCE_CLASS": "times" if timeline.has_times else "order",
        "FACTS": _facts(timeline),
        "HELP": _HOW_TO_READ,
        "LOWER": _lower(timeline),
        "STYLE": (_FOLDER / "timeline_page.css").read_text(encoding="utf-8"),
        "PLOTLY": _plotly_js(),
        "DATA": _json(_data(timeline)),
        "SCRIPT": (_FOLDER / "timeline_page.js").read_text(encoding="utf-8"),
    }
    pieces = page.split("@@")  # Every second piece is the name of a part.
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as missing:
        raise OptionError("a timeline page needs plotly; pip install 'dbo-fx[html]'") from missing
    return str(get_plotlyjs())


def _data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script takes; equal lists of nodes are written once."""
    tables: dict[tuple[Any, ...], int] = {}
    numbers = [tables.setdefault(item.nodes, len(tables)) for item in timeline.items]
    return {
        **figure(timeline),
        "end": timeline.end_us,
        "layers": [[b.layer, b.start_us, b.end_us] for b in timeline.layers],
        "unit": timeline.unit,
        "items": [
            [item.name, item.stream, item.start_us, item.end_us, table]
            for item, table in zip(timeline.items, numbers, strict=True)
        ],
        "tables": [[node_row(node) for node in nodes] for nodes in tables],
    }


def _json(value: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _facts(timeline: Timeline) -> str:
    total, unit = timeline.end_us, timeline.unit
    facts = [("total", f"{total:,.6g} {unit}")] if timeline.has_times else []
    for stream in timeline.streams:
        if timeline.has_times:  # Shares of units would look like shares of time.
            busy = timeline.busy_us(stream)
            share = f" ({busy / total:.0%})" if total else ""
            facts.append((f"{stream} busy", f"{busy:,.6g} {unit}{share}"))
        else:
            facts.append((stream, f"{len(timeline.of(stream))} items"))
    facts.append(("events", str(len(timeline.arrows))))
    if timeline.memory is not None:
        report = timeline.memory.report
        facts.append(
            ("peak memory", f"{readable(report.peak_bytes)} ({report.ratio:.2f}x unsplit)")
        )
    return "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)


def _lower(timeline: Timeline) -> str:
    parts = [("Certificate", timeline.certificate), ("Overlap", "\n".join(timeline.overlap))]
    if timeline.memory is not None:
        report = timeline.memory.report
        alive = "\n".join(f"  {value}" for value in report.alive[:12])
        parts.append(("Memory", f"{report}\nthe largest held at the peak:\n{alive}"))
    else:
        parts.append(("Memory", "Known for compiled programs only: their graph has the sizes."))
    return "".join(
        f"<section><h2>{title}</h2><pre>{escape(text)}</pre></section>"
        for title, text in parts
        if text
    )
