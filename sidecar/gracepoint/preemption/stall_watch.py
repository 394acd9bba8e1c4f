"""Says when this process makes no progress: in its log, to the other processes, and to the operator.

``AttachWatch`` does so until the processes have met and a session is open, ``StallWatch`` from then on. A preemption's
end asks, too (``StragglerSearch``). One detector decides what a stall is (``stall_detector``); one report says it.

* The **stall thread** ("gracepoint-stalls", daemon) looks every few seconds. It owns the detectors. That of ``attach``
  ends with ``attach``, that of the session with ``stop``.
* ``StallWatch`` reports each stall in a separate thread ("gracepoint-stall", daemon): it waits for the other processes,
  while the stall thread looks on. They end within half a minute.
* Each asks the store in one more thread ("gracepoint-stall-store"), as the store may not answer: process 0, which hosts
  it, may be the one that is stopped. One that gets no answer is left behind.

The training thread is not involved: a sync point costs nothing more. What follows from a stall is a report to the
operator and, if the settings say so, the end of this process (``StallReports``, which those threads call).

``StragglerSearch`` finds out which process holds up the others when the time of a preemption is over, within a
fraction of a second.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gracepoint import machine, trace
from gracepoint.errors import GracepointError
from gracepoint.multihost.stalls import StallBoard, StalledAt, Suspicion, host_is_silent
from gracepoint.multihost.store import Pods, named, pods_of
from gracepoint.preemption import trainer_watch
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.stall_detector import (
    Activity,
    StallDetector,
    Stalled,
    dump_all_stacks,
    log_stall,
    look_every_s,
    stack_of,
)
from gracepoint.preemption.substitute import Substitute
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.preemption.trainer_watch import SharedHeartbeat
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.receivers import Mailbox, Operator
from gracepoint.settings import Settings
from gracepoint.threads import NoThread, ask_in_thread, start_thread
from gracepoint.wire.names import STALL_RESTART, STALLED_EXIT_CODE

if TYPE_CHECKING:
    from gracepoint.checkpoint.saving.executor import SaveExecutor

logger = logging.getLogger(__name__)

#: How long the process that reports waits for the others to say that they make no progress: they reach their limits
#: within a look and a step of each other.
_OTHERS_S = 10.0
#: How long the store may take to answer each of two questions. With the above, a stall is reported within 30 s.
_STORE_S = 7.0
_JOIN_S = 1.0


class StallThread:
    """Calls ``look`` every few seconds until ``stop``. An error of a look is logged, and the next one follows.

    Args:
        look: Looks once.
        every_s: Seconds between two looks.
        end: Called by the thread when it ends.

    Attributes:
        stopped: Set once ``stop`` was called.
    """

    def __init__(self, look: Callable[[], None], every_s: float, end: Callable[[], None]) -> None:
        self._look = look
        self._every_s = every_s
        self._end = end
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gracepoint-stalls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Safe to repeat."""
        self.stopped.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self.stopped.wait(self._every_s):
            try:
                self._look()
            except Exception as error:
                logger.exception("could not look for stalls error=%s", error)
        self._end()


#: After so many seconds in one stage, the log says for whom this process waits.
_SLOW_S = 30.0
#: How long the store may take to answer. Shorter than the gap between two looks from which the detectors conclude that
#: this process was stopped.
_ATTACH_STORE_S = 5.0
#: How long the last lines of the log may take before this process exits.
_LAST_WORDS_S = 1.0
_TOLD_S = 10.0


