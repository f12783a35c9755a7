"""What one rank of `overlap.py` does: compile every schedule, capture it, replay it, compare."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from overlap_model import Inputs, build
from overlap_points import Point
from threaded import Threaded
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

import dbo_fx
from dbo_fx.backend import compile_captured
from dbo_fx.capture import CapturedGraph, from_dynamo
from dbo_fx.compiled import CompiledProgram
from dbo_fx.ir import parse_program
from dbo_fx.launch import Ranks

ROUNDS = 11
SUSTAINED = 5
# The device rests before a step, so that it stays below its power limit and keeps its clock.
REST_S = 0.03
LAUNCH_CYCLES = 2_000_000  # About 1 ms: longer than the launch of a graph.
EAGER_STEPS = 7
CHECKS = 3
REPEATS = 8  # Of a serial run, which must give the same bits each time.
# Name in the results -> schedule and microbatches.
SCHEDULES: dict[str, tuple[str, int]] = {
    "unsplit": ("sequential", 1),
    "single_batch_overlap": ("single_batch_overlap", 1),
    "single_batch_overlap_dispatch": ("single_batch_overlap_dispatch", 1),
    "sequential": ("sequential", 2),
    "mlp_shared_overlap": ("mlp_shared_overlap", 2),
    "vllm_high_throughput": ("vllm_high_throughput", 2),
    "sequential_3": ("sequential", 3),
    "mlp_shared_overlap_3": ("mlp_shared_overlap_3", 3),
}
# What must equal what, bit for bit: the same segments on the same microbatches.
EQUAL = {
    "single_batch_overlap": "unsplit",
    "single_batch_overlap_dispatch": "unsplit",
    "mlp_shared_overlap": "sequential",
    "vllm_high_throughput": "sequential",
    "mlp_shared_overlap_3": "sequential_3",
    "threaded": "sequential",
}


@dataclass(slots=True)
class Candidate:
    """One way to run a step, eager or captured.

    Attributes:
        step: Runs it eagerly on the point's inputs; returns logits.
        graph: Its CUDA graph, None on CPU.
        output: What the graph writes.
    """

    step: Callable[[], Tensor]
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None

    def run(self) -> Tensor:
        """One step, by replay if there is a graph."""
        if self.graph is None:
            return self.step()
        self.graph.replay()
        assert self.output is not None
        return self.output


class Recorded(Exception):
    """What Dynamo gives a backend, and then the backend's function.

    Attributes:
        captured: The captured graph.
        args: Its arguments.
    """

    def __init__(self, captured: CapturedGraph, args: tuple[Any, ...]) -> None:
        """Hold both."""
        super().__init__()
        self.captured, self.args = captured, args


def _recorder(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that runs nothing."""
    captured = from_dynamo(gm)

    def run(*args: Any) -> Any:
        raise Recorded(captured, args)

    return run


@dataclass(slots=True)
class Traced:
    """A family's model, which Dynamo sees once for all schedules and transports.

    Attributes:
        model: What `build` returned.
        call: Raises `Recorded`.
        programs: What was compiled, by captured graph, transport, SMs and schedule.
    """

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    programs: dict[tuple[Any, ...], CompiledProgram] = field(default_factory=dict)

    def record(self, inputs: Inputs) -> Recorded:
        """The captured graph for a point's inputs, and the arguments that they are."""
        inputs.reset()
        try:
            self.call(inputs.ids)
        except Recorded as recorded:
            return recorded
        raise AssertionError("the model ran without the recorder")

    def program(self, captured: CapturedGraph, point: Point, name: str) -> CompiledProgram:
        """Compile one schedule, or find it."""
        options = _options(point, name)
        key = id(captured), name, point.transport, point.comm_sms, point.carveout
        if key not in self.programs:
            self.programs[key] = compile_captured(captured, dbo_fx.Options.parse(options))
        return self.programs[key]


_TRACED: dict[Point, Traced] = {}
_REFUSALS = (dbo_fx.DboError, BackendCompilerFailed, torch.OutOfMemoryError)


