"""The pass protocol, the state that flows through the passes, and the pipeline that runs them.

Passes return what they did; the pipeline owns logging, timing and dumps.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from dbo_fx.capture import CapturedGraph
from dbo_fx.communication import Communication
from dbo_fx.effects import Dependency, Effects, Member
from dbo_fx.errors import DboError
from dbo_fx.ir import Action, Program

if TYPE_CHECKING:
    from dbo_fx.certificates.certificate import Certificate
    from dbo_fx.passes.sharding import Obligation

log = logging.getLogger("dbo_fx")


@dataclass(frozen=True)
class State:
    """What the passes hand on. Each pass says in its docstring which fields it needs and fills.

    Attributes:
        captured: The captured graph, never changed after `normalize`.
        graph: The graph as the last pass left it.
        effects: What every node of `graph` reads and writes.
        communications: The dispatches and combines of `captured`, two per MoE layer.
        layers: Number of MoE layers.
        microbatches: Number of microbatches.
        obligations: What soundness leaves to a test on the first call's values.
        dependencies: What must run before what, over the nodes of `graph`.
        copies: Per microbatch, captured node -> its copy.
        actions: The order of actions, empty ones left out.
        calls: Captured node and microbatch of every compute call, in the program's order.
        program: The bound program with streams and events.
        segments: Submodules of `graph`, by name: what each segment computes.
        compiled: Compiled segments, which run in their place.
        members: The captured nodes that every call of `graph` stands for, and where they stood.
        certificate: What `verify` proved, and from `memory` on the predicted peaks.
        lowered: The lowered graph that `module` was emitted from; another module can be.
        module: The emitted module.
    """

    captured: CapturedGraph
    graph: Graph
    effects: Effects = field(default_factory=Effects)
    communications: tuple[Communication, ...] = ()
    layers: int = 0
    microbatches: int = 1
    obligations: tuple[Obligation, ...] = ()
    dependencies: tuple[Dependency, ...] = ()
    copies: tuple[dict[Node, Node], ...] = ()
    actions: tuple[Action, ...] = ()
    calls: tuple[tuple[Node, int | None], ...] = ()
    program: Program | None = None
    segments: dict[str, GraphModule] = field(default_factory=dict)
    compiled: dict[str, Module] = field(default_factory=dict)
    members: dict[Node, tuple[Member, ...]] = field(default_factory=dict)
    certificate: Certificate | None = None
    lowered: Graph | None = None
    module: GraphModule | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What one pass did, in one line, and how long it took."""

    name: str
    text: str
    seconds: float = 0.0

    def __str__(self) -> str:
        """`name 0.12 s: text`."""
        return f"{self.name} {self.seconds:.2f} s: {self.text}"


class Pass(Protocol):
    """A frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """The pass's name in reports and dumps."""

    def apply(self, state: State) -> tuple[State, str]:
        """Transform the state; return it with a one-line report.

        Raises:
            DboError: the graph is refused; the message says why.
        """


Observer = Callable[[Report, State], None]


@dataclass(frozen=True)
class Pipeline:
    """Runs passes in order.

    Attributes:
        passes: What to run.
        observers: Called after every pass with its report and the new state (dumps, progress).
    """

    passes: Sequence[Pass]
    observers: Sequence[Observer] = ()

    def run(self, captured: CapturedGraph) -> tuple[State, tuple[Report, ...]]:
        """Run all passes on a captured graph.

        Raises:
            DboError: what a pass refused, with the pass's name noted on the error.
        """
        with _collection_paused():
            return self._run(captured)

    def _run(self, captured: CapturedGraph) -> tuple[State, tuple[Report, ...]]:
        state = State(captured, captured.graph)
        reports: list[Report] = []
        for step in self.passes:
            started = time.perf_counter()
            try:
                state, text = step.apply(state)
            except DboError as error:
                error.add_note(f"(refused by pass {step.name})")
                raise
            report = Report(step.name, text, time.perf_counter() - started)
            log.debug("%s", report)
            reports.append(report)
            for observer in self.observers:
                observer(report, state)
        return state, tuple(reports)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection while passes run: each would visit every node of a large graph."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