class AttachWatch:
    """Watches ``attach``. Used as a context manager in the thread that calls ``attach``, which calls everything here.

    Args:
        settings: The limit, what follows from it, and where the operator is.
        operator: Opens a connection to the operator. None: by the settings.
        leave: Ends this process with an exit code.
        slow_s: Seconds in one stage after which the log says for whom this process waits.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        operator: Callable[[], Operator | None] | None = None,
        leave: Callable[[int], None] = os._exit,
        slow_s: float = _SLOW_S,
    ) -> None:
        self._settings = settings
        self._operator = operator or functools.partial(Operator.known_to, settings, time.monotonic)
        self._leave = leave
        self._session = secrets.token_hex(8)
        self._thread_id = threading.get_ident()
        self._stage = ""
        self._may_last = False
        self._tries = 0  # attempts at what is waited for: each is progress
        self._gang: ProcessGroup | None = None
        self._pods: Pods = ()
        self._host = 0
        self._reported = False  # whether the operator believes that attach makes no progress
        self._thread: StallThread | None = None
        if settings.stall_after_s > 0:
            every_s = look_every_s(settings.stall_after_s, slow_s)
            self._slow = StallDetector(slow_s, every_s)
            self._stalls = StallDetector(settings.stall_after_s, every_s)
            self._thread = StallThread(self._look, every_s, self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._reported = False  # attach has failed, so nothing reports to the operator that it continues
        if self._thread is not None:
            self._thread.stop()

    @contextlib.contextmanager
    def at(self, stage: str, *, may_last: bool = False) -> Iterator[None]:
        """Names what ``attach`` does within the block.

        Args:
            stage: As text.
            may_last: True if it waits for what is not there, such as a pod without a node. That is no stall.
        """
        before = self._stage, self._may_last
        self._stage, self._may_last = stage, may_last
        try:
            with trace.span(stage):
                yield
        finally:
            self._stage, self._may_last = before

    def goes_on(self) -> None:
        """Says that the stage is not stuck, though it lasts."""
        self._tries += 1

    def met(self, gang: ProcessGroup, pods: Pods = (), host: int = 0) -> None:
        """Says who the processes are. From now on it is known for whom this one waits.

        Args:
            gang: The processes.
            pods: Names of their pods.
            host: Index of the one that hosts the store.
        """
        self._gang, self._pods, self._host = gang, pods, host

    def _end(self) -> None:
        if self._reported:
            self._report_over()

    def _look(self) -> None:
        now_s, cpu_s, stage = time.monotonic(), time.process_time(), self._stage
        # The start of JAX's backend is a part of the meeting, and computes.
        doing = (
            [Activity("attach", stage, (stage, self._tries), thread_id=self._thread_id, computes=True)] if stage else []
        )
        for slow in self._slow.look(now_s, cpu_s, doing).stalled:
            logger.warning("attach waits stage=%s seconds=%.0f %s", stage, slow.for_s, self._whom()[1])
        changes = self._stalls.look(now_s, cpu_s, [] if self._may_last else doing)
        if changes.over and self._reported:
            self._report_over()
        for stalled in changes.stalled:
            self._stalled(stalled)

    def _stalled(self, stalled: Stalled) -> None:
        stack = stack_of(self._thread_id)
        awaited, reason = self._whom()
        stage = stalled.activity.stage
        log_stall(stalled, stack, f"suspects={awaited} {reason}")
        dump_all_stacks()
        if self._stage != stage:
            return  # it continued while the store was asked
        if self._is_first_to_report(awaited):
            self._reported = True
            try:
                pods = pods_of(awaited or [], self._pods)
                self._report(
                    lambda reporter: reporter.stall(stage, 0, stalled.for_s, awaited or [], reason, stack, pods)
                )
            except GracepointError as error:
                logger.warning("could not reach the operator error=%s", error)
        if self._settings.stall_action == STALL_RESTART:
            logger.error("this process exits, so that the job starts again reason=no progress in %s", stage)
            with contextlib.suppress(Exception):  # a thread that is stuck may hold the lock of a stream
                ask_in_thread(machine.flush_streams, "gracepoint-last-words", _LAST_WORDS_S)
            self._leave(STALLED_EXIT_CODE)

    def _whom(self) -> tuple[list[int] | None, str]:
        """Returns for which processes this one waits, and that as text. None if it is not known."""
        gang = self._gang
        if gang is None:
            return None, "this process does not know the others yet"
        try:
            awaited = ask_in_thread(gang.awaited, "gracepoint-stall-store", _ATTACH_STORE_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, the stall is reported and ends the process
            logger.info("the store could not be asked for whom this process waits error=%s", error)
            return [self._host], host_is_silent(self._host, self._pods).why
        if not awaited:
            return [], "this process waits for no other"
        return awaited, f"this process waits for {named(awaited, self._pods)}"

    def _is_first_to_report(self, awaited: list[int] | None) -> bool:
        """Returns whether this process reports to the operator for all: the first one of those that wait."""
        if self._gang is None:  # nobody is known yet: process 0 waits for another one, or process 1 for process 0
            return self._settings.process_count is None or self._settings.process_id in (0, 1)
        waiting = (index for index in range(self._gang.process_count) if index not in (awaited or []))
        return not awaited or self._gang.process_index == next(waiting, 0)

    def _report_over(self) -> None:
        self._reported = False
        self._report(lambda reporter: reporter.stall_over("attach", 0))

    def _report(self, say: Callable[[Reporter], None]) -> None:
        """Has a reporter made for this one message say it: the session, which has the connection, is not open yet."""
        operator = self._operator()
        sender = None if operator is None else operator.sender
        mailbox, time_spent = Mailbox(time.monotonic), TimeSpent(time.monotonic)
        say(Reporter(sender, self._settings, self._session, SingleProcess(), mailbox, time_spent))
        if operator is not None:
            operator.sender.flush(_TOLD_S)
            operator.close()


class StallWatch:
    """Watches a session.

    Args:
        limit_s: Seconds without progress after which a part of the process is stalled.
        activities: Returns what the parts of the process do; the training is the first one.
        board: Where the processes say that they make no progress.
        reports: What follows from a stall.
        heartbeat: Where this process says that it runs. None: nobody looks.
        clock: Returns monotonic seconds.
        others_s: Seconds to wait for the other processes to say that they make no progress.
    """

    def __init__(
        self,
        limit_s: float,
        activities: Callable[[], Sequence[Activity]],
        board: StallBoard,
        reports: StallReports,
        heartbeat: SharedHeartbeat | None = None,
        *,
        clock: Callable[[], float],
        others_s: float = _OTHERS_S,
    ) -> None:
        self._activities = activities
        self._board = board
        self._reports = reports
        self._heartbeat = heartbeat
        self._clock = clock
        self._others_s = others_s
        self._stalled: set[str] = set()  # parts that are stalled now; the stall thread writes it
        self._reported: set[str] = set()  # parts that this process reported to the operator
        every_s = look_every_s(limit_s)
        self._detector = StallDetector(limit_s, every_s)
        self._detector.look(clock(), time.process_time(), [])  # so that a stop of this process shows from now on
        self._thread = StallThread(self._look, every_s, self._end_heartbeat)

    def stop(self) -> None:
        """Ends the thread. Safe to repeat."""
        self._thread.stop()

    def _end_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end()  # in the stall thread, as no beat can follow

    def _look(self) -> None:
        activities = self._activities()
        if self._heartbeat is not None:
            self._heartbeat.beat(activities[0].stage)
        changes = self._detector.look(self._clock(), time.process_time(), activities)
        if changes.paused_s:
            logger.warning("this process was stopped for a while seconds=%.1f", changes.paused_s)
        for part in changes.over:
            self._stalled.discard(part)
            logger.warning("there is progress again part=%s", part)
            self._in_a_thread(functools.partial(self._end, part))
        for stalled in changes.stalled:
            self._stalled.add(stalled.activity.part)
            stack = stack_of(stalled.activity.thread_id)
            log_stall(stalled, stack)
            dump_all_stacks()
            self._in_a_thread(functools.partial(self._report, stalled, stack))

    def _in_a_thread(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name="gracepoint-stall", daemon=True).start()

    def _report(self, stalled: Stalled, stack: str) -> None:
        try:
            suspicion = ask_in_thread(
                functools.partial(self._ask, stalled, stack), "gracepoint-stall-store", self._others_s + 2 * _STORE_S
            )
        except TimeoutError:
            suspicion = self._board.silent()
        except Exception as error:  # noqa: BLE001 - the limit holds nevertheless
            logger.warning("could not ask the other processes about a stall error=%r", error)
            suspicion = None
        part = stalled.activity.part
        if part in self._stalled and not self._thread.stopped.is_set():
            if suspicion is not None:
                self._reported.add(part)
                self._reports.stalled(stalled, suspicion)
            self._reports.limit(f"no progress in {stalled.activity.stage} for {stalled.for_s:.0f} s")

    def _ask(self, stalled: Stalled, stack: str) -> Suspicion | None:
        """Returns who is suspected, if this process is to report to the operator."""
        try:
            now = stalled.activity
            is_first = self._board.post(now.part, StalledAt(now.stage, now.order, now.reached, stack))
            self._thread.stopped.wait(self._others_s)
            return self._board.suspicion(now.part) if is_first else None
        except GracepointError as error:
            logger.warning("could not ask the other processes about a stall error=%s", error)
            return self._board.silent(f"cannot be reached: {error}")

    def _end(self, part: str) -> None:
        try:
            self._board.take_down(part)
        except GracepointError as error:
            logger.warning("could not notify the other processes that a stall is over error=%s", error)
        if part in self._reported:
            self._reported.discard(part)
            self._reports.over(part)


class StallReports:
    """What follows from a stall of a session.

    Args:
        settings: Say whether a stall ends the process, and with which exit code.
        reporter: Reports to the operator.
        process_exit: Ends the process.
        board: As ``StallWatch``.
        step: Returns the step that training has reached.
    """

    def __init__(
        self,
        settings: Settings,
        reporter: Reporter,
        process_exit: ProcessExit,
        board: StallBoard,
        step: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._reporter = reporter
        self._exit = process_exit
        self._board = board
        self._step = step

    def watch(
        self,
        executor: SaveExecutor,
        process_index: int,
        activities: Callable[[], Sequence[Activity]],
        clock: Callable[[], float],
    ) -> StallWatch | None:
        """Begins to watch this process, also from its worker processes. Called in the training thread.

        Args:
            executor: Has the worker processes.
            process_index: This process.
            activities: As ``StallWatch``.
            clock: As ``StallWatch``.

        Returns:
            The watch. None: the settings do not want one.
        """
        limit_s = self._settings.stall_after_s
        if limit_s <= 0:
            return None
        session = self._reporter.session
        heartbeat = trainer_watch.watched(executor, self._settings, session, process_index, self._step)
        return StallWatch(limit_s, activities, self._board, self, heartbeat, clock=clock)

    def stalled(self, stalled: Stalled, suspicion: Suspicion) -> None:
        """Reports a stall to the operator. Called in one process for all, unless the store does not answer.

        Args:
            stalled: The stalled part of this process.
            suspicion: Who is suspected.
        """
        stage, reason, suspects = stalled.activity.stage, suspicion.why, suspicion.processes
        pods = pods_of(suspects, self._board.pods)
        self._reporter.stall(stage, self._step(), stalled.for_s, suspects, reason, suspicion.stack, pods)

    def over(self, part: str) -> None:
        """Reports that a part makes progress again. Called in the process that reported the stall."""
        self._reporter.stall_over(part, self._step())

    def limit(self, reason: str) -> None:
        """Ends the process if the settings say so. Called in every process when the operator was notified.

        Within a preemption the deadline is the limit, and the watchdog ends the process: the save may still succeed.
        """
        if self._settings.stall_action == STALL_RESTART and not self._exit.decided and not self._exit.watches:
            logger.error("this process exits, so that the job starts again reason=%s", reason)
            self._exit.decide(STALLED_EXIT_CODE)


#: How long process 0 waits for what the others say. The deadline is the same in all processes, except for the time that
#: messages take, and process 0 comes a moment later than the others.
_ANSWERS_PART = 0.4
#: Lines of a stack in a message, and their characters: the innermost frame.
_LINES = 2
_CHARACTERS = 300


class StragglerSearch:
    """Finds out which process holds up the others when the time of a preemption is over.

    Every process says in the store where it is. Process 0, which reports for all, then reads what they have said. If it
    does not run, its substitute does that (``substitute``). A process that is stopped says nothing. If the store does
    not answer, the process that hosts it is suspected: process 0, as a rule.

    ``ask`` starts one thread ("gracepoint-suspects", daemon). It may wait for a store that never answers, or for a file
    system that hangs, as a stack has lines of source files. It then ends with the process.

    Args:
        board: Where the processes say where they are.
        activities: Returns what the parts of this process do; the training is the first one.
        substitute: Knows whether this process reports in place of process 0.
        answer_s: How many seconds an answer may take at most. The substitute of process 0 needs most of it.
        others_s: How many of these seconds the messages of the other processes may take.
    """

    def __init__(
        self,
        board: StallBoard,
        activities: Callable[[], Sequence[Activity]],
        substitute: Substitute,
        answer_s: float = 0.45,
        others_s: float = 0.14,
    ) -> None:
        self._answer_s = answer_s
        self._answers_s = others_s
        self._board = board
        self._activities = activities
        self._substitute = substitute

    def ask(self, epoch: int, most_s: float = math.inf) -> Callable[[], str]:
        """Begins to find out, without a wait. Returns a function that waits for the answer.

        The answer is the process, its pod and where it is, as text. It is empty in processes that do not report, and
        if no process is suspected.

        Args:
            epoch: Number of the preemption, the same in all processes.
            most_s: Seconds that it may take, counted from now. It never takes longer than ``answer_s``.
        """
        answers = queue.SimpleQueue[str]()
        within_s = min(most_s, self._answer_s)
        until_s = time.monotonic() + within_s
        asks_primary = threading.Event()

        def find() -> None:
            try:
                self._say(f"preemption {epoch}")
                if not self._substitute.is_primary:
                    asks_primary.set()
                answers.put(self._find(epoch, min(_ANSWERS_PART * within_s, self._answers_s)))
            except GracepointError as error:
                answers.put(self._without_answer(f"cannot be reached: {error}"))
            except Exception as error:
                answers.put("")
                logger.exception("could not find out which process holds up the others error=%s", error)

        with contextlib.suppress(NoThread):
            start_thread(threading.Thread(target=find, name="gracepoint-suspects", daemon=True))

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
        return _in_words(self._board.suspicion(f"preemption {epoch}"))

    def _without_answer(self, reason: str) -> str:
        if self._board.is_host:
            return ""  # this process is not stopped, whatever keeps its store from answering
        return self._board.silent(reason).why


def _in_words(suspicion: Suspicion) -> str:
    at = " ".join([line.strip() for line in suspicion.stack.splitlines() if line.strip()][-_LINES:])
    return f"{suspicion.why}; it is at: {at[:_CHARACTERS]}" if at else suspicion.why
