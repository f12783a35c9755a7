"""The private parts of torch that dbo_fx builds on: this file fails by name when one moves.

Each failure says which file of dbo_fx uses the part.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from dbo_fx import sm_limits, symbols
from dbo_fx.capture import CapturedGraph, source_of, value_of
from dbo_fx.comm import groups
from dbo_fx.errors import CommunicationError
from graphs import captured, hidden

PARTS = [
    ("dbo_fx/symbols.py", "torch._dispatch.python", "enable_python_dispatcher"),
    ("dbo_fx/symbols.py", "torch._guards", "SLoc"),
    ("dbo_fx/symbols.py", "torch._guards", "ShapeGuard"),
    ("dbo_fx/symbols.py", "torch._subclasses.fake_tensor", "FakeTensor"),
    ("dbo_fx/symbols.py", "torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("dbo_fx/symbols.py", "torch.fx.experimental.proxy_tensor", "make_fx"),
    ("dbo_fx/symbols.py", "torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
    ("dbo_fx/symbols.py", "torch.fx.experimental.symbolic_shapes", "ShapeEnv._update_var_to_range"),
    ("dbo_fx/symbols.py", "torch.fx.traceback", "preserve_node_meta"),
    ("dbo_fx/symbols.py", "torch.utils._sympy.functions", "CleanDiv"),
    ("dbo_fx/symbols.py", "torch.utils._sympy.functions", "FloorDiv"),
    ("dbo_fx/symbols.py", "torch.utils._sympy.functions", "Mod"),
    ("dbo_fx/symbols.py", "torch.utils._sympy.numbers", "int_oo"),
    ("dbo_fx/symbols.py", "torch.utils._sympy.value_ranges", "ValueRanges"),
    ("dbo_fx/comm/groups.py", "torch._C._distributed_c10d", "_resolve_process_group"),
    ("dbo_fx/comm/groups.py", "torch.distributed.distributed_c10d", "_get_default_group"),
    ("dbo_fx/comm/groups.py", "torch.distributed.distributed_c10d", "_get_process_group_store"),
    ("dbo_fx/comm/groups.py", "torch._C._distributed_c10d", "_register_process_group"),
    ("dbo_fx/comm/groups.py", "torch._C._distributed_c10d", "_unregister_process_group"),
    ("dbo_fx/comm/staging.py", "torch.distributed._symmetric_memory", "rendezvous"),
    ("dbo_fx/sm_limits.py", "torch._C", "_get_sm_carveout_experimental"),
    ("dbo_fx/sm_limits.py", "torch._C", "_set_sm_carveout_experimental"),
    ("dbo_fx/torch_trace.py", "torch._logging._internal", "trace_structured"),
    ("dbo_fx/torch_trace.py", "torch._dynamo.convert_frame", "register_bytecode_hook"),
    ("dbo_fx/torch_trace.py", "torch._guards", "CompileContext.try_get"),
    ("dbo_fx/segment_compilers.py", "torch._dynamo", "list_backends"),
    ("dbo_fx/segment_compilers.py", "torch._dynamo", "lookup_backend"),
    ("dbo_fx/segment_compilers.py", "torch._guards", "TracingContext"),
    ("dbo_fx/segment_compilers.py", "torch._guards", "tracing"),
    ("dbo_fx/segment_compilers.py", "torch._inductor", "standalone_compile"),
    ("dbo_fx/segment_compilers.py", "torch._inductor.config", "get_hash"),
    ("dbo_fx/segment_compilers.py", "torch._inductor.runtime.cache_dir_utils", "cache_dir"),
    (
        "dbo_fx/segment_compilers.py",
        "torch._inductor.runtime.cache_dir_utils",
        "temporary_cache_dir",
    ),
    ("dbo_fx/segment_compilers.py", "torch._inductor.output_code", "CompiledFxGraph"),
    ("dbo_fx/segment_compilers.py", "torch._C", "_is_any_autocast_enabled"),
    ("dbo_fx/segment_compilers.py", "torch.autograd.profiler", "_is_profiler_enabled"),
    ("dbo_fx/host_code.py", "torch._C", "_get_tracing_state"),
    ("dbo_fx/host_code.py", "torch._C._functorch", "peek_interpreter_stack"),
    ("dbo_fx/host_code.py", "torch._C", "_is_torch_function_mode_enabled"),
    ("dbo_fx/host_code.py", "torch._C", "_len_torch_dispatch_stack"),
    ("dbo_fx/host_code.py", "torch.nn.modules.module", "_has_any_global_hook"),
    ("dbo_fx/capture.py", "torch._dynamo", "mark_dynamic"),
    # Without CUDA both are placeholders that `torch.cuda.memory` puts there.
    ("dbo_fx/graph_device.py", "torch._C", "_cuda_endAllocateToPool"),
    ("dbo_fx/graph_device.py", "torch._C", "_cuda_releasePool"),
    ("dbo_fx/graph_device.py", "torch.cuda", "CUDAGraph.capture_begin"),
    ("dbo_fx/graph_device.py", "torch.cuda", "CUDAGraph.capture_end"),
    ("dbo_fx/graph_device.py", "torch.cuda", "CUDAGraph.reset"),
    ("dbo_fx/token_rows.py", "torch._dynamo", "OptimizedModule"),
    ("dbo_fx/capture.py", "torch._dynamo", "reset"),
    ("passes/normalize.py", "torch", "sym_max"),
    ("passes/normalize.py", "torch", "sym_min"),
    ("passes/soundness.py", "torch", "Tag.nondeterministic_seeded"),
]
OPS = [
    ("dbo_fx/communication.py", "_c10d_functional::all_gather_into_tensor"),
    ("dbo_fx/communication.py", "_c10d_functional::all_to_all_single"),
    ("dbo_fx/communication.py", "_c10d_functional::reduce_scatter_tensor"),
    ("dbo_fx/communication.py", "_c10d_functional::wait_tensor"),
    ("dbo_fx/capture.py", "aten::_assert_tensor_metadata"),
    ("passes/regions.py", "aten::_assert_scalar"),
    ("passes/normalize.py", "aten::sym_size"),
]


@pytest.mark.parametrize(("user", "module", "name"), PARTS)
def test_private_names(user: str, module: str, name: str) -> None:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    assert found is not None, f"torch {torch.__version__} moved {module}.{name}; {user} uses it"


@pytest.mark.parametrize(("user", "name"), OPS)
def test_ops(user: str, name: str) -> None:
    namespace, op = name.split("::")
    found = hasattr(getattr(torch.ops, namespace), op)
    assert found, f"torch {torch.__version__} has no op {name} any more; {user} knows it"


def test_the_parts_of_modules_and_tensors_that_graphs_look_at() -> None:
    model = torch.nn.Linear(2, 2)
    moved = f"torch {torch.__version__} moved it; dbo_fx/graph_inputs.py, graphs.py use it"
    assert set(model._parameters) == {"weight", "bias"}, moved
    assert model._buffers == {}, moved
    x = torch.zeros(2)
    before = x._version
    x.view(2)[0].add_(1)
    assert x._version > before, moved
    function = hidden
    assert torch.compile(function, backend="eager")._torchdynamo_orig_callable is function, moved


# symbols.py on a graph: x [s, 8] is split, y is [s * 2, 8].


def model(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    assert x.shape[0] % 2 == 0
    assert x.shape[0] > 3
    assert x.shape[0] < 1000
    return torch.cat((x, x)), torch.arange(x.shape[0] // 2)


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    x = hidden(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    return captured(model, x, hidden(5, 8), mark=None)


@pytest.fixture
def values(graph: CapturedGraph) -> dict[str, Any]:
    return {n.name: value_of(n) for n in graph.graph.nodes}


def test_expressions_of_sizes(graph: CapturedGraph, values: dict[str, Any]) -> None:
    size = values["cat"].shape[0]
    assert symbols.expression(size) == 2 * graph.symbol
    assert symbols.expression(8) == sympy.Integer(8)
    assert symbols.coefficient(symbols.expression(size), graph.symbol) == 2
    assert symbols.coefficient(graph.symbol + 1, graph.symbol) is None


def test_symbols_of_values(graph: CapturedGraph, values: dict[str, Any]) -> None:
    assert symbols.free_symbols(values["cat"]) == {graph.symbol}
    assert symbols.free_symbols([values["cat"].shape[0], 3]) == {graph.symbol}
    assert symbols.free_symbols(values["l_x_"].shape[1]) == set()
    assert symbols.free_symbols("text") == set()


def test_new_sizes_live_in_the_same_environment(graph: CapturedGraph) -> None:
    (like,) = (v for n in graph.placeholders if isinstance(v := value_of(n), torch.SymInt))
    made = symbols.symint(3 * graph.symbol, like)
    assert symbols.expression(made) == 3 * graph.symbol
    assert made.node.shape_env is like.node.shape_env


def test_fake_modes(graph: CapturedGraph, values: dict[str, Any]) -> None:
    assert symbols.fake_mode_of(values["cat"]) is graph.fake_mode
    assert symbols.fake_mode_of(torch.zeros(1)) is None
    assert symbols.fake_mode_of(3) is None


def test_views_share_a_storage_key_and_copies_do_not(values: dict[str, Any]) -> None:
    x = values["cat"]
    assert symbols.same_storage_key(x) == symbols.same_storage_key(x.view(-1))
    assert symbols.same_storage_key(x) != symbols.same_storage_key(values["l_x_"])


def test_ranges_and_guards(graph: CapturedGraph) -> None:
    rules = graph.rules
    assert (rules.lower, rules.upper) == (4, 999)
    assert [rules.broken_by(size) is None for size in (3, 4, 5, 998, 1000)] == [0, 1, 0, 1, 0]
    assert str(rules.broken_by(5)).startswith("Eq(Mod(")


def test_halves_are_exact_where_a_guard_says_so(graph: CapturedGraph) -> None:
    arange = next(n for n in graph.graph.nodes if "arange" in n.name)
    half, size = value_of(arange).shape[0], value_of(graph.placeholders[1]).shape[0]
    assert symbols.are_equal_parts(half, 2, size)
    assert not symbols.are_equal_parts(half, 3, size)
    assert not symbols.are_equal_parts((size + 1) // 3, 3, size + 1)
    assert symbols.are_equal_parts(4, 2, 8)


# What graph files build on.


def test_where_inputs_come_from_is_known(graph: CapturedGraph) -> None:
    found = {source_of(n): n.name for n in graph.placeholders}
    assert list(found) == ["L['x'].size()[0]", "L['x']"]
    assert found["L['x']"] == "l_x_"
    assert symbols.source_name(None) is None


def test_facts_of_symbols(graph: CapturedGraph) -> None:
    environment = graph.fake_mode.shape_env
    assert environment is not None
    facts = symbols.symbol_facts(environment, graph.symbol)
    assert facts == symbols.SymbolFacts(graph.symbol.name, "positive", 4, 999, 4)
    assert facts.symbol == graph.symbol
    odd = sympy.Symbol("odd", odd=True)
    environment.var_to_range[odd] = environment.var_to_range[graph.symbol]
    assert symbols.symbol_facts(environment, odd) is None
    del environment.var_to_range[odd]


def test_an_environment_is_made_anew() -> None:
    s = symbols.SymbolFacts("s1", "positive", 2, None, 6)
    guard = sympy.Eq(symbols.SIZE_FUNCTIONS["Mod"](s.symbol, 2), 0)
    mode, size = symbols.rebuilt_mode([s], [guard])
    environment = mode.shape_env
    assert environment is not None
    found = size(2 * s.symbol)
    assert isinstance(found, torch.SymInt)
    assert symbols.hint_of(found) == 12
    assert size(sympy.Integer(3)) == 3
    rules = symbols.size_rules(environment, s.symbol)
    assert (rules.lower, rules.upper, rules.guards) == (2, None, (guard,))
    assert [rules.broken_by(n) is None for n in (1, 2, 3)] == [False, True, False]
    # It is one that torch can go on with: new guards are added to the given ones.
    assert bool(size(s.symbol) < 10)
    assert symbols.symbol_facts(environment, s.symbol) == symbols.SymbolFacts(
        "s1", "positive", 2, 9, 6
    )


@pytest.mark.parametrize("from_base", [False, True])
def test_fake_tensors_are_put_together_without_guards(from_base: bool) -> None:
    s = symbols.SymbolFacts("s1", "positive", 2, None, 6)
    mode, size = symbols.rebuilt_mode([s], [])
    storage: Any = symbols.fake_storage(size(48 * s.symbol))
    if from_base:
        storage = symbols.fake_base(size(12 * s.symbol), torch.float32)
    one, two = (
        symbols.fake_tensor(
            mode,
            storage,
            [size(s.symbol), 4],
            [12, 1],
            offset,
            dtype=torch.float32,
            device=torch.device("cuda:0"),
        )
        for offset in (0, 8)
    )
    assert symbols.fake_mode_of(one) is mode
    assert (one.device, one.dtype, one.stride()) == (torch.device("cuda:0"), torch.float32, (12, 1))
    assert symbols.expression(one.shape[0]) == s.symbol
    assert two.storage_offset() == 8
    assert symbols.same_storage_key(one) == symbols.same_storage_key(two)
    assert symbols.expression(one.untyped_storage().nbytes()) == 48 * s.symbol
    assert symbols.expression((one + two).shape[0]) == s.symbol
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


# comm/groups.py.


def test_process_groups(fake_group: str) -> None:
    group = groups.process_group(fake_group)
    assert group is dist.group.WORLD
    assert groups.name_of(group) == groups.name_of(None) == fake_group
    assert (groups.world_size(fake_group), groups.rank(fake_group)) == (2, 0)
    assert groups.is_fake(fake_group)
    assert groups.backend_name(fake_group, "cpu") == "fake"
    assert isinstance(groups.store(fake_group), dist.Store)


def test_an_unknown_group(fake_group: str) -> None:
    with pytest.raises(CommunicationError, match="process group 'nobody' is unknown"):
        groups.process_group("nobody")


def test_a_group_that_this_rank_is_no_member_of(fake_group: str) -> None:
    with pytest.raises(CommunicationError, match="not a member of the group"):
        groups.name_of(dist.GroupMember.NON_GROUP_MEMBER)


# passes/schedule.py walks and relinks the list of nodes.


def test_nodes_are_a_ring_that_append_relinks() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    a, b = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))
    graph.output((a, b))
    moved = "torch.fx moved {}; passes/schedule.py reorders graphs with it"
    for name in ("_root", "_next"):
        owner = graph if name == "_root" else x
        assert hasattr(owner, name), moved.format(name)
    assert graph._root._next is x, moved.format("the start of the node list")
    assert a._next is b, moved.format("_next")
    x.append(b)
    assert [n.name for n in graph.nodes] == ["x", "cos", "sin", "output"], moved.format("append")
    assert graph._root._next._next is b
    graph.lint()


# comm/staging.py and sm_limits.py.


def test_symmetric_memory() -> None:
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    moved = "torch changed {}; comm/staging.py maps peers' memory with it"
    given = {"empty": ["size", "dtype", "device"], "rendezvous": ["tensor", "group"]}
    for name, wanted in given.items():
        found = list(inspect.signature(getattr(symmetric, name)).parameters)
        assert found == wanted, moved.format(name)
    for name, argument in (("get_buffer", "dtype"), ("barrier", "channel")):
        assert argument in (getattr(_SymmetricMemory, name).__doc__ or ""), moved.format(name)


def test_the_matmul_carveout() -> None:
    before = sm_limits.matmul_carveout()
    try:
        sm_limits.set_matmul_carveout(8)
        assert sm_limits.matmul_carveout() == 8
    finally:
        sm_limits.set_matmul_carveout(before)
    assert sm_limits.matmul_carveout() is before is None
