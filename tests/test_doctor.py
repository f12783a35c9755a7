"""`dbo-fx doctor`: what it finds, what it says would mend it, and what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbo_fx import doctor, self_tests
from dbo_fx.contracts import CONTRACTS
from dbo_fx.diagnosis import Diagnosis, Finding
from dbo_fx.doctor import diagnose

LIMIT_S = 120


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose()


def by_name(found: Diagnosis, section: str) -> dict[str, Finding]:
    return {f.name: f for f in found.sections[section]}


def test_the_core_works_here(found):
    assert found.ok
    assert by_name(found, "versions")["dbo_fx"].found == version("dbo-fx")
    assert str(found).endswith("the core works")
    assert by_name(found, "self-tests")["gloo over localhost"].state == "ok"


def test_every_transport_is_looked_at(found):
    assert list(by_name(found, "transports")) == list(CONTRACTS)


def test_whatever_does_not_work_says_why_and_what_to_do(found):
    for section in ("transports", "extras", "self-tests"):
        for finding in found.sections[section]:
            assert finding.state == "ok" or (finding.found and finding.mend), finding


def test_every_extra_for_users_is_looked_at():
    with (Path(__file__).parent.parent / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(declared) - {"demo", "dev"}
    for name, packages in doctor.EXTRAS.items():
        assert [line.split(">=")[0] for line in declared[name]] == list(packages)


def test_a_missing_extra_gives_the_pip_line(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    assert doctor._extra("html") == Finding(
        "html", "missing", "without plotly", "pip install 'dbo-fx[html]'"
    )


@pytest.mark.parametrize(
    ("name", "number", "state"),
    [
        ("torch", None, "missing"),
        ("torch", "2.10.1", "broken"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.12.1", "untested"),
        ("torch", "2.110.0", "untested"),
        ("python", "3.11.7", "ok"),
        ("python", "3.14.0", "untested"),
        ("transformers", "5.19.3", "ok"),
        ("numpy", "1.0", "ok"),
    ],
)
def test_versions_are_compared_with_the_tested_ones(name, number, state):
    assert doctor._version(name, number, core=True).state == state


def test_a_broken_core_exits_1(monkeypatch):
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from typer.testing import CliRunner

    from dbo_fx.cli import app

    broken = Finding("gloo over localhost", "broken", "refused", "mend it", core=True)
    optional = Finding("nccl", "missing", "no CUDA device", "run on a host with GPUs")
    for findings, code, verdict in (
        ((broken, optional), 1, "the core does not work: gloo over localhost"),
        ((optional,), 0, "the core works"),
    ):
        diagnosis = Diagnosis({"self-tests": findings})
        monkeypatch.setattr(doctor, "diagnose", lambda found=diagnosis: found)
        done = CliRunner().invoke(app, ["doctor"])
        assert done.exit_code == code
        assert done.stdout.splitlines()[-1] == verdict
        assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["ok"] is (not code)


def test_gloo_that_does_not_answer_is_broken(monkeypatch):
    import torch.distributed as dist

    def refuse(*args, **kwargs):
        raise RuntimeError("no interface\nand a long trace")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    finding = self_tests.gloo()
    assert (finding.state, finding.found) == ("broken", "no interface")
    assert "GLOO_SOCKET_IFNAME" in finding.mend


def fake_torch(*, cuda: str | None, nccl: bool, devices: int) -> SimpleNamespace:
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        distributed=SimpleNamespace(is_nccl_available=lambda: nccl),
        cuda=SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices),
    )


@pytest.mark.parametrize(
    ("torch", "state", "said"),
    [
        (fake_torch(cuda=None, nccl=False, devices=0), "missing", "built for the CPU"),
        (fake_torch(cuda="13.0", nccl=False, devices=2), "missing", "torch without NCCL"),
        (fake_torch(cuda="13.0", nccl=True, devices=0), "missing", "no CUDA device"),
        (fake_torch(cuda="13.0", nccl=True, devices=2), "ok", "2 CUDA devices"),
    ],
)
def test_nccl(torch, state, said):
    finding = doctor._has_nccl(torch)
    assert (finding.state, bool(finding.mend)) == (state, state != "ok")
    assert said in finding.found


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-31
GPU1\tNV18\t X \tPIX\t0-31
GPU2\tSYS\tPIX\t X \t0-31

Legend:
  X    = Self
"""


def test_links_are_read_from_the_topology():
    assert [(f.name, f.state, f.found) for f in doctor.links_in(TOPOLOGY)] == [
        ("link GPU0 to GPU1", "ok", "NV18, NVLink"),
        ("link GPU0 to GPU2", "missing", "SYS, no NVLink"),
        ("link GPU1 to GPU2", "missing", "PIX, no NVLink"),
    ]
    assert doctor.links_in("nothing of the kind") == []


def test_no_compiler_is_said(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    finding = self_tests.compiler()
    assert (finding.state, finding.core) == ("missing", False)
    assert "inner_backend" in finding.mend


def test_it_imports_nothing_heavy_but_torch():
    code = (
        "import sys\n"
        "from dbo_fx.doctor import diagnose\n"
        "assert diagnose().ok\n"
        "heavy = {'transformers', 'plotly', 'depyf', 'vllm', 'deep_ep', 'typer', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "[]\n"
