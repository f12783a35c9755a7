"""Progress: counters on CPU and in a fake of a CUDA graph, the watchdog, dumps, and their picture.

The golden dumps `tests/golden/hang/progress_rank*.json` are of a made-up hang on four ranks;
`--update-golden` writes them too.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_fx import CudaGraphs, compilations, schedules
from dbo_fx.backend import compile_captured
from dbo_fx.compiled import CompiledProgram
from dbo_fx.counters import DeviceCounters
from dbo_fx.emit import Emit
from dbo_fx.errors import CommunicationError, OptionError, ProgressError
from dbo_fx.ir import bind, parse_program
from dbo_fx.launch import run_ranks
from dbo_fx.options import Options
from dbo_fx.progress import Place, Progress, parse_progress, read_progress
from dbo_fx.progress_picture import diagnose, picture
from dbo_fx.rank_process import Setup, rank_main, rendezvous
from dbo_fx.tag import tag_of
from dbo_fx.watchdog import Watchdog
from rank_pool import RankPool
from small_moe import (
    CachedMoe,
    PlainMoe,
    Traced,
    TwoLaunches,
    one_rank,
    rows,
    run_passes,
    traced_model,
)

GOLDEN = Path(__file__).parent / "golden"
HANG = GOLDEN / "hang"
LIMIT_S = 120.0


# --- dumps and pictures of made-up ranks ---


def example_order() -> tuple[Place, ...]:
    """The actions of three layers, halves of communication on their streams."""
    bound = bind(schedules.load("mlp_shared_overlap"), 3, 2)
    return tuple(
        Place("comm" if a.bound().split("@")[0].endswith(".send") else "comp", a.bound())
        for a in bound
    )


def standing(rank: int, place: str, *, running: bool = True, **changes: Any) -> Progress:
    """A rank of four on CPU that has finished all before an action."""
    order = example_order()
    at = next(i for i, p in enumerate(order) if p.action == place)
    finished = {s: sum(p.stream == s for p in order[:at]) for s in ("comp", "comm")}
    started = {**finished, order[at].stream: finished[order[at].stream] + running}
    dump = Progress(
        rank=rank,
        ranks=(0, 1, 2, 3),
        program="0123456789abcdef",
        schedule="mlp_shared_overlap",
        device="cpu",
        call=7,
        order=order,
        finished=finished,
        started=started,
        reason="the call did not finish within 30 s",
        since_start_ms=30001.25,
    )
    return replace(dump, **changes)


def done(rank: int, **changes: Any) -> Progress:
    """A rank that has finished a whole call."""
    dump = standing(rank, "A0_m0@0", running=False)
    full = {s.stream: len(s.actions) for s in dump.streams}
    return replace(dump, finished=full, started=full, **changes)


def hang() -> list[Progress]:
    """Ranks 0 and 2 wait for rank 1; rank 3 has not reported."""
    waiting = [standing(rank, "D_m0.recv@2") for rank in (0, 2)]
    return sorted([*waiting, standing(1, "A1_m0@2")], key=lambda d: d.rank)


def found(*dumps: Progress) -> list[str]:
    return diagnose(dumps).lines()


def test_dumps_are_golden(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    for dump in hang():
        path = dump.write(tmp_path)
        golden(f"hang/{path.name}", path.read_text(encoding="utf-8"))
    assert list(tmp_path.glob("*.part")) == []
    assert read_progress([HANG]) == hang()


def test_the_picture_is_golden(golden: Callable[[str, str], None]) -> None:
    golden("show_progress.txt", picture(hang()))


def test_who_waits_for_whom() -> None:
    assert found(*hang()) == [
        "rank 1 is furthest behind: is in A1_m0@2",
        "ranks 0, 2 wait in D_m0.recv@2 for rank 1, which is in A1_m0@2",
        "rank 3 of 4 did not report: it may have died, or hung outside the program. Look at the "
        "output of that rank first",
    ]


def test_a_rank_that_blocks_in_its_send_holds_up_the_others() -> None:
    waits = diagnose([standing(0, "C_m1.recv@0"), standing(1, "C_m1.send@0")]).waits
    assert [str(w) for w in waits] == [
        "rank 0 waits in C_m1.recv@0 for rank 1, which is in C_m1.send@0"
    ]


def test_a_rank_that_has_sent_holds_nobody_up() -> None:
    """Rank 1 stands behind its send: rank 0's message is under way."""
    waits = diagnose([standing(0, "C_m0.recv@0"), standing(1, "MLP_m1@0")]).waits
    assert [str(w) for w in waits] == [
        "rank 0 waits in C_m0.recv@0, which no reported rank holds up"
    ]


