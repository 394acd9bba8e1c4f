"""Another process reports the end of a preemption if process 0, which reports for all, does not run.

Process 0 may be stopped, or hang in C code that holds Python's interpreter lock. In the second case the coordination
service that it hosts still answers, as the service needs no Python. So the others ask process 0 itself: they set a key,
and a thread of process 0 that waits for this key sets another one. If process 0 does not answer in time, the first
process that has found that out reports for all. If the store does not answer either, each of them reports.

At most ``_MOST_ASK`` of the others ask, evenly spread over all processes: thousands of requests within the time for an
answer would keep the store from answering.

All threads are daemons:

* "gracepoint-answers", in process 0: answers. It begins with the freeze. It ends with the first question, shortly after
  the deadline, or with ``close``. It must end before the interpreter does, as it waits in the store's C++ code. If
  process 0 has reported the end by then, its answer stays: the others may ask later.
* "gracepoint-asks-primary", in the others: asks. The store may never answer; the thread then ends with the process.
* "gracepoint-substitute": waits for the answer and reports. In process 0, it says that process 0 itself reports.

``_lock`` guards ``_question``. The agreement's reading thread calls ``opened``. The training thread calls ``close``
once the reading thread has ended. Any thread may call everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable

from gracepoint.errors import GracepointError
from gracepoint.multihost import KeyExists, KeyTimeout, KeyValueStore
from gracepoint.multihost.store import Pods, named
from gracepoint.preemption.forecast import TimeBudget
from gracepoint.threads import DaemonThread, NoThread, start_thread

logger = logging.getLogger(__name__)

#: Seconds for the question and its answer. At least ``_LEAST_S``, and at least ``_PART`` of the reserve, as the report
#: needs the rest. If the deadline is further away, up to ``most_s``, which is less than a process has to exit once its
#: exit code is decided (``exit.LINGER_S``).
_PART, _LEAST_S = 0.35, 0.2
#: The part of that time in which process 0 must answer. The rest is for the store.
_ANSWER_PART = 0.8
_MOST_ASK = 32
_LONGEST_S = 3600.0
_JOIN_S = 1.0


@dataclasses.dataclass
class _Question:
    epoch: int
    limit_s: float
    until_s: float  # monotonic
    asked: str = "process 0"  # who was asked, with its pod once that is known
    answered: threading.Event = dataclasses.field(default_factory=threading.Event)
    reason: str = ""  # known once ``answered`` is set


class Substitute:
    """Finds out whether process 0 runs, and reports in its place if it does not.

    Args:
        store: The key-value store that all processes share.
        process_index: This process.
        process_count: How many processes train together.
        pods: Names of the pods by process index.
        left: How much time is left.
        most_s: How many seconds process 0 has for its answer at most.
        late_s: How many seconds after the deadline process 0 still answers.

    Attributes:
        is_primary: True in process 0.
        asks: True in the processes that report in place of process 0 if it does not answer.
    """

    def __init__(
        self,
        store: KeyValueStore,
        process_index: int,
        process_count: int,
        pods: Pods,
        time_left: TimeBudget,
        most_s: float = 1.5,
        late_s: float = 5.0,
    ) -> None:
        self._most_s = most_s
        self._late_s = late_s
        self.is_primary = process_index == 0
        self.asks = process_index in range(1, process_count, max(1, -(-(process_count - 1) // _MOST_ASK)))
        self._store = store
        self._me = process_index
        self._pods = pods
        self._left = time_left
        self._lock = threading.Lock()
        self._question: _Question | None = None
        self._answering: tuple[threading.Thread, threading.Event, str] | None = None
        self._ended: int | None = None  # the last epoch of which this process has reported the end
        self._reporting: DaemonThread | None = None

    # Process 0.

    def opened(self, epoch: int) -> None:
        """Has process 0 answer from now on. Does nothing in the others. To be called when an epoch opens."""
        if not self.is_primary:
            return
        self._forget_answer()  # to the question of the epoch before, which was a drill
        closing, folder = threading.Event(), _folder(epoch)
        thread = threading.Thread(target=self._answer, args=(epoch, closing), name="gracepoint-answers", daemon=True)
        try:
            start_thread(thread)
        except NoThread as error:  # a limit on threads: the save, and the report of its end, need none of them
            logger.warning("process 0 will not answer if the others ask whether it runs error=%s", error)
        else:
            self._answering = (thread, closing, folder)

    def ended(self, epoch: int) -> None:
        """Notes that this process has reported the end of an epoch. Process 0 then answers even after ``close``."""
        self._ended = epoch

    def _forget_answer(self) -> None:
        before = self._answering
        self.close()
        if before is not None:
            with contextlib.suppress(GracepointError):  # the store cannot be reached
                self._store.delete_folder(before[2])

    def close(self) -> None:
        """Ends the thread of process 0 that answers. Safe to repeat."""
        if self._answering is None:
            return
        thread, closing, folder = self._answering
        self._answering = None
        if thread.is_alive():
            closing.set()
            with contextlib.suppress(GracepointError):  # it was asked, or the store cannot be reached
                self._store.set(f"{folder}/asked", "")
            thread.join(_JOIN_S)

    def _answer(self, epoch: int, closing: threading.Event) -> None:
        folder = _folder(epoch)
        try:
            while not self._is_asked(folder):
                if not 0 < self._left.until_deadline_s() < math.inf:
                    return
            if closing.is_set() and self._ended != epoch:
                self._store.delete_folder(folder)
            else:
                self._store.set(f"{folder}/answered", "")
        except GracepointError as error:
            logger.info("process 0 cannot say that it runs error=%s", error)

    def _is_asked(self, folder: str) -> bool:
        """Waits for a question. Returns False if none has come until shortly after the deadline, which may move."""
        wait_s = min(max(0.0, self._left.until_deadline_s()), _LONGEST_S) + self._late_s
        try:
            self._store.get(f"{folder}/asked", timeout_s=wait_s)
        except KeyTimeout:
            return False
        return True

    # The others.

    def ask(self, epoch: int) -> None:
        """Begins to ask process 0 whether it runs, without a wait. Does nothing if it was asked in this epoch."""
        if self.asks and epoch >= 0:
            self._asked(epoch)

    def reason(self, epoch: int) -> str:
        """Returns why this process reports the end of an epoch in place of process 0. Empty: it does not.

        Asks process 0 unless it was asked before, and waits for its answer for a fraction of a second.

        Args:
            epoch: The epoch's number. -1 if the processes could not agree: then process 0 alone reports.
        """
        if not self.asks or epoch < 0:
            return ""
        question = self._asked(epoch)
        if question.answered.wait(max(0.0, question.until_s - time.monotonic())):
            return question.reason
        return self._in_words(f"{question.asked} does not answer, nor does the coordination service")

    def _asked(self, epoch: int) -> _Question:
        with self._lock:
            question = self._question
            if question is None or question.epoch != epoch:
                limit_s = self._limit_s()
                self._question = question = _Question(epoch, limit_s, time.monotonic() + limit_s)
                with contextlib.suppress(NoThread):
                    start_thread(
                        threading.Thread(
                            target=self._ask, args=(question,), name="gracepoint-asks-primary", daemon=True
                        )
                    )
            return question

    def _limit_s(self) -> float:
        reserve_s = self._left.reserve_s
        most_s = min(self._most_s, (self._left.until_deadline_s() - reserve_s) / 2)
        return max(_LEAST_S, _PART * reserve_s, most_s)

    def _ask(self, question: _Question) -> None:
        try:
            question.asked = named([0], self._pods)
            question.reason = self._found(question)
        except GracepointError as error:
            question.reason = self._in_words(f"{question.asked} cannot be asked whether it runs ({error})")
        question.answered.set()

    def _found(self, question: _Question) -> str:
        folder = _folder(question.epoch)
        with contextlib.suppress(KeyExists):
            self._store.set(f"{folder}/asked", "")
        try:
            self._store.get(f"{folder}/answered", timeout_s=_ANSWER_PART * question.limit_s)
        except KeyTimeout:
            try:
                self._store.set(f"{folder}/reporter", str(self._me))
            except KeyExists:
                return ""  # another process was faster
            reason = "it has ended, is stopped, or hangs in code that holds Python's interpreter lock"
            return self._in_words(f"{question.asked} does not answer: {reason}")
        return ""

    def _in_words(self, reason: str) -> str:
        return f"{reason}; process {self._me} reports in its place"

    # All processes.

    def report(self, epoch: int, send: Callable[[str], None]) -> None:
        """Has the end of an epoch reported in any case. Does not wait.

        Args:
            epoch: The epoch's number, as ``reason``.
            send: Reports the end. Called by another thread with the reason if this process is to report in place of
                process 0.
        """

        def report() -> None:
            if self.is_primary:
                with contextlib.suppress(GracepointError):  # it was asked, or the store cannot be reached
                    self._store.set(f"{_folder(epoch)}/asked", "")
            elif reason := self.reason(epoch):
                logger.warning("this process reports the end of the preemption reason=%s", reason)
                send(reason)

        if (self.is_primary or self.asks) and epoch >= 0:
            with contextlib.suppress(NoThread):
                self._reporting = DaemonThread(report, "gracepoint-substitute")
                self._reporting.start()

    def wait(self, timeout_s: float) -> None:
        """Waits until ``send`` has been called, if it is to be called."""
        if self._reporting is not None:
            self._reporting.wait(timeout_s)


def _folder(epoch: int) -> str:
    return f"epoch/{epoch}/primary"
