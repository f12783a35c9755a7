"""`dbo-fx check`: prove a program safe, or show the shortest counterexample."""

from __future__ import annotations

from typing import Annotated

import typer

from dbo_fx.commands.frame import (
    REFUSED,
    Json,
    complete_schedule,
    complete_subject,
    exits,
    progress,
    put,
    put_json,
    tell,
)


def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="A program or schedule file, a schedule's name, a saved graph, MODULE:CALLABLE, "
            "or a Hugging Face config or its folder.",
            autocompletion=complete_subject,
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option(help="How many ranks run it; 2 if left out.", min=1)
    ] = None,
    capture: Annotated[
        bool, typer.Option("--capture", help="It is to run under CUDA graph capture.")
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(
            help="MoE layers of a schedule, 2 if left out; layers to keep of a config.", min=1
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="For schedules that take any number of them.", min=1)
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="What carries the communication; nccl for a schedule or a config."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedule of a graph or model.", autocompletion=complete_schedule),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            help="Dim of a model's tensor arguments to split; 0 if left out, -1: marked already.",
            min=-1,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove a program, a schedule or a model safe, or show the shortest counterexample.

    Exit 0: certified; 1: refused; 2: not checked, because of how it was asked.

    Example: dbo-fx check mlp_shared_overlap --transport deepep_ll --capture
    """
    from dbo_fx import check as checking
    from dbo_fx.subjects import Request

    with exits("check"):
        request = Request(what, ranks, layers, microbatches, transport, schedule, dim)
        with progress() as say:
            found = checking.check(request, captured=capture, say=say)
        put_json(found.to_json()) if as_json else put(f"{found}\n")
        tell("check", found.summary)
        if not found.certified:
            raise typer.Exit(REFUSED)