def test_a_rank_between_two_calls_holds_up_the_next() -> None:
    assert found(standing(0, "D_m0.recv@0", call=8), *(done(r) for r in (1, 2, 3))) == [
        "ranks 1, 2, 3 are furthest behind: each has not begun call 8",
        "rank 0 waits in D_m0.recv@0 for ranks 1, 2, 3, each of which has not begun call 8",
    ]


def test_all_in_one_communication() -> None:
    (line,) = found(*(standing(r, "D_m1.recv@1") for r in range(4)))
    assert line.startswith("every reported rank is in D_m1.recv@1: the communication itself does")


def test_all_in_one_segment() -> None:
    assert found(*(standing(r, "MLP_m1@1") for r in range(4))) == [
        "every reported rank is in MLP_m1@1"
    ]


def test_all_done() -> None:
    (line,) = found(*map(done, range(4)))
    assert line == "every reported rank has finished call 7: none hangs in here"


def test_other_programs_are_said_first_and_not_compared() -> None:
    dumps = [standing(0, "D_m0.recv@2"), standing(1, "A1_m0@2", program="fedcba9876543210")]
    lines = found(*dumps)
    assert lines[0].startswith(
        "the ranks run different programs (rank 0 0123456789abcdef, rank 1 fedcba9876543210)"
    )
    assert diagnose(dumps).waits == ()
    assert [line.split(" of ")[0] for line in lines[1:]] == ["ranks 2, 3"]


def on_device(rank: int, comp: str, comm: str) -> Progress:
    """A rank whose host has launched everything; its streams stand before these actions."""
    dump = done(rank, device="cuda")
    before = {
        s.stream: s.actions.index(at) for s, at in zip(dump.streams, (comp, comm), strict=True)
    }
    return replace(dump, finished=before)


def test_on_cuda_the_collective_hangs_where_it_was_launched() -> None:
    dumps = [on_device(r, "D_m0.recv@1", "D_m0.send@1") for r in (0, 2, 3)]
    assert found(dumps[0], on_device(1, "A1_m0@1", "D_m0.send@1"), *dumps[1:]) == [
        "rank 1 is furthest behind: is in A1_m0@1",
        "ranks 0, 2, 3 wait in D_m0.send@1 for rank 1, which is in A1_m0@1",
    ]


def test_groups_are_drawn_apart() -> None:
    pair = [replace(standing(r, "D_m0.recv@2"), ranks=(r, r + 2)) for r in (0, 1)]
    text = picture(pair)
    assert "ranks 0, 2\n" in text
    assert "ranks 1, 3\n" in text
    assert text.count("did not report") == 2


def test_one_line_per_rank() -> None:
    first, second, _ = hang()
    assert str(first) == (
        "rank 0, call 7: comp finished A1_m1@2, in D_m0.recv@2; "
        "comm finished D_m0.send@2, next D_m1.send@2"
    )
    assert str(second).startswith("rank 1, call 7: comp finished ")
    assert str(done(1)) == "rank 1, call 7: comp finished all 38; comm finished all 12"
    assert str(replace(done(1), call=0)) == "rank 1: no call has begun"


OTHER_VALUES = (None, -1, 10**30, 10**400, float("inf"), "x", "comp D_m9.recv@0", [], {}, True)


def changes(value: Any, other: object) -> Iterator[Any]:
    """Copies of plain values in which one part is another value, or is missing."""
    if not isinstance(value, dict | list):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        for part in (other, *changes(value[key], other)):
            changed = value.copy()
            changed[key] = part
            yield changed
        rest = value.copy()
        del rest[key]
        yield rest


