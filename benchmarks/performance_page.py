"""Write the tables and plots of docs/performance.md from benchmarks/results/overlap.json.

Everything between the two markers of the page is replaced; the text around them is kept.

    python benchmarks/performance_page.py            the tables; plots, too, with matplotlib
    python benchmarks/performance_page.py --check    exit 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "overlap.json"
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "images"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
DBO = "mlp_shared_overlap"
# `threaded` is the rival, no schedule.
RIVAL = "threaded"
# Schedules of the tables, by their number of microbatches.
COLUMNS = {
    "One microbatch": ("unsplit", "single_batch_overlap", "single_batch_overlap_dispatch"),
    "Two microbatches": ("sequential", DBO, "vllm_high_throughput", RIVAL),
    "Three microbatches": ("sequential_3", "mlp_shared_overlap_3"),
}
PLOTTED = ("single_batch_overlap", DBO, "vllm_high_throughput", RIVAL)
PHASES = ("A", "MLP", "S", "D", "C")

Row = dict[str, Any]
Cell = float | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """What a table shows of every point.

    Attributes:
        head: Its title.
        value: Computes it; None where it was not measured.
        form: How a number is written.
        beside: It says nothing by itself: a point with no other value is left out.
    """

    head: str
    value: Callable[[Row], Cell]
    form: str = ".3f"
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Columns that belong together.

    Attributes:
        says: The line above it.
        columns: From left to right; those that no point has a value for are left out.
    """

    says: str
    columns: tuple[Column, ...]

    def text(self, rows: Sequence[Row]) -> str | None:
        """The table, or None if it were empty."""
        own = [c for c in self.columns if not c.beside]
        shown = [r for r in rows if any(c.value(r) is not None for c in own)]
        columns = [c for c in self.columns if any(c.value(r) is not None for r in shown)]
        if not shown:
            return None
        lines = [["point", *(c.head for c in columns)]]
        lines += [[r["key"], *(_cell(c.value(r), c.form) for c in columns)] for r in shown]
        head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
        return "\n".join([f"{self.says}\n", head, f"|{'---|' * (len(columns) + 1)}", *body])


def _cell(value: Cell, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:{form}}"


def _at(group: str, name: str, scale: float = 1.0) -> Callable[[Row], Cell]:
    """One value of a group of them, if the row has it."""

    def value(row: Row) -> Cell:
        found = row.get(group, {}).get(name)
        return None if found is None else found * scale

    return value


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _sustained_ratio(row: Row) -> Cell:
    ms = row.get("sustained_ms", {})
    return _ratio(ms.get("unsplit"), ms.get(DBO))


def _times(group: str) -> Table:
    unsplit = Column("unsplit", _at("ms", "unsplit"), beside=True)
    return Table(
        f"{group}: milliseconds of one step, replayed from a CUDA graph (median).",
        (
            *([] if "unsplit" in COLUMNS[group] else [unsplit]),
            *(Column(name, _at("ms", name)) for name in COLUMNS[group]),
        ),
    )


