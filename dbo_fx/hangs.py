"""Reports on a program that hangs or fails half-way: the rank's progress, as a dump and as a line.

A rank that waits cannot know for whom. So every rank writes where it stands, and
`dbo-fx show --progress` puts the dumps side by side.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch
import torch.distributed as dist

from dbo_fx.comm.groups import process_group
from dbo_fx.errors import OptionError
from dbo_fx.ir import Program
from dbo_fx.options import Options
from dbo_fx.progress import Progress
from dbo_fx.runtime import Runtime
from dbo_fx.watchdog import WATCHDOG

log = logging.getLogger("dbo_fx")


class HangReports:
    """Watches the calls of one compiled program.

    Args:
        runtime: The emitted module's, with its counters.
        program: The bound program.
        group: Name of the process group that it communicates over.
        options: Says how long to wait and where to write.
    """

    def __init__(self, runtime: Runtime, program: Program, group: str, options: Options) -> None:
        """Start nothing."""
        self.runtime, self.program, self.group, self.options = runtime, program, group, options
        self._serials = itertools.count(1)
        self._members: tuple[int, tuple[int, ...]] | None = None

    @property
    def folder(self) -> Path:
        """Where dumps go unless a caller says otherwise."""
        return Path.cwd() if self.options.dump_dir is None else Path(self.options.dump_dir)

    def progress(self, reason: str) -> Progress:
        """Read the counters.

        Raises:
            OptionError: the program was compiled without counters.
        """
        counters = self.runtime.counters
        if counters is None:
            raise OptionError(
                "this program counts no progress. Compile with options={'progress': True}."
            )
        rank, ranks = self._rank()
        reading = counters.read()
        return Progress(
            rank=rank,
            ranks=ranks,
            program=self.program.digest,
            schedule=self.program.schedule,
            device="cuda" if self.runtime.is_cuda else "cpu",
            call=reading.call,
            order=counters.order,
            finished=reading.finished,
            started=reading.started,
            reason=reason,
            since_start_ms=reading.since_start_ms,
        )

    @contextmanager
    def watch_call(self) -> Iterator[None]:
        """Watch one call if option `hang_timeout_s` says so, and report if it raises half-way."""
        timeout_s, counters = self.options.hang_timeout_s, self.runtime.counters
        wanted = timeout_s is not None or self.options.dump_dir is not None
        if counters is None or not wanted or self._is_capturing():
            yield
            return
        self._rank()  # A group that is gone when a report is due would have no members.
        serial = next(self._serials)
        launched = threading.Event()
        watch = None
        if timeout_s is not None:
            reason = f"the call did not finish within {timeout_s:g} s"
            WATCHDOG.prune()
            watch = WATCHDOG.arm(
                timeout_s,
                lambda: launched.is_set() and counters.ended(serial),
                lambda: self._write(reason, self.folder),
            )
        over = True
        try:
            yield
            if watch is not None:
                over = counters.end(serial)
        except BaseException as error:
            if counters.is_half_way:
                self._note(error)
            raise
        finally:
            launched.set()
            if watch is not None and over:
                WATCHDOG.cancel(watch)

    @contextmanager
    def watch(self, timeout_s: float, folder: str | PathLike[str] | None = None) -> Iterator[None]:
        """Report if the body takes longer than `timeout_s`: for replays of a CUDA graph.

        Args:
            timeout_s: Limit of the body, in seconds.
            folder: Where the dump goes; None: as for option `hang_timeout_s`.
        """
        self.progress("")  # No counters: say so now, not in the log.
        target = self.folder if folder is None else Path(folder)
        reason = f"what was watched did not finish within {timeout_s:g} s"
        watch = WATCHDOG.arm(timeout_s, lambda: False, lambda: self._write(reason, target))
        try:
            yield
        finally:
            WATCHDOG.cancel(watch)

    def _write(self, reason: str, folder: Path) -> str:
        """Write the dump and log one line; return what to tell people."""
        found = self.progress(reason)
        try:
            place = f"progress in {found.write(folder).resolve()}"
        except OSError as error:
            place = f"no dump, {folder} cannot be written: {error}"
        text = f"{found} ({reason}; {place}; see dbo-fx show --progress)"
        log.error("%s", text)
        return text

    def _note(self, error: BaseException) -> None:
        """Say on an error how far the call came."""
        try:
            error.add_note(self._write(f"the call raised {type(error).__name__}", self.folder))
        except Exception:  # The first error is the one that counts.
            log.exception("the report on a failed call failed")

    def _rank(self) -> tuple[int, tuple[int, ...]]:
        """This rank and its group's members, by their ranks in the whole job."""
        if self._members is None:
            members = dist.get_process_group_ranks(process_group(self.group))
            self._members = dist.get_rank(), tuple(members)
        return self._members

    def _is_capturing(self) -> bool:
        return self.runtime.is_cuda and torch.cuda.is_current_stream_capturing()
