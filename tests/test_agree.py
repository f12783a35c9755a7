"""What ranks agree on: values over the store, one decision per step."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbo_fx.agree import agree_batch, compare_over_store
from dbo_fx.comm import groups
from dbo_fx.decision import (
    AgreementPolicy,
    BatchDecision,
    BatchKind,
    Consent,
    Vote,
    decide,
)
from dbo_fx.errors import AgreementError, OptionError
from dbo_fx.launch import run_ranks
from dbo_fx.rank_process import Setup, rank_main, rendezvous
from rank_pool import RankPool


def world() -> str:
    """Name of the default group."""
    name = groups.name_of(None)
    assert name is not None
    return name


def refusal(call: Callable[..., Any], *args: Any) -> str:
    """Message of the AgreementError that a call raises."""
    with pytest.raises(AgreementError) as caught:
        call(*args)
    return str(caught.value)


def run_equal(rank: int) -> None:
    """Three comparisons in a row, the last one of another thing."""
    compare_over_store(world(), "equal", "a", 30)
    compare_over_store(world(), "equal", "b", 30)
    compare_over_store(world(), "equal too", "a", 30)


def test_equal_values_pass_step_by_step(ranks: RankPool) -> None:
    assert ranks(run_equal) == [None, None]


def run_different(rank: int) -> str:
    """Each rank brings its own value."""
    return refusal(compare_over_store, world(), "digest", f"value of {rank}", 30)


def test_different_values_name_the_rank_and_both_values(ranks: RankPool) -> None:
    first, second = ranks(run_different)
    assert "digest, comparison 1 in group '0': rank 0 has 'value of 0'" in first
    assert "rank 1 has 'value of 1'" in first
    assert "rank 1 has 'value of 1', but rank 0 has 'value of 0'" in second
    assert "All ranks must compile the same program" in first


def run_missing(rank: int) -> str:
    """Only rank 0 compares."""
    return refusal(compare_over_store, world(), "lonely", "x", 0.5) if rank == 0 else ""


def test_a_missing_rank_is_named_after_the_timeout(ranks: RankPool) -> None:
    said, _ = ranks(run_missing, timeout_s=30)
    assert "lonely, comparison 1 in group '0': rank 1 of 2 wrote nothing within 0.5 s" in said
    assert "rank 0 has 'x'" in said


def run_subgroups(rank: int) -> None:
    """Groups of one rank have nothing to compare."""
    mine = [dist.new_group([r]) for r in range(2)][rank]
    name = groups.name_of(mine)
    assert name is not None
    compare_over_store(name, "alone", str(rank), 0.5)


def test_a_group_of_one_agrees_at_once(ranks: RankPool) -> None:
    ranks(run_subgroups)


def test_fake_groups_agree_at_once() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        compare_over_store(world(), "pretended", "x", 0.5)
        assert agree_batch(5, True).ranks == 8
        assert agree_batch(5, False).refusing == (3,)
    finally:
        dist.destroy_process_group()


def run_batch(rank: int, rows: list[int], allowed: list[bool], failed: list[bool]) -> Any:
    """One decision."""
    return agree_batch(rows[rank], allowed[rank], failed=failed[rank])


@pytest.mark.parametrize(
    ("rows", "allowed", "failed", "want"),
    [
        ([3, 0], [True, True], [False, False], BatchDecision(3, 0, True, 2)),
        ([0, 0], [True, True], [False, False], BatchDecision(0, 0, True, 2)),
        ([2, 5], [True, False], [False, False], BatchDecision(5, 2, False, 2, (1,))),
        ([2, 5], [False, True], [False, True], BatchDecision(5, 2, False, 2, (0,), (1,))),
    ],
)
def test_every_rank_gets_the_same_decision(
    ranks: RankPool, rows: Any, allowed: Any, failed: Any, want: BatchDecision
) -> None:
    assert ranks(run_batch, rows, allowed, failed) == [want, want]


def test_without_torch_distributed_a_rank_decides_alone() -> None:
    assert agree_batch(4, True) == BatchDecision(4, 4, True, 1)
    assert agree_batch(4, False) == BatchDecision(4, 4, False, 1, (0,))


POLICY = AgreementPolicy(decode_threshold=8, prefill_threshold=32, buckets=(16, 48), timeout_s=60)


def random_votes(steps: int, ranks: int) -> list[list[Vote]]:
    """Votes of every rank for every step: rows around both thresholds, and often none."""
    chance = random.Random(ranks)
    consents = [Consent.ALLOWS] * 30 + [Consent.REFUSES, Consent.FAILS]
    return [
        [
            Vote(
                chance.choice((0, low, low, chance.randint(0, 64))),
                chance.choice(consents),
                chance.choice((BatchKind.DECODE, BatchKind.DECODE, BatchKind.PREFILL)),
            )
            for _ in range(ranks)
        ]
        for low in chance.choices((7, 8, 9, 31, 32, 33, 60), k=steps)
    ]


def run_random_steps(rank: int, steps: list[list[Vote]]) -> tuple[list[BatchDecision], int, int]:
    """All steps, with another number of collectives behind a split step than behind others."""
    agree_batch(0, True, policy=POLICY)
    keys = groups.store(world()).num_keys()
    decisions = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for votes in steps:
            mine = votes[rank]
            decision = agree_batch(
                mine.rows,
                mine.consent is not Consent.REFUSES,
                failed=mine.consent is Consent.FAILS,
                kind=mine.kind,
                plan="the same",
                policy=POLICY,
            )
            # Ranks that decide otherwise would hang here, or find unequal sizes.
            for _ in range(2 if decision.split else 1):
                dist.all_reduce(torch.ones(decision.padded_rows))
            decisions.append(decision)
    collectives = sum(
        event.count for event in profile.key_averages() if event.key.startswith("gloo:")
    )
    return decisions, collectives, groups.store(world()).num_keys() - keys


def check_random_steps(results: list[Any], steps: list[list[Vote]]) -> None:
    """Every rank decided by the rule, in one collective a step and without the store."""
    wanted = [decide(votes, POLICY) for votes in steps]
    split = sum(decision.split for decision in wanted)
    assert 0 < split < len(steps)
    assert {decision.bucket for decision in wanted} == {16, 48, None}
    for decisions, collectives, new_keys in results:
        assert decisions == wanted
        assert collectives == 2 * len(steps) + split
        assert new_keys == 0


def test_random_steps_on_two_ranks(ranks: RankPool) -> None:
    steps = random_votes(100, 2)
    check_random_steps(ranks(run_random_steps, steps), steps)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_thousand_random_steps(world_size: int) -> None:
    steps = random_votes(1000, world_size)
    check_random_steps(run_ranks(run_random_steps, world_size, (steps,), timeout_s=300), steps)


def run_other_plans(rank: int) -> tuple[str, str, BatchDecision]:
    """Another plan, another policy, then a step as it should be."""
    first = refusal(partial(agree_batch, 4, True, plan=f"plan {'ab'[rank]}", policy=POLICY))
    other = replace(POLICY, prefill_threshold=30 + rank)
    second = refusal(partial(agree_batch, 4, True, plan="plan", policy=other))
    return first, second, agree_batch(9, True, kind=BatchKind.DECODE, plan="plan", policy=POLICY)


def test_another_plan_or_policy_is_named_on_every_rank(ranks: RankPool) -> None:
    (plan, policy, after), (other_plan, other_policy, other_after) = ranks(run_other_plans)
    assert "rank 0 has 'plan a', but rank 1 has 'plan b'" in plan
    assert "rank 1 has 'plan b', but rank 0 has 'plan a'" in other_plan
    assert "All ranks must run a step with the same one" in plan
    for text in (policy, other_policy):
        assert text.startswith("policy, comparison")
        assert "prefill_threshold=30" in text
        assert "prefill_threshold=31" in text
    assert after == other_after
    assert after.split


def run_in_modes(rank: int) -> list[int]:
    """The first step of a group in inference mode and with another default device."""
    group = dist.new_group([0, 1])
    with torch.inference_mode(), torch.device("meta"):
        found = [agree_batch(3 + rank, True, group).max_rows]
    return [*found, agree_batch(5 + rank, True, group).max_rows]


def test_modes_of_the_caller_do_not_matter(ranks: RankPool) -> None:
    assert ranks(run_in_modes) == [[4, 6], [4, 6]]


def run_negative(rank: int) -> BatchDecision | None:
    """Rank 1 brings an impossible number of rows."""
    if rank == 0:
        return agree_batch(4, True)
    with pytest.raises(OptionError, match="rows is -1, wanted 0 or more"):
        agree_batch(-1, True)
    return None


def test_impossible_rows_fail_on_their_rank_and_the_others_learn_of_it(ranks: RankPool) -> None:
    decision, _ = ranks(run_negative)
    assert decision.failing == (1,)


@pytest.mark.parametrize("ranks_of_group", [8, 3])
def test_a_new_group_may_have_the_name_of_an_old_one(ranks_of_group: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks_of_group)
    try:
        assert world() == "0"
        assert agree_batch(5, False) == decide(
            [Vote(5, Consent(int(rank == 1))) for rank in range(ranks_of_group)]
        )
    finally:
        dist.destroy_process_group()


def short(group: dist.ProcessGroup, timeout_s: float) -> Callable[[], BatchDecision]:
    """A step over a group that waits only so long."""
    return partial(agree_batch, 4, True, group, policy=AgreementPolicy(timeout_s=timeout_s))


def run_slow(rank: int) -> str:
    """Rank 1 comes after rank 0 has given up."""
    group = dist.new_group([0, 1])
    store = groups.store(str(group.group_name))
    assert short(group, 30)().ranks == 2
    if rank == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=30))
        return refusal(short(group, 0.5))
    said = refusal(short(group, 0.5))
    store.set("rank 0 gave up", "")
    return said


def test_a_slow_rank_is_named_and_raises_too(ranks: RankPool) -> None:
    first, second = ranks(run_slow, timeout_s=60)
    assert re.match(r"agree_batch, step 2 in group '\w+', rank 0 of 2: Timed out waiting", first)
    assert "rank 1 of 2 left no word within 0.5 s" in first
    assert "rank 1 of 2: " in second
    assert "No rank is missing now" in second
    assert "rank 0: got no answer: Timed out waiting 500ms" in second


class Deciding(torch.nn.Module):
    """A model that wrongly decides within its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T]."""
        return x + agree_batch(x.shape[0], True, GROUP[0]).max_rows


GROUP: list[dist.ProcessGroup] = []


def run_capture(rank: int) -> str:
    """Rank 1 decides while it traces a model; rank 0 decides as it should."""
    GROUP[:] = [dist.new_group([0, 1])]
    store = groups.store(str(GROUP[0].group_name))
    if rank == 0:
        store.wait(["rank 1 captured"], timedelta(seconds=60))
        return refusal(short(GROUP[0], 0.5))
    said = refusal(partial(torch.export.export, Deciding(), (torch.ones(3),), strict=False))
    store.set("rank 1 captured", "")
    return said


def test_a_rank_under_capture_raises_and_the_others_learn_why(ranks: RankPool) -> None:
    other, own = ranks(run_capture, timeout_s=90)
    assert "agree_batch was called while a model is being traced" in own
    assert "rank 1: called agree_batch while a model is being traced" in other


def test_no_decision_within_a_compiled_function() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + agree_batch(x.shape[0], True).max_rows, backend="eager")
    assert "while a model is being traced" in refusal(compiled, torch.ones(2))


def run_until_killed(rank: int) -> str:
    """Rank 1 is killed between two steps."""
    for _ in range(3):
        agree_batch(rank, True, policy=POLICY)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = refusal(partial(agree_batch, 4, True, policy=AgreementPolicy(timeout_s=3)))
    # Leave only together: a rank that is gone has left no word.
    groups.store(world()).set(f"rank {rank} is done", "")
    groups.store(world()).wait(["rank 0 is done", "rank 2 is done"], timedelta(seconds=60))
    return said


def test_a_killed_rank_is_named_by_all_others() -> None:
    # `Ranks` ends the survivors as soon as one rank dies; here they must have their say.
    store, context = rendezvous(0), mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    processes = []
    for rank, (_, theirs) in enumerate(pipes):
        setup = Setup(rank, 3, "gloo", store.port, 60, 1)
        processes.append(context.Process(target=rank_main, args=(setup, theirs), daemon=True))
        processes[-1].start()
    try:
        for mine, _ in pipes:
            mine.send_bytes(pickle.dumps((run_until_killed, ())))
        for rank in (0, 2):
            mine = pipes[rank][0]
            assert mine.poll(90), f"rank {rank} hangs"
            said = pickle.loads(pickle.loads(mine.recv_bytes()))
            assert f"agree_batch, step 4 in group '0', rank {rank} of 3: " in said
            assert "rank 1 of 3 left no word within 3 s" in said
            assert f"rank {2 - rank}: got no answer: " in said
    finally:
        for process in processes:
            process.kill()
            process.join()


SCRIPT = """
from pathlib import Path

