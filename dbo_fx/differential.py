"""The numeric differential: split program against unsplit graph, on the first call's real inputs.

Routing is discrete: where two experts score almost the same, rounding decides, and outputs then
differ by far more than rounding. So the top-k ids chosen by the split run are recorded and replayed
in the unsplit one. What remains is rounding, and must stay below a tolerance.

Both run the traced ops. Compiled segments are compared with theirs one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbo_fx.capture import value_of
from dbo_fx.guards import overflow_counters, written_inputs
from dbo_fx.layouts import Split
from dbo_fx.passes.sharding import finding_of
from dbo_fx.pipeline import State
from dbo_fx.segment_check import each_checked, traced_twin
from dbo_fx.segments import CompiledSegment
from dbo_fx.symbols import coefficient, expression, free_symbols

TOPK = torch.ops.aten.topk.default
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the differential found.

    Attributes:
        largest: Largest relative difference, over outputs and written inputs.
        compared: Tensors compared.
        flips: Top-k ids that the unsplit run would have chosen differently.
        error: The message for the user if the split changes results, else None.
        lost: Rows found no room in a block of static capacity; what is NaN for it was left out.
        segments: Compiled segments that were compared with their traced ops.
        in_segments: Largest relative difference there.
    """

    largest: float
    compared: int
    flips: int
    error: str | None = None
    lost: bool = False
    segments: int = 0
    in_segments: float = 0.0

    def __str__(self) -> str:
        """One line."""
        state = "differs" if self.error else "agrees"
        return (
            f"{state}: {self.compared} tensors, largest relative difference {self.largest:.1e}, "
            f"{self.flips} near-tie top-k ids replayed"
            + self._compiled()
            + ("; rows without room left out, see dbo_fx.overflow" if self.lost else "")
        )

    def _compiled(self) -> str:
        if not self.segments:
            return ""
        return f"; {self.segments} compiled segments agree, to {self.in_segments:.1e}"


