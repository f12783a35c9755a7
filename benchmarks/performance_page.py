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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "overlap.json"
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "images"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
# Schedules of the tables; `threaded` is the rival.
COLUMNS = (
    "unsplit",
    "single_batch_overlap",
    "sequential",
    "mlp_shared_overlap",
    "vllm_high_throughput",
    "mlp_shared_overlap_3",
    "threaded",
)
UNSPLIT = ("unsplit", "single_batch_overlap")
DBO = "mlp_shared_overlap"


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The points that were measured, with what follows from them.

    `best_unsplit_ms` is the fastest unsplit run of the same shape, size, link and routing over all
    transports, as far as they were measured in the same run. Where a copy of a token travels for
    each expert (`all_to_all`), runs that move fewer bytes are not compared with.
    """
    rows = [dict(p) for p in results["points"] if "ms" in p]
    fastest: defaultdict[tuple[Any, ...], float] = defaultdict(lambda: float("inf"))
    for row in rows:
        case = _case(row)
        fastest[case] = min(fastest[case], row["ms"]["unsplit"])
    for row in rows:
        ms, bound = row["ms"], row.get("bound_ms", {})
        row["best_unsplit_ms"] = fastest[_case(row)]
        row["ratio"] = row["best_unsplit_ms"] / ms[DBO]
        row["best_schedule"] = min((n for n in ms if n not in ("unsplit", "threaded")), key=ms.get)
        row["best_ratio"] = row["best_unsplit_ms"] / ms[row["best_schedule"]]
        row["split_price"] = ms["sequential"] / ms["unsplit"]
        hideable = ms["sequential"] - bound[DBO] if DBO in bound else 0.0
        row["efficiency"] = (ms["sequential"] - ms[DBO]) / hideable if hideable > 0 else None
    return rows


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    point = row["point"]
    names = ("shape", "tokens", "kind", "link", "routing", "experts", "capacity")
    return (row["run"], *(point[name] for name in names))


def tables(results: dict[str, Any]) -> str:
    """The generated part of the page."""
    rows = rows_of(results)
    parts = []
    for index, run in enumerate(results["runs"]):
        mine = [row for row in rows if row["run"] == index]
        if not mine:
            continue
        versions = f"torch {run['torch']}" + (f", NCCL {run['nccl']}" if "nccl" in run else "")
        parts += [
            f"### {run['device']}, {versions}, commit {run['commit']}",
            f"`{run['command']} --output FILE`",
            _times(mine),
            _ratios(mine),
        ]
    for shape, link, transport in curves(results):
        name = _plot_name(shape, link, transport)
        parts.append(f"![{shape}, {link}, {transport}](images/{name})")
    refused = [p for p in results["points"] if "ms" not in p]
    if refused:
        parts.append("Not measured:")
        parts.append("\n".join(f"* {p['key']}: {_reason(p)}" for p in refused))
    return "\n\n".join(parts)


def _reason(point: dict[str, Any]) -> str:
    text = str(point.get("refused") or point.get("failed"))
    return text.strip().splitlines()[-1][:160]


def _times(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("point", *(f"{name}" for name in COLUMNS))
    body = [
        (row["key"], *(_number(row["ms"].get(name), 3) for name in COLUMNS))
        for row in _sorted(rows)
    ]
    return "Milliseconds of one step, replayed from a CUDA graph (median):\n\n" + _table(
        heads, body
    )


def _ratios(rows: Sequence[dict[str, Any]]) -> str:
    heads = (
        "point",
        "unsplit / DBO",
        "best schedule",
        "unsplit / best",
        "sequential / unsplit",
        "bound of DBO, ms",
        "efficiency",
        "DBO vs threads",
        "host eager: DBO, threads (ms)",
    )
    body = []
    for row in _sorted(rows):
        ms, host = row["ms"], row["host_us"]
        efficiency = row["efficiency"]
        body.append(
            (
                row["key"],
                _number(row["ratio"], 3),
                row["best_schedule"],
                _number(row["best_ratio"], 3),
                _number(row["split_price"], 3),
                _number(row.get("bound_ms", {}).get(DBO), 3),
                "-" if efficiency is None else f"{efficiency:.0%}",
                _number(ms["threaded"] / ms[DBO], 3) if "threaded" in ms else "-",
                f"{host[DBO] / 1e3:.2f}, {host['threaded'] / 1e3:.2f}"
                if "threaded" in host
                else "-",
            )
        )
    return "What follows from them:\n\n" + _table(heads, body)


def _sorted(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["point"]["shape"], r["point"]["tokens"], r["key"]))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in body)])


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


def curves(results: dict[str, Any]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """The rows of every plot, by shape, link and transport: those with several sizes."""
    groups: defaultdict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(results):
        point = row["point"]
        if point["routing"] == "uniform" and point["experts"] == "all_gather":
            groups[point["shape"], point["link"], point["transport"]].append(row)
    return {
        key: rows
        for key, rows in sorted(groups.items())
        if len({row["point"]["tokens"] for row in rows}) > 1
    }


def _plot_name(shape: str, link: str, transport: str) -> str:
    return f"performance_{shape}_{link}_{transport}.svg"


def plot(results: dict[str, Any]) -> list[Path]:
    """One plot for each shape and link: unsplit / schedule over tokens. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dbo_fx"  # The same file every time.
    from matplotlib import pyplot

    written = []
    for (shape, link, transport), rows in curves(results).items():
        figure, axes = pyplot.subplots(figsize=(6, 3.2))
        for name in ("single_batch_overlap", DBO, "vllm_high_throughput", "threaded"):
            at = sorted((r["point"]["tokens"], r["ms"]["unsplit"] / r["ms"][name]) for r in rows)
            axes.plot(*zip(*at, strict=True), marker="o", label=name)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(
            xscale="log", xlabel="tokens per rank", ylabel="unsplit / schedule (above 1: faster)"
        )
        axes.set_title(f"{shape}, {link}, {transport}", fontsize=10)
        axes.legend(fontsize=7)
        figure.tight_layout()
        path = PLOTS / _plot_name(shape, link, transport)
        PLOTS.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        written.append(path)
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
        print("no matplotlib: the plots are as they were", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
