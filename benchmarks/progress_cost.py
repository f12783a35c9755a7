"""What the progress counters cost on CPU: host time per action, counting and in all.

One rank runs the reference decoder on few rows, so that actions are as short as they get. The
counters of the same program are timed alone; differences of whole calls would drown in noise.
Both are the best of their repeats. Exits 1 if counting takes more than 1% of the call.

    OMP_NUM_THREADS=1 python benchmarks/progress_cost.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import dbo_fx
from dbo_fx.models import MoeConfig, MoeDecoder
from dbo_fx.runtime import Runtime

REPEATS = 200
LIMIT = 0.01


def best_us(call: Callable[[], object]) -> float:
    """The shortest of the repeats, in microseconds."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) * 1e6


def count(runtime: Runtime) -> None:
    """Everything that counting adds to one call."""
    assert runtime.counters is not None
    runtime.counters.begin()
    index = dict.fromkeys(runtime.counters.streams, 0)
    for place in runtime.counters.order:
        index[place.stream] += 1
        runtime.start(index[place.stream], place.stream)
        runtime.finish(index[place.stream], place.stream)


@torch.no_grad()
def main() -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = MoeDecoder(MoeConfig(layers=4, shared_hidden=64))
    tokens = torch.randint(256, (4, 4))
    torch._dynamo.mark_dynamic(tokens, 0)
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True, options={"verify": "static"})
    compiled(tokens)
    runtime = dbo_fx.compilations()[-1].runtime
    assert runtime.counters is not None
    actions = len(runtime.counters.order)
    whole, counting = best_us(lambda: compiled(tokens)), best_us(lambda: count(runtime))
    print(
        f"{actions} actions: a call takes {whole / actions:.0f} us an action, counting "
        f"{counting / actions:.2f} us, {counting / whole:.2%} (limit {LIMIT:.0%})"
    )
    dist.destroy_process_group()
    return int(counting / whole > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
