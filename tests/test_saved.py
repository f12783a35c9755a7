"""Saved programs: written on two ranks, started again in other processes without Dynamo."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dbo_fx
from dbo_fx import backend
from dbo_fx.errors import (
    AgreementError,
    CommunicationError,
    DboError,
    GraphFileError,
    OptionError,
    SoundnessError,
)
from dbo_fx.input_names import InputName, input_names
from dbo_fx.saved import SavedProgram
from rank_pool import RankPool
from small_moe import CachedMoe, H, PlainMoe, arguments, one_rank, rows

SIZES = (6, 4, 9)


def compiled_call(model: nn.Module, args: Any, **options: Any) -> Any:
    """The model's result through a fresh compile."""
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(args[0], 0)
    run = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
    with torch.no_grad():
        return run(*args)


def keep(folder: Path, kind: type[PlainMoe] = PlainMoe, **options: Any) -> PlainMoe:
    """Compile a model of two layers, save the program, return the model."""
    model = kind(2)
    compiled_call(model, arguments(model), **options)
    dbo_fx.save(dbo_fx.compilations()[-1], folder)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.fixture
def alone() -> Iterator[None]:
    """A real group of this process, nothing compiled yet."""
    torch._dynamo.reset()
    backend._COMPILATIONS.clear()
    with one_rank():
        yield


# Two ranks.


def save_on(rank: int, folder: str, kind: type[PlainMoe]) -> list[Tensor]:
    """Save, and return results at some sizes; the caches' contents are results, too."""
    from safetensors.torch import save_file

    model = keep(Path(folder) / str(rank), kind)
    save_file(dict(model.state_dict()), str(Path(folder) / f"weights{rank}.safetensors"))
    (program,) = dbo_fx.compilations()[-1:]
    loaded_names = [n.name for n in program.captured.placeholders]
    found = []
    for size in SIZES:
        args = arguments(model, size)
        by_name = dict(zip(("l_x_", "l_counter_"), args, strict=False))
        for index, cache in enumerate(args[2] if len(args) > 2 else ()):
            by_name[f"l_caches_{index}_"] = cache
        for key, value in model.state_dict().items():
            name, _, layer = key.partition(".")
            text = f"l_self_modules_{name}_parameters_{layer}_"
            by_name[text if layer else f"l_self_parameters_{name}_"] = value
        with torch.no_grad():
            found += program(*(by_name.get(n, size) for n in loaded_names))
        found += args[2] if len(args) > 2 else []
    return found


def load_on(rank: int, folder: str, kind: type[PlainMoe]) -> list[Tensor]:
    """The same results in a process that may not compile."""

    def compile(*_: Any, **__: Any) -> None:
        raise AssertionError("a loaded program compiles nothing")

    torch.compile = compile  # type: ignore[assignment]
    weights = Path(folder) / f"weights{rank}.safetensors"
    program = dbo_fx.load(Path(folder) / str(rank), weights)
    found = []
    for size in SIZES:
        x, *state = arguments(kind(2), size)
        more = dict(zip(("counter", "caches"), state, strict=False))
        found.append(program(x=x, **more))
        found += state[1] if state else []
    import torch._dynamo.utils as dynamo

    assert not dynamo.counters["frames"], "Dynamo saw a frame"
    assert not dynamo.counters["stats"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CachedMoe, PlainMoe])
def test_results_are_the_same_in_another_process(
    ranks: RankPool, kind: type[PlainMoe], tmp_path: Path
) -> None:
    wanted = ranks(save_on, str(tmp_path), kind)
    fresh = RankPool(2)
    try:
        found = fresh(load_on, str(tmp_path), kind)
    finally:
        fresh.close()
    for mine, theirs in zip(wanted, found, strict=True):
        assert len(mine) == len(theirs) > 0
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def save_two_schedules(rank: int, folder: str) -> None:
    for name in ("sequential", "mlp_shared_overlap"):
        keep(Path(folder) / f"{name}{rank}", schedule=name)


def load_two_schedules(rank: int, folder: str) -> str:
    name = "sequential" if rank else "mlp_shared_overlap"
    with pytest.raises(AgreementError) as caught:
        dbo_fx.load(Path(folder) / f"{name}{rank}", PlainMoe(2))
    return str(caught.value)


def test_ranks_that_load_different_programs_are_told(ranks: RankPool, tmp_path: Path) -> None:
    ranks(save_two_schedules, str(tmp_path))
    told = ranks(load_two_schedules, str(tmp_path))
    assert all("saved program, comparison 1" in text for text in told)
    assert "but rank 1 has" in told[0]
    assert "sequential" in told[0]


# What a loaded program is.


def test_it_prints_like_the_original(alone: None, folder: Path) -> None:
    model = keep(folder)
    (original,) = dbo_fx.compilations()
    program = dbo_fx.load(folder, model)
    assert program.program == original.program
    assert str(program.certificate) == str(original.certificate)
    assert str(program.compiled.plan) == str(original.plan)
    assert str(program).startswith(str(original.summary))
    assert repr(program) == f"SavedProgram(x: {original!r})"


