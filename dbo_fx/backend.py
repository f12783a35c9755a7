"""The torch.compile entry point, and the same compilation without Dynamo around it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dbo_fx.agree import announce_over_store, compare_over_store
from dbo_fx.capture import CapturedGraph, from_dynamo, value_of
from dbo_fx.comm import transport_for
from dbo_fx.comm.protocol import unusable
from dbo_fx.communication import communicating_groups
from dbo_fx.compiled import CompiledProgram
from dbo_fx.contracts import check_sms, contract
from dbo_fx.dump import Dump
from dbo_fx.emit import Emit
from dbo_fx.errors import (
    CommunicationError,
    DboError,
    OptionError,
    ScheduleError,
    SoundnessError,
    UnsupportedGraphError,
)
from dbo_fx.ir import Program
from dbo_fx.options import Options
from dbo_fx.passes.compile_segments import CompileSegments
from dbo_fx.passes.halves import Halves
from dbo_fx.passes.lower import Lower
from dbo_fx.passes.memory import Memory
from dbo_fx.passes.microbatch import Microbatch
from dbo_fx.passes.normalize import Normalize
from dbo_fx.passes.regions import Regions
from dbo_fx.passes.schedule import Order
from dbo_fx.passes.soundness import Soundness, refuse_obligations
from dbo_fx.passes.streams import Streams
from dbo_fx.passes.verify import Verify
from dbo_fx.pipeline import Observer, Pipeline
from dbo_fx.plan_digest import fallback_digest
from dbo_fx.segment_compilers import EAGER, INDUCTOR, check_backend
from dbo_fx.torch_trace import publish

log = logging.getLogger("dbo_fx")
_COMPILATIONS: deque[CompiledProgram] = deque(maxlen=64)
_TOLD: set[str] = set()


def compilations() -> list[CompiledProgram]:
    """The programs compiled in this process, newest last (the last 64)."""
    return list(_COMPILATIONS)


def dbo_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: `torch.compile(model, backend="dbo_fx", fullgraph=True, options={...})`.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs; only their fake values in the graph are used.
        mode: Must be None or "default": torch.compile's modes belong to Inductor.
        options: See `dbo_fx.Options`.

    Returns:
        The compiled program, or what the inner backend made of a graph without MoE communication.

    Raises:
        OptionError: an option is wrong.
        UnsupportedGraphError: the graph cannot be scheduled (unless `on_unsupported="fallback"`).
        SoundnessError: the graph must not be split (likewise).
        ScheduleError: the schedule breaks a dependency of the graph (likewise).
        VerificationError: the program is not proven safe, or holds too much memory (always).
        AgreementError: another rank did not compile, or compiled something else.
    """
    if mode not in (None, "default"):
        raise OptionError(f"mode={mode!r} belongs to Inductor. Leave it out with backend='dbo_fx'.")
    opts = Options.parse(options)
    _check_inner(opts.inner_backend)
    _report_break(gm)
    groups = communicating_groups(gm.graph)
    if not groups:
        log.info("no MoE communication in this graph: it goes to backend %r", opts.inner_backend)
        return _inner(gm, example_inputs, opts)
    try:
        # Dumps, too, before the others are told that all is well.
        compiled = _compile(from_dynamo(gm, opts.split_dim), opts)
        plan = str(compiled.plan)
    except DboError as error:
        may_fall_back = isinstance(error, _NOT_SPLIT) and opts.on_unsupported == "fallback"
        if not may_fall_back:
            for group in sorted(groups):
                announce_over_store(group, "program digest", f"refused: {error}".splitlines()[0])
            raise
        _tell_once(f"dbo_fx does not split this graph, {opts.inner_backend} takes it: {error}")
        _compare(groups, fallback_digest(gm.graph), opts)
        return _inner(gm, example_inputs, opts)
    _compare(groups, plan, opts)
    return compiled


_NOT_SPLIT = (UnsupportedGraphError, SoundnessError, ScheduleError)


def _compare(groups: set[str], plan: str, options: Options) -> None:
    """Stop where another rank of a group brings another plan; groups in one order on all ranks."""
    for group in sorted(groups):
        compare_over_store(group, "program digest", plan, options.agree_timeout_s)


def _compile(captured: CapturedGraph, options: Options) -> CompiledProgram:
    """Compile, with a dump folder if one is asked for: a refused graph has one, too."""
    if options.dump_dir is None:
        return compile_captured(captured, options)
    dump = Dump(options.dump_dir)
    dump.begin(captured)
    try:
        compiled = compile_captured(captured, options, observers=[dump])
    except DboError as error:
        try:
            dump.refuse(error)
        except OptionError as unwritable:
            error.add_note(str(unwritable))
        raise
    dump.finish(compiled)
    return compiled


