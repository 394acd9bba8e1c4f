"""A worker process as the trainer sees it: started by the trainer, or by a keeper that the trainer connects to.

The caller's thread starts the process and hands calls over. One daemon thread reads the answers, says of each call that
it has ended, and ends with the process, which it reaps. ``close`` ends the connection: the worker finishes its calls
and ends. If the trainer dies, the kernel closes the connection, and the same happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from gracepoint.async_calls.handover import Block, BlockPool
from gracepoint.async_calls.worker import ANSWER, ANSWER_BYTES, CALL
from gracepoint.errors import GracepointError, SettingsError
from gracepoint.threads import Ending, NoThread, forget_in_child, start_thread

logger = logging.getLogger(__name__)

#: Seconds to wait until the worker takes a call, and until a process that closed its connection has ended.
_TAKE_S = 60
_END_S = 30.0
#: Seconds to wait for a keeper that may be just starting, and between two tries to reach it.
_KEEPER_STARTS_S = 10.0
_LOOK_EVERY_S = 0.1
#: Accelerators belong to the trainer. The worker must never open them.
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")


class CallFailed(GracepointError):
    """A call failed in this process's worker or thread. The message is the traceback, or how the worker ended."""


class WorkerProcess:
    """Starts a worker and hands calls to it, in order.

    Args:
        pool: Where the memory of finished calls goes.
        nice: Added to the CPU niceness of the worker: 0 to 19. Larger values leave more of the CPU to the training.
        idle: Whether the worker gets only CPU time that no other process of the container wants.
        log_level: Level of the worker's log, which goes to the standard error of this process.
        orphan_limit_s: Seconds that the worker still has for its calls after this process has died.
        keeper: Path of the socket of a keeper that starts the worker. None: this process starts it.
        keeper_starts: Whether to wait a few seconds for a keeper that does not listen yet.

    Raises:
        OSError: The process cannot be started, or the keeper cannot be reached. Or the system has no thread.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        nice: int,
        idle: bool,
        log_level: int,
        orphan_limit_s: float,
        keeper: str | None = None,
        keeper_starts: bool = False,
    ) -> None:
        self._pool = pool
        self._calls: dict[int, tuple[Ending, Block]] = {}
        self._lock = threading.Lock()  # of _calls and _ended
        self._ended = False
        self._disconnected = Ending()
        self._process: subprocess.Popen[bytes] | None = None
        if keeper is None:
            self._connection, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with peer:
                self._process = start_process(peer)
        else:
            self._connection = _connected(keeper, _KEEPER_STARTS_S if keeper_starts else 0.0)
        # Python's own timeout would make the socket non-blocking for the reading thread, too.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _TAKE_S, 0))
        options = {
            "log_level": log_level,
            "nice": nice,
            "idle": idle,
            "orphan_limit_s": orphan_limit_s,
            "trainer": os.getpid(),
            "by_keeper": keeper is not None,
        }
        self._connection.send(json.dumps(options).encode())
        forget_in_child(self, WorkerProcess._forget)
        try:
            start_thread(threading.Thread(target=self._read_answers, name="gracepoint-async-worker", daemon=True))
        except NoThread as error:
            self.kill()
            if self._process is not None:
                self.wait(_END_S)
            self._connection.close()
            raise OSError(f"no thread reads the answers of {self.name}: {error}") from error
        except BaseException:
            self.kill()  # nobody will know of it
            raise

    @property
    def process_id(self) -> int:
        """Process ID of the worker. 0: it is in the keeper's container."""
        return 0 if self._process is None else self._process.pid

    @property
    def name(self) -> str:
        """The worker, as text for messages."""
        return "the keeper's worker process" if self._process is None else f"the worker process {self._process.pid}"

    @property
    def alive(self) -> bool:
        """Whether calls can still be handed over."""
        with self._lock:
            return not self._ended

    def send(self, number: int, block: Block, header_bytes: int, shared: Sequence[Block] = ()) -> Ending:
        """Hands a call over. Afterwards the worker has all bytes of the call, even if this process dies.

        The block goes back to the pool when the call has ended, also if this method raises. The blocks in ``shared``,
        which are among the arguments, stay the caller's.

        Raises:
            CallFailed: The worker has ended, or does not take the call in time.
        """
        call = Ending()
        with self._lock:
            if self._ended:
                self._pool.give_back(block)
                raise CallFailed(f"{self.name} has ended: {self._how_ended()}")
            self._calls[number] = (call, block)
        try:
            fds = [block.fd, *(each.fd for each in shared)]
            socket.send_fds(self._connection, [CALL.pack(number, block.bytes, header_bytes)], fds)
        except OSError as error:
            with self._lock:
                is_mine = self._calls.pop(number, None) is not None
            if is_mine:  # else the reading thread has freed it
                self._pool.give_back(block)
            raise CallFailed(f"{self.name} did not take call {number} within {_TAKE_S:g} s: {error}") from error
        return call

    def close(self) -> None:
        """Says that no more calls come. The worker ends after its last call. Does not wait."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Ends the worker at once. Its calls fail. A keeper's worker is left alone: it ends after its call."""
        if self._process is None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the process has ended, or the connection to the keeper. Returns whether it has."""
        if self._process is None:
            return self._disconnected.wait(timeout_s)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_answers(self) -> None:
        while True:
            try:
                data = self._connection.recv(ANSWER_BYTES)
            except ConnectionResetError:
                continue  # the worker died with calls unread. The kernel says so once, before the answers in its queue
            except OSError:
                data = b""
            if not data:
                break
            number, failed, kept = ANSWER.unpack_from(data)
            with self._lock:
                call, block = self._calls.pop(number)
            if kept:
                block.free()  # the worker's mapping keeps the pages
            else:
                self._pool.give_back(block)
            call.end(CallFailed(data[ANSWER.size :].decode(errors="replace")) if failed else None)
        self._disconnected.end()
        if not self.wait(_END_S):
            logger.error("worker process %d closed its connection, and did not end: it is killed", self.process_id)
            self.kill()
            self.wait(_END_S)
        with self._lock:
            self._ended = True
            pending, self._calls = list(self._calls.values()), {}
        self._connection.close()
        for call, block in pending:
            block.free()
            call.end(CallFailed(f"{self.name} ended: {self._how_ended()}"))

    def _forget(self) -> None:
        """In a forked child: the worker has ended. As long as a process has the connection, it does not end."""
        self._ended, self._process, self._calls = True, None, {}
        self._lock, self._disconnected = threading.Lock(), Ending()
        self._disconnected.end()
        self._connection.close()

    def _how_ended(self) -> str:
        if self._process is None:
            return "the connection was closed"
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def require_linux(option: str) -> None:
    """Raises SettingsError, with ``option`` as text, if the system is not Linux."""
    if sys.platform != "linux":
        raise SettingsError(f"{option}: this needs Linux, found {sys.platform}. Leave it out for work on a laptop")


def start_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a worker process that takes calls from ``connection``, which the caller closes afterwards."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gracepoint.async_calls", str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=child_environment(),
    )


def _connected(keeper: str, starts_s: float) -> socket.socket:
    """Returns a connection to a keeper. Waits ``starts_s`` seconds for a keeper that does not listen yet."""
    until_s = time.monotonic() + starts_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(keeper)
            return connection
        except OSError as error:
            connection.close()
            is_starting = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if not is_starting or time.monotonic() > until_s:
                raise OSError(error.errno, f"no keeper answers at {keeper}: {error.strerror}") from error
        time.sleep(_LOOK_EVERY_S)


def child_environment() -> dict[str, str]:
    """Returns the environment of a child process: it finds the modules of this process, and no accelerator."""
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["JAX_PLATFORMS"] = "cpu"
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return environment
