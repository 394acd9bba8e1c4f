"""Looks at the training process from its worker process, which may be in the keeper's container.

A training process that is stopped, or hangs in C code that holds the interpreter lock, cannot report that. The other
processes of the gang name it, but they do not see what it does. Its worker process sees that, and writes it to its log
and to the operator.

``watched`` is called in the training process, and ``begin`` in each of its workers. There, one daemon thread
("gracepoint-beside") looks every few seconds for progress of the heartbeat. It ends with the worker. A worker whose
trainer has died reports nothing.

``SharedHeartbeat`` is a page of shared memory. In the training process, the stall thread alone writes. In the worker,
the main thread once writes the worker's process ID, so that the training process can allow the worker to read its
stack, and the thread "gracepoint-beside" reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gracepoint.async_calls import worker
from gracepoint.async_calls.handover import Block
from gracepoint.errors import GracepointError
from gracepoint.preemption.stall_detector import (
    Activity,
    ProcessAt,
    StallDetector,
    Stalled,
    log_stall,
    look,
    look_every_s,
)
from gracepoint.settings import Settings
from gracepoint.wire.messages import Stall

if TYPE_CHECKING:
    from gracepoint.checkpoint.saving.executor import SaveExecutor
    from gracepoint.receivers import Operator

_PAGE = 4096
#: The number of beats, the step, the worker's process ID, the size of the text.
_WORDS = struct.Struct("=QQQQ")
_WATCHER_AT = 16
_MOST_TEXT = 1024
#: prctl(2): which process may trace this one where the kernel's module Yama limits that.
_PR_SET_PTRACER = 0x59616D61


class SharedHeartbeat:
    """A page of shared memory in which the training process shows that it runs.

    Args:
        block: The memory. None: it is made.
        step: Returns the step that training has reached. The training process knows it.
    """

    def __init__(self, block: Block | None = None, step: Callable[[], int] = lambda: 0) -> None:
        self.block = Block(_PAGE) if block is None else block
        self._step = step
        self._beats = 0
        self._allowed = 0

    # The training process.

    def beat(self, stage: str) -> None:
        """Says that the process runs, and what the training does, as text."""
        text = stage.encode()[:_MOST_TEXT]
        self._beats += 1
        memory, watcher = self.block.memory, self._read()[2]
        memory[_WORDS.size : _WORDS.size + len(text)] = text
        memory[:_WATCHER_AT] = struct.pack("=QQ", self._beats, self._step())
        memory[_WATCHER_AT + 8 : _WORDS.size] = struct.pack("=Q", len(text))
        if watcher not in (0, self._allowed):
            self._allowed = watcher
            _allow_tracing_by(watcher)

    def end(self) -> None:
        """Says that nobody needs to look any more."""
        self.block.memory[:8] = bytes(8)

    # The worker process.

    def watch(self, process_id: int) -> None:
        """Says which process looks."""
        self.block.memory[_WATCHER_AT : _WATCHER_AT + 8] = struct.pack("=Q", process_id)

    @property
    def beats(self) -> int:
        """How often the process has said that it runs. 0: nobody needs to look."""
        return int(self._read()[0])

    @property
    def step(self) -> int:
        """The step that training had reached at the last beat."""
        return int(self._read()[1])

    @property
    def stage(self) -> str:
        """What the training did at the last beat."""
        return self.block.memory[_WORDS.size : _WORDS.size + self._read()[3]].decode(errors="replace")

    def _read(self) -> tuple[int, ...]:
        return _WORDS.unpack_from(self.block.memory)


def _allow_tracing_by(process_id: int) -> None:
    """Lets a process and its children read the stack of this one. Yama may otherwise allow that to parents alone."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(process_id), 0, 0, 0)  # fails if there is no Yama


logger = logging.getLogger(__name__)

_TELL_WITHIN_S = 60.0
_PART = "process"


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
    executor: SaveExecutor, settings: Settings, session: str, index: int, step: Callable[[], int]
) -> SharedHeartbeat | None:
    """Has the workers of this process look at it. To be called in the training thread.

    Args:
        executor: Has the worker processes, if there are any.
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
        logger.warning("no worker process will look at this process error=%s", error)
        return None
    at = ProcessAt.here(threading.get_native_id())
    executor.in_every_worker(begin, heartbeat.block, Watched(settings, session, index, at))
    return heartbeat


def begin(block: Block, trainer: Watched) -> None:
    """Begins to look, in a worker process."""
    heartbeat = SharedHeartbeat(block)
    if trainer.at.visible:
        heartbeat.watch(os.getpid())
    watch = TrainerWatch(heartbeat, trainer, lambda: _operator(trainer.settings))
    threading.Thread(target=watch.run, name="gracepoint-beside", daemon=True).start()


def _operator(settings: Settings) -> Operator | None:
    if settings.operator_url is None:
        return None
    # Imported only now: TLS takes memory and time, and most workers never see a stall.
    from gracepoint.receivers import Operator

    return Operator.known_to(settings, time.monotonic)


class TrainerWatch:
    """Looks at the training process, and reports when it makes no progress.

    Args:
        heartbeat: Where the training process says that it runs.
        who: The training process.
        operator: Returns where to report. It returns None if there is nobody.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        heartbeat: SharedHeartbeat,
        trainer: Watched,
        operator: Callable[[], Operator | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = heartbeat
        self._who = trainer
        self._find_operator = operator
        self._clock = clock
        self._operator: Operator | None = None
        self._own_s = 0.0  # seconds that the looks themselves took: they are no stop of this process
        limit_s = trainer.settings.stall_after_s
        self._look_every_s = look_every_s(limit_s)
        self._detector = StallDetector(limit_s, self._look_every_s)

    def run(self) -> None:
        """Looks until the trainer has died."""
        while not worker.trainer_has_died():
            time.sleep(self._look_every_s)
            try:
                self.look()
            except Exception as error:
                logger.exception("could not look at the training process error=%s", error)

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
        if changes.over and not worker.trainer_has_died():
            logger.warning("the training process runs again")
            self._send(self._stall("the training process runs again", over=True))
        for stalled in changes.stalled:
            if not worker.trainer_has_died():
                self._stalled(stalled)

    def _stalled(self, stalled: Stalled) -> None:
        state, pod = look(self._who.at), self._who.settings.pod_name
        name = f"process {self._who.index}{f' ({pod})' if pod else ''}"
        if state.does:
            message = f"{name} does not run: as its worker process sees, it {state.does}"
            message += f"; its stack is not known: {state.why_not}" if state.why_not else ""
        else:
            message = f"{name} does not run, and its worker process cannot see it: {state.why_not}"
        log_stall(stalled, state.stack, message)
        self._send(self._stall(message, stalled.activity.stage, stalled.for_s, state.stack))

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

    def _send(self, stall: Stall) -> None:
        try:
            self._operator = self._operator or self._find_operator()
            if self._operator is not None:
                self._operator.sender.send(stall, within_s=_TELL_WITHIN_S)
        except GracepointError as error:
            logger.warning("could not reach the operator error=%s", error)
