"""The demo: a small DeepSeek-V3 on two local ranks, compiled, run, checked and explained.

Two CPU ranks over gloo; two GPUs over NCCL where two are visible, and then the compiled call is
also captured in one CUDA graph.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import dbo_fx
from dbo_fx.demo_text import SEQUENCE_BYTES, SEQUENCES, cut, read_text
from dbo_fx.errors import OptionError
from dbo_fx.ir import Action, Program, draw, lanes
from dbo_fx.launch import run_ranks
from dbo_fx.models import DEMO_CONFIG

Call = Callable[[Tensor], Tensor]
RANKS = 2
TIMED_CALLS = 5
TIMEOUT_S = 300.0
OUTPUT = "dbo_fx_demo"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank found.

    Attributes:
        identical: Whether the compiled call equals microbatched eager bit for bit.
        unsplit: Largest absolute difference to the unsplit eager model.
        largest: Largest absolute logit, to see the difference in proportion.
        replay_identical: Whether a replayed CUDA graph of the compiled call equals the sequential
            program bit for bit, on inputs that it was not captured with; None without CUDA.
    """

    identical: bool
    unsplit: float
    largest: float
    replay_identical: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether every comparison that must be exact is exact."""
        return self.identical and self.replay_identical is not False


@dataclass(frozen=True, slots=True)
class Findings:
    """What the whole demo found.

    Attributes:
        backend: What carried the communication.
        outcomes: What each rank found.
        written: The files that rank 0 wrote.
    """

    backend: str
    outcomes: tuple[Outcome, ...]
    written: tuple[Path, ...]

    @property
    def code(self) -> int:
        """0, or 1 if a result that must be bit-identical is not, on any rank."""
        return 0 if all(outcome.ok for outcome in self.outcomes) else 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ok": self.code == 0,
            "backend": self.backend,
            "ranks": [asdict(outcome) for outcome in self.outcomes],
            "written": [str(path) for path in self.written],
        }


def main(output: str | None = None) -> int:
    """Run the demo and print what came out; returns the exit code. Arguments as for `run`."""
    return run(output).code


def run(output: str | None = None, *, quiet: bool = False) -> Findings:
    """Run the demo on this host and print what came out.

    Args:
        output: Folder for the captured graph, the program and readable Python; default
            `dbo_fx_demo` in the current folder.
        quiet: Print to stderr, so that stdout is free for data.

    Returns:
        What all ranks found.

    Raises:
        RankError: A rank raised; the message begins with that rank's own traceback.
        DboError: There is no text to read.
    """
    text, source = read_text()
    folder = Path(output or OUTPUT)
    _check_folder(folder)
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
    backend = "nccl" if gpus else "gloo"
    with _printing(quiet):
        _say(f"model: DeepSeek-V3 in small ({DEMO_CONFIG.name}), random weights from a fixed seed")
        _say(f"ranks: {RANKS}, each with half of the experts, over {backend}")
        _say(
            f"input: {source}, {len(text)} bytes; each rank reads {SEQUENCES} sequences of "
            f"{SEQUENCE_BYTES} bytes and splits them into two microbatches"
        )
        arguments = ([text] * RANKS, str(folder), quiet)
        outcomes = run_ranks(run_rank, RANKS, arguments, backend=backend, timeout_s=TIMEOUT_S)
        report(outcomes, folder)
    return Findings(backend, tuple(outcomes), _files(folder))


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written before anything takes time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder} cannot be written: {error.strerror}") from error


def _printing(quiet: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if quiet else nullcontext()


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file()))


def report(outcomes: Sequence[Outcome], folder: Path) -> int:
    """Print the comparisons and what was written.

    Args:
        outcomes: What each rank found.
        folder: Where rank 0 wrote its artifacts.

    Returns:
        The exit code: 0, or 1 if a result that must be bit-identical is not.
    """

    def verdict(values: Sequence[bool]) -> str:
        wrong = [rank for rank, value in enumerate(values) if not value]
        return "yes" if not wrong else f"no (ranks {wrong})"

    print()
    print(f"bit-identical to microbatched eager: {verdict([o.identical for o in outcomes])}")
    replays = [o.replay_identical for o in outcomes if o.replay_identical is not None]
    if replays:
        print(f"CUDA graph replay bit-identical to the sequential program: {verdict(replays)}")
    worst = max(outcomes, key=lambda outcome: outcome.unsplit)
    scale = f"largest logit {worst.largest:.2f}"
    if replays:
        # Fewer rows round differently, and a token whose choice of expert was near a tie moves far.
        scale += "; bfloat16, so near-ties between experts may fall the other way"
    print(f"largest difference to unsplit eager: {worst.unsplit:.2e} ({scale})")
    print("written:")
    for path in _files(folder):
        print(f"  {path}")
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def build_model(config: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a Hugging Face DeepSeek-V3 with seeded weights and share its experts among all ranks.

    Args:
        config: A config file of transformers.
        device: Where the weights go.
        dtype: Their type.

    Returns:
        The model: [B, S] token ids in, [B, S, vocab] logits out.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from dbo_fx.integrations.transformers import expert_parallel

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config.from_json_file(config)).eval()
    return Logits(expert_parallel(model.to(device, dtype)))


class Logits(nn.Module):
    """A causal language model without a cache, from token ids to logits."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model of transformers."""
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [B, S] token ids to [B, S, vocab] logits."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def microbatched(model: Call, tokens: Tensor) -> Tensor:
    """Run both halves of the batch one after the other: the reference for every split program."""
    half = tokens.shape[0] // 2
    return torch.cat([model(tokens[:half]), model(tokens[half:])])


