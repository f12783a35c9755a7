"""Captured graphs as files: what a graph is after a round trip, and which files are refused."""

from __future__ import annotations

import json
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

import dbo_fx
from dbo_fx.backend import compile_captured
from dbo_fx.capture import CapturedGraph, module_path, source_of, value_of, where
from dbo_fx.errors import DboError, GraphFileError, OptionError
from dbo_fx.graph_codec import encode, target_of, target_text
from dbo_fx.graph_facts import is_graph_file, read_graph_facts, references
from dbo_fx.graph_file import graph_constants, graph_text
from dbo_fx.graph_places import short_path
from dbo_fx.models.moe import MoeConfig, MoeDecoder
from dbo_fx.options import Options
from dbo_fx.passes.lower import structure
from dbo_fx.size_text import parse_size, size_text
from dbo_fx.symbols import SIZE_FUNCTIONS, expression, same_storage_key
from dbo_fx.tag import tag_of
from graphs import captured, hidden
from small_moe import CachedMoe, H, PlainMoe, traced_model

pytestmark = pytest.mark.usefixtures("fake_group")
STATIC = Options(verify="static")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.dbograph.json"


def again(graph: CapturedGraph, file: Path) -> CapturedGraph:
    return dbo_fx.load_graph(dbo_fx.save_graph(graph, file))


def decoder(layers: int) -> CapturedGraph:
    model = MoeDecoder(MoeConfig(hidden=16, expert_hidden=8, dense_hidden=16, layers=layers))
    return captured(model, torch.zeros(4, 3, dtype=torch.long))


def deepseek() -> CapturedGraph:
    pytest.importorskip("transformers", minversion="5.17")
    from dbo_fx.integrations.transformers import expert_parallel
    from test_transformers import build, forward

    model = expert_parallel(build("DeepseekV3"))
    return captured(lambda x: forward(model, x), torch.zeros(4, 3, dtype=torch.long))


MODELS: dict[str, Callable[[], CapturedGraph]] = {
    "plain": lambda: traced_model(PlainMoe, 2).fresh(),
    "cached": lambda: traced_model(CachedMoe, 2).fresh(),
    "decoder": lambda: decoder(2),
    "sixteen layers": lambda: decoder(16),
    "deepseek": deepseek,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "sixteen layers" else ()) for n in MODELS],
)
def test_a_loaded_graph_becomes_the_same_program(name: str, file: Path) -> None:
    original = MODELS[name]()
    text = graph_text(original)
    loaded = again(original, file)
    assert graph_text(loaded) == text
    assert str(loaded) == str(original)
    assert structure(loaded.graph) == structure(original.graph)
    wanted, found = (compile_captured(g, STATIC) for g in (original, loaded))
    assert str(found.program) == str(wanted.program)
    assert found.plan == wanted.plan
    assert found.certificate.to_json() == wanted.certificate.to_json()
    assert found.written == wanted.written
    assert [r.text for r in found.reports] == [r.text for r in wanted.reports]


def test_a_compiled_programs_graph_can_be_saved_with_its_phases(file: Path) -> None:
    compiled = compile_captured(traced_model(CachedMoe, 2).fresh(), STATIC)
    loaded = again(compiled.captured, file)
    tags = [tag_of(n) for n in compiled.captured.graph.nodes]
    assert [tag_of(n) for n in loaded.graph.nodes] == tags
    assert any(tag is not None and tag.phase is not None for tag in tags)
    assert compile_captured(loaded, STATIC).plan == compiled.plan


# What is kept.


def test_views_share_storage_and_others_do_not(file: Path) -> None:
    def model(x: Tensor, cache: Tensor) -> Any:
        a, b = cache.unbind(0)
        a.add_(1)
        return x.view(-1), b.view(torch.int32), x + 1

    x = hidden(4, H)
    torch._dynamo.mark_dynamic(x, 0)
    original = captured(model, x, torch.zeros(2, 3), mark=None)
    loaded = again(original, file)

    def sharing(graph: CapturedGraph) -> list[Any]:
        number: dict[int, int] = {}
        values = torch.utils._pytree.tree_leaves([value_of(n) for n in graph.graph.nodes])
        tensors = [v for v in values if isinstance(v, Tensor)]
        return [
            (
                number.setdefault(same_storage_key(t), len(number)),
                str(t.storage_offset()),
                str(t.untyped_storage().nbytes()),
                t.dtype,
            )
            for t in tensors
        ]

    assert sharing(loaded) == sharing(original)
    assert len({entry[0] for entry in sharing(loaded)}) < len(sharing(loaded))


