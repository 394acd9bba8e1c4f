"""Callers run the functions of asynchronous calls in the background: what all of them share, and the one with a thread.

The training thread owns a caller and calls its methods. The subclasses decide what runs the functions:
``ThreadAsyncCaller`` has one daemon thread, which starts with the first call and ends when the caller is closed or
deleted; ``process_callers`` has those with worker processes. If there are several training processes, one more thread
meets the others (``call_completion``). It ends after the last call. Callers and calls have the same numbers in all
processes, because all processes make the same ones in the same order. So their keys agree.

Any thread may use ``gc_paused``; the module counts its users under a lock.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import itertools
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple

from gracepoint import machine
from gracepoint.async_calls.call_completion import CallCompletion, FinalizePoints
from gracepoint.async_calls.worker_process import CallFailed
from gracepoint.errors import AsyncCallFailed
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.threads import check_not_forked

_gc_lock = threading.Lock()
_users = 0
_was_enabled = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection inside the block. May be nested, and used by several threads at once.

    Collection is enabled again when the last user leaves, if it was enabled when the first one entered.
    """
    global _users, _was_enabled
    with _gc_lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _gc_lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                gc.enable()


class AsyncRequest(NamedTuple):
    """A call to schedule.

    Attributes:
        async_fn: Runs in the background. None: nothing runs, and the call ends at once. For a worker process it must be
            a function that can be imported by its name: no lambda, no function inside a function, and not from
            ``__main__``.
        async_fn_args: Positional arguments of ``async_fn``.
        finalize_fns: Run in the training thread, in this order and without arguments, once the call has ended in all
            processes.
        async_fn_kwargs: Keyword arguments of ``async_fn``.
        preload_fn: Runs in the training process before ``schedule_async_request`` returns, without arguments. It copies
            from the devices to the host. What it returns becomes the first positional argument of ``async_fn``, before
            ``async_fn_args``. JAX arrays in it arrive as NumPy arrays.
        is_frozen: True once the request is scheduled. Finalize functions can no longer be added.
        call_idx: Number of the call in its queue, from 0. Set when the request is scheduled.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: Sequence[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function that runs after the existing finalize functions.

        Raises:
            RuntimeError: The request is frozen.
            TypeError: ``finalize_fns`` is not a list.
        """
        if self.is_frozen:
            raise RuntimeError(
                "add_finalize_fn: the request is frozen because it was scheduled; add the function before scheduling it"
            )
        if not isinstance(self.finalize_fns, list):
            raise TypeError(f"add_finalize_fn: finalize_fns must be a list, found {type(self.finalize_fns).__name__}")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Runs the whole call in this thread: preload, function, finalize functions.

        It does not meet other processes. A function that needs them to have finished meets them itself.
        """
        arguments = self.preloaded_args()
        if self.async_fn is not None:
            self.async_fn(*arguments, **self.async_fn_kwargs)
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """Returns a copy to which no finalize function can be added."""
        return self._replace(finalize_fns=tuple(self.finalize_fns), is_frozen=True)

    def preloaded_args(self) -> tuple[Any, ...]:
        """Runs ``preload_fn`` without garbage collection. Returns the positional arguments of ``async_fn``."""
        if self.preload_fn is None:
            return tuple(self.async_fn_args)
        with gc_paused():
            return (self.preload_fn(), *self.async_fn_args)


logger = logging.getLogger(__name__)

_lock = threading.Lock()
_made_in: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()

#: Seconds to wait for a call by default.
TIMEOUT_S = 3600.0
# Most seconds more to wait for the error that names the processes where a call has not ended.
_NAMED_S = 5.0


class AsyncCaller(abc.ABC):
    """Runs functions in the background, one call after the other in the order of scheduling.

    Args:
        gang: The processes that schedule the same calls. None: all processes of the JAX cluster, or this process alone
            if there is no cluster.
        nice: Added to the CPU niceness of what runs the functions: 0 to 19. Larger values leave more of the CPU to the
            training. The kernel's default is 0.
        timeout_s: Seconds that a wait for calls may take, and that a call which has ended here waits for its end in the
            other processes.
        clock: Returns monotonic seconds.

    Raises:
        ValueError: ``nice`` or ``timeout_s`` is out of range.
    """

    def __init__(
        self,
        *,
        gang: ProcessGroup | None = None,
        nice: int = 10,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= nice <= 19:
            raise ValueError(f"nice: expected 0 to 19, found {nice}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: expected seconds above 0, found {timeout_s}")
        self._gang = gang or _all_processes()
        self._nice = nice
        self._pid = machine.process_id()
        self._timeout_s = timeout_s
        with _lock:
            number = _made_in.get(self._gang, 0)
            _made_in[self._gang] = number + 1
        self._key = f"async/{number}"
        self._ends = CallCompletion(self._gang, self._key, timeout_s=timeout_s)
        self._asked: deque[tuple[int, Future[None], Future[None]]] = deque()  # for is_current_async_call_done
        self._calls = 0  # scheduled by schedule_async_call
        self._syncs = itertools.count()
        self.points = FinalizePoints(self._gang, f"{self._key}/points", clock)

    @abc.abstractmethod
    def run(self, request: AsyncRequest) -> Future[None]:
        """Starts the function of a request. Returns when the trainer may change what the request copied.

        Raises:
            TypeError: The call cannot be sent to a worker process.
            CallFailed: The worker does not take calls.
        """

    @abc.abstractmethod
    def close(self, abort: bool = False) -> None:
        """Ends what runs the functions, after the calls have ended. With ``abort`` it ends at once, and they fail."""

    @abc.abstractmethod
    def __del__(self) -> None:
        """Says that no more calls come, without waiting: those that were handed over are finished."""

    def start(self, request: AsyncRequest) -> tuple[Future[None], Future[None]]:
        """Starts a call. Returns its end in this process, and its end in all processes.

        Raises:
            TypeError: The call cannot be sent to a worker process.
            AsyncCallFailed: The worker does not take calls. The other processes are notified.
            ForkedChild: This process was forked from the one that made this object.
        """
        check_not_forked(self._pid, "this caller of asynchronous calls")
        try:
            here = self.run(request)
        except BaseException as error:
            failed: Future[None] = Future()
            failed.set_exception(CallFailed("".join(traceback.format_exception(error))))
            self._ends.add(request.call_idx, failed)
            if isinstance(error, CallFailed):
                raise self.failure(request.call_idx, error) from error
            raise
        return here, self._ends.add(request.call_idx, here)

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Starts a call, for code that uses a caller without a queue. All processes schedule the same calls.

        Raises:
            TypeError, AsyncCallFailed: As ``AsyncCallsQueue.schedule_async_request``.
        """
        request = async_req.freeze()._replace(call_idx=self._calls)
        self._calls += 1  # also if it does not start here: the other processes count it
        here, everywhere = self.start(request)
        self._asked.append((request.call_idx, here, everywhere))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Returns whether the oldest call that was not reported yet has ended in all processes.

        Collective, with the same answer in all processes. If there is no such call, the answer is True.

        Args:
            blocking: True to wait until it has.
            no_dist: True to look at this process only.

        Raises:
            AsyncCallFailed: The call failed in some process. It counts as reported.
        """
        if not self._asked:
            return True
        index, here, everywhere = self._asked[0]
        future = here if no_dist else everywhere
        if not blocking:
            if no_dist and not here.done():
                return False
            if not no_dist and self.points.ask(index + everywhere.done()) <= index:
                return False
        self.wait_all([future])
        self._asked.popleft()
        if not self._asked and not no_dist:
            self.points.end_run()
        if (error := future.exception()) is not None:
            raise self.failure(index, error)
        return True

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Returns whether no process says that its call is still running. Collective; waits for all processes.

        Args:
            is_alive: Whether the call is still running in this process.
        """
        flags = self._gang.gather(
            f"{self._key}/sync/{next(self._syncs)}", str(int(bool(is_alive))), timeout_s=self._timeout_s
        )
        return "1" not in flags

    def wait_all(self, ends: Sequence[Future[None]]) -> int:
        """Waits until all of these have ended, well or not. Returns their number.

        Raises:
            AsyncCallFailed: One has not ended in time.
        """
        pending = futures.wait(ends, timeout=self._timeout_s).not_done
        # A meeting that began a moment later is about to name who is missing.
        if pending and self._gang.process_count > 1:
            pending = futures.wait(ends, timeout=min(self._timeout_s, _NAMED_S)).not_done
        if pending:
            raise AsyncCallFailed(
                f"{len(pending)} of {len(ends)} asynchronous calls have not ended within {self._timeout_s:g} s in all "
                "processes; they continue"
            )
        return len(ends)

    def failure(self, index: int, error: BaseException) -> AsyncCallFailed:
        """Returns the error of a call, with the processes where it failed."""
        if isinstance(error, AsyncCallFailed):
            return error
        return AsyncCallFailed.of_processes(index, {self._gang.process_index: str(error)})


