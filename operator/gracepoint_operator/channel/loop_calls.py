"""Calls on an event loop that come from another thread, many with one wake-up.

``call_soon_threadsafe`` wakes the loop for each call. Each wake-up is a system call that lets the woken thread run, and
then both threads take turns for every single call. To tell a gang of thousands of pods needs thousands of calls in each
direction. Here only the first call wakes the loop, and the others find that it is awake.

Any thread calls ``post``, and another loop awaits ``run``. The calls run on the loop, in their order. They are given up
when the loop has ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

#: The loop does other work after this time.
_SLICE_S = 0.01

_Result = TypeVar("_Result")


class LoopCalls:
    """See the module.

    Args:
        loop: Runs the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
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
            task.add_done_callback(lambda done: back.post(functools.partial(_give, done, answer)))

        self.post(begin)
        try:
            return await answer
        except asyncio.CancelledError:
            self.post(lambda: tasks[0].cancel())
            raise

    def _run(self) -> None:
        self._is_awake = self._is_due = False
        until_s = time.thread_time() + _SLICE_S
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


def _give(done: asyncio.Task[_Result], answer: asyncio.Future[_Result]) -> None:
    """Gives the result of a task to whoever waits for it."""
    if answer.done():
        return  # cancelled meanwhile
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
