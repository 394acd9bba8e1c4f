"""Says when ``attach`` makes no progress, and for which processes this one waits: in the log, and to the operator.

The stall watch of a session (``preemption.stall_detection``) begins once the processes have met. Before that there is:

* The **attach thread** ("gracepoint-attach", daemon), which looks every few seconds. It owns the detectors, and ends
  with ``close``.
* A thread for each question to the store ("gracepoint-attach-store", daemon), as the store may not answer: process 0,
  which hosts it, may be the one that is stopped. One that gets no answer is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from gracepoint import trace
from gracepoint.errors import GracepointError
from gracepoint.multihost.coordination.stalls import host_is_silent
from gracepoint.multihost.naming import Pods, named, pods_of
from gracepoint.preemption.reporting.reporter import Reporter
from gracepoint.preemption.reporting.time_spent import TimeSpent
from gracepoint.preemption.stall_detection.stacks import dump_all_stacks, stack_of
from gracepoint.preemption.stall_detection.stall_detector import Activity, StallDetector, Stalled
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.receivers import Mailbox, Operator
from gracepoint.settings import Settings
from gracepoint.wire.names import STALL_RESTART

log = logging.getLogger(__name__)

#: After so many seconds in one stage, the log says for whom this process waits.
_SLOW_S = 30.0
_MOST_LOOK_EVERY_S = 5.0
#: How long the store may take to answer. Shorter than the gap between two looks from which the detectors conclude that
#: this process was stopped.
_STORE_S = 5.0
_TOLD_S = 10.0
_JOIN_S = 1.0


class AttachWatch:
    """See the module. Used as a context manager in the thread that calls ``attach``, which calls everything here.

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
        self._gang: ProcessGroup | None = None
        self._pods: Pods = ()
        self._host = 0
        self._told = False  # whether the operator believes that attach makes no progress
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if settings.stall_after_s > 0:
            self._look_every_s = min(_MOST_LOOK_EVERY_S, settings.stall_after_s / 10, slow_s / 10)
            self._slow = StallDetector(slow_s, self._look_every_s)
            self._stalls = StallDetector(settings.stall_after_s, self._look_every_s)
            self._thread = threading.Thread(target=self._run, name="gracepoint-attach", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._told = False  # attach has failed, so the operator is not told that it goes on
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    @contextlib.contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """Names what ``attach`` does within the block."""
        before, self._stage = self._stage, stage
        try:
            with trace.span(stage):
                yield
        finally:
            self._stage = before

    def met(self, gang: ProcessGroup, pods: Pods = (), host: int = 0) -> None:
        """Says who the processes are. From now on it is known for whom this one waits.

        Args:
            gang: The processes.
            pods: Names of their pods.
            host: Index of the one that hosts the store.
        """
        self._gang, self._pods, self._host = gang, pods, host

    def _run(self) -> None:
        while not self._closed.wait(self._look_every_s):
            try:
                self._look()
            except Exception as error:
                log.exception("could not look for stalls error=%s", error)
        if self._told:
            self._tell_over()

    def _look(self) -> None:
        now_s, cpu_s, stage = time.monotonic(), time.process_time(), self._stage
        # The start of JAX's backend is a part of the meeting, and computes.
        doing = [Activity("attach", stage, (stage,), thread_id=self._thread_id, computes=True)] if stage else []
        for slow in self._slow.look(now_s, cpu_s, doing).stalled:
            log.warning("attach waits stage=%s seconds=%.0f %s", stage, slow.for_s, self._whom()[1])
        changes = self._stalls.look(now_s, cpu_s, doing)
        if changes.over and self._told:
            self._tell_over()
        for stalled in changes.stalled:
            self._stalled(stalled)

    def _stalled(self, stalled: Stalled) -> None:
        stack = stack_of(self._thread_id)
        awaited, why = self._whom()
        stage = stalled.activity.stage
        log.error(
            "no progress part=attach stage=%s seconds=%.0f suspects=%s %s\n%s",
            stage,
            stalled.for_s,
            awaited,
            why,
            stack,
        )
        dump_all_stacks()
        if self._stage != stage:
            return  # it went on while the store was asked
        if self._tells(awaited):
            self._told = True
            try:
                pods = pods_of(awaited or [], self._pods)
                self._report(lambda reporter: reporter.stall(stage, 0, stalled.for_s, awaited or [], why, stack, pods))
            except GracepointError as error:
                log.warning("the operator could not be told error=%s", error)
        if self._settings.stall_action == STALL_RESTART:
            log.error("this process exits, so that the job starts again reason=no progress in %s", stage)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            self._leave(self._settings.unsaved_exit_code)

    def _whom(self) -> tuple[list[int] | None, str]:
        """Returns for which processes this one waits, and that in words. None if it is not known."""
        gang, found = self._gang, list[list[int]]()
        if gang is None:
            return None, "this process does not know the others yet"

        def ask() -> None:
            try:
                found.append(gang.awaited())
            except GracepointError as error:
                log.info("the store could not be asked for whom this process waits error=%s", error)

        asking = threading.Thread(target=ask, name="gracepoint-attach-store", daemon=True)
        asking.start()
        asking.join(_STORE_S)
        if not found:
            return [self._host], host_is_silent(self._host, self._pods).why
        if not found[0]:
            return [], "this process waits for no other"
        return found[0], f"this process waits for {named(found[0], self._pods)}"

    def _tells(self, awaited: list[int] | None) -> bool:
        """Returns whether this process tells the operator for all: the first one of those that wait."""
        if self._gang is None:  # nobody is known yet: process 0 waits for another one, or process 1 for process 0
            return self._settings.process_count is None or self._settings.process_id in (0, 1)
        waiting = (index for index in range(self._gang.process_count) if index not in (awaited or []))
        return not awaited or self._gang.process_index == next(waiting, 0)

    def _tell_over(self) -> None:
        self._told = False
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
