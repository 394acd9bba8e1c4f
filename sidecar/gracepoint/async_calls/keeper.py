"""The keeper: starts worker processes for the trainers that connect to its socket, and outlives them.

    python -m gracepoint.async_calls.keeper SOCKET [MODULE ...]

It runs in a separate container next to the training container, and shares a volume with the socket. A trainer that
connects gets a worker process, which takes calls and shared memory over the connection. The trainer may be killed, and
its whole container with it: its worker finishes the calls.

Each MODULE is run once in a separate process, as soon as the keeper listens: the keeper is there before the trainer.

The main thread accepts connections, starts workers and reaps them. At SIGTERM, which the kubelet sends when the main
containers have ended, the keeper waits for its workers and ends. A worker ends after the last call of its trainer. The
process of a MODULE that still runs then is killed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gracepoint.async_calls.worker_process import child_environment, require_linux, start_process

logger = logging.getLogger(__name__)

_WAITING_TRAINERS = 16
_TRY_EVERY_S = 1.0


def main(path: str, modules: Sequence[str] = ()) -> None:
    """Serves trainers at the socket ``path`` until SIGTERM has come and all workers have ended.

    Args:
        path: Where the socket is made.
        modules: Names of modules. Each is run once, in a separate process.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    require_linux("a keeper")
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake, b"."))
    Path(path).unlink(missing_ok=True)  # a keeper that was killed has left it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(_WAITING_TRAINERS)
        logger.info("the keeper listens at %s", path)
        module_processes = _started(modules)
        try:
            _serve(listener, woken, module_processes)
        finally:
            for process in module_processes.values():
                process.kill()
            with contextlib.suppress(OSError):
                os.unlink(path)
    logger.info("the keeper ends: no trainer and no worker is left")


def _started(modules: Sequence[str]) -> dict[int, subprocess.Popen[bytes]]:
    """Starts a process for each module. Returns them by file descriptors that are readable once a process has ended."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    for module in modules:
        command = [sys.executable, "-P", "-m", module]
        try:
            _add(processes, subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment()))
        except OSError as error:
            logger.warning("%s is not run: %s", module, error)
    return processes


def _add(processes: dict[int, subprocess.Popen[bytes]], process: subprocess.Popen[bytes]) -> None:
    """Adds a process by a file descriptor that is readable once it has ended. If the system has none, kills it."""
    try:
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, "the system has no descriptors of processes")
        processes[os.pidfd_open(process.pid)] = process
    except OSError:
        process.kill()
        process.wait()
        raise


def _serve(listener: socket.socket, woken: int, module_processes: dict[int, subprocess.Popen[bytes]]) -> None:
    workers: dict[int, subprocess.Popen[bytes]] = {}  # by a file descriptor that is readable once the worker has ended
    is_ending = False
    while workers or not is_ending:
        poll = select.poll()  # select() takes no descriptor above 1023
        for handle in (listener.fileno(), woken, *workers, *module_processes):
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll():
            if handle == listener.fileno():
                _take_trainer(listener, workers)
            elif handle == woken:
                os.read(woken, 64)
                is_ending = True
                logger.info("the keeper was asked to end, and waits for %d workers", len(workers))
            elif handle in module_processes:
                os.close(handle)
                module_processes.pop(handle).wait()
            else:
                worker = workers.pop(handle)
                os.close(handle)
                logger.info("worker process %d has ended with code %d", worker.pid, worker.wait())


def _take_trainer(listener: socket.socket, workers: dict[int, subprocess.Popen[bytes]]) -> None:
    """Starts a worker for a trainer that connects.

    If the system cannot start a worker, the keeper continues: its end would be the end of the other workers. If the
    connection was accepted already, the trainer loses it, and does without this worker. Otherwise the keeper tries
    again.
    """
    try:
        connection, _ = listener.accept()
        with connection:
            worker = start_process(connection)
        _add(workers, worker)
    except OSError as error:
        logger.error("could not start a worker process for a trainer that has connected: %s", error)
        time.sleep(_TRY_EVERY_S)
    else:
        logger.info("a trainer has connected, and has worker process %d", worker.pid)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
