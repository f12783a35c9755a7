"""Facts of a graph, from nodes as plain values in the form of graph files. No torch here.

Beside calls, the list of nodes may hold `{"op": "record", "event": 0, "stream": "comp"}` and the
same for `wait`; `graph_reader` makes these from the graphs that the passes work on.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dbo_fx.inspect.facts import CONSTANT, INPUT, OUTPUT, Facts, Item, Life, Place, pair_markers

Values = Mapping[str, Any]
_SYMBOL = re.compile(r"\b[su]\d+\b")


def facts_of_nodes(nodes: Iterable[Values], constants: Iterable[Values], source: str) -> Facts:
    """Read a graph.

    Args:
        nodes: In host order; see the module's docstring.
        constants: Tensors that `get_attr` nodes name, with their bytes.
        source: How the graph is called in the title.
    """
    reader = _Reader({str(c["name"]): _content(c) for c in constants})
    markers = []
    for at, node in enumerate(nodes):
        if node["op"] in ("record", "wait"):
            markers.append((node["op"] == "record", node["event"], node["stream"], at))
        else:
            reader.read(node, at)
    lives = tuple(reader.lives())
    return Facts(source, "graph", tuple(reader.items), tuple(pair_markers(markers)), lives)


def _content(constant: Values) -> str:
    """A constant's bytes as a short digest; nothing where it has none."""
    if "base64" not in constant:
        return ""
    return hashlib.sha256(base64.b64decode(constant["base64"])).hexdigest()[:12]


@dataclass
class _Reader:
    content: Mapping[str, str]
    items: list[Item] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    storages: list[dict[str, int | None]] = field(default_factory=list)
    born: list[tuple[int, str]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)

    def read(self, node: Values, at: int) -> None:
        op, value = node["op"], node.get("val")
        inputs: list[int] = []
        args = [self._text(a, inputs) for a in node["args"]]
        args += [f"{k}={self._text(v, inputs)}" for k, v in node["kwargs"].items()]
        path, text = node.get("module", ""), self._value(value)
        if op in ("placeholder", "get_attr"):
            what = INPUT if op == "placeholder" else CONSTANT
            path = str(node.get("input") or node["target"])
            text = f"{text} {self.content.get(node['target'], '')}".rstrip()
        else:
            what = OUTPUT if op == "output" else str(node["target"])
        tag = node.get("tag", {})
        stream = None if what in (INPUT, CONSTANT, OUTPUT) else tag.get("stream", "")
        place = Place(
            tag.get("role", ""),
            tag.get("phase", ""),
            tag.get("layer"),
            tag.get("microbatch"),
            tag.get("half", ""),
        )
        self._storages(what, value, inputs)
        self.index[node["name"]] = len(self.items)
        joined = ", ".join(args)
        self.items.append(
            Item(node["name"], what, at, place, joined, tuple(inputs), stream, text, path)
        )

    def _text(self, value: Any, inputs: list[int]) -> str:
        """An argument with `%` in place of nodes, which go to `inputs`."""
        match value:
            case str():
                inputs.append(self.index[value.removeprefix("%")])
                return "%"
            case list():
                return f"[{', '.join(self._text(v, inputs) for v in value)}]"
            case {"tuple": inner} | {"slice": inner} | {"dict": inner}:
                (kind,) = value
                inside = ", ".join(self._text(v, inputs) for v in inner)
                return f"({inside})" if kind == "tuple" else f"{kind}({inside})"
            case {"str": text}:
                return repr(text)
            case {"size": text}:
                return self._renamed(str(text))
            case dict():
                return ", ".join(str(v) for v in value.values())
        return repr(value)

    def _renamed(self, text: str) -> str:
        """Size symbols by their order of appearance: their numbers differ between processes."""
        return _SYMBOL.sub(
            lambda found: self.symbols.setdefault(found[0], f"s{len(self.symbols)}"), text
        )

    def _value(self, value: Any) -> str:
        match value:
            case None:
                return ""
            case {"tensor": dtype, "shape": shape, "stride": stride, "device": device}:
                sizes = [self._renamed(", ".join(map(str, x))) for x in (shape, stride)]
                return f"{dtype}[{sizes[0]}] strides [{sizes[1]}] {device}"
            case list():
                return f"[{'; '.join(map(self._value, value))}]"
            case {"tuple": inner}:
                return f"({'; '.join(map(self._value, inner))})"
            case {"size": text}:
                return self._renamed(str(text))
        return str(value)

    def _storages(self, what: str, value: Any, inputs: Iterable[int]) -> None:
        """Follow storages from a node to the nodes that take it; None is the caller's."""
        here, own = len(self.items), dict[str, int | None]()
        known: dict[str, set[int | None]] = {}
        for given in inputs:
            for storage, life in self.storages[given].items():
                known.setdefault(storage, set()).add(life)
        for index, storage in enumerate(_tensors(value)):
            if storage in own:
                continue
            # Copies for several microbatches share what tracing saw: what takes two of them, a
            # merge, is a view of neither.
            if len(known.get(storage, ())) == 1:
                (own[storage],) = known[storage]
            elif what in (INPUT, CONSTANT):
                own[storage] = None
            else:
                own[storage] = len(self.born)
                self.last[len(self.born)] = here
                self.born.append((here, str(index)))
        self.storages.append(own)
        used = {life for lives in known.values() for life in lives if life is not None}
        self.last |= dict.fromkeys(used, here)

    def lives(self) -> Iterator[Life]:
        """What the graph's own nodes create."""
        for life, (born, key) in enumerate(self.born):
            last = self.last[life]
            item = self.items[born]
            name = item.label if key == "0" else f"{item.label}, result {key}"
            yield Life(name, key, born, None if self.items[last].what == OUTPUT else last)


def _tensors(value: Any) -> Iterator[str]:
    """The storages of a value, in order."""
    match value:
        case {"storage": name}:
            yield str(name)
        case list():
            for item in value:
                yield from _tensors(item)
        case {"tuple": inner}:
            for item in inner:
                yield from _tensors(item)
