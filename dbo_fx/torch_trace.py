"""The one place that speaks to torch's tracing of compiles: artifacts for tlparse, and bytecode.

Both are private API of torch; `tests/test_torch_adapters.py` fails loudly when one moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch._logging._internal import trace_structured

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram


def publish(compiled: CompiledProgram) -> None:
    """Hand one compile's artifacts to torch's structured trace, for tlparse.

    Costs next to nothing unless a trace is being written (environment variable `TORCH_TRACE`).
    """
    certificate = compiled.certificate
    # The smallest first: torch looks whether anybody wants a trace when it gets the first one.
    _artifact("dbo_fx_program", "string", lambda: str(compiled.program))
    _artifact("dbo_fx_overlap", "json", lambda: json.dumps(certificate.overlap.to_json()))
    _artifact("dbo_fx_certificate", "json", lambda: json.dumps(certificate.to_json()))
    _artifact("dbo_fx_captured_graph", "string", lambda: readable(compiled))


def readable(compiled: CompiledProgram) -> str:
    """The captured graph as Python source."""
    text: str = compiled.captured.module.print_readable(print_output=False)
    return text


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # Graphs are compiled outside of Dynamo too.
    )


_Act = Callable[[CodeType, CodeType], None]
# Keyed by the compile itself: what waits for one that fails goes away with it.
_WAITING: WeakKeyDictionary[torch._guards.CompileContext, _Act] = WeakKeyDictionary()


def when_compiled(act: _Act) -> bool:
    """Call back once Dynamo has made the bytecode of the frame that it is compiling now.

    Args:
        act: Gets the frame's own code and Dynamo's. Called once, or never if the compile fails.

    Returns:
        False, and nothing will be called, if Dynamo is not compiling.
    """
    here = torch._guards.CompileContext.try_get()
    if here is None:
        return False
    _listen()
    _WAITING[here] = act
    return True


@cache
def _listen() -> None:
    """Register one hook for good: Dynamo does not let a hook remove itself."""
    torch._dynamo.convert_frame.register_bytecode_hook(_hook)


def _hook(code: CodeType, new_code: CodeType) -> None:
    here = torch._guards.CompileContext.try_get()
    act = None if here is None else _WAITING.pop(here, None)
    if act is not None:
        act(code, new_code)