def test_weights_are_the_models_own(alone: None, folder: Path) -> None:
    model = keep(folder)
    program = dbo_fx.load(folder, model)
    x = rows(6)
    before = program(x)
    assert isinstance(before, Tensor)
    with torch.no_grad():
        model.head.zero_()
    assert before.any()
    assert not program(x).any()


@pytest.mark.parametrize("how", ["module", "state dict", "mapping"])
def test_weights_come_in_three_forms(alone: None, folder: Path, how: str) -> None:
    model = keep(folder)
    forms = {"module": model, "state dict": model.state_dict(), "mapping": {"self": model}}
    x = rows(8)
    torch.testing.assert_close(dbo_fx.load(folder, forms[how])(x), model(x))


def test_a_saved_program_is_replaced_and_other_folders_are_not(alone: None, folder: Path) -> None:
    keep(folder, schedule="sequential")
    model = keep(folder)
    assert dbo_fx.load(folder, model).program.schedule == "mlp_shared_overlap"
    other = folder.parent / "mine"
    other.mkdir()
    (other / "notes.txt").write_text("keep me")
    with pytest.raises(OptionError, match="holds something that is no saved program"):
        dbo_fx.save(dbo_fx.compilations()[-1], other)
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_files_hold_no_paths_of_this_machine(alone: None, folder: Path) -> None:
    keep(folder)
    for file in folder.iterdir():
        assert str(Path(__file__).parent) not in file.read_text()


# What it refuses: calls.


def cached(folder: Path) -> tuple[SavedProgram, Tensor, Tensor, list[Tensor]]:
    model = keep(folder, CachedMoe)
    return dbo_fx.load(folder, model), *arguments(model)


def test_aliased_caches_are_refused(alone: None, folder: Path) -> None:
    program, x, counter, caches = cached(folder)
    assert program.arguments == ("x", "counter", "caches")
    program(x, counter, caches)
    with pytest.raises(SoundnessError, match="share memory in this call"):
        program(x, counter, [caches[0], caches[0]])


CALLS: list[tuple[Callable[..., Any], type[DboError], str]] = [
    (lambda p, x, n, c: p(x, n), OptionError, "argument 'caches' is missing"),
    (lambda p, x, n, c: p(x, n, c, x=x), OptionError, "argument 'x' is given twice"),
    (lambda p, x, n, c: p(x, n, c, y=x), OptionError, "unknown argument 'y'"),
    (lambda p, x, n, c: p(x, n, c, c), OptionError, "got 4 arguments, want 3"),
    (lambda p, x, n, c: p(x, n, c[:1]), OptionError, "argument 'caches' holds no caches.1"),
    (lambda p, x, n, c: p(x, 2, c), OptionError, "argument counter is a int, want a tensor"),
    (lambda p, x, n, c: p([1, 2], n, c), OptionError, "argument x is a list, want a tensor"),
    (lambda p, x, n, c: p(x.double(), n, c), SoundnessError, "argument x has dtype torch.float64"),
    (lambda p, x, n, c: p(x[:, :4], n, c), SoundnessError, r"argument x has shape \(6, 4\)"),
    (lambda p, x, n, c: p(x.T.contiguous().T, n, c), SoundnessError, "argument x has strides"),
    (lambda p, x, n, c: p(x[:1], n, c), SoundnessError, "is 1, and the program was compiled for 2"),
]


@pytest.mark.parametrize(("call", "kind", "said"), CALLS)
def test_wrong_arguments_are_named(
    alone: None, folder: Path, call: Callable[..., Any], kind: type[DboError], said: str
) -> None:
    program, x, counter, caches = cached(folder)
    with pytest.raises(kind, match=said):
        call(program, x, counter, caches)
    assert counter.item() == 2


class EvenOnly(PlainMoe):
    """Branches on the batch size."""

    def forward(self, x: Tensor) -> Any:
        return self.body(x) if x.shape[0] % 4 == 0 else x


def test_guards_of_the_whole_batch_hold(alone: None, folder: Path) -> None:
    model = EvenOnly()
    compiled_call(model, (rows(8),))
    dbo_fx.save(dbo_fx.compilations()[-1], folder)
    program = dbo_fx.load(folder, model)
    torch.testing.assert_close(program(rows(16)), model(rows(16)))
    with pytest.raises(SoundnessError, match=r"assumption Eq\(.*, 0\) does not hold"):
        program(rows(10))


# What it refuses: files and weights.


