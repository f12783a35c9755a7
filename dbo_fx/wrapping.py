"""Bring every rank's batch to one size before a compiled model, and decide together who splits.

Compiled graphs are good for two rows and more, and dispatch needs the same number of rows on every
rank. So each call (1) finds the arguments that hold token rows, (2) agrees once with the other
ranks (`agree.agree_batch`), (3) pads these arguments with zero rows, (4) runs the split or the
unsplit model, the same one on every rank, and (5) cuts the padding from the outputs. A rank with no
rows runs too. Where the step's bucket was captured, (3) and (4) are a replay of its CUDA graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from dbo_fx.agree import agree_batch
from dbo_fx.buckets import SPLIT, UNSPLIT, Bucket, GraphOptions, GraphStatistics, several
from dbo_fx.decision import NO_THRESHOLDS, AgreementPolicy, BatchDecision, BatchKind
from dbo_fx.errors import AgreementError, OptionError
from dbo_fx.graphs import Checked, CudaGraphs
from dbo_fx.padding import STEP, Padding
from dbo_fx.plan_digest import Ran
from dbo_fx.token_rows import TokenRows, original_of


@dataclass(slots=True)
class WrapStatistics:
    """What a wrapped model did so far.

    Attributes:
        split_steps: Calls that ran the compiled model.
        unsplit_steps: Calls that ran the unsplit model, by reason.
        rows: Rows that this rank brought.
        padding_rows: Zero rows that were added to them.
        decision: What the ranks decided in the last call, None before the first.
        graphs: Replays by bucket and eager runs by reason.
    """

    split_steps: int = 0
    unsplit_steps: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    padding_rows: int = 0
    decision: BatchDecision | None = None
    graphs: GraphStatistics = field(default_factory=GraphStatistics)

    def __str__(self) -> str:
        """Return one line, one more for each reason not to split, and the graphs if any."""
        lines = [
            f"{self.split_steps} steps split, {self.unsplit_steps.total()} not split; "
            f"{self.rows} rows, {self.padding_rows} rows of padding"
        ]
        lines += [f"  {count} not split: {why}" for why, count in self.unsplit_steps.items()]
        if self.graphs.captured:
            lines.append(str(self.graphs))
        return "\n".join(lines)


def wrap(
    compiled: Callable[..., Any],
    group: dist.ProcessGroup | str | None = None,
    *,
    num_microbatches: int = 2,
    split_dim: int = 0,
    token_args: Sequence[str] | None = None,
    allow: bool | Callable[[int], bool] = True,
    unsplit: Callable[..., Any] | None = None,
    policy: AgreementPolicy = NO_THRESHOLDS,
    kind: BatchKind | Callable[[int], BatchKind] = BatchKind.PREFILL,
    plan: str = "",
    pad: Mapping[str, float] | None = None,
    graphs: GraphOptions | None = None,
) -> WrappedModel:
    """Make a compiled model callable with any number of rows on each rank.

    Args:
        compiled: What `torch.compile` returned.
        group: The process group, its name, or None for the default group.
        num_microbatches: Microbatches that the compiled model splits into; every rank gets at
            least two rows for each.
        split_dim: Dimension of the token rows, in arguments and outputs.
        token_args: Names of the arguments that hold token rows. By default: every tensor whose
            size along `split_dim` is that of the first tensor; name them if another tensor may
            have this size by coincidence.
        allow: Whether this rank allows the split, or a function of its rows that says so. One
            rank that does not allow it keeps all from splitting.
        unsplit: What runs then, on the same padded rows. By default the original module or
            function behind `compiled`, compiled anew with torch's default backend.
        policy: From how many rows on a step is split, to which sizes it is padded, and how long it
            waits for the other ranks. By default every step is split that all ranks allow.
        kind: What the rows of a call are, or a function of their number that says so; the policy
            has a threshold for each kind.
        plan: What this rank is about to run; a rank with another one stops all ranks. By default
            the plans of the dbo_fx programs that ran in earlier steps of this wrapped model, so
            that a rank whose program changed is named.
        pad: Values for the added rows by argument name, for example `{"slot_mapping": -1}`; other
            arguments get zeros. Naming it says that added rows are harmless to what the model
            writes in place; without it a step that pads on some rank is refused if the compiled
            program writes caches or counters. Nothing may count rows by their number then.
        graphs: How `WrappedModel.capture` captures the policy's buckets, and how they are replayed.

    Returns:
        A callable with the arguments and the result of `compiled`. Every output tensor that has
        the padded number of rows along `split_dim` is cut, so an output without token rows must
        not have that size.

    Raises:
        OptionError: An argument is out of range, or there is no original behind `compiled`.
    """
    if num_microbatches < 1 or split_dim < 0:
        raise OptionError(
            f"wrap: num_microbatches is {num_microbatches} and split_dim is {split_dim}, wanted "
            "1 or more microbatches and a dimension counted from the front (0 or more)"
        )
    original = original_of(compiled)
    if unsplit is None:
        if original is None:
            raise OptionError(
                f"wrap: found no original behind {type(compiled).__name__}, wanted what "
                "torch.compile returned. Pass unsplit=... with the model to run when a rank does "
                "not allow the split."
            )
        unsplit = torch.compile(original)
    captures = CudaGraphs(
        {SPLIT: compiled, UNSPLIT: unsplit},
        split_dim=split_dim,
        token_args=token_args,
        pad=None if pad is None else dict(pad),
        group=group,
        options=graphs,
    )
    captures.tokens = replace(captures.tokens, who="wrap")
    return WrappedModel(
        compiled=compiled,
        unsplit=unsplit,
        group=group,
        tokens=captures.tokens,
        allow=allow,
        policy=replace(policy, least_rows=max(policy.least_rows, 2 * num_microbatches)),
        kind=kind,
        plan=plan,
        graphs=captures,
        statistics=WrapStatistics(graphs=captures.statistics),
    )


@dataclass(slots=True)
class WrappedModel:
    """A compiled model that takes any number of rows; made by `wrap`.

    Attributes:
        compiled: Runs when the ranks decided to split.
        unsplit: Runs otherwise.
        group: The process group, its name, or None for the default group.
        tokens: How token rows are found, padded and cut.
        allow: Whether this rank allows the split, or a function of its rows.
        policy: Thresholds, buckets and the fewest rows that either model sees.
        kind: What the rows are, or a function of their number.
        plan: What must be the same on every rank; empty for the plans that ran.
        graphs: The captured buckets.
        statistics: What the calls did so far.
        ran: The plans of the dbo_fx programs that ran so far.
    """

    compiled: Callable[..., Any]
    unsplit: Callable[..., Any]
    group: dist.ProcessGroup | str | None
    tokens: TokenRows
    allow: bool | Callable[[int], bool]
    policy: AgreementPolicy
    kind: BatchKind | Callable[[int], BatchKind]
    plan: str
    graphs: CudaGraphs
    statistics: WrapStatistics
    ran: Ran = field(default_factory=Ran)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; every rank of the group must call this equally often.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The model's outputs with this rank's own number of rows.

        Raises:
            OptionError: The token arguments were not found on this rank.
            AgreementError: They were not found on another rank, or the ranks could not agree; see
                `agree.agree_batch`.
        """
        decision, checked = self._decide(args, kwargs)
        return self._run(decision, args, kwargs, checked)

    def decide(self, *args: Any, **kwargs: Any) -> BatchDecision:
        """Agree with all ranks on the step, and run nothing: for a caller who captures `run`.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The decision, the same on every rank.

        Raises:
            OptionError: The token arguments were not found on this rank.
            SoundnessError: A CUDA graph was captured with other static memory.
            AgreementError: Another rank raised one of these, or the ranks could not agree; see
                `agree.agree_batch`.
        """
        return self._decide(args, kwargs)[0]

    def _decide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[BatchDecision, Checked]:
        try:
            _, rows = self.tokens.find(args, kwargs)
            self.tokens.fill(args, kwargs)
            checked = self.graphs.check(rows, args, kwargs)
            allowed = self.allow(rows) if callable(self.allow) else self.allow
            kind = self._kind(rows)
        except Exception:
            # The other ranks are about to wait for this one: come, and say that it gives up.
            self._agree(0, False, failed=True)
            raise
        decision = self._agree(rows, bool(allowed), kind=kind)
        if decision.failing:
            raise AgreementError(
                f"wrap: ranks {list(decision.failing)} of {decision.ranks} could not prepare their "
                "arguments, so no rank runs this step. See the error raised there."
            )
        return decision, checked

    def run(self, decision: BatchDecision, *args: Any, **kwargs: Any) -> Any:
        """Run a step that the ranks have decided on; nothing is agreed any more.

        Under a `torch.cuda.graph` of the caller's this captures the model as it is, so the graph
        is good for steps with the same decision.

        Args:
            decision: What `decide` returned for arguments with as many rows.
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The model's outputs with this rank's own number of rows.

        Raises:
            OptionError: There are more rows than the decision pads to.
        """
        return self._run(decision, args, kwargs, None)

    def _run(
        self,
        decision: BatchDecision,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        checked: Checked | None,
    ) -> Any:
        tokens, rows = self.tokens.find(args, kwargs)
        padded = decision.padded_rows
        if rows > padded:
            raise OptionError(
                f"wrap: found {rows} rows, the decision has room for {padded}. Call decide(...) "
                "with the arguments of this step."
            )
        model, plan = self._choose(decision)
        bucket = Bucket(padded, decision.kind, plan)
        if bucket in self.graphs:
            some_pad = self._padding(decision) is not Padding.NONE
            outputs = self.graphs.replay(bucket, args, kwargs, padded=some_pad, checked=checked)
        else:
            self.graphs.count_eager(f"no graph for {bucket}")
            fill = self.tokens.fill(args, kwargs)
            args, kwargs = self.tokens.padded(args, kwargs, tokens, padded, fill)
            told = STEP.set(self._padding(decision))
            try:
                with self.ran:
                    outputs = model(*args, **kwargs)
            finally:
                STEP.reset(told)
            outputs = self.tokens.cut(outputs, padded, rows)
        self.statistics.rows += rows
        self.statistics.padding_rows += padded - rows
        self.statistics.decision = decision
        return outputs

    def capture(self, buckets: Iterable[int | Bucket], *args: Any, **kwargs: Any) -> None:
        """Capture CUDA graphs; every rank must call this with the same buckets.

        Args:
            buckets: Of the policy's. A number stands for the split step of that many rows, of the
                kind that `kind` says; other kinds and unsplit steps are given as `Bucket`s.
            *args: Example arguments with any number of token rows; everything without token rows
                is static memory, which every later step must bring again.
            **kwargs: Likewise, by name.

        Raises:
            OptionError: A bucket is not among the policy's; or see `CudaGraphs.capture`.
        """
        wanted = [
            b if isinstance(b, Bucket) else Bucket(b, self._kind(b)) for b in several(buckets)
        ]
        usable = [size for size in self.policy.buckets if size >= self.policy.least_rows]
        for bucket in wanted:
            if bucket.rows not in usable:
                raise OptionError(
                    f"wrap: no step is padded to {bucket.rows} rows, found buckets {usable} (of "
                    f"{self.policy.least_rows} rows or more) in the policy. Name it there: "
                    "AgreementPolicy(buckets=...)."
                )
        with self.ran:
            self.graphs.capture(wanted, *args, **kwargs)

    def _kind(self, rows: int) -> BatchKind:
        return self.kind(rows) if callable(self.kind) else self.kind

    def _agree(
        self,
        rows: int,
        allowed: bool,
        *,
        kind: BatchKind = BatchKind.PREFILL,
        failed: bool = False,
    ) -> BatchDecision:
        """Return what all ranks decide."""
        return agree_batch(
            rows,
            allowed,
            self.group,
            failed=failed,
            kind=kind,
            plan=self.plan or str(self.ran),
            policy=self.policy,
        )

    def _padding(self, decision: BatchDecision) -> Padding:
        """What every rank tells its program: whether any of them padded."""
        if decision.padded_rows == decision.min_rows:
            return Padding.NONE
        return Padding.ZEROS if self.tokens.pad is None else Padding.NAMED

    def _choose(self, decision: BatchDecision) -> tuple[Callable[..., Any], str]:
        """Return the model that every rank runs and its plan, and count why."""
        if decision.split:
            self.statistics.split_steps += 1
            return self.compiled, SPLIT
        self.statistics.unsplit_steps[decision.reason] += 1
        return self.unsplit, UNSPLIT
