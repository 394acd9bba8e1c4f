"""Finds out which process holds up the others when the time of a preemption is over, within a fraction of a second.

Every process says in the store where it is. Process 0 then reads what all have said. A process that is stopped says
nothing. If the store does not answer, process 0, which hosts it, is suspected itself.

``ask`` starts one thread ("gracepoint-suspects", daemon), which may wait for a store that never answers. It then ends
with the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

from gracepoint.errors import GracepointError
from gracepoint.multihost.naming import Pods
from gracepoint.multihost.stalls import StallBoard, StalledAt, Suspicion, host_is_silent
from gracepoint.preemption.stacks import stack_of
from gracepoint.preemption.stall_detector import Activity

#: How long process 0 waits for what the others say. All deadlines are the same but for the time that messages take, and
#: process 0 comes a moment later than the others.
_OTHERS_S = 0.15
#: How long all of this may take.
_ANSWER_S = 0.35
#: Lines of a stack in a message: the innermost frame.
_LINES = 2


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
    """

    def __init__(self, board: StallBoard, activities: Callable[[], Sequence[Activity]], pods: Pods) -> None:
        self._board = board
        self._activities = activities
        self._pods = pods

    def ask(self, epoch: int) -> Callable[[], HeldUp]:
        """Begins to find out. Returns a function that waits for the answer, for a fraction of a second at most.

        Args:
            epoch: Number of the preemption, the same in all processes.
        """
        training = self._activities()[0]
        here = StalledAt(training.stage, training.order, training.reached, stack_of(training.thread_id))
        part, answers = f"preemption {epoch}", queue.SimpleQueue[HeldUp]()

        def find() -> None:
            try:
                self._board.post(part, here)
                time.sleep(_OTHERS_S)
                found = self._board.suspicion(part, self._pods)
            except GracepointError as error:
                answers.put(HeldUp(host_is_silent(self._pods, f"cannot be reached: {error}").why, host_answers=False))
            else:
                answers.put(HeldUp(_in_words(found)))

        with contextlib.suppress(RuntimeError):  # too late in the interpreter's life for a thread
            threading.Thread(target=find, name="gracepoint-suspects", daemon=True).start()
        until_s = time.monotonic() + _ANSWER_S

        def answer() -> HeldUp:
            try:
                return answers.get(timeout=max(0.001, until_s - time.monotonic()))
            except queue.Empty:
                return HeldUp(host_is_silent(self._pods).why, host_answers=False)

        return answer


def _in_words(found: Suspicion) -> str:
    at = [line.strip() for line in found.stack.splitlines() if line.strip()][-_LINES:]
    return f"{found.why}; it is at: {' '.join(at)}" if at else found.why
