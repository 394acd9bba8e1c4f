"""The active calls of a process, in order, their finalization in all processes together, and the worker processes.

The training thread calls all methods of the queue. The threads are those of ``caller``.

``TemporalAsyncCaller`` and ``PersistentAsyncCaller`` run functions in worker processes. Each worker has a thread in
this process that reads its answers (``worker_process``). Nobody has to close a caller: a worker ends after its last
call, also if this process dies.
"""

from __future__ import annotations

import abc
import functools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gracepoint import machine
from gracepoint.async_calls.caller import TIMEOUT_S, AsyncCaller, AsyncRequest
from gracepoint.async_calls.handover import BlockPool, pack
from gracepoint.async_calls.worker_process import WorkerProcess, require_linux
from gracepoint.errors import AsyncCallFailed
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import Ending, check_not_forked, is_forked

logger = logging.getLogger(__name__)

#: Seconds to wait until a worker that was killed has ended.
_KILLED_S = 30.0
#: The numbers of the calls that every worker gets first begin here. No request has such a number.
_FIRST_CALLS = 1 << 62


class _ProcessAsyncCaller(AsyncCaller):
    """What callers with worker processes share.

    Args:
        gang, nice, timeout_s, clock: As ``AsyncCaller``.
        idle: Whether the workers get only CPU time that no other process of the container wants (``SCHED_IDLE``). A
            training step is then hardly slower. If others keep all cores busy, they nearly stop.
        log_level: Level of a worker's log, which goes to the standard error of this process. None: the level of
            Python's root logger here.
        orphan_limit_s: Seconds that a worker still has for its calls after this process has died.
        keeper: Path of the socket of a keeper, which starts the workers in its own container. If it cannot be reached,
            this process starts them. None: this process starts them.
    """

    _kept_blocks = 0

    def __init__(
        self,
        *,
        gang: ProcessGroup | None = None,
        nice: int = 10,
        idle: bool = False,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        log_level: int | None = None,
        orphan_limit_s: float = 600.0,
        keeper: str | None = None,
    ) -> None:
        require_linux("worker processes")
        super().__init__(gang=gang, nice=nice, timeout_s=timeout_s, clock=clock)
        self._idle = idle
        self._pool = BlockPool(kept=self._kept_blocks)
        self._log_level = logging.getLogger().getEffectiveLevel() if log_level is None else log_level
        self._orphan_limit_s = orphan_limit_s
        self._keeper = keeper
        # Only the first worker waits for a keeper that is still starting: training, or an emergency save, waits for the
        # start of a later worker.
        self._keeper_starts = True
        self._workers: list[WorkerProcess] = []  # those that have not ended
        self._first_calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._no_more: weakref.finalize[[list[WorkerProcess], int], _ProcessAsyncCaller] | None = None

    def __del__(self) -> None:
        if (no_more := getattr(self, "_no_more", None)) is not None:  # None: no worker was started
            no_more()

    @property
    def worker_process_ids(self) -> list[int]:
        """Process IDs of the workers that have not ended."""
        self._workers[:] = [worker for worker in self._workers if worker.alive]
        return [worker.process_id for worker in self._workers]

    def run(self, request: AsyncRequest) -> Ending:
        arguments = request.preloaded_args()
        if request.async_fn is None:
            nothing = Ending()
            nothing.end()
            return nothing
        block, header_bytes, shared = pack(request.async_fn, arguments, request.async_fn_kwargs, self._pool)
        try:
            worker = self._worker()
        except BaseException:
            self._pool.give_back(block)
            raise
        call = worker.send(request.call_idx, block, header_bytes, shared)
        self._sent(worker)
        return call

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """Has each worker call a function once: present workers after their calls, later ones before any other call.

        Args:
            function: A function that can be imported. It should be short. Its errors are in the log of this process.
            *arguments: Values that can be pickled.
        """
        self._first_calls.append((function, arguments))
        for worker in self._workers:
            if worker.alive:
                self._call_first(worker, len(self._first_calls) - 1)

    def _call_first(self, worker: WorkerProcess, number: int) -> None:
        function, arguments = self._first_calls[number]
        block, header_bytes, shared = pack(function, arguments, {}, self._pool)
        call = worker.send(_FIRST_CALLS + number, block, header_bytes, shared)
        call.then(functools.partial(_log_error, call))

    @abc.abstractmethod
    def _worker(self) -> WorkerProcess:
        """Returns the worker for the next call."""

    def _sent(self, worker: WorkerProcess) -> None:
        """Called when a worker has got a call."""

    def _start_worker(self) -> WorkerProcess:
        worker = self._new_worker(self._keeper)
        if self._no_more is None or not self._no_more.alive:
            # Calls that were handed over are finished: a caller that is dropped, or still there at the interpreter's
            # end, only says that no more come. At that end, modules that `__del__` needs may be gone already.
            self._no_more = weakref.finalize(self, _no_more_calls, self._workers, os.getpid())
        self._workers[:] = [each for each in self._workers if each.alive]
        self._workers.append(worker)
        for number in range(len(self._first_calls)):
            self._call_first(worker, number)
        return worker

    def _new_worker(self, keeper: str | None) -> WorkerProcess:
        keeper_starts, self._keeper_starts = self._keeper_starts, False
        try:
            return WorkerProcess(
                self._pool,
                nice=self._nice,
                idle=self._idle,
                log_level=self._log_level,
                orphan_limit_s=self._orphan_limit_s,
                keeper=keeper,
                keeper_starts=keeper_starts,
            )
        except OSError as error:
            if keeper is None:
                raise
            logger.warning("%s: a worker process of this container is started in its place", error)
            return self._new_worker(None)

    def finish(self) -> None:
        """Says that no more calls come. The workers end after their last call. Does not wait for them."""
        for worker in self._take_workers():
            worker.close()
        self._pool.close()

    def kill(self) -> None:
        """Ends the workers at once. Their calls fail, and the next call starts another worker."""
        for worker in self._take_workers():
            worker.kill()

    def close(self, abort: bool = False) -> None:
        """As ``AsyncCaller.close``.

        Raises:
            AsyncCallFailed: A worker has not ended in time. It is killed then; that of a keeper is disconnected.
        """
        workers, wait_s = self._take_workers(), _KILLED_S if abort else self._timeout_s
        for worker in workers:
            worker.kill() if abort else worker.close()
        late = [worker for worker in workers if not worker.wait(wait_s)]
        for worker in late:
            worker.kill()
        self._pool.close()
        if late:
            raise AsyncCallFailed(
                "; ".join(
                    f"{w.name} did not end within {wait_s:g} s, and was {'killed' if w.process_id else 'disconnected'}"
                    for w in late
                )
            )

    def _take_workers(self) -> list[WorkerProcess]:
        workers = list(self._workers)
        self._workers.clear()
        return workers


