"""Compiled programs in folders: `save` writes one, `load` starts it again without Dynamo.

A folder holds the captured graph, the schedule, the program and what was proven of it; weights are
looked up by name when it is loaded. Loading runs the passes on the graph again, so a loaded program
has been proven in the process that runs it, and must be the one that was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from difflib import unified_diff
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from dbo_fx import ir, opaque
from dbo_fx.agree import compare_over_store
from dbo_fx.backend import compile_captured
from dbo_fx.capture import CapturedGraph
from dbo_fx.certificates.certificate import Certificate
from dbo_fx.comm.groups import world_size
from dbo_fx.communication import communicating_groups
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import GraphFileError, OptionError, SoundnessError
from dbo_fx.graph_facts import parse_graph_facts
from dbo_fx.graph_file import graph_from_facts, graph_text
from dbo_fx.ir_schedule import parse_schedule
from dbo_fx.options import Options
from dbo_fx.saved_calls import CallInputs
from dbo_fx.saved_weights import Weights, find_weights

FORMAT = "dbo_fx program 1"
MANIFEST = "saved.json"
GRAPH, SCHEDULE, PROGRAM = "captured.dbograph.json", "schedule.dbo", "program.dbo"
CERTIFICATE = "certificate.json"
# What belongs to one process, or to compiling with Dynamo.
NOT_SAVED = {"schedule", "dump_dir", "inner_backend", "on_unsupported", "split_dim"}


def save(compiled: CompiledProgram, path: str | os.PathLike[str]) -> Path:
    """Write a compiled program into a folder; weights stay where they are.

    Args:
        compiled: One of `dbo_fx.compilations()`.
        path: The folder: new, empty, or one that holds a saved program, which is replaced. Every
            rank writes a folder of its own.

    Returns:
        The folder.

    Raises:
        OptionError: the folder cannot be written, or holds something else.
        SoundnessError: the program was refused on its first call.
        GraphFileError: the graph has something that a file cannot hold, or an input that another
            process cannot find by name.
    """
    if not isinstance(compiled, CompiledProgram):
        raise OptionError(
            f"save: found {type(compiled).__name__}, wanted one of dbo_fx.compilations()"
        )
    if compiled.refused is not None:
        raise SoundnessError(f"this program is not saved, it was refused: {compiled.refused}")
    CallInputs(compiled.captured)
    texts = {
        GRAPH: graph_text(compiled.captured),
        SCHEDULE: str(compiled.options.resolved_schedule()),
        PROGRAM: str(compiled.program),
        CERTIFICATE: _json(compiled.certificate.to_json()),
    }
    texts[MANIFEST] = _json(
        {
            "format": FORMAT,
            "options": _options(compiled.options),
            "plan": str(compiled.plan),
            "groups": {name: world_size(name) for name in _groups(compiled.captured)},
            "files": {name: _digest(text) for name, text in texts.items()},
        }
    )
    folder = Path(path)
    try:
        _write(folder, texts)
    except OSError as error:
        raise OptionError(f"save: {folder} cannot be written: {error.strerror}") from error
    return folder


class SavedProgram:
    """A program that was saved and loaded. Call it with the model's inputs.

    Arguments are passed by name, or in the order of `arguments`: the order in which the graph first
    uses them. It returns what the graph returns: the tensor if there is one, else the tuple of all.

    Attributes:
        compiled: The program in full, with `memory()`, `progress()` and the like.
        arguments: Names of the arguments.
    """

    def __init__(self, compiled: CompiledProgram, weights: Weights) -> None:
        """Look the weights up.

        Raises:
            GraphFileError: one is missing, or does not fit.
        """
        self.compiled = compiled
        self._inputs = CallInputs(compiled.captured)
        self.arguments = self._inputs.names
        tensors = find_weights(self._inputs.weights, weights)
        nodes = [node for node, _ in self._inputs.weights]
        self._weights = {n.name: t for n, t in zip(nodes, tensors, strict=True)}

    @property
    def program(self) -> ir.Program:
        """The bound program, as text with `str()`."""
        return self.compiled.program

    @property
    def certificate(self) -> Certificate:
        """What was proven when it was loaded."""
        return self.compiled.certificate

    def __str__(self) -> str:
        """As the compiled program prints."""
        return str(self.compiled)

    def __repr__(self) -> str:
        """One line."""
        return f"SavedProgram({', '.join(self.arguments)}: {self.compiled!r})"

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Raises:
            OptionError: the arguments do not fit `arguments`.
            SoundnessError: a tensor has a shape, dtype, device or layout that the program was not
                compiled for, and whatever else a compiled program refuses.
        """
        result = self.compiled(*self._inputs.bind(self._weights, args, kwargs))
        return result[0] if isinstance(result, tuple | list) and len(result) == 1 else result


