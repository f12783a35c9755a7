"""Graphs of subjects: captured from a model or a config for pretended ranks, or read from a file.

Nothing runs: the model may live on the meta device, and the process group only pretends.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from dbo_fx.backend import compile_captured
from dbo_fx.capture import CapturedGraph, trace, value_of
from dbo_fx.comm import groups
from dbo_fx.communication import (
    ALL_GATHER,
    ALL_TO_ALL,
    DISPATCH,
    DISPATCH_BATCHED,
    DISPATCH_FP8,
    REDUCE_SCATTER,
    communicating_groups,
)
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import CommunicationError, DboError, OptionError, UnsupportedGraphError
from dbo_fx.options import Options
from dbo_fx.subjects import RANKS, TRANSPORT, Request, as_compiled, graph_file
from dbo_fx.symbols import expression

TARGET = "module:callable"
Say = Callable[[str], None]


def _silent(text: str) -> None:
    """Take a line and say nothing."""


@contextmanager
def captured_subject(request: Request, say: Say = _silent) -> Iterator[CapturedGraph]:
    """The captured graph of a graph file, a model or a config; its process group exists meanwhile.

    Args:
        request: A request of another kind than `text`.
        say: Called with what is being done.

    Raises:
        OptionError: An option does not fit, or the user's code fails.
        GraphFileError: The file is damaged.
        DboError: The model is refused.
    """
    kind = request.kind
    assert kind != "text", f"{request.what} has no graph"
    if kind == "graph":
        request.refuse("a saved graph", "layers", "dim")
        with _from_file(request, say) as captured:
            yield captured
        return
    if kind == "config":
        request.refuse("a config, split along the batch", "dim")
    else:
        request.refuse("a model", "layers")
    with pretended_ranks(RANKS if request.ranks is None else request.ranks):
        try:
            yield _from_model(request, say)
        finally:
            torch._dynamo.reset()


@contextmanager
def compiled_subject(request: Request, say: Say = _silent) -> Iterator[CompiledProgram]:
    """The compiled program of a graph file, a model or a config.

    Raises:
        OptionError: See `captured_subject`.
        GraphFileError: See `captured_subject`.
        DboError: The model is refused.
    """
    options = options_of(request)
    with captured_subject(request, say) as captured:
        if options.transport is None and _is_meta(captured):
            options = replace(options, transport=TRANSPORT)
        if not communicating_groups(captured.graph):
            raise UnsupportedGraphError(
                f"{request.what} has no MoE layer: nothing in its graph dispatches rows to other "
                "ranks. A model communicates through torch.distributed._functional_collectives or "
                "the dbo_fx ops; dbo_fx.integrations.transformers.expert_parallel puts these into "
                "Hugging Face models."
            )
        say("splitting, scheduling and proving")
        yield compile_captured(captured, options, runs=False)


def _is_meta(captured: CapturedGraph) -> bool:
    """Whether the graph's device does not say what carries its communication."""
    token = captured.placeholders[captured.token_inputs[0].index]
    return bool(value_of(token).device.type == "meta")


def options_of(request: Request) -> Options:
    """How a graph is split and scheduled.

    Raises:
        OptionError: A value is none of those allowed.
    """
    schedule, transport = as_compiled(request) if request.kind == "graph" else (None, None)
    given = {
        "schedule": request.schedule or schedule,
        "transport": request.transport or transport,
        "num_microbatches": request.microbatches,
    }
    return Options.parse({key: value for key, value in given.items() if value is not None})


