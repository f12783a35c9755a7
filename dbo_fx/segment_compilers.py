"""What compiles a segment's core: Inductor, or any backend that torch.compile knows.

The one place that calls `torch._inductor.standalone_compile` and what it needs, which is private
API of torch; `tests/test_torch_adapters.py` fails loudly when it moves.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.runtime.cache_dir_utils import cache_dir, temporary_cache_dir
from torch.autograd import profiler
from torch.fx import GraphModule

from dbo_fx.errors import OptionError, UnsupportedGraphError
from dbo_fx.symbols import FakeTensorMode

log = logging.getLogger("dbo_fx")
INDUCTOR, EAGER = "inductor", "eager"
# A segment's inputs are checked by what Inductor generates. No CUDA graphs inside of ours.
INDUCTOR_CONFIG = {"size_asserts": True, "triton.cudagraphs": False}
Run = Callable[..., Sequence[Any]]
Direct = Callable[[list[Any]], Sequence[Any]]


def check_backend(name: object) -> None:
    """Refuse an unknown backend.

    Raises:
        OptionError: torch.compile knows no such backend, or it is this one.
    """
    known = [n for n in torch._dynamo.list_backends(exclude_tags=None) if n != "dbo_fx"]
    if not isinstance(name, str) or name not in known:
        raise OptionError(
            f"option segment_backend={name!r}: torch.compile knows no such backend for segments. "
            f"Known: {', '.join(known)}."
        )


def compile_core(
    backend: str, core: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, name: str
) -> Run:
    """Compile a core.

    Args:
        backend: Its name.
        core: The graph; its output is a tuple.
        inputs: Fake tensors and symbolic numbers.
        mode: The fake mode that they belong to.
        name: The segment's, for messages.

    Returns:
        What takes real inputs in the same order, and returns the results in order.

    Raises:
        UnsupportedGraphError: the backend failed.
    """
    try:
        with torch.no_grad(), tracing(TracingContext(mode)):
            if backend == INDUCTOR:
                return _inductor(core, inputs)
            compiled: Run = torch._dynamo.lookup_backend(backend)(core, list(inputs))
    except Exception as error:
        raise UnsupportedGraphError(
            f"{name}: segment_backend={backend!r} did not compile it ({type(error).__name__}: "
            f"{_first_line(error)}). segment_backend='eager' runs segments as they were traced."
        ) from error
    if not callable(compiled):
        raise UnsupportedGraphError(
            f"{name}: segment_backend={backend!r} returned {type(compiled).__name__}, which cannot "
            "be called. Take another backend, or 'eager'."
        )
    return compiled


def _inductor(core: GraphModule, inputs: Sequence[Any]) -> Run:
    """Compile, or take what Inductor finds in its folder; once more elsewhere if that is damaged.

    Inductor looks its own graphs up by content and survives a damaged one, but fails at generated
    code and libraries that are cut short (a full disk, a killed process).
    """
    try:
        return _standalone(core, inputs)
    except Exception as error:
        folder = cache_dir()
        fresh = tempfile.mkdtemp(prefix="dbo_fx_inductor_")
        atexit.register(shutil.rmtree, fresh, ignore_errors=True)
        with temporary_cache_dir(fresh):
            run = _standalone(core, inputs)
        log.warning(
            "Inductor could not use its files in %s (%s: %s). Compiled anew without them; delete "
            "that folder, or every process will compile again.",
            *(folder, type(error).__name__, _first_line(error)),
        )
        return run


def _standalone(core: GraphModule, inputs: Sequence[Any]) -> Run:
    artifact = torch._inductor.standalone_compile(
        core,
        list(inputs),
        dynamic_shapes="from_tracing_context",
        options={"config_patches": INDUCTOR_CONFIG},
    )
    run: Run = artifact
    return run


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def environment(backend: str) -> str:
    """A hash of what else decides what a backend makes of a graph."""
    facts: list[Any] = [torch.__version__, backend, torch.get_float32_matmul_precision()]
    facts.append(torch.are_deterministic_algorithms_enabled())
    if backend == INDUCTOR:
        facts.append(torch._inductor.config.get_hash())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def run_and_look(
    backend: str, run: Run, arguments: tuple[Any, ...], written: Sequence[int] = ()
) -> tuple[Sequence[Any], Direct | None]:
    """Run a compiled core, and see whether what stands around Inductor's own code is in vain.

    What AOTAutograd and Dynamo put around it costs several microseconds a call, and for a core it
    only hands on: there are no gradients, no subclasses, no results that are views.

    Args:
        backend: What compiled it.
        run: What `compile_core` returned.
        arguments: Its arguments.
        written: Positions of those that it writes in place.

    Returns:
        The results; and Inductor's own code, if in this call it got the very arguments and gave the
        very results, and no other thread was looking. It takes a list, which it empties, and must
        be called where neither gradients nor autocast nor a profiler are on (`is_bare`).
    """
    compiled = _compiled_graph(run) if backend == INDUCTOR else None
    if compiled is None:
        return run(*arguments), None
    # Never waits: the thread that looks may itself wait for another rank.
    if not _LOOKING.acquire(blocking=False):
        return run(*arguments), None
    calls: list[tuple[Sequence[Any], Sequence[Any]]] = []
    caller = threading.get_ident()
    inner: Any = compiled.current_callable

    def seen(given: list[Any]) -> Any:
        kept = list(given)
        results = inner(given)
        if threading.get_ident() == caller:
            calls.append((kept, results))
        return results

    before = [_version(arguments[i]) for i in written]
    compiled.current_callable = seen
    try:
        found = run(*arguments)
    finally:
        compiled.current_callable = inner
        _LOOKING.release()
    hands_on = len(calls) == 1 and all(map(_are_same, calls[0], (arguments, found)))
    if not hands_on or not is_bare():
        return found, None
    # An inference tensor has no counter to look at; the next call may bring another kind.
    pairs = zip(written, before, strict=True)
    counted = [i for i, old in pairs if old is None or _version(arguments[i]) != old]
    return found, _counting(inner, counted) if counted else inner


_LOOKING = threading.Lock()


def is_bare() -> bool:
    """Whether nothing is on that what stands around Inductor's code would have to mind."""
    return not (
        torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
        or profiler._is_profiler_enabled
        or torch.compiler.is_compiling()
    )


def _counting(inner: Direct, written: Sequence[int]) -> Direct:
    """Inductor's kernels write without telling the tensors' version counters."""

    def counted(arguments: list[Any]) -> Sequence[Any]:
        torch.autograd.graph.increment_version(
            [t for i in written if not (t := arguments[i]).is_inference()]
        )
        return inner(arguments)

    return counted


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    if len(values) != len(others):
        return False
    pairs = zip(values, others, strict=True)
    return all(a is b or (type(a) is int and a == b) for a, b in pairs)


def _compiled_graph(run: Run) -> Any:
    """The `CompiledFxGraph` that a callable ends up at, if it is one; None for several."""
    from torch._inductor.output_code import CompiledFxGraph

    found, todo, seen = [], [run], set[int]()
    while todo and len(seen) < 1000:
        one: Any = todo.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, CompiledFxGraph):
            found.append(one)
            continue
        cells = getattr(one, "__closure__", None) or ()
        parts = [cell.cell_contents for cell in cells if _is_full(cell)]
        parts += [getattr(one, "__self__", None), *getattr(one, "__dict__", {}).values()]
        todo += [part for part in parts if callable(part)]
    return found[0] if len(found) == 1 else None


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if nothing was ever put in
    except ValueError:
        return False
    return True
