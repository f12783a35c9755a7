"""What an engine may have switched on that does not go with splitting a batch.

An integration fills an `EngineFeatures` record from the engine's configuration and calls `refuse`
before anything is compiled. What shows in the graph is refused there too; this record is for what
does not, or shows too late. `REFUSALS` is the only list: `table()` makes the documentation of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dbo_fx.errors import OptionError

CUDA_GRAPHS = ("none", "full", "piecewise")
# Scales that a row gets for itself, or that do not depend on the batch at all.
ROW_WISE_SCALES = ("weight_only", "static", "per_token", "per_block")
BATCH_WISE_SCALES = ("per_tensor", "outlier_columns")
SCALES = (*ROW_WISE_SCALES, *BATCH_WISE_SCALES)


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """What the engine has switched on; the defaults are a plain decoder that may be split.

    Attributes:
        lora: LoRA adapters are applied at run time.
        pipeline_parallel: Number of pipeline stages.
        prefill_context_parallel: Number of ranks that share the tokens of one prompt.
        decode_context_parallel: Number of ranks that share the KV cache of one request.
        multimodal: Images, audio or video are among the inputs.
        encoder_decoder: The decoder attends to an encoder's states.
        encoder_only: Attention is not causal.
        recurrent_state_over_split: A recurrent state (Mamba, linear attention, short convolution)
            of one request goes from one microbatch to the next. False also for a hybrid model that
            is split between requests only.
        cuda_graphs: "none", "full" or "piecewise".
        batch_norm: A layer normalises with the statistics of the batch; frozen running statistics
            do not count.
        dropping_capacity: Routing drops tokens beyond an expert's capacity.
        expert_load_balancing: Experts move between ranks at run time and the expert map with them.
        expert_parallel: Experts are spread over ranks.
        expert_ranks: Over how many; counts only with `expert_parallel`.
        quantization: The engine's name for how weights are quantised, None if they are not.
        activation_scales: What that method's custom ops scale activations by: "weight_only" (not at
            all), "static" (calibrated), "per_token", "per_block" (blocks within a row),
            "per_tensor" (the largest of the batch), "outlier_columns" (columns chosen by the
            batch); None if unknown.
    """

    lora: bool = False
    pipeline_parallel: int = 1
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1
    multimodal: bool = False
    encoder_decoder: bool = False
    encoder_only: bool = False
    recurrent_state_over_split: bool = False
    cuda_graphs: str = "none"
    batch_norm: bool = False
    dropping_capacity: bool = False
    expert_load_balancing: bool = False
    expert_parallel: bool = False
    expert_ranks: int = 1
    quantization: str | None = None
    activation_scales: str | None = None

    def __post_init__(self) -> None:
        """Validate every value.

        Raises:
            OptionError: A value is of the wrong type or not among the allowed ones.
        """
        for field in fields(self):
            value: Any = getattr(self, field.name)
            default: Any = field.default
            if default is None:
                continue
            if type(value) is not type(default):
                raise OptionError(
                    f"EngineFeatures: {field.name}={value!r}, wanted a value like {default!r}."
                )
            if isinstance(default, int) and value < default:
                raise OptionError(
                    f"EngineFeatures: {field.name}={value!r}, wanted {default!r} or more."
                )
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise OptionError(
                f"EngineFeatures: cuda_graphs={self.cuda_graphs!r}, wanted one of {CUDA_GRAPHS}."
            )
        if self.activation_scales is not None and self.activation_scales not in SCALES:
            raise OptionError(
                f"EngineFeatures: activation_scales={self.activation_scales!r}, wanted one of "
                f"{SCALES}, or None if unknown."
            )


@dataclass(frozen=True, slots=True)
class Refusal:
    """One feature that does not go with splitting.

    Attributes:
        feature: Its name in messages.
        fields: Fields of the record that show it.
        why: What would go wrong.
        remedy: What to do instead.
        found: Whether a record shows it.
    """

    feature: str
    fields: tuple[str, ...]
    why: str
    remedy: str
    found: Callable[[EngineFeatures], bool]

    def message(self, features: EngineFeatures) -> str:
        """Return the feature's name, the values that show it, the reason and the remedy."""
        shown = ", ".join(f"{name}={getattr(features, name)!r}" for name in self.fields)
        return f"{self.feature} ({shown}): {self.why}. {self.remedy}."


