"""Contract field `pairs`: a combine finds its dispatch by the flight, that is by the microbatch.

The transport keeps what a combine needs from the dispatch's send to the combine's send, one for
each microbatch and group. So over a group a microbatch dispatches and combines in turn, both of one
layer. (That the dispatch is received before its combine is sent follows from the data.)
"""

from __future__ import annotations

from collections.abc import Iterator

from dbo_fx.certificates.execution import Execution, Kind
from dbo_fx.certificates.violation import Violation, label, named
from dbo_fx.ir import Phase


def broken_pairs(execution: Execution) -> Iterator[Violation]:
    """Find dispatches and combines of a microbatch that do not take turns.

    Args:
        execution: What the host enqueues.

    Yields:
        Violations of "pairing".
    """
    name, operations = execution.contract.name, execution.operations
    if not execution.contract.pairs:
        return
    open_: dict[tuple[str | None, int | None], int] = {}
    for index, operation in enumerate(operations):
        action = operation.action
        if operation.kind is not Kind.SEND or action is None:
            continue
        key = operation.communicator, action.microbatch
        held = open_.get(key)
        if action.phase is Phase.D:
            if held is not None and operations[held].action != action:
                text = (
                    f"{named(operation)} is launched while {label(operations[held])} has had no "
                    f"combine; {name} keeps what a combine needs for one dispatch of a microbatch"
                )
                yield Violation("pairing", held, index, None, text, "combine the first one before")
            open_[key] = index
            continue
        before = None if held is None else operations[held].action
        if before is None or before.layer != action.layer:
            text = f"{named(operation)} follows no dispatch of its layer and microbatch"
            yield Violation("pairing", held, index, None, text, "send it behind its dispatch")
        open_.pop(key, None)
    for index in open_.values():
        text = f"{named(operations[index])} is never combined; {name} waits for it"
        yield Violation("pairing", index, None, None, text, "add its combine")
