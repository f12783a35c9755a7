"""`dbo-fx demo`: compile a small model on two local ranks, run it and compare."""

from __future__ import annotations

from typing import Annotated

import typer

from dbo_fx.commands.frame import Json, exits, put_json


def demo(
    output: Annotated[
        str | None, typer.Option(help="Folder for what the demo writes.", metavar="DIR")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a small MoE model on two local ranks and show what came out.

    Exit 0: every result that must be bit-identical is; 1: one is not, or a rank failed.

    Example: dbo-fx demo --output what_came_out
    """
    with exits("demo"):
        from dbo_fx import demo as running

        found = running.run(output, quiet=as_json)
        if as_json:
            put_json(found.to_json())
        raise typer.Exit(found.code)
