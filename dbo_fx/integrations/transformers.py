"""Expert parallelism for Hugging Face MoE models, in ops that the compiler can schedule.

`expert_parallel` keeps one slice of every expert tensor on this rank and plugs two functions into
transformers' own registries: one that runs routed experts between the `dispatch` and `combine`
ops, or between two all-to-alls, and one for attention that never builds a dense causal mask.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import dbo_fx
import dbo_fx.comm  # Registers torch.ops.dbo_fx.
from dbo_fx.errors import DboError, OptionError, UnsupportedGraphError
from dbo_fx.integrations.transformers_attention import attention_forward, check_arguments
from dbo_fx.integrations.transformers_layouts import RowLayout, check_layout
from dbo_fx.packing import COUNTER, Copies, Packing

NAME = "dbo_fx"
MINIMUM = (5, 17)
GROUP = "dbo_fx_group"
PACKING = "dbo_fx_packing"
LAYOUT = "dbo_fx_layout"
ROUTINGS = ("all_gather", "all_to_all")
# Kernels of transformers' own: attention and matmuls of this rank alone.
LOCAL_OPS = ("transformers::grouped_mm_fallback", "transformers_msa::sparse_atten")


def expert_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    routing: Literal["all_gather", "all_to_all"] = "all_gather",
    capacity: float | int | None = None,
    copies: Copies = "rank",
    layout: Literal["rows", "batched"] = "rows",
    max_tokens: int | None = None,
    fp8: bool = False,
) -> nn.Module:
    """Share a model's routed experts among the ranks of a group, in place, for inference.

    Every rank passes the same full model and feeds it batches of the same shape. Gradients are
    turned off. The model gets a config of its own, so that another model built from the same
    config object keeps its attention and experts functions.

    Args:
        model: A transformers model whose experts hold `gate_up_proj` [E, 2I, H] and `down_proj`
            [E, H, I], such as DeepSeek-V3, Mixtral, Qwen3-MoE or GLM4-MoE.
        group: The R ranks that share the experts. Default: all.
        routing: "all_gather": every rank sees all rows. "all_to_all": rows are packed into one
            block of static capacity for each rank; see `docs/routing.md`.
        capacity: Rows of such a block, for "all_to_all": None for the worst case, where nothing
            can be lost; a whole number of rows; or a factor over the mean of uniform routing. Rows
            that find no room make their tokens' outputs NaN, and `dbo_fx.overflow(model)` counts
            them.
        copies: For "all_to_all": "rank" sends a token once to each rank that holds one of its
            experts, "expert" once for each of its K experts.
        layout: "rows": what collectives and DeepEP's high-throughput kernels bring. "batched": rows
            by expert, which DeepEP's low-latency kernels bring; see `docs/deepep.md`.
        max_tokens: For "batched": the most tokens of a rank in one run of a layer.
        fp8: Send rows as float8, with one scale for 128 values; they come back as they are.

    Returns:
        The same model.

    Raises:
        DboError: transformers is missing, too old, or has moved what this module builds on; or
            torch.distributed is not initialised.
        OptionError: R does not divide E, the experts are sharded already, or options do not fit.
        UnsupportedGraphError: The model has no such experts, or experts of another layout.
    """
    _check_routing(routing, capacity, copies)
    check_layout(layout, max_tokens, fp8, routing, None)
    _register()
    if not dist.is_initialized():
        raise DboError(
            "expert_parallel: torch.distributed is not initialised, so there are no ranks to share "
            "the experts. Call torch.distributed.init_process_group first."
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    experts = dict(_experts(model))
    if not experts:
        raise UnsupportedGraphError(
            f"expert_parallel: {type(model).__name__} has no module with three-dimensional "
            "`gate_up_proj` and `down_proj` weights. Wanted a Mixture-of-Experts model whose "
            "experts go through transformers' experts interface."
        )
    for name, module in experts.items():
        _check(name, module, group.size())
    _refuse_composed(model)
    for module in experts.values():
        total, _, hidden = module.get_parameter("gate_up_proj").shape
        check_layout(layout, max_tokens, fp8, routing, hidden)
        Packing(group.size(), total, copies, capacity)
    # Nothing is refused any more: a model must not be left half sharded.
    for module in experts.values():
        total = module.get_parameter("gate_up_proj").shape[0]
        _shard(module, group)
        rows = RowLayout(str(group.group_name), total, max_tokens, fp8)
        setattr(module, LAYOUT, rows)
        if routing == "all_to_all":
            _pack(module, Packing(group.size(), total, copies, capacity))
    _use_functions(model)
    return model.requires_grad_(False)


def _register() -> None:
    """Put both functions into transformers' registries.

    Raises:
        DboError: transformers is missing, too old, or has moved its registries.
    """
    wanted = ".".join(map(str, MINIMUM))
    try:
        import transformers
    except ImportError as error:
        raise DboError(
            f"dbo_fx.integrations.transformers needs transformers>={wanted}, which is not "
            "installed. Run: pip install 'dbo-fx[hf]'"
        ) from error
    found = transformers.__version__
    if tuple(int(part) for part in found.split(".")[:2]) < MINIMUM:
        raise DboError(
            f"dbo_fx.integrations.transformers needs transformers>={wanted}; found {found}. "
            "Run: pip install --upgrade 'dbo-fx[hf]'"
        )
    for op in LOCAL_OPS:
        dbo_fx.register_local(op)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    except (ImportError, AttributeError) as error:
        raise DboError(
            f"transformers {found} has no ALL_EXPERTS_FUNCTIONS / ALL_ATTENTION_FUNCTIONS where "
            "dbo_fx looks for them (transformers.integrations.moe, transformers.modeling_utils). "
            "Install a version that dbo_fx was tested with: pip install 'transformers==5.19.*'"
        ) from error


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        weights = [getattr(module, weight, None) for weight in ("gate_up_proj", "down_proj")]
        if all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights):
            yield name, module


def _check(name: str, module: nn.Module, ranks: int) -> None:
    """Refuse experts that `experts_forward` would compute wrongly.

    Raises:
        OptionError: R does not divide E, or the experts are sharded already.
        UnsupportedGraphError: The layout is another one, or cannot be told.
    """
    if hasattr(module, GROUP):
        raise OptionError(
            f"expert_parallel: {name} is sharded already. Call expert_parallel once on each model."
        )
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for flag, value in wanted.items():
        found = getattr(module, flag, None)
        if found is not value:
            raise UnsupportedGraphError(
                f"expert_parallel: {name} ({type(module).__name__}) has {flag}={found}; wanted "
                f"{value}. Only gated experts without bias, with gate_up_proj [E, 2I, H] "
                "and down_proj [E, H, I], can be sharded."
            )
    experts = module.get_parameter("gate_up_proj").shape[0]
    if experts % ranks:
        raise OptionError(
            f"expert_parallel: {name} has {experts} experts, which {ranks} ranks cannot share "
            "evenly. Use a group whose size divides the number of experts."
        )


def _refuse_composed(model: Any) -> None:
    """Refuse a model whose parts have configs of their own.

    Raises:
        UnsupportedGraphError: It is one.
    """
    if parts := getattr(model.config, "sub_configs", None):
        raise UnsupportedGraphError(
            f"expert_parallel: {type(model).__name__} is made of several models "
            f"({', '.join(parts)}). Pass the text model with the experts alone."
        )


def _shard(module: nn.Module, group: dist.ProcessGroup) -> None:
    local = module.get_parameter("gate_up_proj").shape[0] // group.size()
    first = local * group.rank()
    for name in ("gate_up_proj", "down_proj"):
        weight = module.get_parameter(name)
        kept = weight.detach()[first : first + local].clone()
        setattr(module, name, nn.Parameter(kept, requires_grad=False))
    # A buffer and not an int: ranks must trace the same graph, so it may hold no rank constant.
    offset = torch.tensor(first, device=weight.device)
    module.register_buffer("dbo_fx_first_expert", offset, persistent=False)
    setattr(module, GROUP, str(group.group_name))


def _check_routing(routing: str, capacity: float | int | None, copies: str) -> None:
    """Refuse options that mean nothing together.

    Raises:
        OptionError: Unknown routing, or options of the other one.
    """
    if routing not in ROUTINGS:
        raise OptionError(f"expert_parallel: routing={routing!r}: use one of {list(ROUTINGS)}.")
    if routing == "all_gather" and (capacity is not None or copies != "rank"):
        raise OptionError(
            f"expert_parallel: capacity={capacity!r} and copies={copies!r} say how rows are packed "
            'for an all-to-all, but routing is "all_gather". Add routing="all_to_all".'
        )


def _pack(module: nn.Module, packing: Packing) -> None:
    """Let an experts module exchange packed rows, with a counter where they may find no room."""
    setattr(module, PACKING, packing)
    if packing.capacity is not None:
        device = module.get_parameter("gate_up_proj").device
        lost = torch.zeros(1, dtype=torch.int64, device=device)
        module.register_buffer(COUNTER, lost, persistent=False)


def _use_functions(model: Any) -> None:
    """Select both functions in a config that only this model has, and guard its arguments."""
    old = model.config
    new = copy.deepcopy(old)
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    new._experts_implementation = NAME
    new._attn_implementation = NAME
    model.base_model.register_forward_pre_hook(check_arguments, with_kwargs=True)


def experts_forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the routed experts of all ranks: dispatch, this rank's experts, combine.

    Args:
        module: The experts module, sharded by `expert_parallel`.
        hidden: [T, H] this rank's tokens; T is the same on every rank.
        ids: [T, K] the experts that each token chose, counted over all ranks.
        weights: [T, K] the gate's weight of each choice.

    Returns:
        [T, H].
    """
    group = getattr(module, GROUP, None)
    if group is None:
        raise UnsupportedGraphError(
            f"{type(module).__name__} uses the experts function '{NAME}' but is not sharded. Call "
            "dbo_fx.integrations.transformers.expert_parallel(model) instead of setting the name."
        )
    packing = getattr(module, PACKING, None)
    if packing is not None:
        return _packed_forward(module, packing, hidden, ids, weights)
    layout: RowLayout = getattr(module, LAYOUT)
    return layout.forward(module, hidden, ids, weights, _local_experts)


