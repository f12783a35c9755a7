"""`dbo_fx.testing`: what each assertion accepts, and what it says when it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_fx import schedules
from dbo_fx.certificates.overlap import Beside
from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError, ScheduleError
from dbo_fx.ir import Program
from dbo_fx.ir_bind import bound_program
from dbo_fx.testing import (
    CompiledPrograms,
    assert_certified,
    assert_not_overlaps,
    assert_overlaps,
    assert_peak_below,
    assert_refused,
    assert_same_schedule,
    assert_unchanged,
    capture,
    compile_model,
)
from program_edits import unsunk

SHIPPED = "mlp_shared_overlap"
FREED = Path(__file__).parent.parent / "examples" / "freed_too_early.dbo"


def bound(
    name: str = SHIPPED, layers: int = 3, transport: str = "nccl", *, sinks: bool = True
) -> Program:
    carrier = contract(transport) if sinks else unsunk(transport)
    return bound_program(schedules.load(name), layers, carrier, 2)


def refusal(check: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    return f"{caught.value}\n"


@pytest.mark.parametrize(
    "subject",
    [
        bound(),
        str(bound()),
        SHIPPED,
        schedules.load(SHIPPED),
        Path(schedules.__file__).parent / f"{SHIPPED}.dbo",
        SimpleNamespace(program=bound(), certificate=None),
    ],
    ids=["program", "text", "name", "schedule", "path", "state"],
)
def test_whatever_has_a_program_is_a_subject(subject: Any) -> None:
    assert_overlaps(subject, comm="D m0", compute="A1 m1", layer=1)
    assert_not_overlaps(subject, comm="D_m0", compute="MLP_m1", layer=1)
    assert_same_schedule(subject, SHIPPED)
    assert_certified(subject, captured=True)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (3, "found a int; wanted a compiled program"),
        (SimpleNamespace(program=None), "no program yet: run the passes up to Streams"),
    ],
)
def test_what_has_no_program_is_refused(subject: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        assert_certified(subject)


def test_unreadable_texts_are_refused() -> None:
    with pytest.raises(ScheduleError, match="cannot be read"):
        assert_certified(Path("nowhere.dbo"))


@pytest.mark.parametrize(
    ("comm", "compute"),
    [
        ("D m0", "A0 m1"),
        ("D_m0@2", "A1_m1"),
        ("C m1 @0", "A0_m0@1"),
        ("C m1", "A0 m0 @+1"),
        ("C m1", "TAIL m0"),
        ("C m0", "S m0"),
    ],
)
def test_names_and_layers(comm: str, compute: str) -> None:
    assert_overlaps(bound(), comm=comm, compute=compute)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"comm": "D m", "compute": "A1 m1"}, "'D m' names no action"),
        ({"comm": "X m0", "compute": "A1 m1"}, "the phases are A0 A1 D MLP C S TAIL"),
        ({"comm": "A0 m0", "compute": "A1 m1"}, "wanted a dispatch or combine"),
        ({"comm": "D m0 @+1", "compute": "A1 m1"}, "wanted a dispatch or combine"),
        ({"comm": "D m0", "compute": "C m1"}, "is a communication"),
        ({"comm": "D_m0@1", "compute": "A1 m1", "layer": 2}, "layer=2 does not fit"),
        ({"comm": "D m0", "compute": "A1 m1", "layer": -1}, "layer=-1: layers count from 0"),
    ],
)
def test_wrong_names_are_no_failures_but_errors(names: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("+", r"\+")):
        assert_overlaps(bound(), **names)


def test_wrong_ranks_and_what_has_no_memory_are_errors() -> None:
    with pytest.raises(OptionError, match="ranks=0: wanted a number from 1 up"):
        assert_certified(SHIPPED, ranks=0)
    with pytest.raises(OptionError, match="str is no compiled program"):
        assert_peak_below(SHIPPED, ratio=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", [assert_overlaps, assert_not_overlaps])
def test_what_the_program_does_not_have_fails_either_way(check: Callable[..., None]) -> None:
    absent = refusal(check, bound(), comm="D m0", compute="A1 m1", layer=9)
    assert absent == (
        "program mlp_shared_overlap has no D m0 and A1 m1 at layer 9: it has 3 layers, 2 "
        "microbatches, D_m0@0 D_m1@0 C_m0@0 C_m1@0 ...\n"
    )
    assert "has no D m5 and A1 m1 in one layer" in refusal(
        check, bound(), comm="D m5", compute="A1 m1"
    )


def test_failures_show_lanes_and_reasons(golden: Callable[[str, str], None]) -> None:
    asked = [
        (assert_overlaps, "D m1", "S m0", 1),
        (assert_overlaps, "D m0", "S m1 @-1", 1),
        (assert_overlaps, "D m0", "MLP m0", None),
        (assert_not_overlaps, "C m1", "A1 m0 @+1", 1),
    ]
    messages = [
        refusal(check, bound(sinks=False), comm=comm, compute=compute, layer=layer)
        for check, comm, compute, layer in asked
    ]
    golden("testing_overlaps.txt", "\n".join(messages))


def test_without_a_layer_every_layer_counts() -> None:
    certificate = assert_certified(bound())
    spoilt = [
        replace(o, beside=()) if o.communication.bound() == "D_m0@2" else o
        for o in certificate.overlap.overlaps
    ]
    report = replace(certificate.overlap, overlaps=tuple(spoilt))
    subject = SimpleNamespace(program=bound(), certificate=replace(certificate, overlap=report))
    assert_overlaps(subject, comm="D m0", compute="A1 m1", layer=1)
    found = refusal(assert_overlaps, subject, comm="D m0", compute="A1 m1")
    assert found.startswith("A1_m1@2 does not run beside D_m0@2")


def test_a_part_is_neither_all_nor_nothing() -> None:
    certificate = assert_certified(bound())
    partly = [
        replace(o, beside=tuple(Beside(b.action, 1, 3) for b in o.beside))
        for o in certificate.overlap.overlaps
    ]
    report = replace(certificate.overlap, overlaps=tuple(partly))
    subject = SimpleNamespace(program=bound(), certificate=replace(certificate, overlap=report))
    names = {"comm": "D m0", "compute": "A1 m1", "layer": 1}
    assert_overlaps(subject, partly=True, **names)
    assert "runs only partly (1 of 3 operations) beside D_m0@1" in refusal(
        assert_overlaps, subject, **names
    )
    assert "A1_m1@1 runs beside D_m0@1" in refusal(assert_not_overlaps, subject, **names)


def test_event_numbers_do_not_matter_but_events_do() -> None:
    text = str(bound())
    renumbered = text.replace(" e1\n", " e101\n").replace(" e0\n", " e1\n")
    assert_same_schedule(bound(), renumbered)
    lines = text.splitlines(keepends=True)
    at = lines.index("comp  A1_m1@0\n")
    lines[at - 1 : at + 2] = [lines[at - 1], lines[at + 1], lines[at]]
    earlier_wait = "".join(lines)
    assert_same_schedule(bound(), earlier_wait, events=False)
    refusal(assert_same_schedule, bound(), earlier_wait)


def test_a_schedule_follows_the_programs_layers_and_transport() -> None:
    assert_same_schedule(bound(layers=4, transport="deepep_ll"), SHIPPED)
    assert_same_schedule(SHIPPED, SHIPPED)
    refusal(assert_same_schedule, bound(layers=4), bound(layers=3))
    refusal(assert_same_schedule, bound(), bound(transport="deepep_ll"))


def test_another_order_says_what_moved(golden: Callable[[str, str], None]) -> None:
    text = "order D_1.send A0_0 A1_0 D_1.recv D_0.send S_1 MLP_1 D_0.recv C_1.send MLP_0 C_1.recv"
    text = f"schedule 1\nname mine\nlead 1\n{text} C_0.send S_0 A0_1 A1_1 C_0.recv\n"
    golden("testing_same_schedule.txt", refusal(assert_same_schedule, SHIPPED, text))


def test_certified_and_refused() -> None:
    assert assert_certified(SHIPPED, ranks=4).ranks.variants[0].ranks == 4
    found = assert_refused(FREED, rule="lifetime")
    assert found is not None
    assert found.rule == "lifetime"
    assert_refused(FREED.read_text(encoding="utf-8"))
    shown = refusal(assert_certified, FREED)
    assert "freed_too_early.dbo, line 12: x_m0@0 may be freed" in shown
    assert "<-- here" in shown
    assert "is refused: lifetime, wanted event" in refusal(assert_refused, FREED, rule="event")
    certified = refusal(assert_refused, SHIPPED, rule="event")
    assert certified.startswith("mlp_shared_overlap is certified, wanted a refusal for event\n")


def test_gloo_blocks_the_host_and_is_not_captured() -> None:
    assert_certified(bound(transport="gloo"))
    assert "certified, but not for CUDA graphs" in refusal(
        assert_certified, bound(transport="gloo"), captured=True
    )


def test_compiled_models(fake_group: str) -> None:
    import torch

    from small_moe import H, PlainMoe

    since = CompiledPrograms()
    with pytest.raises(IndexError, match="0 programs were compiled since the test began"):
        since[-1]
    compiled = compile_model(PlainMoe(2), torch.zeros(6, H))
    assert list(since) == [compiled]
    assert since[:1] == [compiled]
    assert_same_schedule(compiled, SHIPPED, events=False)
    assert_overlaps(compiled, comm="D m0", compute="A1 m1", partly=True)
    assert_certified(compiled, ranks=2)
    assert "certified for 2 ranks, wanted 8" in refusal(assert_certified, compiled, ranks=8)
    assert_peak_below(compiled, ratio=10, peak_bytes=1_000_000, tokens=8)
    assert "alive then" in refusal(assert_peak_below, compiled, ratio=0.1)
    assert "bytes, wanted below 1" in refusal(assert_peak_below, compiled, peak_bytes=1)
    with pytest.raises(OptionError, match="give ratio=, peak_bytes=, or both"):
        assert_peak_below(compiled)


def test_unchanged_graphs(fake_group: str) -> None:
    import torch

    from small_moe import H, PlainMoe

    before, after = (capture(PlainMoe(), torch.zeros(6, H)) for _ in range(2))
    assert_unchanged(before, after)
    gate = next(n for n in after.graph.nodes if n.target is torch.ops.aten.softmax.int)
    gate.replace_all_uses_with(gate.args[0])
    after.graph.erase_node(gate)
    assert "aten::softmax.int" in refusal(assert_unchanged, before, after)


def test_texts_are_tested_without_torch() -> None:
    code = (
        "import sys\n"
        "from dbo_fx.testing import assert_certified, assert_overlaps, assert_same_schedule\n"
        f"assert_certified({SHIPPED!r})\n"
        f"assert_overlaps({SHIPPED!r}, comm='D m0', compute='A1 m1', layer=3)\n"
        f"assert_same_schedule({SHIPPED!r}, {SHIPPED!r})\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
