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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.runtime.cache_dir_utils import cache_dir, temporary_cache_dir
from torch.fx import GraphModule

from dbo_fx.errors import OptionError, UnsupportedGraphError
from dbo_fx.symbols import FakeTensorMode

log = logging.getLogger("dbo_fx")
INDUCTOR, EAGER = "inductor", "eager"
# A segment's inputs are checked by what Inductor generates. No CUDA graphs inside of ours.
INDUCTOR_CONFIG = {"size_asserts": True, "triton.cudagraphs": False}
Run = Callable[..., Sequence[Any]]


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
