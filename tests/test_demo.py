"""The demo's parts, the whole demo on two CPU ranks, and a rank that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dbo_fx import demo, demo_text
from dbo_fx.errors import DboError, OptionError
from dbo_fx.launch import RankError, run_ranks

pytest.importorskip("transformers", minversion="5.17")

TEXT = b"Sphinx of black quartz, judge my vow. " * 40


def test_text_is_cut_into_sequences_and_begins_anew() -> None:
    assert demo_text.cut(b"abcde", 1, count=2, length=3).tolist() == [[100, 101, 97], [98, 99, 100]]


def test_no_text_is_an_error() -> None:
    with pytest.raises(OptionError, match="text is empty"):
        demo_text.cut(b"", 0)


@pytest.mark.skipif(
    not Path(demo.__file__).parent.parent.joinpath("README.md").exists(),
    reason="dbo_fx is installed apart from its README",
)
def test_the_text_is_the_readme() -> None:
    text, source = demo_text.read_text()
    assert source == "README.md"
    assert text == Path(demo.__file__).parent.parent.joinpath("README.md").read_bytes()


def test_an_installed_package_reads_its_description(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "a_wheel-1.dist-info"
    info.mkdir()
    header = "Metadata-Version: 2.4\nName: a-wheel\nVersion: 1\n"
    (info / "METADATA").write_text(f"{header}\nWhat the README says.\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo_text, "DISTRIBUTION", "a-wheel")
    monkeypatch.setattr("dbo_fx.__file__", str(tmp_path / "dbo_fx" / "__init__.py"))
    text, source = demo_text.read_text()
    assert text == b"What the README says.\n"
    assert source == "the installed package's description"


def test_says_when_there_is_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dbo_fx.__file__", str(tmp_path / "dbo_fx" / "__init__.py"))
    monkeypatch.setattr(demo_text, "DISTRIBUTION", "a-package-that-nobody-installed")
    with pytest.raises(DboError, match="missing or empty"):
        demo_text.read_text()


@pytest.mark.parametrize(
    ("outcomes", "code", "lines"),
    [
        (
            [demo.Outcome(True, 1e-6, 2.5)] * 2,
            0,
            ["microbatched eager: yes", "eager: 1.00e-06 (largest logit 2.50)"],
        ),
        (
            [demo.Outcome(True, 1e-6, 2.5), demo.Outcome(False, 2e-6, 2.5)],
            1,
            ["microbatched eager: no (ranks [1])", "eager: 2.00e-06"],
        ),
        (
            [demo.Outcome(True, 0.0, 2.5, True), demo.Outcome(True, 0.0, 2.5, False)],
            1,
            ["microbatched eager: yes", "sequential program: no (ranks [1])"],
        ),
    ],
)
def test_the_exit_code_is_the_worst_of_all_ranks(
    outcomes: list[demo.Outcome],
    code: int,
    lines: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "program.dbo").write_text("")
    assert demo.report(outcomes, tmp_path) == code
    printed = capsys.readouterr().out
    assert all(line in printed for line in [*lines, str(tmp_path / "program.dbo")])


def test_the_demo_ends_with_0_and_explains_itself(tmp_path: Path) -> None:
    command = "import sys; from dbo_fx.demo import main; sys.exit(main(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "bit-identical to microbatched eager: yes" in done.stdout
    assert "MLP_m1@1" in done.stdout
    assert done.stdout.count("built the model") == 1
    assert (tmp_path / "rank0" / "0" / "program.dbo").is_file()


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_demo_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="text is empty") as failure:
        run_ranks(demo.run_rank, 2, ([TEXT, b""], str(tmp_path)), timeout_s=100)
    assert failure.value.rank == 1
    assert str(failure.value).index("OptionError") < 200
