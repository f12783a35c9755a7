"""What one rank of `overlap.py` does: compile every schedule, capture it, replay it, compare."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from overlap_model import Inputs, build
from overlap_points import Point
from threaded import Threaded
from torch import Tensor, nn

import dbo_fx
from dbo_fx.compiled import CompiledProgram
from dbo_fx.ir import parse_program
from dbo_fx.launch import Ranks

ROUNDS = 15
EAGER_STEPS = 7
CHECKS = 3
# Name in the results -> schedule and microbatches.
SCHEDULES: dict[str, tuple[str, int]] = {
    "unsplit": ("sequential", 1),
    "single_batch_overlap": ("single_batch_overlap", 1),
    "sequential": ("sequential", 2),
    "mlp_shared_overlap": ("mlp_shared_overlap", 2),
    "vllm_high_throughput": ("vllm_high_throughput", 2),
    "mlp_shared_overlap_3": ("mlp_shared_overlap_3", 3),
}
# What must equal what, bit for bit: the same segments on the same microbatches.
EQUAL = {
    "single_batch_overlap": "unsplit",
    "mlp_shared_overlap": "sequential",
    "vllm_high_throughput": "sequential",
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


_MODELS: dict[Point, nn.Module] = {}


def measure_group(rank: int, points: Sequence[Point], world: int) -> list[dict[str, Any]]:
    """Measure points that share a model; called on every rank.

    Args:
        rank: This process's rank.
        points: Points of one group.
        world: Ranks that the experts are shared among.
    """
    point = points[0]
    if point.link == "host" and dist.get_backend() != "fake":
        _imitate_peers(world)
    device = torch.device("cpu") if point.link == "cpu" else torch.device("cuda", rank)
    dtype = torch.float32 if point.link == "cpu" else torch.bfloat16
    if point.family not in _MODELS:
        _MODELS[point.family] = build(point, device, dtype)
    model = _MODELS[point.family]
    torch._dynamo.reset()  # What an earlier group compiled is not called again.
    torch._dynamo.config.recompile_limit = 64  # Every schedule and sequence length is one.
    found = []
    with torch.no_grad():
        names = list(SCHEDULES)[: 4 if point.carveout is not None else None]
        compiled = {name: _compile(model, point, name) for name in names}
        for p in points:
            try:
                found.append(_measure(p, model, compiled, device, rank))
            except (dbo_fx.DboError, torch.OutOfMemoryError) as error:
                found.append({"key": p.key, "point": p.to_json(), "refused": str(error)[:500]})
    return found


def _imitate_peers(world: int) -> None:
    """Replace the default group by one that pretends to have R ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def _compile(model: nn.Module, point: Point, name: str) -> Callable[[Tensor], Tensor]:
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
    return torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)


def _measure(
    point: Point,
    model: nn.Module,
    compiled: dict[str, Callable[[Tensor], Tensor]],
    device: torch.device,
    rank: int,
) -> dict[str, Any]:
    inputs = Inputs(point, model, device, rank)
    programs: dict[str, CompiledProgram] = {}
    args: dict[str, tuple[Any, ...]] = {}
    candidates: dict[str, Candidate] = {}
    compile_s = {}
    refused = {}
    for name, call in compiled.items():
        started = time.perf_counter()
        try:
            programs[name], args[name] = _program(call, inputs)
        except dbo_fx.DboError as error:
            refused[name] = str(error)[:300]
            continue
        compile_s[name] = round(time.perf_counter() - started, 1)
        candidates[name] = Candidate(_stepper(programs[name], args[name]))
    threads = Threaded(programs["single_batch_overlap"])
    candidates["threaded"] = Candidate(_stepper(threads, args["single_batch_overlap"]))
    host_us: dict[str, float] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name, candidate in list(candidates.items()):
        try:
            host_us[name] = _host_us(candidate, inputs)
            if pool is not None:
                _capture(candidate, pool, inputs)
        except Exception as error:  # One that fails loses its own column, on every rank alike.
            refused[name] = f"{type(error).__name__}: {error}"[-500:]
            del candidates[name]
    yields = threads.baton.yields // max(1, EAGER_STEPS + 1)
    equal = _compare(candidates, inputs)
    times = _times_ms(candidates, inputs, device)
    row: dict[str, Any] = {
        "key": point.key,
        "point": point.to_json(),
        "ms": {name: round(statistics.median(t), 4) for name, t in times.items()},
        "spread": {
            name: round((max(t) - min(t)) / statistics.median(t), 3) for name, t in times.items()
        },
        "host_us": {name: round(t, 1) for name, t in host_us.items()},
        "yields": yields,
        "equal": equal,
        "lost_rows": dbo_fx.overflow(model).total,
        "compile_s": compile_s,
        "refused": refused,
    }
    try:
        row["action_times"] = _action_times(programs, args, inputs)
    except Exception as error:
        row["bounds_failed"] = f"{type(error).__name__}: {error}"[-500:]
    return row


