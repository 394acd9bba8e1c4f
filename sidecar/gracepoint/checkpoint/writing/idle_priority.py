"""Threads of a save that leave the CPU to the training, and when they stop doing so.

A worker process writes beside the training with more threads than there are idle cores. If a thread of a training step
wakes up and no core is idle, the kernel has it wait until a writer has used up its time slice, whatever the niceness of
the writer is. So the writers of a save that nobody waits for run as ``SCHED_IDLE``. The kernel counts a core with only
such threads as idle, and other threads of the same container take it at once.

If other threads keep all cores busy, a thread of ``SCHED_IDLE`` gets next to nothing: the kernel weighs it as 3, and a
thread of niceness 0 as 1024. So threads stop giving way in two cases: the save is urgent, or the threads are starved
(``Starvation``). A thread cannot leave ``SCHED_IDLE`` without a privilege. So new threads take the work over, and the
old ones end.

* The thread that makes a ``WritePool`` calls ``begin`` and ``end``.
* One daemon thread ("gracepoint: watches writers") watches whether one of the two cases has come. It ends when it has
  started the new threads, or with ``end``.
* The threads that write and sync call ``run`` and ``must_end``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gracepoint import machine

logger = logging.getLogger(__name__)

#: Seconds without enough processor time after which threads are starved.
PATIENCE_S = 5.0
# The threads are starved if all of them together get less than this part of one core.
_ENOUGH_CORES = 0.1
_LOOK_EVERY_S = 0.05
# Number of looks for starvation within the patience.
_LOOKS = 10


class Starvation:
    """Decides when threads are starved. Pure: the times are given to it.

    Threads are starved if two things hold for the last ``patience_s`` seconds. All threads together got less than a
    tenth of a core. And at more than half of the looks, at least one of them was ready to run. A thread that waits for
    the disk is not ready.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._looks: list[tuple[float, float, bool]] = []  # within the patience

    def look(self, now_s: float, cpu_s: float, *, ready: bool) -> bool:
        """Returns whether the threads are starved.

        Args:
            now_s: Monotonic seconds.
            cpu_s: Processor seconds that the threads have used.
            ready: Whether any of them runs, or is ready to run.
        """
        self._looks.append((now_s, cpu_s, ready))
        if now_s - self._looks[0][0] < self._patience_s:
            return False
        passed_s, used_s = now_s - self._looks[0][0], cpu_s - self._looks[0][1]
        mostly_ready = 2 * sum(ready for _, _, ready in self._looks) > len(self._looks)
        self._looks = [look for look in self._looks if now_s - look[0] < self._patience_s]
        return mostly_ready and used_s < _ENOUGH_CORES * passed_s


class IdlePriority:
    """The threads of one save that give way.

    Args:
        is_urgent: Returns whether somebody waits for the save. It is not called again after it has returned True.
        patience_s: See ``Starvation``.
    """

    def __init__(self, is_urgent: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
        self._is_urgent = is_urgent
        self._patience_s = patience_s
        self._threads: set[int] = set()  # the kernel's numbers of the threads that give way
        self._over = self._ended = False
        self._wake = threading.Event()
        self._watching: threading.Thread | None = None

    def begin(self, take_over: Callable[[], bool]) -> bool:
        """Returns whether threads give way from now on. They do not if the save is urgent, or if no thread can watch.

        Args:
            take_over: Starts threads that do not give way, and returns whether all of them were started. Called once at
                most, in another thread.
        """
        if self._is_urgent():
            return False
        watching = threading.Thread(
            target=self._watch, args=[take_over], name="gracepoint: watches writers", daemon=True
        )
        try:
            watching.start()
        except RuntimeError as error:  # no thread could say that the save has become urgent
            logger.warning("the threads of a save do not give way to the training: %s", error)
            return False
        self._watching = watching
        return True

    def run(self, function: Callable[[], None]) -> None:
        """Calls ``function``. The calling thread gives way until it ends, and so do threads that it starts."""
        try:
            machine.run_when_idle()
        except OSError as error:
            logger.info("a thread of a save does not give way to the training: %s", error)
        else:
            self._threads.add(threading.get_native_id())
        function()

    def must_end(self) -> bool:
        """Returns whether the calling thread gives way and must end, as other threads have taken over."""
        return self._over and threading.get_native_id() in self._threads

    def end(self) -> None:
        """Ends the watching thread. No thread is started after this returns."""
        self._ended = True
        self._wake.set()
        if self._watching is not None:
            # Not for long: the thread waits for the event alone. Otherwise it only looks, and starts threads.
            self._watching.join()

    def _watch(self, take_over: Callable[[], bool]) -> None:
        try:
            why = self._wait()
        except Exception as error:  # noqa: BLE001 - they might be starved, and nobody would look again
            why = f"it is not known whether they run: {error!r}"
        if why:
            logger.info("the threads of a save do not give way any more, as %s", why)
            self._over = take_over()

    def _wait(self) -> str:
        """Waits until the threads must not give way any more, and returns why. Empty: the save has ended."""
        starvation, look_at_s = Starvation(self._patience_s), 0.0
        while not self._ended:
            if self._is_urgent():
                return "it is urgent"
            if (now_s := time.monotonic()) >= look_at_s:
                look_at_s = now_s + self._patience_s / _LOOKS
                cpu_s, ready = machine.cpu_time(list(self._threads))
                if starvation.look(now_s, cpu_s, ready=ready):
                    return "the training leaves them no processor time"
            self._wake.wait(_LOOK_EVERY_S)
        return ""
