"""What Dynamo made of the compiled function, as Python: written into dump folders by depyf.

depyf is optional (`pip install 'dbo-fx[debug]'`) and reads bytecode, so it follows new Pythons
late. Whatever it fails at is a warning that names it; the dump and the compile go on.
"""

from __future__ import annotations

import logging
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

import torch

from dbo_fx.torch_trace import when_compiled

log = logging.getLogger("dbo_fx")
FILE = "decompiled.py"


def is_there() -> bool:
    """Whether depyf is installed."""
    return find_spec("depyf") is not None


def write_decompiled(folder: Path) -> bool:
    """Write `decompiled.py` once Dynamo has compiled the frame that it is at.

    Args:
        folder: The dump folder; it exists by then.

    Returns:
        Whether the file will be tried: depyf is installed, and Dynamo is compiling.
    """
    return is_there() and when_compiled(lambda old, new: _write(folder / FILE, old, new))


def _write(path: Path, old: CodeType, new: CodeType) -> None:
    try:
        path.write_text(decompiled(old, new), encoding="utf-8")
    except Exception as error:  # depyf's mistakes are of any kind, and none may stop a compile.
        log.warning(
            "depyf %s cannot decompile what Dynamo made of %s (Python %s, torch %s): %s: %s. This "
            "is a failure of depyf; %s is left out of the dump, everything else is there.",
            _version(),
            old.co_qualname,
            platform.python_version(),
            torch.__version__,
            type(error).__name__,
            error,
            path,
        )


def decompiled(old: CodeType, new: CodeType) -> str:
    """Dynamo's code of a function as Python source.

    Raises:
        Exception: whatever depyf raises.
    """
    from depyf import decompile

    source: str = decompile(new)
    head = (
        f"# {old.co_qualname} ({old.co_filename}:{old.co_firstlineno}) as Dynamo compiled it,\n"
        f"# decompiled by depyf {_version()}. __compiled_fn_... is the scheduled program.\n"
    )
    return f"{head}{source.rstrip()}\n"


def _version() -> str:
    return version("depyf") if is_there() else "(not installed)"
