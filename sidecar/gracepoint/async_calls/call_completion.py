"""Learns when a call has ended in all processes, and with which errors.

One daemon thread meets the other processes: for each call, in the order of scheduling, it waits until the call has
ended here, and then gathers the outcome of all processes. The future that ``add`` returned is done then. The thread
ends after the last call that was added. A job of one process has no thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from concurrent.futures import Future

from gracepoint.daemon_thread import DaemonThread
from gracepoint.errors import AsyncCallFailed, BarrierError, GracepointError
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

#: Characters of a process's traceback that the others get. The end of a traceback says most.
_TEXT = 4000


class CallCompletion:
    """The ends of calls in all processes. The training thread calls all methods.

    Args:
        gang: The processes.
        key: Prefix of the keys of the meetings. Nothing else uses it.
        timeout_s: Seconds that a process waits for the others, after the call has ended here.
    """

    def __init__(self, gang: ProcessGroup, key: str, *, timeout_s: float) -> None:
        self._gang = gang
        self._key = key
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, Future[None], Future[None]]] = deque()
        self._meeting: DaemonThread | None = None  # takes itself out when it finds nothing to do
        self._lock = threading.Lock()  # of _waiting and _meeting

    def add(self, index: int, here: Future[None]) -> Future[None]:
        """Returns a future that is done when call ``index`` has ended in all processes.

        Its exception is an ``AsyncCallFailed`` with the error of each process where the call failed.

        Args:
            index: Number of the call, the same in all processes. Calls are added in this order.
            here: Done when the call has ended in this process.

        Raises:
            RuntimeError: The system has no thread for it. The other processes are told, where the call fails.
        """
        everywhere: Future[None] = Future()
        with self._lock:
            self._waiting.append((index, here, everywhere))
        if self._gang.process_count == 1:
            here.add_done_callback(lambda _: self._meet_all_done())
        else:
            self._begin_to_meet(index)
        return everywhere

    def _begin_to_meet(self, index: int) -> None:
        with self._lock:
            if self._meeting is not None and not self._meeting.ended:
                return
            if not self._waiting:
                return  # the thread has met for the call, and has left
            self._meeting = thread = DaemonThread(self._meet, "gracepoint-async-ends")
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:  # the next call is the first one again
                self._waiting.pop()
            self._tell_others(index, error)
            raise

    def _meet_all_done(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not self._waiting[0][1].done():
                    return
                index, here, everywhere = self._waiting.popleft()
            _complete(everywhere, index, {0: text} if (text := _error(here)) else {})

    def _meet(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._meeting = None
                    return
                index, here, everywhere = self._waiting.popleft()
            try:
                word = json.dumps(_error(here)[-_TEXT:])  # waits as long as the call runs; its caller can end it
                words = self._gang.gather(self._ended_key(index), word, timeout_s=self._timeout_s)
            except Exception as error:  # noqa: BLE001 - the call fails, and the thread goes on with the next
                self._tell_others(index, error)
                everywhere.set_exception(_not_all(index, error))
                continue
            texts = {process: text for process, word in enumerate(words) if (text := json.loads(word))}
            _complete(everywhere, index, texts)
            if self._gang.process_index == 0 and index > 0:
                self._remove(index - 1)  # all processes came to this call's meeting, so all have passed the one before

    def _ended_key(self, index: int) -> str:
        return f"{self._key}/ended/{index}"

    def _tell_others(self, index: int, error: Exception) -> None:
        """Fails a call in the other processes, so that they do not wait."""
        with contextlib.suppress(GracepointError):
            self._gang.fail(self._ended_key(index), error)

    def _remove(self, index: int) -> None:
        """Removes the keys of a call, which all processes have passed. An error is only logged: no call needs this."""
        try:
            self._gang.retire(self._ended_key(index))
        except GracepointError as error:
            logger.warning("keys of an asynchronous call were not removed call=%d error=%s", index, error)


def _error(ended: Future[None]) -> str:
    error = ended.exception()
    return str(error) or type(error).__name__ if error is not None else ""


def _complete(everywhere: Future[None], index: int, texts: dict[int, str]) -> None:
    if texts:
        everywhere.set_exception(AsyncCallFailed.of_processes(index, texts))
    else:
        everywhere.set_result(None)


def _not_all(index: int, error: Exception) -> AsyncCallFailed:
    what = (
        "did not end in all processes" if isinstance(error, BarrierError) else "could not be followed in all processes"
    )
    failed = AsyncCallFailed(f"call {index} {what}: {error!r}", index)
    failed.__cause__ = error
    return failed