def test_a_refused_program_is_not_saved(
    alone: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(folder)
    monkeypatch.setattr(dbo_fx.compilations()[-1], "_refused", "output 0 differs")
    with pytest.raises(SoundnessError, match="not saved, it was refused: output 0 differs"):
        dbo_fx.save(dbo_fx.compilations()[-1], folder)


@pytest.mark.parametrize(
    "name", ["captured.dbograph.json", "program.dbo", "schedule.dbo", "certificate.json"]
)
def test_files_changed_by_hand_are_refused(alone: None, folder: Path, name: str) -> None:
    model = keep(folder)
    file = folder / name
    file.write_text(file.read_text() + "\n")
    with pytest.raises(GraphFileError, match=rf"{name} was changed after it was saved"):
        dbo_fx.load(folder, model)
    file.unlink()
    with pytest.raises(GraphFileError, match=rf"{name} cannot be read"):
        dbo_fx.load(folder, model)


def edit_manifest(folder: Path, **changes: Any) -> None:
    file = folder / "saved.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "dbo_fx program 9"}, "has format 'dbo_fx program 9', this dbo_fx reads"),
        ({"plan": None}, "is damaged: it has no 'plan'"),
        ({"plan": "0" * 16}, "was saved with plan 0000000000000000; this dbo_fx makes"),
        ({"groups": {}}, "is damaged: it has groups none, and the graph communicates over 0"),
        ({"groups": {"0": 2}}, "group '0' has 1 ranks, and the program was compiled for 2"),
    ],
)
def test_damaged_manifests_are_refused(
    alone: None, folder: Path, changes: dict[str, Any], said: str
) -> None:
    model = keep(folder)
    edit_manifest(folder, **changes)
    with pytest.raises(GraphFileError, match=re.escape(said)):
        dbo_fx.load(folder, model)


def test_a_program_of_another_version_is_refused(alone: None, folder: Path) -> None:
    import hashlib

    model = keep(folder)
    text = (folder / "program.dbo").read_text().replace("comm  D_m0.send@0", "comm  D_m1.send@0")
    (folder / "program.dbo").write_text(text)
    files = json.loads((folder / "saved.json").read_text())["files"]
    edit_manifest(folder, files=files | {"program.dbo": hashlib.sha256(text.encode()).hexdigest()})
    with pytest.raises(GraphFileError, match="is not what this dbo_fx makes of the graph") as told:
        dbo_fx.load(folder, model)
    assert "+comm  D_m0.send@0" in str(told.value)


def test_only_compiled_programs_are_saved(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"found str, wanted one of dbo_fx\.compilations\(\)"):
        dbo_fx.save("program", tmp_path)  # type: ignore[arg-type]


def test_a_folder_without_a_program(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match="holds no saved program"):
        dbo_fx.load(tmp_path)


def without(model: nn.Module, name: str) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if k != name}


@pytest.mark.parametrize(
    ("weights", "kind", "said"),
    [
        (lambda m: None, GraphFileError, r"is missing: pass load\(..., weights=model\)"),
        (lambda m: nn.Linear(2, 2), GraphFileError, "the model has none of that name"),
        (lambda m: without(m, "head"), GraphFileError, "weight head .* is missing: it is not"),
        (
            lambda m: m.state_dict() | {"head": torch.zeros(3, H)},
            GraphFileError,
            r"weight head has shape \(3, 8\), and the program was compiled for \(8, 8\)",
        ),
        (
            lambda m: m.state_dict() | {"head": torch.zeros(H, H).double()},
            GraphFileError,
            "weight head has dtype torch.float64",
        ),
        (lambda m: 3, OptionError, "weights is a int; want a module"),
        (lambda m: "weights.bin", OptionError, "must end in .safetensors"),
        (lambda m: "nowhere.safetensors", OptionError, "cannot be read"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    alone: None, folder: Path, weights: Any, kind: type[DboError], said: str
) -> None:
    model = keep(folder)
    with pytest.raises(kind, match=said):
        dbo_fx.load(folder, weights(model))


def test_groups_can_have_other_names(alone: None, folder: Path) -> None:
    import torch.distributed as dist

    model = keep(folder)
    other = dist.new_group([0])
    program = dbo_fx.load(folder, model, groups={"0": other.group_name})
    assert program.compiled.group == other.group_name
    torch.testing.assert_close(program(rows(6)), model(rows(6)))
    with pytest.raises(CommunicationError, match="process group 'nobody' is unknown"):
        dbo_fx.load(folder, model, groups={"0": "nobody"})
    with pytest.raises(OptionError, match="the program has no group '9'"):
        dbo_fx.load(folder, model, groups={"9": "0"})


# Names of inputs.


def test_places_of_inputs() -> None:
    module = "L['fn'].__closure__[0].cell_contents"
    found = input_names(
        [
            ("s0", "L['x'].size()[0]"),
            ("x", "L['x']"),
            ("cache", "L['caches'][1]['k']"),
            ("w", f"{module}._modules['layers']._modules['0']._parameters['w']"),
            ("scale", f"{module}.scale"),
            ("other", "G['model']._buffers['b']"),
        ]
    )
    assert found == [
        None,
        InputName("x", (), False),
        InputName("caches", (1, "k"), False),
        InputName("cell_contents", ("layers", "0", "w"), True),
        InputName("cell_contents", ("scale",), True),
        InputName("model", ("b",), True),
    ]


@pytest.mark.parametrize("source", [None, "___from_numpy(L['x'])", "L['x'].__call__()"])
def test_sources_that_cannot_be_found_again(source: str | None) -> None:
    with pytest.raises(GraphFileError, match=r"input x comes from .* cannot find again"):
        input_names([("x", source)])


def test_two_inputs_of_one_name() -> None:
    with pytest.raises(GraphFileError, match="inputs a and b are both called x"):
        input_names([("a", "L['x']"), ("b", "G['x']")])
