"""From Dynamo's graph to the graph the passes work on.

needs:    a Dynamo graph whose inputs carry fake example values, under no_grad or inference mode
ensures:  every call is an ATen (or custom) op with a schema, or size arithmetic; in-place ops are
          still in place; one size symbol, the one to split, is known with its range and guards
before -> after: `torch.nn.functional.linear(x, w)` -> `aten.linear.default(x, w)`

Why this route and no functionalisation: `docs/capture.md`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from dbo_fx import opaque
from dbo_fx.errors import UnsupportedGraphError
from dbo_fx.symbols import (
    FakeTensorMode,
    SizeRules,
    enable_python_dispatcher,
    expression,
    fake_mode_of,
    free_symbols,
    hint_of,
    make_fx,
    preserve_node_meta,
    size_rules,
    source_name,
)

MARK_HINT = "Mark the token dim before the first call: torch._dynamo.mark_dynamic(x, 0)."


@dataclass(frozen=True, slots=True)
class TokenInput:
    """A graph input that is split: its placeholder's name, position and split dim."""

    name: str
    index: int
    dim: int


@dataclass(frozen=True)
class CapturedGraph:
    """One MoE forward as an ATen graph.

    Attributes:
        module: The graph; its placeholders take Dynamo's inputs in Dynamo's order.
        dynamo: Dynamo's own graph, kept for its names; None for a graph loaded from a file.
        symbol: The size symbol that is split.
        rules: What tracing assumed about that symbol.
        token_inputs: The tensor inputs with that symbol in their shape.
        fake_mode: The mode that the nodes' `meta["val"]` belong to.
    """

    module: GraphModule
    dynamo: GraphModule | None
    symbol: sympy.Symbol
    rules: SizeRules
    token_inputs: tuple[TokenInput, ...]
    fake_mode: FakeTensorMode

    @property
    def graph(self) -> Graph:
        """The ATen graph."""
        return self.module.graph

    def __str__(self) -> str:
        """One line per fact; the graph itself prints with `.module.print_readable()`."""
        inputs = ", ".join(f"{t.name} dim {t.dim}" for t in self.token_inputs)
        calls = sum(n.op == "call_function" for n in self.graph.nodes)
        upper = "inf" if self.rules.upper is None else self.rules.upper
        return (
            f"captured graph: {calls} calls, {len(self.placeholders)} inputs\n"
            f"split along {self.symbol}, {self.rules.lower} to {upper}: {inputs}\n"
            f"guards on it: {', '.join(map(str, self.rules.guards)) or 'none'}"
        )

    @property
    def placeholders(self) -> list[Node]:
        """The graph's inputs in order."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]


SOURCE = "dbo_fx_source"


def source_of(node: Node) -> str | None:
    """Where Dynamo took a graph input from: `L['self']._parameters['w']`, `L['caches'][0]`."""
    source: str | None = node.meta.get(SOURCE)
    return source


def value_of(node: Node) -> Any:
    """What tracing saw for a node: a fake tensor, a symbolic or plain number, or a tuple."""
    return node.meta.get("val", node.meta.get("example_value"))


POSITION = "dbo_fx_position"


def size_of(node: Node) -> sympy.Expr:
    """A number as an expression; over `START`, too, where it says where a microbatch begins."""
    position: sympy.Expr | None = node.meta.get(POSITION)
    return expression(value_of(node)) if position is None else position


def where(node: Node) -> str:
    """`name (op) in module path at file:line` for messages, as far as Dynamo knows them."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    place = f" at {lines[-1]}" if lines else ""
    path = module_path(node)
    return f"{node.name} ({node.target}){f' in {path}' if path else ''}{place}"


