"""The keeper: starts worker processes for the trainers that connect to its socket, and outlives them.

    python -m gracepoint.async_calls.keeper SOCKET

It runs in a container of its own beside the training container, and shares a volume with the socket. A trainer that
connects gets a worker process, which takes calls and shared memory over the connection. The trainer may be killed, and
its whole container with it: its worker finishes the calls.

The main thread accepts connections, starts workers and reaps them. At SIGTERM, which the kubelet sends when the main
containers have ended, the keeper waits for its workers and ends. A worker ends after the last call of its trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from gracepoint.async_calls.worker_process import start_process

logger = logging.getLogger(__name__)

_WAITING_TRAINERS = 16


def main(path: str) -> None:
    """Serves trainers at the socket ``path`` until SIGTERM has come and all workers have ended."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake, b"."))
    Path(path).unlink(missing_ok=True)  # of a keeper that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(_WAITING_TRAINERS)
        logger.info("the keeper listens at %s", path)
        try:
            _serve(listener, woken)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
    logger.info("the keeper ends: no trainer and no worker is left")


def _serve(listener: socket.socket, woken: int) -> None:
    workers: dict[int, subprocess.Popen[bytes]] = {}  # by a file descriptor that is readable once the worker has ended
    is_ending = False
    while workers or not is_ending:
        readable, _, _ = select.select([listener.fileno(), woken, *workers], [], [])
        for handle in readable:
            if handle == listener.fileno():
                connection, _ = listener.accept()
                with connection:
                    worker = start_process(connection)
                workers[os.pidfd_open(worker.pid)] = worker
                logger.info("a trainer has connected, and has worker process %d", worker.pid)
            elif handle == woken:
                os.read(woken, 64)
                is_ending = True
                logger.info("the keeper was told to end, and waits for %d workers", len(workers))
            else:
                worker = workers.pop(handle)
                os.close(handle)
                logger.info("worker process %d has ended with code %d", worker.pid, worker.wait())


if __name__ == "__main__":
    main(sys.argv[1])
