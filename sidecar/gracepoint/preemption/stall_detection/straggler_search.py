"""Finds out which process holds up the others when the time of a preemption is over, within a fraction of a second.

Every process says in the store where it is. Process 0, which reports for all, then reads what they have said. If it
does not run, its substitute does that (``substitute``). A process that is stopped says nothing. If the store does not
answer, the process that hosts it is suspected: process 0, as a rule.

``ask`` starts one thread ("gracepoint-suspects", daemon). It may wait for a store that never answers, or for a file
system that hangs, as a stack has lines of source files. It then ends with the process.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from gracepoint.errors import GracepointError
from gracepoint.multihost.coordination.stalls import StallBoard, StalledAt, Suspicion, host_is_silent
from gracepoint.multihost.naming import Pods
from gracepoint.preemption.reporting.substitute import Substitute
from gracepoint.preemption.stall_detection.stacks import stack_of
from gracepoint.preemption.stall_detection.stall_detector import Activity

log = logging.getLogger(__name__)

#: How long process 0 waits for what the others say. The deadline is the same in all processes, except for the time that
#: messages take, and process 0 comes a moment later than the others.
_OTHERS_PART, _OTHERS_S = 0.4, 0.14
#: How long all of this may take. The substitute of process 0 needs most of it.
_ANSWER_S = 0.45
#: Lines of a stack in a message, and their characters: the innermost frame.
_LINES = 2
_CHARACTERS = 300


class StragglerSearch:
    """See the module.

    Args:
        board: Where the processes say where they are.
        activities: Returns what the parts of this process do; the training is the first one.
        pods: Names of the pods by process index.
        substitute: Knows whether this process reports in place of process 0.
    """

    def __init__(
        self, board: StallBoard, activities: Callable[[], Sequence[Activity]], pods: Pods, substitute: Substitute
    ) -> None:
        self._board = board
        self._activities = activities
        self._pods = pods
        self._substitute = substitute

    def ask(self, epoch: int, most_s: float = _ANSWER_S) -> Callable[[], str]:
        """Begins to find out, without a wait. Returns a function that waits for the answer.

        The answer is the process, its pod and where it is, in words. It is empty in processes that do not report, and
        if no process is suspected.

        Args:
            epoch: Number of the preemption, the same in all processes.
            most_s: Seconds that it may take, counted from now. It never takes longer than ``_ANSWER_S``.
        """
        answers = queue.SimpleQueue[str]()
        within_s = min(most_s, _ANSWER_S)
        until_s = time.monotonic() + within_s
        asks_primary = threading.Event()

        def find() -> None:
            try:
                self._say(f"preemption {epoch}")
                if not self._substitute.is_primary:
                    asks_primary.set()
                answers.put(self._find(epoch, min(_OTHERS_PART * within_s, _OTHERS_S)))
            except GracepointError as error:
                answers.put(self._without_answer(f"cannot be reached: {error}"))
            except Exception as error:
                answers.put("")
                log.exception("could not find out which process holds up the others error=%s", error)

        with contextlib.suppress(RuntimeError):  # too late in the interpreter's life for a thread
            threading.Thread(target=find, name="gracepoint-suspects", daemon=True).start()

        def answer() -> str:
            try:
                return answers.get(timeout=max(0.001, until_s - time.monotonic()))
            except queue.Empty:
                return "" if asks_primary.is_set() else self._without_answer("does not answer")

        return answer

    def _say(self, part: str) -> None:
        training = self._activities()[0]
        stack = stack_of(training.thread_id)
        self._board.say(part, StalledAt(training.stage, training.order, training.reached, stack))

    def _find(self, epoch: int, others_s: float) -> str:
        if self._substitute.is_primary:
            time.sleep(others_s)
        elif not self._substitute.reason(epoch):
            return ""  # one process reads what all have said: if a thousand did, the store would be too slow
        return _in_words(self._board.suspicion(f"preemption {epoch}", self._pods))

    def _without_answer(self, why: str) -> str:
        if self._board.is_host:
            return ""  # this process is not stopped, whatever keeps its store from answering
        return host_is_silent(self._board.host, self._pods, why).why


def _in_words(found: Suspicion) -> str:
    at = " ".join([line.strip() for line in found.stack.splitlines() if line.strip()][-_LINES:])
    return f"{found.why}; it is at: {at[:_CHARACTERS]}" if at else found.why
