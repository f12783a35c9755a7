"""The dump folder of one compilation, written only when option `dump_dir` asks for it.

    dump_dir/rankR/N/
        captured.py tagged.py microbatched.py scheduled.py emitted.py
                                graphs as Python that can be read and run
        captured.dbograph.json  the captured graph, for `dbo_fx.load_graph` and the commands
        program.dbo             the program
        certificate.txt .json   what was proven
        overlap.txt .json       what runs beside what
        memory.txt .json        predicted peaks, where sizes were known
        report.txt              what the passes said
        decompiled.py           what Dynamo made of the function, if depyf is installed
        refused.txt             instead of the last ones: why the graph was refused

Other parts add files of their own: they append a function to `WRITERS`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dbo_fx.capture import CapturedGraph
from dbo_fx.compiled import CompiledProgram
from dbo_fx.decompiled import write_decompiled
from dbo_fx.errors import GraphFileError, OptionError
from dbo_fx.graph_facts import SUFFIX
from dbo_fx.graph_file import graph_text
from dbo_fx.graph_python import python_text
from dbo_fx.pipeline import Report, State

Writer = Callable[[CompiledProgram, Path], None]


def _decompiled(compiled: CompiledProgram, folder: Path) -> None:
    write_decompiled(folder)


# Called in order with every program and its folder, after the files named above. One that cannot
# work warns about it; an OSError means that the folder cannot be written.
WRITERS: list[Writer] = [_decompiled]
# The pass behind which a graph is written, the file, and what the file says of itself.
_STAGES = {
    "regions": ("tagged.py", "The captured graph, every call with its phase and layer."),
    "microbatch": ("microbatched.py", "Every microbatch has a copy of its calls."),
    "streams": ("scheduled.py", "The calls in the schedule's order, with streams and events."),
}
_FOLDERS: Counter[str] = Counter()


class Dump:
    """Collects the files of one compilation; an observer of its pipeline.

    Attributes:
        folder: `dump_dir/rankR/N` for the N-th compilation of this process, which is rank R of all.

    Args:
        base: Option `dump_dir`.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        """Take the next folder; write nothing yet."""
        self.base = os.fspath(base)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.folder = Path(base) / f"rank{rank}" / str(_FOLDERS[self.base])
        _FOLDERS[self.base] += 1
        self.texts: dict[str, str] = {}

    def begin(self, captured: CapturedGraph) -> None:
        """Keep the graph as it was captured, before the passes change it."""
        title = "The graph as it was captured."
        self.texts["captured.py"] = python_text(captured.graph, title)
        name = f"captured{SUFFIX}"
        try:
            self.texts[name] = graph_text(captured)
        except GraphFileError as error:  # It can be compiled, but not kept.
            self.texts["captured.not_saved.txt"] = f"{error}\n"

    def __call__(self, report: Report, state: State) -> None:
        """Keep the graph behind some passes."""
        if report.name in _STAGES:
            name, title = _STAGES[report.name]
            self.texts[name] = python_text(state.graph, title)

    def finish(self, compiled: CompiledProgram) -> list[Path]:
        """Write everything.

        Returns:
            The files written.

        Raises:
            OptionError: the folder cannot be written.
        """
        title = f"What runs: {compiled!r}"
        certificate = compiled.certificate
        self.texts |= {
            "emitted.py": python_text(compiled.module.graph, title, compiled.module),
            "program.dbo": str(compiled.program),
            "report.txt": f"{compiled}\n",
            **_both("certificate", certificate),
        }
        for name in ("overlap", "memory"):
            if name in certificate.parts:
                self.texts |= _both(name, certificate.parts[name])
        return self._write(compiled)

    def refuse(self, error: Exception) -> list[Path]:
        """Write what there is, and why there is no more.

        Raises:
            OptionError: the folder cannot be written.
        """
        notes = getattr(error, "__notes__", [])
        self.texts["refused.txt"] = "\n".join([f"{type(error).__name__}: {error}", *notes, ""])
        return self._write(None)

    def _write(self, compiled: CompiledProgram | None) -> list[Path]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.texts.items():
                (self.folder / name).write_text(text, encoding="utf-8")
            for writer in WRITERS if compiled is not None else ():
                assert compiled is not None
                writer(compiled, self.folder)
        except OSError as error:
            raise OptionError(
                f"option dump_dir={self.base!r} cannot be written: {error}"
            ) from error
        return sorted(p for p in self.folder.iterdir() if p.is_file())


def _both(name: str, part: Any) -> dict[str, str]:
    """A part of the certificate for people, and for programs."""
    plain = json.dumps(part.to_json(), indent=1)
    return {f"{name}.txt": f"{part}\n", f"{name}.json": f"{plain}\n"}
