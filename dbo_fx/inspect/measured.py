"""When every action of a program ran on a device: the values, their file, and what follows.

No torch: a measurement is read, shown and simulated elsewhere. `dbo_fx.measuring` takes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dbo_fx.contracts import contract
from dbo_fx.errors import OptionError
from dbo_fx.ir import Action, Half, Program, Run, parse_program

FORMAT = "dbo_fx measured 1"
MERGE = "merge"


@dataclass(frozen=True, slots=True)
class Stamp:
    """One stretch of one action on its stream; an action that others cut has several.

    Attributes:
        name: `A1_m0@3`, which stands for the `A0` in front too where one segment holds both;
            `merge`; `shared` for what belongs to no microbatch.
        stream: Where it ran.
        start_us: When it started, from the start of the call; the median over the replays.
        stop_us: When it stopped, likewise.
        duration_us: How long it took; the median of the differences.
    """

    name: str
    stream: str
    start_us: float
    stop_us: float
    duration_us: float


@dataclass(frozen=True)
class Measured:
    """A program with the times of its actions.

    Attributes:
        program: What ran.
        stamps: When, in host order.
        total_us: The program without stamps, from its start to its end; the median.
        stamped_us: The same with stamps. The difference is what stamping costs.
        replays: How many runs the medians are over.
        mode: `graph` or `eager`.
        device: Name of the device.
        torch: Version of torch.
        tokens: Size of the whole batch along the dim that is split.
    """

    program: Program
    stamps: tuple[Stamp, ...]
    total_us: float
    stamped_us: float
    replays: int
    mode: str
    device: str
    torch: str
    tokens: int

    @property
    def overhead(self) -> float:
        """What stamping costs, as a share of the time without."""
        return self.stamped_us / self.total_us - 1 if self.total_us else 0.0

    @property
    def times(self) -> dict[str, float]:
        """Microseconds by action, as `simulate` and `timeline` take them; every action has a key.

        An action in another's segment takes 0: the time of `A0` is in `A1` unless the schedule
        cuts between them. Where the send's operation is the transfer, it is the key of the send. A
        transfer that `recv` completes lasts until the recv is over, so it is right if nothing ran
        between the halves, as in a `sequential` program, and too long otherwise.
        """
        return dict(self._times())

    def _times(self) -> Iterator[tuple[str, float]]:
        spent: defaultdict[str, float] = defaultdict(float)
        starts: dict[str, float] = {}
        stops: dict[str, float] = {}
        for stamp in self.stamps:
            spent[stamp.name] += stamp.duration_us
            starts.setdefault(stamp.name, stamp.start_us)
            stops[stamp.name] = stamp.stop_us
        recv_is = contract(self.program.transport).recv_is
        for action in dict.fromkeys(self.program.actions):
            name = action.bound()
            if action.half is None or recv_is == "event":
                yield name, spent[name]
                continue
            send, recv = (replace(action, half=half).bound() for half in (Half.SEND, Half.RECV))
            whole = action.communication.bound()
            if action.half is Half.RECV:
                yield name, 0.0
            elif recv_is == "host":
                yield name, _from_to(starts, send, stops, recv)
            else:
                yield name, spent[name]
                yield whole, _from_to(stops, send, stops, recv)
        yield MERGE, spent[MERGE]

    def times_for(self, program: Program) -> dict[str, float]:
        """Its action times for another program of the same model, batch and transport.

        What a `sequential` program measures, without overlap, bounds what another schedule can
        reach: `simulate(program, sequential.times_for(program)).total_us`.

        Args:
            program: With as many layers and microbatches.

        Raises:
            OptionError: The programs do not have the same actions: their times cannot be compared.
        """
        mine = self.program
        for what in ("layers", "microbatches", "transport"):
            found, wanted = getattr(mine, what), getattr(program, what)
            if found != wanted:
                raise OptionError(
                    f"measured {mine.schedule} with {what} {found}; {program.schedule} has {wanted}"
                    ". Measure a program of the same model, split and transport, such as the "
                    "sequential one"
                )
        missing = {a.bound() for a in program.actions} - {a.bound() for a in mine.actions}
        if missing:
            raise OptionError(
                f"measured {mine.schedule} has no {', '.join(sorted(missing)[:4])}, which "
                f"{program.schedule} runs; measure a program of the same model"
            )
        return self.times

    def to_json(self) -> dict[str, Any]:
        """Plain values; `measured_from_json` reads them back."""
        about = {key: getattr(self, key) for key in _PLAIN}
        return {
            "format": FORMAT,
            "schedule": self.program.schedule,
            **about,
            "times": self.times,
            "stamps": [asdict(stamp) for stamp in self.stamps],
            "program": str(self.program).splitlines(),
        }

    def save(self, path: str | Path) -> Path:
        """Write it as JSON: `dbo-fx show NAME --times FILE` takes the file.

        Raises:
            OptionError: The file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"{path}: cannot be written ({error.strerror}); check the path"
            ) from error
        return Path(path)

    def __str__(self) -> str:
        """The totals, then a line for each kind of action."""
        where = "in a CUDA graph" if self.mode == "graph" else "eager"
        lines = [
            f"{self.program.schedule}, {self.program.transport}, {self.tokens} rows, {where} on "
            f"{self.device}, torch {self.torch}, medians of {self.replays}",
            f"  total {self.total_us:.1f} us; with stamps {self.stamped_us:.1f} us "
            f"({self.overhead:+.1%})",
        ]
        by_kind: defaultdict[str, list[float]] = defaultdict(list)
        for stamp in self.stamps:
            by_kind[stamp.name.partition("@")[0]].append(stamp.duration_us)
        for kind, found in by_kind.items():
            lines.append(
                f"  {kind}: {fmean(found):.1f} us on average, {min(found):.1f} to {max(found):.1f}"
            )
        return "\n".join(lines)


