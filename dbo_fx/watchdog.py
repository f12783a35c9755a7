"""One daemon thread that waits for deadlines. It sleeps until the next one, and polls nothing."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("dbo_fx")
_EXIT_S = 1.0


@dataclass(eq=False, slots=True)
class Watch:
    """Something that must be done by a deadline.

    Attributes:
        deadline_s: On the monotonic clock.
        is_done: Asked when the deadline has come; must return at once.
        report: Called once if it is not done then, on the watchdog's thread.
    """

    deadline_s: float
    is_done: Callable[[], bool]
    report: Callable[[], object]


class Watchdog:
    """Keeps the watches. The thread starts with the first one."""

    def __init__(self) -> None:
        """No thread yet."""
        self._changed = threading.Condition()
        self._watches: list[Watch] = []
        self._wake_s: float | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def arm(
        self, timeout_s: float, is_done: Callable[[], bool], report: Callable[[], object]
    ) -> Watch:
        """Call `report` in `timeout_s` seconds, unless it is done or cancelled by then."""
        watch = Watch(time.monotonic() + timeout_s, is_done, report)
        with self._changed:
            self._watches.append(watch)
            if self._thread is None or not self._thread.is_alive():  # A forked child has none.
                self._start()
            elif self._wake_s is None or watch.deadline_s < self._wake_s:
                self._changed.notify()
        return watch

    def cancel(self, watch: Watch) -> None:
        """Forget a watch. The thread sleeps on: it looks again when the old deadline comes."""
        with self._changed:
            if watch in self._watches:
                self._watches.remove(watch)

    def prune(self) -> None:
        """Forget what is done, so that calls that end on the device do not pile up."""
        with self._changed:
            self._watches = [w for w in self._watches if not w.is_done()]

    def stop(self) -> None:
        """End the thread; it reports nothing any more."""
        with self._changed:
            self._stopped = True
            self._watches.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_EXIT_S)

    def _start(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="dbo_fx watchdog", daemon=True)
        self._thread.start()
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for watch in due:
                try:
                    watch.report()
                except Exception:
                    log.exception("the report on a hang failed")

    def _wait(self) -> list[Watch] | None:
        """Sleep until some watch is due and not done; None when stopped."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                due = [w for w in self._watches if w.deadline_s <= now]
                self._watches = [w for w in self._watches if w.deadline_s > now]
                late = [w for w in due if not w.is_done()]
                if late:
                    return late
                self._wake_s = min((w.deadline_s for w in self._watches), default=None)
                self._changed.wait(None if self._wake_s is None else self._wake_s - now)
            return None


WATCHDOG = Watchdog()
