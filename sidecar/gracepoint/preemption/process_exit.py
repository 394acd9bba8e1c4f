"""How a process ends after a preemption: with the policy's exit code, in time, whatever else is going on.

JAX makes this hard. Process 0 hosts the coordination service: when it dies, every other process is aborted within
0.1 s, with another exit code. And a regular end waits in ``jax.distributed.shutdown`` for all processes, for
minutes if one is dead. So after a preemption nobody ends regularly:

* ``leave`` runs in the main thread at the interpreter's exit, before JAX's own exit handler (handlers run in
  reverse order of registration, and ours is registered after JAX was imported). The others say that they are
  gone and end with ``os._exit``; the host of the service waits for the last of them, then ends in the same way.
* A **watchdog** thread ("gracepoint-watchdog", daemon) does the same when the main thread does not come that far:
  shortly before the deadline, or ``LINGER_S`` after the end was decided. User code may have a ``finally`` that hangs,
  swallow the ``SystemExit``, or be stuck in a step.

A process that ends by an error of its own does end regularly, and would wait in JAX's shutdown for peers that are stuck
in a step without it, for minutes, while the JobSet could start again. The watchdog gives that ``FAILED_S``
(``hurry``). It is started beforehand, as an interpreter that ends starts no threads any more; nothing is timed until
one of the three is asked for.

The host's watchdog is a little more patient than the others'. All state is guarded by ``_changed``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable

from gracepoint.errors import GracepointError
from gracepoint.multihost import KeyValueStore

log = logging.getLogger(__name__)

#: How long user code may go on after Preempted was raised.
LINGER_S = 5.0
#: How long a process may take to end that fails by itself, from its exit handlers on.
FAILED_S = 15.0
_HOST_LINGERS_LONGER_S = 2.0
#: Between the word that a process is gone and its end lie a few instructions; on a starved machine, this.
_SETTLE_S = 0.1
_LOOK_EVERY_S = 0.5
_JOIN_S = 1.0
#: For the watchdog to say what it does; it ends the process all the same.
_LAST_WORDS_S = 1.0


class ProcessExit:
    """See the module.

    Args:
        store: Shared by the gang.
        service_id: This process's id in the coordination service; 0 hosts it.
        process_count: How many processes there are.
        clock: Monotonic seconds.
        on_overdue: Called by the watchdog, in a thread of its own, before it ends a process whose end was not
            decided. It is not waited for longer than a second.
        end: Ends the process.
    """

    def __init__(
        self,
        store: KeyValueStore,
        service_id: int,
        process_count: int,
        *,
        clock: Callable[[], float],
        on_overdue: Callable[[], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._store = store
        self._hosts = service_id == 0
        self._process_count = process_count
        self._clock = clock
        self._on_overdue = on_overdue
        self._end = end
        self._changed = threading.Condition()
        self._code: int | None = None  # decided
        self._until_s = math.inf  # for an end that was decided, on the clock
        self._left_s: Callable[[], float] | None = None  # until the deadline
        self._overdue_code = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        """Starts the watchdog, which watches nothing yet."""
        self._thread = threading.Thread(target=self._watch, name="gracepoint-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watchdog. Safe to repeat, and without a start."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def watch(self, left_s: Callable[[], float], code: int) -> None:
        """Ends the process with ``code`` when ``left_s()`` is used up, unless another end is decided before."""
        with self._changed:
            self._left_s, self._overdue_code = left_s, code
            self._changed.notify_all()

    def cancel(self) -> None:
        """Nobody has to leave after all. Safe to repeat."""
        with self._changed:
            self._code = None
            self._until_s = math.inf
            self._left_s = None
            self._changed.notify_all()

    def decide(self, code: int) -> None:
        """From now on the process ends with ``code``, within ``LINGER_S``."""
        self._end_within(LINGER_S, code)

    @property
    def decided(self) -> bool:
        """True if the end was decided."""
        with self._changed:
            return self._code is not None

    def hurry(self, code: int) -> None:
        """The process is ending by itself, with ``code``, and has ``FAILED_S`` to do so."""
        self._end_within(FAILED_S, code)

    def _end_within(self, patience_s: float, code: int) -> None:
        with self._changed:
            self._code = code
            self._until_s = self._clock() + patience_s
            self._changed.notify_all()

    def leave(self) -> None:
        """Ends the process in its turn. Does nothing unless an end was decided."""
        with self._changed:
            code = self._code
        if code is None:
            return
        flush_output()
        if self._process_count > 1:
            with contextlib.suppress(GracepointError):  # nobody to tell or to wait for: then just end
                self._take_turn()
        self._end(code)

    def _take_turn(self) -> None:
        if not self._hosts:
            if self._store.increment("left/count") == self._process_count - 1:
                self._store.set("left/all", "")
            return
        left_s = self._until_s + _HOST_LINGERS_LONGER_S - self._clock()
        self._store.get("left/all", timeout_s=max(0.001, left_s))  # the watchdog knows the deadline
        time.sleep(_SETTLE_S)

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped and (wait_s := self._wait_s()) > 0:
                # Not longer at once, as the deadline may move meanwhile; without one there is nothing to look for.
                self._changed.wait(None if wait_s == math.inf else min(wait_s, _LOOK_EVERY_S))
            if self._stopped:
                return
            decided = self._code
            code = self._overdue_code if decided is None else decided

        def last_words() -> None:
            nonlocal code
            if decided is None:
                self._on_overdue()
                if self._code is not None:  # what was saved in the background is known only now
                    code = self._code
            log.warning("ended by the watchdog code=%d", code)
            flush_output()

        # In a thread of its own: whoever is stuck may be so with the lock of a stream or a log handler in its hand.
        speaker = threading.Thread(target=last_words, name="gracepoint-last-words", daemon=True)
        with contextlib.suppress(RuntimeError):  # too late in the interpreter's life for a thread
            speaker.start()
            speaker.join(_LAST_WORDS_S)
        self._end(code)

    def _wait_s(self) -> float:
        deadline_s = math.inf if self._left_s is None else self._left_s() + (_SETTLE_S if self._hosts else 0.0)
        decided_s = self._until_s - self._clock() + (_HOST_LINGERS_LONGER_S if self._hosts else 0.0)
        return min(deadline_s, decided_s)


def flush_output() -> None:
    """Writes out what logging and the standard streams still hold, as ``os._exit`` does not."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or none
            stream.flush()
