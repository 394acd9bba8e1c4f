"""SIGTERM as a notice. It needs no operator.

A Python signal handler runs only when the main thread returns from C++, which may take as long as a training step. The
wakeup fd does not wait: the interpreter's C handler writes the signal's number into it at once. A **reader thread**
("gracepoint-sigterm", daemon) is blocked on the other end and posts the notice. The C handler exists only while a
Python handler is installed. So this module installs one, which writes a byte of its own, in case other code has
installed another wakeup fd, and calls the handler that was installed before. The bytes are passed on, each once, to the
wakeup fd that was installed before, for example asyncio's, whose own handlers go on working.

If other code replaces only the handler or only the fd later, a SIGTERM is still noticed. If it replaces both, as
asyncio's ``add_signal_handler(SIGTERM)`` does, SIGTERM is no longer noticed. Only the main thread can read which fd is
installed, so the reader thread checks the handler alone, every few seconds, and logs once that it was replaced.

A forked child inherits all of this: a data loader's worker that is ended with SIGTERM would write into its parent's
pipe. So the child restores the previous handler and fd at once.

JAX installs a C handler when it joins a cluster. Python sees it as SIG_DFL. Our handler replaces JAX's, which cannot be
restored; ``on_signal`` lets the session raise JAX's notice instead. ``close`` restores the handler and the fd that
Python knows of, and ends the thread. Python allows only the main thread to install handlers: in another thread
``install`` logs that and does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from types import FrameType

from gracepoint.receivers.mailbox import SIGTERM, Disruption, Mailbox

log = logging.getLogger(__name__)

_JOIN_S = 1.0
_LOOK_EVERY_S = 5.0
_END = b"\0"  # no signal has number 0
_HANDLED = b"\xff"  # nor number 255; the Python handler writes it for SIGTERM


class SigtermReceiver:
    """Posts a SIGTERM into the mailbox.

    Args:
        mailbox: Where the notice goes.
        grace_period_s: Seconds that the pod lives after a SIGTERM.
        on_signal: Called once, in the reader thread, after the first SIGTERM was posted.
    """

    def __init__(self, mailbox: Mailbox, grace_period_s: float, on_signal: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._grace_period_s = grace_period_s
        self._on_signal = on_signal
        self._posted = threading.Event()
        self._told_replaced = False
        self._installed = False

    def install(self) -> bool:
        """Installs the handler. Returns False, with a line in the log, if Python does not allow it here."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "SIGTERM is not watched: attach() was called outside of the main thread thread=%s",
                threading.current_thread().name,
            )
            return False
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.settimeout(_LOOK_EVERY_S)
        self._write_end.setblocking(False)
        self._previous_handler = signal.getsignal(signal.SIGTERM)
        self._thread = threading.Thread(target=self._read, name="gracepoint-sigterm", daemon=True)
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        self._thread.start()
        self._installed = True
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        return True

    def close(self) -> None:
        """Restores the previous handler and fd, and ends the thread. Safe to repeat."""
        if not self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning("SIGTERM's handler stays: only the main thread can restore the one before")
            return
        self._restore()
        self._write_end.send(_END)
        self._thread.join(_JOIN_S)
        self._read_end.close()
        self._write_end.close()

    def _restore(self) -> None:
        self._installed = False
        # Compared by equality, as each access makes a new bound method. A handler that replaced ours stays.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            before = self._previous_handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        found = signal.set_wakeup_fd(self._previous_fd)
        if found != self._write_end.fileno():
            signal.set_wakeup_fd(found)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between two bytecodes: perhaps late, perhaps while the thread holds a lock."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the reader wakes anyway
            self._write_end.send(_HANDLED)
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _read(self) -> None:
        while True:
            try:
                numbers = self._read_end.recv(64)
            except TimeoutError:
                self._look()
                continue
            if signal.SIGTERM in numbers or _HANDLED in numbers:
                self._post()
            if self._previous_fd != -1:
                self._pass_on(numbers.replace(_END, b"").replace(_HANDLED, b""))
            if _END in numbers or not numbers:
                return

    def _post(self) -> None:
        if self._posted.is_set():
            return  # the grace period counts from the first SIGTERM
        self._posted.set()
        log.warning("received SIGTERM grace_period_s=%g", self._grace_period_s)
        self._mailbox.post(Disruption(preemption="", cause=SIGTERM, signal=SIGTERM, remaining_s=self._grace_period_s))
        self._on_signal()

    def _look(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if handler == self._handle or self._told_replaced or not self._installed:
            return
        self._told_replaced = True
        log.warning(
            "SIGTERM's handler was replaced after attach(): a SIGTERM is noticed only if the wakeup fd is still ours, "
            "which asyncio's add_signal_handler() replaces too; install handlers before attach() handler=%r",
            handler,
        )

    def _pass_on(self, numbers: bytes) -> None:
        try:
            os.write(self._previous_fd, numbers)
        except OSError as error:
            log.debug("the wakeup fd that was there before takes nothing error=%s", error)


def _forget(receiver: weakref.ref[SigtermReceiver]) -> None:
    """Runs in a forked child: its parent's signals are not its own."""
    found = receiver()
    if found is not None and found._installed:  # noqa: SLF001  of this module
        found._restore()  # noqa: SLF001
