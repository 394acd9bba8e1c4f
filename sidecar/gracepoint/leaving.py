"""How a process ends after a preemption: with the policy's exit code, in time, whatever else is going on.

JAX makes this hard. Process 0 hosts the coordination service: when it dies, every other process is aborted within
0.1 s, with another exit code. And a regular end waits in ``jax.distributed.shutdown`` for all processes, for
minutes if one is dead. So after a preemption nobody ends regularly:

* ``leave`` runs in the main thread at the interpreter's exit, before JAX's own exit handler (handlers run in
  reverse order of registration, and ours is registered after JAX was imported). The others say that they are
  gone and end with ``os._exit``; the host of the service waits for the last of them, then ends in the same way.
* A **watchdog** thread ("gracepoint-watchdog", daemon, started by ``watch`` when an epoch opens) does the same
  when the main thread does not come that far: shortly before the deadline, or ``LINGER_S`` after the end was
  decided. User code may have a ``finally`` that hangs, swallow the ``SystemExit``, or be stuck in a step.

The host's watchdog is a little more patient than the others'. All state is guarded by ``_changed``.
"""

from __future__ import annotations

import contextlib
import logging
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
_HOST_LINGERS_LONGER_S = 2.0
#: Between the word that a process is gone and its end lie a few instructions; on a starved machine, this.
_SETTLE_S = 0.1
_LOOK_EVERY_S = 0.5
#: For the watchdog to say what it does; it ends the process all the same.
_LAST_WORDS_S = 1.0


class Leaving:
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
        self._decided_at_s = 0.0
        self._watching: threading.Thread | None = None
        self._cancelled = False

    def watch(self, left_s: Callable[[], float], code: int) -> None:
        """Ends the process with ``code`` when ``left_s()`` is used up, unless another end is decided before."""
        with self._changed:
            if self._watching is None:
                self._watching = threading.Thread(
                    target=self._watch, args=(left_s, code), name="gracepoint-watchdog", daemon=True
                )
                self._watching.start()

    def cancel(self) -> None:
        """Nobody has to leave after all. Safe to repeat."""
        with self._changed:
            self._code = None
            self._cancelled = True
            self._changed.notify_all()

    def decide(self, code: int) -> None:
        """From now on the process ends with ``code``, within ``LINGER_S``."""
        with self._changed:
            self._code = code
            self._decided_at_s = self._clock()
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
        left_s = self._decided_at_s + LINGER_S + _HOST_LINGERS_LONGER_S - self._clock()
        self._store.get("left/all", timeout_s=max(0.001, left_s))  # the watchdog knows the deadline
        time.sleep(_SETTLE_S)

    def _watch(self, left_s: Callable[[], float], code: int) -> None:
        patience_s = LINGER_S + (_HOST_LINGERS_LONGER_S if self._hosts else 0.0)
        with self._changed:
            while not self._cancelled:
                wait_s = left_s() + (0.0 if not self._hosts else _SETTLE_S)
                if self._code is not None:
                    wait_s = min(wait_s, self._decided_at_s + patience_s - self._clock())
                if wait_s <= 0:
                    break
                self._changed.wait(min(wait_s, _LOOK_EVERY_S))  # the deadline may move meanwhile
            else:
                return
            decided = self._code
        code = code if decided is None else decided

        def last_words() -> None:
            if decided is None:
                self._on_overdue()
            log.warning("ended by the watchdog code=%d", code)
            flush_output()

        # In a thread of its own: whoever is stuck may be so with the lock of a stream or a log handler in its hand.
        speaker = threading.Thread(target=last_words, name="gracepoint-last-words", daemon=True)
        with contextlib.suppress(RuntimeError):  # too late in the interpreter's life for a thread
            speaker.start()
            speaker.join(_LAST_WORDS_S)
        self._end(code)


def flush_output() -> None:
    """Writes out what logging and the standard streams still hold, as ``os._exit`` does not."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or none
            stream.flush()
