"""How long a model takes to compile, cold and warm: one JSON entry per device and preset.

Every measurement is a process of its own, one rank, with a folder of its own for Inductor's files:

    cold   nothing compiled before: the first call of a torch.compiled model, Dynamo included
    again  the same in a new process: Inductor finds its files
    warm   `dbo_fx.load` of the program that `cold` saved, and its first call

Imports and building the model are not counted, and reported beside. Weights are random; the first
call's numeric test is off (`verify="static"`), because its three extra runs are not compilation.

    python benchmarks/compile_time.py --device cuda --layers 27 --preset v2lite
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRESETS: dict[str, dict[str, int]] = {
    "tiny": dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16,
    ),
    "v2lite": dict(
        vocab_size=1024, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=1408,
        num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, num_experts_per_tok=6,
        n_group=2, topk_group=1, q_lora_rank=512, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128,
    ),
}  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "compile_time.json"
STEPS = ("cold", "again", "warm")


def build(preset: str, layers: int, device: Any) -> Any:
    """HF DeepSeek-V3 at these widths, the first layer dense; [B, S] ids to logits."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # may not fit torch's
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from dbo_fx.demo import Logits
    from dbo_fx.integrations.transformers import expert_parallel

    config = DeepseekV3Config(
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        n_shared_experts=1,
        max_position_embeddings=8192,
        **PRESETS[preset],
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM._from_config(config, dtype=dtype)
    model = expert_parallel(model.eval()).to_empty(device=device)
    for buffer in model.buffers():  # This rank's first expert is 0; positions do not matter here.
        buffer.zero_()
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    return Logits(model)


def step(args: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in this process."""
    started = time.perf_counter()
    import torch
    import torch._inductor.compile_fx  # Otherwise imported by the first compilation.
    import torch._inductor.standalone_compile
    import torch.distributed as dist

    import dbo_fx
    from dbo_fx.segments import artifacts

    imported = time.perf_counter()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with torch.no_grad():
        model = build(args.preset, args.layers, device)
        ids = torch.randint(0, 128, (args.batch, args.tokens), device=device)
        torch._dynamo.mark_dynamic(ids, 0)
        _ = (ids.float() @ ids.float().t()).sum().item()  # The device is up.
        built = time.perf_counter()
        if args.step == "warm":
            program: Callable[[Any], Any] = dbo_fx.load(Path(args.folder) / "program", model)
        else:
            options = {"segment_backend": args.backend, "verify": "static"}
            program = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
        loaded = time.perf_counter()
        program(ids)
        if args.device == "cuda":
            torch.cuda.synchronize()
        done = time.perf_counter()
    compiled = dbo_fx.compilations()[-1]
    if args.step == "cold":
        dbo_fx.save(compiled, Path(args.folder) / "program")
    passes = {r.name: round(r.seconds, 2) for r in compiled.reports}
    return {
        "seconds": round(done - built, 2),
        "load_s": round(loaded - built, 2) if args.step == "warm" else None,
        "passes_s": passes,
        "other_s": round(done - built - sum(passes.values()), 2),
        "segments": compiled.summary.segments,
        "compiled": len(artifacts()),
        "imports_s": round(imported - started, 2),
        "model_s": round(built - imported, 2),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        figures = {}
        for name in args.steps.split(","):
            line = [sys.executable, __file__, *sys.argv[1:], "--step", name, "--folder", folder]
            done = subprocess.run(line, env=env, stdout=subprocess.PIPE, text=True, check=True)
            figures[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, json.dumps(figures[name]), flush=True)
    return figures


def commit() -> str:
    """The commit that was measured, as far as git knows it."""
    line = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()


def record(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Add an entry to the results, in the place of an older one for the same."""
    import torch

    is_cuda = args.device == "cuda"
    key = f"{args.device} {args.preset} {args.layers} layers, {args.backend or 'default'} segments"
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    chosen = ["device", "preset", "layers", "batch", "tokens", "backend", "steps"]
    given = " ".join(f"--{k} {v}" for k in chosen if (v := getattr(args, k)) is not None)
    found[key] = {
        "command": f"python benchmarks/compile_time.py {given}",
        "commit": args.commit or commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if is_cuda else "cpu",
        "cores": os.cpu_count(),
        **figures,
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Parse arguments, measure, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="tiny")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--batch", type=int, default=4, help="sequences of the first call")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--backend", help="segment_backend; default: the device's")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument("--steps", default=",".join(STEPS), help="which, in this order")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step is not None:
        print(json.dumps(step(args)))
    else:
        record(args, measure(args))


if __name__ == "__main__":
    main()