def load(
    path: str | os.PathLike[str],
    weights: Weights = None,
    *,
    groups: Mapping[str, str] | None = None,
) -> SavedProgram:
    """Start a saved program again, without Dynamo; all ranks of its groups load together.

    Args:
        path: The folder that `save` wrote.
        weights: The model, a state dict, or the path of a `.safetensors` file; where the weights
            belong to several modules, a mapping from their names to them.
        groups: Names of process groups now, by the name that they had when the program was saved.

    Returns:
        The program, proven anew.

    Raises:
        GraphFileError: the folder is damaged, changed by hand, or of another version; a weight is
            missing or does not fit; an op is not registered; a group has another size.
        CommunicationError: a process group is unknown.
        AgreementError: another rank loads another program, or does not come.
        DboError: whatever a pass refuses.
    """
    folder = Path(path)
    texts, manifest = _read(folder)
    captured = graph_from_facts(parse_graph_facts(texts[GRAPH], str(folder / GRAPH)), str(folder))
    _rename_groups(captured, dict(groups or {}), manifest["groups"])
    schedule = parse_schedule(texts[SCHEDULE], str(folder / SCHEDULE))
    options = Options.parse({**manifest["options"], "schedule": schedule})
    compiled = compile_captured(captured, options)
    _compare_program(folder, texts[PROGRAM], compiled)
    if not groups and str(compiled.plan) != manifest["plan"]:
        raise GraphFileError(
            f"{folder} was saved with plan {manifest['plan']}; this dbo_fx makes "
            f"{compiled.plan} of its graph. Save it again with this version of dbo_fx and torch."
        )
    loaded = SavedProgram(compiled, weights)
    for name in sorted(_groups(captured)):
        compare_over_store(name, "saved program", str(compiled.plan), options.agree_timeout_s)
    return loaded


def _options(options: Options) -> dict[str, Any]:
    names = [f.name for f in fields(options) if f.name not in NOT_SAVED]
    return {name: getattr(options, name) for name in names}


def _groups(captured: CapturedGraph) -> set[str]:
    return communicating_groups(captured.graph)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    if not manifest.exists() and any(folder.iterdir()):
        raise OptionError(f"save: {folder} holds something that is no saved program. Take another.")
    # A folder without its manifest is no saved program: that is what a half-written one is.
    manifest.unlink(missing_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _read(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts of all files, and the manifest that they agree with."""
    manifest = _manifest(folder)
    texts = {}
    for name in (GRAPH, SCHEDULE, PROGRAM, CERTIFICATE):
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GraphFileError(f"{folder / name} cannot be read: {_reason(error)}") from error
        if _digest(texts[name]) != manifest["files"].get(name):
            raise GraphFileError(
                f"{folder / name} was changed after it was saved. Compile and save again; nothing "
                "in the folder is meant to be edited."
            )
    return texts, manifest


def _reason(error: Exception) -> str:
    """Why a file cannot be read, without its path."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"no JSON: {error}"


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GraphFileError(
            f"{folder} holds no saved program: {file} cannot be read ({_reason(error)}). Write "
            "one with dbo_fx.save."
        ) from error
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise GraphFileError(
            f"{folder} has format {version!r}, this dbo_fx reads {FORMAT!r}. Save it again with "
            "this version."
        )
    kinds = {"options": dict, "plan": str, "groups": dict, "files": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(found.get(key), kind)]
    if wrong:
        raise GraphFileError(f"{file} is damaged: it has no {wrong[0]!r}. Save the program again.")
    return dict(found)


def _rename_groups(
    captured: CapturedGraph, names: Mapping[str, str], sizes: Mapping[str, int]
) -> None:
    """Let the graph use the groups of this process; they must have the sizes of then."""
    if set(sizes) != (used := _groups(captured)):
        raise GraphFileError(
            f"{MANIFEST} is damaged: it has groups {', '.join(sorted(sizes)) or 'none'}, and the "
            f"graph communicates over {', '.join(sorted(used)) or 'none'}. Save the program again."
        )
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise OptionError(
            f"groups: the program has no group {unknown[0]!r}. It has: {', '.join(sorted(sizes))}."
        )
    for stored, ranks in sizes.items():
        now = names.get(stored, stored)
        found = world_size(now)
        if found != ranks:
            raise GraphFileError(
                f"group {now!r} has {found} ranks, and the program was compiled for {ranks}. Load "
                "it on as many, or compile again."
            )
    for node in captured.graph.nodes:
        stored_name = opaque.group_of(node) if node.op == "call_function" else None
        if stored_name is not None and stored_name in names:
            _replace_group(node, names[stored_name])
    captured.module.recompile()


def _replace_group(node: Node, now: str) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    wanted = opaque.group_argument(node.target)
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == wanted and index < len(node.args):
            node.update_arg(index, now)
        elif argument.name == wanted:
            node.update_kwarg(argument.name, now)


def _compare_program(folder: Path, stored: str, compiled: CompiledProgram) -> None:
    made = str(compiled.program)
    if made == stored:
        return
    lines = unified_diff(stored.splitlines(), made.splitlines(), "saved", "made now", "", "", 1)
    shown = "\n  ".join(list(lines)[:12])
    raise GraphFileError(
        f"{folder / PROGRAM} is not what this dbo_fx makes of the graph:\n  {shown}\nSave it again "
        "with this version."
    )
