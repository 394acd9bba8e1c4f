"""Looks at the training process from its worker process, which may be in the keeper's container.

A training process that is stopped, or hangs in C code that holds the interpreter lock, cannot say so. The other
processes of the gang name it, but they do not see what it does. Its worker process sees that, and says so in its log
and to the operator.

``watched`` is called in the training process, and ``begin`` in each of its workers. There, one daemon thread
("gracepoint-beside") looks every few seconds for progress of the heartbeat. It ends with the worker. A worker whose
trainer has died says nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gracepoint.async_calls.processes import trainer_death
from gracepoint.async_calls.processes.shared_memory import Block
from gracepoint.errors import GracepointError
from gracepoint.preemption.stall_detection.process_inspection import ProcessAt, look
from gracepoint.preemption.stall_detection.shared_heartbeat import SharedHeartbeat
from gracepoint.preemption.stall_detection.stall_detector import Activity, StallDetector, Stalled
from gracepoint.settings import Settings
from gracepoint.wire.messages import Stall

if TYPE_CHECKING:
    from gracepoint.receivers import Operator

log = logging.getLogger(__name__)

_MOST_LOOK_EVERY_S = 5.0
_TELL_WITHIN_S = 60.0
_PART = "process"


class Workers(Protocol):
    """An object that has worker processes."""

    def in_every_worker(self, function: Callable[..., object], *arguments: object) -> None:
        """Has every worker process call a function once, also those that are started later."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """The training process that is looked at.

    Attributes:
        settings: Its settings.
        session: Its session's nonce. The operator refuses what is said for a session that is over.
        index: Its index among the processes.
        at: Where it is.
    """

    settings: Settings
    session: str
    index: int
    at: ProcessAt


def watched(
    workers: Workers, settings: Settings, session: str, index: int, step: Callable[[], int]
) -> SharedHeartbeat | None:
    """Has the workers of this process look at it. To be called in the training thread.

    Args:
        workers: Has the worker processes, if there are any.
        settings: The settings of this process.
        session: The session's nonce.
        index: Index of this process.
        step: Returns the step that training has reached.

    Returns:
        Where this process says that it runs. None: the system has no memory for it.
    """
    try:
        heartbeat = SharedHeartbeat(step=step)
    except OSError as error:
        log.warning("no worker process will look at this process error=%s", error)
        return None
    at = ProcessAt.here(threading.get_native_id())
    workers.in_every_worker(begin, heartbeat.block, Watched(settings, session, index, at))
    return heartbeat


def begin(block: Block, who: Watched) -> None:
    """Begins to look, in a worker process."""
    heartbeat = SharedHeartbeat(block)
    if who.at.visible:
        heartbeat.watch(os.getpid())
    watch = TrainerWatch(heartbeat, who, lambda: _operator(who.settings))
    threading.Thread(target=watch.run, name="gracepoint-beside", daemon=True).start()


def _operator(settings: Settings) -> Operator | None:
    if settings.operator_url is None:
        return None
    # Imported only now: TLS takes memory and time, and most workers never see a stall.
    from gracepoint.receivers import Operator

    return Operator.known_to(settings, time.monotonic)


class TrainerWatch:
    """See the module.

    Args:
        heartbeat: Where the training process says that it runs.
        who: The training process.
        operator: Returns whom to tell. It returns None if there is nobody.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        heartbeat: SharedHeartbeat,
        who: Watched,
        operator: Callable[[], Operator | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = heartbeat
        self._who = who
        self._find_operator = operator
        self._clock = clock
        self._operator: Operator | None = None
        self._own_s = 0.0  # seconds that the looks themselves took: they are no stop of this process
        limit_s = who.settings.stall_after_s
        self._look_every_s = min(_MOST_LOOK_EVERY_S, limit_s / 10)
        self._detector = StallDetector(limit_s, self._look_every_s)

    def run(self) -> None:
        """Looks until the trainer has died."""
        while not trainer_death.trainer_has_died():
            time.sleep(self._look_every_s)
            try:
                self.look()
            except Exception as error:
                log.exception("could not look at the training process error=%s", error)

    def look(self) -> None:
        """Looks once."""
        began_s = self._clock()
        try:
            self._look(began_s - self._own_s)
        finally:
            self._own_s += self._clock() - began_s

    def _look(self, now_s: float) -> None:
        beats = self._heartbeat.beats
        doing = [Activity(_PART, self._heartbeat.stage, (beats,))] if beats else []
        changes = self._detector.look(now_s, time.process_time(), doing)
        if changes.over and not trainer_death.trainer_has_died():
            log.warning("the training process runs again")
            self._tell(self._stall("the training process runs again", over=True))
        for stalled in changes.stalled:
            if not trainer_death.trainer_has_died():
                self._stalled(stalled)

    def _stalled(self, stalled: Stalled) -> None:
        seen, pod = look(self._who.at), self._who.settings.pod_name
        name = f"process {self._who.index}{f' ({pod})' if pod else ''}"
        if seen.does:
            message = f"{name} does not run: as its worker process sees, it {seen.does}"
            message += f"; its stack is not known: {seen.why_not}" if seen.why_not else ""
        else:
            message = f"{name} does not run, and its worker process cannot see it: {seen.why_not}"
        log.error(
            "no progress part=%s stage=%s seconds=%.0f %s\n%s",
            _PART,
            stalled.activity.stage,
            stalled.for_s,
            message,
            seen.stack,
        )
        self._tell(self._stall(message, stalled.activity.stage, stalled.for_s, seen.stack))

    def _stall(
        self, message: str, stage: str = _PART, for_s: float = 0.0, stack: str = "", *, over: bool = False
    ) -> Stall:
        settings = self._who.settings
        return Stall(
            pod_uid=settings.pod_uid or "",
            session=self._who.session,
            workload_uid=settings.jobset_uid or "",
            over=over,
            stage=stage,
            step=self._heartbeat.step,
            for_s=for_s,
            suspects=[self._who.index],
            message=message,
            stack=stack,
            beside=True,
            pods=[settings.pod_name] if settings.pod_name else [],
        )

    def _tell(self, stall: Stall) -> None:
        try:
            self._operator = self._operator or self._find_operator()
            if self._operator is not None:
                self._operator.sender.send(stall, within_s=_TELL_WITHIN_S)
        except GracepointError as error:
            log.warning("the operator could not be told error=%s", error)