def prepare_group(rank: int, points: Sequence[Point], world: int) -> None:
    """Trace and compile points that share a model; called on every rank.

    Args:
        rank: This process's rank.
        points: Points of one group.
        world: Ranks that the experts are shared among.
    """
    point = points[0]
    if point.link == "host" and dist.get_backend() != "fake":
        _imitate_peers(world)
    device = _device(point, rank)
    dtype = torch.float32 if point.link == "cpu" else torch.bfloat16
    torch._dynamo.config.recompile_limit = 64  # Every sequence length is one.
    if point.family not in _TRACED:
        model = build(point, device, dtype)
        call = torch.compile(model, backend=_recorder, fullgraph=True)
        _TRACED[point.family] = Traced(model, call)
    traced = _TRACED[point.family]
    with torch.no_grad():
        for p in points:
            with suppress(*_REFUSALS):
                recorded = traced.record(Inputs(p, traced.model, device, rank))
                for name in SCHEDULES:
                    with suppress(*_REFUSALS):
                        traced.program(recorded.captured, p, name)(*recorded.args)


def measure_group(rank: int, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Measure points that `prepare_group` compiled; called on every rank.

    Args:
        rank: This process's rank.
        points: Points of one group.
    """
    device = _device(points[0], rank)
    found = []
    with torch.no_grad():
        for p in points:
            try:
                found.append(_measure(p, _TRACED[p.family], device, rank))
            except _REFUSALS as error:
                found.append({"key": p.key, "point": p.to_json(), "refused": str(error)[:500]})
    return found


def _device(point: Point, rank: int) -> torch.device:
    return torch.device("cpu") if point.link == "cpu" else torch.device("cuda", rank)


def _imitate_peers(world: int) -> None:
    """Replace the default group by one that pretends to have R ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def _options(point: Point, name: str) -> dict[str, Any]:
    schedule, microbatches = SCHEDULES[name]
    options: dict[str, Any] = {
        "schedule": schedule,
        "num_microbatches": microbatches,
        "transport": point.transport,
        "verify": "static",
        "progress": False,
    }
    if point.comm_sms is not None:
        options["comm_sms"] = point.comm_sms
    if point.carveout is not None:
        options["matmul_carveout"] = point.carveout
    return options


def _measure(point: Point, traced: Traced, device: torch.device, rank: int) -> dict[str, Any]:
    inputs = Inputs(point, traced.model, device, rank)
    programs: dict[str, CompiledProgram] = {}
    candidates: dict[str, Candidate] = {}
    compile_s = {}
    refused = {}
    started = time.perf_counter()
    recorded = traced.record(inputs)
    compile_s["trace"] = round(time.perf_counter() - started, 1)
    args = recorded.args
    for name in SCHEDULES:
        started = time.perf_counter()
        try:
            programs[name] = traced.program(recorded.captured, point, name)
            programs[name](*args)
        except dbo_fx.DboError as error:
            refused[name] = str(error)[:300]
            programs.pop(name, None)
            continue
        compile_s[name] = round(time.perf_counter() - started, 1)
        candidates[name] = Candidate(_stepper(programs[name], args))
    threads = Threaded(programs.get("single_batch_overlap", programs["unsplit"]))
    candidates["threaded"] = Candidate(_stepper(threads, args))
    host_us: dict[str, float] = {}
    eager_ms: dict[str, float] = {}
    yields = 0
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name, candidate in list(candidates.items()):
        try:
            before = threads.baton.yields
            host_us[name], eager_ms[name] = _eager(candidate, inputs)
            if name == "threaded":
                yields = (threads.baton.yields - before) // (EAGER_STEPS + 1)
            if pool is not None:
                _capture(candidate, pool, inputs)
        except Exception as error:  # One that fails loses its own column, on every rank alike.
            refused[name] = f"{type(error).__name__}: {error}"[-500:]
            del candidates[name]
    equal, unsteady = _compare(candidates, inputs)
    times = _times_ms(candidates, inputs, device)
    sustained = _sustained_ms(candidates, inputs) if pool is not None else {}
    row: dict[str, Any] = {
        "key": point.key,
        "point": point.to_json(),
        "ms": {name: round(statistics.median(t), 4) for name, t in times.items()},
        "sustained_ms": sustained,
        "spread": {
            name: round((max(t) - min(t)) / statistics.median(t), 3) for name, t in times.items()
        },
        "host_us": {name: round(t, 1) for name, t in host_us.items()},
        "eager_ms": {name: round(t, 4) for name, t in eager_ms.items()},
        "yields": yields,
        "equal": equal,
        "unsteady": unsteady,
        "lost_rows": dbo_fx.overflow(traced.model).total,
        "compile_s": compile_s,
        "refused": refused,
    }
    try:
        row["action_times"] = _action_times(programs, args, inputs)
    except Exception as error:
        row["bounds_failed"] = f"{type(error).__name__}: {error}"[-500:]
    return row


def _stepper(program: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        result = program(*args)
        return result[0] if isinstance(result, tuple | list) else result

    return step


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _eager(candidate: Candidate, inputs: Inputs) -> tuple[float, float]:
    """An eager step: host time until all is enqueued, us, and time until all is done, ms.

    The device is idle before. Medians.
    """
    host, whole = [], []
    for index in range(EAGER_STEPS + 1):
        inputs.reset()
        _synchronize()
        _barrier()
        started = time.perf_counter()
        candidate.step()
        enqueued = time.perf_counter()
        _synchronize()
        if index:
            host.append((enqueued - started) * 1e6)
            whole.append((time.perf_counter() - started) * 1e3)
    return statistics.median(host), statistics.median(whole)


def _barrier() -> None:
    if dist.get_backend() != "fake":
        dist.barrier()


def _capture(candidate: Candidate, pool: Any, inputs: Inputs) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            inputs.reset()
            candidate.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread calls CUDA meanwhile, which a stricter mode takes for an error.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        candidate.output = candidate.step()
    candidate.graph = graph


def _compare(candidates: dict[str, Candidate], inputs: Inputs) -> tuple[dict[str, bool], list[str]]:
    """New inputs each time; every schedule against the serial run of its microbatches.

    Returns:
        Whether each was equal every time, and the serial runs that differ from themselves: some
        kernels of torch give other bits from run to run, and then nothing can be told.
    """
    equal = dict.fromkeys((n for n, m in EQUAL.items() if {n, m} <= candidates.keys()), True)
    serial = {n for n in EQUAL.values() if n in candidates}
    unsteady: set[str] = set()

    def run(name: str) -> Tensor:
        inputs.reset()
        return candidates[name].run().clone()

    for _ in range(CHECKS):
        inputs.ids.copy_(inputs.fresh())
        outputs = {name: run(name) for name in candidates}
        for name in equal:
            equal[name] &= torch.equal(outputs[name], outputs[EQUAL[name]])
        for name in sorted(serial):  # All of them on every rank: they communicate.
            again = [torch.equal(run(name), outputs[name]) for _ in range(REPEATS)]
            if not all(again):
                unsteady.add(name)
    return equal, sorted(unsteady)


def _times_ms(
    candidates: dict[str, Candidate], inputs: Inputs, device: torch.device
) -> dict[str, list[float]]:
    """All candidates in turn, so that slow phases of the machine hit all alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(ROUNDS + 2):
        for name, candidate in candidates.items():
            inputs.reset()
            _synchronize()
            time.sleep(REST_S if device.type == "cuda" else 0.0)
            _barrier()
            spent = _timed_ms(candidate, device)
            if index >= 2:
                times[name].append(spent)
    return times


def _timed_ms(candidate: Candidate, device: torch.device) -> float:
    """One step; its launch is hidden behind a kernel that only waits, as another step would."""
    if device.type == "cpu":
        started = time.perf_counter()
        candidate.run()
        return (time.perf_counter() - started) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH_CYCLES)
    start.record()
    candidate.run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def _sustained_ms(candidates: dict[str, Candidate], inputs: Inputs) -> dict[str, float]:
    """A step without any rest: several of each, one behind the other; medians of the means."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(3):
        for name, candidate in candidates.items():
            inputs.reset()
            _synchronize()
            _barrier()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            candidate.run()
            start.record()
            for _ in range(SUSTAINED):
                candidate.run()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop) / SUSTAINED)
    return {name: round(statistics.median(t), 4) for name, t in times.items()}