def test_ranges_guards_and_hints_are_kept(file: Path) -> None:
    def model(x: Tensor, other: Tensor) -> Tensor:
        return x.sin() if x.shape[0] % 2 == 0 and 3 < x.shape[0] < 100 else x

    x = hidden(6, H)
    torch._dynamo.mark_dynamic(x, 0)
    original = captured(model, x, hidden(5, H), mark=None)
    loaded = again(original, file)
    assert loaded.rules == original.rules
    assert [loaded.rules.broken_by(s) is None for s in (2, 4, 5, 98, 102)] == [0, 1, 0, 1, 0]
    size = value_of(loaded.placeholders[0])
    assert size.node.hint == 6
    assert expression(size) == original.symbol
    assert loaded.fake_mode.shape_env is not original.fake_mode.shape_env
    assert value_of(loaded.placeholders[1]).fake_mode is loaded.fake_mode


def test_loading_adds_no_guard(file: Path) -> None:
    loaded = again(traced_model(CachedMoe, 2).fresh(), file)
    environment = loaded.fake_mode.shape_env
    assert environment is not None
    assert not environment.guards
    assert not environment.replacements


def test_constants_are_in_the_file(file: Path) -> None:
    def model(x: Tensor) -> Tensor:
        scales = torch.tensor([1.0, float("inf"), -0.0, 2.5] * 2)
        return x * scales + torch.tensor([True, False] * 4)

    original = captured(model, hidden(4, H))
    loaded = again(original, file)
    names = [n.target for n in original.graph.nodes if n.op == "get_attr"]
    assert names
    for name in names:
        assert torch.equal(getattr(loaded.module, name), getattr(original.module, name))
        assert torch.equal(graph_constants(file)[name], getattr(original.module, name))
    x = torch.rand(4, H)
    args = [x if n.name == "l_x_" else 4 for n in loaded.placeholders]
    torch.testing.assert_close(loaded.module(*args), original.module(*args))


def test_places_in_the_model_are_kept_without_this_machines_paths(file: Path) -> None:
    original = decoder(2)
    loaded = again(original, file)
    nodes = list(zip(original.graph.nodes, loaded.graph.nodes, strict=True))
    assert [module_path(n) for _, n in nodes] == [module_path(n) for n, _ in nodes]
    assert "layers.1.mlp.gate" in [module_path(n) for _, n in nodes]
    assert [source_of(n) for _, n in nodes] == [source_of(n) for n, _ in nodes]
    softmax = next(n for _, n in nodes if n.name.startswith("softmax"))
    assert re.search(r'at File "dbo_fx/models/moe.py", line \d+, in _route', where(softmax))
    text = file.read_text()
    assert str(Path(dbo_fx.__file__).parent.parent) not in text
    assert not re.search(r"0x[0-9a-f]{6}", text)


def test_short_paths(tmp_path: Path) -> None:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    assert short_path(str(package / "model.py")) == "package/inner/model.py"
    assert short_path(str(tmp_path / "model.py")) == "model.py"
    assert short_path("package/model.py") == "package/model.py"


def test_one_node_a_line(file: Path) -> None:
    graph = traced_model(PlainMoe, 2).fresh()
    dbo_fx.save_graph(graph, file)
    lines = [line for line in file.read_text().splitlines() if line.startswith('  {"name": ')]
    assert len(lines) == len(graph.graph.nodes)
    assert json.loads(lines[0].rstrip(",")) == read_graph_facts(file)["nodes"][0]


def test_an_unrelated_node_changes_no_other_line() -> None:
    def lines(model: Callable[..., Any]) -> set[str]:
        text = graph_text(captured(model, hidden(4, H)))
        return {re.sub(r', "at": "[^"]*"', "", line) for line in text.splitlines()}

    before = lines(lambda x: (x.sin(), x.exp()))
    after = lines(lambda x: (x.sin(), x.exp(), x.cos()))
    assert [line for line in after - before if "cos" not in line] == []


# Devices.


@pytest.mark.parametrize("device", [None, "meta", "cuda"])
def test_tokens_can_lie_elsewhere(file: Path, device: str | None) -> None:
    dbo_fx.save_graph(traced_model(CachedMoe, 2).fresh(), file)
    loaded = dbo_fx.load_graph(file, device=device)
    values = [value_of(n) for n in loaded.graph.nodes]
    assert {v.device.type for v in values if isinstance(v, Tensor)} == {device or "cpu"}
    arange = next(n for n in loaded.graph.nodes if n.name == "arange")
    assert arange.kwargs["device"] == torch.device(device or "cpu")


