"""The pytest plugin: golden files, fixtures, other people's projects, and the project to copy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo_fx import schedules
from dbo_fx.contracts import NCCL
from dbo_fx.errors import OptionError
from dbo_fx.golden_files import Golden, file_name
from dbo_fx.ir import parse_schedule
from dbo_fx.ir_bind import bound_program
from dbo_fx.testing import assert_overlaps

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "graph_diff_tests"
DOCUMENT = ROOT / "docs" / "testing.md"
SHIPPED = "mlp_shared_overlap"

GOLDENS = """
import pathlib
import sys

import pytest
from dbo_fx import schedules

HERE = pathlib.Path(__file__).parent


def test_schedule(golden):
    golden(schedules.load(str(HERE / "mine.dbo")))
    golden.text("always the same")


@pytest.mark.parametrize("layer", [0, 1])
def test_lanes(golden, layer):
    golden.lanes(HERE / "mine.dbo", layer)
    golden.text("the same for both", name="lanes/note")


def test_diff(golden):
    golden.diff(HERE / "mine.dbo", "mlp_shared_overlap")
    assert "torch" not in sys.modules
"""
FILES = [
    "lanes/note.txt",
    "test_goldens/test_diff.diff.txt",
    "test_goldens/test_lanes-0.lanes.txt",
    "test_goldens/test_lanes-1.lanes.txt",
    "test_goldens/test_schedule.dbo",
    "test_goldens/test_schedule.txt",
]
FIXTURES = """
import pytest
import torch
import torch.distributed as dist


def test_two_ranks(pretended_ranks, compiled_programs):
    assert dist.get_world_size() == 2
    assert pretended_ranks == dist.group.WORLD.group_name
    assert list(compiled_programs) == []


@pytest.mark.parametrize("pretended_ranks", [4], indirect=True)
def test_four_ranks(pretended_ranks):
    assert dist.get_world_size() == 4


def test_the_group_is_gone():
    assert not dist.is_initialized()