@contextmanager
def pretended_ranks(ranks: int) -> Iterator[None]:
    """A default process group of `ranks` ranks that communicates with nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise OptionError(
            "this makes a process group of its own, but one is initialised already; use a process "
            "without one"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _from_model(request: Request, say: Say) -> CapturedGraph:
    dim = 0 if request.dim is None else request.dim
    say("building the model")
    try:
        if request.kind == "config":
            from dbo_fx.integrations.transformers_config import build

            model, args, kwargs = build(request.what, request.layers)
        else:
            model, args, kwargs = load(request.what)
            _check_dim(request, dim, (args, kwargs))
        say("tracing the model")
        return trace(model, args, kwargs, mark=None if dim < 0 else dim)
    except DboError:
        raise
    except ModuleNotFoundError as error:
        raise OptionError(f"{request.what} needs a module that is missing: {error}") from error
    except (Exception, SystemExit) as error:  # The user's code may fail in any way.
        first = f"{error}".strip().splitlines() or [""]
        raise OptionError(f"{request.what} fails: {type(error).__name__}: {first[0]}") from error


def _check_dim(request: Request, dim: int, arguments: Any) -> None:
    """Refuse a dim that no tensor has; one that only some have is split there."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    most = max((tensor.dim() for tensor in tensors), default=0)
    if tensors and dim >= most:
        raise OptionError(
            f"--dim {dim}: no tensor argument of {request.what} has it; the dims of the one with "
            f"the most are 0 to {most - 1}"
        )


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Import and call `module:callable`.

    Raises:
        OptionError: says what is missing, or what came back instead.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise OptionError(f"{target!r} is not {TARGET}, for example my_model:build")
    function = _imported(target, module_name, name)
    found = function()
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise OptionError(
            f"{target}() returned {type(found).__name__}, wanted (model, args) or "
            "(model, args, kwargs)"
        )
    model, args = found[0], found[1]
    kwargs = found[2] if len(found) == 3 else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise OptionError(f"{target}(): args must be a tuple and kwargs a dict")
    if isinstance(model, torch.nn.Module):
        model = model.eval().requires_grad_(False)
    return model, tuple(args), dict(kwargs)


def _imported(target: str, module_name: str, name: str) -> Callable[[], Any]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # As `python -m` does: modules of the current folder come first.
    try:
        function = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"{target!r} cannot be loaded: {error}") from error
    except (Exception, SystemExit) as error:  # The user's module may fail in any way.
        what = f"{type(error).__name__}: {error}"
        raise OptionError(f"{target!r} cannot be loaded: {module_name} fails: {what}") from error
    if not callable(function):
        raise OptionError(f"{target!r} is a {type(function).__name__}, wanted a callable")
    made: Callable[[], Any] = function
    return made


@contextmanager
def _from_file(request: Request, say: Say) -> Iterator[CapturedGraph]:
    from dbo_fx.graph_file import load_graph

    say("reading the graph")
    captured = load_graph(graph_file(request.what))
    ranks, names = ranks_of(captured), sorted(communicating_groups(captured.graph))
    given = request.ranks
    if ranks is not None and given not in (None, ranks):
        on = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise OptionError(f"{request.what} was captured on {on}, not on {given}")
    with pretended_ranks(ranks or given or RANKS), _also_named(names):
        yield captured


def ranks_of(captured: CapturedGraph) -> int | None:
    """How many ranks a graph was captured on, as its collectives say; None if none says it."""
    found = {ranks for node in captured.graph.nodes if (ranks := _ranks_at(node)) is not None}
    return max(found, default=None)


def _ranks_at(node: Node) -> int | None:
    if node.target is ALL_GATHER or node.target is REDUCE_SCATTER:
        size = node.args[-2]
        return size if isinstance(size, int) else None
    if node.target is ALL_TO_ALL:
        splits = node.args[1]
        return len(splits) if isinstance(splits, tuple | list) else None
    if node.target is DISPATCH_BATCHED:
        return int(value_of(node)[4].shape[1])
    if node.target not in (DISPATCH, DISPATCH_FP8):
        return None
    here = expression(value_of(node.all_input_nodes[0]).shape[0])
    ratio = expression(value_of(node)[0].shape[0]) / here
    return int(ratio) if ratio.is_Integer else None


@contextmanager
def _also_named(names: Iterable[str]) -> Iterator[None]:
    """Give the pretended group these names too, for graphs of other processes' groups."""
    missing = []
    for name in names:
        try:
            groups.process_group(name)
        except CommunicationError:
            missing.append(name)
    with groups.aliases(missing):
        yield
