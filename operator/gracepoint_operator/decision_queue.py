"""When each workload is decided about: soon after an event, and when time alone may change the decision.

Everything runs on the controller's event loop. Decisions are made in slices, so that nothing else on the loop waits for
long: after a list there is something to decide about every workload. Such a round waits for the workloads with events.
If a decision takes long, as for a gang of thousands of pods, the next one about the same workload waits for a multiple
of that time: while these pods start, each has an event. The queue has no task of its own; its callbacks end with the
loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Iterable

from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

#: The loop does other work after this time. Both times are CPU time of the loop's thread.
_SLICE_S = 0.01
#: A decision that takes longer is followed by a rest of its workload, this number of times as long.
_LONG_S = 0.02
_REST = 4
#: Seconds until a workload is decided about again after an error.
_AGAIN_S = 1.0


class DecisionQueue:
    """The workloads that are to be decided about, by UID.

    Args:
        decide: Decides about a workload. Returns when it has to be decided about again without an event, in seconds
            since the epoch. None: only after an event.
        clock: Seconds since the epoch.
    """

    def __init__(self, decide: Callable[[str], float | None], clock: Callable[[], float]) -> None:
        self._decide = decide
        self._clock = clock
        self._waiting: dict[str, None] = {}  # in the order of their events
        self._round: dict[str, None] = {}  # after all that wait
        self._resting: dict[str, bool] = {}  # True: it is to be decided about after its rest
        self._due_at: dict[str, float] = {}
        self._times: list[tuple[float, str]] = []  # a heap; only entries that are in _due_at count
        self._scheduled = False

    def add(self, uids: Iterable[str]) -> None:
        """Decides about these workloads in the loop's next iterations."""
        for uid in uids:
            if uid in self._resting:
                self._resting[uid] = True
            else:
                self._waiting[uid] = None
        self._schedule()

    def add_round(self, uids: Iterable[str]) -> None:
        """Decides about these workloads when nothing else waits."""
        self._round.update(dict.fromkeys(uids))
        self._schedule()

    def add_due(self) -> None:
        """Adds the workloads for which it is time. Call it regularly."""
        now = self._clock()
        while self._times and self._times[0][0] <= now:
            at, uid = heapq.heappop(self._times)
            if self._due_at.get(uid) == at:
                del self._due_at[uid]
                self.add([uid])

    def decide_now(self, uid: str) -> None:
        """Decides about a workload before this method returns."""
        self._waiting.pop(uid, None)
        self._round.pop(uid, None)
        try:
            at = self._decide(uid)
        except Exception:
            log.exception("a workload could not be decided about", extra=about(workload_uid=uid))
            at = self._clock() + _AGAIN_S
        if at is None:
            self._due_at.pop(uid, None)
        elif self._due_at.get(uid) != at:
            self._due_at[uid] = at
            heapq.heappush(self._times, (at, uid))

    def _schedule(self) -> None:
        if not self._scheduled and (self._waiting or self._round):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Decides for one slice of time."""
        self._scheduled = False
        began_s = time.thread_time()
        before_s = began_s
        while (self._waiting or self._round) and before_s - began_s < _SLICE_S:
            uid = next(iter(self._waiting or self._round))
            self.decide_now(uid)
            after_s = time.thread_time()
            if after_s - before_s > _LONG_S:
                self._resting[uid] = False
                asyncio.get_running_loop().call_later(_REST * (after_s - before_s), self._rested, uid)
            before_s = after_s
        self._schedule()

    def _rested(self, uid: str) -> None:
        if self._resting.pop(uid, False):
            self.add([uid])
