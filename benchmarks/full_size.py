"""Compile the full-size DeepSeek-V3 without its weights, and say what that costs.

Meta tensors, a fake process group of 64 ranks, no GPU. Prints one JSON object: seconds for Dynamo
and capture, seconds per pass, seconds and memory for each certificate, peak memory, seconds for
diffs with a changed copy.

    python benchmarks/full_size.py --layers 61

`--timeline FILE` also writes the program's timeline page, after everything was measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbo_fx.passes.verify import Verify
from dbo_fx.pipeline import State

# transformers looks for torchvision, whose build may not fit torch's.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]


REPEATS = 2


def build(layers: int) -> torch.nn.Module:
    """DeepSeek-V3 at full width on the meta device, its 256 experts sharded over the fake ranks."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from dbo_fx.integrations.transformers import expert_parallel

    config = DeepseekV3Config(num_hidden_layers=layers)  # the defaults are the 671B model
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()
    return expert_parallel(model.requires_grad_(False))


def resident_gb() -> float:
    """Memory of this process now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**30


def peak_gb() -> float:
    """The most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def certificates(state: State, verify: Verify) -> dict[str, object]:
    """Make every certificate of a lowered program by itself; seconds of each, quickest of three.

    Args:
        state: The state behind `lower`.
        verify: The pass that would make them.
    """
    from dbo_fx.certificates.hazards import prove
    from dbo_fx.certificates.memory import memory_certificate
    from dbo_fx.certificates.of_graph import execution_of_graph
    from dbo_fx.certificates.overlap import overlap_report
    from dbo_fx.certificates.variants import prove_variants

    before = resident_gb()
    execution = execution_of_graph(state, verify.contract).execution
    parts: dict[str, Callable[[], object]] = {
        "read": lambda: execution_of_graph(state, verify.contract).execution.source,
        "hazards": lambda: prove(execution),
        "ranks": lambda: prove_variants(state, execution),
        "overlap": lambda: overlap_report(execution),
        "memory": lambda: memory_certificate(state),
    }
    seconds = dict.fromkeys(parts, math.inf)
    for name, make in [*parts.items()] * (1 + REPEATS):
        started = time.perf_counter()
        str(make())
        seconds[name] = min(seconds[name], time.perf_counter() - started)
    return {
        "operations": len(execution.operations),
        "required": len(execution.required),
        "per_certificate_s": {name: round(value, 2) for name, value in seconds.items()},
        "certificates_s": round(sum(seconds.values()), 2),
        # The process's peak may be an earlier one: then this is more than the certificates took.
        "certificates_memory_gb": round(peak_gb() - before, 2),
    }


@contextmanager
def certified() -> Iterator[dict[str, object]]:
    """Beside the `verify` pass, make every certificate by itself and note what it costs."""
    notes: dict[str, object] = {}
    apply = Verify.apply

    def noted(verify: Verify, state: State) -> tuple[State, str]:
        started = time.perf_counter()
        notes.update(certificates(state, verify))
        notes["beside_s"] = time.perf_counter() - started
        return apply(verify, state)

    Verify.apply = noted  # type: ignore[method-assign]
    try:
        yield notes
    finally:
        Verify.apply = apply  # type: ignore[method-assign]


def measure(layers: int, ranks: int, tokens: int, timeline: str | None = None) -> dict[str, object]:
    """Trace and schedule; see the module's docstring."""
    from diff_time import diff_figures

    import dbo_fx
    from dbo_fx.backend import compile_captured

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model = build(layers)
    ids = torch.zeros(16, tokens, dtype=torch.long, device="meta")
    started = time.perf_counter()
    captured = dbo_fx.trace(model, (), {"input_ids": ids, "use_cache": False}, mark=0)
    traced = time.perf_counter()
    # Passes change a graph in place: for runs that only time them, the machine's speed varies.
    copies = [replace(captured, module=copy.deepcopy(captured.module)) for _ in range(REPEATS)]
    began = time.perf_counter()
    with certified() as notes:
        compiled = compile_captured(captured, dbo_fx.Options())
    done = time.perf_counter()
    beside = notes.pop("beside_s")
    assert isinstance(beside, float)
    per_pass = {r.name: r.seconds for r in compiled.reports}
    per_pass["verify"] -= beside
    figures: dict[str, object] = {
        "layers": layers,
        "moe_layers": compiled.summary.layers,
        "ranks": ranks,
        "captured_nodes": len(captured.graph.nodes),
        "emitted_nodes": len(compiled.module.graph.nodes),
        "segments": compiled.summary.segments,
        "distinct_segments": compiled.summary.distinct_segments,
        "trace_s": round(traced - started, 2),
        "passes_s": round(done - began - beside, 2),
        "passes_quickest_s": 0.0,
        "per_pass_s": {name: round(seconds, 2) for name, seconds in per_pass.items()},
        **notes,
        "peak_memory_gb": round(peak_gb(), 2),
    }
    seconds = [done - began - beside]
    for again in copies:
        begin = time.perf_counter()
        compile_captured(again, dbo_fx.Options())
        seconds.append(time.perf_counter() - begin)
    figures["passes_quickest_s"] = round(min(seconds), 2)
    figures |= diff_figures(captured, compiled)
    if timeline is not None:
        started = time.perf_counter()
        compiled.timeline(timeline)
        figures["timeline_s"] = round(time.perf_counter() - started, 2)
    return figures


def main() -> None:
    """Parse arguments, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--timeline", metavar="FILE", help="write the timeline page there")
    args = parser.parse_args()
    print(json.dumps(measure(args.layers, args.ranks, args.tokens, args.timeline)))


if __name__ == "__main__":
    main()