_PLAIN = ("total_us", "stamped_us", "replays", "mode", "device", "torch", "tokens")


def _from_to(begins: Mapping[str, float], begin: str, ends: Mapping[str, float], end: str) -> float:
    return max(0.0, ends.get(end, 0.0) - begins.get(begin, 0.0))


def read_measured(path: str | Path) -> Measured:
    """Read what `Measured.save` wrote.

    Args:
        path: The file.

    Raises:
        OptionError: It cannot be read, or holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no JSON"
        raise OptionError(f"{path}: cannot be read ({reason}); check the path") from error
    return measured_from_json(found, str(path))


def measured_from_json(found: Any, where: str) -> Measured:
    """The measurement in the values of its file.

    Args:
        found: What `json.loads` made of the file.
        where: What to call it in errors.

    Raises:
        OptionError: The values are not what `to_json` writes.
    """
    if not is_measured(found):
        raise OptionError(f"{where}: is no measurement; wanted a file of compiled.measure().save()")
    try:
        program = parse_program("\n".join(found["program"]), where)
        stamps = tuple(Stamp(**stamp) for stamp in found["stamps"])
        return Measured(program, stamps, **{key: found[key] for key in _PLAIN})
    except (KeyError, TypeError) as error:
        raise OptionError(f"{where}: is damaged ({error!r}); measure again") from error


def is_measured(found: Any) -> bool:
    """Whether the values of a JSON file are a measurement."""
    return isinstance(found, dict) and found.get("format") == FORMAT


def stamped_actions(stamps: Iterable[Stamp], program: Program) -> list[Action | None]:
    """The action of every stamp; None for what belongs to none."""
    known = {a.bound(): a for step in program.steps if isinstance(step, Run) for a in [step.action]}
    return [known.get(stamp.name) for stamp in stamps]


def median_stamps(
    places: Sequence[tuple[str, str]], runs: Sequence[Sequence[tuple[float, float]]]
) -> tuple[Stamp, ...]:
    """The medians over runs.

    Args:
        places: Stream and name of every stamp.
        runs: Start and stop of every stamp, for every run.
    """
    stamps = []
    for index, (stream, name) in enumerate(places):
        spans = [run[index] for run in runs]
        start, stop = median(s for s, _ in spans), median(e for _, e in spans)
        stamps.append(Stamp(name, stream, start, stop, median(e - s for s, e in spans)))
    return tuple(stamps)
