"""What the commands take, how they tell it apart, and wrong input: one message and exit 2."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")
import typer
from typer.testing import CliRunner, Result

import dbo_fx.models
from dbo_fx import schedules
from dbo_fx.cli import app
from dbo_fx.commands.frame import complete_schedule, complete_subject
from dbo_fx.errors import OptionError
from dbo_fx.graph_file import save_graph
from dbo_fx.subject_graphs import captured_subject
from dbo_fx.subjects import Request, kind_of
from small_moe import fake_ranks

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = str(GOLDEN / "saved_program.dbo")
LIMIT_S = 120
MODELS = """
import torch
from dbo_fx.models import MoeConfig, MoeDecoder

def build():
    return MoeDecoder(MoeConfig(layers=2, shared_hidden=64)), (torch.randint(256, (6, 16)),)

def raises():
    raise KeyError("gone")

def leaves():
    raise SystemExit(3)

def no_tuple():
    return build()[0]

def wrong_args():
    return build()[0], 3

class Fails(torch.nn.Module):
    def forward(self, x):
        return x @ torch.zeros(3, 3)

def fails_in_forward():
    return Fails(), (torch.zeros(4, 8),)

def plain():
    return torch.nn.Linear(8, 8), (torch.zeros(4, 8),)

number = 3
"""
CONFIG = Path(dbo_fx.models.__file__).parent / "deepseek_v3_demo.json"


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_for_inputs.py").write_text(MODELS)
    (tmp_path / "broken_for_inputs.py").write_text("1 / 0\n")
    (tmp_path / "syntax_for_inputs.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("models_for_inputs", "broken_for_inputs", "syntax_for_inputs"):
        sys.modules.pop(name, None)
    return "models_for_inputs"


@pytest.fixture
def graph(models: str, tmp_path: Path) -> str:
    """A model captured on four ranks, saved."""
    path = tmp_path / "model.dbograph.json"
    with captured_subject(Request(f"{models}:build", ranks=4)) as captured:
        save_graph(captured, path)
    return str(path)


# --- telling apart ---


def test_kinds(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert kind_of("sequential") == "text"
    assert kind_of("a/b.dbo") == "text"
    assert kind_of("a/b.dbograph.json") == "graph"
    assert kind_of("package.module:build") == "model"
    assert kind_of(str(tmp_path)) == kind_of(str(tmp_path / "config.json")) == "config"


@pytest.mark.parametrize("command", ["show", "explain", "check"])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing", None, "no schedule is called"),
        ("gone.dbo", None, "cannot be read"),
        ("gone.dbograph.json", None, "cannot be read"),
        ("gone.json", None, "does not exist"),
        ("folder.dbo/", None, "has neither config.json nor captured.dbograph.json"),
        ("folder", b"", "has neither config.json nor captured.dbograph.json"),
        ("binary.dbo", b"\xff\xfe\x00", "not UTF-8 text"),
        ("binary.dbograph.json", b"\xff\xfe\x00", "cannot be read"),
        ("binary.json", b"\xff\xfe\x00", "not UTF-8 text"),
        ("words.json", b"hello", "is no JSON"),
        ("deep.json", b"[" * 100_000, "is no JSON"),
        ("list.json", b"[]", 'has no "model_type"'),
        ("other.json", b'{"a": 1}', 'has no "model_type"'),
        ("empty.dbo", b"", "empty.dbo"),
        ("empty.dbograph.json", b"", "is no JSON"),
        ("other.dbograph.json", b'{"a": 1}', "is no graph file"),
        ("program.txt", b"program 1", "neither a program or schedule"),
        ("long.dbo", b"program 1\n" + b"x" * 100_000, "wanted a line like 'schedule NAME'"),
    ],
)
def test_files_that_cannot_be_used(command, name, content, said, tmp_path: Path):
    path = tmp_path / name
    if name.startswith("folder"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    message = refused(command, str(path) + ("/" if name.endswith("/") else ""))
    assert said in message
    assert len(message.splitlines()) <= 3
    assert len(message) < 3000


@pytest.mark.parametrize("command", ["show", "explain", "check"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("models_for_inputs:other", "has no attribute 'other'"),
        ("models_for_inputs:number", "is a int, wanted a callable"),
        ("models_for_inputs:", "is not module:callable"),
        (":build", "is not module:callable"),
        ("models_for_inputs:no_tuple", "wanted (model, args)"),
        ("models_for_inputs:wrong_args", "args must be a tuple"),
        ("models_for_inputs:raises", "fails: KeyError: 'gone'"),
        ("models_for_inputs:leaves", "SystemExit"),
        ("broken_for_inputs:build", "fails: ZeroDivisionError"),
        ("syntax_for_inputs:build", "fails: SyntaxError"),
        ("models_for_inputs:fails_in_forward", "fails: "),
    ],
)
def test_models_that_cannot_be_used(command, target, said, models):
    assert said in refused(command, target)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "sequential", "--dim", "0"], "is no model; leave --dim out"),
        (["show", "sequential", "--dim", "0"], "is no model; leave --dim out"),
        (["explain", "sequential", "--ranks", "2"], "leave --ranks out"),
        (["explain", "sequential", "--layer", "2"], "no MoE layer 2; they count from 0 to 1"),
        (["show", "sequential", "--transport", "nccl"], "leave --transport out"),
        (["show", "sequential", "sequential"], "found 2 names, wanted one"),
        (["show", ""], "the name of what to look at is empty"),
        (["show", "sequential", "--html", "a", "--trace", "./a"], "give each a file of its own"),
        (["show", "sequential", "--times", "t.json"], "t.json: cannot be read (No such file"),
        (["check", "a:b", "--layers", "2"], "is a model; leave --layers out"),
        (["check", "sequential", "--ranks", "0"], "'--ranks'"),
        (["explain", "a:b", "--schedule", "none"], "none"),
        (["explain", "a:b", "--transport", "pigeons"], "pigeons"),
        (["doctor", "--no-such-option"], "--no-such-option"),
        (["nonsense"], "nonsense"),
    ],
)
def test_options_that_do_not_fit(arguments, said):
    assert said in refused(*arguments)


def test_a_dim_that_no_tensor_has(models):
    said = refused("explain", f"{models}:build", "--dim", "2")
    assert said == (
        f"dbo-fx explain: --dim 2: no tensor argument of {models}:build has it; the dims of the "
        "one with the most are 0 to 1\n"
    )


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "windows.dbo"
    path.write_bytes(b"\xef\xbb\xbf" + Path(PROGRAM).read_bytes().replace(b"\n", b"\r\n"))
    assert run("diff", PROGRAM, str(path)).exit_code == 0


@pytest.mark.parametrize("command", ["show", "explain", "check"])
def test_a_full_disk_is_not_our_mistake(command, monkeypatch):
    def full(*_: object, err: bool = False, **__: object) -> None:
        if not err:
            raise OSError(errno.ENOSPC, "No space left on device")
        said.append(str(_[0]))

    said: list[str] = []
    monkeypatch.setattr(typer, "echo", full)
    assert run(command, PROGRAM).exit_code == 2
    assert said == [f"dbo-fx {command}: the output cannot be written: No space left on device"]


def test_no_second_process_group(models):
    with fake_ranks():
        assert "one is initialised already" in refused("check", f"{models}:build")


def test_a_model_that_is_refused_exits_1(models):
    done = run("explain", f"{models}:plain")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"dbo-fx explain: {models}:plain has no MoE layer")


def test_the_unexpected_is_one_message_and_a_traceback_when_asked_for(monkeypatch):
    monkeypatch.setattr("dbo_fx.subjects.kind_of", lambda what: 1 / 0)
    message = refused("check", "sequential")
    assert message.startswith("dbo-fx check: unexpected ZeroDivisionError: division by zero.")
    assert len(message.splitlines()) == 1
    monkeypatch.setenv("DBO_FX_TRACEBACK", "1")
    done = run("check", "sequential")
    assert "Traceback" in done.stderr


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("check", str(tmp_path))
    assert done.exit_code in (1, 2)
    assert "pip install 'dbo-fx[hf]'" in done.stdout + done.stderr


# --- graphs and configs ---


def test_a_saved_graph_says_how_many_ranks_it_needs(graph):
    done = run("check", graph, "--json")
    assert done.exit_code == 0, done.stderr
    (split, *_) = json.loads(done.stdout)["certificate"]["ranks"]["variants"]
    assert split["ranks"] == 4
    assert "was captured on 4 ranks, not on 2" in refused("check", graph, "--ranks", "2")
    assert "is a saved graph; leave --layers out" in refused("show", graph, "--layers", "2")


def test_a_saved_graph_is_shown_and_explained_like_its_model(graph, models):
    target = f"{models}:build"
    assert run("show", graph).stdout == run("show", target, "--ranks", "4").stdout
    one, other = (json.loads(run("explain", w, "--json").stdout) for w in (graph, target))
    assert [x["phases"] for x in one["layers"]] == [x["phases"] for x in other["layers"]]


def test_a_graph_of_another_group_loads(graph):
    path = Path(graph)
    text = path.read_text(encoding="utf-8")
    assert '{"str": "0"}' in text
    path.write_text(text.replace('{"str": "0"}', '{"str": "expert group"}'), encoding="utf-8")
    done = run("check", graph)
    assert done.exit_code == 0, done.stderr
    assert "over expert group" in done.stdout


def test_a_dump_folder_is_taken_as_it_was_compiled(graph, tmp_path):
    folder = tmp_path / "dumped"
    folder.mkdir()
    (folder / "captured.dbograph.json").write_bytes(Path(graph).read_bytes())
    program = run("show", graph, "--schedule", "sequential", "--transport", "deepep_ll").stdout
    (folder / "program.dbo").write_text(program)
    assert kind_of(str(folder)) == "graph"
    assert run("show", str(folder)).stdout == program
    assert "nccl" in run("show", str(folder), "--transport", "nccl").stdout
    (folder / "program.dbo").write_text(program.replace("schedule sequential", "schedule mine"))
    assert "give its file with --schedule" in refused("explain", str(folder))
    (folder / "schedule.dbo").write_text(schedules.read("mlp_shared_overlap"))
    assert "mlp_shared_overlap" in run("show", str(folder)).stdout


def config(tmp_path: Path, **changes: object) -> str:
    source = json.loads((Path(__file__).parent.parent / CONFIG).read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(source | changes))
    return str(tmp_path)


@pytest.mark.slow
def test_a_config_is_built_without_weights_and_cut(tmp_path):
    pytest.importorskip("transformers", minversion="5.17")
    done = run("explain", config(tmp_path), "--ranks", "4", "--layers", "3", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [x["module"] for x in found["layers"][:2]] == ["model.layers.1", "model.layers.2"]
    assert len(found["layers"]) == 3  # The first layer is dense; the tail is the third.
    assert "4 ranks" in found["certificate"]
    assert "capturable" in found["certificate"]  # Nothing says otherwise: it goes over NCCL.


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, ["--layers", "99"], "layers, fewer than 99"),
        ({}, ["--layers", "1"], "have no experts; keep at least 2"),
        ({}, ["--dim", "0"], "leave --dim out"),
        ({}, ["--ranks", "7"], "7 ranks cannot share"),
        ({"model_type": "no_such_model"}, [], "transformers cannot build a model of"),
        ({"hidden_size": "wide"}, [], "transformers cannot build a model of"),
    ],
)
def test_configs_that_cannot_be_used(changes, arguments, said, tmp_path):
    pytest.importorskip("transformers", minversion="5.17")
    assert said in refused("explain", config(tmp_path, **changes), *arguments)


def test_a_config_without_experts_is_refused(tmp_path):
    pytest.importorskip("transformers", minversion="5.17")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, '
        '"intermediate_size": 32, "num_attention_heads": 2}'
    )
    done = run("check", str(tmp_path))
    assert done.exit_code == 1
    assert "no module with three-dimensional" in done.stdout


# --- help and completion ---


@pytest.mark.parametrize("command", ["show", "explain", "check", "diff", "doctor", "demo"])
def test_help_has_an_example(command):
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"Example: dbo-fx {command}" in " ".join(done.stdout.split())
    assert "--json" in done.stdout


def test_completion_is_on():
    text = run("--help").stdout
    assert "--install-completion" in text
    assert "--show-completion" in text


def test_completion_knows_schedules_files_and_folders(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.dbo", "mine.dbograph.json", "mine.txt", ".mine.dbo", "sub/mine.dbo"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    shipped = ["mlp_shared_overlap", "mlp_shared_overlap_3"]
    assert complete_subject("m") == [*shipped, "mine.dbo", "mine.dbograph.json"]
    assert complete_subject("se") == ["sequential"]
    assert complete_subject("su") == ["sub/"]
    assert complete_subject("sub/") == ["sub/mine.dbo"]
    assert complete_subject(f"{tmp_path}/mi")[0] == f"{tmp_path}/mine.dbo"
    assert complete_subject("nowhere/") == []
    assert complete_schedule("m") == [*shipped, "mine.dbo"]


def test_the_shell_gets_completions():
    env = os.environ | {
        "_DBO_FX_COMPLETE": "complete_bash",
        "COMP_WORDS": "dbo-fx show mlp_",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "dbo_fx.cli"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout.split() == ["mlp_shared_overlap", "mlp_shared_overlap_3"]


def in_terminal(*arguments: str) -> str:
    """What the command writes to a terminal of 100 columns."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dbo_fx.cli", *arguments]
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {
        "TERM": "xterm-256color",
        "COLUMNS": "100",
    }
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # The other end is closed.
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode()


def test_tables_are_drawn_in_a_terminal_and_plain_in_a_pipe():
    arguments = ("explain", "mlp_shared_overlap", "--layer", "1", "--transport", "deepep_ll")
    drawn, piped = in_terminal(*arguments), run(*arguments).stdout
    assert "\u2500" in drawn  # A line of a table.
    assert "\u2500" not in piped
    assert "\x1b" not in piped
    for text in (drawn, piped):
        assert "A0_m1@1 A1_m1@1" in text
        assert "C_m1@1: not S_m0@1: schedule (stands before MLP_m1@1)" in text


@pytest.mark.slow
def test_progress_is_for_terminals(models, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from dbo_fx.cli import main; main()"
    command = [sys.executable, "-c", code, "show", f"{models}:build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.startswith("# digest ")
    assert "tracing" not in done.stderr


def test_requests_name_all_options_that_do_not_fit():
    with pytest.raises(OptionError, match="x is odd; leave --ranks and --dim out"):
        Request("x", ranks=2, dim=0).refuse("odd", "ranks", "layers", "dim")
