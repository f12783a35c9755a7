"""The pytest plugin: golden files, pretended ranks and what a test compiled; see `docs/testing.md`.

Found through its entry point wherever dbo_fx is installed. Loading it costs next to nothing and
imports no torch; `-p no:dbo_fx` leaves it out. A project's own option or fixture of the same name
goes before the plugin's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dbo_fx.golden_files import Golden
    from dbo_fx.testing import CompiledPrograms

_UPDATE, _UNUSED = "--update-golden", "--unused-golden"
_USED_FILE, _WRITTEN_FILE = "dbo_fx_golden", "dbo_fx_golden_written"
_FIXTURES = {"golden", "pretended_ranks", "compiled_programs"}
_OPTIONS = {
    _UPDATE: "write what the tests found into golden/ beside them instead of comparing",
    _UNUSED: "list the files in golden/ that no test of this run used (dbo_fx)",
}


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Iterator[None]:
    """Add the options that the project's conftest has not defined."""
    result = yield
    group = parser.getgroup("dbo_fx")
    for name, text in _OPTIONS.items():
        if name in _known(parser):  # The project has an option of this name: leave it alone.
            continue
        with suppress(ValueError):  # The same, as pytest 9 says it.
            group.addoption(name, action="store_true", help=text)
    return result


def _known(parser: pytest.Parser) -> set[str]:
    """Names of all options so far: pytest 8 looks for a double name in the option's group only."""
    groups = [*getattr(parser, "_groups", ()), getattr(parser, "_anonymous", None)]
    options = [option for group in groups for option in getattr(group, "options", ())]
    return {name for option in options for name in option.names()}


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Golden files of this test: `golden(program)`, `.lanes()`, `.diff()`, `.text()`."""
    from dbo_fx.golden_files import FOLDER, Golden

    def note(path: Path, written: bool) -> None:
        # What a test process writes into its reports reaches the one that prints the summary.
        if config.getoption(_UNUSED, False):
            request.node.user_properties.append((_USED_FILE, str(path)))
        if written:
            request.node.user_properties.append((_WRITTEN_FILE, str(path)))

    config = request.config
    folder = request.path.parent / FOLDER
    return Golden(folder, request.node.nodeid, bool(config.getoption(_UPDATE, False)), note)


@pytest.fixture
def pretended_ranks(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a default process group of two ranks, of which one is this and one pretended.

    Another number: `@pytest.mark.parametrize("pretended_ranks", [4], indirect=True)`.
    """
    from dbo_fx.testing import pretended_ranks as pretended

    with pretended(getattr(request, "param", 2)) as name:
        yield name


@pytest.fixture
def compiled_programs() -> CompiledPrograms:
    """The programs compiled since the test began; Dynamo forgets what it compiled before."""
    import torch

    from dbo_fx.testing import CompiledPrograms

    torch._dynamo.reset()
    return CompiledPrograms()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Keep torch's structured trace out of the reports of tests that use the fixtures."""
    if not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        without_torch_trace()


def without_torch_trace() -> None:
    """Take pytest's log handlers off torch's structured trace, for this phase of this test.

    pytest 9 hangs its handlers on loggers that do not propagate as well. As torch's trace then has
    a handler, torch writes all of it, and a failure is followed by hundreds of empty log lines.
    """
    trace = logging.getLogger("torch.__trace")
    for handler in list(trace.handlers):
        if type(handler).__module__ == "_pytest.logging":
            trace.removeHandler(handler)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was written, and what was not used."""
    asked = config.getoption(_UNUSED, False)
    if not (asked or config.getoption(_UPDATE, False)):
        return
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "nodeid")]
    files = {name: set[Path]() for name in (_USED_FILE, _WRITTEN_FILE)}
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name in files:
                files[name].add(Path(value))
    lists = {"golden files written": files[_WRITTEN_FILE]}
    if asked:
        lists["golden files that no test of this run used"] = _beside(
            config.rootpath, [report.nodeid for report in reports]
        ).difference(files[_USED_FILE])
    for title, paths in lists.items():
        if paths:
            terminalreporter.section(title)
            for path in sorted(paths):
                terminalreporter.line(_relative(path, config.invocation_params.dir))


def _beside(root: Path, tests: list[str]) -> set[Path]:
    """All golden files beside the files of tests."""
    from dbo_fx.golden_files import FOLDER

    folders = {(root / test.partition("::")[0]).parent / FOLDER for test in tests}
    return {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def _relative(path: Path, start: Path) -> str:
    return str(path.relative_to(start)) if path.is_relative_to(start) else str(path)
