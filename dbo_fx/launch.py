"""Run a function on several ranks of this host, and show the error that came first.

`run_ranks` is for demos and examples; `Ranks` keeps the processes for more than one call. The
parent hosts the rendezvous store, so no port is guessed and the store outlives a dead rank. A rank
that raised stays alive until the parent has read its report: its peers then have no broken
connection to complain about before the real error is known.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing as mp

from dbo_fx.errors import DboError, OptionError
from dbo_fx.rank_process import Failure, Setup, rank_main, rendezvous

# How long a report that looks like a consequence waits for the report of its cause.
_GRACE_S = 3.0
_EXIT_S = 10.0


class RankError(DboError, RuntimeError):
    """A rank raised, died or did not finish in time.

    Attributes:
        rank: The rank whose failure came first; None if none failed and time ran out.
        trace: That rank's own traceback, empty if it died without one.
        error: The exception that the rank raised, None if it died or cannot be pickled.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        trace: str = "",
        error: BaseException | None = None,
    ) -> None:
        """Take the whole message and its parts."""
        super().__init__(message)
        self.rank = rank
        self.trace = trace
        self.error = error


class Ranks:
    """Processes of one process group that execute functions on request.

    After a failure the processes are ended, because the group's state is unknown then; `alive`
    says so.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout_s: float = 120.0,
        threads: int = 1,
    ) -> None:
        """Start the ranks; they initialise while the parent goes on.

        Args:
            world_size: Number of ranks R.
            backend: Backend of the default process group; "nccl" gives rank r CUDA device r,
                modulo their number.
            timeout_s: Limit of each collective.
            threads: Threads that torch may use within a rank.

        Raises:
            OptionError: `world_size` is below 1.
        """
        if world_size < 1:
            raise OptionError(f"world_size is {world_size}, wanted 1 or more ranks")
        self.world_size = world_size
        self._store = rendezvous(0)
        context = mp.get_context("spawn")
        self._pipes: list[connection.Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            setup = Setup(rank, world_size, backend, self._store.port, timeout_s, threads)
            process = context.Process(target=rank_main, args=(setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        """Tell whether the ranks still accept calls."""
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, timeout_s: float = 120.0
    ) -> list[Any]:
        """Run `fn(rank, *args)` on every rank.

        Args:
            fn: A function at the top level of a module.
            args: Picklable arguments, the same for all ranks.
            timeout_s: Limit of the whole call.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: A rank raised or died, time ran out, or an earlier call
                had ended the ranks. None runs any more then.
        """
        if not self._processes:
            raise RankError("the ranks have been ended, wanted running ones. Start new Ranks.")
        deadline = time.monotonic() + timeout_s
        payload = pickle.dumps((fn, tuple(args)))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        finished = False
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send_bytes(payload)
                except OSError:
                    failures.append(self._died(rank))
            while len(results) + len(failures) < self.world_size and deadline > time.monotonic():
                self._collect(results, failures, deadline - time.monotonic())
                if failures and not failures[-1].is_consequence:
                    break
                if len(failures) == 1:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if failures:
                raise _rank_error(failures, self.world_size)
            if len(results) < self.world_size:
                raise self._late(results, timeout_s)
            finished = True
        finally:
            if not finished:
                self.end()
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Let the ranks leave their process group and exit; end those that do not."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(b"")
            except OSError:
                continue
        deadline = time.monotonic() + _EXIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.end()

    def end(self) -> None:
        """Kill the ranks that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _collect(self, results: dict[int, Any], failures: list[Failure], wait_s: float) -> None:
        """Read the reports that arrive first; a rank that died counts as a failure."""
        done = set(results) | {f.rank for f in failures}
        waiting = {self._pipes[r]: r for r in range(self.world_size) if r not in done}
        reports = connection.wait(list(waiting), max(0.0, wait_s))
        for pipe in reports:
            assert isinstance(pipe, connection.Connection)
            rank = waiting[pipe]
            try:
                report = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                failures.append(self._died(rank))
                continue
            if isinstance(report, Failure):
                failures.append(report)
            else:
                results[rank] = pickle.loads(report)

    def _died(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else "exited"
        headline = f"{how} with code {code} and no traceback; its standard error may say more"
        return Failure(rank, headline, "", False)

    def _late(self, results: dict[int, Any], timeout_s: float) -> RankError:
        missing = [r for r in range(self.world_size) if r not in results]
        return RankError(
            f"ranks {missing} of {self.world_size} did not finish within {timeout_s:g} s "
            f"(finished: {sorted(results)}). They probably wait in a collective that another rank "
            "does not call: compare the order of collectives, or raise timeout_s."
        )


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 120.0,
    backend: str = "gloo",
    threads: int = 1,
) -> list[Any]:
    """Run `fn(rank, *args)` on fresh ranks of this host with a default process group.

    Args:
        fn: A function at the top level of a module.
        world_size: Number of ranks R.
        args: Picklable arguments, the same for all ranks.
        timeout_s: Limit of the whole run, and of each collective in it.
        backend: "gloo" on CPUs, "nccl" with one CUDA device per rank.
        threads: Threads that torch may use within a rank.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: A rank raised, died, or did not finish in time; the message begins with the
            traceback of the rank that failed first.
    """
    ranks = Ranks(world_size, backend=backend, timeout_s=timeout_s, threads=threads)
    try:
        return ranks.call(fn, args, timeout_s=timeout_s)
    finally:
        ranks.close()


def _rank_error(failures: Sequence[Failure], world_size: int) -> RankError:
    first, *others = sorted(failures, key=lambda f: f.is_consequence)
    lines = [f"{first} (of {world_size} ranks)"]
    if first.trace:
        lines.append(f"--- traceback of rank {first.rank} ---\n{first.trace.rstrip()}")
    lines += [f"Afterwards {str(other).splitlines()[0]}" for other in others]
    error = pickle.loads(first.error) if first.error is not None else None
    return RankError("\n".join(lines), first.rank, first.trace, error)
