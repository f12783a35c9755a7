"""The inputs of captured calls: buffers for token rows, addresses of everything else.

A graph reads the memory that it was captured with. Token rows are copied there before a replay.
Everything else is static: it must be the same memory, with the same shape, or the same value; this
is checked, and an error names the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dbo_fx.errors import SoundnessError
from dbo_fx.graph_arguments import Arguments
from dbo_fx.token_rows import TokenRows, mapped, original_of


class Weights:
    """The parameters and buffers of a model, as they lay at the capture.

    Args:
        calls: What was captured; of compiled models, the module behind them.

    Attributes:
        tensors: All of them. Kept, so that nothing else may get this memory.
        buffers: Without the parameters.
    """

    def __init__(self, calls: Mapping[str, Any]) -> None:
        """Take addresses."""
        self._paths: list[str] = []
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self.tensors: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self._modules: list[tuple[str, dict[str, Any], str, nn.Module]] = []
        seen: set[int] = set()
        for call in calls.values():
            original = original_of(call) or call
            if isinstance(original, nn.Module) and id(original) not in seen:
                seen.add(id(original))
                self._add(original)
        self._addresses = list(map(Tensor.data_ptr, self.tensors))

    def _add(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        self._paths.append(f"{prefix}.{name}" if prefix else name)
                        self._holders.append(holder)
                        self._names.append(name)
                        self.tensors.append(tensor)
            for name, part in module._modules.items():
                if part is not None:
                    path = f"{prefix}.{name}" if prefix else name
                    self._modules.append((path, module._modules, name, part))
            self.buffers.extend(t for t in module._buffers.values() if t is not None)

    def check(self) -> None:
        """Refuse a weight that has moved.

        Raises:
            SoundnessError: Names it.
        """
        # Every step does this for every weight, so the loops are those of `map`.
        now = list(map(dict.get, self._holders, self._names))
        if all(map(operator.is_, now, self.tensors)):
            places = list(map(Tensor.data_ptr, self.tensors))
            if places == self._addresses:
                self._check_modules()
                return
        for path, tensor, address in zip(self._paths, now, self._addresses, strict=True):
            if tensor is None or tensor.data_ptr() != address:
                where = "nowhere" if tensor is None else f"at {tensor.data_ptr():#x}"
                raise SoundnessError(
                    f"CUDA graph: weight {path!r} lies {where}, the capture read {address:#x}: a "
                    "replay would use the old one. Load weights in place (copy_), or capture again."
                )
        self._check_modules()

    def _check_modules(self) -> None:
        for path, holder, name, part in self._modules:
            if holder.get(name) is not part:
                raise SoundnessError(
                    f"CUDA graph: module {path!r} is another one than at the capture: a replay "
                    "would use the old one's weights. Load weights in place (copy_), or capture "
                    "again."
                )


@dataclass(slots=True)
class Buffers:
    """The memory that token rows are copied to; smaller buckets use the start of the largest's.

    Attributes:
        dim: Dimension of the token rows.
        storages: By path, memory for the largest bucket.
    """

    dim: int
    storages: dict[str, torch.UntypedStorage] = field(default_factory=dict)

    def buffer(self, path: str, like: Tensor, rows: int | None) -> Tensor:
        """A buffer in this memory.

        Args:
            path: The argument's.
            like: Gives dtype, device and the other sizes.
            rows: Token rows; None for a tensor that is copied whole.
        """
        shape = list(like.shape)
        if rows is not None:
            shape[self.dim] = rows
        with torch.inference_mode(False), torch.no_grad():
            fresh = torch.zeros(shape, dtype=like.dtype, device=like.device)
            known = self.storages.get(path)
            if known is None or known.nbytes() < fresh.untyped_storage().nbytes():
                self.storages[path] = fresh.untyped_storage()
                return fresh
            # No view: Dynamo would guard on what it is a view of.
            empty = torch.empty(0, dtype=like.dtype, device=like.device)
            return empty.set_(known, 0, fresh.shape, fresh.stride())


@dataclass(slots=True)
class StaticInputs:
    """The inputs of one graph.

    Attributes:
        rows: Token rows of the bucket.
        tokens: How to find and pad them.
        arguments: What the capture was given.
        weights: Of the captured calls.
        buffers: The buffers by path, and whether each holds token rows.
        fill: Values for added rows by path.
    """

    rows: int
    tokens: TokenRows
    arguments: Arguments
    weights: Weights
    buffers: dict[str, tuple[Tensor, bool]]
    fill: dict[str, float]

    def device(self) -> torch.device:
        """Where the graph runs: on CUDA if anything is there.

        Raises:
            SoundnessError: A tensor to copy lies elsewhere.
        """
        copied = {path: tensor for path, (tensor, _) in self.buffers.items()}
        tensors = [*copied.values(), *self.arguments.static(), *self.weights.tensors]
        devices = [tensor.device for tensor in tensors]
        device = next((d for d in devices if d.type == "cuda"), devices[0])
        for path, tensor in copied.items():
            if device.type == "cuda" and tensor.device != device:
                raise SoundnessError(
                    f"CUDA graph: argument {path!r}, which changes with every step, lies on "
                    f"{tensor.device}, and the graph runs on {device}: it would keep what it read "
                    "there at the capture. Bring it on the graph's device, or name the others in "
                    "token_args=... if it holds no token rows."
                )
        return device

    def check(self, bound: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to copy, by path.

        Raises:
            SoundnessError: Something static moved or changed, or a tensor to copy does not fit.
        """
        found = self.arguments.check(bound)
        rows = {t.shape[self.tokens.dim] for p, t in found.items() if self.buffers[p][1]}
        for path, tensor in found.items():
            buffer, has_rows = self.buffers[path]
            wanted, shape = list(buffer.shape), list(tensor.shape)
            if has_rows and len(shape) == len(wanted):
                wanted[self.tokens.dim] = shape[self.tokens.dim]
            alike = (shape, tensor.dtype, tensor.device) == (wanted, buffer.dtype, buffer.device)
            if not alike or len(rows) > 1:
                raise SoundnessError(
                    f"CUDA graph: argument {path!r} is {tensor.dtype} {shape} on {tensor.device}, "
                    f"the capture had {buffer.dtype} {list(buffer.shape)} on {buffer.device}, and "
                    f"token rows {sorted(rows)} were found. Bring the same but for the token rows, "
                    "equally many everywhere, or capture again."
                )
        return found

    def copy(self, found: Mapping[str, Tensor]) -> None:
        """Copy values into the buffers, rows first, then what padding needs."""
        with torch.no_grad():
            for path, tensor in found.items():
                buffer, has_rows = self.buffers[path]
                rows = tensor.shape[self.tokens.dim] if has_rows else self.rows
                if not has_rows or rows == self.rows:
                    buffer.copy_(tensor, non_blocking=True)
                    continue
                buffer.narrow(self.tokens.dim, 0, rows).copy_(tensor, non_blocking=True)
                added = buffer.narrow(self.tokens.dim, rows, self.rows - rows)
                added.fill_(self.fill.get(path, 0))

    def held(self) -> set[int]:
        """Addresses of the storages of all inputs."""
        tensors = [t for t, _ in self.buffers.values()]
        tensors += list(self.arguments.static())
        return {t.untyped_storage().data_ptr() for t in tensors}


