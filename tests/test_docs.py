"""What the documents show is what happens, and committed text is fit to be read by strangers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXECUTED = ("dbo-fx show", "dbo-fx explain", "dbo-fx check", "dbo-fx diff")
PROSE = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

# Written so that this file does not match itself.
UNFIT = {
    "path of one machine": r"(?<![\w./)}\]*])/(?:home|root|work|mnt|opt|srv|Users|tmp)/",
    "how the work was organised": r"\b(?:this|last|next|previous|earlier|another) session\b"
    r"|\b[Ii]ssue[ ]#?\d",
    "unfinished work": r"\b(?:TO[D]O|FIX[M]E|XX[X])\b",
}
# Where packages come from is the business of the machine, not of the project.
PACKAGE_SOURCE = re.compile(r"https?:/[/]|index[-_]url|find[-]links|trusted[-]host")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(document, line, match[1], match[2]))
    return [block for block in found if block.language == language]


def shown_commands() -> list[tuple[str, str, str]]:
    """(where, command, expected output) of `$ dbo-fx show`, `check`, `diff` in console blocks."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if command.startswith(EXECUTED):
                found.append((str(block), command, output))
    return found


def committed_files() -> list[Path]:
    """Files that git tracks or would add."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


# Blocks with tests run under pytest: tests/test_pytest_plugin.py.
SCRIPTS = [
    pytest.param(
        block, id=str(block), marks=() if block.document.name == "README.md" else pytest.mark.slow
    )
    for block in blocks("python")
    if "def test_" not in block.text
]


@pytest.mark.parametrize("block", SCRIPTS)
def test_python_block_runs(block: Block, tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{block}:\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(("where", "command", "expected"), shown_commands())
def test_console_block_prints_what_it_says(where: str, command: str, expected: str):
    program = Path(sys.executable).with_name("dbo-fx")
    done = subprocess.run(
        [str(program), *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    differs = command.startswith("dbo-fx diff") and not expected.rstrip().endswith("no difference")
    refused = "; fix: " in expected or differs
    assert done.returncode == int(refused), f"{where}: {done.stderr}"
    assert done.stdout.rstrip() == expected.rstrip(), where


@pytest.mark.parametrize("document", PROSE, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_committed_text_is_fit_for_strangers():
    found = []
    for path in committed_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for kind, pattern in UNFIT.items():
            found += [
                f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: "
                f"{kind}: {match[0]!r}"
                for match in re.finditer(pattern, text)
            ]
    assert found == []


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml", ".ci/run"])
def test_set_up_names_no_package_source(name: str):
    assert PACKAGE_SOURCE.search((ROOT / name).read_text(encoding="utf-8")) is None
