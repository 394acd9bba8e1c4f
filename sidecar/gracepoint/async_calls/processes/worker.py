"""The worker process: runs calls one after the other, as they come from the trainer over a Unix socket.

Run by ``worker_process`` as ``python -m gracepoint.async_calls FD``. The main thread receives calls, runs them,
and answers. It ends when the trainer has closed the connection or has died, but first it runs all calls that were
handed over. One daemon thread waits for the death of the trainer, and then limits the time that the worker still has.

The worker leads a session of its own and ignores SIGTERM, SIGINT and SIGHUP. These signals stop a job, and the worker
must still finish what the trainer handed over. It imports no JAX by itself, and JAX finds only the CPU here.
"""

from __future__ import annotations

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

from gracepoint.async_calls.processes import priority, trainer_death
from gracepoint.async_calls.processes.pickling import unpack

logger = logging.getLogger(__name__)

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
    priority.give_way(options["nice"], idle=options["idle"])
    # A keeper's worker cannot see the trainer, which is in another container: the connection alone tells of its end.
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
    if trainer_death.is_orphan(connection, trainer):
        trainer_death.run_last()


def _process_handle(process_id: int) -> int | None:
    """Returns a file descriptor that is readable once the process has ended. None if it has ended already."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(process_id)
    except ProcessLookupError:
        return None


def _end_after(connection: socket.socket, trainer: int | None, limit_s: float) -> None:
    trainer_death.wait_until_orphan(connection, trainer)
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
    except BaseException:  # noqa: BLE001 - told to the trainer; SystemExit, too, must not end the worker
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
    room = ANSWER_BYTES - ANSWER.size
    if len(data) > room:  # the end of a traceback says most
        data = b"... " + data[-(room - 4) :]
    try:
        connection.send(ANSWER.pack(number, failed, kept) + data)
    except OSError as error:
        if failed:
            logger.error("a call failed, and the trainer can no longer be told (%s): %s", error, text)
