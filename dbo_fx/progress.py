"""How far a rank is in a program, per stream: the counters' plan, a snapshot, and its JSON form.

A stream's actions finish in order, so one number says where it stands: how many have finished. A
segment that holds several actions counts as its last one. No torch: dumps are read elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo_fx.errors import ProgressError

VERSION = 1
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Place:
    """One counted action: `comp A1_m0@3`."""

    stream: str
    action: str

    def __str__(self) -> str:
        """The form in dumps."""
        return f"{self.stream} {self.action}"


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """One stream of one rank.

    Attributes:
        stream: Its name.
        actions: What it runs in a call, in order.
        finished: How many of them have finished.
        started: How many the host has begun; on CUDA, has launched, which graph replay skips.
    """

    stream: str
    actions: tuple[str, ...]
    finished: int
    started: int

    @property
    def last(self) -> str | None:
        """The last finished action."""
        return self.actions[self.finished - 1] if self.finished else None

    @property
    def running(self) -> str | None:
        """The action that was started and has not finished; on CUDA it may wait for an event."""
        return self.actions[self.finished] if self.started > self.finished else None

    @property
    def next(self) -> str | None:
        """The action behind the running one, or behind the last finished one."""
        at = self.finished + (self.running is not None)
        return self.actions[at] if at < len(self.actions) else None

    def __str__(self) -> str:
        """`comm finished C_m0.send@3, next D_m1.send@4`."""
        if self.finished == len(self.actions):
            return f"{self.stream} finished all {self.finished}"
        where = f"in {self.running}" if self.running else f"next {self.next}"
        return f"{self.stream} finished {self.last or 'nothing'}, {where}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where one rank stands in one program.

    Attributes:
        rank: Its rank in the whole job.
        ranks: The ranks of the group that the program communicates over.
        program: The program's digest.
        schedule: The schedule's name.
        device: `cpu`: the host itself runs the actions; `cuda`: it launches them.
        call: How many calls have begun, replays of a CUDA graph among them.
        order: The counted actions in the order in which the host starts them.
        finished: Finished actions by stream.
        started: Started actions by stream.
        reason: Why this was taken.
        since_start_ms: Time since the host began the last call; None before the first.
    """

    rank: int
    ranks: tuple[int, ...]
    program: str
    schedule: str
    device: str
    call: int
    order: tuple[Place, ...]
    finished: Mapping[str, int]
    started: Mapping[str, int]
    reason: str
    since_start_ms: float | None

    @property
    def streams(self) -> tuple[StreamProgress, ...]:
        """One entry per stream, in order of first use."""
        names = dict.fromkeys(place.stream for place in self.order)
        return tuple(
            StreamProgress(
                name,
                tuple(p.action for p in self.order if p.stream == name),
                self.finished[name],
                self.started[name],
            )
            for name in names
        )

    def __str__(self) -> str:
        """`rank 1, call 7: comp finished A1_m0@3, in D_m0.recv@3; comm finished ...`."""
        if self.call == 0:
            return f"rank {self.rank}: no call has begun"
        return f"rank {self.rank}, call {self.call}: {'; '.join(map(str, self.streams))}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; `parse_progress` reads their text back."""
        return {
            "kind": "progress",
            "version": VERSION,
            "rank": self.rank,
            "ranks": list(self.ranks),
            "world_size": len(self.ranks),
            "program": self.program,
            "schedule": self.schedule,
            "device": self.device,
            "reason": self.reason,
            "call": self.call,
            "since_start_ms": self.since_start_ms,
            "streams": [
                {
                    "stream": s.stream,
                    "finished": s.finished,
                    "started": s.started,
                    "total": len(s.actions),
                    "last": s.last,
                    "running": s.running,
                    "next": s.next,
                }
                for s in self.streams
            ],
            "order": list(map(str, self.order)),
        }

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write `progress_rankR.json`; a reader never sees half of it.

        Returns:
            The file.
        """
        target = Path(folder) / f"progress_rank{self.rank}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        part.replace(target)
        return target


def parse_progress(text: str, source: str = "progress dump") -> Progress:
    """Read a dump.

    Args:
        text: The JSON text.
        source: What to call it in errors, usually its path.

    Returns:
        The snapshot.

    Raises:
        ProgressError: This is no dump, one of another version, or its parts disagree.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(source, f"is no JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("kind") != "progress":
        raise _bad(source, 'is JSON, but no progress dump (no "kind": "progress")')
    if raw.get("version") != VERSION:
        raise _bad(source, f"has version {raw.get('version')!r}, this dbo_fx reads {VERSION}")
    try:
        progress = _from_json(raw)
        again = progress.to_json()
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise _bad(source, f"is damaged ({what})") from error
    for key, value in again.items():
        if raw.get(key) != value:
            raise _bad(source, f"is damaged: {key} does not fit the other values")
    return progress


def read_progress(paths: Sequence[str | os.PathLike[str]]) -> list[Progress]:
    """Read dumps, sorted by rank.

    Args:
        paths: Files, and folders that hold `progress_rankR.json` files.

    Raises:
        ProgressError: A file cannot be read, a folder holds no dump, or a rank comes twice.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("progress_rank*.json")) if path.is_dir() else [path]
        if not found:
            raise _bad(path, "is a folder without progress_rank*.json files")
        files += found
    dumps: dict[int, Progress] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _bad(file, f"cannot be read ({error})") from error
        dump = parse_progress(text, str(file))
        if dump.rank in dumps:
            raise _bad(file, f"is a second dump of rank {dump.rank}; pass one per rank")
        dumps[dump.rank] = dump
    return [dumps[rank] for rank in sorted(dumps)]


def _from_json(raw: Mapping[str, Any]) -> Progress:
    order = tuple(Place(*text.split(" ")) for text in raw["order"])
    rows = {row["stream"]: row for row in raw["streams"]}
    finished = {name: int(row["finished"]) for name, row in rows.items()}
    started = {name: int(row["started"]) for name, row in rows.items()}
    for name, row in rows.items():
        if not all(0 <= n[name] <= row["total"] for n in (finished, started)):
            raise ValueError(f"stream {name} counts outside 0..{row['total']}")
    if raw["device"] not in DEVICES:
        raise ValueError(f"device {raw['device']!r}")
    if raw["rank"] not in raw["ranks"]:
        raise ValueError(f"rank {raw['rank']!r} is none of the group's {raw['ranks']}")
    actions = {place.action for place in order}
    for action in sorted(actions):
        if ".recv" in action and action.replace(".recv", ".send") not in actions:
            raise ValueError(f"{action} has no send")
    since = raw["since_start_ms"]
    return Progress(
        rank=int(raw["rank"]),
        ranks=tuple(map(int, raw["ranks"])),
        program=str(raw["program"]),
        schedule=str(raw["schedule"]),
        device=raw["device"],
        call=int(raw["call"]),
        order=order,
        finished=finished,
        started=started,
        reason=str(raw["reason"]),
        since_start_ms=None if since is None else float(since),
    )


def _bad(source: object, what: str) -> ProgressError:
    return ProgressError(
        f"{source} {what}. Pass progress_rankR.json files that dbo_fx wrote, or their folder."
    )