def _packed_forward(
    module: Any, packing: Packing, hidden: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """As `experts_forward`, over two all-to-alls of packed rows."""
    group = getattr(module, GROUP)
    packed, places, lost = packing.pack(hidden, ids, weights)
    if packing.may_overflow(ids.shape[1]):
        torch.ops.dbo_fx.note_overflow(getattr(module, COUNTER), lost)
    arrived = funcol.all_to_all_single(packed, None, None, group)
    rows, chosen, given = packing.open(arrived, hidden, weights)
    y = torch.unflatten(_local_experts(module, rows, chosen, given), 0, (packing.ranks, -1))
    back = funcol.all_to_all_single(y.contiguous(), None, None, group)
    return packing.unpack(back, places, weights)


def _local_experts(module: Any, rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """Run this rank's experts on rows of all ranks.

    Rows that chose none of them, and whose contents may be anything, give zeros.

    Args:
        module: The experts module.
        rows: [N, H].
        ids: [N, J] experts counted on this rank; any other number is an expert of another rank.
        weights: [N, J], or None for no weights.

    Returns:
        [N, H].
    """
    local = module.gate_up_proj.shape[0]
    # Choices that belong to another rank get the id one past the last local expert.
    ids = torch.where((ids >= 0) & (ids < local), ids, local)
    grouped = rows.is_cuda and rows.dtype == torch.bfloat16
    return (_grouped_experts if grouped else _dense_experts)(module, rows, ids, weights)


def _dense_experts(module: Any, rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """Every local expert on every row, kept where the row chose it.

    Args:
        module: The experts module.
        rows: [N, H].
        ids: [N, J], E / R where the expert is not on this rank.
        weights: [N, J], or None for no weights.

    Returns:
        [N, H].
    """
    experts = torch.arange(module.gate_up_proj.shape[0], device=rows.device)
    chosen = ids.unsqueeze(-1) == experts
    inner = module._apply_gate(torch.matmul(rows, module.gate_up_proj.transpose(1, 2)))
    out = torch.matmul(inner, module.down_proj.transpose(1, 2))
    if weights is not None:
        out = out * torch.where(chosen, weights.unsqueeze(-1), 0).sum(1).t().unsqueeze(-1)
    y: Tensor = torch.where(chosen.any(1).t().unsqueeze(-1), out, 0).sum(0).to(rows.dtype)
    return y


def _grouped_experts(module: Any, rows: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """Rows sorted by expert through two grouped matmuls; arguments as for `_dense_experts`.

    The shapes hold every choice of every row, so nothing depends on the routing. Choices of other
    ranks' experts sort to the end, where the grouped matmul leaves the output unwritten.
    """
    top_k = ids.shape[1]
    by_expert, order = torch.sort(ids.flatten(), stable=True)
    experts = torch.arange(module.gate_up_proj.shape[0], device=rows.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    inner = F.grouped_mm(rows[order // top_k], module.gate_up_proj.transpose(1, 2), offs=ends)
    inner = module._apply_gate(inner)
    out = F.grouped_mm(inner, module.down_proj.transpose(1, 2), offs=ends)
    if weights is not None:
        out = out * weights.flatten()[order].unsqueeze(-1)
    out = torch.where((by_expert < experts.shape[0]).unsqueeze(-1), out, 0)
    by_row = torch.unflatten(out[torch.argsort(order)], 0, (-1, top_k))
    return by_row.sum(1).to(rows.dtype)
