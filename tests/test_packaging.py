"""The wheel and the sdist hold what the tree holds, and importing dbo_fx stays cheap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import dbo_fx

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("dbo_fx", "passes")


def import_path(folder: Path) -> str:
    """Dotted name under which a source folder is imported."""
    dotted = ".".join(folder.relative_to(ROOT).parts)
    return f"dbo_fx.{dotted}" if dotted.startswith("passes") else dotted


def source_files() -> set[str]:
    """Every file of the package, by its path inside the wheel."""
    files = set()
    for source in SOURCES:
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files.add(f"{import_path(path.parent).replace('.', '/')}/{path.name}")
    return files


def run_python(code: str, *, python_path: Path | None = None) -> str:
    # Python looks in the working directory first: keep the checkout out of the way of the wheel.
    env, folder = dict(os.environ), ROOT
    if python_path is not None:
        env["PYTHONPATH"], folder = str(python_path), python_path
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_package_list_equals_the_folders():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {
        import_path(path.parent) for source in SOURCES for path in (ROOT / source).rglob("*.py")
    }
    assert sorted(listed) == sorted(folders)
    for source in SOURCES:
        for path in (ROOT / source).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


@pytest.mark.parametrize(
    "module",
    [
        "dbo_fx",
        "dbo_fx.ir",
        "dbo_fx.schedules",
        "dbo_fx.cli",
        "dbo_fx.testing",
        "dbo_fx.pytest_plugin",
    ],
)
def test_import_leaves_torch_out(module: str):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_backend_entry_point():
    (point,) = entry_points(group="torch_dynamo_backends", name="dbo_fx")
    assert callable(point.load())


def test_console_script():
    (point,) = entry_points(group="console_scripts", name="dbo-fx")
    assert callable(point.load())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel built from that sdist."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for source in SOURCES:
        shutil.copytree(ROOT / source, tree / source, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_wheel_holds_every_file(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert names == source_files()
    assert {"dbo_fx/py.typed", "dbo_fx/passes/__init__.py"} <= names
    assert any(name.endswith(".dbo") for name in names)
    assert len(licenses) == 1


def test_sdist_holds_every_file(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    in_tree = {name.replace("dbo_fx/passes/", "passes/") for name in source_files()}
    assert in_tree <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_installed_wheel_runs(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import dbo_fx, dbo_fx.passes, dbo_fx.schedules as schedules\n"
        "print(dbo_fx.passes.__file__)\n"
        "print(*[schedules.load(name).name for name in schedules.names()])\n"
    )
    where, names = run_python(code, python_path=tmp_path).splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert {"sequential", "mlp_shared_overlap"} <= set(names.split())


def test_no_public_name_is_hidden_by_a_module_of_that_name() -> None:
    """Importing `dbo_fx.x` would put the module in the place of the function."""
    modules = {path.stem for path in (ROOT / "dbo_fx").iterdir()}
    assert not modules & set(dbo_fx.__all__)
