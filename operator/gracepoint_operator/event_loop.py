"""The event loops: calls from one to another, how late they run what is due, and short garbage collections.

A full garbage collection stops every thread and looks at every object: 0.4 s with 20,000 pods and 4,500 connected ones.
Nearly nothing of that is garbage: objects are freed when nobody refers to them any more, and a stream that has ended
leaves about 1 kB in cycles. So what survived a collection is left out of the next ones (``gc.freeze``).

``collect_in_portions`` is one task on the controller's event loop. It looks several times a second, and collects as
soon as there is a portion of new objects, so that each collection is short: thousands of connections bring 100,000
objects a second. Once a day everything is looked at, when no preemption is in progress. Python itself still collects
the youngest objects, in smaller portions. The task ends when it is cancelled.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gracepoint_operator.metrics import Metrics

_Result = TypeVar("_Result")

#: Seconds between two measurements of a loop's lag.
_LAG_EVERY_S = 0.25
#: Seconds between two looks whether there is something to collect.
LOOK_S = 0.125
#: A full collection of what is new runs after this number of collections of young objects: about 10,000 new objects.
PORTION = 1
#: Everything is looked at after this time.
WHOLE_S = 86_400.0
#: That waits at most this long for a moment without a preemption: there may be one after another.
PUT_OFF_S = 3_600.0
#: Arguments of ``gc.set_threshold``: one for each generation. Smaller portions cost a start 15% more, so they come
#: after it.
_THRESHOLDS_OF_START = (5_000, 4, 1_000_000)
THRESHOLDS = (2_000, 4, 1_000_000)


class LoopCalls:
    """Calls on an event loop that come from another thread, many with one wake-up.

    ``call_soon_threadsafe`` wakes the loop for each call. Each wake-up is a system call that lets the woken thread run,
    and then both threads take turns for every single call. To notify a gang of thousands of pods needs thousands of
    calls in each direction. Here only the first call wakes the loop, and the others find that it is awake.

    Any thread calls ``post``, and another loop awaits ``run``. The calls run on the loop, in their order. They are
    dropped when the loop has ended.

    Args:
        loop: Runs the calls.
        slice_s: After so many seconds of calls the loop does other work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, slice_s: float = 0.01) -> None:
        self._slice_s = slice_s
        self._loop = loop
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._is_awake = self._is_due = False

    def post(self, call: Callable[[], object], *, after_s: float = 0.0) -> None:
        """Runs ``call`` on the loop, after everything that was posted before.

        Args:
            call: What to run.
            after_s: The call may wait this many seconds, for others to come. It runs earlier if one comes that does not
                wait. Two threads that are busy at once take turns for the interpreter, so what is urgent in the
                posting thread is done sooner if the other thread sleeps meanwhile.
        """
        # Append first, then read the flags. ``_run`` clears the flags before it takes calls from the queue. So if a
        # flag is still set here, a run that will see this call is yet to come.
        self._calls.append(call)
        if self._is_awake or (after_s and self._is_due):
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if after_s:
                self._is_due = True
                self._loop.call_soon_threadsafe(self._loop.call_later, after_s, self._run)
            else:
                self._is_awake = True
                self._loop.call_soon_threadsafe(self._run)

    async def run(self, work: Coroutine[Any, Any, _Result], back: LoopCalls) -> _Result:
        """Runs ``work`` as a task of the loop, and waits for it on the running loop.

        Args:
            work: If the wait is cancelled, so is the work.
            back: Calls on the running loop.
        """
        answer: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[_Result]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda finished: back.post(functools.partial(_pass_result, finished, answer)))

        self.post(begin)
        try:
            return await answer
        except asyncio.CancelledError:
            self.post(lambda: tasks[0].cancel())
            raise

    def _run(self) -> None:
        self._is_awake = self._is_due = False
        until_s = time.thread_time() + self._slice_s
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception as error:  # noqa: BLE001  as the loop handles it for its own callbacks
                self._loop.call_exception_handler({"message": f"{call!r} failed", "exception": error})
            if time.thread_time() >= until_s:
                break
        if self._calls and not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._run)


def _pass_result(task: asyncio.Task[_Result], answer: asyncio.Future[_Result]) -> None:
    """Passes the result of a task to whoever waits for it."""
    if answer.done():
        return  # cancelled meanwhile
    if task.cancelled():
        answer.cancel()
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


class LoopLag:
    """How late one event loop runs what is due. Whatever blocks a loop delays every notice.

    One task measures it on each loop that takes part in notices: the controller's and the channel's. It ends when it is
    cancelled. The health port, on the controller's loop, reads when a loop was last seen running.

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
            due_at = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag_s.observe(max(loop.time() - due_at, 0.0))


def spare_what_is_known() -> None:
    """Leaves everything that exists now out of the next collections, which are shorter from now on.

    Call it once, when the cluster is known.
    """
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()


def restrain() -> None:
    """Stops Python from starting full collections in this process. Call it when all modules are loaded."""
    gc.set_threshold(*_THRESHOLDS_OF_START)
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
        is_quiet: Returns False while a preemption is in progress.
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