def _log_error(call: Ending) -> None:
    if call.error is not None:
        logger.warning("a call that every worker process gets has failed: %s", call.error)


def _no_more_calls(workers: list[WorkerProcess], owner: int) -> None:
    """Tells the workers of a caller that is gone that no more calls come. A forked child owns no worker."""
    if owner == os.getpid():
        for worker in workers:
            worker.close()
        workers.clear()


class TemporalAsyncCaller(_ProcessAsyncCaller):
    """Runs each call in a separate process, which ends with the call. Calls may overlap."""

    def _worker(self) -> WorkerProcess:
        return self._start_worker()

    def _sent(self, worker: WorkerProcess) -> None:
        worker.close()


class PersistentAsyncCaller(_ProcessAsyncCaller):
    """Runs all calls in one process, which stays until ``close``. It keeps the memory of the last call for the next."""

    _kept_blocks = 1

    def start_worker(self) -> None:
        """Starts the worker process now, so that the first call does not wait for it. Otherwise the first call does."""
        self._worker()

    def _worker(self) -> WorkerProcess:
        for worker in self._workers:
            if worker.alive:
                return worker
        if self._workers:
            logger.warning("the worker process of async calls ended, a new one is started")
        return self._start_worker()


class _ActiveAsyncRequest(NamedTuple):
    """A call that was scheduled and is not finalized.

    Attributes:
        idx: Number of the call, from 0.
        async_caller: What runs it.
        async_request: The frozen request.
        here: Its end in this process.
        everywhere: Its end in all processes.
    """

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest
    here: Ending
    everywhere: Ending


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
            error = (call.here if no_dist else call.everywhere).error
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
            ends = [call.here for call in self._active]
            return self._caller.wait_all(ends) if blocking else _ended(ends)
        ends = [call.everywhere for call in self._active]
        if blocking:
            return self._caller.wait_all(ends)
        first = self._active[0].idx
        ready = max(0, self._caller.points.ask(first + _ended(ends)) - first)
        self._caller.wait_all(ends[:ready])  # process 0 knows that they have ended, so it is a matter of moments
        return ready


def _ended(ends: list[Ending]) -> int:
    """Returns how many calls at the beginning of the list have ended."""
    return next((n for n, call in enumerate(ends) if not call.ended), len(ends))