REFUSALS = (
    Refusal(
        "LoRA",
        ("lora",),
        "which adapter a token uses is looked up by its place in the whole batch, in buffers that "
        "both microbatches would share",
        "Merge the adapter into the weights, or run batches with adapters unsplit",
        lambda f: f.lora,
    ),
    Refusal(
        "pipeline parallelism",
        ("pipeline_parallel",),
        "stages send whole batches to each other over a communicator whose place among dispatch "
        "and combine no schedule fixes, so ranks could wait for each other in a circle",
        "Use one stage, and spread the model by expert, data or tensor parallelism",
        lambda f: f.pipeline_parallel > 1,
    ),
    Refusal(
        "prefill context parallelism",
        ("prefill_context_parallel",),
        "the tokens of one prompt lie on several ranks, so cutting each rank's rows in two is no "
        "cut between earlier and later tokens",
        "Set it to 1, or run prefill steps unsplit",
        lambda f: f.prefill_context_parallel > 1,
    ),
    Refusal(
        "decode context parallelism",
        ("decode_context_parallel",),
        "attention exchanges partial results between the ranks that share a request's KV cache, "
        "and no schedule has a place for that communication",
        "Set it to 1, or run decode steps unsplit",
        lambda f: f.decode_context_parallel > 1,
    ),
    Refusal(
        "multimodal inputs",
        ("multimodal",),
        "embeddings of images or sound are put at positions counted over the whole batch, and "
        "their rows are not token rows",
        "Run batches with such inputs unsplit",
        lambda f: f.multimodal,
    ),
    Refusal(
        "encoder-decoder",
        ("encoder_decoder",),
        "cross-attention reads encoder states that are laid out by request of the whole batch and "
        "have another number of rows than the tokens",
        "Run the model unsplit",
        lambda f: f.encoder_decoder,
    ),
    Refusal(
        "encoder-only",
        ("encoder_only",),
        "attention is not causal, so the earlier tokens of a request need the later ones of the "
        "same layer, and the microbatch that leads would read rows that do not exist yet",
        "Run the model unsplit",
        lambda f: f.encoder_only,
    ),
    Refusal(
        "hybrid recurrent state over a split",
        ("recurrent_state_over_split",),
        "the second part of a request needs the state in which the first part ends, but the scan "
        "and its chunk metadata are laid out for the whole batch",
        "Split between requests only, or run the model unsplit",
        lambda f: f.recurrent_state_over_split,
    ),
    Refusal(
        "piecewise CUDA graphs",
        ("cuda_graphs",),
        "each piece is captured by itself, and an event recorded in one capture cannot be waited "
        "for in another, so nothing overlaps beyond a piece",
        "Use full CUDA graphs, or none",
        lambda f: f.cuda_graphs == "piecewise",
    ),
    Refusal(
        "batch norm",
        ("batch_norm",),
        "mean and variance are taken over all rows, so a row's result depends on the others in its "
        "microbatch",
        "Call model.eval(), so that running statistics are used, or replace the layer",
        lambda f: f.batch_norm,
    ),
    Refusal(
        "capacity routing that drops tokens",
        ("dropping_capacity",),
        "which tokens an expert drops depends on all tokens that compete for it, and a microbatch "
        "has other competitors than the batch",
        "Use dropless routing: a capacity of tokens times top-k rows for each source rank",
        lambda f: f.dropping_capacity,
    ),
    Refusal(
        "expert load balancing under a captured graph",
        ("expert_load_balancing", "cuda_graphs"),
        "a captured graph reads the expert map at the address it was captured with, and a swap "
        "between the two microbatches' dispatches would route them by different maps",
        "Freeze the expert map before capture, or run without CUDA graphs",
        lambda f: f.expert_load_balancing and f.cuda_graphs != "none",
    ),
    Refusal(
        "expert parallelism on fewer than two ranks",
        ("expert_parallel", "expert_ranks"),
        "dispatch and combine stay within the rank, so there is no communication to overlap and a "
        "split only costs time",
        "Start two ranks or more, or leave expert parallelism out",
        lambda f: f.expert_parallel and f.expert_ranks < 2,
    ),
    Refusal(
        "quantised weights with scales taken over the batch",
        ("quantization", "activation_scales"),
        "the method's custom ops compute scales or choose columns from all rows, so a microbatch "
        "is rounded otherwise than the batch",
        f"Use a method with scales of one of these kinds: {', '.join(ROW_WISE_SCALES)}",
        lambda f: f.quantization is not None and f.activation_scales in BATCH_WISE_SCALES,
    ),
    Refusal(
        "quantised weights of an unknown kind",
        ("quantization", "activation_scales"),
        "custom ops show nothing of how they mix rows, so whether a split keeps the results is "
        "unknown",
        "Fill in activation_scales with what the method does",
        lambda f: f.quantization is not None and f.activation_scales is None,
    ),
)


def refuse(features: EngineFeatures) -> None:
    """Raise if the engine has something switched on that does not go with splitting.

    Args:
        features: What the engine has switched on.

    Raises:
        OptionError: Names every such feature, why it does not go with splitting, and what to do.
    """
    found = [refusal.message(features) for refusal in REFUSALS if refusal.found(features)]
    if found:
        raise OptionError("\n  ".join(["the batch may not be split, because of:", *found]))


def table() -> str:
    """Return all refusals as a Markdown table, for `docs/limits.md`."""
    lines = ["| feature | field | why | what to do |", "|---|---|---|---|"]
    for refusal in REFUSALS:
        names = ", ".join(f"`{name}`" for name in refusal.fields)
        lines.append(f"| {refusal.feature} | {names} | {refusal.why} | {refusal.remedy} |")
    return "\n".join(lines) + "\n"
