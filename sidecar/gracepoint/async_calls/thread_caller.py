"""A caller that runs functions in a thread of the training process.

It has one daemon thread, which starts with the first call and ends when the caller is closed or deleted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from concurrent.futures import Future

from gracepoint.async_calls.caller import AsyncCaller
from gracepoint.async_calls.processes.worker_process import CallFailed
from gracepoint.async_calls.request import AsyncRequest

_Calls = queue.SimpleQueue[tuple[AsyncRequest, tuple[object, ...], Future[None]] | None]


class ThreadAsyncCaller(AsyncCaller):
    """Runs functions in a daemon thread of this process. They share its interpreter with the training thread.

    Arguments are not copied: ``preload_fn`` must copy what the training changes.
    """

    _work: _Calls | None = None

    def run(self, request: AsyncRequest) -> Future[None]:
        arguments = request.preloaded_args()
        ended: Future[None] = Future()
        if request.async_fn is None:
            ended.set_result(None)
            return ended
        if self._work is None:
            work: _Calls = queue.SimpleQueue()
            thread = threading.Thread(
                target=_run_all, args=(work, self._nice), name="gracepoint-async-calls", daemon=True
            )
            thread.start()  # if the system has no thread, this call fails, and the next one tries again
            self._work, self._thread = work, thread
        self._work.put((request, arguments, ended))
        return ended

    def close(self, abort: bool = False) -> None:
        """As ``AsyncCaller.close``. A function that runs cannot be interrupted: with ``abort`` nobody waits for it."""
        if self._work is None:
            return
        work, self._work = self._work, None
        if abort:
            with contextlib.suppress(queue.Empty):
                while (left := work.get_nowait()) is not None:
                    left[2].set_exception(CallFailed("the call was aborted"))
        work.put(None)
        if not abort:
            self._thread.join(self._timeout_s)

    def __del__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.put(None)


def _run_all(work: _Calls, nice: int) -> None:
    # Only Linux knows a thread by such a number; elsewhere it may be that of another process.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # no right to: the calls run at the priority of the training
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)
    while (item := work.get()) is not None:
        request, arguments, ended = item
        assert request.async_fn is not None
        try:
            request.async_fn(*arguments, **request.async_fn_kwargs)
        except BaseException:  # noqa: BLE001 - told to all processes; SystemExit must not end the thread silently
            ended.set_exception(CallFailed(traceback.format_exc()))
        else:
            ended.set_result(None)
        del item, request, arguments, ended
