"""Captured graphs as files: `save_graph` writes one, `load_graph` brings it back.

The file is JSON with one node a line, in an order that does not depend on the process. It needs no
model, no device, no Dynamo and no process group to load: fake tensors are made anew, with the same
sizes, storages, ranges and guards. `dbo_fx/graph_facts.py` reads it without torch.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

import dbo_fx.comm  # noqa: F401 (registers torch.ops.dbo_fx)
from dbo_fx.capture import SOURCE, CapturedGraph, TokenInput, source_of, value_of
from dbo_fx.errors import GraphFileError, OptionError
from dbo_fx.graph_codec import Decoder, Encoder, encode, named, target_of, target_text
from dbo_fx.graph_facts import FORMAT, SUFFIX, Facts, is_graph_file, read_graph_facts
from dbo_fx.graph_places import restore_place, saved_place
from dbo_fx.size_text import parse_size, size_text
from dbo_fx.symbols import SymbolFacts, free_symbols, rebuilt_mode, size_rules, symbol_facts

__all__ = ["graph_constants", "is_graph_file", "load_graph", "read_graph_facts", "save_graph"]


def save_graph(captured: CapturedGraph, path: str | os.PathLike[str]) -> Path:
    """Write a captured graph as text.

    Values of constants are in the file; weights and other inputs are not.

    Args:
        captured: What `dbo_fx.trace` returned, or `compiled.captured` (with phases, then).
        path: Where to; the name ends in `.dbograph.json`.

    Returns:
        The file.

    Raises:
        OptionError: the path has another suffix, or cannot be written.
        GraphFileError: the graph has something that a file cannot hold; the message names it.
    """
    target = Path(path)
    if not is_graph_file(target):
        raise OptionError(f"save_graph: {target} must end in {SUFFIX}.")
    text = graph_text(captured)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise OptionError(f"save_graph: {target} cannot be written: {error}") from error
    return target


def load_graph(
    path: str | os.PathLike[str], *, device: str | torch.device | None = None
) -> CapturedGraph:
    """Read a captured graph back; passes and `dbo_fx.compile_graph` take it like a traced one.

    Args:
        path: What `save_graph` wrote.
        device: Put what lay on the tokens' device on this one instead. None keeps devices as they
            were: a graph of CUDA tensors loads without a GPU, too.

    Raises:
        GraphFileError: the file is none of this version or damaged, or an op in it is not
            registered in this process (the message names it).
    """
    return graph_from_facts(read_graph_facts(path), os.fspath(path), device)


def graph_constants(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The constants of a graph, for the Python files of a dump.

    Args:
        path: A graph file, or a file that has `captured.dbograph.json` beside it.

    Raises:
        GraphFileError: see `load_graph`.
    """
    file = Path(path) if is_graph_file(path) else Path(path).with_name(f"captured{SUFFIX}")
    return {
        item["name"]: _constant(item, torch.device) for item in read_graph_facts(file)["constants"]
    }


# Writing.


def graph_text(captured: CapturedGraph) -> str:
    """The text of a graph file.

    Raises:
        GraphFileError: see `save_graph`.
    """
    head = {
        "format": FORMAT,
        "symbol": captured.symbol.name,
        "token_inputs": [[t.name, t.index, t.dim] for t in captured.token_inputs],
    }
    lists: dict[str, list[Any]] = {
        "symbols": list(_symbols(captured)),
        "guards": [size_text(g.expr) for g in _environment(captured).guards],
        "constants": list(_constants(captured)),
        "nodes": list(_nodes(captured.graph)),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    for key, items in lists.items():
        inner = ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in items)
        end = "" if key == "nodes" else ","
        lines.append(f" {json.dumps(key)}: [\n{inner}\n ]{end}" if items else f' "{key}": []{end}')
    return "{\n" + "\n".join(lines) + "\n}\n"


def _environment(captured: CapturedGraph) -> Any:
    environment = captured.fake_mode.shape_env
    assert environment is not None, "a captured graph has sizes"
    return environment


def _symbols(captured: CapturedGraph) -> Iterator[list[Any]]:
    """Name, assumption, range and hint of every symbol that the graph or a guard names."""
    environment = _environment(captured)
    used = {captured.symbol}
    for node in captured.graph.nodes:
        used |= free_symbols(value_of(node))
    for guard in environment.guards:
        used |= guard.expr.free_symbols
    for symbol in sorted(used, key=str):
        facts = symbol_facts(environment, symbol)
        if facts is None:
            raise GraphFileError(
                f"size symbol {symbol} is of an unknown kind: {symbol.assumptions0}"
            )
        yield [facts.name, facts.assumes, facts.lower, facts.upper, facts.hint]


