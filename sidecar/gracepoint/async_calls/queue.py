"""The active calls of a process, in order, and their finalization in all processes together.

The training thread calls all methods. The threads are those of ``caller``.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from gracepoint import machine
from gracepoint.async_calls.caller import AsyncCaller, AsyncRequest
from gracepoint.async_calls.process_callers import PersistentAsyncCaller, TemporalAsyncCaller
from gracepoint.errors import AsyncCallFailed
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import check_not_forked, is_forked

logger = logging.getLogger(__name__)


class _ActiveAsyncRequest(NamedTuple):
    """A call that was scheduled and is not finalized.

    Attributes:
        idx: Number of the call, from 0.
        async_caller: What runs it.
        async_request: The frozen request.
        here: Done when the call has ended in this process.
        everywhere: Done when the call has ended in all processes.
    """

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest
    here: Future[None]
    everywhere: Future[None]


class AsyncCallsQueue:
    """Schedules calls and finalizes them in order.

    Args:
        persistent: True for one worker process for all calls, False for a process for each call.
        caller: What runs the calls, if it is neither of these: for example a ``ThreadAsyncCaller``, or a caller with
            other arguments.
        gang: The processes that schedule the same calls. None: all processes of the JAX cluster, or this process alone
            if there is no cluster.

    Raises:
        ValueError: ``caller`` is given together with ``persistent`` or ``gang``.
    """

    def __init__(
        self, persistent: bool = False, *, caller: AsyncCaller | None = None, gang: ProcessGroup | None = None
    ) -> None:
        if caller is not None and (persistent or gang is not None):
            raise ValueError("AsyncCallsQueue: expected caller, or persistent and gang; found both")
        self._caller = caller or (PersistentAsyncCaller if persistent else TemporalAsyncCaller)(gang=gang)
        self._active: deque[_ActiveAsyncRequest] = deque()
        self._scheduled = 0
        self._no_dist: bool | None = None  # how this run of questions is asked
        self._closed = False
        self._pid = machine.process_id()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Starts a call. Returns its number. All processes schedule the same calls in the same order.

        Returns when ``preload_fn`` has run and the arguments are handed over: the trainer may change its state then.

        Raises:
            TypeError: The call cannot be sent to a worker process.
            AsyncCallFailed: The worker process does not take calls.
            RuntimeError: The queue is closed, or the system has no thread for the call.
            OSError: The system has no worker process for the call.
        """
        if self._closed:
            raise RuntimeError("schedule_async_request: the queue is closed")
        request = async_request.freeze()._replace(call_idx=self._scheduled)
        self._scheduled += 1  # also if it does not start here: the other processes count it
        here, everywhere = self._caller.start(request)
        self._active.append(_ActiveAsyncRequest(request.call_idx, self._caller, request, here, everywhere))
        return request.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Runs the finalize functions of the calls that have ended. Returns their numbers, in order.

        Collective: all processes call it at the same points, for example at each step, and all finalize the same calls
        at the same point. Without ``blocking`` it does not wait for other processes, unless process 0 is far behind.

        Args:
            blocking: True to wait until all scheduled calls have ended in all processes.
            no_dist: True to look at this process only. Processes may then finalize a call at different points. It must
                be the same for all questions until no call is active.

        Raises:
            AsyncCallFailed: Calls failed. The error names the processes and has their tracebacks. Its ``finalized`` has
                the numbers that this method would have returned. The failed calls are no longer active.
            ValueError: ``no_dist`` changed while calls are active.
        """
        if not self._active:
            return []
        check_not_forked(self._pid, "this queue of asynchronous calls")  # finalizing commits
        if self._no_dist is None:
            self._no_dist = no_dist
        elif self._no_dist != no_dist:
            raise ValueError(
                f"maybe_finalize_async_calls: calls are active that were asked for with no_dist={self._no_dist}, found "
                f"no_dist={no_dist}; the processes could not agree on the same answer"
            )
        finalized: list[int] = []
        failures: list[AsyncCallFailed] = []
        for _ in range(self._ready(blocking, no_dist)):
            call = self._active.popleft()
            error = (call.here if no_dist else call.everywhere).exception()
            if error is None:
                for finalize in call.async_request.finalize_fns:
                    finalize()
                finalized.append(call.idx)
            else:
                failures.append(self._caller.failure(call.idx, error))
        if not self._active:
            self._no_dist = None
            if not no_dist:
                self._caller.points.end_run()
        if failures:
            raise AsyncCallFailed.of_calls(failures, finalized)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Returns the number of calls that are scheduled and not finalized."""
        return len(self._active)

    def close(self, abort: bool = False) -> None:
        """Finalizes all calls and ends the worker. Collective, unless ``abort`` is True.

        Args:
            abort: True to end the worker at once. Calls that have not ended fail, in all processes, and finalize
                functions do not run here.

        Raises:
            AsyncCallFailed: As ``maybe_finalize_async_calls``. The worker has ended then.
        """
        if is_forked(self._pid) or (self._closed and not self._active):
            return  # with active calls, an earlier ``close`` was interrupted
        self._closed = True
        try:
            if abort:
                if self._active:
                    logger.warning("async calls are aborted calls=%s", [call.idx for call in self._active])
                self._active.clear()
            else:
                self.maybe_finalize_async_calls(blocking=True, no_dist=bool(self._no_dist))
        finally:
            self._caller.close(abort=abort)

    def _get_async_caller(self) -> AsyncCaller:
        """Returns what runs the calls. The name is that of Megatron."""
        return self._caller

    def _ready(self, blocking: bool, no_dist: bool) -> int:
        """Returns how many of the active calls are finalized now. All of them have ended when it returns."""
        if no_dist:
            futures = [call.here for call in self._active]
            return self._caller.wait_all(futures) if blocking else _ended(futures)
        futures = [call.everywhere for call in self._active]
        if blocking:
            return self._caller.wait_all(futures)
        first = self._active[0].idx
        ready = max(0, self._caller.points.ask(first + _ended(futures)) - first)
        self._caller.wait_all(futures[:ready])  # process 0 knows that they have ended, so it is a matter of moments
        return ready


def _ended(futures: list[Future[None]]) -> int:
    """Returns how many futures at the beginning of the list are done."""
    return next((n for n, future in enumerate(futures) if not future.done()), len(futures))
