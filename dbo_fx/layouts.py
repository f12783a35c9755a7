"""How one value of the whole batch relates to the values of the microbatches.

`dbo_fx.passes.sharding` computes a layout for every tensor of a graph. Sizes are concrete here: the
split size is a large prime, so that no other size is a multiple of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.fx import Node

from dbo_fx.capture import value_of
from dbo_fx.symbols import ConcreteSizes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every microbatch computes the whole batch's value; dims of the split size are constant.

    Attributes:
        shift: The value in a microbatch is the whole batch's minus `start * shift`: a counter that
            earlier microbatches have advanced has a negative one.
        state: It was read from an input that the microbatches write in turn.
    """

    shift: int = 0
    state: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """A microbatch holds its own part of dim `dim`, whose size is `outer * s * inner`.

    Attributes:
        dim: The dim, not negative.
        outer: Size of what was flattened into it from the left.
        inner: Size of what was flattened into it from the right.
        shift: As in `Replicated`: an index that counts from the microbatch's own start has the
            number of positions per row.
        region: It lies between a dispatch and its combine.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    shift: int = 0
    region: bool = False


@dataclass(frozen=True, slots=True)
class Inside:
    """Rows between dispatch and combine in an order of their own, which the combine undoes.

    Attributes:
        place: It says where rows are or how many there are, not what is in them.
    """

    place: bool = False


@dataclass(frozen=True, slots=True)
class Mixed:
    """A microbatch cannot compute its part: it would need other rows of the batch.

    Attributes:
        node: The node that mixed them.
        reason: What it does, as a phrase after the node's name.
        remedy: What to do about it, as a sentence.
    """

    node: Node
    reason: str
    remedy: str


Layout = Replicated | Split | Inside | Mixed
Layouts = Layout | tuple[Layout, ...]
REPLICATED = Replicated()
APART = "Compute it outside the compiled region, or split along another dim (option split_dim)."


class Mixing(Exception):
    """Raised by a rule: this call mixes rows."""

    def __init__(self, reason: str, remedy: str = APART) -> None:
        """What the call does, and what to do about it."""
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def mixes(reason: str, remedy: str = APART) -> NoReturn:
    """Leave a rule with the verdict `mixing`.

    Raises:
        Mixing: always.
    """
    raise Mixing(reason, remedy)


class Call:
    """One call of an op, as rules see it: arguments by the schema's names, layouts and sizes."""

    def __init__(self, node: Node, known: dict[Node, Layouts], sizes: ConcreteSizes) -> None:
        """Bind the arguments; `known` has the layouts of the tensor arguments."""
        self.node, self.known, self.sizes = node, known, sizes
        self.args: dict[str, Any] = {}
        if isinstance(node.target, torch._ops.OpOverload):
            for index, argument in enumerate(node.target._schema.arguments):
                given = node.args[index] if index < len(node.args) else None
                given = node.kwargs.get(argument.name, given)
                self.args[argument.name] = argument.default_value if given is None else given

    def __getitem__(self, name: str) -> Any:
        """An argument, with size nodes replaced by numbers; None if the op has none such."""
        return torch.fx.map_arg(self.args.get(name), self._number)

    def _number(self, node: Node) -> Any:
        value = value_of(node)
        return node if isinstance(value, torch.Tensor | list | tuple) else self.sizes.number(value)

    def layout(self, node: Any) -> Layout:
        """The layout of a tensor argument; replicated for anything else."""
        found = self.known.get(node, REPLICATED) if isinstance(node, Node) else REPLICATED
        assert not isinstance(found, tuple)
        return found

    def split(self, node: Any) -> Split | None:
        """The layout of a tensor argument if it is split."""
        found = self.layout(node)
        return found if isinstance(found, Split) else None

    def shape(self, node: Node) -> Shape:
        """The concrete sizes of a tensor argument."""
        return self.sizes.shape(value_of(node))

    def rank(self, node: Node) -> int:
        """The number of dims of a tensor argument."""
        return int(value_of(node).dim())

    def dim(self, node: Node, dim: int) -> int:
        """A dim argument that refers to `node`, not negative."""
        return dim % max(self.rank(node), 1)

    @property
    def out(self) -> Shape:
        """The concrete sizes of the only result."""
        return self.sizes.shape(value_of(self.node))

    @property
    def results(self) -> int:
        """How many results there are."""
        value = value_of(self.node)
        return len(value) if isinstance(value, list | tuple) else 1

    def is_list(self) -> bool:
        """Whether the call returns a tuple or list of tensors, even of one."""
        return isinstance(value_of(self.node), list | tuple)

    def sizes_of_results(self) -> list[Shape]:
        """The concrete sizes of every tensor that the call returns."""
        value = value_of(self.node)
        leaves = value if isinstance(value, list | tuple) else [value]
        return [self.sizes.shape(v) for v in leaves if isinstance(v, torch.Tensor)]

    def tensors(self) -> list[Node]:
        """The tensor arguments in order, those in lists included."""
        nodes = self.node.all_input_nodes
        return [n for n in nodes if isinstance(value_of(n), torch.Tensor)]

    def varies(self, size: int) -> bool:
        """Whether this concrete size follows the split size."""
        return size % self.sizes.prime == 0 and size > 0


def reshaped(source: Shape, target: Shape, layout: Split) -> Split | None:
    """The layout after a view: equal element order, other dims; None if rows are cut or joined."""
    before = _product(source[: layout.dim]) * layout.outer
    whole = _product(target)
    prime = source[layout.dim] // (layout.outer * layout.inner)
    if not whole or not prime:
        return None
    passed = 1
    for dim, size in enumerate(target):
        if before % passed == 0 and size % (before // passed * prime) == 0:
            outer = before // passed
            return replace(layout, dim=dim, outer=outer, inner=size // (outer * prime))
        passed *= size
    return None


def as_split(shape: Shape, prime: int) -> Split | None:
    """A replicated value with a dim of the split size, which is constant along it, as a split."""
    dims = [d for d, size in enumerate(shape) if size and size % prime == 0]
    return Split(dims[0], 1, shape[dims[0]] // prime) if len(dims) == 1 else None


def candidates(shape: Shape, prime: int, like: Split) -> Iterator[Split]:
    """Every split of a shape that could look like `like` through some view."""
    for dim, size in enumerate(shape):
        if size and size % prime == 0:
            factor = size // prime
            for outer in sorted({1, like.outer, factor, *_divisors(factor)}):
                if factor % outer == 0:
                    yield replace(like, dim=dim, outer=outer, inner=factor // outer)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
