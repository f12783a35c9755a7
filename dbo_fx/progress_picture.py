"""One picture over the ranks' progress dumps: where each stands, and who waits for whom.

All ranks of a group issue the same program, so a rank's place is a pair: the call, and the position
in the program's order. Whoever waits in a communication waits for those that have not sent it.
No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbo_fx.progress import Progress, StreamProgress

_SEND, _RECV = ".send", ".recv"


@dataclass(frozen=True, slots=True)
class Front:
    """The first thing that a rank has not finished.

    Attributes:
        rank: The rank.
        call: The call it is in; the next one if it has finished all of the last.
        position: Index in the program's order; -1 before the call has begun.
        action: The action; None between two calls.
        running: Whether the action was started.
    """

    rank: int
    call: int
    position: int
    action: str | None
    running: bool

    @property
    def place(self) -> tuple[int, int]:
        """Comparable over the ranks of one program."""
        return self.call, self.position

    def __str__(self) -> str:
        """`is in A1_m0@3`."""
        if self.action is None:
            return f"has not begun call {self.call}"
        return f"{'is in' if self.running else 'stands before'} {self.action}"


def front_of(dump: Progress) -> Front:
    """Find where a rank stands.

    On CPU the host runs one action at a time, so that is the last one it started. On CUDA it is
    the unfinished action that was launched first.
    """
    seen: dict[str, int] = defaultdict(int)
    unfinished: list[tuple[int, str, bool]] = []
    for position, place in enumerate(dump.order):
        seen[place.stream] += 1
        if dump.call and seen[place.stream] > dump.finished[place.stream]:
            running = seen[place.stream] <= dump.started[place.stream]
            unfinished.append((position, place.action, running))
    if not unfinished:
        return Front(dump.rank, dump.call + 1, -1, None, False)
    begun = [found for found in unfinished if found[2]]
    chosen = begun[-1] if begun and dump.device == "cpu" else unfinished[0]
    return Front(dump.rank, dump.call, *chosen)


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that stand in one communication, and those that have not sent it."""

    action: str
    ranks: tuple[int, ...]
    behind: tuple[Front, ...]

    def __str__(self) -> str:
        """One line."""
        who = f"{_ranks(self.ranks)} {_verb(self.ranks, 'waits', 'wait')} in {self.action}"
        if not self.behind:
            return f"{who}, which no reported rank holds up"
        places: dict[str, list[int]] = defaultdict(list)
        for front in self.behind:
            places[str(front)].append(front.rank)
        parts = [
            f"for {_ranks(ranks)}, {_verb(ranks, 'which', 'each of which')} {place}"
            for place, ranks in places.items()
        ]
        return f"{who} {' and '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the dumps of one group say together.

    Attributes:
        programs: Ranks by program digest; the rest is empty if there is more than one.
        missing: Ranks of the group without a dump.
        fronts: Where each rank stands.
        waits: Who waits for whom.
    """

    programs: dict[str, tuple[int, ...]]
    missing: tuple[int, ...]
    fronts: tuple[Front, ...] = ()
    waits: tuple[Wait, ...] = ()

    @property
    def furthest_behind(self) -> tuple[Front, ...]:
        """The ranks that stand earliest; empty if all stand at the same place."""
        places = {front.place for front in self.fronts}
        return tuple(f for f in self.fronts if f.place == min(places)) if len(places) > 1 else ()

    def lines(self) -> list[str]:
        """One sentence each, the most important first."""
        found = []
        if len(self.programs) > 1:
            who = ", ".join(f"{_ranks(ranks)} {name}" for name, ranks in self.programs.items())
            found.append(
                f"the ranks run different programs ({who}): their communication does not pair up. "
                "Compare options, model and batch sizes, and the first error of each rank"
            )
        if behind := self.furthest_behind:
            ranks = tuple(f.rank for f in behind)
            verb = _verb(ranks, "is", "are")
            found.append(f"{_ranks(ranks)} {verb} furthest behind: {_each(behind[0], ranks)}")
        elif len(self.fronts) > 1:
            found.append(self._level())
        found += map(str, self.waits)
        if self.missing:
            total = len(self.missing) + sum(map(len, self.programs.values()))
            verb = _verb(self.missing, "it", "they")
            found.append(
                f"{_ranks(self.missing)} of {total} did not report: {verb} may have died, or "
                "hung outside the program. Look at the output of that rank first"
            )
        return found

    def _level(self) -> str:
        front = self.fronts[0]
        if front.action is None:
            return f"every reported rank has finished call {front.call - 1}: none hangs in here"
        text = f"every reported rank {front}"
        if _is_half(front.action) and not self.missing:
            return f"{text}: the communication itself does not end. Look at the network and library"
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "programs": {name: list(ranks) for name, ranks in self.programs.items()},
            "missing": list(self.missing),
            "furthest_behind": [_plain(f) for f in self.furthest_behind],
            "fronts": [_plain(f) for f in self.fronts],
            "waits": [
                {
                    "action": w.action,
                    "ranks": list(w.ranks),
                    "for": [f.rank for f in w.behind],
                }
                for w in self.waits
            ],
            "lines": self.lines(),
        }


def diagnose(dumps: Sequence[Progress]) -> Diagnosis:
    """Compare the dumps of one group."""
    programs: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        programs[dump.program] = (*programs.get(dump.program, ()), dump.rank)
    reported = {dump.rank for dump in dumps}
    missing = tuple(rank for rank in dumps[0].ranks if rank not in reported)
    if len(programs) > 1:
        return Diagnosis(programs, missing)
    fronts = tuple(map(front_of, dumps))
    return Diagnosis(programs, missing, fronts, _waits(fronts, dumps[0]))


def _waits(fronts: Sequence[Front], dump: Progress) -> tuple[Wait, ...]:
    first = {place.action: i for i, place in reversed(list(enumerate(dump.order)))}
    earliest = min(front.place for front in fronts)
    found: dict[tuple[str, tuple[Front, ...]], list[int]] = defaultdict(list)
    for front in fronts:
        if front.action is None or not _is_half(front.action):
            continue
        send = first[front.action.replace(_RECV, _SEND)]
        behind = tuple(f for f in fronts if f.place < front.place and f.place <= (front.call, send))
        # Whoever stands earliest has a line of its own already.
        if behind or (front.running and (front.place > earliest or len(fronts) == 1)):
            found[front.action, behind].append(front.rank)
    return tuple(Wait(action, tuple(ranks), behind) for (action, behind), ranks in found.items())


def picture(dumps: Sequence[Progress]) -> str:
    """The picture: a line per rank and stream, then the diagnosis; one such part per group.

    Args:
        dumps: Of any ranks, in order of rank.

    Returns:
        The text.
    """
    return "\n".join(_group_picture(group) for group in _by_group(dumps))


def picture_json(dumps: Sequence[Progress]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "kind": "progress picture",
        "groups": [
            {
                "ranks": list(group[0].ranks),
                "dumps": [dump.to_json() for dump in group],
                "diagnosis": diagnose(group).to_json(),
            }
            for group in _by_group(dumps)
        ],
    }


def _by_group(dumps: Sequence[Progress]) -> list[list[Progress]]:
    groups: dict[tuple[int, ...], list[Progress]] = defaultdict(list)
    for dump in dumps:
        groups[dump.ranks].append(dump)
    return list(groups.values())


def _group_picture(dumps: Sequence[Progress]) -> str:
    diagnosis = diagnose(dumps)
    names = ", ".join(f"{d.schedule} {d.program}" for d in {d.program: d for d in dumps}.values())
    rows = [("rank", "call", "stream", "finished", "last", "now")]
    for dump in dumps:
        for index, stream in enumerate(dump.streams):
            head = ("", "") if index else (str(dump.rank), str(dump.call))
            rows.append((*head, *_cells(stream)))
    rows += [(str(rank), "-", "-", "-", "-", "no dump") for rank in diagnosis.missing]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    reasons = [f"rank {d.rank}: {d.reason}{_since(d)}" for d in dumps]
    found = [f"* {line}" for line in diagnosis.lines()]
    title = f"{names}, {_ranks(dumps[0].ranks)}"
    return "\n".join([title, "", *table, "", *reasons, "", *found]) + "\n"


def _cells(stream: StreamProgress) -> tuple[str, str, str, str]:
    total = len(stream.actions)
    now = f"in {stream.running}" if stream.running else f"next {stream.next}"
    now = "done" if stream.finished == total else now
    return stream.stream, f"{stream.finished}/{total}", stream.last or "nothing", now


def _since(dump: Progress) -> str:
    since = dump.since_start_ms
    return "" if since is None else f", {since:.0f} ms after its host began a call"


def _plain(front: Front) -> dict[str, Any]:
    return {
        "rank": front.rank,
        "call": front.call,
        "action": front.action,
        "running": front.running,
    }


def _is_half(action: str) -> bool:
    return _SEND in action or _RECV in action


def _ranks(ranks: Sequence[int]) -> str:
    return f"{_verb(ranks, 'rank', 'ranks')} {', '.join(map(str, ranks))}"


def _each(front: Front, ranks: Sequence[int]) -> str:
    return str(front) if len(ranks) == 1 else f"each {front}"


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
