"""Where a graph's inputs come from: weights of a module by qualified name, or arguments by name.

Dynamo names the source of every input: `L['self']._modules['gate']._parameters['weight']`,
`L['caches'][0]`, `L['x'].size()[0]`. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbo_fx.errors import GraphFileError

_ROOT = re.compile(r"[LG]\['(\w+)'\]")
_STEP = re.compile(r"\.(\w+)|\['([^']*)'\]|\[(-?\d+)\]")
_STORES = frozenset({"_modules", "_parameters", "_buffers"})
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class InputName:
    """One input's place.

    Attributes:
        root: A weight's module, or the argument that holds the value: `x`, `caches`.
        path: The way from there: attribute names, keys and indices.
        is_weight: Whether it belongs to a module.
    """

    root: str
    path: Path
    is_weight: bool

    @property
    def dotted(self) -> str:
        """`gate.weight`: what state dicts call it."""
        return ".".join(map(str, self.path))

    def __str__(self) -> str:
        """`self.gate.weight`, `caches.0`."""
        return ".".join([self.root, *map(str, self.path)])


def input_names(sources: Sequence[tuple[str, str | None]]) -> list[InputName | None]:
    """The place of every input.

    Args:
        sources: Name of each input, and the source that Dynamo gave for it.

    Returns:
        One place per input; None for the size of another input.

    Raises:
        GraphFileError: an input has a source that cannot be found again, or two different values
            have one name.
    """
    parsed = [_parsed(name, source) for name, source in sources]
    modules = {p[: _store(p)] for p in parsed if p is not None and _store(p) is not None}
    found = [None if p is None else _named(p, modules) for p in parsed]
    taken: dict[InputName, str] = {}
    for place, (name, _) in zip(found, sources, strict=True):
        if place is not None and taken.setdefault(place, name) != name:
            raise GraphFileError(
                f"inputs {taken[place]} and {name} are both called {place}. Rename one argument."
            )
    return found


def _parsed(name: str, source: str | None) -> Path | None:
    """The steps from the root on, with the root's name first."""
    text = source or ""
    if text.endswith("]") and ".size()[" in text:
        return None
    root = _ROOT.match(text)
    position = 0 if root is None else root.end()
    steps: list[str | int] = [] if root is None else [root[1]]
    while position < len(text) and (step := _STEP.match(text, position)) is not None:
        steps.append(int(step[3]) if step[3] is not None else step[1] or step[2])
        position = step.end()
    if root is None or position < len(text):
        raise GraphFileError(
            f"input {name} comes from {source or 'nowhere that is known'}, which another process "
            "cannot find again. Pass it as an argument of forward, or keep it in a module."
        )
    return tuple(steps)


def _store(path: Path) -> int | None:
    """Where a path first enters a module's tables."""
    return next((i for i, step in enumerate(path) if step in _STORES), None)


def _named(path: Path, modules: set[Path]) -> InputName:
    owner = next((m for m in modules if path[: len(m)] == m), None)
    if owner is None:
        return InputName(str(path[0]), path[1:], False)
    inner = tuple(step for step in path[len(owner) :] if step not in _STORES)
    return InputName(str(owner[-1]), inner, True)


def follow(value: Any, path: Path) -> Any:
    """The value at the end of a path.

    Raises:
        LookupError: a step leads nowhere.
        AttributeError: likewise.
    """
    for step in path:
        if isinstance(step, int) and not hasattr(value, str(step)):
            value = value[step]
        elif hasattr(value, str(step)):
            value = getattr(value, str(step))
        else:
            value = value[step]
    return value
