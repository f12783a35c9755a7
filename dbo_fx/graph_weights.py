"""The weights of captured calls: found behind them, and checked to lie where they lay."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from dbo_fx.errors import SoundnessError
from dbo_fx.token_rows import original_of


class Weights:
    """The parameters and buffers of a model, as they lay at the capture.

    Args:
        calls: What was captured; of compiled models and functions, the modules behind them.

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
        for module in modules_behind(list(calls.values())):
            if id(module) not in seen:
                seen.add(id(module))
                self._add(module)
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


def modules_behind(calls: Iterable[Any]) -> list[nn.Module]:
    """Modules that calls are, are methods of, or close over; those in globals are not found.

    Args:
        calls: Modules, functions, partials; compiled or not.
    """
    found: list[nn.Module] = []
    waiting, seen = list(calls), set[int]()
    while waiting:
        call = waiting.pop(0)
        if id(call) in seen or not callable(call):
            continue
        seen.add(id(call))
        original = original_of(call) or call
        if isinstance(original, nn.Module):
            found.append(original)
        elif isinstance(original, functools.partial):
            waiting += [original.func, *original.args, *original.keywords.values()]
        else:
            waiting.append(getattr(original, "__self__", None))
            inner = getattr(original, "__func__", original)
            for cell in getattr(inner, "__closure__", None) or ():
                with suppress(ValueError):  # An empty cell.
                    waiting.append(cell.cell_contents)
    return found
