"""Compile the full-size DeepSeek-V3 without its weights, and say what that costs.

Meta tensors, a fake process group of 64 ranks, no GPU. Prints one JSON object: seconds for Dynamo
and capture, seconds per pass, peak memory.

    python benchmarks/full_size.py --layers 61
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

# transformers looks for torchvision, whose build may not fit torch's.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]


def build(layers: int) -> torch.nn.Module:
    """DeepSeek-V3 at full width on the meta device, its 256 experts sharded over the fake ranks."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from dbo_fx.integrations.transformers import expert_parallel

    config = DeepseekV3Config(num_hidden_layers=layers)  # the defaults are the 671B model
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()
    return expert_parallel(model.requires_grad_(False))


def measure(layers: int, ranks: int, tokens: int) -> dict[str, object]:
    """Trace and schedule; see the module's docstring."""
    import dbo_fx
    from dbo_fx.backend import compile_captured

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model = build(layers)
    ids = torch.zeros(16, tokens, dtype=torch.long, device="meta")
    started = time.perf_counter()
    captured = dbo_fx.trace(model, (), {"input_ids": ids, "use_cache": False}, mark=0)
    traced = time.perf_counter()
    compiled = compile_captured(captured, dbo_fx.Options())
    done = time.perf_counter()
    return {
        "layers": layers,
        "moe_layers": compiled.summary.layers,
        "ranks": ranks,
        "captured_nodes": len(captured.graph.nodes),
        "emitted_nodes": len(compiled.module.graph.nodes),
        "segments": compiled.summary.segments,
        "distinct_segments": compiled.summary.distinct_segments,
        "trace_s": round(traced - started, 2),
        "passes_s": round(done - traced, 2),
        "per_pass_s": {r.name: round(r.seconds, 2) for r in compiled.reports},
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    """Parse arguments, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence")
    args = parser.parse_args()
    print(json.dumps(measure(args.layers, args.ranks, args.tokens)))


if __name__ == "__main__":
    main()
