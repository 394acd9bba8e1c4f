"""When each workload is decided about: soon after an event, and when time alone may change the decision.

Everything runs on the controller's event loop. Decisions are made in slices, so that nothing else on the loop waits for
long: after a list there is something to decide about every workload. Such a round waits for the workloads with events.
If a decision takes long, as for a gang of thousands of pods, the next one about the same workload waits for a multiple
of that time: while these pods start, each has an event. The queue has no task of its own; its callbacks end with the
loop.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics

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


LOOK_S = 0.125
#: A full collection of what is new runs after this number of collections of young objects: about 25,000 new objects.
PORTION = 1
#: Everything is looked at after this time.
WHOLE_S = 86_400.0
#: That waits at most this long for a moment without a preemption: they may be under way one after another.
PUT_OFF_S = 3_600.0
#: Arguments of ``gc.set_threshold``: one for each generation.
_THRESHOLDS = (5_000, 4, 1_000_000)


# Keeps Python's garbage collections short.
#
# A full collection stops every thread and looks at every object: 0.4 s with 20,000 pods and 4,500 connected ones.
# Nearly nothing of that is garbage: objects are freed when nobody refers to them any more, and a stream that has ended
# leaves about 1 kB in cycles. So what survived a collection is left out of the next ones (``gc.freeze``).
#
# One task on the controller's event loop looks several times a second, and collects as soon as there is a portion of
# new objects, so that each collection is short: thousands of connections bring 100,000 objects a second. Once a day
# everything is looked at, when no preemption is under way. Python itself still collects the youngest objects, in
# smaller portions. The task ends when it is cancelled.


def spare_what_is_known() -> None:
    """Leaves everything that exists now out of the next collections. Call it once, when the cluster is known."""
    gc.freeze()


def restrain() -> None:
    """Stops Python from starting full collections in this process. Call it when all modules are loaded."""
    gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()


def _new() -> int:
    """How many collections of young objects there were since the last full one."""
    return gc.get_count()[2]


def _collect(whole: bool) -> None:
    """Runs a full collection of what is new, or of everything."""
    if whole:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


async def collect_in_portions(
    is_quiet: Callable[[], bool],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    new: Callable[[], int] = _new,
    collect: Callable[[bool], object] = _collect,
) -> None:
    """Runs full collections until cancelled.

    Args:
        is_quiet: Returns False while a preemption is under way.
        sleep: Waits for a number of seconds.
        new: Returns how many collections of young objects there were since the last full one.
        collect: Runs a collection, of everything if its argument is true.
    """
    waited_s = 0.0
    while True:
        await sleep(LOOK_S)
        waited_s += LOOK_S
        if waited_s >= WHOLE_S and (is_quiet() or waited_s >= WHOLE_S + PUT_OFF_S):
            collect(True)
            waited_s = 0.0
        elif new() >= PORTION:
            collect(False)


EVERY_S = 0.25


# How late an event loop runs what is due. Whatever blocks a loop delays every notice.
#
# One task on each loop that takes part in notices: the controller's and the channel's. It ends when it is cancelled.
# The health port, on the controller's loop, reads when a loop was last seen running.


class LoopLag:
    """The lag of one loop.

    Args:
        metrics: Gets the lag.
        loop: The loop's name in the metric: ``controller`` or ``channel``.
    """

    def __init__(self, metrics: Metrics, loop: str) -> None:
        self._lag_s = metrics.loop_lag_s.labels(loop=loop)
        self._seen_at: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the loop was last seen running. 0 before it runs. Callable from any thread."""
        seen_at = self._seen_at
        return 0.0 if seen_at is None else time.monotonic() - seen_at

    async def measure(self) -> None:
        """Observes the lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._seen_at = time.monotonic()
            due_at = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._lag_s.observe(max(loop.time() - due_at, 0.0))