import torch.distributed as dist
from dbo_fx.agree import agree_batch
from dbo_fx.decision import AgreementPolicy

dist.init_process_group("gloo")
rank = dist.get_rank()
decision = agree_batch(32 + rank, True, policy=AgreementPolicy(prefill_threshold=32))
Path(f"said by {rank}").write_text(str(decision))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_is_enough(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(SCRIPT, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    done = subprocess.run(
        [sys.executable, *launcher, "--rdzv-endpoint=127.0.0.1:0", "step.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        said = (tmp_path / f"said by {rank}").read_text()
        assert said == "split; 32 to 33 rows on 2 ranks, padded to 33 (no bucket)"


@pytest.mark.gpu
def test_no_decision_under_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = refusal(agree_batch, 4, True)
    assert "while a CUDA graph is being captured" in said


def run_cuda_capture(rank: int) -> str:
    """Rank 1 decides within a CUDA graph capture; rank 0 decides as it should."""
    group = dist.new_group([0, 1])
    store = groups.store(str(group.group_name))
    if rank == 0:
        store.wait(["rank 1 captured"], timedelta(seconds=60))
        return refusal(short(group, 0.5))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        said = refusal(short(group, 0.5))
    store.set("rank 1 captured", "")
    return said


@pytest.mark.gpu
def test_a_rank_in_a_cuda_capture_raises_and_the_others_learn_why(ranks: RankPool) -> None:
    other, own = ranks(run_cuda_capture, timeout_s=90)
    assert "agree_batch was called while a CUDA graph is being captured" in own
    assert "rank 1: called agree_batch while a CUDA graph is being captured" in other


def run_beside_nccl(rank: int) -> tuple[list[BatchDecision], int]:
    """Steps over a group that carries CUDA tensors only."""
    assert groups.backend_name(world(), "cpu") is None
    decisions = [agree_batch(rank + step, True, plan="plan") for step in range(3)]
    return decisions, torch.cuda.memory_allocated()


@pytest.mark.multi_gpu
def test_a_group_without_cpu_tensors_decides_on_the_cpu_all_the_same() -> None:
    wanted = [decide([Vote(step), Vote(step + 1)]) for step in range(3)]
    assert run_ranks(run_beside_nccl, 2, backend="nccl", timeout_s=120) == [(wanted, 0)] * 2
