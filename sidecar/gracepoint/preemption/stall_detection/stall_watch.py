"""Says when this process makes no progress: in its log, to the other processes, and to the operator.

* The **stall thread** ("gracepoint-stalls", daemon, one per process) looks every few seconds. It owns the detector.
* Each stall is told by a thread of its own ("gracepoint-stall", daemon), which asks the store in one more thread
  ("gracepoint-stall-store"), as the store may not answer: process 0, which hosts it, may be the one that is stopped.
  They end within half a minute. One that waits for a store that does not answer is left behind.

The training thread is not involved: a sync point costs nothing more. ``stop`` ends the stall thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gracepoint.errors import GracepointError
from gracepoint.multihost.coordination.stalls import StallBoard, StalledAt, Suspicion, host_is_silent
from gracepoint.multihost.naming import Pods
from gracepoint.preemption.stall_detection.shared_heartbeat import SharedHeartbeat
from gracepoint.preemption.stall_detection.stacks import dump_all_stacks, stack_of
from gracepoint.preemption.stall_detection.stall_detector import Activity, StallDetector, Stalled

log = logging.getLogger(__name__)

_MOST_LOOK_EVERY_S = 5.0
#: How long the teller waits for the other processes to say that they make no progress: they reach their limits within
#: a look and a step of each other.
_OTHERS_S = 10.0
#: How long the store may take to answer each of two questions. With the above, a stall is told within 30 s.
_STORE_S = 7.0
_JOIN_S = 1.0


class Reports(Protocol):
    """What is done about stalls, as ``stall_reports.StallReports``."""

    def stalled(self, stalled: Stalled, suspicion: Suspicion) -> None:
        """Called in one process for all, unless the store does not answer."""

    def over(self, part: str) -> None:
        """Called in the same process when there is progress again."""

    def limit(self, why: str) -> None:
        """Called in every process once the operator was told, or when that took too long."""


class StallWatch:
    """See the module.

    Args:
        limit_s: Seconds without progress after which a part of the process is stalled.
        activities: Returns what the parts of the process do; the training is the first one.
        board: Where the processes say that they make no progress.
        pods: Names of the pods by process index.
        reports: Is told of stalls.
        heartbeat: Where this process says that it runs. None: nobody looks.
        clock: Returns monotonic seconds.
        others_s: Seconds to wait for the other processes to say that they make no progress.
    """

    def __init__(
        self,
        limit_s: float,
        activities: Callable[[], Sequence[Activity]],
        board: StallBoard,
        pods: Pods,
        reports: Reports,
        heartbeat: SharedHeartbeat | None = None,
        *,
        clock: Callable[[], float],
        others_s: float = _OTHERS_S,
    ) -> None:
        self._activities = activities
        self._board = board
        self._pods = pods
        self._reports = reports
        self._heartbeat = heartbeat
        self._clock = clock
        self._others_s = others_s
        self._look_every_s = min(_MOST_LOOK_EVERY_S, limit_s / 10)
        self._detector = StallDetector(limit_s, self._look_every_s)
        self._detector.look(clock(), time.process_time(), [])  # so that a stop of this process shows from now on
        self._stopped = threading.Event()
        self._stalled: set[str] = set()  # parts that are stalled now; the stall thread writes it
        self._told: set[str] = set()  # parts of which this process told the operator
        self._thread = threading.Thread(target=self._run, name="gracepoint-stalls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Safe to repeat."""
        self._stopped.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._look_every_s):
            try:
                self._look()
            except Exception as error:
                log.exception("could not look for stalls error=%s", error)
        if self._heartbeat is not None:
            self._heartbeat.end()  # here, as no beat can follow

    def _look(self) -> None:
        activities = self._activities()
        if self._heartbeat is not None:
            self._heartbeat.beat(activities[0].stage)
        changes = self._detector.look(self._clock(), time.process_time(), activities)
        if changes.paused_s:
            log.warning("this process was stopped for a while seconds=%.1f", changes.paused_s)
        for part in changes.over:
            self._stalled.discard(part)
            log.warning("there is progress again part=%s", part)
            self._in_a_thread(functools.partial(self._end, part))
        for stalled in changes.stalled:
            self._stalled.add(stalled.activity.part)
            stack = stack_of(stalled.activity.thread_id)
            log.error(
                "no progress part=%s stage=%s seconds=%.0f\n%s",
                stalled.activity.part,
                stalled.activity.stage,
                stalled.for_s,
                stack,
            )
            dump_all_stacks()
            self._in_a_thread(functools.partial(self._tell, stalled, stack))

    def _in_a_thread(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name="gracepoint-stall", daemon=True).start()

    def _tell(self, stalled: Stalled, stack: str) -> None:
        found: list[Suspicion] = []
        asking = threading.Thread(
            target=self._ask, args=(stalled, stack, found), name="gracepoint-stall-store", daemon=True
        )
        asking.start()
        asking.join(self._others_s + 2 * _STORE_S)
        if asking.is_alive():
            found.append(host_is_silent(self._board.host, self._pods))
        part = stalled.activity.part
        if part in self._stalled and not self._stopped.is_set():
            if found:
                self._told.add(part)
                self._reports.stalled(stalled, found[0])
            self._reports.limit(f"no progress in {stalled.activity.stage} for {stalled.for_s:.0f} s")

    def _ask(self, stalled: Stalled, stack: str, found: list[Suspicion]) -> None:
        """Appends who is suspected, if this process is to tell the operator."""
        try:
            now = stalled.activity
            tells = self._board.post(now.part, StalledAt(now.stage, now.order, now.reached, stack))
            self._stopped.wait(self._others_s)
            if tells:
                found.append(self._board.suspicion(now.part, self._pods))
        except GracepointError as error:
            log.warning("the other processes could not be asked about a stall error=%s", error)
            found.append(host_is_silent(self._board.host, self._pods, f"cannot be reached: {error}"))

    def _end(self, part: str) -> None:
        try:
            self._board.take_down(part)
        except GracepointError as error:
            log.warning("could not tell the other processes that a stall is over error=%s", error)
        if part in self._told:
            self._told.discard(part)
            self._reports.over(part)
