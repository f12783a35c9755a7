"""Where a node comes from, in a form that is the same on every machine: module, line and phase."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.fx import Node

from dbo_fx.capture import module_path
from dbo_fx.ir import Half, Phase
from dbo_fx.tag import Tag, set_tag, tag_of

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')
_AT = re.compile(r"(?P<file>.*):(?P<line>\d+) in (?P<function>.*)")


def saved_place(node: Node) -> dict[str, Any]:
    """`module`, `at` and `tag` of a node, each only if it is known."""
    facts: dict[str, Any] = {}
    path, line, tag = module_path(node), line_of(node), tag_of(node)
    if path:
        facts["module"] = path
    if line:
        facts["at"] = line
    if tag is not None:
        fields = {
            "role": tag.role,
            "phase": tag.phase and tag.phase.value,
            "layer": tag.layer,
            "microbatch": tag.microbatch,
            "half": tag.half and tag.half.value,
            "stream": tag.stream,
            "rule": tag.rule or None,
        }
        facts["tag"] = {key: value for key, value in fields.items() if value is not None}
    return facts


def restore_place(node: Node, facts: Mapping[str, Any]) -> None:
    """Give a node what `saved_place` found."""
    if "module" in facts:
        node.meta["nn_module_stack"] = {facts["module"]: (facts["module"], "")}
    if (found := _AT.fullmatch(facts.get("at", ""))) is not None:
        node.meta["stack_trace"] = (
            f'  File "{found["file"]}", line {found["line"]}, in {found["function"]}\n'
        )
    if "tag" in facts:
        fields = dict(facts["tag"])
        phase, half = fields.pop("phase", None), fields.pop("half", None)
        set_tag(node, Tag(**fields, phase=phase and Phase(phase), half=half and Half(half)))


def line_of(node: Node) -> str:
    """`models/moe.py:120 in forward`: the innermost line of the model that is not torch's own."""
    frames = [m for m in map(_FRAME.search, (node.meta.get("stack_trace") or "").splitlines()) if m]
    own = [f for f in frames if not short_path(f["file"]).startswith("torch/")]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{short_path(frame['file'])}:{frame['line']} in {frame['function']}"


@lru_cache(maxsize=4096)
def short_path(file: str) -> str:
    """A source file from its outermost package on; the bare name of a file in no package."""
    path = Path(file)
    if not path.is_absolute():  # Loaded from a graph file, so it is short.
        return file
    package = path.parent
    while (package / "__init__.py").is_file():
        package = package.parent
    return str(path.relative_to(package)) if package in path.parents else path.name