@dataclass(frozen=True, slots=True)
class Example:
    """What the graphs of one `capture` have in common.

    Attributes:
        args: The example's arguments.
        kwargs: Likewise, by name.
        tokens: Ids of its tensors with token rows.
        arguments: What the graphs assume of the arguments.
        weights: And of the model's weights.
        fill: Values for added rows by the tensors' ids.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: set[int]
    arguments: Arguments
    weights: Weights
    fill: dict[int, float]

    def static(
        self, rows: int, tokens: TokenRows, memory: Buffers
    ) -> tuple[StaticInputs, tuple[Any, ...], dict[str, Any]]:
        """Buffers with the example's rows in them.

        Args:
            rows: Token rows of the bucket.
            tokens: How rows are padded.
            memory: Where the buffers are.

        Returns:
            The inputs of the bucket's graph, and the arguments that hold its buffers.
        """
        dim = tokens.dim
        inputs = StaticInputs(rows, tokens, self.arguments, self.weights, {}, {})
        values, new = {}, {}
        for path, tensor in self.arguments.copied.items():
            has_rows = id(tensor) in self.tokens
            buffer = memory.buffer(path, tensor, rows if has_rows else None)
            values[path] = tensor
            if has_rows:
                torch._dynamo.mark_dynamic(buffer, dim)
                values[path] = tensor.narrow(dim, 0, min(rows, tensor.shape[dim]))
            inputs.buffers[path] = buffer, has_rows
            inputs.fill[path] = self.fill.get(id(tensor), 0)
            new[id(tensor)] = buffer
        inputs.copy(values)
        args, kwargs = mapped(lambda leaf: new.get(id(leaf), leaf), (self.args, self.kwargs))
        return inputs, args, kwargs