def module_path(node: Node) -> str:
    """The module that called the op, as the user names it: `model.layers.1.mlp.gate`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^[LG]\['\w+'\]", "", str(stack[-1][0])).strip(".") if stack else ""


def from_dynamo(gm: GraphModule, split_dim: int | None = None) -> CapturedGraph:
    """Capture Dynamo's graph as ATen ops.

    Args:
        gm: The graph module that a Dynamo backend is called with.
        split_dim: The dim that is split, when inputs are marked along several.

    Returns:
        The captured graph.

    Raises:
        UnsupportedGraphError: a training graph, no symbolic token size, a specialised one, active
            autocast, data-dependent sizes, or communication inside a higher-order op.
    """
    _refuse_training(gm)
    _refuse_hidden_communication(gm.graph)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    _refuse_specialised(placeholders)
    fake_mode = _fake_mode(placeholders)
    symbol = _choose_symbol(placeholders, split_dim)
    module = _to_aten(gm, placeholders, fake_mode)
    _strip_modes(module)
    _refuse_lost_communication(gm.graph, module.graph)
    _refuse_data_dependent(module, symbol)
    module.graph.lint()
    module.recompile()
    assert fake_mode.shape_env is not None
    return CapturedGraph(
        module=module,
        dynamo=gm,
        symbol=symbol,
        rules=size_rules(fake_mode.shape_env, symbol),
        token_inputs=_token_inputs(module, symbol),
        fake_mode=fake_mode,
    )


class _Captured(Exception):
    """Carries the graph out of torch.compile without running it."""

    def __init__(self, captured: CapturedGraph) -> None:
        super().__init__("captured")
        self.captured = captured


def trace(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mark: int | None = None,
    split_dim: int | None = None,
) -> CapturedGraph:
    """Capture a model without running it: meta tensors and a fake process group are enough.

    Args:
        model: A module or function, called as `model(*args, **kwargs)` under no_grad.
        args: Positional arguments.
        kwargs: Keyword arguments.
        mark: Mark this dim of every tensor argument as the token dim; None when they are marked.
        split_dim: The dim to split, when inputs are marked along several.

    Returns:
        The captured graph.

    Raises:
        UnsupportedGraphError: see `from_dynamo`.
    """
    kwargs = dict(kwargs or {})
    if mark is not None:
        for leaf in torch.utils._pytree.tree_leaves((tuple(args), kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > mark:
                torch._dynamo.mark_dynamic(leaf, mark)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        raise _Captured(from_dynamo(gm, split_dim))

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, _Captured):
            return inner.captured
        if isinstance(inner, UnsupportedGraphError):
            raise inner from None
        raise
    raise UnsupportedGraphError(
        "trace: the model called no torch op, so there is nothing to capture"
    )


def _refuse_training(gm: GraphModule) -> None:
    if not torch.is_grad_enabled():
        return
    for node in gm.graph.nodes:
        value = value_of(node) if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedGraphError(
                f"this is a training graph: input {node.name} requires grad and grad mode is on. "
                "dbo_fx compiles inference only: call the model under torch.no_grad() or "
                "torch.inference_mode()."
            )


def _refuse_hidden_communication(graph: Graph) -> None:
    """A collective inside a branch, a loop or a checkpointed layer has no place in a schedule."""
    for node in graph.nodes:
        inner = opaque.hidden_communication(node) if node.op == "call_function" else None
        if inner is not None:
            name = opaque.op_name(inner.target)
            declare = f', or declare it: dbo_fx.register_local("{name}")'
            raise UnsupportedGraphError(
                f"{where(node)} is a higher-order op that holds {name}, which communicates or may: "
                "its place among the other communication cannot be scheduled. Call the layer "
                "directly, with no torch.utils.checkpoint, torch.cond or nested_compile_region "
                f"around it{'' if opaque.communicates(inner.target) else declare}."
            )


def _refuse_lost_communication(dynamo: Graph, graph: Graph) -> None:
    """Every collective of Dynamo's graph must be in the captured one."""
    before, after = (opaque.launches(g) for g in (dynamo, graph))
    if len(after) < len(before):
        raise UnsupportedGraphError(
            f"Dynamo's graph launches {len(before)} collectives ({where(before[-1])} is the last), "
            f"the captured one {len(after)}: one was computed or dropped while tracing. Let it "
            "depend on the model's inputs."
        )


def _refuse_specialised(placeholders: Iterable[Node]) -> None:
    """A marked dim that became a constant: Dynamo would complain only after the backend."""
    for node in placeholders:
        value = value_of(node)
        for dim in sorted(_marked_dims(node)):
            size = expression(value.shape[dim])
            if size.is_number:
                raise UnsupportedGraphError(
                    f"dim {dim} of input {node.name} is marked dynamic, but is fixed to {size}: "
                    f"{_why_fixed(int(size), placeholders)}"
                )


