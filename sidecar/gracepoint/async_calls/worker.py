"""The worker process: runs calls one after the other, as they come from the trainer over a Unix socket.

Run by ``worker_process`` as ``python -m gracepoint.async_calls FD``. The main thread receives calls, runs them,
and answers. It ends when the trainer has closed the connection or has died, but first it runs all calls that were
handed over, and then the functions that calls registered with ``when_orphaned``. One daemon thread waits for the death
of the trainer, and then limits the time that the worker still has. Any thread may ask ``trainer_has_died``.

The worker leads its own session and ignores SIGTERM, SIGINT and SIGHUP. These signals stop a job, and the worker
must still finish what the trainer handed over. It imports no JAX by itself, and JAX finds only the CPU here.

How much of the CPU the worker takes from the training is the niceness of that session, which the kernel keeps; this
module only remembers what the trainer asked for, and which niceness the session is to have. The main thread calls
``give_way`` before other threads start. ``hurry`` and ``relax`` may be called by any thread, and do not wait. The
kernel lets processes without a privilege change the niceness of sessions once in 0.1 s, all of them together. If it
refuses, one daemon thread ("gracepoint: niceness") tries again, so that no save waits. It ends when the session has the
niceness, or after ``_TRIES`` attempts since somebody last asked for a niceness.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from gracepoint import machine
from gracepoint.async_calls.handover import unpack
from gracepoint.threads import NoThread, start_thread

logger = logging.getLogger(__name__)

_last: dict[str, Callable[[], object]] = {}
_died = threading.Event()


def when_orphaned(name: str, function: Callable[[], object]) -> None:
    """Has the worker call ``function`` if its trainer dies, in place of the function that had this name before."""
    _last[name] = function


def run_last() -> None:
    """Calls the functions that calls have registered. An error of one is logged, and the others are called."""
    for name, function in _last.items():
        try:
            function()
        except Exception as error:
            logger.error("a function to run after the trainer's death failed: %s: %s", name, error, exc_info=error)


def is_orphan(connection: socket.socket, trainer: int | None) -> bool:
    """Returns whether the trainer has died, or has closed the connection in both directions.

    Args:
        connection: The socket to the trainer. A trainer that only says that no more calls come still reads from it.
        trainer: A file descriptor that is readable once the trainer has ended. None: it has ended already, or cannot be
            observed from here.
    """
    return _poll(connection, trainer, 0)


def wait_until_orphan(connection: socket.socket, trainer: int | None) -> None:
    """Returns when ``is_orphan`` is true. Waits as long as the trainer lives."""
    _poll(connection, trainer, None)
    _died.set()


def trainer_has_died() -> bool:
    """Returns whether ``wait_until_orphan`` has returned in this process."""
    return _died.is_set()


def _poll(connection: socket.socket, trainer: int | None, timeout_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # only what is always reported: POLLHUP once both directions are closed
    if trainer is not None:
        poll.register(trainer, select.POLLIN)
    return bool(poll.poll(timeout_ms))


# Enough for the workers of a machine, which may all want it at once.
_TRIES, _TRY_EVERY_S = 50, 0.11


class SessionNiceness:
    """How nice this process's session is. The kernel may refuse a change for a while; then a thread tries again.

    Args:
        file: The kernel's file of the session. If it cannot be read, this kernel does not weigh sessions.
    """

    def __init__(self, file: Path = Path("/proc/self/autogroup")) -> None:
        self._file = file
        self._lock = threading.Lock()  # protects what follows
        self._wanted = 0
        self._tries = 0  # attempts that the thread still has; 0: there is no thread

    def set(self, nice: int) -> None:
        """Sets it, now or soon. Does not wait."""
        with self._lock:
            self._wanted, is_tried = nice, self._tries > 0
            if is_tried:
                self._tries = _TRIES
            elif not self._is_set():
                thread = threading.Thread(target=self._try_again, name="gracepoint: niceness", daemon=True)
                with contextlib.suppress(NoThread):
                    start_thread(thread)
                    self._tries = _TRIES

    def _try_again(self) -> None:
        while True:
            time.sleep(_TRY_EVERY_S)
            with self._lock:
                self._tries = 0 if self._is_set() else self._tries - 1
                if self._tries <= 0:  # whoever wants another niceness from here on starts another thread
                    return

    def _is_set(self) -> bool:
        """Sets the niceness. Returns False if the kernel may allow it later. True also if it never does."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # this kernel does not weigh sessions
            if int(self._file.read_text().split()[-1]) != self._wanted:
                try:
                    self._file.write_text(str(self._wanted))
                except BlockingIOError:
                    return False
        return True


_nice = 0
_session = SessionNiceness()


def give_way(nice: int, *, idle: bool = False) -> None:
    """Leaves the CPU to the training, as far as ``nice`` says, or all of it if ``idle``.

    With ``SCHED_BATCH``, the kernel does not prefer this process to a thread of the training that wakes up. Outside of
    control groups, the kernel weighs sessions against each other and not processes (sched(7), "The autogroup feature").
    This process leads a session, so the niceness of that is set, too.
    """
    global _nice
    _nice = nice
    os.nice(nice)
    with contextlib.suppress(OSError):  # forbidden here
        if idle:
            machine.run_when_idle()
        elif nice and sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if nice:
        relax()


