"""Completes calls in all processes together: when a call has ended everywhere, and how many are finalized at one point.

``CallCompletion`` has one daemon thread that meets the other processes: for each call, in the order of scheduling, it
waits until the call has ended here, and then gathers the outcome of all processes. The future that ``add`` returned is
done then. The thread ends after the last call that was added. A job of one process has no thread.

``FinalizePoints`` belongs to the training thread. Every process asks it at the same points of the training loop, as
long as calls are active, how many calls to finalize. A call ends at different moments in different processes, so
process 0 decides, and no process waits for another: the questions are counted and divided into blocks, whose plans
process 0 publishes one block ahead (``PlansAhead``). A plan says how many questions the block has, and how many calls
are finalized from its first question on. A run of questions begins when a call is scheduled and none is active, and
ends when none is active any more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from gracepoint.errors import AsyncCallFailed, BarrierError, GracepointError
from gracepoint.process_group import PlansAhead, ProcessGroup
from gracepoint.threads import DaemonThread

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
            RuntimeError: The system has no thread for it. The other processes are notified, where the call fails.
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
                outcome = json.dumps(_error(here)[-_TEXT:])  # waits as long as the call runs; its caller can end it
                outcomes = self._gang.gather(self._ended_key(index), outcome, timeout_s=self._timeout_s)
            except Exception as error:  # noqa: BLE001 - the call fails, and the thread continues with the next
                self._tell_others(index, error)
                everywhere.set_exception(_not_all(index, error))
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


def _error(future: Future[None]) -> str:
    error = future.exception()
    return str(error) or type(error).__name__ if error is not None else ""


def _complete(everywhere: Future[None], index: int, texts: dict[int, str]) -> None:
    if texts:
        everywhere.set_exception(AsyncCallFailed.of_processes(index, texts))
    else:
        everywhere.set_result(None)


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
