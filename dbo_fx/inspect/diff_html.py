"""A diff as one HTML page without scripts."""

from __future__ import annotations

from html import escape

from dbo_fx.inspect.diff import GraphDiff
from dbo_fx.inspect.diff_blocks import Block, Lanes, blocks

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin: 1.5em 0 .4em }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .6em }
pre { margin: 0; padding: .5em; overflow-x: auto; background: #f5f5f5; border-left: 4px solid #bbb }
pre.was { border-color: #b35900 } pre.now { border-color: #0059b3 }
table { border-collapse: collapse; margin-top: .5em } td { padding: .15em .8em .15em 0 }
td:first-child { font-weight: 600; white-space: nowrap } td { vertical-align: top }
tr.added td:first-child, tr.event td:first-child { color: #0059b3 }
tr.removed td:first-child { color: #b35900 }
"""


def diff_html(found: GraphDiff) -> str:
    """The page: a heading, and per block both sides next to each other with the differences."""
    was, now = escape(found.was.source), escape(found.now.source)
    counts = ", ".join(f"{count} {kind}" for kind, count in found.counts.items())
    body = "\n".join(map(_block, blocks(found)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{was} / {now}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{was} &rarr; {now}</h1>
<p>{counts or "no difference"}</p>
{body}
</body>
</html>
"""


def _block(block: Block) -> str:
    sides = ""
    if block.was or block.now:
        both = _side("was", block.was) + _side("now", block.now)
        sides = f'<div class="sides">{both}</div>\n'
    rows = "\n".join(map(_row, block.lines))
    title = escape(block.title)
    return f"<section>\n<h2>{title}</h2>\n{sides}<table>\n{rows}\n</table>\n</section>"


def _side(name: str, rows: Lanes) -> str:
    return f'<pre class="{name}">{escape(chr(10).join(rows))}</pre>'


def _row(line: str) -> str:
    kind, _, text = line.partition(" ")
    return f'<tr class="{kind}"><td>{kind}</td><td>{escape(text)}</td></tr>'
