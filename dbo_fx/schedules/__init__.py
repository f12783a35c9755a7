"""The shipped schedules, one text file each, and their loader."""

from __future__ import annotations

from pathlib import Path

from dbo_fx.errors import ScheduleError
from dbo_fx.ir import Schedule, parse_schedule

_FOLDER = Path(__file__).parent
SUFFIX = ".dbo"


def names() -> list[str]:
    """The names of the shipped schedules, sorted."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{SUFFIX}"))


def read(name_or_path: str) -> str:
    """The text of a shipped schedule or of a file.

    Args:
        name_or_path: A name from `names()`, or a path that ends in `.dbo`.

    Returns:
        The text, unparsed.

    Raises:
        ScheduleError: No schedule has this name, or the file cannot be read.
    """
    if not name_or_path.endswith(SUFFIX):
        if name_or_path not in names():
            raise ScheduleError(
                f"no schedule is called {name_or_path!r}; there are {', '.join(names())}; "
                f"or give the path of a {SUFFIX} file"
            )
        return (_FOLDER / f"{name_or_path}{SUFFIX}").read_text(encoding="utf-8")
    try:
        return Path(name_or_path).read_text(encoding="utf-8-sig")  # Some editors write a BOM.
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScheduleError(f"{name_or_path}: cannot be read ({reason}); check the path") from error


def load(name_or_path: str) -> Schedule:
    """Read and check a schedule.

    Args:
        name_or_path: A name from `names()`, or the path of a schedule text that ends in `.dbo`.

    Returns:
        The schedule.

    Raises:
        ScheduleError: The name is unknown, or the text is malformed or breaks a rule.
    """
    return parse_schedule(read(name_or_path), name_or_path)
