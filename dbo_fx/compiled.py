"""A compiled forward: the callable that Dynamo gets, and the record that people read."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from dbo_fx import ir
from dbo_fx.agree import Advice, compare_over_store
from dbo_fx.capture import CapturedGraph
from dbo_fx.certificates.certificate import Certificate
from dbo_fx.certificates.memory import MemoryCertificate, size_values
from dbo_fx.certificates.memory_report import MemoryReport
from dbo_fx.comm.ops import abandon_in_flight
from dbo_fx.comm.plain import plain_ops_of_program
from dbo_fx.comm.protocol import begin_region
from dbo_fx.communication import Communication
from dbo_fx.contracts import contract
from dbo_fx.differential import Differential, has_values
from dbo_fx.errors import (
    AgreementError,
    CommunicationError,
    OptionError,
    SoundnessError,
    VerificationError,
)
from dbo_fx.guards import CallGuards, written_inputs
from dbo_fx.hangs import HangReports
from dbo_fx.options import Options
from dbo_fx.passes.sharding import Obligation
from dbo_fx.passes.soundness import refuse_obligations
from dbo_fx.pipeline import Report, State
from dbo_fx.plan_digest import Plan, make_plan, note
from dbo_fx.progress import Progress
from dbo_fx.row_dependence import RowDependence
from dbo_fx.runtime import Runtime
from dbo_fx.tag import tag_of

if TYPE_CHECKING:
    from dbo_fx.inspect.measured import Measured
    from dbo_fx.inspect.timeline import Timeline

log = logging.getLogger("dbo_fx")
_AFTER_COMPARISON = Advice(
    "Look for the first error there; it may have other options (verify).",
    "Splitting changes results on some ranks, so no rank runs the program. See the error there.",
)


@dataclass(frozen=True, slots=True)
class Summary:
    """What was found in the model and made of it.

    Attributes:
        layers: Number of MoE layers.
        microbatches: Number of microbatches.
        phases: Calls per phase in the captured graph.
        communications: Dispatch and combine of every layer.
        segments: Segment calls in the program.
        distinct_segments: Structurally different ones.
    """

    layers: int
    microbatches: int
    phases: dict[str, int]
    communications: tuple[Communication, ...]
    segments: int
    distinct_segments: int

    def __str__(self) -> str:
        """Four lines."""
        first = [str(c).partition(": ") for c in self.communications[:2]]
        per_layer = "; ".join(f"{at.split('@')[0]} {what}" for at, _, what in first)
        return (
            f"MoE layers: {self.layers}, microbatches: {self.microbatches}\n"
            f"ops per phase: {', '.join(f'{k} {v}' for k, v in self.phases.items())}\n"
            f"segments: {self.segments} calls of {self.distinct_segments} distinct ones\n"
            f"communication per layer: {per_layer}"
        )


class CompiledProgram:
    """A verified program. Call it with the graph's inputs, as Dynamo does.

    Attributes:
        captured: The captured graph.
        program: The bound program, as text with `str()`.
        module: The emitted flat module.
        certificate: What was proven.
        summary: What was found; prints readably.
        reports: One per pass.
        checked: The numeric differential's result, once it ran.
        tested: The row-dependence test's result, once it ran.
    """

    def __init__(self, state: State, reports: tuple[Report, ...], options: Options) -> None:
        """Wrap the pipeline's last state."""
        assert state.program is not None
        assert state.module is not None
        assert state.certificate is not None
        self.captured: CapturedGraph = state.captured
        self.program: ir.Program = state.program
        self.module: GraphModule = state.module
        self.certificate: Certificate = state.certificate
        self.reports = reports
        self.options = options
        self.summary = _summary(state)
        self.checked: str | None = None
        self.tested: str | None = None
        self._refused: str | None = None
        self._state = state
        self._guards = CallGuards(state)
        self._memory_checked: set[tuple[tuple[str, int], ...]] = set()
        self._running = threading.Lock()
        self._hangs = HangReports(self.runtime, self.program, self.group, options)
        launches = [launch for c in state.communications for launch in c.launches]
        self._groups = tuple(dict.fromkeys(launch.group for launch in launches))
        self._differential = Differential(state) if options.verify == "numeric" else None
        tests = bool(state.obligations) and state.microbatches > 1
        self._row_test = RowDependence(state) if tests else None

    @cached_property
    def plan(self) -> Plan:
        """What all ranks must have in common: program, graphs, transport, tests."""
        return make_plan(
            self.program,
            self.module,
            self.captured,
            contract(self.program.transport),
            self.options,
            len(self.obligations),
        )

    @property
    def refused(self) -> str | None:
        """Why the program runs no more, if a test of its first call failed."""
        return self._refused

    @property
    def obligations(self) -> tuple[Obligation, ...]:
        """What the soundness pass left to the row-dependence test."""
        return self._state.obligations

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the inputs that the program writes in place: caches, counters."""
        inputs = self.captured.placeholders
        return tuple(inputs[i].name for i in written_inputs(self._state))

    @property
    def group(self) -> str:
        """Name of the process group that dispatch and combine use."""
        return self._state.communications[0].launches[0].group

    @property
    def runtime(self) -> Runtime:
        """The module's streams, events and trace."""
        runtime = self.module.runtime
        assert isinstance(runtime, Runtime)
        return runtime

    def __repr__(self) -> str:
        """One line."""
        program = self.program
        return (
            f"CompiledProgram({program.schedule}, layers={program.layers}, "
            f"microbatches={program.microbatches}, digest={program.digest})"
        )

    def __str__(self) -> str:
        """Summary, certificate and passes."""
        lines = [
            str(self.summary),
            f"certificate:\n{indent(str(self.certificate), '  ')}",
            *map(str, self.reports),
        ]
        return "\n".join(lines)

    def __call__(self, *args: Any) -> Any:
        """Run the program on the graph's inputs.

        Raises:
            CommunicationError: another thread runs it, or the transport is not where a call starts.
            VerificationError: a batch of this size needs more than `max_memory_ratio` allows, or
                the call is captured and the program makes the host wait.
            SoundnessError: this batch size breaks an assumption of the graph, or the split result
                differed from the unsplit one on the first call: then now and ever after.
        """
        note(lambda: self.plan)
        if self._refused is not None:
            raise SoundnessError(self._refused)
        self._guards.check(args)
        self._check_memory(args)
        if not self._running.acquire(blocking=False):
            raise CommunicationError(
                "this program is running in another thread: its communications would mix. Give "
                "every thread a compiled model and a process group of its own."
            )
        try:
            self._check_capture()
            begin_region(self.program.transport, self._groups)
            return self._cleaned_up(args)
        finally:
            self._running.release()

    def _check_capture(self) -> None:
        proven = self.certificate.hazards
        if not proven.capturable and self.runtime.is_capturing:
            raise VerificationError(
                f"this program cannot be captured in a CUDA graph: {proven.reason}. Run it "
                "eagerly, or over another transport."
            )

    def _cleaned_up(self, args: tuple[Any, ...]) -> Any:
        """Run; what a failure leaves half-done is abandoned, so that the next call can begin."""
        try:
            with self._hangs.watch_call():
                return self._run(args)
        except BaseException:
            self.runtime.abandon()
            abandon_in_flight(*self._groups)
            raise

    def _run(self, args: tuple[Any, ...]) -> Any:
        if self._row_test is None and self._differential is None:
            return self.module(*args)
        with plain_ops_of_program(self.program.transport):
            if self._row_test is not None:
                self._test_rows(self._row_test, args)
            if self._differential is not None and has_values(args):
                return self._first_call(self._differential, args)
        return self.module(*args)

    def _first_call(self, differential: Differential, args: tuple[Any, ...]) -> Any:
        result, verdict = differential.run(self.module, args)
        self.checked = str(verdict)
        log.info("numeric differential: %s", verdict)
        self._settle("numeric verdict", verdict.error)
        # Only now: a first call that failed for another reason has compared nothing.
        self._differential = None
        return result

    def _test_rows(self, test: RowDependence, args: tuple[Any, ...]) -> None:
        """Clear the obligations on real values, once."""
        if not has_values(args):
            refuse_obligations(self.obligations, "this call has no real values, or is captured")
            return
        error = test.run(args)
        self.tested = f"{len(self.obligations)} nodes passed"
        log.info("row-dependence test: %s", error or self.tested)
        self._settle("row-dependence verdict", error)
        self._row_test = None

    def _settle(self, what: str, error: str | None) -> None:
        """Refuse this program for ever on every rank if a first-call test failed on one."""
        self._refused = error
        word = "equal" if error is None else "different"
        try:  # Ranks that saw no difference must not run into the next collective alone.
            compare_over_store(
                self.group, what, word, self.options.agree_timeout_s, advice=_AFTER_COMPARISON
            )
        except AgreementError as disagreed:
            if error is None:
                self._refused = f"the first call was not found right on every rank: {disagreed}"
                raise
        if error is not None:
            raise SoundnessError(error)

    def progress(self) -> Progress:
        """Where this rank stands, now and from any thread; prints as one line.

        Raises:
            OptionError: compiled with `progress=False`, which is the default on CUDA.
        """
        return self._hangs.progress("asked for")

    def watch(
        self, timeout_s: float, folder: str | Path | None = None
    ) -> AbstractContextManager[None]:
        """Write this rank's progress if the body takes longer than `timeout_s`.

        For replays of a CUDA graph that this program was captured in: `with compiled.watch(30):
        graph.replay(); torch.cuda.synchronize()`.

        Args:
            timeout_s: Limit of the body, in seconds.
            folder: Where `progress_rankR.json` goes; None: `dump_dir`, else the current folder.

        Raises:
            OptionError: as `progress`, on entry.
        """
        return self._hangs.watch(timeout_s, folder)

    def memory(self, tokens: int | None = None) -> MemoryReport:
        """Predict how much memory a call holds, and who holds it at the peak.

        Args:
            tokens: Size of the whole batch along the dim that is split; the traced one if None.

        Raises:
            OptionError: tracing knew no size, so `tokens` is needed.
        """
        if tokens is not None:
            return self._memory.at(tokens)
        if not self._memory.reports:
            raise OptionError("memory(): no batch size was known while tracing; pass tokens=")
        return self._memory.reports[0]

    @property
    def _memory(self) -> MemoryCertificate:
        assert isinstance(self.certificate.memory, MemoryCertificate)
        return self.certificate.memory

    def _check_memory(self, args: tuple[Any, ...]) -> None:
        """Refuse a size that the compile could not know of; each is looked at once."""
        if self.options.max_memory_ratio is None:
            return
        sizes = size_values(self.captured, args)
        tokens = sizes[self.captured.symbol]
        key = tuple(sorted((str(s), v) for s, v in sizes.items()))
        if key not in self._memory_checked:
            self._memory.at(tokens, sizes).check(self.options.max_memory_ratio)
            self._memory_checked.add(key)

    def timeline(
        self,
        path: str | Path | None = None,
        *,
        times: Mapping[str, float] | str | Path | None = None,
        tokens: int | None = None,
    ) -> Timeline:
        """Lay the program out in time, with its nodes, its memory and its certificate.

        Args:
            path: Where it goes: `.html` a page, `.json` a trace for Perfetto; None writes nothing.
            times: Microseconds by action or a JSON file of them; None: one unit for each action.
            tokens: Size of the whole batch along the dim that is split; the traced one if None.

        Raises:
            OptionError: no size was known while tracing, so `tokens` is needed; or see
                `dbo_fx.timeline`.
        """
        from dbo_fx.inspect.write_timeline import timeline

        return timeline(self, path, times=times, tokens=tokens)

    def measure(
        self,
        call: Sequence[Any] | Callable[[], Any],
        replays: int = 20,
        *,
        graph: bool | None = None,
        rest_s: float = 0.0,
    ) -> Measured:
        """Measure when every action runs, in a diagnostic module of the same segments.

        All ranks have to do it together. What the program writes in place is put back.

        Args:
            call: The graph's inputs; or a function that calls the compiled model once, from which
                the inputs are taken.
            replays: How many runs the medians are over.
            graph: Whether to capture a CUDA graph; None: wherever the program can be captured.
            rest_s: Seconds that the device rests before a run: a device at its power limit lowers
                its clock, and then times depend on what ran before.

        Returns:
            The times, for `timeline`, `simulate` and files.

        Raises:
            OptionError: a number or an argument is wrong, or the program cannot be captured.
        """
        from dbo_fx.measuring import measure

        return measure(self, call, replays, graph=graph, rest_s=rest_s)

    def host_us_per_node(self, args: tuple[Any, ...], repeats: int = 5) -> dict[str, float]:
        """Host time of every emitted call, by way of the ops that its graph names.

        A step itself calls functions and methods, which take less (`dbo_fx.host_code`).

        Args:
            args: The graph's inputs.
            repeats: Runs; the median over them is returned.

        Returns:
            Microseconds by node name.
        """
        runs = [_Timed(self.module).timed(args) for _ in range(repeats)]
        return {name: median(run[name] for run in runs) for name in runs[0]}


class _Timed(Interpreter):
    def timed(self, args: tuple[Any, ...]) -> dict[str, float]:
        self.host_us: dict[str, float] = {}
        with torch.no_grad():
            self.run(*args)
        return self.host_us

    def run_node(self, n: Node) -> Any:
        started = time.perf_counter()
        result = super().run_node(n)
        if n.op.startswith("call"):
            self.host_us[n.name] = (time.perf_counter() - started) * 1e6
        return result


def _summary(state: State) -> Summary:
    tags = [tag_of(n) for n in state.captured.graph.nodes if n.op == "call_function"]
    counts = Counter(t.phase.value for t in tags if t is not None and t.phase is not None)
    phases = {p.value: counts[p.value] for p in ir.Phase}
    calls = sum(n.op == "call_module" for n in state.graph.nodes)
    return Summary(
        state.layers,
        state.microbatches,
        phases,
        state.communications,
        calls,
        len(state.segments),
    )
