"""Golden files: what a test found the last time, kept beside it as text and compared."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo_fx.errors import OptionError

if TYPE_CHECKING:
    from dbo_fx.inspect.scheduled import Subject

FOLDER = "golden"
_SHOWN = 60


@dataclass
class Golden:
    """The golden files of one test.

    A file is named after the test, or by `name`. The second one of a kind in a test gets `+2`, so
    the order of the calls matters, not what they are given.

    Attributes:
        folder: `golden/` beside the test's file.
        test: The test's id, `tests/test_a.py::test_b[c]`.
        update: Whether to write instead of to compare.
        note: Called with every file used, and whether it was written anew.
    """

    folder: Path
    test: str
    update: bool = False
    note: Callable[[Path, bool], None] = field(default=lambda path, written: None, repr=False)
    _used: Counter[str] = field(default_factory=Counter, repr=False)
    _found: dict[Path, str] = field(default_factory=dict, repr=False)

    def __call__(self, subject: Subject, name: str | None = None) -> None:
        """Compare a program or a schedule with its golden text.

        Args:
            subject: A compiled program, a pass's state, an `ir.Program` or an `ir.Schedule`.
            name: Of the file, below `golden/`.

        Raises:
            AssertionError: They differ, or there is no golden file yet.
        """
        __tracebackhide__ = True
        from dbo_fx.inspect.scheduled import named

        if isinstance(subject, str | Path):
            raise OptionError("golden() takes a program or schedule; for texts: golden.text(...)")
        found = named(subject)
        self._compare(str(found), name, ".dbo", meaning=lambda old: _meaning(old, found))

    def lanes(self, subject: Subject, layer: int | None = None, name: str | None = None) -> None:
        """Compare the lanes of a program.

        Args:
            subject: See `dbo_fx.testing`.
            layer: Of one layer; None for all of them.
            name: As in a call.

        Raises:
            AssertionError: As in a call.
        """
        __tracebackhide__ = True
        from dbo_fx.inspect.marked_lanes import lanes_text
        from dbo_fx.inspect.scheduled import program_of
        from dbo_fx.subjects import LAYERS

        program = program_of(subject, layers=LAYERS if layer is None else max(LAYERS, layer + 1))
        found = lanes_text(program, layer)
        if not found:
            raise OptionError(
                f"there is no layer {layer}; they count from 0 to {program.layers - 1}"
            )
        self._compare(found, name, ".lanes.txt")

    def diff(self, before: Any, after: Any, name: str | None = None) -> None:
        """Compare what changed between two graphs, programs or schedules.

        Args:
            before: Whatever `dbo_fx.diff` takes.
            after: Likewise.
            name: As in a call.

        Raises:
            AssertionError: As in a call.
        """
        __tracebackhide__ = True
        from dbo_fx.inspect.diff import diff

        self._compare(str(diff(before, after)), name, ".diff.txt")

    def text(self, text: str, name: str | None = None) -> None:
        """Compare any text.

        Args:
            text: The text. It makes no difference how lines end, nor if there is a last newline.
            name: As in a call.

        Raises:
            AssertionError: As in a call.
        """
        __tracebackhide__ = True
        if not isinstance(text, str):
            raise OptionError(f"golden.text() takes a text, found a {type(text).__name__}")
        self._compare(text, name, ".txt")

    def _compare(
        self,
        found: str,
        name: str | None,
        suffix: str,
        meaning: Callable[[str], str] = lambda old: "",
    ) -> None:
        __tracebackhide__ = True
        path = self.folder / self._name(name, suffix)
        found = found.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n") + "\n"
        if self._found.setdefault(path, found) != found:
            raise OptionError(f"{path.name} is named twice in this test, for different texts")
        old = path.read_text(encoding="utf-8") if path.exists() else None
        written = self.update and old != found
        if written:
            write_atomically(path, found)
        self.note(path, written)
        if self.update or old == found:
            return
        update = f'pytest --update-golden "{self.test}"'
        shown = path.relative_to(self.folder.parent)
        if old is None:
            raise AssertionError(f"no {shown} yet; write it, and read it: {update}")
        lines = unified_diff(old.splitlines(), found.splitlines(), str(shown), "found", lineterm="")
        parts = [f"{shown} differs:", shortened("\n".join(lines)), meaning(old)]
        parts.append(f"If this is meant: {update}, then read git diff.")
        raise AssertionError("\n".join(part for part in parts if part))

    def _name(self, name: str | None, suffix: str) -> str:
        if name is None:
            name = file_name(self.test)
            self._used[suffix] += 1
            nth = self._used[suffix]
            return f"{name}{suffix if nth == 1 else f'+{nth}{suffix}'}"
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or "\n" in name:
            raise OptionError(f"{name!r} names no file below {FOLDER}/")
        return name if path.suffix else f"{name}{suffix}"


def file_name(test: str) -> str:
    """The name of a test's golden files, without a suffix.

    Args:
        test: The test's id.

    Returns:
        `test_a/test_b-c` for `tests/test_a.py::test_b[c]`; what does not suit a file's name is
        replaced, and a hash keeps the names apart.
    """
    file, *parts = test.split("::")
    whole = ".".join(parts)
    plain = re.sub(r"\[(.*)\]$", r"-\1", whole, flags=re.DOTALL)
    safe = re.sub(r"[^\w.=-]", "_", plain)[:100]
    if safe != plain:
        safe += f"-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return f"{Path(file).stem}/{safe}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that nobody sees half of it: several test processes may write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def shortened(text: str) -> str:
    """The first lines of a text, and how many there are more."""
    lines = text.splitlines()
    more = len(lines) - _SHOWN
    rest = [f"... and {more} lines more"] if more > 0 else []
    return "\n".join([*lines[:_SHOWN], *rest])


def _meaning(old: str, found: Any) -> str:
    """What the change of a program or schedule means, where the old text can still be read."""
    from dbo_fx.errors import ScheduleError
    from dbo_fx.inspect.diff import diff
    from dbo_fx.ir import parse

    try:
        before = parse(old)
    except ScheduleError as error:
        return f"the golden text is no longer readable: {error}"
    if type(before) is not type(found):
        return ""
    return shortened(str(diff(before, found)))