TABLES = (
    *map(_times, COLUMNS),
    Table(
        "What splitting gains (above 1: faster).",
        (
            Column("unsplit / DBO", lambda r: r["ratio"]),
            Column("best schedule", lambda r: r["best_schedule"]),
            Column("unsplit / best", lambda r: r["best_ratio"]),
            Column("threads / DBO", lambda r: _ratio(r["ms"].get(RIVAL), r["ms"].get(DBO))),
        ),
    ),
    Table(
        "What splitting costs, and how much of what DBO could hide it hides.",
        (
            Column("sequential / unsplit", lambda r: r["split_price"]),
            Column("sequential_3 / unsplit", lambda r: r["split_price_3"]),
            Column("bound of DBO, ms", _at("bound_ms", DBO)),
            Column("efficiency", lambda r: r["efficiency"], ".0%"),
        ),
    ),
    Table(
        "Where the price of two microbatches goes: sequential minus unsplit by phase, ms, each "
        "where nothing overlaps (A: attention, MLP: experts, S: shared expert, D: dispatch, "
        "C: combine).",
        (*(Column(name, _at("price_ms", name)) for name in (*PHASES, "others", "all")),),
    ),
    Table(
        "Milliseconds of one step in a row of them, without a rest in which the device cools down.",
        (
            *(
                Column(name, _at("sustained_ms", name))
                for name in ("unsplit", "sequential", DBO, RIVAL)
            ),
            Column("unsplit / DBO", _sustained_ratio),
        ),
    ),
    Table(
        "Not captured: milliseconds of host time until a step is enqueued, and of the whole step.",
        (
            Column("host: DBO", _at("host_us", DBO, 1e-3), ".2f"),
            Column("host: threads", _at("host_us", RIVAL, 1e-3), ".2f"),
            Column("eager unsplit, ms", _at("eager_ms", "unsplit"), ".2f"),
            Column("eager DBO, ms", _at("eager_ms", DBO), ".2f"),
            Column("eager threads, ms", _at("eager_ms", RIVAL), ".2f"),
        ),
    ),
)


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The points that were measured, with what follows from them; None where a schedule is missing.

    `best_unsplit_ms` is the fastest unsplit run of the same shape, size, link and routing over all
    transports, as far as they were measured in the same run. Where a copy of a token travels for
    each expert (`all_to_all`), or rows as float8, runs that move other bytes are not compared with.
    """
    rows = [dict(p) for p in results["points"] if "ms" in p]
    fastest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if "unsplit" in row["ms"]:
            case, ms = _case(row), row["ms"]["unsplit"]
            fastest[case] = min(fastest.get(case, ms), ms)
    for row in rows:
        ms, unsplit = row["ms"], fastest.get(_case(row))
        schedules = [n for n in ms if n not in ("unsplit", RIVAL)]
        best = min(schedules, key=ms.__getitem__, default=None)
        row["best_unsplit_ms"], row["best_schedule"] = unsplit, best
        row["ratio"] = _ratio(unsplit, ms.get(DBO))
        row["best_ratio"] = None if best is None else _ratio(unsplit, ms[best])
        row["split_price"] = _ratio(ms.get("sequential"), ms.get("unsplit"))
        row["split_price_3"] = _ratio(ms.get("sequential_3"), ms.get("unsplit"))
        row["efficiency"] = _efficiency(ms, row.get("bound_ms", {}))
        row["price_ms"] = _price_ms(row.get("phases_ms", {}))
    return rows


def _case(row: Row) -> tuple[Any, ...]:
    point = row["point"]
    names = ("shape", "tokens", "kind", "link", "routing", "experts", "capacity", "fp8")
    return (row["run"], *(point.get(name) or None for name in names))


def _efficiency(ms: dict[str, float], bound: dict[str, float]) -> float | None:
    if not {"sequential", DBO} <= ms.keys() or DBO not in bound:
        return None
    hideable = ms["sequential"] - bound[DBO]
    return (ms["sequential"] - ms[DBO]) / hideable if hideable > 0 else None


def _price_ms(phases: dict[str, dict[str, float]]) -> dict[str, float]:
    """Sequential minus unsplit by phase; empty where either was not measured."""
    if not {"sequential", "unsplit"} <= phases.keys():
        return {}
    two, one = phases["sequential"], phases["unsplit"]
    names = two.keys() | one.keys()
    found: defaultdict[str, float] = defaultdict(float)
    for name in sorted(names):
        more = two.get(name, 0.0) - one.get(name, 0.0)
        found[name if name in PHASES else "others"] += more
        found["all"] += more
    return dict(found)


def tables(results: dict[str, Any]) -> str:
    """The generated part of the page."""
    rows = rows_of(results)
    parts = []
    for index, run in enumerate(results["runs"]):
        mine = _sorted(row for row in rows if row["run"] == index)
        if not mine:
            continue
        versions = f"torch {run['torch']}" + (f", NCCL {run['nccl']}" if "nccl" in run else "")
        started = f", started {run['started']}" if "started" in run else ""
        parts += [
            f"### {run['device']}, {versions}, commit {run['commit']}",
            f"`{run['command']} --output FILE`{started}",
            *([run["note"]] if "note" in run else []),
            *filter(None, (table.text(mine) for table in TABLES)),
            *_doubts(mine),
        ]
    for name, curve in curves(results).items():
        parts.append(f"![{curve.title}](images/{name})")
    refused = [p for p in results["points"] if "ms" not in p]
    if refused:
        parts.append("Not measured:")
        parts.append("\n".join(f"* {p['key']}: {_reason(p)}" for p in refused))
    return "\n\n".join(parts)


def _doubts(rows: Sequence[Row]) -> list[str]:
    """Which schedules have no times and why, and which computed what they should not."""
    missing: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    wrong = []
    unsteady = [f"* {r['key']}: {', '.join(r['unsteady'])}" for r in rows if r.get("unsteady")]
    for row in rows:
        for name, text in row.get("refused", {}).items():
            missing[name, _last_line(text)].append(row["key"])
        names = [name for name, equal in row.get("equal", {}).items() if not equal]
        wrong += [f"* {row['key']}: {', '.join(names)}"] if names else []
    parts = []
    if missing:
        lines = [f"* {name}: {why} ({', '.join(at)})" for (name, why), at in missing.items()]
        parts += ["Schedules without times:", "\n".join(lines)]
    if unsteady:
        parts += ["Serial runs that differ from themselves, so that nothing can be compared:"]
        parts += ["\n".join(unsteady)]
    if wrong:
        parts += ["Not equal to what they must equal bit for bit:", "\n".join(wrong)]
    return parts


def _reason(point: Row) -> str:
    return _last_line(str(point.get("refused") or point.get("failed")))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:160]


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: (r["point"]["shape"], r["point"]["tokens"], r["key"]))


def page_with(text: str, generated: str) -> str:
    """The page with its generated part replaced.

    Raises:
        ValueError: The markers are missing.
    """
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"wanted {BEGIN} and {END} in the page")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"


@dataclass(frozen=True, slots=True)
class Curve:
    """One plot: points that differ in nothing but their size.

    Attributes:
        title: What they have in common.
        rows: At least two sizes, by size.
    """

    title: str
    rows: tuple[Row, ...]

    def line(self, name: str) -> list[tuple[int, float]]:
        """Tokens, and unsplit / schedule where both were measured."""
        ratios = [(r, _ratio(r["ms"].get("unsplit"), r["ms"].get(name))) for r in self.rows]
        return [(r["point"]["tokens"], ratio) for r, ratio in ratios if ratio is not None]


def curves(results: dict[str, Any]) -> dict[str, Curve]:
    """The plots by file name."""
    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in _sorted(rows_of(results)):
        run = results["runs"][row["run"]]
        # Runs of one commit may go on where another one stopped.
        same = [run.get(name, "") for name in ("commit", "device", "torch", "nccl")]
        groups[" ".join(same), *_parts(row)].append(row)
    found: dict[str, Curve] = {}
    for (_, *parts), rows in sorted(groups.items()):
        curve = Curve(", ".join(parts), tuple(rows))
        if max((len(curve.line(name)) for name in PLOTTED), default=0) < 2:
            continue
        stem = "_".join(["performance", *parts])
        others = sum(name.removesuffix(".svg").split("__")[0] == stem for name in found)
        if others:
            commit = results["runs"][rows[0]["run"]]["commit"]
            curve = Curve(f"{curve.title}, commit {commit}", curve.rows)
        found[f"{stem}{f'__{others + 1}' if others else ''}.svg"] = curve
    return found


def _parts(row: Row) -> tuple[str, ...]:
    """A point's key without its size: shape, link and transport, then what is not usual."""
    shape, kind, _, *rest = row["key"].split("/")
    return (shape, *rest, *([] if kind == "prefill" else [kind]))


def plot(results: dict[str, Any], folder: Path = PLOTS) -> list[Path]:
    """Draw every curve, and remove plots that are none any more. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dbo_fx"  # The same file every time.
    from matplotlib import pyplot

    written = []
    for file, curve in curves(results).items():
        figure, axes = pyplot.subplots(figsize=(6, 3.2))
        for name in PLOTTED:
            line = curve.line(name)
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(
            xscale="log", xlabel="tokens per rank", ylabel="unsplit / schedule (above 1: faster)"
        )
        axes.set_title(curve.title, fontsize=10)
        axes.legend(fontsize=7)
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / file, metadata={"Date": None})
        pyplot.close(figure)
        written.append(folder / file)
    for old in set(folder.glob("performance_*.svg")) - set(written):
        old.unlink()
    return written


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    old = PAGE.read_text()
    new = page_with(old, tables(results))
    if args.check:
        print("as the results say" if new == old else "docs/performance.md is out of date")
        return int(new != old)
    PAGE.write_text(new)
    try:
        print(*plot(results), sep="\n")
    except ImportError:
        print(
            "no matplotlib (pip install matplotlib): the plots are as they were",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
