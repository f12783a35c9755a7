"""Measure when every action of a compiled program runs: a diagnostic run of the same segments.

    1. catch the arguments of one call, or take them
    2. emit a second module from the same lowered graph and the same segments, with stamps
    3. on CUDA capture both modules in graphs of their own; on CPU, and where the transport makes
       the host wait, run them eagerly
    4. run both in turn, so that a device whose speed changes changes both; take medians

What the program writes in place, caches and counters, is put back before every run and at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dbo_fx.certificates.memory import size_values
from dbo_fx.emit import Emit
from dbo_fx.errors import OptionError
from dbo_fx.inspect.measured import Measured, median_stamps
from dbo_fx.stamps import StampedRuntime

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram

WARM_UPS = 3


def measure(
    compiled: CompiledProgram,
    call: Sequence[Any] | Callable[[], Any],
    replays: int = 20,
    *,
    graph: bool | None = None,
    rest_s: float = 0.0,
) -> Measured:
    """Measure when every action runs. All ranks have to do it together.

    Args:
        compiled: The compiled program.
        call: The graph's inputs; or a function that calls the compiled model once, from which the
            inputs are taken.
        replays: How many runs the medians are over.
        graph: Whether to capture a CUDA graph; None: wherever the program can be captured.
        rest_s: Seconds that the device rests before a run, so that it stays below its power limit
            and keeps its clock.

    Raises:
        OptionError: A number or an argument is wrong, or the program cannot be captured.
    """
    if isinstance(replays, bool) or not isinstance(replays, int) or replays < 1:
        raise OptionError(f"measure: replays={replays!r}; wanted 1 or more")
    if not rest_s >= 0:
        raise OptionError(f"measure: rest_s={rest_s!r}; wanted 0 or more seconds")
    args = tuple(_caught(compiled, call) if callable(call) else call)
    if len(args) != (wanted := len(compiled.captured.placeholders)):
        raise OptionError(
            f"measure: {len(args)} inputs; the graph of {compiled!r} takes {wanted}, its sizes and "
            "weights among them. Give a function that calls the compiled model once: "
            "measure(lambda: model(*args))"
        )
    can = compiled.runtime.is_cuda and compiled.certificate.hazards.capturable
    if graph and not can:
        raise OptionError(
            f"measure: {compiled!r} cannot be captured in a CUDA graph on "
            f"{compiled.runtime.device.type}; leave graph out"
        )
    is_graph = can if graph is None else graph
    stamped = _stamped(compiled)
    runtime = stamped.runtime
    assert isinstance(runtime, StampedRuntime)
    written = _Written(compiled, args)
    with torch.no_grad(), written.kept():
        runs = [_Run(program, args, written, is_graph=is_graph) for program in (compiled, stamped)]
        for run in runs:
            run.prepare()
        spans = []
        for _ in range(replays):
            for run in runs:
                time.sleep(rest_s)
                run.again()
            spans.append(runtime.spans_us())
    return Measured(
        compiled.program,
        median_stamps([(p.stream, p.action) for p in runtime.order], spans),
        total_us=median(runs[0].took_us),
        stamped_us=median(runs[1].took_us),
        replays=replays,
        mode="graph" if is_graph else "eager",
        device=_device_name(compiled.runtime.device),
        torch=str(torch.__version__),
        tokens=size_values(compiled.captured, args)[compiled.captured.symbol],
    )


def _stamped(compiled: CompiledProgram) -> CompiledProgram:
    """The same program in a module with stamps, behind the same checks of every call."""
    state = compiled._state
    if state.lowered is None:
        raise OptionError("measure: the program was not emitted from a lowered graph; compile it")
    emitted, _ = Emit(stamps=True).apply(replace(state, graph=state.lowered))
    # The first call's tests have run on the program itself.
    options = replace(compiled.options, verify="static", progress=False, hang_timeout_s=None)
    return type(compiled)(replace(emitted, obligations=()), compiled.reports, options)


def _caught(compiled: CompiledProgram, call: Callable[[], Any]) -> tuple[Any, ...]:
    """The inputs that a call of the compiled model hands to the program."""
    found: list[tuple[Any, ...]] = []

    def keep(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args)

    hook = compiled.module.register_forward_pre_hook(keep)
    try:
        call()
    finally:
        hook.remove()
    if not found:
        raise OptionError(
            f"measure: the call did not run {compiled!r}; another size or another step may have "
            "run another program: see dbo_fx.compilations()"
        )
    return found[-1]


class _Written:
    """What a run writes in place."""

    def __init__(self, compiled: CompiledProgram, args: tuple[Any, ...]) -> None:
        names = set(compiled.written)
        nodes = compiled.captured.placeholders
        self.tensors = [a for n, a in zip(nodes, args, strict=True) if n.name in names]
        assert all(isinstance(tensor, Tensor) for tensor in self.tensors)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the values back at the end."""
        self.values = [tensor.clone() for tensor in self.tensors]
        try:
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Write what stood there at first."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)


@dataclass
class _Run:
    """One of the two modules, eager or captured."""

    program: CompiledProgram
    args: tuple[Any, ...]
    written: _Written
    is_graph: bool
    took_us: list[float] = field(default_factory=list)

    def prepare(self) -> None:
        """Warm up on a stream of its own, then capture."""
        self.call: Callable[[], Any] = lambda: self.program(*self.args)
        self.is_cuda = self.program.runtime.is_cuda
        for _ in range(WARM_UPS):
            self.written.put_back()
            self.call()
        if not self.is_cuda:
            return
        torch.cuda.synchronize()
        self.clock = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        if self.is_graph:
            self.written.put_back()
            self.captured = torch.cuda.CUDAGraph()
            # Another thread of the process group looks at events while this one captures.
            with torch.cuda.graph(self.captured, capture_error_mode="thread_local"):
                self.result = self.call()
            self.call = self.captured.replay
            self.again()
            self.took_us.clear()

    def again(self) -> None:
        """Run once more and take the time."""
        self.written.put_back()
        if not self.is_cuda:
            began_s = time.perf_counter()
            self.call()
            self.took_us.append((time.perf_counter() - began_s) * 1e6)
            return
        torch.cuda.synchronize()
        start, stop = self.clock
        start.record()
        self.call()
        stop.record()
        torch.cuda.synchronize()
        self.took_us.append(start.elapsed_time(stop) * 1e3)


def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type