def _constants(captured: CapturedGraph) -> Iterator[dict[str, Any]]:
    names = {str(n.target): n for n in captured.graph.nodes if n.op == "get_attr"}
    for name in sorted(names):
        tensor = getattr(captured.module, name, None)
        if not isinstance(tensor, torch.Tensor):
            raise GraphFileError(
                f"{names[name].name} is a {type(tensor).__name__}; graph files hold tensors only."
            )
        facts: dict[str, Any] = {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "device": str(tensor.device),
        }
        if not tensor.is_meta:
            plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            facts["base64"] = base64.b64encode(bytes(plain.tolist())).decode()
        yield facts


def _nodes(graph: Graph) -> Iterator[Facts]:
    encoder = Encoder()
    for node in graph.nodes:
        facts: Facts = {
            "name": node.name,
            "op": node.op,
            "target": target_text(node.target, node.name),
            "args": [encode(a, node.name) for a in node.args] if node.op != "placeholder" else [],
            "kwargs": {k: encode(v, node.name) for k, v in sorted(node.kwargs.items())},
        }
        value = value_of(node)
        if value is not None:
            facts["val"] = encoder.value(value, node.name)
        facts |= saved_place(node)
        source = source_of(node)
        yield facts if source is None else {**facts, "input": source}


# Reading.

# What torch and this module raise for values that no graph has.
_DAMAGE = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, SyntaxError,
    AssertionError,
)  # fmt: skip


def graph_from_facts(
    facts: Facts, where: str, device: str | torch.device | None = None
) -> CapturedGraph:
    """A captured graph from what `read_graph_facts` returned.

    Raises:
        GraphFileError: see `load_graph`.
    """
    try:
        return _loaded(facts, where, device)
    except _DAMAGE as error:
        if isinstance(error, GraphFileError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise GraphFileError(f"{where} is damaged ({what}). Save the graph again.") from error


def _loaded(facts: Facts, where: str, device: str | torch.device | None) -> CapturedGraph:
    symbols = [SymbolFacts(*item) for item in facts["symbols"]]
    if odd := [s.name for s in symbols if not s.name.isidentifier()]:
        raise GraphFileError(f"{where}: {odd[0]!r} is no name of a size. Save the graph again.")
    by_name = {s.name: s.symbol for s in symbols}
    guards = [parse_size(text, by_name) for text in facts["guards"]]
    mode, size = rebuilt_mode(symbols, guards)
    tokens = tuple(TokenInput(*item) for item in facts["token_inputs"])
    decoder = Decoder(mode, by_name, size, _devices(facts, tokens[0].index, device))
    root = {item["name"]: _constant(item, decoder.devices) for item in facts["constants"]}
    module = GraphModule(root, _graph(facts["nodes"], decoder, where))
    module.graph.lint()
    module.recompile()
    assert mode.shape_env is not None
    symbol: sympy.Symbol = by_name[facts["symbol"]]
    return CapturedGraph(
        module=module,
        dynamo=None,
        symbol=symbol,
        rules=size_rules(mode.shape_env, symbol),
        token_inputs=tokens,
        fake_mode=mode,
    )


def _devices(
    facts: Facts, token: int, device: str | torch.device | None
) -> Callable[[str], torch.device]:
    """Stored devices to the ones to use."""
    inputs = [n for n in facts["nodes"] if n["op"] == "placeholder"]
    stored = torch.device(inputs[token]["val"]["device"])
    wanted = None if device is None else torch.device(device)

    def chosen(text: str) -> torch.device:
        found = torch.device(text)
        return wanted if wanted is not None and found.type == stored.type else found

    return chosen


def _constant(facts: Mapping[str, Any], devices: Callable[[str], torch.device]) -> torch.Tensor:
    """A constant's real values; without its device here they stay on the CPU."""
    dtype, device = named("dtype", facts["dtype"]), devices(facts["device"])
    if "base64" not in facts:
        device = torch.device("meta")
    elif device.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")
    result = torch.empty_strided(facts["shape"], facts["stride"], dtype=dtype, device=device)
    if "base64" in facts and result.numel():
        data = bytearray(base64.b64decode(facts["base64"]))
        result.copy_(torch.frombuffer(data, dtype=dtype).view(facts["shape"]))
    return result


def _graph(nodes: list[Facts], decoder: Decoder, where: str) -> Graph:
    graph = Graph()
    for facts in nodes:
        name, op = facts["name"], facts["op"]
        place = f"{where}: node {name}"
        target = target_of(facts["target"], place) if op == "call_function" else facts["target"]
        args = tuple(decoder.argument(a) for a in facts["args"])
        kwargs = {k: decoder.argument(v) for k, v in facts["kwargs"].items()}
        node: Node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise GraphFileError(f"{place}: torch.fx calls it {node.name}. Save the graph again.")
        if "val" in facts:
            node.meta["val"] = decoder.argument(facts["val"])
        restore_place(node, facts)
        if op == "placeholder":
            node.meta[SOURCE] = facts.get("input")
        decoder.nodes[name] = node
    return graph
