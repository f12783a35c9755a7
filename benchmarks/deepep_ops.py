"""Dispatch + combine through dbo_fx's ops against direct DeepEP calls, in graph replay.

    python benchmarks/deepep_ops.py --transport deepep_ht --tokens 64 512 4096
    python benchmarks/deepep_ops.py --transport deepep_v2 --comm-sms 24
    python benchmarks/deepep_ops.py --transport deepep_ll --ranks 2

Both run dispatch, a multiplication in place of the experts, and combine, PAIRS times in one CUDA
graph, with the same Buffer, on one stream. Replays alternate; medians count. Needs DeepEP and one
GPU for each rank (deepep_ll and deepep_ll_async also run with one rank). Results are merged into
benchmarks/results/deepep_ops.json, or into --output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbo_fx.comm import deepep_cuda_ll, groups, transport_for
from dbo_fx.comm.expert_layouts import Batched, rows_dispatch
from dbo_fx.comm.protocol import begin_region
from dbo_fx.contracts import contract
from dbo_fx.launch import Ranks
from dbo_fx.sm_limits import SmLimits
from dbo_fx.sm_sharing import SmSharing

RESULTS = Path(__file__).parent / "results" / "deepep_ops.json"
PAIRS, REPLAYS, TOP_K, EXPERTS = 20, 30, 6, 64
LIMIT = 1.03
OPS = torch.ops.dbo_fx


def inputs(rank: int, tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of a rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().cuda()
    weights, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K)
    return x, ids.cuda(), weights.cuda()


def through_ops(transport: str, group: str, given: tuple[Tensor, ...], most: int) -> Tensor:
    """One dispatch and combine through the halves."""
    x, ids, weights = given
    if transport.startswith("deepep_ll"):
        sizes = Batched(most, EXPERTS)
        names, sent, slots = (sizes.dispatch(), sizes.combine()), [x, ids], (0, 1)
    else:
        names, sent, slots = (
            (rows_dispatch(EXPERTS), "rows_combine"),
            [x, ids, weights],
            (None,) * 2,
        )
    got = OPS.comm_buffers(sent, names[0], group)
    OPS.dispatch_send(sent, got, names[0], group, transport, 0, slots[0])
    OPS.dispatch_recv(got, group, transport, 0, slots[0])
    y = got[0] * 2
    back = [y, ids, weights, got[3], got[4]] if slots[0] == 0 else [y]
    out = OPS.comm_buffers(back, names[1], group)
    OPS.combine_send(back, out, names[1], group, transport, 0, slots[1])
    OPS.combine_recv(out, group, transport, 0, slots[1])
    found: Tensor = out[0]
    return found


def direct(
    transport: str, group: str, given: tuple[Tensor, ...], most: int, sms: int | None
) -> Tensor:
    """The same by DeepEP's own Python calls, on the Buffer that the transport has made."""
    x, ids, weights = given
    carrier: Any = transport_for("cuda", transport)
    ranks = groups.world_size(group)
    if transport.startswith("deepep_ll"):
        buffer = deepep_cuda_ll._BUFFERS[group].opened.buffer
        halves = transport == "deepep_ll"
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, most, EXPERTS, use_fp8=False, return_recv_hook=halves
        )
        if halves:
            hook()
        out, _, hook = buffer.low_latency_combine(
            rows * 2, ids, weights, handle, return_recv_hook=halves
        )
        if halves:
            hook()
    elif transport == "deepep_ht":
        buffer = carrier._buffers[group][1].buffer
        buffer.set_num_sms(sms)
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=len(x) * ranks,
            config=buffer.get_dispatch_config(ranks),
        )
        out = buffer.combine(rows * 2, handle, config=buffer.get_combine_config(ranks))[0]
    else:
        buffer = carrier._buffers[group, x.shape[1], TOP_K, False][1].buffer
        rows, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=handle_most(len(x)),
            num_sms=sms,
            do_cpu_sync=False,
        )
        out = buffer.combine(rows * 2, handle, num_sms=sms)[0]
    kept: Tensor = out
    return kept


def handle_most(tokens: int) -> int:
    """What the transport tells V2."""
    return max(64, 1 << (tokens - 1).bit_length())


def graph_of(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """PAIRS runs in one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PAIRS):
            run()
    return graph


@torch.no_grad()
def measure(
    rank: int, transport: str, tokens: int, hidden: int, most: int, comm_sms: int | None
) -> dict[str, Any]:
    """Microseconds of a dispatch and combine, both ways."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = groups.name_of(None)
    assert group is not None
    given = inputs(rank, tokens, hidden)
    limits = SmLimits(torch.device("cuda"))
    limits.sharing = SmSharing(comm=comm_sms)
    limits.enter()
    sms = contract(transport).num_sms if comm_sms is None else comm_sms
    try:
        begin_region(transport, [group])
        runs = [
            lambda: through_ops(transport, group, given, most),
            lambda: direct(transport, group, given, most, sms),
        ]
        same = torch.equal(*(run().clone() for run in runs))
        graphs = [graph_of(run) for run in runs]
        times: list[list[float]] = [[], []]
        for _ in range(REPLAYS):
            for graph, taken in zip(graphs, times, strict=True):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.distributed.barrier()
                start.record()
                graph.replay()
                stop.record()
                torch.cuda.synchronize()
                taken.append(start.elapsed_time(stop) * 1e3 / PAIRS)
    finally:
        limits.leave()
    ours, theirs = (statistics.median(taken) for taken in times)
    return {
        "ops_us": round(ours, 2),
        "direct_us": round(theirs, 2),
        "same": same,
        "device": f"{groups.world_size(group)} ranks, {torch.cuda.device_count()} x "
        + torch.cuda.get_device_name(),
    }


def git_commit() -> str:
    """The commit that is checked out, as far as git knows it."""
    line = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ("deepep_ht", "deepep_v2", "deepep_ll", "deepep_ll_async")
    parser.add_argument("--transport", default="deepep_ht", choices=kinds)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--most", type=int, default=128, help="max_tokens of deepep_ll")
    parser.add_argument("--comm-sms", type=int, help="deepep_ht, deepep_v2; default: 20")
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.comm_sms is not None and not contract(given.transport).takes_sms:
        parser.error(f"{given.transport} does not let a caller say how many SMs it takes")
    return given


def main() -> int:
    """Measure, print, merge."""
    given = parsed()
    output: Path = given.output
    known = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    ranks = Ranks(given.ranks)
    failed = False
    try:
        for tokens in given.tokens:
            arguments = (given.transport, tokens, given.hidden, given.most, given.comm_sms)
            row = ranks.call(measure, arguments, timeout_s=200)[0]
            row["ratio"] = round(row["ops_us"] / row["direct_us"], 3)
            row |= {
                "torch": torch.__version__,
                "commit": given.commit or git_commit(),
                "command": " ".join(["python", *sys.argv]),
            }
            key = f"{given.transport}, {given.ranks} ranks, T={tokens}, H={given.hidden}"
            known[key + (f", {given.comm_sms} SMs" if given.comm_sms else "")] = row
            failed |= row["ratio"] > LIMIT or not row["same"]
            print(given.transport, tokens, row, flush=True)
    finally:
        ranks.close()
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
