"""What `overlap.py` measures: model shapes, link classes, and the points made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of a model; the architecture is transformers' own code for its family.

    Attributes:
        family: Prefix of the config and model classes of transformers.
        layers: Number of decoder layers that are measured.
        config: What differs from the config's defaults.
    """

    family: str
    layers: int
    config: dict[str, Any] = field(hash=False)


_DEEPSEEK = {
    "vocab_size": 1024,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
}
SHAPES = {
    "v2lite": Shape(
        "DeepseekV3",
        5,
        _DEEPSEEK
        | {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 512,
        },
    ),
    "v3": Shape(
        "DeepseekV3",
        3,
        _DEEPSEEK
        | {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
        },
    ),
    "qwen3": Shape(
        "Qwen3Moe",
        4,
        {
            "vocab_size": 1024,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 8192,
        },
    ),
    "mixtral": Shape(
        "Mixtral",
        3,
        {
            "vocab_size": 1024,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 8192,
        },
    ),
    "tiny": Shape(
        "DeepseekV3",
        3,
        _DEEPSEEK
        | {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}

NIC_CTAS = 4  # NCCL with 4 CTAs moves about 50 GB/s, like one 400 Gb/s NIC.
LINKS = {
    "nvlink": "NVLink between the GPUs of one host",
    "nic": f"NCCL with {NIC_CTAS} CTAs: the speed of one 400 Gb/s NIC",
    "no_p2p": "NCCL_P2P_DISABLE=1: through host memory",
    "host": "one GPU, its peers imitated: every byte for or from a peer crosses PCIe by copy "
    "engines (transport loopback)",
    "cpu": "gloo on one host, to try the script out",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: all schedules at one size over one transport.

    Attributes:
        shape: A name in `SHAPES`.
        tokens: Tokens of each rank, T.
        transport: Name of the transport.
        link: A name in `LINKS`.
        kind: "prefill": causal attention over sequences of up to 1024 tokens; "decode": one token
            of each of T sequences, against a static cache.
        routing: How the experts are chosen: "uniform" or "skewed" (a few experts get most tokens).
        experts: How tokens travel: "all_gather", or "all_to_all" with a copy for each choice.
        capacity: For "all_to_all", rows of a block over the mean of uniform routing; None is the
            worst case, which moves as many bytes as if every choice left the rank.
        comm_sms: SMs (NCCL CTAs) given to communication; None leaves it to the transport.
        carveout: SMs that matmuls leave free; None leaves none.
        max_tokens: For rows by expert ("batched"): the most tokens of a rank; None for "rows".
        fp8: Whether rows travel as float8.
    """

    shape: str
    tokens: int
    transport: str
    link: str
    kind: str = "prefill"
    routing: str = "uniform"
    experts: str = "all_gather"
    capacity: float | None = None
    comm_sms: int | None = None
    carveout: int | None = None
    max_tokens: int | None = None
    fp8: bool = False

    @property
    def key(self) -> str:
        """A name for the point in the results file."""
        parts = [self.shape, self.kind, f"T{self.tokens}", self.link, self.transport]
        parts += [] if self.experts == "all_gather" else [self.experts]
        parts += [] if self.capacity is None else [f"capacity{self.capacity}"]
        parts += [] if self.routing == "uniform" else [self.routing]
        parts += [] if self.comm_sms is None else [f"comm{self.comm_sms}"]
        parts += [] if self.carveout is None else [f"left{self.carveout}"]
        parts += [] if self.max_tokens is None else [f"batched{self.max_tokens}"]
        parts += ["fp8"] if self.fp8 else []
        return "/".join(parts)

    @property
    def group(self) -> Point:
        """Points of equal group share compilations."""
        return replace(self, tokens=0)

    @property
    def family(self) -> Point:
        """Points of equal family share processes and their model."""
        # Between GPUs with peer access the option `comm_sms` makes the link.
        link = "nvlink" if self.link == "nic" else self.link
        return replace(self.group, link=link, transport="", comm_sms=None, carveout=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


SIZES = (64, 1024, 8192, 16384)


def targets() -> Iterator[Point]:
    """The cases that splitting is judged by, most telling first.

    A run without a split has nothing to leave SMs for: it is measured without a carve-out, too.
    """
    nic = Point("v2lite", 16384, "nccl", "nic", comm_sms=NIC_CTAS, carveout=8)
    yield nic
    yield replace(nic, carveout=None)
    yield Point("v2lite", 16384, "copy_engine", "nvlink")
    for capacity in (None, 1.5):
        for carveout in (8, None):
            yield replace(
                nic, tokens=8192, experts="all_to_all", capacity=capacity, carveout=carveout
            )
    yield Point("v2lite", 16384, "nccl", "nvlink")


def required() -> Iterator[Point]:
    """The points that performance.md is about, on two GPUs."""
    yield from targets()
    for transport in ("nccl", "copy_engine"):
        yield Point("v2lite", 16384, transport, "nvlink")
    for carveout in (None, 8, 16):
        yield Point("v2lite", 16384, "nccl", "nic", comm_sms=NIC_CTAS, carveout=carveout)
        yield Point(
            "v2lite",
            8192,
            "nccl",
            "nic",
            experts="all_to_all",
            comm_sms=NIC_CTAS,
            carveout=carveout,
        )
    yield Point("v2lite", 8192, "nccl", "nic", comm_sms=NIC_CTAS)
    for sms, carveout in ((None, 8), (None, 16), (None, 24), (8, 8), (16, 16)):
        yield Point("v2lite", 16384, "nccl", "nvlink", comm_sms=sms, carveout=carveout)
    for shape in ("v2lite", "qwen3", "v3", "mixtral"):
        for tokens in SIZES:
            for transport in ("copy_engine", "nccl"):
                yield Point(shape, tokens, transport, "nvlink", _kind(tokens))
    for tokens in (8192, 16384):
        yield Point("v2lite", tokens, "nccl", "no_p2p")


def deepep() -> Iterator[Point]:
    """DeepEP: prefill over the high-throughput kernels, decode over the low-latency ones."""
    for shape in ("v2lite", "v3"):
        for left in (None, 20):
            yield Point(shape, 8192, "deepep_ht", "nvlink", carveout=left)
        for transport in ("deepep_ll", "deepep_ll_async"):
            for tokens in (64, 128, 256):
                yield Point(shape, tokens, transport, "nvlink", "decode", max_tokens=256)
    for tokens in (64, 256):
        yield Point("v2lite", tokens, "deepep_ll", "nvlink", "decode", max_tokens=256, fp8=True)
    yield Point("v2lite", 8192, "deepep_ht", "nvlink", fp8=True)
    yield Point("v2lite", 8192, "deepep_v2", "nvlink")


def host() -> Iterator[Point]:
    """What one GPU can show: every schedule over a link of NIC speed that takes no SMs.

    No all-to-all of packed rows: peers that are copies of this rank send back other rows than they
    were sent.
    """
    for shape in ("v2lite", "qwen3", "v3", "mixtral"):
        for tokens in SIZES:
            yield Point(shape, tokens, "loopback", "host", _kind(tokens))
    yield Point("v2lite", 8192, "loopback", "host", routing="skewed")


def grid() -> Iterator[Point]:
    """Everything else, as time allows."""
    for shape in ("v2lite", "qwen3", "v3", "mixtral"):
        for tokens in (1, 16, 256, 512, 2048, 4096, *SIZES):
            for transport, link, sms in (
                ("copy_engine", "nvlink", None),
                ("nccl", "nvlink", None),
                ("nccl", "nic", NIC_CTAS),
            ):
                for routing in ("uniform", "skewed"):
                    yield Point(
                        shape, tokens, transport, link, _kind(tokens), routing, "all_gather", sms
                    )


def tryout() -> Iterator[Point]:
    """Small points on two CPU ranks."""
    for tokens in (32, 64):
        yield Point("tiny", tokens, "gloo", "cpu")
    yield Point("tiny", 8, "gloo", "cpu", "decode")
    yield Point("tiny", 32, "deepep_ht", "cpu")
    yield Point("tiny", 8, "deepep_ll", "cpu", "decode", max_tokens=8)


SETS = {
    "targets": targets,
    "required": required,
    "deepep": deepep,
    "host": host,
    "grid": grid,
    "tryout": tryout,
}


def _kind(tokens: int) -> str:
    return "decode" if tokens <= 256 else "prefill"
