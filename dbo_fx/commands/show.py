"""`dbo-fx show`: a schedule, a program, or where the ranks of a hung job stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dbo_fx.commands.frame import (
    Json,
    complete_schedule,
    complete_subject,
    exits,
    progress,
    put,
    put_json,
    tell,
)
from dbo_fx.errors import OptionError

if TYPE_CHECKING:
    from dbo_fx.ir import Program
    from dbo_fx.subjects import Request


def show(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="SUBJECT",
            help="A schedule's name, a .dbo file, a saved graph, MODULE:CALLABLE or a Hugging Face "
            "config; or dumps or their folders, with --progress.",
            autocompletion=complete_subject,
        ),
    ],
    layers: Annotated[
        int | None,
        typer.Option(
            help="Unroll a schedule over this many MoE layers; keep this many of a config."
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches, for schedules that take any number of them.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedule of a graph or model.", autocompletion=complete_schedule),
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="What carries a graph's or model's communication.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Pretended ranks of a model or config.", min=1)
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            help="Dim of a model's tensor arguments to split; 0 if left out, -1: marked already.",
            min=-1,
        ),
    ] = None,
    as_progress: Annotated[
        bool, typer.Option("--progress", help="Show where the ranks of a hung job stand.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline as a page instead.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as a trace for Perfetto instead.")
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON with microseconds by action, or a measurement: simulate with them.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a schedule, its unrolled form, a program, or the progress of all ranks.

    Of a graph, a model or a config it prints the program that the compiler makes of it. With
    --times it prints what that takes: time, bubbles, exposed communication, critical path.

    Example: dbo-fx show mlp_shared_overlap --layers 3
    """
    from dbo_fx.subjects import Request

    with exits("show"):
        request = Request(", ".join(what), ranks, layers, microbatches, transport, schedule, dim)
        if as_progress:
            if html or trace or times or request != Request(request.what):
                raise OptionError("--progress shows dumps; leave other options than --json out")
            _show_progress(what, as_json)
            return
        writes = html is not None or trace is not None
        if writes and as_json:
            raise OptionError("--html and --trace write files instead; leave --json out")
        if html is not None and trace is not None and html.resolve() == trace.resolve():
            raise OptionError(f"--html and --trace both name {html}; give each a file of its own")
        if len(what) > 1:
            raise OptionError(f"found {len(what)} names, wanted one; dumps need --progress")
        if writes:
            _write_timeline(request, html, trace, times)
        elif times is not None:
            _show_simulation(request, times, as_json)
        elif request.kind == "text":
            _show_text(request, as_json)
        else:
            _show_graph(request, as_json)


def _show_text(request: Request, as_json: bool) -> None:
    from dbo_fx import show as showing
    from dbo_fx.errors import ScheduleError
    from dbo_fx.ir import Program, unroll
    from dbo_fx.subjects import microbatches_of, read_text

    request.refuse("no model", "ranks")
    request.refuse("shown as an order, which no transport changes", "transport")
    subject, _ = read_text(request)
    if isinstance(subject, Program):
        if as_json:
            put_json(showing.program_json(subject))
        else:
            put(showing.program_text(subject))
        return
    if request.layers is None:
        if request.microbatches is not None:
            raise ScheduleError("--microbatches says how many to unroll for; give --layers too")
        put_json(showing.schedule_json(subject)) if as_json else put(str(subject))
        return
    unrolled = unroll(subject, request.layers, microbatches_of(request, subject))
    if as_json:
        put_json(showing.schedule_json(subject, unrolled))
    else:
        put(showing.unrolled_text(subject, unrolled))


def _show_graph(request: Request, as_json: bool) -> None:
    from dbo_fx import show as showing
    from dbo_fx.subject_graphs import compiled_subject

    with progress() as say, compiled_subject(request, say) as compiled:
        program = compiled.program
    put_json(showing.program_json(program)) if as_json else put(showing.program_text(program))


def _show_progress(paths: list[str], as_json: bool) -> None:
    from dbo_fx.progress import read_progress
    from dbo_fx.progress_picture import picture, picture_json

    dumps = read_progress(paths)
    put_json(picture_json(dumps)) if as_json else put(picture(dumps))


def _show_simulation(request: Request, times: Path, as_json: bool) -> None:
    from dbo_fx.inspect.simulation import simulate

    found = simulate(_program_of(request), times)
    put_json(found.to_json()) if as_json else put(f"{found}\n")


def _program_of(request: Request) -> Program:
    """The program that a text, a graph, a model or a config makes."""
    if request.kind == "text":
        from dbo_fx.subjects import read_program

        request.refuse("no model", "ranks")
        return read_program(request).program
    from dbo_fx.subject_graphs import compiled_subject

    with progress() as say, compiled_subject(request, say) as compiled:
        return compiled.program


def _write_timeline(
    request: Request, html: Path | None, trace: Path | None, times: Path | None
) -> None:
    from dbo_fx.inspect.write_timeline import timeline, write_files
    from dbo_fx.subjects import read_program

    if request.kind == "text":
        request.refuse("no model", "ranks")
        found = timeline(read_program(request).program, times=times)
    else:
        from dbo_fx.subject_graphs import compiled_subject

        with progress() as say, compiled_subject(request, say) as compiled:
            found = timeline(compiled, times=times)
    for path in write_files(found, html=html, trace=trace):
        tell("show", f"wrote {path}")