def _marked_dims(node: Node) -> set[int]:
    """The dims that the user marked on the tensor that was passed in."""
    argument = node.meta.get("grapharg")
    example = argument.example if argument is not None else None
    if not isinstance(value_of(node), torch.Tensor):
        return set()
    dynamic = getattr(example, "_dynamo_dynamic_indices", None) or set()
    return dynamic | getattr(example, "_dynamo_unbacked_indices", set())


def _why_fixed(size: int, placeholders: Iterable[Node]) -> str:
    if size < 2:
        return (
            "torch always compiles 0 and 1 rows apart. Call through dbo_fx.wrap, which pads every "
            "rank to two rows per microbatch or more."
        )
    same = [
        f"{n.name} dim {d}"
        for n in placeholders
        if isinstance(value_of(n), torch.Tensor)
        for d, s in enumerate(value_of(n).shape)
        if expression(s) == size and not str(n.target).endswith("parameters_")
    ]
    hint = f" Unmarked inputs of that size: {', '.join(same[:4])}." if same else ""
    return (
        "some op needs exactly that size (a baked-in shape, a branch on the batch size, another "
        f"input of that size that is not marked).{hint} Find it with TORCH_LOGS=dynamic; make it "
        "read x.shape instead, or mark the other input too."
    )


def _fake_mode(placeholders: Iterable[Node]) -> FakeTensorMode:
    # torch's detect_fake_mode() returns the tracing context's new mode here, not the values' own.
    for node in placeholders:
        mode = fake_mode_of(value_of(node))
        if mode is not None:
            return mode
    raise UnsupportedGraphError(f"the graph has no tensor input, so nothing to split. {MARK_HINT}")


def _choose_symbol(placeholders: Sequence[Node], split_dim: int | None) -> sympy.Symbol:
    found: dict[sympy.Symbol, list[str]] = {}
    marked: set[sympy.Symbol] = set()
    for node in placeholders:
        value = value_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            expr = expression(size)
            if expr.is_Symbol and (split_dim is None or dim == split_dim):
                found.setdefault(expr, []).append(f"{node.name} dim {dim}")
                marked |= {expr} if dim in _marked_dims(node) else set()
    # Dynamo makes sizes dynamic by itself when they change; the marked one is what the user meant.
    candidates = marked or set(found)
    if len(candidates) == 1:
        return next(iter(candidates))
    if marked and _unified(placeholders, marked):
        return _choose_symbol(placeholders, split_dim)
    if not found:
        at = "" if split_dim is None else f" at dim {split_dim}"
        hint = MARK_HINT.replace("(x, 0)", f"(x, {split_dim or 0})")
        raise UnsupportedGraphError(f"no input has a symbolic size{at}. {hint}")
    listed = "; ".join(f"{symbol}: {', '.join(places)}" for symbol, places in found.items())
    how = "Mark only the token dim" + (", or set option split_dim" if split_dim is None else "")
    raise UnsupportedGraphError(
        f"several sizes are symbolic and it is not clear which one to split: {listed}. {how}."
    )


def _unified(placeholders: Sequence[Node], marked: set[sympy.Symbol]) -> bool:
    """Make marked sizes that are equal one symbol, with a guard that they stay equal.

    Dynamo gives every marked dim a symbol of its own until an op needs two of them to be equal.
    """
    sizes: dict[sympy.Symbol, torch.SymInt] = {}
    for node in placeholders:
        for dim in _marked_dims(node):
            size = value_of(node).shape[dim]
            if isinstance(size, torch.SymInt) and expression(size) in marked:
                sizes[expression(size)] = size
    first, *others = sizes.values()
    same = all(hint_of(other) == hint_of(first) for other in others)
    return same and bool(others) and all(bool(first == other) for other in others)


