"""Logs, artifacts for tlparse, and depyf's decompiled code: what a compile leaves when asked."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dbo_fx import decompiled, torch_trace

LIMIT_S = 240
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import dbo_fx
from dbo_fx.models import MoeConfig, MoeDecoder

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = MoeDecoder(MoeConfig(layers=2, shared_hidden=64))
tokens = torch.randint(256, (6, 16))
torch._dynamo.mark_dynamic(tokens, 0)
options = {"dump_dir": sys.argv[1]}
split = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
with torch.no_grad():
    assert torch.allclose(split(tokens), model(tokens), atol=1e-4)
print(dbo_fx.compilations()[-1].program)
"""
PASSES = (
    "normalize", "regions", "soundness", "microbatch", "halves", "schedule", "streams", "lower",
    "verify", "memory", "emit",
)  # fmt: skip
# What the dump test below was last seen to pass with. Where depyf is known to fail, the test says
# so by name instead.
DEPYF_WORKS = {("3.11", "2.13"), ("3.12", "2.11")}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    """The dump folder, the trace folder, stdout and stderr of a compile with everything on."""
    base = tmp_path_factory.mktemp("traced")
    dump, trace = base / "dump", base / "trace"
    env = os.environ | {"TORCH_LOGS": "+dbo_fx", "TORCH_TRACE": str(trace)}
    command = [sys.executable, "-c", SCRIPT, str(dump)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return dump, trace, done.stdout, done.stderr


@pytest.mark.slow
def test_torch_logs_shows_every_pass(compiled):
    messages = compiled[3]
    missing = [name for name in PASSES if f"] {name} " not in messages]
    assert missing == []
    assert "pipeline.py" in messages


def artifacts(folder: Path) -> dict[str, str]:
    """Payload of every artifact of ours, by name; a payload's lines begin with a tab."""
    (file,) = folder.iterdir()
    found: dict[str, str] = {}
    name = None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            if name is not None:
                found[name] += f"{line[1:]}\n"
            continue
        entry = json.loads(line[line.index("{") :])
        name = entry.get("artifact", {}).get("name", "")
        if not name.startswith("dbo_fx_"):
            name = None
        else:
            assert name not in found
            assert entry["has_payload"]
            assert entry["frame_id"] == 0  # tlparse shows it with the frame that it belongs to.
            found[name] = ""
    return found


def test_tlparse_gets_graph_program_certificate_and_overlap(compiled):
    _, trace, output, _ = compiled
    found = artifacts(trace)
    assert set(found) == {
        "dbo_fx_captured_graph",
        "dbo_fx_program",
        "dbo_fx_certificate",
        "dbo_fx_overlap",
    }
    assert found["dbo_fx_program"].strip() == output.strip()
    assert "torch.ops.aten.linear.default(" in found["dbo_fx_captured_graph"]
    certificate = json.loads(found["dbo_fx_certificate"])
    assert certificate["hazards"]["communications"] == 8
    assert json.loads(found["dbo_fx_overlap"]) == certificate["overlap"]


def test_nothing_is_made_where_no_trace_is_written():
    """The payloads of a 61-layer model are megabytes."""
    code = (
        "import dbo_fx.torch_trace as t\n"
        "def no(): raise AssertionError('made')\n"
        "t._artifact('dbo_fx_first', 'string', lambda: '')\n"
        "t._artifact('dbo_fx_x', 'string', no)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCH_TRACE"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=LIMIT_S)


def test_depyf_decompiles_what_dynamo_made(compiled):
    pytest.importorskip("depyf", reason="the debug extra is not installed")
    versions = (
        ".".join(platform.python_version_tuple()[:2]),
        ".".join(torch.__version__.split(".")[:2]),
    )
    dump, _, _, messages = compiled
    path = dump / "rank0" / "0" / decompiled.FILE
    if versions not in DEPYF_WORKS and not path.exists():
        assert "This is a failure of depyf" in messages
        pytest.skip(f"depyf fails on Python {versions[0]} with torch {versions[1]}")
    text = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    assert text.startswith("# MoeDecoder.forward (")
    assert "__compiled_fn_" in text


def forward(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def compile_with(act, fail: bool = False) -> None:
    def backend(gm, example_inputs):
        assert torch_trace.when_compiled(act)
        if fail:
            raise ValueError("no")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(forward, backend=backend)(torch.zeros(3))


def test_bytecode_is_seen_once():
    seen = []
    compile_with(lambda old, new: seen.append((old.co_name, new.co_name)))
    assert seen == [("forward", "forward")]
    torch._dynamo.reset()
    torch.compile(lambda x: x.cos(), backend="eager")(torch.zeros(3))
    assert len(seen) == 1


def test_a_failed_compile_does_not_see_the_next_ones_bytecode():
    seen = []
    with pytest.raises(Exception, match="no"):
        compile_with(lambda old, new: seen.append("failed"), fail=True)
    compile_with(lambda old, new: seen.append("next"))
    assert seen == ["next"]


def test_without_dynamo_there_is_no_bytecode(tmp_path):
    assert not torch_trace.when_compiled(lambda old, new: None)
    assert not decompiled.write_decompiled(tmp_path)


def test_a_failure_of_depyf_is_a_warning_that_names_it(tmp_path, monkeypatch, caplog):
    pytest.importorskip("depyf", reason="the debug extra is not installed")

    def broken(code):
        raise RuntimeError("unknown instruction")

    monkeypatch.setattr("depyf.decompile", broken)
    with caplog.at_level(logging.WARNING, logger="dbo_fx"):
        compile_with(lambda old, new: decompiled._write(tmp_path / "x.py", old, new))
    assert list(tmp_path.iterdir()) == []
    (message,) = [r.getMessage() for r in caplog.records if r.name == "dbo_fx"]
    assert message.startswith("depyf ")
    assert "RuntimeError: unknown instruction" in message
    assert "This is a failure of depyf" in message


def test_without_depyf_nothing_is_written_and_nothing_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(decompiled, "is_there", lambda: False)
    assert not decompiled.write_decompiled(tmp_path)
    assert not caplog.records
