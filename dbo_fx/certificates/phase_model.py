"""The phase model of an MoE layer: what each action of a program text reads and writes.

The text names phases, not tensors. So A0 needs the last layer's results and a cache that all
microbatches share, A1 makes the residual and what is sent, and so on. The reference order is
microbatch after microbatch, layer after layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dbo_fx.certificates.execution import Required
from dbo_fx.ir import CHAIN, Action, Half, Merge, Phase, Program

RESULT = "result"
_RANK = {slot: n for n, slot in enumerate((*CHAIN, (Phase.S, None)))}


@dataclass(frozen=True, slots=True)
class Access:
    """What a step touches: storages by their names."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


class PhaseModel:
    """The phase model: what each action of one program reads and writes."""

    def __init__(self, program: Program) -> None:
        """Find out which layers have a shared expert, and whether there is a tail."""
        self.program = program
        self.shared = {a.layer for a in program.actions if a.phase is Phase.S}
        self.tail = any(a.phase is Phase.TAIL for a in program.actions)
        self.merge = any(isinstance(step, Merge) for step in program.steps)
        self.known: dict[Action, Access] = {}

    @property
    def inputs(self) -> list[str]:
        """What exists before the program and belongs to the caller."""
        slices = [f"input_m{m}" for m in range(self.program.microbatches)]
        return slices + [f"cache@{layer}" for layer in range(self.program.layers)]

    @property
    def results(self) -> list[str]:
        """What the caller reads: the merged outputs; of one microbatch also without a merge."""
        if self.merge or self.program.microbatches > 1:
            return [RESULT]
        return self.outputs

    @property
    def outputs(self) -> list[str]:
        """What the merge joins."""
        last = self.program.layers - 1
        names = []
        for m in range(self.program.microbatches):
            names += [f"out_m{m}"] if self.tail else self.layer_results(m, last)
        return names

    def layer_results(self, m: int, layer: int) -> list[str]:
        """What a layer hands to the join behind it: routed rows, residual, shared rows."""
        names = [f"c_m{m}@{layer}", f"h_m{m}@{layer}"]
        return [*names, f"s_m{m}@{layer}"] if layer in self.shared else names

    def of(self, action: Action) -> Access:
        """What an action touches; one that cannot be in this program reads what nobody wrote."""
        if action not in self.known:
            self.known[action] = self._of(action)
        return self.known[action]

    def _of(self, action: Action) -> Access:
        m, layer = action.microbatch, action.layer
        known = m is not None and 0 <= m < self.program.microbatches
        if action.phase is Phase.TAIL and known:
            assert m is not None
            last = self.layer_results(m, self.program.layers - 1)
            return Access(tuple(last), (f"out_m{m}",))
        halves = action.phase.is_communication == (action.half is not None)
        if not known or layer is None or not 0 <= layer < self.program.layers or not halves:
            return Access((f"operands of {text_of(action)}",))
        assert m is not None
        return self._in_layer(action, m, layer)

    def _in_layer(self, action: Action, m: int, layer: int) -> Access:
        at, cache = f"m{m}@{layer}", f"cache@{layer}"
        match action.phase, action.half:
            case Phase.A0, _:
                before = self.layer_results(m, layer - 1) if layer else [f"input_m{m}"]
                return Access((*before, cache), (f"q_{at}", cache))
            case Phase.A1, _:
                return Access((f"q_{at}", cache), (f"h_{at}", f"x_{at}"))
            case Phase.MLP, _:
                return Access((f"d_{at}",), (f"y_{at}",))
            case Phase.S, _:
                return Access((f"h_{at}",), (f"s_{at}",))
            case _, Half.SEND:
                sent, landing = self.buffers(action)
                return Access((sent,), (landing,))
        _, landing = self.buffers(action)
        return Access((landing,), (landing,))

    def buffers(self, action: Action) -> tuple[str, str]:
        """What a communication sends, and where it lands."""
        sent, landing = ("x", "d") if action.phase is Phase.D else ("y", "c")
        at = f"m{action.microbatch}@{action.layer}"
        return f"{sent}_{at}", f"{landing}_{at}"


def required_order(reference: Iterable[tuple[int, Access]]) -> Iterator[Required]:
    """The order that the reference needs.

    Args:
        reference: In the reference's order: where an operation stands in the program that is
            checked, and what it touches.

    Yields:
        Read after write, write after read, write after write, per storage.
    """
    writer: dict[str, int] = {}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for here, access in reference:
        for name in access.reads:
            if name in writer:
                yield Required(writer[name], here, "RAW", name)
        for name in access.writes:
            if name in writer and name not in access.reads:
                yield Required(writer[name], here, "WAW", name)
            for reader in readers.pop(name, ()):
                yield Required(reader, here, "WAR", name)
            writer[name] = here
        for name in access.reads:
            if name not in access.writes:
                readers[name].append(here)


def reference_key(action: Action) -> tuple[int, float, int]:
    """Sort key: the place of an action in the reference."""
    m = -1 if action.microbatch is None else action.microbatch
    layer = float("inf") if action.layer is None else action.layer
    return m, layer, _RANK.get((action.phase, action.half), len(_RANK))


def text_of(action: Action) -> str:
    """An action as text, also one that no program may hold."""
    return str(action) if action.microbatch is None else action.bound()
