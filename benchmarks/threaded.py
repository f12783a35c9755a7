"""The rival: dual batch overlap by two CPU threads that hand a baton to each other.

This is how vLLM does it: each thread runs the unsplit model on half of the batch; before it would
wait for a dispatch or a combine it goes to sleep and wakes the other one. Segments, transports,
streams and events are dbo_fx's own, and nothing is copied that dbo_fx does not copy, so that the
two differ in one thing: who decides the order, and when.

    python benchmarks/threaded.py            host time of a yield on this machine
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dbo_fx.capture import CapturedGraph, value_of
from dbo_fx.comm.protocol import _TRANSPORTS, Transport, begin_region, transport_for
from dbo_fx.compiled import CompiledProgram
from dbo_fx.host_code import Program
from dbo_fx.ir import COMM, Action
from dbo_fx.passes.halves import argument
from dbo_fx.passes.schedule import action_of
from dbo_fx.passes.streams import RECVS, SENDS
from dbo_fx.runtime import _COMM_STREAMS, Runtime
from dbo_fx.sm_limits import matmul_carveout, set_matmul_carveout
from dbo_fx.symbols import expression

THREADS = 2


class Baton:
    """Lets one of two threads run at a time.

    Attributes:
        yields: How often the baton changed hands.
    """

    def __init__(self) -> None:
        """Thread 0 begins."""
        self._turns = [threading.Event() for _ in range(THREADS)]
        self._done = [False] * THREADS
        self.yields = 0

    def begin(self) -> None:
        """Reset for a step."""
        self._done = [False] * THREADS
        for turn in self._turns:
            turn.clear()
        self._turns[0].set()

    def take(self, thread: int) -> None:
        """Sleep until it is this thread's turn."""
        self._turns[thread].wait()
        self._turns[thread].clear()

    def hand_over(self, thread: int) -> None:
        """Wake the other thread and sleep; go on at once if the other one has finished."""
        other = 1 - thread
        if self._done[other]:
            return
        self.yields += 1
        self._turns[other].set()
        self.take(thread)

    def finish(self, thread: int) -> None:
        """Let the other thread run on alone."""
        self._done[thread] = True
        self._turns[1 - thread].set()