def compile_captured(
    captured: CapturedGraph,
    options: Options,
    *,
    runs: bool = True,
    observers: Sequence[Observer] = (),
) -> CompiledProgram:
    """Run the whole pipeline on a captured graph, which it takes over.

    Args:
        captured: The captured graph.
        options: How to split and schedule.
        runs: False to look at the program only: then the transport need not carry the graph's
            device.
        observers: Called behind every pass.

    Raises:
        DboError: whatever a pass refuses.
    """
    schedule = options.resolved_schedule()
    name = options.transport
    if runs or name is None:
        name = _transport_name(captured, name)
    transport = contract(name)
    check_sms(transport, options.sms)
    segments = _segment_backend(captured, options.segment_backend)
    pipeline = Pipeline(
        [
            Normalize(),
            Regions(),
            Soundness(),
            Microbatch(options.microbatches()),
            Halves(transport),
            Order(schedule),
            Streams(schedule.name, transport, options.sms),
            Lower(),
            Verify(transport),
            Memory(options.max_memory_ratio),
            CompileSegments(segments if runs else EAGER),
            Emit(options.counts_progress),
        ],
        observers,
    )
    state, reports = pipeline.run(captured)
    compiled = CompiledProgram(state, reports, options)
    _COMPILATIONS.append(compiled)
    publish(compiled)
    return compiled


def compile_graph(
    captured: CapturedGraph, options: Options | Mapping[str, Any] | None = None
) -> tuple[Program, GraphModule]:
    """Schedule a captured graph.

    Args:
        captured: What `dbo_fx.trace` returned; it is taken over (normalized in place).
        options: Options, or a mapping as torch.compile takes it.

    Returns:
        The bound program, and the module that runs it on the captured graph's inputs.

    Raises:
        DboError: whatever a pass refuses.
    """
    parsed = options if isinstance(options, Options) else Options.parse(options)
    compiled = _compile(captured, parsed)
    refuse_obligations(compiled.obligations, "compile_graph runs nothing; use torch.compile")
    return compiled.program, compiled.module


def graph_digest(compiled: CompiledProgram) -> str:
    """A short hash of program, graphs and first-call tests, which communicate too."""
    return compiled.plan.digest


def _check_inner(name: str) -> None:
    known = torch._dynamo.list_backends(exclude_tags=None)
    if name not in known:
        raise OptionError(
            f"option inner_backend={name!r}: torch.compile knows no such backend. Known: "
            f"{', '.join(known)}."
        )


def _inner(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    backend = torch._dynamo.lookup_backend(options.inner_backend)
    inner: Callable[..., Any] = backend(gm, list(example_inputs))
    return inner


def _segment_backend(captured: CapturedGraph, wanted: str | None) -> str:
    """The backend that was asked for, or the one for the graph's device.

    Raises:
        OptionError: torch.compile knows no such backend.
    """
    if wanted is not None:
        check_backend(wanted)
        return wanted
    return INDUCTOR if _device_type(captured) == "cuda" else EAGER


def _device_type(captured: CapturedGraph) -> str:
    token = captured.token_inputs[0]
    kind: str = value_of(captured.placeholders[token.index]).device.type
    return kind


def _transport_name(captured: CapturedGraph, wanted: str | None) -> str:
    device = _device_type(captured)
    carried = device if device == "cuda" else "cpu"
    try:  # Other devices (meta) only compile; they stand for the CPU.
        name = transport_for(carried, wanted).contract.name
        if (why := unusable(carried, name)) is not None:
            raise CommunicationError(f"transport {name!r} cannot run here: {why}")
        return name
    except CommunicationError as error:
        raise OptionError(f"option transport={wanted!r} cannot be used: {error}") from error


def _tell_once(text: str) -> None:
    if text not in _TOLD:
        _TOLD.add(text)
        log.warning("%s", text)


def _report_break(gm: GraphModule) -> None:
    """Say where Dynamo cut the model, if it did: a cut inside a layer makes it unschedulable."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return
    frames = getattr(reason, "user_stack", None) or []
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = str(getattr(reason, "reason", reason)).splitlines()[0]
    _tell_once(
        f"graph break{place}: {text}. Layers on both sides are compiled apart; use fullgraph=True."
    )