class Differential:
    """Compares once.

    Args:
        state: The pipeline's last state.
    """

    def __init__(self, state: State) -> None:
        """Remember which inputs are written and which nodes choose experts."""
        self.captured = state.captured
        self.written = written_inputs(state)
        self.counters = overflow_counters(state)
        self.choices = [(n, m) for n, m in state.calls if n.target is TOPK]

    def run(self, module: GraphModule, args: tuple[Any, ...]) -> tuple[Any, Verdict]:
        """Run both. Inputs end up as the split run left them, as they were if it is wrong.

        Returns:
            The split run's outputs, and the verdict.
        """
        before = {i: args[i].clone() for i in (*self.written, *self.counters)}
        traced = traced_twin(module)
        with torch.no_grad(), _Record() as record:
            split = traced(*args)
        after = {i: args[i].clone() for i in before}
        self._restore(args, before)
        with torch.no_grad(), _Replay(self._whole_ids(record.chosen, args)) as replay:
            whole = self.captured.module(*args)
        whole_after = {i: args[i].clone() for i in before}
        names = [f"output {i}" for i in range(len(tree_leaves(split)))]
        pairs = list(
            zip(names, tree_leaves(split), tree_leaves(whole), self._output_rows(), strict=True)
        )
        for index in self.written:
            name = f"input {self.captured.placeholders[index].name}"
            pairs.append((name, after[index], whole_after[index], Split(0)))
        runs = [run[i] for run in (after, whole_after) for i in self.counters]
        lost = any(
            not torch.equal(x, before[i]) for x, i in zip(runs, self.counters * 2, strict=True)
        )
        verdict = _judge(pairs, replay.flips, lost)
        if traced is not module and verdict.error is None:
            self._restore(args, before)
            split, verdict = _run_compiled(module, args, verdict)
            after = {i: args[i].clone() for i in before}
        self._restore(args, after if verdict.error is None else before)
        return split, verdict

    def _output_rows(self) -> list[Split]:
        """Where every output has the batch's rows."""
        output = next(n for n in reversed(self.captured.graph.nodes) if n.op == "output")
        findings = [
            finding_of(leaf) if isinstance(leaf, Node) else None
            for leaf in tree_leaves(output.args[0])
        ]
        layouts = [None if found is None else found.layout for found in findings]
        return [layout if isinstance(layout, Split) else Split(0) for layout in layouts]

    def _whole_ids(self, chosen: list[torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The recorded ids of every top-k of the unsplit graph, in its order."""
        assert len(chosen) == len(self.choices), "a top-k ran that the program does not list"
        pieces: dict[Node, list[torch.Tensor]] = {}
        for (node, _), ids in sorted(
            zip(self.choices, chosen, strict=True), key=lambda pair: pair[0][1] or 0
        ):
            pieces.setdefault(node, []).append(ids)
        order = [n for n in self.captured.graph.nodes if n in pieces]
        return [self._joined(n, pieces[n], args) for n in order]

    def _joined(
        self, node: Node, pieces: list[torch.Tensor], args: tuple[Any, ...]
    ) -> torch.Tensor:
        shape, symbol = value_of(node)[1].shape, self.captured.symbol
        dims = [d for d, size in enumerate(shape) if symbol in free_symbols(size)]
        if not dims:
            return pieces[0]
        token = self.captured.token_inputs[0]
        outer = args[token.index].shape[: token.dim].numel()
        alone = coefficient(expression(shape[dims[0]]), symbol) == 1
        if dims[0] >= token.dim or outer == 1 or alone:
            return torch.cat(pieces, dims[0])
        apart = [torch.unflatten(p, dims[0], (outer, -1)) for p in pieces]
        joined = torch.cat(apart, dims[0] + 1)
        return joined.flatten(dims[0], dims[0] + 1)

    @staticmethod
    def _restore(args: tuple[Any, ...], values: dict[int, torch.Tensor]) -> None:
        for index, value in values.items():
            args[index].copy_(value)


def _run_compiled(
    module: GraphModule, args: tuple[Any, ...], verdict: Verdict
) -> tuple[Any, Verdict]:
    """Run with compiled segments, each compared once with the ops that it was compiled from."""
    largest, errors, segments = 0.0, list[str](), 0

    def both(compiled: Any, traced: Any) -> tuple[Any, Any]:
        with _Record() as record:
            results = compiled()
        with _Replay(record.chosen):
            return results, traced()

    def compare(segment: CompiledSegment, pairs: list[tuple[Any, Any]]) -> None:
        nonlocal largest, segments
        segments += 1
        limit = _coarsest(segment.body)
        for index, (mine, its) in enumerate(pairs):
            # Where rounding decides (an argmax, a comparison), whole numbers may differ.
            if not isinstance(mine, torch.Tensor) or not mine.is_floating_point():
                continue
            found = _relative(mine, its, False)
            largest = max(largest, found)
            if not found <= limit:
                errors.append(
                    f"{segment.name} as {segment.backend} compiled it differs from its traced ops: "
                    f"result {index} by {found:.1e} relative (allowed: {limit:.0e}). Compile "
                    "with segment_backend='eager', and report the backend."
                )

    with torch.no_grad(), each_checked(module, both, compare):
        result = module(*args)
    if errors:
        return result, replace(verdict, error=errors[0])
    return result, replace(verdict, segments=segments, in_segments=largest)


def _coarsest(body: GraphModule) -> float:
    """The tolerance of a segment: a float32 result may be computed from bfloat16 ones."""
    values = [v for n in body.graph.nodes for v in tree_leaves(value_of(n))]
    return max(TOLERANCE.get(v.dtype, 0.0) for v in values if isinstance(v, torch.Tensor))


def has_values(args: Sequence[Any]) -> bool:
    """Whether inputs can be computed with: no meta or fake tensors, not under CUDA capture."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if any(t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return False
    cuda = any(t.is_cuda for t in tensors)
    return not (cuda and torch.cuda.is_current_stream_capturing())


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the ids of every top-k, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is TOPK:
            self.chosen.append(result[1])
        return result


class _Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the n-th top-k with the n-th given ids; counts the rows that would have differed."""

    def __init__(self, chosen: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen = iter(chosen)
        self.flips = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not TOPK:
            return result
        dim = args[2] if len(args) > 2 else -1
        ids = next(self.chosen)
        self.flips += int((result[1].sort(dim).values != ids.sort(dim).values).any(dim).sum())
        return args[0].gather(dim, ids), ids


def _relative(split: torch.Tensor, whole: torch.Tensor, lost: bool) -> float:
    if split.shape != whole.shape:
        return float("inf")
    if not split.is_floating_point():
        return 0.0 if lost else float((split != whole).any())
    a, b = split.double(), whole.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if lost:  # Split and unsplit batches lose other rows.
        same |= a.isnan() | b.isnan()
    difference = torch.where(same, 0.0, a - b).norm()
    scale = torch.where(b.isfinite(), b, 0.0).norm().clamp_min(1e-30)
    return float(difference / scale)


def _rows(split: torch.Tensor, whole: torch.Tensor, limit: float, layout: Split) -> str:
    """Which rows of the batch differ most visibly, counted in the whole batch."""
    if split.shape != whole.shape or split.dim() < 1 or not split.is_floating_point():
        return ""
    before, dim = split.shape[: layout.dim], layout.dim
    sizes = (*before, layout.outer, -1, layout.inner, *split.shape[dim + 1 :])
    apart = (split - whole).reshape(sizes).movedim(dim + 1, 0)
    difference = apart.flatten(1).abs().amax(1)
    scale = whole.abs().max() * max(limit, 1e-12)
    rows = (~(difference <= scale)).nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"Rows of dim {dim} that differ: {shown or 'none by much'}. "


def _judge(pairs: list[tuple[str, Any, Any, Split]], flips: int, lost: bool) -> Verdict:
    largest, error = 0.0, None
    tensors = [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]
    for name, split, whole, layout in tensors:
        limit = TOLERANCE.get(split.dtype, 0.0)
        difference = _relative(split, whole, lost)
        largest = max(largest, difference)
        if error is None and not difference <= limit:
            error = (
                f"splitting this batch changes results: {name} differs by {difference:.1e} "
                f"relative (allowed for {split.dtype}: {limit:.0e}). "
                f"{_rows(split, whole, limit, layout)}"
                "Some op mixes rows of the batch (a mean, a sort, attention over the split dim "
                "without a cache). "
                "Split along another dim (option split_dim), or keep the op out of the region."
            )
    return Verdict(largest, len(tensors), flips, error, lost)
