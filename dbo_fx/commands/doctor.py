"""`dbo-fx doctor`: what works here, what does not, and what would mend it."""

from __future__ import annotations

import typer

from dbo_fx.commands.frame import REFUSED, Json, exits, progress, put_blocks, put_json


def doctor(as_json: Json = False) -> None:
    """Look at versions, devices, transports and extras, and run three small self-tests.

    Exit 0: the core works; 1: it does not.

    Example: dbo-fx doctor
    """
    with exits("doctor"):
        from dbo_fx.doctor import diagnose

        with progress() as say:
            say("looking at this machine")
            found = diagnose()
        put_json(found.to_json()) if as_json else put_blocks(found.blocks())
        if not found.ok:
            raise typer.Exit(REFUSED)
