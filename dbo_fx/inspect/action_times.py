"""How long actions take: given by keys such as `A0`, `A0@3`, `D.send`; or one unit each.

A key is a phase, and behind it what narrows it down: `_m1` a microbatch, `.send` or `.recv` a half,
`@3` a layer. For each action the key that says most wins; of two that say equally much the layer
counts first, then the half, then the microbatch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from dbo_fx.errors import OptionError
from dbo_fx.inspect.measured import Measured, is_measured, measured_from_json
from dbo_fx.ir import Action, Phase, Program

_PHASES = "|".join(phase.value for phase in Phase)
_KEY = re.compile(rf"({_PHASES})(_m\d+)?(\.send|\.recv)?(@\d+)?")
_COMMUNICATION = {phase.value for phase in Phase if phase.is_communication}
# (layer, half, microbatch) named or not, the most telling first.
_NAMED = sorted(
    product((True, False), repeat=3),
    key=lambda named: (-sum(named), *map(int.__neg__, map(int, named))),
)
MERGE = "merge"


class ActionTimes:
    """Times by action."""

    def __init__(self, times: Mapping[str, float] | None) -> None:
        """Check the keys and the numbers.

        Raises:
            OptionError: A key is malformed or a time is no number from 0 up.
        """
        self.times = times
        for key, value in (times or {}).items():
            _check(key, value)

    def of_compute(self, action: Action) -> float:
        """The time of a compute action; 1 if there are no times."""
        return self._wanted(action, _keys(action))

    def of_transfer(self, action: Action, *, is_apart: bool) -> float:
        """The time of a communication's transfer; 1 if there are no times.

        Args:
            action: The send.
            is_apart: Whether the send's own operation is not the transfer; `.send` is then the time
                of that operation alone.
        """
        return self._wanted(
            action.communication, _keys(action.communication if is_apart else action)
        )

    def of_half(self, action: Action) -> float:
        """The time of a recv, or of a send whose transfer is apart; 0 unless a key names it."""
        keys = (key for key in _keys(action) if "." in key)
        return self._found(keys) or 0.0

    def of_merge(self) -> float:
        """The time of the merge; 0 unless it is given."""
        return self._found(iter([MERGE])) or 0.0

    def _wanted(self, action: Action, keys: Iterator[str]) -> float:
        if self.times is None:
            return 1.0
        found = self._found(keys)
        if found is None:
            raise OptionError(
                f"times: none for {action.bound()}; add {action.phase.value!r} for all of that "
                f"phase, or a key that says more, such as {action.bound()!r}"
            )
        return found

    def _found(self, keys: Iterator[str]) -> float | None:
        given = self.times or {}
        return next((float(given[key]) for key in keys if key in given), None)


def given_times(
    times: Mapping[str, float] | Measured | str | Path | None, program: Program
) -> Mapping[str, float] | None:
    """The times that are given for a program in any form.

    Args:
        times: A mapping, a measurement, or the path of a file with either.
        program: What they are for.

    Raises:
        OptionError: See `read_times`; or a measurement is of another program.
    """
    found = read_times(times) if isinstance(times, str | Path) else times
    return found.times_for(program) if isinstance(found, Measured) else found


def read_times(path: str | Path) -> dict[str, float] | Measured:
    """Read a JSON file: an object of numbers, in microseconds, or a saved measurement.

    Args:
        path: The file.

    Raises:
        OptionError: It cannot be read, is no such object, or a key or a number is malformed.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise OptionError(f"{path}: cannot be read ({reason}); check the path") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}: is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise OptionError(
            f'{path}: found {type(found).__name__}, wanted an object like {{"A0": 12}}'
        )
    if is_measured(found):
        return measured_from_json(found, str(path))
    for key, value in found.items():
        _check(key, value, f"{path}: ")
    return found


def _check(key: str, value: object, where: str = "") -> None:
    match = _KEY.fullmatch(key)
    wrong = match is None or (match[3] and match[1] not in _COMMUNICATION)
    if match is not None and match[4] and match[1] == Phase.TAIL.value:
        wrong = True
    if wrong and key != MERGE:
        raise OptionError(
            f"{where}times: unknown key {key!r}; wanted a phase, narrowed down or not: A0, A0@3, "
            "A0_m1@3, D, D.send, D_m0.send@3, TAIL_m1; or merge"
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise OptionError(f"{where}times: {key!r} is {value!r}; wanted microseconds, from 0 up")


def _keys(action: Action) -> Iterator[str]:
    """The keys that name an action, the most telling first."""
    parts = (
        "" if action.layer is None else f"@{action.layer}",
        "" if action.half is None else f".{action.half.value}",
        f"_m{action.microbatch}",
    )
    for named in _NAMED:
        layer, half, microbatch = (
            part if is_named else "" for part, is_named in zip(parts, named, strict=True)
        )
        yield f"{action.phase.value}{microbatch}{half}{layer}"
