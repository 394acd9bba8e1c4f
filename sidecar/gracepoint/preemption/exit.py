"""How a process exits after a preemption: with the policy's exit code and in time, whatever the training thread does.

JAX makes this hard. Process 0 hosts the coordination service: when it dies, every other process is aborted within
0.1 s, with another exit code. And a regular exit waits in ``jax.distributed.shutdown`` for all processes, for
minutes if one is dead. So after a preemption no process exits regularly:

* ``leave`` runs in the main thread at the interpreter's exit, before JAX's own exit handler: handlers run in
  reverse order of registration, and ours is registered after JAX was imported. All but the host of the coordination
  service report that they are gone and call ``os._exit``. The host waits for the last of them, then does the same.
* A **watchdog** thread ("gracepoint-watchdog", daemon) does the same if the main thread does not get there:
  shortly before the deadline, or ``LINGER_S`` after the exit code was decided. User code may hang in a ``finally``,
  swallow the ``SystemExit``, or be stuck in a step. ``stop`` ends the watchdog.
* When the watchdog ends the process, a separate thread ("gracepoint-last-words", daemon), which may hang, writes the
  last log lines and reports. The watchdog waits a second for that thread, which ends with the process.

A process that fails by its own error does exit regularly. It would wait in JAX's shutdown for peers that are
stuck in a step without it, for minutes, while the JobSet could be started again. So the watchdog ends it after
``FAILED_S`` (``hurry``). The watchdog is started with the session, as an interpreter that exits starts no threads any
more. It times nothing before ``watch``, ``bound``, ``decide`` or ``hurry`` is called.

The host's watchdog waits a little longer than the others'. All state is guarded by ``_changed``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from gracepoint import machine, trace
from gracepoint.errors import GracepointError
from gracepoint.multihost import KeyValueStore
from gracepoint.threads import NoThread, start_thread

logger = logging.getLogger(__name__)

#: How long user code may run after Preempted was raised. It is not all the time until the deadline: the host of the
#: coordination service waits as long for a peer that was killed, and the job cannot start again before that.
LINGER_S = 5.0
#: How long a process that failed by itself may take to exit, counted from its exit handlers on.
FAILED_S = 15.0
_HOST_LINGERS_LONGER_S = 2.0
#: Seconds from a process's report that it is gone to its exit: a few instructions, which a busy machine may delay.
_SETTLE_S = 0.1
_LOOK_EVERY_S = 0.5
_JOIN_S = 1.0
#: How long the watchdog waits for its log lines and reports before it ends the process.
_LAST_WORDS_S = 1.0
#: How long the process may still live after the time that ``watch`` or ``bound`` is given.
ENDS_WITHIN_S = _SETTLE_S + _LAST_WORDS_S


@dataclasses.dataclass(frozen=True)
class _Limit:
    """When the process must have ended, unless an exit code is decided before; see ``ProcessExit.watch``."""

    left_s: Callable[[], float]
    code: int
    on_overdue: Callable[[], None]


_NO_LIMIT = _Limit(lambda: math.inf, 0, lambda: None)


class ProcessExit:
    """Ends this process with an exit code, and in time.

    Args:
        store: The key-value store that all processes share.
        service_id: This process's id in the coordination service. Process 0 hosts the service.
        process_count: How many processes train together.
        clock: Returns monotonic seconds.
        end: Ends the process with an exit code. None: ``os._exit``.
    """

    def __init__(
        self,
        store: KeyValueStore,
        service_id: int,
        process_count: int,
        *,
        clock: Callable[[], float],
        end: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._hosts = service_id == 0
        self._process_count = process_count
        self._clock = clock
        self._end = end or os._exit
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._code: int | None = None  # the exit code; None while none is decided
        self._until_s = math.inf  # when a process whose exit code is decided must have exited, on the clock
        self._watched: _Limit | None = None  # the deadline of an epoch
        self._bound: _Limit | None = None  # the one of notices, for which no epoch may ever begin
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        """Starts the watchdog. It watches nothing yet."""
        self._thread = threading.Thread(target=self._watch, name="gracepoint-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watchdog. Safe to repeat, and without a start."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def watch(self, left_s: Callable[[], float], code: int, *, on_overdue: Callable[[], None]) -> None:
        """Ends the process in time, unless an exit code is decided before.

        Args:
            left_s: Returns the seconds that are left. It is not a ``Deadline``, as a notice may also give more time.
            code: The exit code.
            on_overdue: Called by the watchdog, in a separate thread, before it ends the process. The watchdog waits
                for it for a second at most. It may decide another exit code.
        """
        with self._lock:
            self._watched = _Limit(left_s, code, on_overdue)
            self._changed.notify_all()

    def bound(self, left_s: Callable[[], float], code: int, *, on_overdue: Callable[[], None]) -> None:
        """As ``watch``, as long as that was not called: for notices that the other processes may never know of."""
        with self._lock:
            self._bound = _Limit(left_s, code, on_overdue)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Withdraws what was decided: the process does not have to exit. Safe to repeat."""
        with self._lock:
            self._code = None
            self._until_s = math.inf
            self._watched = self._bound = None
            self._changed.notify_all()

    def decide(self, code: int) -> None:
        """Decides the exit code: the process exits with it within ``LINGER_S``."""
        self._end_within(LINGER_S, code)

    @property
    def decided(self) -> bool:
        """True if the exit code was decided."""
        with self._lock:
            return self._code is not None

    @property
    def watches(self) -> bool:
        """True while the watchdog would end the process at the deadline of an epoch."""
        with self._lock:
            return self._watched is not None

    def hurry(self, code: int) -> None:
        """Gives a process that is exiting by itself ``FAILED_S`` to do so; then it exits with ``code``."""
        self._end_within(FAILED_S, code)

    def _end_within(self, patience_s: float, code: int) -> None:
        with self._lock:
            self._code = code
            self._until_s = self._clock() + patience_s
            self._changed.notify_all()

    def leave(self) -> None:
        """Ends the process when it is its turn. Does nothing unless an exit code was decided."""
        with self._lock:
            code = self._code
        if code is None:
            return
        flush_output()
        if self._process_count > 1:
            with contextlib.suppress(GracepointError), trace.span("wait for the other processes to leave"):
                self._take_turn()  # raises if there is no peer to report to or to wait for
        trace.moment(f"the process ends with code {code}")
        trace.write()
        self._end(code)

    def _take_turn(self) -> None:
        if not self._hosts:
            if self._store.increment("left/count") == self._process_count - 1:
                self._store.set("left/all", "")
            return
        left_s = self._until_s + _HOST_LINGERS_LONGER_S - self._clock()
        self._store.get("left/all", timeout_s=max(0.001, left_s))  # the watchdog ends this wait at the deadline
        time.sleep(_SETTLE_S)

    def _watch(self) -> None:
        with self._lock:
            while not self._stopped and (wait_s := self._wait_s()) > 0:
                # In short waits, as the deadline may move meanwhile. Without a deadline there is nothing to check.
                self._changed.wait(None if wait_s == math.inf else min(wait_s, _LOOK_EVERY_S))
            if self._stopped:
                return
            decided, limit = self._code, self._limit
            code = limit.code if decided is None else decided

        def last_words() -> None:
            nonlocal code
            if decided is None:
                limit.on_overdue()
                if self._code is not None:  # only now is known what a background save has committed
                    code = self._code
            logger.warning("ended by the watchdog code=%d", code)
            trace.moment(f"the watchdog ends the process with code {code}")
            flush_output()
            trace.write()  # last, as its storage may hang

        # In a separate thread: a thread that is stuck may hold the lock of a stream or of a log handler.
        speaker = threading.Thread(target=last_words, name="gracepoint-last-words", daemon=True)
        with contextlib.suppress(NoThread):
            start_thread(speaker)
            speaker.join(_LAST_WORDS_S)
        self._end(code)

    @property
    def _limit(self) -> _Limit:
        return self._watched or self._bound or _NO_LIMIT

    def _wait_s(self) -> float:
        deadline_s = self._limit.left_s() + (_SETTLE_S if self._hosts else 0.0)
        decided_s = self._until_s - self._clock() + (_HOST_LINGERS_LONGER_S if self._hosts else 0.0)
        return min(deadline_s, decided_s)


def flush_output() -> None:
    """Writes out what logging and the standard streams still hold, as ``os._exit`` does not."""
    logging.shutdown()
    machine.flush_streams()
