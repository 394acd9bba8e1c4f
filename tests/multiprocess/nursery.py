"""Forks the processes of the tests off one that has imported JAX, as the import is most of what a small one costs.

Who runs: one nursery for each test process. It has a single thread, never starts a JAX backend, and so can be forked
without danger; it owns its children and tells by one packet when each has ended. A child leads a session of its own,
has only what its request gave it (environment, arguments, a file for its output), runs its script as ``__main__`` and
ends as any interpreter does. When the test process ends, the nursery's socket does and so the nursery; its children
die with it (Linux' parent-death signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PRELOADED = (
    "jax.numpy",
    "jax.experimental.multihost_utils",
    "tensorstore",
    "gracepoint.session.session",
    "gracepoint.checkpoint.checkpoint_manager",
    "gracepoint.multihost",
)
_PACKET_BYTES = 1 << 17
_START_S = 60.0
_END_S = 10.0
_PR_SET_PDEATHSIG = 1


class Child:
    """A forked process, with what a test needs of ``subprocess.Popen``."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, negative if a signal ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kills it and what it has started, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_S
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end within {_END_S} s of its SIGKILL")
            time.sleep(0.005)


class Nursery:
    """The test process's side.

    Args:
        environment: Set in the nursery; what is read at import (``JAX_...``) is the same for all children.
        under: A command that runs the nursery, and ends with it: a tracer.
    """

    def __init__(self, environment: Mapping[str, str], under: Sequence[str] = ()) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [*under, sys.executable, "-X", "faulthandler", __file__, str(theirs.fileno())],
                # OpenBLAS would start threads when it is imported.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Starts ``script`` in a new process, whose output goes to ``log``."""
        request = {"argv": [str(script), *arguments], "environment": dict(environment), "log": str(log)}
        self._channel.send(json.dumps(request).encode())
        deadline = time.monotonic() + _START_S
        while (found := self._next(deadline - time.monotonic())) is not None:
            if "started" in found:
                # Numbers of processes come again: what ended before with this one was another process.
                self._codes.pop(found["started"], None)
                return Child(self, found["started"])
        raise TimeoutError(f"the nursery started no process within {_START_S} s")

    def code(self, pid: int) -> int | None:
        """Returns the exit code of a child; None while it runs."""
        while pid not in self._codes and self._next(0.0) is not None:
            pass
        return self._codes.get(pid)

    def close(self) -> None:
        """Ends the nursery, by force if it does not end by itself: on a busy machine its imports may take long."""
        self._channel.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_START_S)

    def _next(self, timeout_s: float) -> dict[str, int] | None:
        """Returns the next packet, and notes what it says of a process that has ended; None if there is none."""
        self._channel.settimeout(max(timeout_s, 0.0))
        try:
            packet = self._channel.recv(_PACKET_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        if not packet:
            raise RuntimeError(f"the nursery has ended with {self._process.wait(timeout=_END_S)}; see its output")
        found: dict[str, int] = json.loads(packet)
        if "ended" in found:
            self._codes[found["ended"]] = found["code"]
        return found


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Forks a child for each request. Returns the request in the child, and in the nursery itself never."""
    selector = selectors.PollSelector()  # not epoll, which parent and child would share
    selector.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                packet = channel.recv(_PACKET_BYTES)
                if not packet:
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    for other in selector.get_map().values():
                        os.close(other.fd)
                    channel.detach()
                    request: dict[str, Any] = json.loads(packet)
                    return request
                channel.send(json.dumps({"started": pid}).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            else:
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                selector.unregister(key.fd)
                os.close(key.fd)
                channel.send(json.dumps({"ended": key.data, "code": code}).encode())


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _main(descriptor: int) -> str:
    """Becomes the nursery; returns in each child, with the script to run."""
    for name in _PRELOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"the nursery has {len(threads)} threads, expected one, as it forks: leave out an import")
    gc.freeze()  # what is there is looked through by no child, and so its memory stays shared
    nursery = os.getpid()
    request = _serve(socket.socket(fileno=descriptor))
    _die_with(nursery)
    os.setsid()
    output = os.open(request["log"], os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # A line is one write: else the log of another thread, which goes to the same file, may come into it.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    return sys.argv[0]


if __name__ == "__main__":
    runpy.run_path(_main(int(sys.argv[1])), run_name="__main__")
