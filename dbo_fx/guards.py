"""What must hold of every call, beyond Dynamo's own guards: sizes, padding, and who shares memory.

Each size and each pattern of addresses is checked once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from dbo_fx.capture import value_of
from dbo_fx.effects import extent
from dbo_fx.errors import SoundnessError
from dbo_fx.fake_rerun import FakeRerun
from dbo_fx.padding import STEP, Padding
from dbo_fx.passes.sharding_packing import NOTE
from dbo_fx.passes.soundness import sizes_refused
from dbo_fx.pipeline import State
from dbo_fx.symbols import same_storage_key


class CallGuards:
    """Checks the inputs of a program before every call.

    Args:
        state: The pipeline's last state.
    """

    def __init__(self, state: State) -> None:
        """Remember which inputs are written, and which others could share memory with them."""
        self.captured = state.captured
        self.count = state.microbatches
        self.inputs = state.captured.placeholders
        self.written = written_inputs(state)
        self.tensors = [
            i for i, n in enumerate(self.inputs) if isinstance(value_of(n), torch.Tensor)
        ]
        self._shapes = FakeRerun(state.captured)
        self._totals: set[int] = set()
        self._sizes: set[int] = set()
        self._addresses: set[tuple[int, ...]] = set()
        self._shared = self._overlaps([value_of(n) for n in self.inputs])

    def check(self, args: tuple[Any, ...]) -> None:
        """Refuse a call that the program was not made for.

        Raises:
            SoundnessError: says which size, input or pair of inputs, and what to do.
        """
        self._check_size(args)
        if self.written:
            self._check_padding()
            self._check_aliases(args)

    def _check_size(self, args: tuple[Any, ...]) -> None:
        token = self.captured.token_inputs[0]
        total = int(args[token.index].shape[token.dim])
        if total in self._totals:
            return
        bounds = [total * i // self.count for i in range(self.count + 1)]
        sizes = [high - low for low, high in pairwise(bounds)]
        refused = sizes_refused(self.captured.rules, sizes)
        for size in sorted(set(sizes) - self._sizes) if self.count > 1 else ():
            refused = refused or self._shapes.refused(args, size)
        if refused is not None:
            raise SoundnessError(f"a batch of {total} rows cannot be split: {refused}")
        self._totals.add(total)
        self._sizes.update(sizes)

    def _check_padding(self) -> None:
        padding = STEP.get()
        if padding is Padding.NONE:
            return
        tokens = {t.index for t in self.captured.token_inputs}
        lost = [i for i in self.written if i in tokens]
        if lost:
            raise SoundnessError(
                f"wrap pads this step, and the program writes {self._named(lost)}, which holds "
                "token rows: the writes would land in the padded copy and be lost. Return the new "
                "values, or bring equal batches that need no padding."
            )
        if padding is Padding.ZEROS:
            raise SoundnessError(
                f"wrap pads this step on some rank, and the program writes {self._named()} in "
                "place: padded rows would be written like tokens (slots, counters). Give wrap "
                'values that make them harmless, for example pad={"slot_mapping": -1}, or bring '
                "equal batches that need no padding."
            )

    def _check_aliases(self, args: tuple[Any, ...]) -> None:
        """Effects were read off the storages of the first call's inputs."""
        if not self._addresses:  # Weights are nobody's cache: no call looks at them again.
            self.tensors = [i for i in self.tensors if not isinstance(args[i], torch.nn.Parameter)]
        addresses = tuple(args[i].data_ptr() for i in self.tensors)
        if addresses in self._addresses:
            return
        new = self._overlaps(args) - self._shared
        if new:
            one, other = min(new)
            raise SoundnessError(
                f"inputs {self.inputs[one].name} and {self.inputs[other].name} share memory in "
                "this call, and one of them is written; when the graph was captured they did not, "
                "so its order does not allow for it. Call torch._dynamo.reset() and capture again "
                "with such inputs, or pass separate tensors."
            )
        if len(self._addresses) > 256:
            self._addresses.clear()
        self._addresses.add(addresses)

    def _overlaps(self, values: Any) -> set[tuple[int, int]]:
        """Pairs of a written input and another one whose memory overlaps it."""
        places = {i: (same_storage_key(values[i]), *extent(values[i])) for i in self.tensors}
        found = set()
        for one in self.written:
            storage, low, high = places[one]
            for other, (its, start, end) in places.items():
                if other != one and its == storage and low < end and start < high:
                    found.add((one, other))
        return found

    def _named(self, indices: list[int] | None = None) -> str:
        names = [self.inputs[i].name for i in (self.written if indices is None else indices)]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def written_inputs(state: State) -> list[int]:
    """Positions of the inputs that the program writes in place, overflow counters left out."""
    mutated = state.effects.mutated_live_in()
    keys = {n.name: a.results for n, a in state.effects.access.items() if n.op == "placeholder"}
    inputs = state.captured.placeholders
    counters = set(overflow_counters(state))
    return [i for i, n in enumerate(inputs) if keys[n.name] & mutated and i not in counters]


def overflow_counters(state: State) -> list[int]:
    """Positions of the inputs that only count rows without room: split runs count others."""
    calls = [n for n in state.captured.graph.nodes if n.op == "call_function"]
    counted = {n.args[0] for n in calls if n.target is NOTE}
    return [i for i, n in enumerate(state.captured.placeholders) if n in counted]
