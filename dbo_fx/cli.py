"""The `dbo-fx` command. Data goes to stdout, messages to stderr; exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from dbo_fx import check as checking
from dbo_fx import show as showing
from dbo_fx.errors import DboError, OptionError, ProgressError, ScheduleError
from dbo_fx.ir import Program, parse, unroll
from dbo_fx.progress import read_progress
from dbo_fx.progress_picture import picture, picture_json
from dbo_fx.schedules import read

try:
    import typer
except ModuleNotFoundError as missing:
    sys.stderr.write("dbo-fx: the command needs typer; pip install 'dbo-fx[cli]'\n")
    raise SystemExit(2) from missing

app = typer.Typer(
    name="dbo-fx",
    help="Dual Batch Overlap for Mixture-of-Experts models, scheduled at compile time.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_DEFAULT_MICROBATCHES = 2


@app.command()
def show(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE.dbo|DUMP...",
            help="A schedule's name, a .dbo file; or dumps or their folders, with --progress.",
        ),
    ],
    layers: Annotated[int | None, typer.Option(help="Unroll over this many MoE layers.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches, for schedules that take any number of them.")
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress", help="Show where the ranks of a hung job stand.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a schedule, its unrolled form, a saved program, or the progress of all ranks."""
    try:
        if progress:
            if layers is not None or microbatches is not None:
                raise OptionError("--progress shows dumps; leave --layers and --microbatches out")
            text = _progress(what, as_json)
        elif len(what) > 1:
            raise OptionError(f"found {len(what)} names, wanted one; dumps need --progress")
        else:
            text = _shown(what[0], layers, microbatches, as_json)
        typer.echo(text, nl=False)
    except (OptionError, ProgressError, ScheduleError) as error:
        typer.echo(f"dbo-fx show: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CALLABLE", help="Takes nothing, returns (model, args[, kwargs])."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Size of the pretended process group.", min=1)] = 2,
    dim: Annotated[
        int, typer.Option(help="Dim of the tensor arguments to split; -1: marked already.", min=-1)
    ] = 0,
    schedule: Annotated[str, typer.Option(help="Schedule.")] = "mlp_shared_overlap",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is split how in a model, what runs where, and what was proven; runs nothing.

    Example: dbo-fx explain my_models:build_decoder
    """
    # Like the demo, this needs torch.
    from dataclasses import asdict

    from dbo_fx import explain as explaining
    from dbo_fx.options import Options

    try:
        options = Options(schedule=schedule)
        found = explaining.explain(
            target, ranks=ranks, dim=None if dim < 0 else dim, options=options
        )
    except (OptionError, ScheduleError) as error:
        typer.echo(f"dbo-fx explain: {error}", err=True)
        raise typer.Exit(2) from error
    except DboError as error:
        typer.echo(f"dbo-fx explain: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(_json(asdict(found)) if as_json else f"{found}\n", nl=False)


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM|MODEL",
            help="A program or schedule file, a schedule's name, or MODULE:CALLABLE.",
        ),
    ],
    ranks: Annotated[int, typer.Option(help="How many ranks run it.", min=1)] = checking.RANKS,
    capture: Annotated[
        bool, typer.Option("--capture", help="It is to run under CUDA graph capture.")
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(help=f"MoE layers of a schedule; {checking.LAYERS} if left out.", min=1),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="For schedules that take any number of them.", min=1)
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help=f"What carries a schedule; {checking.TRANSPORT} if left out."),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of a model.")] = None,
    dim: Annotated[
        int,
        typer.Option(help="Dim of a model's tensor arguments to split; -1: marked.", min=-1),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove a program, a schedule or a model safe, or show the shortest counterexample.

    Exit 0: certified; 1: refused; 2: not checked, because of how it was asked.
    """
    request = checking.Request(
        what, ranks, capture, layers, microbatches, transport, schedule, None if dim < 0 else dim
    )
    try:
        found = checking.check(request)
    except (OptionError, ScheduleError) as error:
        typer.echo(f"dbo-fx check: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(_json(found.to_json()) if as_json else f"{found}\n", nl=False)
    typer.echo(f"dbo-fx check: {found.summary}", err=True)
    if not found.certified:
        raise typer.Exit(1)


@app.command()
def demo(
    output: Annotated[
        str | None, typer.Option(help="Folder for what the demo writes.", metavar="DIR")
    ] = None,
) -> None:
    """Compile a small MoE model on two local ranks and show what came out."""
    # The demo needs torch; `show` must start without it.
    from dbo_fx.demo import main as run_demo

    try:
        code = run_demo(output)
    except DboError as error:
        typer.echo(f"dbo-fx demo: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def main() -> None:
    """Run the command line; the entry point of the `dbo-fx` script."""
    app()


def _shown(what: str, layers: int | None, microbatches: int | None, as_json: bool) -> str:
    subject = parse(read(what), what)
    if isinstance(subject, Program):
        if layers is not None or microbatches is not None:
            raise ScheduleError(
                f"{what} is a program, already unrolled over {subject.layers} layers and "
                f"{subject.microbatches} microbatches; leave --layers and --microbatches out"
            )
        if as_json:
            return _json(showing.program_json(subject))
        return showing.program_text(subject)
    if layers is None:
        if microbatches is not None:
            raise ScheduleError("--microbatches says how many to unroll for; give --layers too")
        return _json(showing.schedule_json(subject)) if as_json else str(subject)
    if microbatches is None and subject.num_microbatches is None:
        microbatches = _DEFAULT_MICROBATCHES
    unrolled = unroll(subject, layers, microbatches)
    if as_json:
        return _json(showing.schedule_json(subject, unrolled))
    return showing.unrolled_text(subject, unrolled)


def _progress(paths: list[str], as_json: bool) -> str:
    dumps = read_progress(paths)
    return _json(picture_json(dumps)) if as_json else picture(dumps)


def _json(rows: showing.Rows) -> str:
    return json.dumps(rows, indent=2) + "\n"


if __name__ == "__main__":
    main()
