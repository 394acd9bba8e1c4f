"""SIGTERM as a notice, and SIGHUP where it would end the process. It needs no operator.

A Python signal handler runs only when the main thread returns from C++, which may take as long as a training step. The
wakeup fd does not wait: the interpreter's C handler writes the signal's number into it at once. A **reader thread**
("gracepoint-sigterm", daemon) is blocked on the other end and posts the notice. It unblocks the signal in itself, so a
mask of the other threads does not keep it away. The C handler exists only while a Python handler is installed. So this
module installs one, which writes a byte too, in case other code has installed another wakeup fd. The bytes are passed
on, each once, to the wakeup fd that was installed before, for example asyncio's, whose handlers still work.

**Ours decides, theirs is called afterwards.** A handler of other code may raise, end the process, or make the training
loop end before the sync point that the processes agree upon; then nothing is saved, and an exit with code 0 looks like
the end of training. So it is called once, by ``call_theirs``, when the session has ended; what it raises is logged.
Other code may replace handler, wakeup fd or C handler at any time. ``look``, which the training thread calls at its
sync points, sees that at the first one and every few seconds, logs who did it, and puts ours in front of theirs again.

A forked child inherits all of this: a data loader's worker that is ended with SIGTERM would write into its parent's
pipe. So the child restores the previous handler and fd at once.

JAX installs a C handler when it joins a cluster. Python sees it as SIG_DFL. Our handler replaces JAX's, which cannot be
restored; ``on_signal`` lets the session raise JAX's notice instead. ``close`` restores the handler and the fd that
Python knows of, and ends the thread. Python allows only the main thread to install handlers: in another thread
``install`` logs that and does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from gracepoint.receivers.mailbox import SIGTERM, Disruption, Mailbox

logger = logging.getLogger(__name__)

_JOIN_S = 1.0
_END = b"\0"  # no signal has number 0
_HANDLED = b"\xff"  # nor number 255; the Python handler writes it
#: JAX's own handler is one of C, in a library of such a name.
_JAX = ("jax", "xla")


class SigtermReceiver:
    """Posts a SIGTERM into the mailbox.

    Args:
        mailbox: Where the notice goes.
        grace_period_s: Seconds that the pod lives after a SIGTERM.
        on_signal: Called once, in the reader thread, after the first SIGTERM was posted.
        on_caught: Called in the main thread between two bytecodes, for each signal. Must return at once.
        look_every_s: Pause in seconds between two looks at whose handler is installed.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        grace_period_s: float,
        on_signal: Callable[[], None],
        on_caught: Callable[[], None] = lambda: None,
        look_every_s: float = 5.0,
    ) -> None:
        self._look_every_s = look_every_s
        self._mailbox = mailbox
        self._grace_period_s = grace_period_s
        self._on_signal = on_signal
        self._on_caught = on_caught
        self._theirs: dict[int, Any] = {}  # the handlers of other code, by the signals that are watched
        self._received: list[int] = []  # what the Python handler was called for, until theirs are
        self._last_handled = int(signal.SIGTERM)
        self._posted = threading.Event()
        self._look_due = True  # the reader thread sets it, the training thread clears it
        self._installed = False

    def install(self) -> bool:
        """Installs the handler. Returns False, with a line in the log, if Python does not allow it here."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "SIGTERM is not watched: attach() was called outside of the main thread thread=%s",
                threading.current_thread().name,
            )
            return False
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.settimeout(self._look_every_s)
        self._write_end.setblocking(False)
        self._theirs = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
        # Whoever ignores or handles a hang-up, as nohup does, wants to live on.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            self._theirs[signal.SIGHUP] = signal.SIG_DFL
        self._tell_of_those_before()
        self._thread = threading.Thread(target=self._read, name="gracepoint-sigterm", daemon=True)
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        for number in self._theirs:
            signal.signal(number, self._handle)
        self._c_handler = _c_handler(signal.SIGTERM)
        self._thread.start()
        self._installed = True
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        return True

    def look(self) -> None:
        """Puts our handler back in front of one that was installed meanwhile, if it is time to look.

        For the training thread, at each sync point. Does so in the main thread; in another one it only says what it
        found.
        """
        if not self._look_due or not self._installed:
            return
        self._look_due = False
        for number in self._theirs:
            self._look_at(number)
        if threading.current_thread() is threading.main_thread():
            previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
            if previous_fd != self._write_end.fileno():
                self._previous_fd = previous_fd

    def close(self) -> None:
        """Restores the previous handler and fd, ends the thread, and calls that handler if there was a signal.

        Safe to repeat.
        """
        if not self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SIGTERM's handler stays: only the main thread can restore the one before")
            return
        self._restore()
        self._write_end.send(_END)
        self._thread.join(_JOIN_S)
        self._read_end.close()
        self._write_end.close()
        self.call_theirs()

    def call_theirs(self) -> None:
        """Calls the handlers of other code whose signals have come, once. For the main thread, at the session's end."""
        received, self._received = dict.fromkeys(self._received), []
        for number in received:
            self._call_theirs(number)

    def _restore(self) -> None:
        self._installed = False
        for number, handler in self._theirs.items():
            # Compared by equality, as each access makes a new bound method. A handler that replaced ours stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        current_fd = signal.set_wakeup_fd(self._previous_fd)
        if current_fd != self._write_end.fileno():
            signal.set_wakeup_fd(current_fd)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between two bytecodes: perhaps late, perhaps while the thread holds a lock."""
        self._last_handled = number
        self._received.append(number)
        with contextlib.suppress(OSError):  # the pipe is full, so the reader wakes anyway; or the session has ended
            self._write_end.send(_HANDLED)
        self._on_caught()

    def _call_theirs(self, number: int) -> None:
        handler, name = self._theirs[number], signal.Signals(number).name
        if not callable(handler):
            return
        try:
            with _hard_exits_raised():
                handler(number, None)
        except BaseException as error:  # noqa: BLE001 - it would decide how the process ends, in place of the save
            logger.warning("%s's handler %s, called after the session's end, raised %r", name, _named(handler), error)

    # The reader thread.

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._theirs)
        while True:
            try:
                numbers = self._read_end.recv(64)
            except TimeoutError:
                self._look_due = True
                continue
            passed = next((number for number in self._theirs if number in numbers), None)
            if passed is not None or _HANDLED in numbers:
                self._post(signal.Signals(passed or self._last_handled).name)
            self._pass_on(numbers.replace(_END, b"").replace(_HANDLED, b""))
            if _END in numbers or not numbers:
                return

    def _post(self, name: str) -> None:
        if self._posted.is_set():
            return  # the grace period counts from the first signal
        self._posted.set()
        logger.warning("received %s grace_period_s=%g", name, self._grace_period_s)
        self._mailbox.post(Disruption(preemption="", cause=SIGTERM, signal=name, remaining_s=self._grace_period_s))
        self._on_signal()

    def _pass_on(self, numbers: bytes) -> None:
        if self._previous_fd == -1 or not numbers:
            return
        try:
            os.write(self._previous_fd, numbers)
        except OSError as error:
            logger.debug("the wakeup fd that was there before takes nothing error=%s", error)

    # What other code installs.

    def _tell_of_those_before(self) -> None:
        handler, in_c = self._theirs[signal.SIGTERM], _c_handler(signal.SIGTERM)
        if callable(handler):
            logger.info("SIGTERM's handler %s will be called after the session's end, and not before", _named(handler))
        elif handler == signal.SIG_IGN:
            logger.warning("SIGTERM was ignored, and is a notice from now on")
        elif in_c > signal.SIG_IGN and not any(word in os.path.basename(_library(in_c)) for word in _JAX):
            logger.warning("SIGTERM's handler in C is replaced, and will not be called library=%s", _library(in_c))
        if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            logger.warning(
                "SIGTERM is blocked in the main thread: a thread of Gracepoint takes it, also from a sigwait()"
            )

    def _look_at(self, number: int) -> None:
        handler, name = signal.getsignal(number), signal.Signals(number).name
        unchanged, in_c = handler == self._handle, _c_handler(number)
        if unchanged and in_c == self._c_handler:
            return
        owner = f"one in C, of {_library(in_c)}, which is not called any more" if unchanged else _named(handler)
        if threading.current_thread() is not threading.main_thread():
            logger.warning("%s may not be noticed: its handler was replaced after attach() by %s", name, owner)
            return
        logger.warning(
            "%s's handler was replaced after attach() by %s: Gracepoint's is in front again, and calls one of Python "
            "after the session's end",
            name,
            owner,
        )
        if not unchanged:
            self._theirs[number] = handler
        signal.signal(number, self._handle)


def _named(handler: Any) -> str:
    """Returns the name of a handler as a user may look for it."""
    if not callable(handler) or isinstance(handler, signal.Handlers):
        return str(getattr(handler, "name", handler))
    function = getattr(handler, "func", handler)  # of a partial
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"


def _c_handler(number: int) -> int:
    """Returns the address of the handler in C, of which Python does not know if other code of C has installed it."""
    action = ctypes.create_string_buffer(512)  # more than any system's struct sigaction, which begins with the handler
    if ctypes.CDLL(None).sigaction(number, None, action) != 0:
        return 0
    return ctypes.c_void_p.from_buffer(action).value or 0


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library(address: int) -> str:
    """Returns the file of the library that has a function. Empty if that is not known."""
    info = _SymbolInfo()
    try:
        is_known = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    except AttributeError:  # a system without it
        return ""
    return os.fsdecode(info.file) if is_known and info.file else ""


@contextlib.contextmanager
def _hard_exits_raised() -> Iterator[None]:
    """Within the block, ``os._exit`` of this thread raises SystemExit, so that its code does not count either."""
    hard, here = os._exit, (os.getpid(), threading.get_ident())

    def leave(code: int) -> None:
        if (os.getpid(), threading.get_ident()) == here:
            raise SystemExit(code)
        hard(code)  # of a forked child, or of a watchdog of other code

    vars(os)["_exit"] = leave
    try:
        yield
    finally:
        vars(os)["_exit"] = hard


def _forget(receiver: weakref.ref[SigtermReceiver]) -> None:
    """Runs in a forked child: its parent's signals are not its own."""
    previous = receiver()
    if previous is not None and previous._installed:  # noqa: SLF001  of this module
        previous._restore()  # noqa: SLF001