def _all_processes() -> ProcessGroup:
    """Returns all processes of the JAX cluster. Does not load JAX: where it is not loaded, there is no cluster."""
    if "jax" not in sys.modules:
        return SingleProcess()
    from gracepoint.multihost.utilities import joined_cluster, process_count

    return SingleProcess() if process_count() == 1 else joined_cluster().gang


_Calls = queue.SimpleQueue[tuple[AsyncRequest, tuple[object, ...], Future[None]] | None]


class ThreadAsyncCaller(AsyncCaller):
    """Runs functions in a daemon thread of this process. They share its interpreter with the training thread.

    Arguments are not copied: ``preload_fn`` must copy what the training changes.
    """

    _work: _Calls | None = None

    def run(self, request: AsyncRequest) -> Future[None]:
        arguments = request.preloaded_args()
        future: Future[None] = Future()
        if request.async_fn is None:
            future.set_result(None)
            return future
        if self._work is None:
            work: _Calls = queue.SimpleQueue()
            thread = threading.Thread(
                target=_run_all, args=(work, self._nice), name="gracepoint-async-calls", daemon=True
            )
            thread.start()  # if the system has no thread, this call fails, and the next one tries again
            self._work, self._thread = work, thread
        self._work.put((request, arguments, future))
        return future

    def close(self, abort: bool = False) -> None:
        """As ``AsyncCaller.close``. A function that runs cannot be interrupted: with ``abort`` nobody waits for it."""
        if self._work is None:
            return
        work, self._work = self._work, None
        if abort:
            with contextlib.suppress(queue.Empty):
                while (item := work.get_nowait()) is not None:
                    item[2].set_exception(CallFailed("the call was aborted"))
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
        request, arguments, future = item
        assert request.async_fn is not None
        try:
            request.async_fn(*arguments, **request.async_fn_kwargs)
        except BaseException:  # noqa: BLE001 - passed to all processes; SystemExit must not end the thread silently
            future.set_exception(CallFailed(traceback.format_exc()))
        else:
            future.set_result(None)
        del item, request, arguments, future
