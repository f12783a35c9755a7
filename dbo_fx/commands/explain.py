"""`dbo-fx explain`: what a model's ops were taken for and why, and what overlaps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dbo_fx.commands.frame import (
    Json,
    complete_schedule,
    complete_subject,
    exits,
    progress,
    put_blocks,
    put_json,
)


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="MODULE:CALLABLE, which takes nothing and returns (model, args[, kwargs]); a "
            "saved graph, a Hugging Face config or its folder, a schedule's name or a .dbo file.",
            autocompletion=complete_subject,
        ),
    ],
    layer: Annotated[
        int | None, typer.Option(help="Explain this MoE layer alone, with every op.", min=0)
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Size of the pretended process group; 2 if left out.", min=1)
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            help="Dim of a model's tensor arguments to split; 0 if left out, -1: marked already.",
            min=-1,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers to keep of a config, or to lay a schedule over.", min=1),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="For schedules that take any number of them.", min=1)
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedule of a graph or model.", autocompletion=complete_schedule),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="What carries the communication.")] = None,
    as_json: Json = False,
) -> None:
    """Say what each layer's phases were made of and why, what is split how, and what overlaps.

    Runs nothing: the ranks are pretended, and a config's model has no weights.

    Example: dbo-fx explain my_models:build_decoder --layer 7
    """
    from dbo_fx.subjects import Request, read_program

    with exits("explain"):
        request = Request(what, ranks, layers, microbatches, transport, schedule, dim)
        if request.kind == "text":
            from dbo_fx.explain_program import explain_program

            request.refuse("no model", "ranks")
            bound = read_program(request)
            found = explain_program(bound.program, Path(what).name, bound.lines)
            put_json(found.to_json(layer)) if as_json else put_blocks(found.blocks(layer))
            return
        from dbo_fx.explain import explanation
        from dbo_fx.subject_graphs import compiled_subject

        with progress() as say, compiled_subject(request, say) as compiled:
            shown = explanation(compiled)
        put_json(shown.to_json(layer)) if as_json else put_blocks(shown.blocks(layer))
