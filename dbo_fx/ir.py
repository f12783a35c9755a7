"""The schedule IR: actions, schedules and programs; printable, parseable, comparable, no torch.

* An `Action` is a phase of a microbatch, in a layer.
* A `Schedule` is a steady state: one layer's actions for every microbatch label, as text that
  begins with `schedule 1`. `unroll` lays it over the layers, `bind` replaces labels by indices.
* A `Program` is what one rank executes: bound actions on streams, events, lifetimes; its text
  begins with `program 1`.
* `lanes` and `draw` make the two-row picture of any list of actions; `mark` the one in errors.

The grammar of both texts is in `docs/schedules.md`.
"""

from __future__ import annotations

from dbo_fx.ir_actions import COMM, COMP, Action, Column, Half, Phase, draw, lanes, mark
from dbo_fx.ir_program import (
    STREAMS,
    Keepalive,
    Merge,
    Program,
    Record,
    Run,
    Step,
    Wait,
    parse_program,
)
from dbo_fx.ir_schedule import CHAIN, Schedule, parse_schedule, significant_lines
from dbo_fx.ir_unroll import Unrolled, bind, unroll

__all__ = [
    "CHAIN",
    "COMM",
    "COMP",
    "STREAMS",
    "Action",
    "Column",
    "Half",
    "Keepalive",
    "Merge",
    "Phase",
    "Program",
    "Record",
    "Run",
    "Schedule",
    "Step",
    "Unrolled",
    "Wait",
    "bind",
    "draw",
    "lanes",
    "mark",
    "parse",
    "parse_program",
    "parse_schedule",
    "unroll",
]


def parse(text: str, source: str = "text") -> Schedule | Program:
    """Read either kind of text; its first line says which one it is.

    Args:
        text: A schedule or program text.
        source: What to call the text in errors, usually its path.

    Returns:
        The schedule or the program.

    Raises:
        ScheduleError: The text is malformed or breaks a rule.
    """
    lines = significant_lines(text)
    if lines and lines[0][1].split()[0] == "program":
        return parse_program(text, source)
    return parse_schedule(text, source)
