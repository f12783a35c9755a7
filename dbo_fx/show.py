"""What `dbo-fx show` prints: schedules, unrolled schedules and programs, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from dbo_fx.ir import Action, Column, Program, Schedule, Unrolled, draw, lanes

Rows = dict[str, object]


def unrolled_text(schedule: Schedule, unrolled: Unrolled) -> str:
    """One line for the prologue, for each period and for the epilogue.

    Args:
        schedule: The steady state; in the `i` form a line is a microbatch, not a period.
        unrolled: The same schedule over its layers.

    Returns:
        The lines; empty parts are left out, and the last one ends in the merge.
    """
    title = "period" if schedule.labels else "microbatch"
    parts = [("prologue", unrolled.prologue)]
    parts += [(f"{title} {n}", period) for n, period in enumerate(unrolled.periods)]
    lines = [f"{title}  {_words(actions)}" for title, actions in parts if actions]
    ending = [_words(unrolled.epilogue)] if unrolled.epilogue else []
    if (schedule.num_microbatches or len(unrolled.periods)) > 1:
        ending.append("merge")
    if ending:
        lines.append(f"epilogue  {', '.join(ending)}")
    return "\n".join(lines) + "\n"


def program_text(program: Program) -> str:
    """The program text, headed by its lanes per layer as comments, so that it can be read back.

    Args:
        program: A bound program.

    Returns:
        The text.
    """
    lines = [f"# digest {program.digest}"]
    for title, columns in by_layer(program.actions):
        lines += ["#", f"# {title}", *(f"# {row}" for row in _draw_bound(columns))]
    return "\n".join([*lines, str(program)])


def schedule_json(schedule: Schedule, unrolled: Unrolled | None = None) -> Rows:
    """The content of a schedule, and of its unrolled form if given, as plain lists.

    Args:
        schedule: The steady state.
        unrolled: The same schedule over its layers.

    Returns:
        Values that `json.dumps` takes.
    """
    rows: Rows = {
        "kind": "schedule",
        "name": schedule.name,
        "lead": schedule.lead,
        "microbatches": schedule.num_microbatches,
        "lanes": _cells(lanes(schedule.order), str),
        "order": _texts(schedule.order),
    }
    if unrolled is not None:
        rows["prologue"] = _texts(unrolled.prologue)
        rows["periods"] = [_texts(period) for period in unrolled.periods]
        rows["epilogue"] = _texts(unrolled.epilogue)
    return rows


def program_json(program: Program) -> Rows:
    """The content of a program as plain lists.

    Args:
        program: A bound program.

    Returns:
        Values that `json.dumps` takes.
    """
    return {
        "kind": "program",
        "schedule": program.schedule,
        "microbatches": program.microbatches,
        "layers": program.layers,
        "transport": program.transport,
        "digest": program.digest,
        "lanes": [
            {"part": title, **_cells(columns, Action.bound)}
            for title, columns in by_layer(program.actions)
        ],
        "steps": [str(step) for step in program.steps],
    }


def _words(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def _texts(actions: Iterable[Action]) -> list[str]:
    return [str(action) for action in actions]


def _cells(columns: Sequence[Column], text: Callable[[Action], str]) -> Rows:
    return {
        "comp": [[text(action) for action in column.comp] for column in columns],
        "comm": [[text(action) for action in column.comm] for column in columns],
    }


def _draw_bound(columns: Sequence[Column]) -> list[str]:
    return draw(columns, Action.bound).splitlines()


def by_layer(actions: Iterable[Action]) -> list[tuple[str, list[Column]]]:
    """Cut the picture where the layer changes; a column is its communication's layer's."""
    return [(title, list(columns)) for title, columns in groupby(lanes(actions), key=layer_title)]


def layer_title(column: Column) -> str:
    """`layer 3`, or `tail`."""
    layers = [a.layer for a in column.comm or column.comp if a.layer is not None]
    return f"layer {min(layers)}" if layers else "tail"
