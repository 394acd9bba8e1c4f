"""Callers run the functions of asynchronous calls in the background: what all of them share, and the one with a thread.

The training thread owns a caller and calls its methods. The subclasses decide what runs the functions:
``ThreadAsyncCaller`` has one daemon thread, which starts with the first call and ends when the caller is closed or
deleted; ``queue`` has those with worker processes. If there are several training processes, one more thread
meets the others (``CallCompletion``). Callers and calls have the same numbers in all
processes, because all processes make the same ones in the same order. So their keys agree.

Any thread may use ``gc_paused``; the module counts its users under a lock.

``CallCompletion`` completes calls in all processes together. Its thread, a daemon, takes them in the order of
scheduling: it waits until the call has ended here, and then gathers the outcome of all processes. What ``add``
returned ends then. The thread ends after the last call that was added. A job of one process has no such thread.

``FinalizePoints`` belongs to the training thread. Every process asks it at the same points of the training loop, as
long as calls are active, how many calls to finalize. A call ends at different moments in different processes, so
process 0 decides, and no process waits for another: the questions are counted and divided into blocks, whose plans
process 0 publishes one block ahead (``PlansAhead``). A plan says how many questions the block has, and how many calls
are finalized from its first question on. A run of questions begins when a call is scheduled and none is active, and
ends when none is active any more.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import itertools
import json
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
from typing import Any, NamedTuple

from gracepoint import machine
from gracepoint.async_calls.worker_process import CallFailed
from gracepoint.errors import AsyncCallFailed, BarrierError, GracepointError
from gracepoint.process_group import PlansAhead, ProcessGroup, SingleProcess
from gracepoint.threads import DaemonThread, Ending, NoThread, check_not_forked, start_thread

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
        self._waiting: deque[tuple[int, Ending, Ending]] = deque()
        self._meeting: DaemonThread | None = None  # takes itself out when it finds nothing to do
        self._lock = threading.Lock()  # of _waiting and _meeting

    def add(self, index: int, here: Ending) -> Ending:
        """Returns the end of call ``index`` in all processes.

        Its error is an ``AsyncCallFailed`` with the error of each process where the call failed.

        Args:
            index: Number of the call, the same in all processes. Calls are added in this order.
            here: Its end in this process.

        Raises:
            RuntimeError: The system has no thread for it. The other processes are notified, where the call fails.
        """
        everywhere = Ending()
        with self._lock:
            self._waiting.append((index, here, everywhere))
        if self._gang.process_count == 1:
            here.then(self._meet_all_done)
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
        except NoThread as error:
            with self._lock:  # the next call is the first one again
                self._waiting.pop()
            self._tell_others(index, error)
            raise

    def _meet_all_done(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not self._waiting[0][1].ended:
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
                here.wait()  # as long as the call runs; its caller can end it
                outcome = json.dumps(_error(here)[-_TEXT:])
                outcomes = self._gang.gather(self._ended_key(index), outcome, timeout_s=self._timeout_s)
            except Exception as error:  # noqa: BLE001 - the call fails, and the thread continues with the next
                self._tell_others(index, error)
                everywhere.end(_not_all(index, error))
                continue
            texts = {process: text for process, outcome in enumerate(outcomes) if (text := json.loads(outcome))}
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
            logger.warning("could not remove the keys of an asynchronous call call=%d error=%s", index, error)


def _error(call: Ending) -> str:
    error = call.error
    return str(error) or type(error).__name__ if error is not None else ""


def _complete(everywhere: Ending, index: int, texts: dict[int, str]) -> None:
    everywhere.end(AsyncCallFailed.of_processes(index, texts) if texts else None)


def _not_all(index: int, error: Exception) -> AsyncCallFailed:
    cause = (
        "did not end in all processes" if isinstance(error, BarrierError) else "could not be followed in all processes"
    )
    failed = AsyncCallFailed(f"call {index} {cause}: {error!r}", index)
    failed.__cause__ = error
    return failed


#: Seconds that a block lasts about, and what is added for each process, because each reads one plan in each block.
_BLOCK_S = 0.25
_BLOCK_S_PER_PROCESS = 0.001


class FinalizePoints:
    """Answers the question "how many calls are finalized by now" alike in all processes.

    Args:
        gang: The processes.
        key: Prefix of the keys of the plans. Nothing else uses it.
        clock: Returns monotonic seconds. Only the clock of process 0 counts.
    """

    def __init__(self, gang: ProcessGroup, key: str, clock: Callable[[], float]) -> None:
        self._gang = gang
        self._key = key
        self._clock = clock
        self._block_s = _BLOCK_S + _BLOCK_S_PER_PROCESS * gang.process_count
        self._runs = 0
        self._question: int
        self._questions: int
        self._finalized: int
        self._begin_run()

    def ask(self, ready: int) -> int:
        """Returns the number of calls, counted from the first of the queue, that are to be finalized by now.

        Collective: every process asks at the same points.

        Args:
            ready: Calls that have ended in all processes, as far as this process knows. Only process 0's counts.

        Raises:
            BarrierTimeout: Process 0 is so far behind that it has not published the next plan in time.
        """
        if self._gang.process_count == 1:
            return ready
        if self._question == self._questions:
            before, self._question = self._questions, 0
            plan = self._plans.enter(lambda plan: json.dumps((self._questions_of_next(plan, before), ready)))
            self._questions, self._finalized = map(int, json.loads(plan))
        self._question += 1
        return self._finalized

    def end_run(self) -> None:
        """Says that no call is active any more. All processes say so at the same point."""
        self._plans.end()
        self._runs += 1
        self._begin_run()

    def _begin_run(self) -> None:
        self._plans = PlansAhead(self._gang, f"{self._key}/{self._runs}", json.dumps((1, 0)))
        self._question = 0  # asked so far in the block
        self._questions = 0  # length of the block
        self._finalized = 0
        self._entered_s: float | None = None  # used by process 0 only

    def _questions_of_next(self, plan: str, before: int) -> int:
        """Returns the length of the block after the one with ``plan``, from the speed in the block before."""
        now_s = self._clock()
        entered_s, self._entered_s = self._entered_s, now_s
        if entered_s is None:
            return 1
        question_s = max((now_s - entered_s) / before, 1e-6)
        return min(max(1, round(self._block_s / question_s)), 2 * int(json.loads(plan)[0]))


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
        self._asked: deque[tuple[int, Ending, Ending]] = deque()  # for is_current_async_call_done
        self._calls = 0  # scheduled by schedule_async_call
        self._syncs = itertools.count()
        self.points = FinalizePoints(self._gang, f"{self._key}/points", clock)

    @abc.abstractmethod
    def run(self, request: AsyncRequest) -> Ending:
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

    def start(self, request: AsyncRequest) -> tuple[Ending, Ending]:
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
            failed = Ending()
            failed.end(CallFailed("".join(traceback.format_exception(error))))
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
        end = here if no_dist else everywhere
        if not blocking:
            if no_dist and not here.ended:
                return False
            if not no_dist and self.points.ask(index + everywhere.ended) <= index:
                return False
        self.wait_all([end])
        self._asked.popleft()
        if not self._asked and not no_dist:
            self.points.end_run()
        if end.error is not None:
            raise self.failure(index, end.error)
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

    def wait_all(self, ends: Sequence[Ending]) -> int:
        """Waits until all of these have ended, well or not. Returns their number.

        Raises:
            AsyncCallFailed: One has not ended in time.
        """
        pending = _pending(ends, self._timeout_s)
        # A meeting that began a moment later is about to name who is missing.
        if pending and self._gang.process_count > 1:
            pending = _pending(ends, min(self._timeout_s, _NAMED_S))
        if pending:
            raise AsyncCallFailed(
                f"{pending} of {len(ends)} asynchronous calls have not ended within {self._timeout_s:g} s in all "
                "processes; they continue"
            )
        return len(ends)

    def failure(self, index: int, error: BaseException) -> AsyncCallFailed:
        """Returns the error of a call, with the processes where it failed."""
        if isinstance(error, AsyncCallFailed):
            return error
        return AsyncCallFailed.of_processes(index, {self._gang.process_index: str(error)})


def _pending(ends: Sequence[Ending], timeout_s: float) -> int:
    """Waits for all of them, for ``timeout_s`` seconds at most. Returns how many have not ended."""
    until_s = time.monotonic() + timeout_s
    return sum(not end.wait(until_s - time.monotonic()) for end in ends)


def _all_processes() -> ProcessGroup:
    """Returns all processes of the JAX cluster. Does not load JAX: where it is not loaded, there is no cluster."""
    if "jax" not in sys.modules:
        return SingleProcess()
    from gracepoint.multihost.utilities import joined_cluster, process_count

    return SingleProcess() if process_count() == 1 else joined_cluster().gang


_Calls = queue.SimpleQueue[tuple[AsyncRequest, tuple[object, ...], Ending] | None]


class ThreadAsyncCaller(AsyncCaller):
    """Runs functions in a daemon thread of this process. They share its interpreter with the training thread.

    Arguments are not copied: ``preload_fn`` must copy what the training changes.
    """

    _work: _Calls | None = None

    def run(self, request: AsyncRequest) -> Ending:
        arguments = request.preloaded_args()
        call = Ending()
        if request.async_fn is None:
            call.end()
            return call
        if self._work is None:
            work: _Calls = queue.SimpleQueue()
            runs = threading.Thread(
                target=_run_all, args=(work, self._nice), name="gracepoint-async-calls", daemon=True
            )
            start_thread(runs)  # if the system has no thread, this call fails, and the next one tries again
            self._work, self._thread = work, runs
        self._work.put((request, arguments, call))
        return call

    def close(self, abort: bool = False) -> None:
        """As ``AsyncCaller.close``. A function that runs cannot be interrupted: with ``abort`` nobody waits for it."""
        if self._work is None:
            return
        work, self._work = self._work, None
        if abort:
            with contextlib.suppress(queue.Empty):
                while (item := work.get_nowait()) is not None:
                    item[2].end(CallFailed("the call was aborted"))
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
        request, arguments, call = item
        assert request.async_fn is not None
        try:
            request.async_fn(*arguments, **request.async_fn_kwargs)
        except BaseException:  # noqa: BLE001 - passed to all processes; SystemExit must not end the thread silently
            call.end(CallFailed(traceback.format_exc()))
        else:
            call.end()
        del item, request, arguments, call