def run_rank(rank: int, texts: Sequence[bytes], folder: str, quiet: bool = False) -> Outcome:
    """Run the demo's part of one rank; rank 0 prints.

    Args:
        rank: This rank.
        texts: The text of each rank.
        folder: Where rank 0 writes its artifacts.
        quiet: Print to stderr.

    Returns:
        What this rank found.
    """
    with _printing(quiet), torch.no_grad():
        return _run_rank(rank, texts, folder)


def _run_rank(rank: int, texts: Sequence[bytes], folder: str) -> Outcome:
    say = _say if rank == 0 else _silent
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    started = time.perf_counter()
    model = build_model(DEMO_CONFIG, device, dtype)
    tokens = cut(texts[rank], rank * SEQUENCES).to(device)
    say(f"built the model in {time.perf_counter() - started:.1f} s")
    unsplit, reference = model(tokens), microbatched(model, tokens)
    say("ran eager: the whole batch, then microbatch by microbatch")
    say("compiling ...")

    torch._dynamo.mark_dynamic(tokens, 0)
    options: dict[str, Any] = {"dump_dir": folder} if rank == 0 else {}
    compiled = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
    started = time.perf_counter()
    split = compiled(tokens)
    say(f"compiled and ran it in {time.perf_counter() - started:.1f} s")
    record = dbo_fx.compilations()[-1]
    if rank == 0:
        explain(record)
    say(host_time(compiled, tokens, emitted_nodes(record.module)))
    replayed = None
    if device.type == "cuda":
        options = {"schedule": "sequential"}
        sequential = torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)
        new = cut(texts[rank], (RANKS + rank) * SEQUENCES).to(device)
        graphs = dbo_fx.CudaGraphs(compiled)
        graphs.capture([tokens.shape[0]], tokens)
        replayed = torch.equal(graphs(new), sequential(new))
        say("captured the compiled call in one CUDA graph and replayed it with new inputs")
    difference = (split.float() - unsplit.float()).abs().max().item()
    largest = unsplit.float().abs().max().item()
    return Outcome(torch.equal(split, reference), difference, largest, replayed)


def explain(record: Any) -> None:
    """Print what the compiler found, and the lanes of one steady-state layer.

    Args:
        record: One of `dbo_fx.compilations()`.
    """
    print(f"\n{record.summary}\n")
    layer = record.program.layers // 2
    print(f"layer {layer} of the program, from left to right:")
    print(layer_lanes(record.program, layer) + "\n", flush=True)


def layer_lanes(program: Program, layer: int) -> str:
    """Draw the columns in which a layer communicates.

    Args:
        program: A bound program.
        layer: Index of a MoE layer.

    Returns:
        Two lines, `comp` and `comm`.
    """
    columns = [
        column
        for column in lanes(program.actions)
        if any(action.layer == layer for action in column.comm)
    ]
    return draw(columns, Action.bound)


def emitted_nodes(module: GraphModule) -> int:
    """Count the calls that one run of an emitted module makes, those within segments included."""
    inner = {
        name: child for name, child in module.named_modules() if isinstance(child, GraphModule)
    }
    calls = [node for node in module.graph.nodes if node.op.startswith("call")]
    segments = [inner[node.target] for node in calls if node.op == "call_module"]
    return len(calls) - len(segments) + sum(map(emitted_nodes, segments))


def host_time(call: Call, tokens: Tensor, nodes: int) -> str:
    """Time how long the host takes for a call, per node of the emitted program.

    Args:
        call: The compiled model.
        tokens: [B, S] its input.
        nodes: Number of nodes that the program calls.

    Returns:
        One line. On a CPU the host runs the kernels too, and waits for the other rank.
    """
    seconds = []
    for _ in range(TIMED_CALLS):
        _synchronize(tokens)
        started = time.perf_counter()
        call(tokens)
        seconds.append(time.perf_counter() - started)
    _synchronize(tokens)
    each_us = statistics.median(seconds) / nodes * 1e6
    note = "" if tokens.is_cuda else ", kernels and waiting for the other rank included"
    return f"host time per emitted node: {each_us:.0f} us ({nodes} nodes{note})"


def _synchronize(tokens: Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    """Take a line and print nothing: only one rank reports progress."""
