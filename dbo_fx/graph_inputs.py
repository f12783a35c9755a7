"""The inputs of captured calls: buffers for token rows, addresses of everything else.

A graph reads the memory that it was captured with. Token rows are copied there before a replay.
Everything else is static: it must be the same memory, with the same shape, or the same value; this
is checked, and an error names the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dbo_fx.errors import SoundnessError
from dbo_fx.graph_arguments import Arguments
from dbo_fx.graph_weights import Weights
from dbo_fx.token_rows import TokenRows, mapped


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

    def keep(self, used: Iterable[Tensor]) -> None:
        """Let go of memory that none of these buffers lies in."""
        places = {tensor.untyped_storage().data_ptr() for tensor in used}
        self.storages = {p: s for p, s in self.storages.items() if s.data_ptr() in places}


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
        host: Static tensors on the host of a graph elsewhere, by path, with their values.
    """

    rows: int
    tokens: TokenRows
    arguments: Arguments
    weights: Weights
    buffers: dict[str, tuple[Tensor, bool]]
    fill: dict[str, float]
    host: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

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
        self.check_host()
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

    def note_host(self, device: torch.device) -> None:
        """Remember what a graph on a device keeps of tensors on the host; it reads pinned ones.

        Args:
            device: Where the graph runs.
        """
        for path, tensor in self.arguments.named_static():
            if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
                self.host[path] = tensor, tensor.clone(memory_format=torch.contiguous_format)

    def check_host(self) -> None:
        """Refuse other values on the host than at the capture.

        Raises:
            SoundnessError: Names the argument.
        """
        for path, (tensor, value) in self.host.items():
            if not torch.equal(_bits(tensor), _bits(value)):
                raise SoundnessError(
                    f"CUDA graph: argument {path!r} lies on the CPU and has changed since the "
                    "capture, and a replay neither reads nor writes it. Move it to the graph's "
                    "device, or bring the same values."
                )

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


def _bits(tensor: Tensor) -> Tensor:
    """A CPU tensor's values, among which NaN is equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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
