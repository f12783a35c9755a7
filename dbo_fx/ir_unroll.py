"""Unrolling a steady state over layers and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dbo_fx.errors import ScheduleError
from dbo_fx.ir_actions import Action, Phase
from dbo_fx.ir_schedule import CHAIN, Schedule


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A schedule over all layers, still with labels; every action but TAIL has its layer.

    `periods` holds one tuple a layer; in the `i` form one tuple a microbatch, with an empty
    prologue and epilogue.
    """

    prologue: tuple[Action, ...]
    periods: tuple[tuple[Action, ...], ...]
    epilogue: tuple[Action, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        """Everything in order, still with labels."""
        return (*self.prologue, *(a for period in self.periods for a in period), *self.epilogue)


def unroll(schedule: Schedule, layers: int, num_microbatches: int | None = None) -> Unrolled:
    """Unroll a steady state over all layers, from before the first to after the last.

    Args:
        schedule: The steady state.
        layers: The number of MoE layers, at least 1.
        num_microbatches: How many microbatches; needed in the `i` form, else the number of labels.

    Returns:
        The prologue, the periods and the epilogue.

    Raises:
        ScheduleError: The numbers do not fit the schedule.
    """
    labels = _wanted_labels(schedule, layers, num_microbatches)
    if schedule.num_microbatches is None:
        per_label = tuple(_one_after_the_other(schedule, layers, label) for label in labels)
        return Unrolled((), per_label, ())
    offsets = _offsets(schedule.order)
    before, *periods, after = (
        _period(schedule.order, offsets, period, layers) for period in range(-1, layers + 1)
    )
    return Unrolled(before, tuple(periods), after)


def bind(
    schedule: Schedule, layers: int, num_microbatches: int | None = None
) -> tuple[Action, ...]:
    """Unroll a schedule and replace labels by microbatch indices, as the compiler needs them.

    Args:
        schedule: The steady state.
        layers: The number of MoE layers, at least 1.
        num_microbatches: How many microbatches; needed in the `i` form, else the number of labels.

    Returns:
        All actions in order. The leading label is index 0, the others follow in label order.

    Raises:
        ScheduleError: The numbers do not fit the schedule.
    """
    labels = _wanted_labels(schedule, layers, num_microbatches)
    ranked = sorted(labels, key=lambda label: (label != schedule.lead, label))
    index = {label: i for i, label in enumerate(ranked)}
    actions = unroll(schedule, layers, num_microbatches).actions
    return tuple(
        replace(a, microbatch=index[a.microbatch]) for a in actions if a.microbatch is not None
    )


def _wanted_labels(schedule: Schedule, layers: int, wanted: int | None) -> tuple[int, ...]:
    if layers < 1:
        raise ScheduleError(f"{schedule.name}: {layers} layers; wanted at least 1 MoE layer")
    if schedule.num_microbatches is None:
        if wanted is None or wanted < 1:
            raise ScheduleError(
                f"{schedule.name} takes any number of microbatches from 1 and got {wanted}; "
                "say how many"
            )
        return tuple(range(wanted))
    if wanted not in (None, schedule.num_microbatches):
        raise ScheduleError(
            f"{schedule.name} is a schedule of {schedule.num_microbatches} microbatches, not of "
            f"{wanted}; leave the number out or take another schedule, such as sequential"
        )
    return schedule.labels


def _one_after_the_other(schedule: Schedule, layers: int, label: int) -> tuple[Action, ...]:
    body = (
        replace(action, microbatch=label, layer=layer)
        for layer in range(layers)
        for action in schedule.order
    )
    return (*body, Action(Phase.TAIL, label))


def _period(
    order: Sequence[Action], offsets: Sequence[int], period: int, layers: int
) -> tuple[Action, ...]:
    actions: list[Action] = []
    for action, offset in zip(order, offsets, strict=True):
        layer = period + offset
        if layer == layers and action.phase is Phase.A0:
            # The join of the last layer has no A0 left to open: it opens the tail.
            actions.append(Action(Phase.TAIL, action.microbatch))
        elif 0 <= layer < layers:
            actions.append(replace(action, layer=layer))
    return tuple(actions)


def _offsets(order: Sequence[Action]) -> list[int]:
    """How many layers after its period's layer each action of a checked order belongs to."""
    at = {(a.microbatch, a.phase, a.half): step for step, a in enumerate(order)}
    offsets = []
    for step, action in enumerate(order):
        last = at[action.microbatch, *CHAIN[-1]]
        core = at[action.microbatch, Phase.A1, None]
        if action.phase is Phase.S:
            # S has the layer of the A1 before it; before this period's A1 that is the last one's.
            offsets.append((core > last) - (step < core))
        else:
            offsets.append(int(step > last))
    return offsets
