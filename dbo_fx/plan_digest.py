"""What a rank is about to run, as one record that ranks compare.

All ranks must run the same plan: the split program, the unsplit graph beside it, the transport, and
the tests that communicate too. The ranks compare its line after every compilation; `wrap` compares
the lines of all programs that ran in its steps, so that a rank whose plan changed is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from torch.fx import Graph, GraphModule

from dbo_fx import opaque
from dbo_fx.capture import CapturedGraph
from dbo_fx.contracts import Contract
from dbo_fx.ir import Program
from dbo_fx.options import Options
from dbo_fx.passes.lower import structure
from dbo_fx.segment_compilers import EAGER
from dbo_fx.segments import CompiledSegment, body_of


@dataclass(frozen=True, slots=True)
class Plan:
    """One compiled program with its variants.

    Attributes:
        schedule: Name of the schedule.
        layers: MoE layers.
        microbatches: How many.
        contract: What the transport promises.
        split: Digest of the program and of the graphs that it runs.
        unsplit: Digest of the captured graph, which runs where the ranks do not split.
        tests: The tests of the first call, which run the unsplit graph.
        limits: Options that can keep a rank from running a step.
        segments: What compiled the segments.
    """

    schedule: str
    layers: int
    microbatches: int
    contract: Contract
    split: str
    unsplit: str
    tests: str
    limits: str
    segments: str = EAGER

    @property
    def digest(self) -> str:
        """16 hex digits that stand for all of it."""
        return _digest(self)

    def __str__(self) -> str:
        """One line, the digest first; where two plans differ can be read off it."""
        most = self.contract.max_in_flight
        in_flight = "" if most is None else f", {most} in flight"
        return (
            f"{self.digest}: {self.schedule}, {self.layers} layers in {self.microbatches} "
            f"microbatches over {self.contract.name}{in_flight}; split {self.split}, "
            f"unsplit {self.unsplit}; {self.tests}; {self.limits}; segments {self.segments}"
        )


def make_plan(
    program: Program,
    module: GraphModule,
    captured: CapturedGraph,
    contract: Contract,
    options: Options,
    to_test: int,
) -> Plan:
    """The plan of a compiled program.

    Args:
        program: The bound program.
        module: The emitted module with its segments.
        captured: The captured graph.
        contract: The transport's.
        options: How it was compiled.
        to_test: How many nodes the row-dependence test has to test.
    """
    parts, backends = [str(program), structure(module.graph)], {EAGER}
    for name, child in module.named_children():
        body = body_of(child)
        if body is not None:
            parts.append(f"{name} {structure(body.graph)}")
        if isinstance(child, CompiledSegment):
            backends = {child.backend}
    return Plan(
        program.schedule,
        program.layers,
        program.microbatches,
        contract,
        _hash("\n".join(parts)),
        _hash(structure(captured.graph)),
        f"verify {options.verify}, {to_test} to test",
        f"max_memory_ratio {options.max_memory_ratio}",
        backends.pop(),
    )


def fallback_digest(graph: Graph) -> str:
    """What ranks compare when they do not split: the collectives of a Dynamo graph, in order.

    Groups are numbered, because a rank's groups may have names of their own.
    """
    groups: dict[str | None, int] = {}
    lines = []
    for node in opaque.launches(graph):
        group = groups.setdefault(opaque.group_of(node), len(groups))
        lines.append(f"{opaque.op_name(node.target)} {group}")
    return f"fallback {_hash(chr(10).join(lines))}, {len(lines)} collectives"


_RAN: ContextVar[list[str] | None] = ContextVar("dbo_fx_ran", default=None)


class Ran:
    """The plans that ran within its `with` blocks, in order.

    Attributes:
        plans: Their lines, each once.
    """

    def __init__(self) -> None:
        """None yet."""
        self.plans: list[str] = []

    def __enter__(self) -> Ran:
        """Listen."""
        self._token = _RAN.set(self.plans)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        _RAN.reset(self._token)

    def __str__(self) -> str:
        """All lines as one text, empty if nothing ran."""
        return " | ".join(self.plans)


def note(plan: Callable[[], Plan]) -> None:
    """Say that this plan runs now, if anybody listens."""
    plans = _RAN.get()
    if plans is not None and (line := str(plan())) not in plans:
        plans.append(line)


@lru_cache(maxsize=256)
def _digest(plan: Plan) -> str:
    """Cached, because every step asks for it."""
    return _hash(repr(plan))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