class OneInFlight:
    """What vLLM's threads do with a transport that has one un-received operation at most.

    A thread hands over behind its send; the other one receives that operation before it sends its
    own. Slots are taken in turn, as no program knows which thread comes next.

    Args:
        carrier: The transport.
    """

    def __init__(self, carrier: Transport) -> None:
        """Nothing is in flight."""
        self._carrier = carrier
        self.contract = carrier.contract
        self._next = 0
        self._pending: tuple[Any, Sequence[torch.Tensor]] | None = None

    def begin(self, group: str) -> None:
        """Start a step at slot 0."""
        self._carrier.begin(group)
        self._next, self._pending = 0, None

    def launch(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        collective: str,
        group: str,
        slot: int | None,
        name: str,
    ) -> Any:
        """Receive what the other thread sent, then send."""
        if self._pending is not None:
            self.finish(*self._pending)
        turn = self._next % self.contract.slots if self.contract.slots else None
        flight = self._carrier.launch(inputs, outputs, collective, group, turn, name)
        self._next += 1
        self._pending = flight, outputs
        return flight

    def finish(self, flight: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Receive, unless the other thread has done so."""
        if self._pending is not None and self._pending[0] is flight:
            self._carrier.finish(flight, outputs)
            self._pending = None

    def realign(self, group: str | None) -> None:
        """Forget what is un-received."""
        self._carrier.realign(group)
        self._pending = None


class ThreadRuntime(Runtime):
    """A runtime whose program yields where it would wait for a communication."""

    def __init__(self, device: torch.device, baton: Baton, thread: int) -> None:
        """Belong to one of the two threads."""
        super().__init__(device)
        self._baton, self._thread = baton, thread

    def hand_over(self) -> None:
        """Let the other thread run, then go on with this thread's streams."""
        self._baton.hand_over(self._thread)


class Threaded:
    """Runs a one-microbatch program on both halves of the batch, in two threads.

    Args:
        compiled: A program of one microbatch, such as `schedule="single_batch_overlap"`.
    """

    def __init__(self, compiled: CompiledProgram) -> None:
        """Make one copy of the program for each thread; segments are shared."""
        if compiled.program.microbatches != 1:
            raise ValueError("the baseline takes a program of one microbatch")
        self.captured = compiled.captured
        self.baton = Baton()
        self._modules = [_copy(compiled.module, self.baton, i) for i in range(THREADS)]
        self._first: ThreadRuntime = self._modules[0].runtime
        self._left = compiled.runtime.limits.sharing.left
        self._groups = compiled._groups
        self._key = self._first.device.type, compiled.program.transport
        self._carrier = transport_for(*self._key)
        if self._carrier.contract.max_in_flight == 1:
            self._carrier = OneInFlight(self._carrier)
        # Threads that stay: handles of CUDA libraries belong to a thread.
        self._pool = ThreadPoolExecutor(THREADS)
        self._results: list[Any] = [None] * THREADS
        self._errors: list[BaseException] = []

    def __call__(self, *args: Any) -> Any:
        """Run one step; the outputs are joined along dim 0."""
        halves = halve(self.captured, args)
        self.baton.begin()
        self._errors.clear()
        streams = self._streams() if self._first.is_cuda else None
        before = matmul_carveout() if self._left is not None else None
        if self._left is not None:
            set_matmul_carveout(self._left)
        own = _TRANSPORTS[self._key]
        _TRANSPORTS[self._key] = self._carrier
        try:
            begin_region(self._key[1], self._groups)
            wait([self._pool.submit(self._work, i, halves[i], streams) for i in range(THREADS)])
        finally:
            _TRANSPORTS[self._key] = own
            if self._left is not None:
                set_matmul_carveout(before)
        if self._errors:
            raise self._errors[0]
        return pytree.tree_map(lambda *parts: torch.cat(parts), *self._results)

    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The caller's stream, and its communication stream: those of both threads."""
        self._first._streams.begin()
        return torch.cuda.current_stream(), self._first._streams[COMM]

    @torch.no_grad()
    def _work(
        self,
        thread: int,
        args: Sequence[Any],
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    ) -> None:
        self.baton.take(thread)
        try:
            if streams is not None:
                compute, comm = streams
                torch.cuda.set_stream(compute)
                _COMM_STREAMS.by_device[comm.device.index] = comm
            self._results[thread] = self._modules[thread](*args)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self.baton.finish(thread)


def halve(captured: CapturedGraph, args: Sequence[Any]) -> list[list[Any]]:
    """The arguments of both halves: views of the token inputs, sizes counted anew.

    Args:
        captured: The graph that takes the arguments.
        args: Its arguments.
    """
    tokens = {t.index: t.dim for t in captured.token_inputs}
    first = captured.token_inputs[0]
    size = int(args[first.index].shape[first.dim])
    cuts = ((0, size // 2), (size // 2, size - size // 2))
    halves = []
    for start, length in cuts:
        part = list(args)
        for index, node in enumerate(captured.placeholders):
            if index in tokens:
                part[index] = args[index].narrow(tokens[index], start, length)
            elif isinstance(value_of(node), torch.SymInt):
                found = expression(value_of(node)).subs(captured.symbol, length)
                part[index] = int(found) if found.is_number else args[index]
        halves.append(part)
    return halves


def recorded(compiled: CompiledProgram, call: Callable[[], Any]) -> tuple[Any, ...]:
    """The arguments that a call gives a program.

    Args:
        compiled: The program.
        call: Calls the model that the program was compiled from.
    """
    found: list[tuple[Any, ...]] = []
    run = compiled._run

    def spy(args: tuple[Any, ...]) -> Any:
        found.append(args)
        return run(args)

    compiled._run = spy  # type: ignore[method-assign]
    try:
        call()
    finally:
        del compiled._run  # type: ignore[method-assign]
    return found[0]


def _copy(module: GraphModule, baton: Baton, thread: int) -> GraphModule:
    """The module with flights and a runtime of its own, and a yield before every recv's wait."""
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}
    waits: list[Node] = []
    received: Action | None = None
    runtime: Node | None = None
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target in ("start", "finish"):
            continue  # Progress counters belong to the program that they were made for.
        copy = env[node] = graph.node_copy(node, env.__getitem__)
        if node.target == "runtime":
            runtime = copy
        if node.target in SENDS | RECVS:
            flight = argument(node, "flight")
            names = [a.name for a in node.target._schema.arguments]
            index = names.index("flight")
            copy.args = (*copy.args[:index], flight * THREADS + thread, *copy.args[index + 1 :])
        if node.target in RECVS and action_of(node) != received:
            assert runtime is not None
            received = action_of(node)
            with graph.inserting_before(waits[0] if waits else copy):
                graph.call_method("hand_over", (runtime,))
        if node.op == "call_method" and node.target == "wait":
            waits.append(copy)
        else:
            waits.clear()
    device = module.runtime.device
    root = {
        n: getattr(module, n) for n in {str(x.target) for x in graph.nodes if x.op == "get_attr"}
    }
    root |= {
        str(n.target): getattr(module, str(n.target)) for n in graph.nodes if n.op == "call_module"
    }
    runtime_of = root["runtime"] = ThreadRuntime(device, baton, thread)
    # The carve-out belongs to the process, and two threads would put each other's back.
    runtime_of.limits.sharing = replace(module.runtime.limits.sharing, left=None)
    graph.lint()
    return Program(root, graph, class_name="ThreadedProgram")


def yield_us(rounds: int = 2000) -> float:
    """Host time of one hand-over between two threads that do nothing else, microseconds."""
    baton = Baton()
    times: list[float] = []

    def work(thread: int) -> None:
        baton.take(thread)
        started = time.perf_counter()
        for _ in range(rounds):
            baton.hand_over(thread)
        times.append((time.perf_counter() - started) / rounds / THREADS * 1e6)
        baton.finish(thread)

    baton.begin()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(times)


def vllm_yield_us(path: Path, rounds: int = 2000) -> float:
    """The same with vLLM's own contexts, streams and events included; needs a GPU.

    Args:
        path: vLLM's `v1/worker/ubatching.py`; it is loaded alone, its imports are stood in for.
        rounds: Yields of each thread.
    """
    module = _load_alone(path)
    barrier = threading.Barrier(THREADS + 1)
    compute, comm = torch.cuda.current_stream(), torch.cuda.Stream()
    contexts = module.make_ubatch_contexts(
        THREADS, compute, comm, [object() for _ in range(THREADS)], barrier
    )
    times: list[float] = []

    def work(context: Any) -> None:
        with context:
            started = time.perf_counter()
            for _ in range(rounds // 2):
                module.dbo_yield_and_switch_from_compute_to_comm()
                module.dbo_yield_and_switch_from_comm_to_compute()
            times.append((time.perf_counter() - started) / rounds / THREADS * 1e6)

    threads = [threading.Thread(target=work, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    barrier.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    return max(times)


def _load_alone(path: Path) -> Any:
    parts = {
        "vllm": {},
        "vllm.forward_context": {"ForwardContext": object, "_forward_context": None},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"current_stream": torch.cuda.current_stream},
    }
    for name, names in parts.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        for key, value in names.items():
            setattr(module, key, value)
    sys.modules["vllm"].forward_context = sys.modules["vllm.forward_context"]
    spec = importlib.util.spec_from_file_location("ubatching", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def main() -> None:
    """Print the host time of a yield; with `--output`, write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="vLLM's v1/worker/ubatching.py, to compare with")
    parser.add_argument("--commit", default="", help="what to write down as the commit")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "command": "python benchmarks/threaded.py --vllm ubatching.py --output yields.json",
        "device": torch.cuda.get_device_name(0) if has_gpu else "CPU",
        "torch": torch.__version__,
        "commit": args.commit,
        "repeats": args.repeats,
        "yield_us": round(statistics.median(yield_us() for _ in range(args.repeats)), 2),
    }
    if args.vllm is not None:
        found = [vllm_yield_us(args.vllm) for _ in range(args.repeats)]
        result["vllm_yield_us"] = round(statistics.median(found), 2)
    print(json.dumps(result))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
