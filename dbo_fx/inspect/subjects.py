"""What can be compared with what, and how it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dbo_fx import schedules
from dbo_fx.contracts import CONTRACTS
from dbo_fx.errors import GraphFileError, OptionError
from dbo_fx.graph_facts import SUFFIX, is_graph_file, read_graph_facts
from dbo_fx.inspect.facts import Facts, facts_of_actions, facts_of_program, layers_text
from dbo_fx.inspect.graph_items import facts_of_nodes
from dbo_fx.ir import Action, Program, Schedule, bind, parse, parse_program
from dbo_fx.ir_bind import sunk_actions

LAYERS = 2


def read_subject(subject: object) -> object:
    """A schedule, a program or facts for a name, a path or a text; anything else as it is.

    Raises:
        ScheduleError: the text is malformed, or there is no schedule of this name.
        GraphFileError: the graph file cannot be read.
        OptionError: the path has a suffix that is not known.
    """
    if isinstance(subject, str) and "\n" in subject:
        return _parsed(subject, "text")
    if not isinstance(subject, str | os.PathLike):
        return subject
    name = os.fspath(subject)
    if is_graph_file(name):
        return _graph_facts(name)
    if name.endswith(schedules.SUFFIX) or name in schedules.names():
        return _parsed(schedules.read(name), name)
    if not name:
        raise OptionError("the name of what to compare is empty")
    if Path(name).is_dir():
        raise OptionError(f"{name} is a folder; name a {schedules.SUFFIX} or a {SUFFIX} file in it")
    raise OptionError(
        f"{name} is neither a schedule ({', '.join(schedules.names())}), nor a "
        f"{schedules.SUFFIX} file, nor a graph file ({SUFFIX})"
    )


def _graph_facts(name: str) -> Facts:
    facts = read_graph_facts(name)
    try:
        return facts_of_nodes(facts["nodes"], facts["constants"], Path(name).name)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise GraphFileError(f"{name} is damaged ({what}). Save the graph again.") from error


def _parsed(text: str, source: str) -> Program | Schedule:
    """Programs that cannot be right are read too: a diff may show what is wrong with them."""
    if any(line.split()[:1] == ["program"] for line in text.splitlines()):
        return parse_program(text, source, allow_wrong=True)
    return parse(text, source)


def facts_of_both(old: object, new: object, layers: int) -> tuple[Facts, Facts]:
    """Read two subjects in the form that both have.

    Args:
        old: What `read_subject` returned.
        new: The same.
        layers: How many layers schedules are unrolled over that take different numbers of
            microbatches.

    Raises:
        OptionError: they have no form in common.
    """
    match old, new:
        case Schedule(), Schedule():
            return _orders(old, new, layers)
        case Program(), Program():
            return facts_of_program(old), facts_of_program(new)
        case Program(), Schedule():
            return _actions(old), _unrolled(new, old)
        case Schedule(), Program():
            return _unrolled(old, new), _actions(new)
    textual = isinstance(old, Program | Schedule), isinstance(new, Program | Schedule)
    if any(textual):
        programs = [x if t else _program(x) for x, t in zip((old, new), textual, strict=True)]
        return facts_of_both(programs[0], programs[1], layers)
    return _graph(old), _graph(new)


def _graph(subject: object) -> Facts:
    if isinstance(subject, Facts):
        return subject
    from dbo_fx.inspect.graph_reader import facts_of_graph  # needs torch

    facts = facts_of_graph(subject)
    if facts is None:
        raise OptionError(
            f"found {type(subject).__name__}; wanted a program, a schedule, a captured or "
            "compiled graph, a text, or a path"
        )
    return facts


def _program(subject: object) -> Program:
    found = None
    if not isinstance(subject, Facts):
        from dbo_fx.inspect.graph_reader import program_of  # needs torch

        found = program_of(subject)
    if found is None:
        raise OptionError(
            "a program or a schedule can be compared with another one, or with what was "
            "compiled; a captured graph only with another graph"
        )
    return found


def _orders(old: Schedule, new: Schedule, layers: int) -> tuple[Facts, Facts]:
    if bool(old.labels) == bool(new.labels):
        is_same = old.lead == new.lead
        both = (_order(schedule, keep_labels=is_same) for schedule in (old, new))
        one, other = both
        return facts_of_actions(one, old.name), facts_of_actions(other, new.name)
    count = old.num_microbatches or new.num_microbatches
    return _bound(old, layers, count), _bound(new, layers, count)


def _order(schedule: Schedule, *, keep_labels: bool) -> Iterable[Action]:
    """The order; labels become indices, the leading one 0, where they do not mean the same."""
    if keep_labels:
        return schedule.order
    ranked = sorted(schedule.labels, key=lambda label: (label != schedule.lead, label))
    index = {label: i for i, label in enumerate(ranked)}
    return [replace(a, microbatch=index[a.microbatch or 0]) for a in schedule.order]


def _bound(schedule: Schedule, layers: int, microbatches: int | None) -> Facts:
    title = f"{schedule.name} ({layers_text(layers)})"
    return facts_of_actions(bind(schedule, layers, microbatches), title)


def _unrolled(schedule: Schedule, program: Program) -> Facts:
    actions = bind(schedule, program.layers, program.microbatches)
    return _sunk(actions, schedule.name, program)


def _actions(program: Program) -> Facts:
    return _sunk(program.actions, program.schedule, program)


def _sunk(actions: Iterable[Action], name: str, program: Program) -> Facts:
    """Where recvs sink, a schedule does not say where they stand in a program."""
    carrier = CONTRACTS.get(program.transport)
    if carrier is not None:
        actions = sunk_actions(actions, program.layers, program.microbatches, carrier)
    return facts_of_actions(actions, f"{name} ({layers_text(program.layers)})")