def _to_aten(
    gm: GraphModule, placeholders: Sequence[Node], fake_mode: FakeTensorMode
) -> GraphModule:
    values = [value_of(n) for n in placeholders]
    with fake_mode, torch.no_grad(), preserve_node_meta(), enable_python_dispatcher():
        module = make_fx(
            Interpreter(gm).run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True
        )(*values)
    mine = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert len(mine) == len(placeholders), "make_fx changed the number of inputs"
    for new, old in zip(mine, placeholders, strict=True):
        new.name = new.target = old.name
        new.meta.setdefault("val", value_of(old))
        new.meta[SOURCE] = source_name(old.meta.get("grapharg"))
    assert isinstance(module, GraphModule)
    _adopt_constants(module, fake_mode)
    return module


def _adopt_constants(module: GraphModule, fake_mode: FakeTensorMode) -> None:
    """Give constants values of the graph's own fake mode; make_fx takes another one for them."""
    values: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
        name = str(node.target)
        real = getattr(module, name, None) if node.op == "get_attr" else None
        if not isinstance(real, torch.Tensor):
            continue
        if name not in values:
            # Not from_tensor: it would give a copy of the constant the storage of the constant.
            with fake_mode:
                values[name] = torch.empty_strided(
                    real.shape, real.stride(), dtype=real.dtype, device=real.device
                )
        node.meta["val"] = values[name]


def _strip_modes(module: GraphModule) -> None:
    """Grad mode is off throughout, disabled autocast changes nothing, metadata is static."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UnsupportedGraphError(
            "autocast is active around the model: segments would run without it. Cast the model "
            "(model.to(torch.bfloat16)) instead."
        )
    for node in reversed(list(module.graph.nodes)):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_enter_autocast" and _autocast_enabled(node):
            raise UnsupportedGraphError(
                f"{where(node)} turns autocast on inside the model. Cast the model instead."
            )
        metadata_assert = node.target is torch.ops.aten._assert_tensor_metadata.default
        if name in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast") or metadata_assert:
            assert all(u.target.__name__ == "_exit_autocast" for u in node.users) or not node.users
            module.graph.erase_node(node)


def _autocast_enabled(node: Node) -> bool:
    enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
    return bool(enabled)


def _refuse_data_dependent(module: GraphModule, symbol: sympy.Symbol) -> None:
    known = {symbol}
    for node in module.graph.nodes:
        symbols = free_symbols(value_of(node))
        if node.op == "placeholder":
            known |= symbols
        elif not symbols <= known:
            raise UnsupportedGraphError(
                f"{where(node)} makes a size that depends on data ({symbols - known}); such a "
                "graph waits for the device and cannot be captured. Use static shapes, for example "
                "a capacity per expert, or masks instead of boolean indexing. (dynamic=True turns "
                "Python numbers into data, too: mark the token dim instead.)"
            )
        if node.op == "call_function" and not is_known_call(node):
            raise UnsupportedGraphError(
                f"{where(node)} is not an op with a schema: dbo_fx cannot tell what it reads and "
                "writes. Higher-order ops and Python functions inside the graph are not supported; "
                "wrap the code in torch.library.custom_op with its mutations declared."
            )
        if node.op in ("call_module", "call_method"):
            raise UnsupportedGraphError(f"{where(node)}: unexpected {node.op} after capture")


def is_known_call(node: Node) -> bool:
    """Whether the call is an op with a schema, an item of a tuple, or size arithmetic."""
    if isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem:
        return True
    return is_size_value(value_of(node))


def is_size_value(value: Any) -> bool:
    """Whether this is a symbolic or plain number (or a shape), not a tensor."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_size_value(v) for v in value)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def _token_inputs(module: GraphModule, symbol: sympy.Symbol) -> tuple[TokenInput, ...]:
    found = []
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    for index, node in enumerate(inputs):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or symbol not in free_symbols(value):
            continue
        dims = [d for d, size in enumerate(value.shape) if symbol in free_symbols(size)]
        if len(dims) > 1 or expression(value.shape[dims[0]]) != symbol:
            raise UnsupportedGraphError(
                f"input {node.name} has shape {tuple(value.shape)}: the split size {symbol} must "
                "stand alone in exactly one dim. Pass the input per token, or build it inside the "
                "model."
            )
        found.append(TokenInput(node.name, index, dims[0]))
    return tuple(found)