def hurry() -> None:
    """Has the session count as much as others, as somebody waits for this process. Its threads stay nice."""
    _session.set(0)


def relax() -> None:
    """Has the session be as nice as ``give_way`` said, as the training continues."""
    _session.set(_nice)


#: A call on its way to the worker: its number, the size of its block, the size of the block's header. The file
#: descriptors of the block, and of the blocks among its arguments, come with it.
CALL = struct.Struct("!QQQ")
#: An answer: the number of the call, whether it failed, and whether the worker still maps the block because the
#: function kept an array. The traceback of an error follows as text.
ANSWER = struct.Struct("!Q??")
#: Bytes of an answer at most, with its text.
ANSWER_BYTES = 64 << 10
# File descriptors that come with a call at most.
_MOST_FDS = 16
_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)  # Linux alone has it


def main(connection: socket.socket) -> None:
    """Runs calls until the trainer has ended or closed its end of the connection."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    options = json.loads(connection.recv(ANSWER_BYTES))
    logging.basicConfig(level=options["log_level"], format="%(levelname)s %(name)s %(message)s")
    give_way(options["nice"], idle=options["idle"])
    # A keeper's worker cannot see the trainer, which is in another container: the connection alone shows its end.
    trainer = _process_handle(options["trainer"]) if not options["by_keeper"] else None
    threading.Thread(
        target=_end_after,
        args=(connection, trainer, options["orphan_limit_s"]),
        name="gracepoint-orphan-limit",
        daemon=True,
    ).start()
    while (call := _next_call(connection, trainer)) is not None:
        number, block_bytes, header_bytes, fds = call
        _answer(connection, number, *_run(fds, block_bytes, header_bytes))
    if is_orphan(connection, trainer):
        run_last()


def _process_handle(process_id: int) -> int | None:
    """Returns a file descriptor that is readable once the process has ended. None if it has ended already."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(process_id)
    except ProcessLookupError:
        return None


def _end_after(connection: socket.socket, trainer: int | None, limit_s: float) -> None:
    wait_until_orphan(connection, trainer)
    time.sleep(limit_s)
    logger.error("the trainer has ended, and its calls still run after %g s: they are given up", limit_s)
    os._exit(1)


def _next_call(connection: socket.socket, trainer: int | None) -> tuple[int, int, int, list[int]] | None:
    """Returns the next call. None if no more can come: the connection is closed, or the trainer has ended.

    A process that the trainer forked may hold the connection open after the trainer's end. So the trainer's end counts,
    too.
    """
    poll = select.poll()  # select() takes no descriptor above 1023, and a trainer may have many files open
    for each in (connection,) if trainer is None else (connection, trainer):
        poll.register(each, select.POLLIN)
    if connection.fileno() not in dict(poll.poll()):
        return None
    try:
        data, fds, _, _ = socket.recv_fds(connection, CALL.size, _MOST_FDS)
    except ConnectionResetError:
        # The trainer died, and had not read every answer. The kernel says so once, before what was handed over.
        data, fds, _, _ = socket.recv_fds(connection, CALL.size, _MOST_FDS)
    return (*CALL.unpack(data), fds) if data else None


def _run(fds: list[int], block_bytes: int, header_bytes: int) -> tuple[bool, bool, str]:
    """Runs one call. Returns whether it failed, whether its block is still mapped, and the traceback of its error."""
    # Mapped as a whole: the kernel writes memory to a file in small pieces if it meets pages that are not mapped yet,
    # and takes nearly twice as long.
    block = mmap.mmap(fds[0], block_bytes, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
    failed, text = False, ""
    try:
        function, arguments, keywords = unpack(memoryview(block), header_bytes, fds[1:])
        function(*arguments, **keywords)
    except BaseException:  # noqa: BLE001 - sent to the trainer; SystemExit, too, must not end the worker
        failed, text = True, traceback.format_exc()
    for fd in fds:
        os.close(fd)
    function = arguments = keywords = None  # type: ignore[assignment]
    return failed, not _unmapped(block), text


def _unmapped(block: mmap.mmap) -> bool:
    for _ in range(2):
        try:
            block.close()
            return True
        except BufferError:
            gc.collect()  # arrays may be in reference cycles
    return False


def _answer(connection: socket.socket, number: int, failed: bool, kept: bool, text: str) -> None:
    data = text.encode()
    limit = ANSWER_BYTES - ANSWER.size
    if len(data) > limit:  # the end of a traceback has most of it
        data = b"... " + data[-(limit - 4) :]
    try:
        connection.send(ANSWER.pack(number, failed, kept) + data)
    except OSError as error:
        if failed:
            logger.error("a call failed, and the trainer can no longer be notified (%s): %s", error, text)
