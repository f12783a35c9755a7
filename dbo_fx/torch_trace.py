"""The one place that speaks to torch's tracing of compiles: artifacts for tlparse, and bytecode.

Both are private API of torch; `tests/test_torch_adapters.py` fails loudly when one moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING

import torch
from torch._logging._internal import trace_structured

if TYPE_CHECKING:
    from dbo_fx.compiled import CompiledProgram


def publish(compiled: CompiledProgram) -> None:
    """Hand one compile's artifacts to torch's structured trace, for tlparse.

    Costs nothing unless a trace is being written (environment variable `TORCH_TRACE`).
    """
    _artifact("dbo_fx_captured_graph", "string", lambda: readable(compiled))
    _artifact("dbo_fx_program", "string", lambda: str(compiled.program))
    _artifact("dbo_fx_certificate", "json", lambda: json.dumps(compiled.certificate.to_json()))
    overlap = compiled.certificate.overlap
    _artifact("dbo_fx_overlap", "json", lambda: json.dumps(overlap.to_json()))


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


def when_compiled(act: Callable[[CodeType, CodeType], None]) -> bool:
    """Call back once Dynamo has made the bytecode of the frame that it is compiling now.

    Args:
        act: Gets the frame's own code and Dynamo's. Called once, or never if the compile fails.

    Returns:
        False, and nothing will be called, if Dynamo is not compiling.
    """
    here = torch._guards.CompileContext.current_compile_id()
    if here is None:
        return False

    def hook(code: CodeType, new_code: CodeType) -> None:
        # A compile that failed leaves its hook to the next one.
        handle.remove()
        if torch._guards.CompileContext.current_compile_id() == here:
            act(code, new_code)

    handle = torch._dynamo.convert_frame.register_bytecode_hook(hook)
    return True