def _program(
    call: Callable[[Tensor], Tensor], inputs: Inputs
) -> tuple[CompiledProgram, tuple[Any, ...]]:
    """Compile, or find what is compiled; and what Dynamo gives the program."""
    from dbo_fx import backend

    found: list[tuple[CompiledProgram, tuple[Any, ...]]] = []
    run = CompiledProgram._run

    def spy(self: CompiledProgram, args: tuple[Any, ...]) -> Any:
        found.append((self, args))
        return run(self, args)

    CompiledProgram._run = spy  # type: ignore[method-assign]
    try:
        inputs.reset()
        call(inputs.ids)
    finally:
        CompiledProgram._run = run  # type: ignore[method-assign]
    assert len(found) == 1, f"{len(found)} programs ran, {len(backend.compilations())} compiled"
    return found[0]


def _stepper(program: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        result = program(*args)
        return result[0] if isinstance(result, tuple | list) else result

    return step


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _host_us(candidate: Candidate, inputs: Inputs) -> float:
    """Host time of an eager step, until everything is enqueued; the device was idle before."""
    times = []
    for index in range(EAGER_STEPS + 1):
        inputs.reset()
        _synchronize()
        _barrier()
        started = time.perf_counter()
        candidate.step()
        if index:
            times.append((time.perf_counter() - started) * 1e6)
    _synchronize()
    return statistics.median(times)


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


def _compare(candidates: dict[str, Candidate], inputs: Inputs) -> dict[str, bool]:
    """New inputs each time; every schedule against the serial run of its microbatches."""
    equal = dict.fromkeys((n for n, m in EQUAL.items() if {n, m} <= candidates.keys()), True)
    for _ in range(CHECKS):
        inputs.ids.copy_(inputs.fresh())
        outputs = {}
        for name, candidate in candidates.items():
            inputs.reset()
            outputs[name] = candidate.run().clone()
        for name in equal:
            equal[name] &= torch.equal(outputs[name], outputs[EQUAL[name]])
    return equal


def _times_ms(
    candidates: dict[str, Candidate], inputs: Inputs, device: torch.device
) -> dict[str, list[float]]:
    """All candidates in turn, so that slow phases of the machine hit all alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(ROUNDS + 2):
        for name, candidate in candidates.items():
            inputs.reset()
            _synchronize()
            _barrier()
            spent = _timed_ms(candidate, device)
            if index >= 2:
                times[name].append(spent)
    return times


def _timed_ms(candidate: Candidate, device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        candidate.run()
        return (time.perf_counter() - started) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    candidate.run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


# What a program of each kind is measured for: the schedules whose bound its times give.
REFERENCES = {
    "unsplit": ("unsplit", "single_batch_overlap"),
    "sequential": ("sequential", "mlp_shared_overlap", "vllm_high_throughput"),
}


def _action_times(
    programs: dict[str, CompiledProgram], args: dict[str, tuple[Any, ...]], inputs: Inputs
) -> dict[str, Any]:
    """How long every action takes on this rank where nothing overlaps; `_bounds` reads it."""
    found: dict[str, Any] = {}
    for reference, names in REFERENCES.items():
        if reference not in programs:
            continue
        inputs.reset()
        measured = programs[reference].measure(args[reference])
        found[reference] = {
            "times": measured.times,
            "stamped_ms": measured.stamped_us / 1e3,
            "programs": {n: str(programs[n].program) for n in names if n in programs},
        }
    return found


def _bounds(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What each schedule could reach: its simulation with the times of all ranks.

    Every communication is a meeting. So an action lasts as long as on the slowest rank, and a
    transfer as long as on the rank that came last, which did not wait for the others.
    """
    bounds, stamped, spent = {}, {}, {}
    for reference, first in measured[0].items():
        ranks = [m[reference]["times"] for m in measured]
        times = {
            key: (min if key[0] in "DC" else max)(t[key] for t in ranks) for key in first["times"]
        }
        stamped[reference] = round(max(m[reference]["stamped_ms"] for m in measured), 4)
        transfer_us = sum(us for key, us in times.items() if key[0] in "DC")
        spent[reference] = {
            "transfer_ms": round(transfer_us / 1e3, 4),
            "compute_ms": round((sum(times.values()) - transfer_us) / 1e3, 4),
        }
        for name, text in first["programs"].items():
            simulated = dbo_fx.simulate(parse_program(text), times)
            bounds[name] = round(simulated.total_us / 1e3, 4)
    return {"bound_ms": bounds, "with_stamps_ms": stamped, "spent": spent}


class Processes:
    """Ranks that stay for all groups of a family; a failure ends them, and others start.

    Args:
        ranks: How many ranks share the experts.
        timeout_s: Limit of a group.
    """

    def __init__(self, ranks: int, timeout_s: float) -> None:
        """Start nothing yet."""
        self._ranks, self._timeout_s = ranks, timeout_s
        self._family: Point | None = None
        self._running: Ranks | None = None

    def measure(self, points: Sequence[Point]) -> list[dict[str, Any]]:
        """Measure points of one group.

        Raises:
            RankError: A rank failed or took too long.
        """
        family = points[0].family
        if self._running is None or not self._running.alive or self._family != family:
            self.close()
            self._running, self._family = self._start(family.link), family
        found = self._running.call(
            measure_group, (list(points), self._ranks), timeout_s=self._timeout_s
        )
        return [_merge(rows) for rows in zip(*found, strict=True)]

    def _start(self, link: str) -> Ranks:
        world = 1 if link == "host" else self._ranks
        backend = "gloo" if link in ("host", "cpu") else "nccl"
        old = os.environ.pop("NCCL_P2P_DISABLE", None)
        if link == "no_p2p":
            os.environ["NCCL_P2P_DISABLE"] = "1"
        try:  # They take over the environment when they start.
            return Ranks(world, backend=backend, timeout_s=self._timeout_s)
        finally:
            os.environ.pop("NCCL_P2P_DISABLE", None)
            if old is not None:
                os.environ["NCCL_P2P_DISABLE"] = old

    def close(self) -> None:
        """End the ranks."""
        if self._running is not None:
            self._running.close()
        self._running = None


def _merge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks': the slowest rank's times, equal only where all are."""
    first = dict(rows[0])
    if any("refused" in row and "ms" not in row for row in rows):
        return next(row for row in rows if "ms" not in row)
    for key in ("ms", "host_us"):
        first[key] = {n: max(row[key][n] for row in rows) for n in first[key]}
    measured = [row.pop("action_times", None) for row in rows]
    first.pop("action_times", None)
    if all(measured):
        first |= _bounds(measured)
    first["equal"] = {n: all(row["equal"][n] for row in rows) for n in first["equal"]}
    return first