def test_a_failing_one_shows_no_trace_of_torch(compiled_programs):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert False, "on purpose"
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with a schedule and tests with goldens."""
    pytester.makepyfile(test_goldens=GOLDENS)
    pytester.makefile(".dbo", mine=schedules.read(SHIPPED))
    return pytester


def run_pytest(pytester: pytest.Pytester, *args: str) -> str:
    # hypothesis has no part in this, and takes a second to start.
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    done = pytester.runpytest_subprocess(*without, "-rA", *args)
    return done.stdout.str() + done.stderr.str()


def found_files(pytester: pytest.Pytester) -> list[str]:
    folder = pytester.path / "golden"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_goldens_are_written_compared_and_unused(project: pytest.Pytester) -> None:
    written = run_pytest(project, "--update-golden", "-n", "2")
    assert "4 passed" in written
    assert [line for line in written.splitlines() if line.startswith("golden/")] == [
        f"golden/{name}" for name in FILES
    ]
    assert found_files(project) == FILES

    (project.path / "golden" / "left_over.txt").write_text("old")
    text = (project.path / "mine.dbo").read_text(encoding="utf-8")
    lanes_left_out = re.sub(r"^com[pm] .*\n", "", text, flags=re.MULTILINE)
    changed = lanes_left_out.replace(" S_1 MLP_0", " MLP_0 S_1")
    assert changed != lanes_left_out
    (project.path / "mine.dbo").write_text(changed, encoding="utf-8")
    compared = run_pytest(project, "--unused-golden")
    assert "4 failed" in compared
    _, _, unused = compared.partition("golden files that no test of this run used")
    assert [line for line in unused.splitlines() if line.startswith("golden/")] == [
        "golden/lanes/note.txt",  # The tests failed before they came to it.
        "golden/left_over.txt",
        "golden/test_goldens/test_schedule.txt",
    ]


def test_an_own_option_and_an_own_fixture_go_first(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--update-golden', action='store', default='mine')\n"
        "@pytest.fixture\n"
        "def golden(request):\n"
        "    return request.config.getoption('--update-golden')\n"
    )
    pytester.makepyfile(
        "import sys\n"
        "def test_it(golden):\n"
        "    assert golden == 'theirs'\n"
        "    assert 'dbo_fx.pytest_plugin' in sys.modules\n"
        "    loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "    assert 'torch' not in loaded\n"
        "    assert not {name for name in sys.modules if name.startswith('dbo_fx.')} - "
        "{'dbo_fx.pytest_plugin'}\n"
    )
    assert "1 passed" in run_pytest(pytester, "--update-golden", "theirs")


def test_fixtures_and_documented_tests(pytester: pytest.Pytester) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    tests = [block for block in blocks if "def test_" in block]
    assert len(tests) == 3
    pytester.makepyfile(
        test_fixtures=FIXTURES, **{f"test_block_{n}": block for n, block in enumerate(tests)}
    )
    output = run_pytest(pytester, "--update-golden")
    assert "1 failed, 6 passed" in output, output
    assert "on purpose" in output
    assert "torch.__trace" not in output
    assert "test_block_0/test_my_model.lanes.txt" in " ".join(found_files(pytester))


def test_the_documented_failure_is_what_it_says() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_overlaps(SHIPPED, comm="D m0", compute="S m0", layer=1)
    assert f"```text\n{caught.value}\n```" in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_passes_in_place(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(EXAMPLE)
    output = run_pytest(pytester)
    assert "9 passed" in output, output
    assert "1 failed" not in output


def test_a_broken_schedule_of_the_example_fails_with_its_lanes(pytester: pytest.Pytester) -> None:
    shutil.copytree(EXAMPLE, pytester.path, dirs_exist_ok=True)
    file = pytester.path / "shared_with_dispatch.dbo"
    text = file.read_text(encoding="utf-8")
    broken = text.replace("S_1 MLP_1 D_0.recv C_1.send MLP_0", "MLP_1 D_0.recv C_1.send MLP_0 S_1")
    assert broken != text
    file.write_text(broken, encoding="utf-8")
    output = run_pytest(pytester, "tests/test_schedule.py")
    assert "3 failed, 2 passed" in output, output
    assert "AssertionError: S_m0@0 does not run beside D_m1@0" in output
    shown = [line[2:].strip() for line in output.splitlines() if line.startswith("E ")]
    lane = next(n for n, line in enumerate(shown) if line.startswith("comm ") and "D_m1@0" in line)
    assert set(shown[lane + 1]) <= {" ", "^"}
    assert "moved S_1 later, across MLP_1 D_0.recv C_1.send MLP_0" in output


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/test_a.py::test_b", "test_a/test_b"),
        ("test_a.py::TestC::test_b[x-1]", "test_a/TestC.test_b-x-1"),
        ("test_a.py::test_b[a/b c]", "test_a/test_b-a_b_c-99401831"),
        ("test_a.py::test_b[a b/c]", "test_a/test_b-a_b_c-a3d07f3f"),
    ],
)
def test_names_of_golden_files(test: str, name: str) -> None:
    assert file_name(test) == name


def test_a_missing_golden_says_how_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        Golden(tmp_path / "golden", "tests/test_a.py::test_b[c]").text("x")
    assert str(caught.value) == (
        "no golden/test_a/test_b-c.txt yet; write it, and read it: "
        'pytest --update-golden "tests/test_a.py::test_b[c]"'
    )
    assert list(tmp_path.iterdir()) == []


def test_a_difference_says_what_it_means(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    schedule = schedules.load(SHIPPED)
    moved = re.sub(r"^com[pm] .*\n", "", str(schedule), flags=re.MULTILINE)
    moved = moved.replace(" S_1 MLP_0", " MLP_0 S_1")
    Golden(tmp_path / "golden", "test_a.py::test_b", update=True)(schedule)
    with pytest.raises(AssertionError) as caught:
        Golden(tmp_path / "golden", "test_a.py::test_b")(parse_schedule(moved))
    golden("testing_mismatch.txt", f"{caught.value}\n")


def test_the_second_text_of_a_test_has_a_file_of_its_own(tmp_path: Path) -> None:
    writing = Golden(tmp_path / "golden", "test_a.py::test_b", update=True)
    writing.text("one")
    writing.text("two\n")
    assert (tmp_path / "golden/test_a/test_b+2.txt").read_text() == "two\n"
    comparing = Golden(tmp_path / "golden", "test_a.py::test_b")
    comparing.text("one\n")
    with pytest.raises(AssertionError, match=r"test_b\+2\.txt differs"):
        comparing.text("three")


def test_nothing_is_written_that_did_not_change(tmp_path: Path) -> None:
    noted: list[tuple[Path, bool]] = []
    for _ in range(2):
        golden = Golden(
            tmp_path / "golden", "test_a.py::test_b", True, lambda *found: noted.append(found)
        )
        golden.text("one")
    assert [written for _, written in noted] == [True, False]
    assert [p.name for p in (tmp_path / "golden/test_a").iterdir()] == ["test_b.txt"]


@pytest.mark.parametrize("name", ["../a.txt", "/a.txt", "two\nlines"])
def test_goldens_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="names no file below golden/"):
        Golden(tmp_path / "golden", "test_a.py::test_b", update=True).text("x", name=name)


def test_line_ends_make_no_difference(tmp_path: Path) -> None:
    for update in (True, False):
        Golden(tmp_path / "golden", "test_a.py::test_b", update).text("one\r\ntwo\rthree\n")
    assert (tmp_path / "golden/test_a/test_b.txt").read_bytes() == b"one\ntwo\nthree\n"


def test_a_name_is_for_one_text(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "golden", "test_a.py::test_b", update=True)
    golden.text("one", name="a.txt")
    golden.text("one", name="a.txt")
    with pytest.raises(OptionError, match=r"a\.txt is named twice in this test"):
        golden.text("two", name="a.txt")


def test_lanes_of_a_layer_that_is_not_there(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "golden", "test_a.py::test_b", update=True)
    golden.lanes(SHIPPED, layer=7)
    assert "D_m0@7" in (tmp_path / "golden/test_a/test_b.lanes.txt").read_text()
    with pytest.raises(OptionError, match="there is no layer 7; they count from 0 to 2"):
        golden.lanes(bound_program(schedules.load(SHIPPED), 3, NCCL), layer=7)


def test_text_takes_texts(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="takes a text, found a int"):
        Golden(tmp_path / "golden", "test_a.py::test_b").text(3)  # type: ignore[arg-type]


def test_a_text_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"for texts: golden\.text"):
        Golden(tmp_path / "golden", "test_a.py::test_b")(SHIPPED)


def test_an_unreadable_golden_is_still_a_difference(tmp_path: Path) -> None:
    file = tmp_path / "golden" / "test_a" / "test_b.dbo"
    file.parent.mkdir(parents=True)
    file.write_text("<<<<<<< ours\n")
    with pytest.raises(AssertionError, match="the golden text is no longer readable"):
        Golden(tmp_path / "golden", "test_a.py::test_b")(schedules.load(SHIPPED))
