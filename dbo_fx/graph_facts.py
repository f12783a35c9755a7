"""Graph files as plain values: what they are called, and how they are read without torch.

A graph file is JSON with one node a line. Values that JSON does not have are objects with one key:
`{"str": "0"}`, `{"dtype": "int64"}`, `{"device": "cpu"}`, `{"size": "2*s77"}`, `{"tuple": [...]}`,
`{"slice": [...]}`, `{"float": "-inf"}`; a plain string is a node, with `%` before its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from dbo_fx.errors import GraphFileError

SUFFIX = ".dbograph.json"
FORMAT = "dbo_fx graph 1"
Facts = dict[str, Any]


def is_graph_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is called like a graph file; it need not exist."""
    return os.fspath(path).endswith(SUFFIX)


def read_graph_facts(path: str | os.PathLike[str]) -> Facts:
    """Read a graph file as plain values; no torch, and no op needs to be registered.

    Args:
        path: A file that `dbo_fx.save_graph` wrote.

    Returns:
        The whole file. `["nodes"]` has the nodes in order, each with `name`, `op`, `target`,
        `args`, `kwargs`, and where known `val`, `module`, `at` (file:line in function), `tag`,
        `input` (where Dynamo took an input from).

    Raises:
        GraphFileError: the file cannot be read, or is no graph file of this version.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise GraphFileError(f"{os.fspath(path)} cannot be read: {reason}") from error
    return parse_graph_facts(text, os.fspath(path))


def parse_graph_facts(text: str, where: str = "graph file") -> Facts:
    """Parse a graph file's text.

    Raises:
        GraphFileError: this is no graph file of this version, or its nodes do not fit together.
    """
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphFileError(f"{where} is no JSON: {error}. Save the graph again.") from error
    found = facts.get("format") if isinstance(facts, dict) else None
    if found is None:
        raise GraphFileError(
            f'{where} is no graph file: it has no "format". Write one with dbo_fx.save_graph.'
        )
    if found != FORMAT:
        raise GraphFileError(
            f"{where} has format {found!r}, this dbo_fx reads {FORMAT!r}. Save the graph again "
            "with this version."
        )
    _check_nodes(facts, where)
    return dict(facts)


def references(value: Any) -> Iterator[str]:
    """The names of all nodes in an encoded argument, in order."""
    if isinstance(value, str):
        yield value.removeprefix("%")
    elif isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        for kind, inner in value.items():
            if kind in ("tuple", "slice", "dict"):
                yield from references(inner)


# Ops of captured graphs, and whether torch.fx writes the target into the Python that it makes and
# runs. Only names may get there: a file must never bring code.
_OPS = {"placeholder": True, "get_attr": True, "output": True, "call_function": False}
_WANTED = {"name": str, "op": str, "target": str, "args": list, "kwargs": dict}


def _check_nodes(facts: Facts, where: str) -> None:
    nodes = facts.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise GraphFileError(f"{where} is damaged: it has no nodes. Save the graph again.")
    known: set[str] = set()
    for index, node in enumerate(nodes):
        place = f"{where} is damaged: node {index + 1}"
        for key, kind in _WANTED.items():
            if not isinstance(node, dict) or not isinstance(node.get(key), kind):
                raise GraphFileError(f"{place} has no {key!r}. Save the graph again.")
        _check_names(node, place)
        used = [*references(node["args"]), *references(list(node["kwargs"].values()))]
        unknown = [name for name in used if name not in known]
        if unknown:
            raise GraphFileError(
                f"{place} ({node['name']}) uses {unknown[0]}, which no node before it defines. "
                "Save the graph again."
            )
        if node["name"] in known:
            raise GraphFileError(f"{place} is called {node['name']} like an earlier one.")
        known.add(node["name"])


def _check_names(node: Facts, place: str) -> None:
    if node["op"] not in _OPS:
        raise GraphFileError(
            f"{place} has op {node['op']!r}, wanted one of {', '.join(_OPS)}. Save the graph again."
        )
    names = [*node["kwargs"], *([node["target"]] if _OPS[node["op"]] else [])]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise GraphFileError(f"{place} names {name!r}, which is no name. Save the graph again.")
    tag = node.get("tag")
    places = [node.get("module"), node.get("at"), *(tag.values() if isinstance(tag, dict) else ())]
    if any(isinstance(text, str) and len(text.splitlines()) > 1 for text in places):
        raise GraphFileError(f"{place} comes from a place of several lines. Save the graph again.")
