"""What all callers share. A caller runs the functions of asynchronous calls in the background.

The training thread owns a caller and calls its methods. The subclasses say what runs the functions. If there are
several training processes, one more thread meets the others (``call_completion``). It ends after the last call.

Callers and calls have the same numbers in all processes, because all processes make the same ones in the same order. So
their keys agree.
"""

from __future__ import annotations

import abc
import itertools
import logging
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future

from gracepoint import machine
from gracepoint.async_calls.call_completion import CallCompletion
from gracepoint.async_calls.finalize_points import FinalizePoints
from gracepoint.async_calls.processes.worker_process import CallFailed
from gracepoint.async_calls.request import AsyncRequest
from gracepoint.errors import AsyncCallFailed
from gracepoint.forks import check_not_forked
from gracepoint.process_group import ProcessGroup, SingleProcess

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
            AsyncCallFailed: The worker does not take calls. The other processes are told.
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
        ended = here if no_dist else everywhere
        if not blocking:
            if no_dist and not here.done():
                return False
            if not no_dist and self.points.ask(index + everywhere.done()) <= index:
                return False
        self.wait_all([ended])
        self._asked.popleft()
        if not self._asked and not no_dist:
            self.points.end_run()
        if (error := ended.exception()) is not None:
            raise self.failure(index, error)
        return True

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Returns whether no process says that its call is still running. Collective; waits for all processes.

        Args:
            is_alive: Whether the call is still running in this process.
        """
        words = self._gang.gather(
            f"{self._key}/sync/{next(self._syncs)}", str(int(bool(is_alive))), timeout_s=self._timeout_s
        )
        return "1" not in words

    def wait_all(self, ends: Sequence[Future[None]]) -> int:
        """Waits until all of these have ended, well or not. Returns their number.

        Raises:
            AsyncCallFailed: One has not ended in time.
        """
        left = futures.wait(ends, timeout=self._timeout_s).not_done
        if left and self._gang.process_count > 1:  # a meeting that began a moment later is about to name who is missing
            left = futures.wait(ends, timeout=min(self._timeout_s, _NAMED_S)).not_done
        if left:
            raise AsyncCallFailed(
                f"{len(left)} of {len(ends)} asynchronous calls have not ended within {self._timeout_s:g} s in all "
                "processes; they go on"
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
    from gracepoint.multihost.all_processes import joined_cluster
    from gracepoint.multihost.utilities import process_count

    return SingleProcess() if process_count() == 1 else joined_cluster().gang
