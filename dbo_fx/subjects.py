"""What the commands can look at, and how what was typed is told apart. No torch.

A subject is a text (a schedule's name, a `.dbo` file), a saved captured graph, a model
(`module:callable`), or a Hugging Face config. `dbo_fx/subject_graphs.py` makes graphs of the last
three.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dbo_fx import schedules
from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError
from dbo_fx.graph_facts import SUFFIX as GRAPH_SUFFIX
from dbo_fx.graph_facts import is_graph_file
from dbo_fx.ir import Program, Schedule, parse, parse_program, parse_schedule
from dbo_fx.ir_bind import bound_program
from dbo_fx.ir_schedule import significant_lines

Kind = Literal["text", "graph", "model", "config"]
LAYERS = 2
MICROBATCHES = 2
RANKS = 2
TRANSPORT = "nccl"
CONFIG = "config.json"
# What folders of `dbo_fx.save` and of option `dump_dir` hold.
GRAPH, SCHEDULE, PROGRAM = f"captured{GRAPH_SUFFIX}", "schedule.dbo", "program.dbo"


@dataclass(frozen=True, slots=True)
class Request:
    """What to look at, and for what. None: not said.

    Attributes:
        what: A schedule's name, a file, a folder, or `module:callable`.
        ranks: R, how many ranks are pretended.
        layers: How many MoE layers a schedule is laid over; how many layers a config's model has.
        microbatches: For schedules that take any number of them.
        transport: Name of what carries the communication.
        schedule: The schedule of a graph, a model or a config.
        dim: Dim of a model's tensor arguments that is split; -1 where the callable marks it.
    """

    what: str
    ranks: int | None = None
    layers: int | None = None
    microbatches: int | None = None
    transport: str | None = None
    schedule: str | None = None
    dim: int | None = None

    @property
    def kind(self) -> Kind:
        """See `kind_of`."""
        return kind_of(self.what)

    def refuse(self, why: str, *names: str) -> None:
        """Refuse options that mean nothing for this subject.

        Raises:
            OptionError: One of the named options is given.
        """
        given = [f"--{name}" for name in names if getattr(self, name) is not None]
        if given:
            raise OptionError(f"{self.what} is {why}; leave {' and '.join(given)} out")


def kind_of(what: str) -> Kind:
    """Tell by the name, and by what lies there, what a subject is.

    Raises:
        OptionError: It is a file or a folder that no command reads; or nothing has this name.
    """
    path = Path(what)
    if not what:
        raise OptionError("the name of what to look at is empty")
    if what.endswith(schedules.SUFFIX):
        return "text"
    if is_graph_file(what) or (path / GRAPH).is_file():
        return "graph"
    if path.is_dir() or what.endswith(".json"):
        _check_config(path)
        return "config"
    if ":" in what and not path.exists():
        return "model"
    if what in schedules.names():
        return "text"
    if path.exists():
        raise OptionError(
            f"{what}: from its name this is neither a program or schedule ({schedules.SUFFIX}), a "
            f"saved graph ({GRAPH_SUFFIX}) nor a Hugging Face {CONFIG}"
        )
    raise OptionError(
        f"no schedule is called {what!r}; there are {', '.join(schedules.names())}; or give the "
        f"path of a {schedules.SUFFIX} file, of a {GRAPH_SUFFIX} file, of a Hugging Face folder or "
        f"{CONFIG}, or module:callable"
    )


def graph_file(what: str) -> Path:
    """The graph file that a subject of kind `graph` names, itself or by its folder."""
    path = Path(what)
    return path / GRAPH if path.is_dir() else path


def as_compiled(request: Request) -> tuple[str | None, str | None]:
    """The schedule and the transport that a folder's graph was compiled with.

    Args:
        request: A request of kind `graph`.

    Returns:
        A name or a path, and a name; None where the folder does not say it.

    Raises:
        OptionError: The folder's schedule is neither in it nor a shipped one, and none was asked
            for.
        ScheduleError: The folder's program is damaged.
    """
    folder = Path(request.what)
    program = folder / PROGRAM
    if not program.is_file():
        return None, None
    found = parse_program(schedules.read(str(program)), str(program), allow_wrong=True)
    if (folder / SCHEDULE).is_file():
        return str(folder / SCHEDULE), found.transport
    if found.schedule not in schedules.names() and request.schedule is None:
        raise OptionError(
            f"{request.what} was compiled with schedule {found.schedule!r}, which is not part of "
            "dbo_fx; give its file with --schedule"
        )
    return found.schedule, found.transport


def config_file(path: Path) -> Path:
    """The config file that a config subject names, itself or by its folder."""
    return path / CONFIG if path.is_dir() else path


def _check_config(path: Path) -> None:
    file = config_file(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        wanted = f"has neither {CONFIG} nor {GRAPH}" if path.is_dir() else "does not exist"
        raise OptionError(f"{path} {wanted}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise OptionError(f"{file} cannot be read ({reason})") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        hint = f"; a saved graph's name ends in {GRAPH_SUFFIX}" if not path.is_dir() else ""
        raise OptionError(f'{file} is no Hugging Face config: it has no "model_type"{hint}')


def read_text(request: Request, *, allow_wrong: bool = False) -> tuple[Schedule | Program, str]:
    """Read a text.

    Args:
        request: A request of kind `text`.
        allow_wrong: Take programs that break a rule too: to say why is what `check` is for.

    Returns:
        The parsed text, and the text itself.

    Raises:
        ScheduleError: The file cannot be read, or the text is malformed.
        OptionError: An option does not fit a text.
    """
    request.refuse("no model", "schedule", "dim")
    text = schedules.read(request.what)
    lines = significant_lines(text)
    if allow_wrong and lines and lines[0][1].split()[0] == "program":
        subject: Schedule | Program = parse_program(text, request.what, allow_wrong=True)
    elif allow_wrong:
        subject = parse_schedule(text, request.what)
    else:
        subject = parse(text, request.what)
    if isinstance(subject, Program):
        layers, count = subject.layers, subject.microbatches
        request.refuse(
            f"a program already, unrolled over {layers} layers and {count} microbatches",
            "layers",
            "microbatches",
            "transport",
        )
    return subject, text


@dataclass(frozen=True, slots=True)
class Bound:
    """A text as a program.

    Attributes:
        program: The program, or what a schedule becomes over its layers.
        lines: Per step the number of its line in the text; empty for a schedule.
    """

    program: Program
    lines: tuple[int, ...] = ()


def read_program(request: Request, *, allow_wrong: bool = False) -> Bound:
    """Read a text as a program; a schedule is bound to streams over its layers.

    Args:
        request: A request of kind `text`.
        allow_wrong: See `read_text`.

    Raises:
        ScheduleError: See `read_text`; or the number of microbatches does not fit the schedule.
        OptionError: An option does not fit, or no transport has the name.
    """
    subject, text = read_text(request, allow_wrong=allow_wrong)
    if isinstance(subject, Program):
        numbers = [number for number, _ in significant_lines(text)]
        return Bound(subject, tuple(numbers[len(numbers) - len(subject.steps) :]))
    transport = contract(request.transport or TRANSPORT)
    layers = LAYERS if request.layers is None else request.layers
    return Bound(bound_program(subject, layers, transport, microbatches_of(request, subject)))


def microbatches_of(request: Request, schedule: Schedule) -> int | None:
    """How many microbatches a schedule is unrolled for, as `unroll` takes it."""
    if request.microbatches is None and schedule.num_microbatches is None:
        return MICROBATCHES
    return request.microbatches
