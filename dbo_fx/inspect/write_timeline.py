"""Make the timeline of anything that has one, and write it to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dbo_fx import schedules
from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError
from dbo_fx.inspect.action_times import given_times, read_times
from dbo_fx.inspect.measured import Measured
from dbo_fx.inspect.timeline import Timeline, timeline_of_compiled, timeline_of_program
from dbo_fx.inspect.timeline_html import timeline_html
from dbo_fx.inspect.timeline_measured import beside
from dbo_fx.inspect.trace_file import trace_json
from dbo_fx.ir import Program, Schedule, parse
from dbo_fx.ir_bind import bound_program

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram

LAYERS = 2
MICROBATCHES = 2
TRANSPORT = "nccl"


def timeline(
    subject: CompiledProgram | Measured | Program | Schedule | str | Path,
    path: str | Path | None = None,
    *,
    times: Mapping[str, float] | Measured | str | Path | None = None,
    tokens: int | None = None,
    layers: int | None = None,
    microbatches: int | None = None,
    transport: str | None = None,
) -> Timeline:
    """Lay a program out in time; with a path, write it there as a page or as a trace.

    A measurement of this very program, as the subject or as its times, gets lanes of its own beside
    the plan that its times make.

    Args:
        subject: A compiled program; a measurement; a program; a schedule, or the name or the path
            of its text.
        path: `.html` becomes a page, `.json` a trace for Perfetto; None writes nothing.
        times: Microseconds by action, a measurement, or the path of a JSON file with either;
            without them every action takes one unit.
        tokens: For a compiled program: size of the whole batch; the traced one if None.
        layers: For a schedule: how many layers to lay it over, 2 if None.
        microbatches: For a schedule that takes any number of them; 2 if None.
        transport: For a schedule: what carries its communication, `nccl` if None.

    Returns:
        The timeline.

    Raises:
        OptionError: An option does not fit the subject; a time is missing or malformed; the path
            ends in something else, or cannot be written; plotly is needed and not installed.
        ScheduleError: A text cannot be read or is malformed.
    """
    write = None if path is None else _writer(path)
    times = read_times(times) if isinstance(times, str | Path) else times
    if isinstance(subject, Measured):
        times, subject = subject if times is None else times, subject.program
    if isinstance(subject, str | Path):
        subject = parse(schedules.read(str(subject)), str(subject))
    unrolling = {"layers": layers, "microbatches": microbatches, "transport": transport}
    if isinstance(subject, Schedule):
        _refuse("a schedule", {"tokens": tokens})
        count = microbatches
        if count is None and subject.num_microbatches is None:
            count = MICROBATCHES
        carrier = contract(transport or TRANSPORT)
        subject = bound_program(subject, LAYERS if layers is None else layers, carrier, count)
        found = timeline_of_program(subject, given_times(times, subject))
    elif isinstance(subject, Program):
        _refuse("a program", {"tokens": tokens, **unrolling})
        found = timeline_of_program(subject, given_times(times, subject))
    elif not hasattr(subject, "memory"):
        raise OptionError(
            f"timeline: found {type(subject).__name__}; wanted a compiled program, a program, a "
            "schedule, or the name or path of one's text"
        )
    else:
        _refuse("a compiled program", unrolling)
        found = timeline_of_compiled(subject, given_times(times, subject.program), tokens)
    if isinstance(times, Measured) and times.program == subject_program(subject):
        found = beside(found, times)
    if write is not None and path is not None:
        _write(path, write(found))
    return found


def subject_program(subject: CompiledProgram | Program) -> Program:
    """The program of something compiled, or the program itself."""
    return subject if isinstance(subject, Program) else subject.program


def write_files(
    found: Timeline, *, html: str | Path | None = None, trace: str | Path | None = None
) -> list[Path]:
    """Write a timeline: what `dbo-fx show --html FILE --trace FILE` does with any file names.

    Args:
        found: The timeline.
        html: Where the page goes, if anywhere.
        trace: Where the trace goes, if anywhere.

    Returns:
        The files written.

    Raises:
        OptionError: A file cannot be written; plotly is needed and not installed.
    """
    written = []
    if html is not None:
        written.append(_write(html, timeline_html(found)))
    if trace is not None:
        written.append(_write(trace, trace_json([found])))
    return written


def _writer(path: str | Path) -> Callable[[Timeline], str]:
    writers: dict[str, Callable[[Timeline], str]] = {
        ".html": timeline_html,
        ".json": lambda found: trace_json([found]),
    }
    suffix = Path(path).suffix
    if suffix not in writers:
        raise OptionError(f"{path}: wanted a name that ends in .html (page) or .json (trace)")
    return writers[suffix]


def _write(path: str | Path, text: str) -> Path:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"{path}: cannot be written ({error.strerror}); check the path"
        ) from error
    return Path(path)


def _refuse(what: str, options: Mapping[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise OptionError(f"timeline: {what} takes no {' and no '.join(given)}")