def test_graphs_of_cuda_tensors_load_without_a_gpu(tmp_path: Path) -> None:
    first, second = (tmp_path / f"{name}.dbograph.json" for name in "ab")
    dbo_fx.save_graph(traced_model(CachedMoe, 2).fresh(), first)
    dbo_fx.save_graph(dbo_fx.load_graph(first, device="cuda:0"), second)
    assert '"device": "cuda:0"' in second.read_text()
    value = value_of(dbo_fx.load_graph(second).placeholders[1])
    assert value.device == torch.device("cuda:0")
    assert graph_text(dbo_fx.load_graph(second, device="cpu")) == first.read_text()


# Without torch, and without the ops.


def test_facts_are_read_without_torch(file: Path) -> None:
    dbo_fx.save_graph(traced_model(PlainMoe, 2).fresh(), file)
    code = (
        "import sys\nfrom dbo_fx.graph_facts import read_graph_facts\n"
        "print(len(read_graph_facts(sys.argv[1])['nodes']), 'torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == [str(len(read_graph_facts(file)["nodes"])), "False"]


def test_an_op_that_is_not_registered_is_named(file: Path) -> None:
    dbo_fx.save_graph(captured(torch.sin, hidden(4, H)), file)
    file.write_text(file.read_text().replace("aten::sin.default", "my_ops::sin.default"))
    told = r"node sin calls my_ops::sin.default, and op my_ops::sin is not registered .* Import the"
    with pytest.raises(GraphFileError, match=told):
        dbo_fx.load_graph(file)
    assert any(n["target"] == "my_ops::sin.default" for n in read_graph_facts(file)["nodes"])


def test_names_of_graph_files() -> None:
    assert is_graph_file("x/model.dbograph.json")
    assert not is_graph_file("x/model.json")


def test_nodes_in_arguments() -> None:
    value = ["%a", {"tuple": ["%b", 3]}, {"str": "%c"}, {"dict": [[{"str": "k"}, "%d"]]}, 2.0]
    assert list(references(value)) == ["a", "b", "d"]


# Refusals.


def test_another_suffix_and_unwritable_places(tmp_path: Path) -> None:
    graph = captured(torch.sin, hidden(4, H))
    with pytest.raises(OptionError, match=r"must end in \.dbograph\.json"):
        dbo_fx.save_graph(graph, tmp_path / "model.json")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be written"):
        dbo_fx.save_graph(graph, tmp_path / "file" / "x.dbograph.json")


DAMAGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda f: f.pop("format"), 'is no graph file: it has no "format"'),
    (lambda f: f.update(format="dbo_fx graph 2"), "has format 'dbo_fx graph 2', this dbo_fx reads"),
    (lambda f: f.update(nodes=[]), "is damaged: it has no nodes"),
    (lambda f: f["nodes"][2].pop("target"), "node 3 has no 'target'"),
    (lambda f: f["nodes"].pop(1), "which no node before it defines"),
    (lambda f: f["nodes"][1].update(name="s77"), "is called s77 like an earlier one"),
    (lambda f: f["nodes"][1]["val"].update(tensor="complex7"), "is no value of a graph file"),
    (lambda f: f["nodes"][1]["val"].update(shape=["x + 1"]), "'x' is no part of a size"),
    (lambda f: f["nodes"][1]["val"].pop("bytes"), "is damaged (KeyError: 'bytes')"),
    (lambda f: f.update(symbol="s0"), "is damaged (KeyError: 's0')"),
    (lambda f: f.pop("token_inputs"), "is damaged (KeyError: 'token_inputs')"),
    (lambda f: f["nodes"][2].update(target="os.system"), "is no op and no function of sizes"),
    (lambda f: f["nodes"][2].update(target="torch.load"), "is no op and no function of sizes"),
    (lambda f: f["nodes"][2].update(op="call_method"), "node 3 has op 'call_method', wanted one"),
    (lambda f: f["nodes"][2].update(module="m\nexit()"), "comes from a place of several lines"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damaged_files_are_refused(
    file: Path, damage: Callable[[dict[str, Any]], Any], said: str
) -> None:
    graph = captured(torch.sin, hidden(4, H))
    facts = json.loads(graph_text(graph).replace(str(graph.symbol), "s77"))
    damage(facts)
    file.write_text(json.dumps(facts))
    with pytest.raises(GraphFileError, match=re.escape(said)):
        dbo_fx.load_graph(file)


CODE = "__import__('pathlib').Path('ran').touch()"
CARRIERS: list[Callable[[dict[str, Any]], Any]] = [
    lambda f: f["nodes"][1].update(target=f"x={CODE}"),
    lambda f: f["nodes"][2]["kwargs"].update({f"a={CODE}, b": 1}),
    lambda f: f["nodes"][2].update(op="get_attr", target=f"x; {CODE}", args=[]),
    lambda f: f["nodes"][-1].update(target=f"output; {CODE}"),
    lambda f: f["symbols"].append([CODE, "positive", 2, None, 6]),
    lambda f: f["guards"].append(CODE),
    lambda f: f["nodes"][1]["val"].update(shape=[CODE]),
]


@pytest.mark.parametrize("carry", CARRIERS)
def test_files_cannot_bring_code(
    file: Path,
    carry: Callable[[dict[str, Any]], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = captured(torch.sin, hidden(4, H))
    facts = json.loads(graph_text(graph))
    carry(facts)
    file.write_text(json.dumps(facts))
    with pytest.raises(GraphFileError, match=r"is no name|is no part of a size"):
        dbo_fx.load_graph(file)
    assert not Path("ran").exists()


def test_files_that_are_no_json(file: Path, tmp_path: Path) -> None:
    file.write_text("[")
    with pytest.raises(GraphFileError, match="is no JSON"):
        dbo_fx.load_graph(file)
    with pytest.raises(GraphFileError, match="cannot be read"):
        dbo_fx.load_graph(tmp_path / "nowhere.dbograph.json")


def test_arguments_that_no_file_can_hold() -> None:
    with pytest.raises(GraphFileError, match=r"x has a object .* which a graph file cannot hold"):
        encode([object()], "x")
    with pytest.raises(GraphFileError, match=r"x calls .* which has no name"):
        target_text(lambda x: x, "x")


def test_a_sparse_tensor_is_refused(file: Path) -> None:
    graph = captured(torch.sin, hidden(4, H))
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    node.meta["val"] = torch.zeros(2, 2).to_sparse()
    with pytest.raises(GraphFileError, match=r"is a torch.sparse_coo tensor"):
        dbo_fx.save_graph(graph, file)
    assert not file.exists()


def test_a_constant_that_is_no_tensor_is_refused(file: Path) -> None:
    graph = captured(lambda x: x * torch.tensor([1.0] * H), hidden(4, H))
    (constant,) = (n for n in graph.graph.nodes if n.op == "get_attr")
    delattr(graph.module, str(constant.target))
    setattr(graph.module, str(constant.target), 3.0)
    with pytest.raises(DboError, match=r"is a .*; graph files hold tensors only"):
        dbo_fx.save_graph(graph, file)


# Values.


@pytest.mark.parametrize("target", [operator.mul, torch.sym_max, torch.ops.aten.topk.default])
def test_targets(target: Any) -> None:
    assert target_of(target_text(target, "x"), "x") is target


s, t = sympy.symbols("s77 t", integer=True, positive=True)
F = SIZE_FUNCTIONS
SIZES = [
    (2 * s * t + 1, "2*s77*t + 1"),
    (F["FloorDiv"](s, 2), "(s77//2)"),
    (F["CleanDiv"](s, 2), "CleanDiv(s77, 2)"),
    (F["ModularIndexing"](s, 2, t), "ModularIndexing(s77, 2, t)"),
    (F["PythonMod"](s - 9, 2), "PythonMod(s77 - 9, 2)"),
    (sympy.Eq(F["Mod"](s, 2), 0), "Eq(Mod(s77, 2), 0)"),
    (sympy.Ne(s, 3 * t), "Ne(s77, 3*t)"),
    (sympy.And(s < 10, t >= 2), "(t >= 2) & (s77 < 10)"),
    (sympy.Not(sympy.Or(sympy.Eq(s, 4), t > s)), None),
    (sympy.Max(s, t, 3), "Max(3, s77, t)"),
    (s**2, "s77**2"),
    (sympy.Rational(1, 2) * s, "s77/2"),
    (-s, "-s77"),
    (sympy.true, "True"),
]


@pytest.mark.parametrize(("expr", "text"), SIZES)
def test_sizes_as_text(expr: sympy.Basic, text: str | None) -> None:
    found = size_text(expr)
    assert text is None or found == text
    assert parse_size(found, {"s77": s, "t": t}) == expr


@pytest.mark.parametrize(
    "text", ["__import__('os')", "s77.name", "(lambda: 1)()", "s77 +", "open(s77)", "u0", "'a'"]
)
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(GraphFileError):
        parse_size(text, {"s77": s})


def test_an_unknown_function_of_sizes_is_named() -> None:
    with pytest.raises(GraphFileError, match=r"the size .* cannot be saved"):
        size_text(sympy.Function("mystery")(s))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    dbo_fx.backend._COMPILATIONS.clear()
