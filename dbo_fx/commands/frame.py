"""What all commands share: exit codes, messages, output for people and for programs, completion."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dbo_fx import schedules
from dbo_fx.errors import DboError, GraphFileError, OptionError, ProgressError, ScheduleError
from dbo_fx.graph_facts import SUFFIX as GRAPH_SUFFIX
from dbo_fx.tables import Block, Table, plain

REFUSED = 1
USAGE = 2
TRACEBACK = "DBO_FX_TRACEBACK"
# What a wrong argument or a damaged file raises; every other error of dbo_fx is a verdict.
_USAGE = (OptionError, ScheduleError, ProgressError, GraphFileError)

# What writing to a full disk raises.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# No line of a message is longer: what was found may be a whole file.
_LONGEST = 1000

Json = Annotated[bool, typer.Option("--json", help="Print JSON; its schema is shipped.")]
Say = Callable[[str], None]


@contextmanager
def exits(command: str) -> Iterator[None]:
    """Turn whatever the body raises into one message on stderr and an exit code.

    Args:
        command: Name of the command, for the message.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except DboError as error:
        tell(command, str(error))
        raise typer.Exit(USAGE if isinstance(error, _USAGE) else REFUSED) from error
    except ModuleNotFoundError as error:
        tell(command, f"{error}. {_install(error.name or '')}")
        raise typer.Exit(USAGE) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # Whoever read the output has gone; click ends quietly.
        if isinstance(error, OSError) and error.errno in _FULL:
            tell(command, f"the output cannot be written: {error.strerror}")
            raise typer.Exit(USAGE) from error
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        tell(
            command,
            f"unexpected {type(error).__name__}: {error}. This is a mistake in dbo_fx or in the "
            f"model: with {TRACEBACK}=1 in the environment the traceback is shown.",
        )
        raise typer.Exit(USAGE) from error


def tell(command: str, message: str) -> None:
    """Write a message to stderr; very long lines lose their middle."""
    lines = f"dbo-fx {command}: {message}".split("\n")
    typer.echo("\n".join(map(_cut, lines)), err=True)


def _cut(line: str) -> str:
    """A line without its middle, if it is very long."""
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"


def put(text: str) -> None:
    """Write data to stdout as it is."""
    typer.echo(text, nl=False)


def put_json(value: Any) -> None:
    """Write a value as JSON."""
    put(json.dumps(value, indent=2) + "\n")


def put_blocks(blocks: Sequence[Block]) -> None:
    """Write paragraphs and tables: drawn by rich in a terminal, aligned plain text elsewhere."""
    if not _is_terminal(sys.stdout) or find_spec("rich") is None:
        put(plain(blocks))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for block in blocks:
        if isinstance(block, Table):
            _draw(console, block)
        else:
            console.print(block, markup=False, emoji=False)


def _is_terminal(stream: Any) -> bool:
    """Whether it is one; a process that was started without the stream has None."""
    return stream is not None and bool(stream.isatty())


def _draw(console: Any, table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, title=table.title or None, title_justify="left")
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)


@contextmanager
def progress() -> Iterator[Say]:
    """A line on stderr that says what is being done, if stderr is a terminal."""
    if not _is_terminal(sys.stderr) or find_spec("rich") is None:
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)


def complete_subject(incomplete: str) -> list[str]:
    """Schedule names, program files, graph files and folders that begin with what was typed."""
    found = [name for name in schedules.names() if name.startswith(incomplete)]
    folder, _, _ = incomplete.rpartition("/")
    base = Path(folder + "/" if folder or incomplete.startswith("/") else ".")
    try:
        paths = sorted(base.iterdir())
    except OSError:
        return found
    for path in paths:
        text = f"{incomplete[: len(incomplete) - len(incomplete.rpartition('/')[2])]}{path.name}"
        hidden = path.name.startswith(".") and not incomplete.rpartition("/")[2].startswith(".")
        if hidden or not text.startswith(incomplete):
            continue
        if path.is_dir():
            found.append(f"{text}/")
        elif path.name.endswith((schedules.SUFFIX, GRAPH_SUFFIX)) or path.name == "config.json":
            found.append(text)
    return found


def complete_schedule(incomplete: str) -> list[str]:
    """Schedule names and `.dbo` files that begin with what was typed."""
    return [
        text
        for text in complete_subject(incomplete)
        if not text.endswith((GRAPH_SUFFIX, "config.json"))
    ]


def _install(module: str) -> str:
    extras = {"transformers": "hf", "rich": "cli", "plotly": "html", "depyf": "debug"}
    extra = extras.get(module.split(".")[0])
    return f"Run: pip install 'dbo-fx[{extra}]'" if extra else f"Install {module or 'it'} first."
