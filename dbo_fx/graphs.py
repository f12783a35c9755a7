"""Full CUDA graphs of a call, one for each bucket of token rows, in one memory pool.

A capture is done in this order, on every rank alike:

1. the ranks compare the list of buckets;
2. for each bucket, the largest first: the example's token rows are copied into static buffers, what
   the call may write is saved, and the ranks compare whether there was memory for both;
3. the call runs `warmup` times on the stream of the capture (compilation, first-call tests,
   handles), what it wrote in place is put back, it is captured, and the ranks compare whether it
   went well.

A replay checks that everything static is where it was, copies the token rows, begins the regions of
the programs that were captured (a transport that a failed step left half-way is mended there), and
launches one graph. On CPU a twin of the graph stands in (`graph_device`); all else is the same
code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dbo_fx.agree import Advice, announce_over_store, compare_over_store
from dbo_fx.buckets import (
    SPLIT,
    Bucket,
    GraphOptions,
    GraphStatistics,
    largest_first,
    several,
)
from dbo_fx.capturing import let_go, what_captures
from dbo_fx.comm import abandon_in_flight, groups
from dbo_fx.comm.protocol import Region, begin_region, noted_regions
from dbo_fx.errors import AgreementError, OptionError, SoundnessError
from dbo_fx.graph_arguments import Arguments
from dbo_fx.graph_device import Captured, GraphDevice, graph_device
from dbo_fx.graph_inputs import Buffers, Example, StaticInputs
from dbo_fx.graph_state import kept_state
from dbo_fx.graph_weights import Weights
from dbo_fx.padding import STEP, Padding
from dbo_fx.token_rows import TokenRows, leaves, mapped

_ADVICE = Advice(
    "All ranks must capture together: look for the first error there.",
    "All ranks capture the same buckets in the same order, or none: see the error there.",
)


Checked = dict[int, dict[str, Tensor]]
"""The tensors to copy, by what a `capture` assumes of the arguments."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """One bucket's graph.

    Attributes:
        captured: The device's.
        inputs: Its buffers and what it assumes.
        unpaddable: Why no rank may pad a step of it; None if that is harmless.
        regions: What the captured programs communicate over.
    """

    captured: Captured
    inputs: StaticInputs
    unpaddable: str | None
    regions: tuple[Region, ...]


class CudaGraphs:
    """Graphs of one call, or of several under names (plans). Use `wrap` to have the ranks agree.

    Args:
        calls: What to capture: a model, compiled or not, or several by plan.
        split_dim: Dimension of the token rows, in arguments and outputs.
        token_args: Names of the arguments that hold token rows, by default found as by `wrap`.
        pad: Values for added rows by argument name, as for `wrap`.
        group: The process group whose ranks capture together, its name, or None for the default.
        options: See there.

    Attributes:
        statistics: Captures, replays and eager runs so far; prints readably.
    """

    def __init__(
        self,
        calls: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        *,
        split_dim: int = 0,
        token_args: Sequence[str] | None = None,
        pad: Mapping[str, float] | None = None,
        group: dist.ProcessGroup | str | None = None,
        options: GraphOptions | None = None,
    ) -> None:
        """Capture nothing yet."""
        self.calls = dict(calls) if isinstance(calls, Mapping) else {SPLIT: calls}
        names = None if token_args is None else tuple(token_args)
        first = next(iter(self.calls.values()))
        self.tokens = TokenRows(first, "CudaGraphs", split_dim, names, pad)
        self.group = group
        self.options = options or GraphOptions()
        self.statistics = GraphStatistics()
        self._graphs: dict[Bucket, _Graph] = {}
        self._buffers = Buffers(split_dim)
        self._device: GraphDevice | None = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is captured, the largest first."""
        return tuple(largest_first(self._graphs))

    def capture(self, buckets: Iterable[int | Bucket], *args: Any, **kwargs: Any) -> None:
        """Capture a graph for every bucket; every rank of the group must do it with the same ones.

        Args:
            buckets: Numbers of rows (of the first plan, with prefill), or buckets. One that is
                captured already is captured anew.
            *args: Example arguments with any number of token rows. Everything in them without
                token rows is static: the graphs read and write this very memory.
            **kwargs: Likewise, by name.

        Raises:
            OptionError: A plan is unknown, or the token rows were not found.
            SoundnessError: The call writes into what holds token rows, or may not be split.
            AgreementError: A rank captures other buckets, or failed to capture one; or something
                else is being captured now.
        """
        plan = next(iter(self.calls))
        wanted = [b if isinstance(b, Bucket) else Bucket(b, plan=plan) for b in several(buckets)]
        for bucket in wanted:
            if bucket.plan not in self.calls:
                raise OptionError(
                    f"CudaGraphs: bucket {bucket}: found plan {bucket.plan!r}, wanted one of "
                    f"{list(self.calls)}."
                )
        if found := what_captures():
            raise AgreementError(
                f"CudaGraphs.capture was called while {found}, wanted outside: a capture inside "
                "another one is not possible. Capture first, or call the model itself there."
            )
        order = largest_first(wanted)
        with self._together("CUDA graph buckets", "; ".join(map(str, order))):
            example = self._example(args, kwargs)
        for bucket in order:
            self.release(bucket)
            try:
                with ExitStack() as stack:
                    with self._together(f"CUDA graph memory of {bucket}", "there"):
                        inputs, run, put_back = self._prepared(bucket, example, stack)
                    with self._together(f"CUDA graph of {bucket}", "captured"):
                        self._graphs[bucket] = self._capture(inputs, run, put_back)
            except BaseException as error:
                self.release(bucket)
                let_go(error)
                error.add_note(f"while capturing the CUDA graph of {bucket}")
                raise
            self.statistics.captured[bucket] += 1
        example.arguments.copied.clear()

    @contextmanager
    def _together(self, what: str, value: str) -> Iterator[None]:
        """Raise on every rank if the body raises on one, or the ranks bring different values."""
        name = groups.name_of(self.group)
        try:
            yield
        except BaseException as error:
            if name is not None:
                abandon_in_flight(name)
                announce_over_store(name, what, f"failed: {error}".splitlines()[0])
            raise
        if name is not None:
            compare_over_store(name, what, value, self.options.timeout_s, advice=_ADVICE)

    def _example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        _, copied = self._copied(args, kwargs)
        seen: set[int] = set()

        def apart(leaf: Any) -> Any:
            """Later steps may bring two tensors where the example has one twice."""
            is_again = id(leaf) in seen
            seen.update(copied & {id(leaf)})
            return leaf.detach() if is_again else leaf

        args, kwargs = mapped(apart, (args, kwargs))
        tokens, copied = self._copied(args, kwargs)
        arguments = Arguments(self._bound(args, kwargs), copied)
        fill = self.tokens.fill(args, kwargs)
        return Example(args, kwargs, tokens, arguments, Weights(self.calls), fill)

    def _copied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[int]]:
        """Ids of the tensors with token rows, and of all that are copied."""
        tokens, _ = self.tokens.find(args, kwargs)
        named = self.tokens.by_name(args, kwargs, "copied", self.options.copied)
        return tokens, tokens | {id(t) for t in leaves(named) if isinstance(t, Tensor)}

    def _prepared(
        self, bucket: Bucket, example: Example, stack: ExitStack
    ) -> tuple[StaticInputs, Callable[[], Any], Callable[[], None]]:
        """Take memory: buffers, the call on them, and what puts back what it writes."""
        inputs, args, kwargs = example.static(bucket.rows, self.tokens, self._buffers)
        device = inputs.device()
        self._device = self._device or graph_device(device)
        inputs.note_host(device)
        state = [*inputs.arguments.static(), *inputs.weights.buffers]
        put_back = stack.enter_context(kept_state(state if self.options.keep_state else []))
        return inputs, partial(self.calls[bucket.plan], *args, **kwargs), put_back

    def _capture(
        self, inputs: StaticInputs, run: Callable[[], Any], put_back: Callable[[], None]
    ) -> _Graph:
        device = self._device
        assert device is not None
        padding = Padding.ZEROS if self.tokens.pad is None else Padding.NAMED

        def call() -> Any:
            told = STEP.set(padding)
            try:
                return run()
            finally:
                STEP.reset(told)

        unpaddable: str | None = None
        versions = {p: t._version for p, (t, _) in inputs.buffers.items()}
        try:
            device.warm(call)
        except SoundnessError as refused:  # Perhaps only because rows may be padding.
            unpaddable, padding = str(refused), Padding.NONE
            device.warm(call)
        inputs.check_host()
        put_back()
        for _ in range(self.options.warmup - 1):
            device.warm(call)
            put_back()
        self._check_written(inputs, versions)
        with noted_regions() as regions:
            captured = device.capture(call, inputs.held())
        return _Graph(captured, inputs, unpaddable, tuple(regions))

    def _check_written(self, inputs: StaticInputs, versions: Mapping[str, int]) -> None:
        written = [p for p, (t, _) in inputs.buffers.items() if t._version != versions[p]]
        if written:
            raise SoundnessError(
                f"CUDA graph: the call writes {written[0]!r} in place, which is copied into a "
                "buffer of the graph: the writes would be lost. If it only happens to have as many "
                "rows as there are tokens, name the token arguments with token_args=..."
            )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults included."""
        bound = self.tokens.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        for name, parameter in self.tokens.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name)
        return given

    def check(self, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Checked:
        """Refuse a step before the ranks agree on it: the others would wait for this one.

        Args:
            rows: Token rows of this rank.
            args: Arguments of the step.
            kwargs: Likewise, by name.

        Returns:
            What a replay of this step need not check again.

        Raises:
            SoundnessError: A graph that this step may use was captured with other static memory.
        """
        checked: Checked = {}
        for bucket, graph in self._graphs.items():
            if bucket.rows >= rows and id(graph.inputs.arguments) not in checked:
                checked[id(graph.inputs.arguments)] = self._check(graph, args, kwargs)
        return checked

    def _check(
        self, graph: _Graph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        if self.options.check_weights:
            graph.inputs.weights.check()
        return graph.inputs.check(self._bound(args, kwargs))

    def find(self, rows: int) -> Bucket | None:
        """Return the smallest captured bucket of the first plan that holds so many rows."""
        plan = next(iter(self.calls))
        fitting = [b for b in self.buckets if b.rows >= rows and b.plan == plan]
        return fitting[-1] if fitting else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the smallest graph that holds the rows, or run eagerly if there is none.

        On several ranks all must bring rows of the same bucket; `wrap` sees to that.

        Raises:
            OptionError: The token rows were not found.
            SoundnessError: See `replay`.
        """
        _, rows = self.tokens.find(args, kwargs)
        bucket = None if what_captures() else self.find(rows)
        if bucket is None:
            self.count_eager(f"no graph for {rows} rows")
            return next(iter(self.calls.values()))(*args, **kwargs)
        return self.replay(bucket, args, kwargs, padded=rows != bucket.rows)

    def __contains__(self, bucket: object) -> bool:
        """Whether the bucket has a graph, and the device may replay one now."""
        return bucket in self._graphs and not what_captures()

    def count_eager(self, why: str) -> None:
        """Count a run without a graph."""
        self.statistics.eager["captured by the caller" if what_captures() else why] += 1

    def replay(
        self,
        bucket: Bucket,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        padded: bool,
        checked: Checked | None = None,
    ) -> Any:
        """Replay one bucket's graph.

        Args:
            bucket: A captured one.
            args: Arguments of the step; at most as many token rows as the bucket has.
            kwargs: Likewise, by name.
            padded: Whether some rank has fewer rows than the bucket.
            checked: What `check` returned for this step.

        Returns:
            The outputs with this rank's own rows, copies if `clone_outputs` says so.

        Raises:
            SoundnessError: Something static moved or changed, or rows are padded that the call
                would write into a cache.
            CommunicationError: A transport is not where a region starts.
        """
        graph = self._graphs[bucket]
        found = (checked or {}).get(id(graph.inputs.arguments))
        if found is None:
            found = self._check(graph, args, kwargs)
        if padded and graph.unpaddable is not None:
            raise SoundnessError(graph.unpaddable)
        rows = next(
            t.shape[self.tokens.dim] for p, t in found.items() if graph.inputs.buffers[p][1]
        )
        graph.inputs.copy(found)
        for transport, groups_of in graph.regions:
            begin_region(transport, groups_of)
        assert self._device is not None
        self._device.replay(graph.captured)
        self.statistics.hits[bucket] += 1
        outputs = self.tokens.cut(graph.captured.outputs, bucket.rows, rows)
        if self.options.clone_outputs:
            return mapped(lambda t: t.clone() if isinstance(t, Tensor) else t, outputs)
        return outputs

    def release(self, bucket: Bucket) -> None:
        """Drop a bucket's graph, if it has one; its memory goes back to the pool.

        Buffers that no other graph shares go, too.
        """
        graph = self._graphs.pop(bucket, None)
        if graph is not None:
            assert self._device is not None
            self._device.release(graph.captured)
        graphs = self._graphs.values()
        self._buffers.keep(t for g in graphs for t, _ in g.inputs.buffers.values())

    def reset(self) -> None:
        """Drop all graphs and buffers: before weights move, or the process group is destroyed."""
        for bucket in self.buckets:
            self.release(bucket)