@pytest.mark.parametrize("other", OTHER_VALUES, ids=lambda v: f"{str(v)[:20]!r}")
def test_whatever_stands_in_a_dump_it_is_read_or_refused(other: object) -> None:
    whole = replace(hang()[0], order=hang()[0].order[:6], finished={"comp": 2, "comm": 0})
    whole = replace(whole, started={"comp": 3, "comm": 1})
    read = 0
    for raw in changes(whole.to_json(), other):
        with suppress(ProgressError):
            assert picture([parse_progress(json.dumps(raw))])
            read += 1
    assert read < 20


def test_a_recv_without_a_send_is_no_dump() -> None:
    place = Place("comp", "D_m0.recv@0")
    alone = replace(hang()[0], order=(place,), finished={"comp": 0}, started={"comp": 1})
    with pytest.raises(ProgressError, match="recv@0 has no send"):
        parse_progress(json.dumps(alone.to_json()))


def test_a_text_that_nests_too_deep_is_no_dump() -> None:
    with pytest.raises(ProgressError, match="is no JSON"):
        parse_progress("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d.update(version=2), "has version 2, this dbo_fx reads 1"),
        (lambda d: d.pop("order"), "is damaged (KeyError: 'order')"),
        (lambda d: d.update(device="tpu"), "device 'tpu'"),
        (lambda d: d.update(world_size=3), "world_size does not fit the other values"),
        (lambda d: d["streams"][0].update(finished=99), "stream comp counts outside 0..38"),
        (lambda d: d["streams"][0].update(last="S_m0@0"), "streams does not fit"),
        (lambda d: d["order"].pop(), "streams does not fit the other values"),
        (lambda d: d["order"].append("x y z"), "is damaged (TypeError"),
        (lambda d: d.update(kind="graph"), "no progress dump"),
    ],
)
def test_damaged_dumps_are_refused(damage: Callable[[Any], object], said: str) -> None:
    raw = hang()[0].to_json()
    damage(raw)
    with pytest.raises(ProgressError) as caught:
        parse_progress(json.dumps(raw), "here.json")
    assert str(caught.value).startswith("here.json ")
    assert said in str(caught.value)