# What a program of each kind is measured for: the schedules whose bound its times give.
REFERENCES = {
    "unsplit": ("unsplit", "single_batch_overlap", "single_batch_overlap_dispatch"),
    "sequential": ("sequential", "mlp_shared_overlap", "vllm_high_throughput"),
    "sequential_3": ("sequential_3", "mlp_shared_overlap_3"),
}
# Whose timeline the results keep, besides the times of its phases.
SHOWN = "mlp_shared_overlap"


def _action_times(
    programs: dict[str, CompiledProgram], args: tuple[Any, ...], inputs: Inputs
) -> dict[str, Any]:
    """How long every action takes on this rank where nothing overlaps, and where it does."""
    found: dict[str, Any] = {}
    for name in (*REFERENCES, SHOWN):
        if name not in programs:
            continue
        inputs.reset()
        measured = programs[name].measure(
            args, ROUNDS, rest_s=REST_S if programs[name].runtime.is_cuda else 0
        )
        names = REFERENCES.get(name, ())
        found[name] = {
            "times": measured.times,
            "stamped_ms": measured.stamped_us / 1e3,
            "total_ms": measured.total_us / 1e3,
            "programs": {n: str(programs[n].program) for n in names if n in programs},
            "stamps": [
                (s.name, s.stream, round(s.start_us, 1), round(s.stop_us, 1))
                for s in measured.stamps
            ],
        }
    return found


