"""`dbo-fx diff`: what differs between two schedules, programs or captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dbo_fx.commands.frame import REFUSED, Json, complete_subject, exits, put, put_json, tell
from dbo_fx.errors import OptionError

_SUBJECT = "A schedule's name, a .dbo file, or a graph file (.dbograph.json)."


def diff(
    was: Annotated[
        str, typer.Argument(metavar="A", help=_SUBJECT, autocompletion=complete_subject)
    ],
    now: Annotated[
        str, typer.Argument(metavar="B", help="The same.", autocompletion=complete_subject)
    ],
    layers: Annotated[
        int, typer.Option(help="Unroll schedules over this many layers, where needed.", min=1)
    ] = 2,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with both sides, too.")
    ] = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 whatever was found.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what differs between A and B; names of nodes and numbers of events do not count.

    Exit 0: no difference; 1: different; 2: not compared, because of how it was asked.

    Example: dbo-fx diff mlp_shared_overlap sequential
    """
    with exits("diff"):
        from dbo_fx.inspect.diff import diff as compare

        found = compare(was, now, layers=layers)
        if html is not None:
            _write(html, found.to_html())
        if as_json:
            put_json(found.to_json())
        else:
            put(f"{found}\n")
        if found and not exit_zero:
            raise typer.Exit(REFUSED)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--html: {path} cannot be written: {error.strerror}") from error
    tell("diff", f"wrote {path}")
