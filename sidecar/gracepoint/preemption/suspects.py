"""Finds out which process holds up the others when the time of a preemption is over, within a fraction of a second.

Every process says in the store where it is. Process 0, which reports for all, then reads what they have said. A process
that is stopped says nothing. If the store does not answer another process, process 0, which hosts it, is suspected
itself.

``ask`` starts one thread ("gracepoint-suspects", daemon). It may wait for a store that never answers, or for a file
system that hangs, as a stack has lines of source files. It then ends with the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from gracepoint.errors import GracepointError
from gracepoint.multihost.naming import Pods
from gracepoint.multihost.stalls import StallBoard, StalledAt, Suspicion, host_is_silent
from gracepoint.preemption.stacks import stack_of
from gracepoint.preemption.stall_detector import Activity

log = logging.getLogger(__name__)

#: The part of the time that process 0 waits for what the others say. All deadlines are the same but for the time that
#: messages take, and process 0 comes a moment later than the others.
_OTHERS_PART = 0.4
#: How long all of this may take.
_ANSWER_S = 0.35
#: Lines of a stack in a message, and their characters: the innermost frame.
_LINES = 2
_CHARACTERS = 300


@dataclasses.dataclass(frozen=True)
class HeldUp:
    """What is known of the process that holds up the others.

    Attributes:
        why: The process, its pod and where it is, in words.
        host_answers: False if process 0 does not answer, so that another process has to report.
    """

    why: str
    host_answers: bool = True


class Suspects:
    """See the module.

    Args:
        board: Where the processes say where they are.
        activities: Returns what the parts of this process do; the training is the first one.
        pods: Names of the pods by process index.
        reads: True in process 0.
    """

    def __init__(
        self, board: StallBoard, activities: Callable[[], Sequence[Activity]], pods: Pods, *, reads: bool
    ) -> None:
        self._board = board
        self._activities = activities
        self._pods = pods
        self._reads = reads

    def ask(self, epoch: int, most_s: float = _ANSWER_S) -> Callable[[], HeldUp]:
        """Begins to find out, without a wait. Returns a function that waits for the answer.

        Args:
            epoch: Number of the preemption, the same in all processes.
            most_s: Seconds that it may take, counted from now. It takes a fraction of a second at most.
        """
        answers = queue.SimpleQueue[HeldUp]()
        within_s = min(most_s, _ANSWER_S)
        until_s = time.monotonic() + within_s

        def find() -> None:
            try:
                answers.put(self._find(f"preemption {epoch}", within_s * _OTHERS_PART))
            except GracepointError as error:
                answers.put(self._without_answer(f"cannot be reached: {error}"))
            except Exception as error:
                answers.put(HeldUp(""))
                log.exception("could not find out which process holds up the others error=%s", error)

        with contextlib.suppress(RuntimeError):  # too late in the interpreter's life for a thread
            threading.Thread(target=find, name="gracepoint-suspects", daemon=True).start()

        def answer() -> HeldUp:
            try:
                return answers.get(timeout=max(0.001, until_s - time.monotonic()))
            except queue.Empty:
                return self._without_answer("does not answer")

        return answer

    def _find(self, part: str, others_s: float) -> HeldUp:
        training = self._activities()[0]
        stack = stack_of(training.thread_id)
        self._board.say(part, StalledAt(training.stage, training.order, training.reached, stack))
        if not self._reads:
            return HeldUp("")  # if all read what all have said, a thousand processes would be too slow
        time.sleep(others_s)
        return HeldUp(_in_words(self._board.suspicion(part, self._pods)))

    def _without_answer(self, why: str) -> HeldUp:
        if self._reads:
            return HeldUp("")  # this process is not stopped, whatever keeps its store from answering
        return HeldUp(host_is_silent(self._pods, why).why, host_answers=False)


def _in_words(found: Suspicion) -> str:
    at = " ".join([line.strip() for line in found.stack.splitlines() if line.strip()][-_LINES:])
    return f"{found.why}; it is at: {at[:_CHARACTERS]}" if at else found.why