def _bounds(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What each schedule could reach: its simulation with the times of all ranks.

    Every communication is a meeting. So an action lasts as long as on the slowest rank, and a
    transfer as long as on the rank that came last, which did not wait for the others.
    """
    bounds, stamped, total, phases = {}, {}, {}, {}
    for name, first in measured[0].items():
        ranks = [m[name]["times"] for m in measured]
        times = {
            key: (min if key[0] in "DC" else max)(t[key] for t in ranks) for key in first["times"]
        }
        stamped[name] = round(max(m[name]["stamped_ms"] for m in measured), 4)
        total[name] = round(max(m[name]["total_ms"] for m in measured), 4)
        phases[name] = _by_phase(times)
        for schedule, text in first["programs"].items():
            simulated = dbo_fx.simulate(parse_program(text), times)
            bounds[schedule] = round(simulated.total_us / 1e3, 4)
    found: dict[str, Any] = {
        "bound_ms": bounds,
        "with_stamps_ms": stamped,
        "without_stamps_ms": total,
        "phases_ms": phases,
    }
    if SHOWN in measured[0]:
        found["timeline"] = measured[0][SHOWN]["stamps"]
    return found


def _by_phase(times: dict[str, float]) -> dict[str, float]:
    """Milliseconds by the phase that an action's name starts with: A, MLP, S, D, C and others."""
    spent: defaultdict[str, float] = defaultdict(float)
    for name, us in times.items():
        spent[re.split(r"\d*_", name)[0]] += us / 1e3
    return {phase: round(ms, 4) for phase, ms in spent.items() if ms}


class Processes:
    """Ranks that stay for all groups of a family; a failure ends them, and others start.

    Args:
        ranks: How many ranks share the experts.
        timeout_s: Limit of a call.
        family: The family.
    """

    def __init__(self, ranks: int, timeout_s: float, family: Point) -> None:
        """Start them."""
        self._ranks, self._timeout_s, self._link = ranks, timeout_s, family.link
        self._prepared: set[str] = set()
        self._running = self._start()

    def prepare(self, points: Sequence[Point]) -> None:
        """Compile points of one group.

        Raises:
            RankError: A rank failed or took too long.
        """
        if not self._running.alive:
            self.close()
            self._prepared.clear()
            self._running = self._start()
        if self._prepared >= {point.key for point in points}:
            return
        self._running.call(prepare_group, (list(points), self._ranks), timeout_s=self._timeout_s)
        self._prepared |= {point.key for point in points}

    def measure(self, points: Sequence[Point]) -> list[dict[str, Any]]:
        """Measure points of one group.

        Raises:
            RankError: A rank failed or took too long.
        """
        self.prepare(points)
        found = self._running.call(measure_group, (list(points),), timeout_s=self._timeout_s)
        return [_merge(rows) for rows in zip(*found, strict=True)]

    def _start(self) -> Ranks:
        world = 1 if self._link == "host" else self._ranks
        backend = "gloo" if self._link in ("host", "cpu") else "nccl"
        old = os.environ.pop("NCCL_P2P_DISABLE", None)
        if self._link == "no_p2p":
            os.environ["NCCL_P2P_DISABLE"] = "1"
        try:  # They take over the environment when they start.
            return Ranks(world, backend=backend, timeout_s=self._timeout_s)
        finally:
            os.environ.pop("NCCL_P2P_DISABLE", None)
            if old is not None:
                os.environ["NCCL_P2P_DISABLE"] = old

    def close(self) -> None:
        """End the ranks."""
        self._running.close()


def _merge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks': the slowest rank's times, equal only where all are."""
    first = dict(rows[0])
    if any("refused" in row and "ms" not in row for row in rows):
        return next(row for row in rows if "ms" not in row)
    for key in ("ms", "sustained_ms", "host_us", "eager_ms"):
        first[key] = {n: max(row[key][n] for row in rows) for n in first[key]}
    measured = [row.pop("action_times", None) for row in rows]
    first.pop("action_times", None)
    if all(measured):
        first |= _bounds(measured)
    first["unsteady"] = sorted({n for row in rows for n in row["unsteady"]})
    first["equal"] = {
        n: all(row["equal"][n] for row in rows)
        for n in first["equal"]
        if EQUAL[n] not in first["unsteady"]
    }
    return first
