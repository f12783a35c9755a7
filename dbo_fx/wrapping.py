"""Bring every rank's batch to one size before a compiled model, and decide together who splits.

Compiled graphs are good for two rows and more, and dispatch needs the same number of rows on every
rank. So each call (1) finds the arguments that hold token rows, (2) agrees once with the other
ranks (`agree.agree_batch`), (3) pads these arguments with zero rows, (4) runs the split or the
unsplit model, the same one on every rank, and (5) cuts the padding from the outputs. A rank with no
rows runs too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from dbo_fx.agree import agree_batch
from dbo_fx.decision import NO_THRESHOLDS, AgreementPolicy, BatchDecision, BatchKind
from dbo_fx.errors import AgreementError, OptionError
from dbo_fx.padding import STEP, Padding
from dbo_fx.plan_digest import Ran


@dataclass(slots=True)
class WrapStatistics:
    """What a wrapped model did so far.

    Attributes:
        split_steps: Calls that ran the compiled model.
        unsplit_steps: Calls that ran the unsplit model, by reason.
        rows: Rows that this rank brought.
        padding_rows: Zero rows that were added to them.
        decision: What the ranks decided in the last call, None before the first.
    """

    split_steps: int = 0
    unsplit_steps: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    padding_rows: int = 0
    decision: BatchDecision | None = None

    def __str__(self) -> str:
        """Return one line, and one more for each reason not to split."""
        lines = [
            f"{self.split_steps} steps split, {self.unsplit_steps.total()} not split; "
            f"{self.rows} rows, {self.padding_rows} rows of padding"
        ]
        lines += [f"  {count} not split: {why}" for why, count in self.unsplit_steps.items()]
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
    return WrappedModel(
        compiled=compiled,
        unsplit=unsplit,
        group=group,
        split_dim=split_dim,
        token_args=None if token_args is None else tuple(token_args),
        allow=allow,
        policy=replace(policy, least_rows=max(policy.least_rows, 2 * num_microbatches)),
        kind=kind,
        plan=plan,
        pad=None if pad is None else dict(pad),
    )


@dataclass(slots=True)
class WrappedModel:
    """A compiled model that takes any number of rows; made by `wrap`.

    Attributes:
        compiled: Runs when the ranks decided to split.
        unsplit: Runs otherwise.
        group: The process group, its name, or None for the default group.
        split_dim: Dimension of the token rows.
        token_args: Names of the arguments that hold them, or None to go by size.
        allow: Whether this rank allows the split, or a function of its rows.
        policy: Thresholds, buckets and the fewest rows that either model sees.
        kind: What the rows are, or a function of their number.
        plan: What must be the same on every rank; empty for the plans that ran.
        pad: Values for the added rows by argument name, or None for zeros.
        statistics: What the calls did so far.
        ran: The plans of the dbo_fx programs that ran so far.
    """

    compiled: Callable[..., Any]
    unsplit: Callable[..., Any]
    group: dist.ProcessGroup | str | None
    split_dim: int
    token_args: tuple[str, ...] | None
    allow: bool | Callable[[int], bool]
    policy: AgreementPolicy
    kind: BatchKind | Callable[[int], BatchKind]
    plan: str
    pad: dict[str, float] | None = None
    statistics: WrapStatistics = field(default_factory=WrapStatistics)
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
        try:
            tokens, rows = self._tokens(args, kwargs)
            fill = self._fill(args, kwargs)
            allowed = self.allow(rows) if callable(self.allow) else self.allow
            kind = self.kind(rows) if callable(self.kind) else self.kind
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
        padded = decision.padded_rows
        args, kwargs = self._padded(args, kwargs, tokens, padded, fill)
        told = STEP.set(self._padding(decision))
        try:
            with self.ran:
                outputs = self._choose(decision)(*args, **kwargs)
        finally:
            STEP.reset(told)
        self.statistics.rows += rows
        self.statistics.padding_rows += padded - rows
        self.statistics.decision = decision
        return self._cut(outputs, padded, rows)

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
        return Padding.ZEROS if self.pad is None else Padding.NAMED

    def _tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], int]:
        """Return the ids of the tensors that hold token rows, and the number of rows."""
        where: Any = (args, kwargs) if self.token_args is None else self._named(args, kwargs)
        leaves = [
            leaf
            for leaf in _leaves(where)
            if isinstance(leaf, Tensor) and leaf.dim() > self.split_dim
        ]
        if not leaves:
            raise OptionError(
                f"wrap: found no tensor with a dimension {self.split_dim} among "
                f"{self.token_args or 'the arguments'}, wanted at least one that holds token rows. "
                "Pass the tokens as a tensor, or name them with token_args=..."
            )
        rows = int(leaves[0].shape[self.split_dim])
        sizes = sorted({int(leaf.shape[self.split_dim]) for leaf in leaves})
        if self.token_args is not None and len(sizes) > 1:
            raise OptionError(
                f"wrap: token_args {self.token_args} have sizes {sizes} along dimension "
                f"{self.split_dim}, wanted one size. Name only the tensors that hold token rows."
            )
        return {id(t) for t in leaves if t.shape[self.split_dim] == rows}, rows

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the values of the arguments in `token_args`, however they were passed."""
        return self._by_name(args, kwargs, "token_args", self.token_args or ())

    def _by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], option: str, names: Sequence[str]
    ) -> list[Any]:
        original = original_of(self.compiled) or self.compiled
        target = original.forward if isinstance(original, torch.nn.Module) else original
        bound = inspect.signature(target).bind_partial(*args, **kwargs).arguments
        # What the signature collects in **kwargs is still an argument by name.
        given = {**bound, **kwargs}
        missing = [name for name in names if name not in given]
        if missing:
            raise OptionError(
                f"wrap: {option} {missing} were not passed, found {sorted(given)}. Pass them, "
                f"or leave their names out of {option}."
            )
        return [given[name] for name in names]

    def _fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, float]:
        """The named values for added rows, by the tensors' ids."""
        names = self.pad or {}
        values = self._by_name(args, kwargs, "pad", tuple(names))
        return {id(t): names[name] for name, t in zip(names, values, strict=True)}

    def _padded(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tokens: set[int],
        padded: int,
        fill: dict[int, float],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every token tensor padded and marked dynamic."""

        def pad(leaf: Any) -> Any:
            if id(leaf) not in tokens:
                return leaf
            missing = padded - leaf.shape[self.split_dim]
            if missing:
                shape = list(leaf.shape)
                shape[self.split_dim] = missing
                rows = leaf.new_full(shape, fill.get(id(leaf), 0))
                leaf = torch.cat([leaf, rows], self.split_dim)
            torch._dynamo.mark_dynamic(leaf, self.split_dim)
            return leaf

        padded_args: tuple[tuple[Any, ...], dict[str, Any]] = _mapped(pad, (args, kwargs))
        return padded_args

    def _choose(self, decision: BatchDecision) -> Callable[..., Any]:
        """Return the model that every rank runs, and count why."""
        if decision.split:
            self.statistics.split_steps += 1
            return self.compiled
        self.statistics.unsplit_steps[decision.reason] += 1
        return self.unsplit

    def _cut(self, outputs: Any, padded: int, rows: int) -> Any:
        """Return the outputs with this rank's rows where they have the padded number."""

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= self.split_dim:
                return leaf
            if leaf.shape[self.split_dim] != padded:
                return leaf
            return leaf.narrow(self.split_dim, 0, rows)

        return outputs if padded == rows else _mapped(cut, outputs)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all leaves, within dataclasses too, which are no containers to pytree."""

    def leaf(item: Any) -> Any:
        if not dataclasses.is_dataclass(item) or isinstance(item, type):
            return function(item)
        inner = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.init}
        return dataclasses.replace(item, **{n: _mapped(function, v) for n, v in inner.items()})

    return pytree.tree_map(leaf, value)


def _leaves(value: Any) -> list[Any]:
    """All leaves that `_mapped` visits."""
    found: list[Any] = []
    _mapped(lambda item: found.append(item) or item, value)  # type: ignore[func-returns-value]
    return found


def original_of(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the module or function that `torch.compile` was given, None if there is none."""
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        module: Callable[..., Any] = compiled._orig_mod
        return module
    function: Callable[..., Any] | None = getattr(compiled, "_torchdynamo_orig_callable", None)
    return function