def show(*arguments: str) -> tuple[int, str, str]:
    pytest.importorskip("typer", reason="the cli extra is not installed")
    from typer.testing import CliRunner

    from dbo_fx.cli import app

    result = CliRunner().invoke(app, ["show", "--progress", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_show_takes_files_and_folders() -> None:
    files = [str(HANG / f"progress_rank{r}.json") for r in (2, 0, 1)]
    assert show(*files) == show(str(HANG)) == (0, picture(hang()), "")


def test_show_json() -> None:
    code, text, _ = show(str(HANG), "--json")
    (group,) = json.loads(text)["groups"]
    assert code == 0
    assert [d["rank"] for d in group["dumps"]] == [0, 1, 2]
    assert group["diagnosis"]["missing"] == [3]
    assert group["diagnosis"]["waits"] == [{"action": "D_m0.recv@2", "ranks": [0, 2], "for": [1]}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such.json"], "cannot be read"),
        ([str(GOLDEN)], "is a folder without progress_rank*.json files"),
        ([str(GOLDEN / "show_program.json")], "no progress dump"),
        ([str(GOLDEN / "saved_program.dbo")], "is no JSON"),
        ([str(HANG), str(HANG / "progress_rank1.json")], "is a second dump of rank 1"),
        ([str(HANG), "--layers", "2"], "leave other options than --json out"),
    ],
)
def test_show_refuses_with_one_message(arguments: list[str], said: str) -> None:
    code, out, message = show(*arguments)
    assert (code, out) == (2, "")
    assert said in message
    assert len(message.splitlines()) == 1


def test_show_needs_no_torch() -> None:
    pytest.importorskip("typer", reason="the cli extra is not installed")
    code = (
        "import sys; from dbo_fx.cli import app\n"
        f"app(['show', '--progress', {str(HANG)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=LIMIT_S)


# --- counters ---


def compiled_in_a_group(trace: Traced, options: Options) -> CompiledProgram:
    """Compile; the proof over the ranks needs the group."""
    with one_rank():
        return compile_captured(trace.fresh(), options)


def counted(model: type[PlainMoe], schedule: str) -> tuple[CompiledProgram, Any]:
    trace = traced_model(model, 2, ranks=1)
    return compiled_in_a_group(trace, Options(schedule=schedule, verify="static")), trace


@pytest.mark.parametrize("schedule", ["sequential", "mlp_shared_overlap"])
@pytest.mark.parametrize("model", [PlainMoe, CachedMoe, TwoLaunches])
def test_every_action_is_counted_once(model: type[PlainMoe], schedule: str) -> None:
    compiled, trace = counted(model, schedule)
    counters = compiled.runtime.counters
    assert counters is not None
    actions = [place.action for place in counters.order]
    assert len(set(actions)) == len(actions)
    # A segment is called by its last action: A1 stands for A0 where nothing cuts between them.
    wanted = list(dict.fromkeys(a.bound() for a in compiled.program.actions))
    assert [a for a in wanted if a in actions] == actions
    assert all(a.startswith(("A0", "S", "C_m0.recv", "MLP")) for a in set(wanted) - set(actions))
    with one_rank():
        for call in (1, 2):
            compiled(*trace.args())
            now = compiled.progress()
            assert now.call == call
            assert [s.finished for s in now.streams] == [len(s.actions) for s in now.streams]


def test_the_counters_say_where_a_failed_call_stopped(tmp_path: Path) -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    compiled = compiled_in_a_group(trace, Options(verify="static", dump_dir=tmp_path))
    hold(compiled, "MLP_m1@0", fail)
    with one_rank(), pytest.raises(RuntimeError, match="on purpose") as caught:
        compiled(*trace.args())
    (dump,) = read_progress([tmp_path])
    assert dump.reason == "the call raised RuntimeError"
    assert dump.streams[0].running == "MLP_m1@0"
    assert dump.streams[0].last == "S_m0@0"
    (note,) = caught.value.__notes__
    assert "in MLP_m1@0; comm finished C_m0.send@0, next C_m1.send@0" in note
    assert str(tmp_path / "progress_rank0.json") in note


def test_nothing_is_written_where_nobody_asked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    compiled, trace = counted(PlainMoe, "sequential")
    hold(compiled, "MLP_m1@0", fail)
    with one_rank(), pytest.raises(RuntimeError) as caught:
        compiled(*trace.args())
    assert list(tmp_path.iterdir()) == []
    assert not hasattr(caught.value, "__notes__")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    trace = traced_model(PlainMoe, 1, ranks=1)
    compiled = compiled_in_a_group(trace, Options(verify="static", dump_dir=blocked))
    hold(compiled, "MLP_m1@0", fail)
    with one_rank(), pytest.raises(RuntimeError, match="on purpose") as caught:
        compiled(*trace.args())
    assert f"no dump, {blocked} cannot be written" in caught.value.__notes__[0]


def test_without_counters_there_is_no_progress() -> None:
    trace = traced_model(PlainMoe, 1, ranks=1)
    compiled = compiled_in_a_group(trace, Options(verify="static", progress=False))
    assert compiled.runtime.counters is None
    with one_rank():
        compiled(*trace.args())
        with pytest.raises(OptionError, match="Compile with options="):
            compiled.progress()
        with pytest.raises(OptionError, match="counts no progress"), compiled.watch(1.0):
            raise AssertionError("the body ran unwatched")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"progress": 1}, "option progress=1 is not allowed: want True, False or None"),
        ({"hang_timeout_s": 0}, "option hang_timeout_s=0 is not allowed"),
        ({"hang_timeout_s": True}, "option hang_timeout_s=True is not allowed"),
        ({"hang_timeout_s": 5, "progress": False}, "Leave progress out"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Options.parse(given)


def test_when_the_counters_are_on() -> None:
    assert Options().counts_progress is None
    assert Options(progress=False).counts_progress is False
    assert Options(hang_timeout_s=5).counts_progress is True
    on_cpu = run_passes(traced_model(ranks=1).fresh(), "verify")
    for progress, is_on in ((None, True), (True, True), (False, False)):
        module = Emit(progress).apply(on_cpu)[0].module
        assert module is not None
        assert (module.runtime.counters is not None) == is_on


class Tape(TorchDispatchMode):
    """Keeps ops instead of running them, as the capture of a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args)
        self.ops.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


DEVICE_ORDER = (
    Place("comp", "A1_m0@0"),
    Place("comm", "D_m0.send@0"),
    Place("comp", "D_m0.recv@0"),
)


def run_call(counters: DeviceCounters) -> None:
    counters.begin()
    for stream, index in (("comp", 1), ("comm", 1), ("comp", 2)):
        counters.started[stream] = index
        counters.finish(index, stream)


def test_device_counters_move_when_the_device_does() -> None:
    counters = DeviceCounters(DEVICE_ORDER, torch.device("cpu"))
    assert counters.read().finished == {"comp": 0, "comm": 0}
    run_call(counters)
    assert counters.read().finished == {"comp": 2, "comm": 1}
    with Tape() as tape:
        run_call(counters)
    assert len(tape.ops) == 5  # Two for the call, one for each action.
    assert (counters.read().call, counters.read().finished) == (1, {"comp": 2, "comm": 1})
    for call in (2, 3):
        seen = []
        for op in tape.ops:
            op()
            seen.append((counters.read().call, *counters.read().finished.values()))
        assert seen[1:] == [(call, 0, 0), (call, 1, 0), (call, 1, 1), (call, 2, 1)]


def test_a_call_is_over_when_the_device_says_so() -> None:
    counters = DeviceCounters(DEVICE_ORDER, torch.device("cpu"))
    run_call(counters)
    with Tape() as tape:
        assert not counters.end(2)
    assert not counters.ended(2)
    assert counters.end(1)
    assert counters.ended(1)
    for op in tape.ops:
        op()
    assert counters.ended(2)
    counters.end(1)  # A replay of an earlier call does not take that back.
    assert counters.ended(2)


def test_a_device_call_that_stops_before_its_last_launch_is_half_way() -> None:
    counters = DeviceCounters(DEVICE_ORDER, torch.device("cpu"))
    assert not counters.is_half_way
    run_call(counters)
    assert not counters.is_half_way
    counters.begin()
    counters.started["comp"] = 1
    assert counters.is_half_way


def test_device_counters_may_be_made_in_inference_mode() -> None:
    counters = DeviceCounters(DEVICE_ORDER, torch.device("cpu"))
    with torch.inference_mode():
        run_call(counters)
    run_call(counters)
    assert counters.read().call == 2


# --- the watchdog ---


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    dog = Watchdog()
    yield dog
    dog.stop()


def never() -> bool:
    return False


def test_a_late_watch_reports_once(watchdog: Watchdog) -> None:
    calls: list[int] = []
    over = threading.Event()
    watchdog.arm(0.01, never, lambda: calls.append(1))
    watchdog.arm(0.02, never, over.set)
    assert over.wait(LIMIT_S)
    assert calls == [1]


def test_an_earlier_deadline_wakes_a_thread_that_sleeps_for_longer(watchdog: Watchdog) -> None:
    over = threading.Event()
    watchdog.arm(1e6, never, lambda: None)
    watchdog.arm(0.01, never, over.set)
    assert over.wait(LIMIT_S)


def test_done_and_cancelled_watches_report_nothing(watchdog: Watchdog) -> None:
    calls: list[str] = []
    over = threading.Event()
    watchdog.arm(0.01, lambda: True, lambda: calls.append("done"))
    watchdog.cancel(watchdog.arm(0.01, never, lambda: calls.append("cancelled")))
    watchdog.arm(0.03, never, over.set)
    assert over.wait(LIMIT_S)
    assert calls == []


def test_a_report_that_fails_is_logged_and_the_thread_lives(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    watchdog.arm(0.01, never, fail)
    watchdog.arm(0.02, never, over.set)
    assert over.wait(LIMIT_S)
    assert "the report on a hang failed" in caplog.text


def test_prune_keeps_what_is_not_done(watchdog: Watchdog) -> None:
    watchdog.arm(1e6, lambda: True, fail)
    late = watchdog.arm(1e6, never, fail)
    watchdog.prune()
    assert watchdog._watches == [late]


def test_the_interpreter_ends_while_a_watch_is_armed() -> None:
    code = "from dbo_fx.watchdog import WATCHDOG as w; w.arm(1e6, lambda: False, lambda: None)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stderr) == (0, b"")


# --- real hangs ---


def fail() -> None:
    raise RuntimeError("on purpose")


def hold(compiled: CompiledProgram, action: str, do: Callable[[], Any]) -> None:
    """Call `do` inside the segment of an action, in every call from now on."""
    calls = [n for n in compiled.module.graph.nodes if n.op == "call_module"]
    names = [tag_of(n).action.bound() for n in calls]  # type: ignore[union-attr]
    at = names.index(action)
    target = calls[at].target
    same = [n for n in calls if n.target == target].index(calls[at])
    total = sum(n.target == target for n in calls)
    seen = iter(range(10**9))

    def hook(*_: Any) -> None:
        if next(seen) % total == same:
            do()

    compiled.module.get_submodule(target).register_forward_pre_hook(hook)


class Tell(logging.Handler):
    """Sets a key in a store when a hang is reported."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__()
        self.store, self.key = store, key

    def emit(self, record: logging.LogRecord) -> None:
        if "did not finish within" in record.getMessage():
            self.store.set(self.key, "")


def ready(rank: int, **options: Any) -> tuple[Callable[[], Any], CompiledProgram]:
    """A program that has run once, and a call of it."""
    torch._dynamo.reset()
    given = {"verify": "static", **options}
    model = torch.compile(PlainMoe(2), backend="dbo_fx", fullgraph=True, options=given)
    x = rows(6, seed=rank)
    torch._dynamo.mark_dynamic(x, 0)

    def call() -> Any:
        with torch.no_grad():
            return model(x)

    call()
    return call, compilations()[-1]


def run_hang(rank: int, folder: str, port: int) -> tuple[bool, str]:
    """Rank 1 stays in an expert segment until both ranks have reported the hang."""
    call, program = ready(rank, dump_dir=folder, hang_timeout_s=3.0)
    expected = call()
    # A client that waits holds its lock: the watchdog's thread needs one of its own.
    store, teller = rendezvous(port), Tell(rendezvous(port), f"rank {rank}")
    logging.getLogger("dbo_fx").addHandler(teller)
    if rank == 1:
        hold(program, "MLP_m1@1", lambda: store.wait(["rank 0", "rank 1"]))
    try:
        return torch.equal(call(), expected), str(program.progress())
    finally:
        logging.getLogger("dbo_fx").removeHandler(teller)


def test_a_real_hang_names_the_rank_and_the_action(ranks: RankPool, tmp_path: Path) -> None:
    store = rendezvous(0)
    results = ranks(run_hang, str(tmp_path), store.port, timeout_s=LIMIT_S)
    # Both went on when rank 1 was let go.
    for rank, (is_equal, line) in enumerate(results):
        assert is_equal
        assert line.startswith(f"rank {rank}, call 3: comp finished all ")
    dumps = read_progress([tmp_path])
    assert [d.reason for d in dumps] == ["the call did not finish within 3 s"] * 2
    assert found(*dumps) == [
        "rank 1 is furthest behind: is in MLP_m1@1",
        "rank 0 waits in C_m1.recv@1 for rank 1, which is in MLP_m1@1",
    ]
    assert diagnose(dumps).programs == {dumps[0].program: (0, 1)}


def run_death(rank: int, folder: str) -> tuple[list[str], str]:
    """Rank 1 is killed inside its first segment, with nothing under way."""
    call, program = ready(rank, dump_dir=folder)
    if rank == 1:
        hold(program, "A1_m0@0", lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        call()
    except CommunicationError as error:
        return list(error.__notes__), str(program.progress())
    raise AssertionError("the call went through without rank 1")


@pytest.mark.slow
def test_a_killed_rank_is_missing_in_the_picture(tmp_path: Path) -> None:
    """Ranks of its own: `Ranks` ends the survivor at once, which then may not have written."""
    store, context = rendezvous(0), mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        setup = Setup(rank, 2, "gloo", store.port, LIMIT_S, 1)
        process = context.Process(target=rank_main, args=(setup, theirs), daemon=True)
        process.start()
        theirs.close()
        mine.send_bytes(pickle.dumps((run_death, (str(tmp_path),))))
        pipes.append(mine)
        processes.append(process)
    try:
        assert pipes[0].poll(LIMIT_S)
        report = pickle.loads(pipes[0].recv_bytes())
        assert isinstance(report, bytes), report
        (note,), line = pickle.loads(report)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert processes[1].exitcode == -signal.SIGKILL
    assert line in note
    (dump,) = read_progress([tmp_path])
    assert dump.reason == "the call raised CommunicationError"
    assert found(dump) == [
        "rank 0 waits in D_m0.recv@0, which no reported rank holds up",
        "rank 1 of 2 did not report: it may have died, or hung outside the program. Look at the "
        "output of that rank first",
    ]


def test_watch_reports_a_body_that_takes_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled, trace = counted(PlainMoe, "sequential")
    reported = threading.Event()
    handler = Tell(_Event(reported), "")
    logging.getLogger("dbo_fx").addHandler(handler)
    try:
        with one_rank():
            compiled(*trace.args())
            with compiled.watch(LIMIT_S, tmp_path):
                pass
            assert list(tmp_path.iterdir()) == []
            with compiled.watch(0.01, tmp_path):
                assert reported.wait(LIMIT_S)
    finally:
        logging.getLogger("dbo_fx").removeHandler(handler)
    (dump,) = read_progress([tmp_path])
    assert dump.reason == "what was watched did not finish within 0.01 s"
    assert str(tmp_path / "progress_rank0.json") in caplog.text


class _Event:
    """A store with one key."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def set(self, *_: Any) -> None:
        self.event.set()


# --- on CUDA ---


def cuda_model(rank: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch._dynamo.reset()
    given = {"verify": "static", **options}
    model = PlainMoe(2).to("cuda")
    x = rows(6, seed=rank).to("cuda")
    torch._dynamo.mark_dynamic(x, 0)
    return torch.compile(model, backend="dbo_fx", fullgraph=True, options=given), x


def capture(compiled: Any, x: torch.Tensor) -> CudaGraphs:
    """One graph of the whole call."""
    graphs = CudaGraphs(compiled)
    graphs.capture([x.shape[0]], x)
    return graphs


def run_replays(rank: int) -> tuple[list[int], list[bool], bool]:
    """Calls counted after the capture and after each replay, and whether all is finished."""
    compiled, x = cuda_model(rank, hang_timeout_s=LIMIT_S)
    with torch.no_grad():
        replay = capture(compiled, x)
        counts, finished = [], []
        for seed in range(3):
            replay(rows(6, seed=seed).to("cuda"))
            torch.cuda.synchronize()
            now = compilations()[-1].progress()
            counts.append(now.call)
            finished.append(all(s.finished == len(s.actions) for s in now.streams))
        compiled(x)
        torch.cuda.synchronize()
    return counts, finished, compilations()[-1].runtime.counters is not None


@pytest.mark.gpu
def test_the_counters_move_in_a_replay() -> None:
    ((counts, finished, is_on),) = run_ranks(run_replays, 1, backend="nccl")
    assert is_on
    assert all(finished)
    assert [n - counts[0] for n in counts] == [0, 1, 2]


def run_lonely_replay(rank: int, folder: str, port: int) -> None:
    """Rank 1 does not replay until rank 0 has reported that it waits."""
    compiled, x = cuda_model(rank, progress=True)
    with torch.no_grad():
        replay = capture(compiled, x)
        replay(x)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        program = compilations()[-1]
        if rank == 0:
            logging.getLogger("dbo_fx").addHandler(Tell(rendezvous(port), "rank 0"))
            with program.watch(3.0, folder):
                replay(x)
                torch.cuda.synchronize()
            return
        rendezvous(port).wait(["rank 0"])
        program.progress().write(folder)
        replay(x)
        torch.cuda.synchronize()


@pytest.mark.multi_gpu
def test_a_replay_that_hangs_on_two_gpus(tmp_path: Path) -> None:
    store = rendezvous(0)
    run_ranks(run_lonely_replay, 2, (str(tmp_path), store.port), backend="nccl")
    dumps = read_progress([tmp_path])
    call = dumps[0].call
    assert found(*dumps) == [
        f"rank 1 is furthest behind: has not begun call {call}",
        f"rank 0 waits in D_m0.send@0 for rank 1, which has not begun call {call}",
    ]


def test_the_example_has_the_actions_of_a_program() -> None:
    program = parse_program((GOLDEN / "saved_program.dbo").read_text(encoding="utf-8"))
    layer = [p.action for p in example_order() if p.action.endswith("@0")]
    assert sorted(layer) == sorted(a.bound() for a in program.actions if a.layer == 0)
