"""How the processes of one start meet before JAX joins them: who is there, who is missing, and who does not belong.

JAX ends a process from C++ (SIGABRT) if another one does not come within its timeout, and cannot tell a process of an
earlier attempt from one of its own. So JAX is called only once all processes are known to be there.

Process 0 listens at the coordinator's own port, which nothing else uses until JAX's service starts there. The others
connect, and both sides introduce themselves (``Introduction``). Each judges by the two introductions alone
(``compare``), so both come to the same conclusion at once: an older attempt leaves (``NotJoined``), whichever side it
is; another job is not waited for, and not sent away, as nobody knows which of two jobs is the older one; different
numbers of processes or different versions end all (``AgreementError``), as another start would not change them.

A connection stays open while its process lives. When all are there, process 0 closes its listener, says so to all
(``begin``), and every process calls JAX. Until JAX has returned, in ``attach`` to its end, a connection that breaks is
a process that died, for which JAX would wait in vain, or because of which it would abort the others. All others leave
at once then, with the exit code for that. Later on it is noted who died (``Gathering.lost``): a process that cannot go
on without another one has not failed itself. JAX would abort it: at once if process 0 is dead, else after its heartbeat
timeout. So all leave by that exit code before: at once, or when training has not gone on for ``STANDS_S``.

A machine that dies without a word closes no connection, which is noticed late (``KEEPALIVE_LATER``). While somebody
else says that a machine is lost (``Gathering.suspect``), a connection need not be silent for so long. Nobody asks which
machine: whoever lives answers, as the kernel does so for a process that is stopped. Such a silence may still be an
outage of the network beside which training goes on, so a process leaves early only once training has stalled.

A message is a line of JSON. What is no introduction is closed: whoever scans ports, speaks another protocol or says
nothing takes no place for long, and is named in the log if it speaks JAX's protocol.

The calling thread does everything until ``begin``. From then on a separate thread ("gracepoint-joining", a daemon)
owns the connections, as the calling thread is in JAX's C++ code. It ends with ``end``, or with the process. A name is
looked up in one more thread ("gracepoint-lookup", a daemon), because a resolver without an answer takes minutes. It
ends with the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import queue
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn, Self

from gracepoint import machine
from gracepoint.deadline import Backoff
from gracepoint.errors import AgreementError, NotJoined, SettingsError
from gracepoint.multihost.store import named
from gracepoint.version import __version__

logger = logging.getLogger(__name__)

#: Seconds between two lines of the log that say who is missing.
SAY_EVERY_S = 30.0
#: Seconds after which a process 0 that says nothing is asked anew.
SILENT_S = 90.0
#: Seconds within which whoever connects has to introduce itself.
INTRODUCTION_S = 10.0
#: Seconds that an attempt to connect takes at most.
_CONNECT_S = 1.0
#: Seconds that one look at a name takes at most. The resolver continues meanwhile.
_LOOKUP_S = 5.0
#: Connections of which nobody knows yet who they are.
_MOST_STRANGERS = 128
_LINE_BYTES = 8192
_NAME_CHARACTERS = 300
#: Seconds without any sign of life after which the kernel gives a connection up: about half a minute.
#: The last one is in milliseconds, and for what was sent and is not acknowledged: the kernel asks nothing then.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
#: The same once all have attached: as long as JAX's default heartbeat timeout, as training goes on after a shorter
#: outage of the network or pause of a machine. JAX itself waits longer then (``HEARTBEAT_S``).
KEEPALIVE_LATER = {**_KEEPALIVE, "TCP_KEEPCNT": 16, "TCP_USER_TIMEOUT": 90_000}
#: The same while a machine is said to be lost.
KEEPALIVE_SUSPECTED = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 10_000}
#: The heartbeat timeout of JAX for gangs that meet here, in seconds. A process that JAX has lost is noticed after half
#: of it at the earliest: by then those that remain have left by their own exit code.
HEARTBEAT_S = 300
#: With these bytes JAX's own client begins (RFC 9113).
_HTTP2_PREFACE = b"PRI * HTTP/2.0"
_JOIN_S = 1.0
#: Seconds without a sync point after a process was lost, until the others leave. JAX ends them after half of
#: ``HEARTBEAT_S`` at the earliest, counted from the death, and a silent death is noticed after 90 to 105 s.
STANDS_S = 10.0
#: Seconds after a loss that was noticed early, until training need not have stalled: by then JAX would end them soon.
EARLY_S = 55.0
#: The same, stalled or not, if nobody says any more that a machine is lost: as long as if nobody had said so.
EARLY_FOR_NOTHING_S = 90.0
#: Seconds after the loss of a connection in which training has gone on, so that the process at its end must live.
GOES_ON_S = 30.0
#: Seconds after which a quiet connection carries a message: proxies of a service mesh close those that carry none.
#: Not if the other end is silent. The kernel would ask for no more signs of life, and count anew from the message on.
ALIVE_S = 60.0
#: Where struct tcp_info (linux/tcp.h) has the number of questions for a sign of life that were not answered.
_PROBES = 3
#: Seconds for a look whether process 0 has ended: then its port refuses at once.
_LOOK_S = 0.5
#: Seconds that process 0, which hosts JAX's service, gives the others to leave before it.
_OTHERS_LEAVE_S = 10.0


@dataclasses.dataclass(frozen=True)
class Introduction:
    """What a process says of itself.

    Attributes:
        process_id: Its id in JAX's coordination service.
        process_count: How many processes there are, as it was told.
        job: UID of its JobSet or Job. None outside Kubernetes.
        attempt: Restarts of the JobSet when its pod was created.
        pod: Name of its pod, or of its machine.
        version: Version of this library.
        jax: Version of JAX.
    """

    process_id: int
    process_count: int
    job: str | None
    attempt: int
    pod: str
    jax: str
    version: str = __version__

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Self:
        """Reads a message. Ignores fields that it does not know.

        Raises:
            ValueError: It is no introduction.
        """
        introduction = cls(**{field.name: message.get(field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]
        process_id, count, job = introduction.process_id, introduction.process_count, introduction.job
        numbers = (process_id, count, introduction.attempt)
        if not all(type(number) is int and number >= 0 for number in numbers) or process_id >= count:
            raise ValueError("expected a process id below the number of processes, and an attempt")
        texts = (introduction.pod, introduction.jax, introduction.version, "" if job is None else job)
        if not all(isinstance(text, str) and len(text) <= _NAME_CHARACTERS and text.isprintable() for text in texts):
            raise ValueError("expected short texts")
        return introduction

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.pod}) of attempt {self.attempt}"


class Comparison(StrEnum):
    """What two introductions mean for each other."""

    FITS = "fits"
    FIRST_IS_OLD = "the first is of an earlier attempt"
    SECOND_IS_OLD = "the second is of an earlier attempt"
    OTHER_JOB = "they are of two jobs"
    DIFFERS = "they are of one attempt, and cannot train together"


def compare(first: Introduction, second: Introduction) -> Comparison:
    """Judges two introductions. Pure, so that both sides come to the same verdict."""
    if first.job != second.job:
        return Comparison.OTHER_JOB
    if first.attempt != second.attempt:
        return Comparison.FIRST_IS_OLD if first.attempt < second.attempt else Comparison.SECOND_IS_OLD
    return Comparison.DIFFERS if difference(first, second) else Comparison.FITS


def difference(first: Introduction, second: Introduction) -> str:
    """Returns, as a sentence, why two processes of one attempt cannot train together. Empty if they can."""
    for field, name in (("process_count", "processes"), ("version", "gracepoint"), ("jax", "jax")):
        value, other = getattr(first, field), getattr(second, field)
        if value != other:
            one, two = sorted((first, second), key=lambda each: each.process_id)
            has = "was told {} {}" if field == "process_count" else "has {1} {0}"
            both = ", ".join(f"{each} {has.format(getattr(each, field), name)}" for each in (one, two))
            fix = (
                "the job's size was changed while it ran: start all pods again"
                if field == "process_count"
                else "run the same image in all pods; a tag that was moved is another image"
            )
            return f"{both}. Expected the same in all processes: {fix}"
    return ""


def outdated(old: Introduction, new: Introduction) -> str:
    """Returns, as a sentence, why a process of an earlier attempt leaves."""
    return (
        f"{old} leaves, as {new} has started: this job is at attempt {new.attempt}, and the pods of attempt "
        f"{old.attempt} are to end"
    )


class Line:
    """A connection on which lines of JSON are exchanged. It belongs to one thread at a time.

    Attributes:
        who: Who is at the other end. None before it has introduced itself.
        joined: Whether the process at the other end has attached.
        left: Whether it has said that it leaves: then its end is no death.
        closed: Whether nothing more can come.
        fell_silent: Whether that is so because nothing has come for long.
    """

    def __init__(self, sock: socket.socket, now_s: float) -> None:
        sock.setblocking(False)
        self.sock = sock
        with contextlib.suppress(OSError):  # no TCP
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.set_options(_KEEPALIVE)
        self.at: Any = None  # the address of the other end
        with contextlib.suppress(OSError):
            self.at = sock.getpeername()
        self.since_s = now_s
        self.who: Introduction | None = None
        self.joined = False
        self.left = self.closed = self.fell_silent = False
        self.unread = bytearray()

    def set_options(self, options: Mapping[str, int]) -> None:
        """Sets options of TCP, those that the system knows: macOS has other names for some."""
        with contextlib.suppress(OSError):  # no TCP
            for name, value in options.items():
                if hasattr(socket, name):
                    self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: Any) -> None:
        """Sends a message. A connection that has broken shows when it is read."""
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    @property
    def is_silent(self) -> bool:
        """Whether the kernel waits for a sign of life of the other end. False on systems that do not say so."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        try:
            state = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PROBES + 1)
        except OSError:  # no TCP
            return False
        return state[_PROBES] > 0

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have come. None if the other end has closed, or says what is no message."""
        try:
            data = self.sock.recv(_LINE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        except OSError:  # no answer, or no route any more
            self.fell_silent = True
            return None
        self.unread += data
        *lines, rest = self.unread.split(b"\n")
        if not data or len(rest) > _LINE_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        self.unread = rest
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        self.sock.close()


class Gathering:
    """All processes of a start are there, and connected to process 0. Ends with ``end``.

    Args:
        lines: The connections: in process 0 those to all others, elsewhere the one to process 0.
        exit_code: Exit code of this process if another one dies.
        leave: Ends this process with an exit code.

    Attributes:
        exit_code: As said.
    """

    def __init__(self, lines: Sequence[Line], exit_code: int, leave: Callable[[int], object] = os._exit) -> None:
        self._lines = lines
        self.exit_code = exit_code
        self._leave = leave
        self._lost = ""  # who died first after this process had attached
        self._has_lost = threading.Event()
        self._told = threading.Event()  # the others know that this process leaves
        self._wake: socket.socket | None = None  # while the thread runs: its other end wakes it
        self._thread: threading.Thread | None = None
        # Written by the thread that joins, before it wakes the other one.
        self._until_s = math.inf
        self._awaits = "JAX had joined all processes"
        self._attached = False
        self._goes_on: Callable[[], bool] | None = None
        self._has_stalled: Callable[[], bool] = lambda: True
        self._suspects = False  # whether a machine is said to be lost
        self._is_early = False  # whether it was noticed for that reason who died
        self._lost_at_s = self._stands_since_s = 0.0
        self._says_so = False
        #: Whether JAX aborts this process if process 0 of the meeting ends.
        self.needs_process_0: Callable[[], bool] = lambda: True

    @contextlib.contextmanager
    def joining(self, within_s: float) -> Iterator[None]:
        """Ends this process if, from now on until ``end``, another one dies; or if the block takes too long.

        In the block JAX joins the processes. Its C++ code cannot be interrupted, and would end this process by SIGABRT.
        If an error leaves the block, the others learn of it as if this process had died.
        """
        self._until_s = time.monotonic() + within_s
        self._wake, woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, args=(woken,), name="gracepoint-joining", daemon=True)
        self._thread.start()
        try:
            yield
        except BaseException:
            self._close()
            raise
        self._until_s, self._awaits = math.inf, "it had attached"
        with contextlib.suppress(OSError):  # the thread is ending this process
            self._wake.send(b"joined")

    def attached(self) -> None:
        """From now on the death of a process ends no other: it is noted. Safe to repeat."""
        self._attached = True
        with contextlib.suppress(OSError):  # the thread has ended
            if self._wake is not None:
                self._wake.send(b"attached")

    def watch(self, goes_on: Callable[[], bool] | None, has_stalled: Callable[[], bool] = lambda: True) -> None:
        """Has this process leave if another one is lost and training does not go on. None: it is only noted.

        Args:
            goes_on: Returns whether training has gone on since the last call, or ends as it should. Any thread calls.
            has_stalled: Returns whether training takes far longer than usual, and nothing is saved beside it. Asked
                about once a second if the loss was noticed early. Any thread calls.
        """
        self._stands_since_s = time.monotonic()
        self._has_stalled = has_stalled
        self._goes_on = goes_on

    def suspect(self, suspects: bool) -> None:
        """Somebody says that a machine is lost, or no longer says so. Any thread may call."""
        self._suspects = suspects
        with contextlib.suppress(OSError):  # the thread has ended
            if self._wake is not None:
                self._wake.send(b"suspects")

    def lost(self, within_s: float = 0.0) -> str:
        """Returns, as the beginning of a sentence, which other process has died. Empty: none is known to have.

        Args:
            within_s: Seconds to wait for that news. What else shows that a process died may be here a moment earlier.
        """
        self._has_lost.wait(within_s)
        return self._lost

    def leaving(self) -> None:
        """Tells the others that the end of this process, from now on, is no death. The watch goes on."""
        if self._wake is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                self._wake.send(b"leaving")
            self._told.wait(_JOIN_S)

    def end(self) -> None:
        """Ends the watch. To the others, this process has left: it has not died. Safe to repeat."""
        self._says_so = True
        self._close()

    def forget(self) -> None:
        """In a forked child: the connections are its parent's, and end with that."""
        for line in self._lines:
            line.close()

    def _close(self) -> None:
        if self._wake is not None and self._thread is not None:
            with contextlib.suppress(OSError):  # a forked child has a copy, so that closing alone would not be seen
                self._wake.shutdown(socket.SHUT_RDWR)
            self._wake.close()
            self._thread.join(_JOIN_S)

    def _watch(self, woken: socket.socket) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(woken, selectors.EVENT_READ)
                for line in self._lines:
                    selector.register(line.sock, selectors.EVENT_READ, line)
                while (left_s := self._until_s - time.monotonic()) > 0:
                    if self._stands():
                        self._end_all(f"{self._lost}, and training does not go on")
                        return
                    ready = [key for key, _ in selector.select(min(left_s, 1.0 if self._lost else ALIVE_S))]
                    if not ready and not self._lost:
                        for line in self._lines:
                            if not line.is_silent:
                                line.send(alive=True)
                    if any(key.data is None for key in ready):
                        if not (message := woken.recv(_LINE_BYTES)):
                            return
                        if b"attached" in message:
                            self._tell(joined=True)
                        if self._attached:
                            for line in self._lines:
                                line.set_options(KEEPALIVE_SUSPECTED if self._suspects else KEEPALIVE_LATER)
                        if b"leaving" in message:
                            self._tell(leaves=True)
                            self._told.set()
                    for line in (key.data for key in ready if key.data is not None):
                        if (reason := self._heard(line)) is not None:
                            self._end_all(reason)
                            return
                        if line.closed:
                            selector.unregister(line.sock)
            self._end_all("all processes were there, and JAX has not joined them in time")
        finally:
            woken.close()
            for line in self._lines:
                if self._says_so:
                    line.send(leaves=True)
                line.close()

    def _heard(self, line: Line) -> str | None:
        """Reads a connection. Returns why this process has to end, if it has to."""
        messages = line.receive()
        for message in messages or ():
            if "ends" in message:
                if self._goes_on is not None or not self._attached:
                    return str(message["ends"])
                self._note(str(message["ends"]))
            if "lost" in message:
                self._note(str(message["lost"]), is_early="early" in message)
            line.joined = line.joined or "joined" in message
            line.left = line.left or "leaves" in message
        line.closed = messages is None
        if not line.closed or line.left:
            return None
        if not (self._attached or line.joined):
            return f"{line.who} died before {self._awaits}"
        self._note(f"{line.who} has died", is_early=line.fell_silent and self._suspects)
        return self._lost if self.needs_process_0() and _has_ended(line) else None

    def _stands(self) -> bool:
        """Whether training has not gone on for a while since another process was lost."""
        if not self._lost or (goes_on := self._goes_on) is None:
            return False
        if goes_on():
            self._stands_since_s = time.monotonic()
            if self._stands_since_s - self._lost_at_s > GOES_ON_S:
                logger.warning("training goes on, so only a connection was lost, though %s", self._lost)
                self._lost = ""
                self._has_lost.clear()
                return False
        now_s = time.monotonic()
        return now_s - self._stands_since_s >= STANDS_S and not (self._is_early and self._may_go_on(now_s))

    def _may_go_on(self, now_s: float) -> bool:
        """Whether training may go on after a loss that was noticed early, which may be an outage of the network."""
        silent_s = now_s - self._lost_at_s
        if not self._suspects:
            return silent_s < EARLY_FOR_NOTHING_S
        return silent_s < EARLY_S and not self._has_stalled()

    def _note(self, reason: str, *, is_early: bool = False) -> None:
        """Notes who died, and in process 0 tells the others."""
        if not self._lost:
            self._lost_at_s = self._stands_since_s = time.monotonic()
            self._lost, self._is_early = reason, is_early
            self._has_lost.set()
            self._tell(lost=reason, **({"early": True} if is_early else {}))
        elif not is_early:
            self._is_early = False

    def _tell(self, **message: Any) -> None:
        for line in self._lines:
            line.send(**message)

    def _end_all(self, reason: str) -> None:
        self._tell(ends=reason)
        logger.error("%s. This process exits, as it cannot train without it code=%d", reason, self.exit_code)
        machine.flush_streams()
        self._let_others_leave()
        self._leave(self.exit_code)

    def _let_others_leave(self) -> None:
        """In process 0: waits until the others have left. JAX aborts those that are there when its service ends."""
        until_s = time.monotonic() + _OTHERS_LEAVE_S
        here = [line for line in self._lines if line.who is not None and line.who.process_id and not line.closed]
        while here and time.monotonic() < until_s:
            here = [line for line in here if line.receive() is not None]
            time.sleep(0.01)


def _has_ended(line: Line) -> bool:
    """Whether process 0 is at the other end and has ended: its machine refuses connections to JAX's service."""
    if line.who is None or line.who.process_id or not isinstance(line.at, tuple):
        return False
    try:
        socket.create_connection(line.at[:2], timeout=_LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # it does not answer: a node that is away, or a network that will come back
        return False
    return False


class _Waiting:
    """Says every half a minute who is missing, and ends the wait when its time is over."""

    def __init__(self, me: Introduction, timeout_s: float | None, exit_code: int) -> None:
        self._me = me
        self._timeout_s = timeout_s
        self._exit_code = exit_code
        self._began_s = self._said_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def look(self, for_whom: Callable[[], str]) -> bool:
        """Returns whether something was said. ``for_whom`` returns who is missing, and what is known of it.

        Raises:
            NotJoined: The time is over.
        """
        if self._timeout_s is not None and self.waited_s >= self._timeout_s:
            raise not_joined(f"{self._me} waited {self.waited_s:.0f} s for {for_whom()}", self._exit_code)
        if time.monotonic() - self._said_s < SAY_EVERY_S:
            return False
        self._said_s = time.monotonic()
        logger.warning("%s waits for %s seconds=%.0f", self._me, for_whom(), self.waited_s)
        return True

    def pause_s(self, most_s: float = SAY_EVERY_S) -> float:
        """Returns for how many seconds to wait before the next look."""
        left_s = most_s if self._timeout_s is None else self._timeout_s - self.waited_s
        return max(0.0, min(most_s, left_s, self._said_s + SAY_EVERY_S - time.monotonic()))


def not_joined(reason: str, code: int) -> NotJoined:
    """Returns the error, after it was logged: an exit says nothing."""
    logger.error("not joined: %s. Exit code %d says that the program has not failed", reason, code)
    return NotJoined(code, reason=reason)


@contextlib.contextmanager
def leaving_on_sigterm(exit_code: int, leave: Callable[[int], object] | None = None) -> Iterator[None]:
    """Within the block, a SIGTERM ends this process: as process 1 of a container it would not have any effect.

    Without it, a pod that is deleted while it waits lives until its grace period is over, and holds up the next
    attempt. Whoever waits for this process then waits for its replacement. A handler of the training script stays.

    Args:
        exit_code: As said.
        leave: Ends the process at once: if JAX has joined it, an exit would wait for the others. None: ``NotJoined``.
    """

    def end(number: int, frame: Any) -> None:
        error = not_joined("this process was asked to end (SIGTERM) while it waited at the start", exit_code)
        if leave is None:
            raise error
        machine.flush_streams()
        leave(exit_code)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Host:
    """Process 0, to which all others come.

    Args:
        me: This process.
        address: ``host:port`` at which it listens. An empty host: all interfaces.
        timeout_s: Seconds to wait for the others. None: no limit.
        exit_code: Exit code if they do not come.
    """

    def __init__(self, me: Introduction, address: str, timeout_s: float | None, exit_code: int) -> None:
        self._me = me
        self._address = address
        self._exit_code = exit_code
        self._waiting = _Waiting(me, timeout_s, exit_code)
        self._present: dict[int, Line] = {}
        self._strangers: dict[Line, None] = {}  # in the order in which they came
        self._last_refused = ""
        self._selector = selectors.DefaultSelector()

    def gather(self) -> list[Line]:
        """Waits until all processes are there. Returns the connections to them.

        Raises:
            AgreementError: A process cannot train with this one.
            NotJoined: This process is of an earlier attempt; or the others do not come in time.
        """
        _allow_files(2 * self._me.process_count)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(self._listener())
            stack.enter_context(self._selector)
            self._selector.register(listener, selectors.EVENT_READ)
            stack.callback(self._close_all)
            while len(self._present) < self._me.process_count - 1:
                self._look(listener)
            listener.close()  # before the others are told: JAX's service needs the port
            present, self._present = list(self._present.values()), {}
            for line in present:
                line.send(begin=True)
            return present

    def _look(self, listener: socket.socket) -> None:
        for key, _ in self._selector.select(self._waiting.pause_s(1.0 if self._strangers else SAY_EVERY_S)):
            if key.data is None:
                self._accept(listener)
            elif key.data.sock.fileno() >= 0:  # not closed by an event before this one
                self._hear(key.data)
        self._drop_silent()
        try:
            if self._waiting.look(self._missing):
                self._tell(missing=self._missing())
        except NotJoined as error:
            self._tell(ends=error.reason)
            raise

    def _listener(self) -> socket.socket:
        while True:
            try:
                listener = listen(self._address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                used = f"the port of {self._address}, which another process of this machine uses: {error}"
                self._waiting.look(lambda: used)  # noqa: B023 - called at once
                time.sleep(self._waiting.pause_s(_CONNECT_S))
            else:
                listener.setblocking(False)
                return listener

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # it is gone again, or this process has no more files
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._last_refused = f"; a connection was not accepted: {error}"
                time.sleep(0.1)
            return
        line = Line(sock, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, line)
        self._strangers[line] = None
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _hear(self, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            if line.unread.startswith(_HTTP2_PREFACE):
                self._last_refused = (
                    "; JAX's own client knocks: a process calls jax.distributed.initialize itself, or has another "
                    "version of this library. Let attach() or gracepoint.multihost.initialize() join all processes"
                )
            elif line.who is not None:
                logger.warning("%s has gone again", line.who)
            self._drop(line)
        elif messages and line.who is None:
            try:
                line.who = Introduction.read(messages[0])
            except ValueError:
                self._drop(line)
            else:
                self._admit(line, line.who)

    def _admit(self, line: Line, introduction: Introduction) -> None:
        line.send(**dataclasses.asdict(self._me))
        verdict = compare(self._me, introduction)
        if verdict is Comparison.FIRST_IS_OLD:
            self._tell(ends=outdated(self._me, introduction))
            raise not_joined(outdated(self._me, introduction), self._exit_code)
        if verdict is Comparison.DIFFERS:
            self._fail(difference(self._me, introduction), line)
        if verdict is not Comparison.FITS or introduction.process_id == 0:
            reason = verdict if verdict is not Comparison.FITS else "its id is taken"
            refused = f"; refused {introduction}, of job {introduction.job}: {reason}"
            if refused != self._last_refused:  # it may try again every second
                logger.warning("process 0 has%s", refused.removeprefix(";"))
            self._last_refused = refused
            self._drop(line)
            return
        before = self._present.pop(introduction.process_id, None)
        if before is not None:  # a pod that was replaced, and whose end was not seen
            before.send(ends=f"{introduction} has come in its place")
            self._drop(before)
        del self._strangers[line]
        self._present[introduction.process_id] = line

    def _fail(self, reason: str, stranger: Line) -> NoReturn:
        self._tell(failed=reason)
        stranger.send(failed=reason)
        raise AgreementError(reason)

    def _tell(self, **message: Any) -> None:
        for line in self._present.values():
            line.send(**message)

    def _missing(self) -> str:
        missing = [process for process in range(1, self._me.process_count) if process not in self._present]
        here = f"{len(self._present) + 1} of {self._me.process_count} are here"
        return f"{named(missing)}; {here}{self._last_refused}"

    def _drop_silent(self) -> None:
        now_s = time.monotonic()
        for line in [line for line in self._strangers if now_s - line.since_s > INTRODUCTION_S]:
            self._drop(line)

    def _drop(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.sock)
        line.close()
        self._strangers.pop(line, None)
        if line.who is not None and self._present.get(line.who.process_id) is line:
            del self._present[line.who.process_id]

    def _close_all(self) -> None:
        for line in [*self._present.values(), *self._strangers]:
            line.close()


def listen(address: str) -> socket.socket:
    """Returns a socket that listens at ``host:port``. An empty host, ``::`` or ``0.0.0.0``: all interfaces.

    It does not share its port with another listener, as JAX's service would: two attempts on one machine would each get
    some of the other's connections.

    Raises:
        OSError: The port is used, or there is no such interface.
    """
    host, port = split(address)
    if host in ("", "::", "0.0.0.0"):
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
                )
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # IPv6 is switched off: IPv4 alone
                    raise
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(where[0]), port), family=family, backlog=socket.SOMAXCONN)


def split(address: str) -> tuple[str, int]:
    """Returns host and port of ``host:port``.

    Raises:
        SettingsError: The address has no port.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or ":" not in address:
        raise SettingsError(f"coordinator_address: expected host:port, found {address!r}")
    return host.strip("[]"), int(port)


def _allow_files(count: int) -> None:
    """Raises this process's limit of open files, where it can, so that as many connections and JAX's own fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = count + 512
    if soft != resource.RLIM_INFINITY and soft < files:
        most = files if hard == resource.RLIM_INFINITY else min(files, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class Lookup:
    """Looks one name up, in a separate thread: a resolver without an answer takes minutes.

    Args:
        host: The name, or an address.
        port: The port of the addresses.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._answers: queue.SimpleQueue[Sequence[Any] | OSError] | None = None  # None: nothing is asked

    def __call__(self, timeout_s: float) -> Sequence[Any]:
        """Returns the addresses, as ``socket.getaddrinfo`` does.

        Raises:
            OSError: There is none, or no answer yet. The next call continues to wait for the same answer.
        """
        if self._answers is None:
            self._answers = queue.SimpleQueue()
            asking = threading.Thread(target=self._ask, args=(self._answers,), name="gracepoint-lookup", daemon=True)
            asking.start()
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"its name {self._host} cannot be looked up: the resolver does not answer") from None
        self._answers = None
        if isinstance(answer, OSError):
            resolver = ", the cluster's DNS does not answer" if _is_silent(answer) else ""
            raise OSError(f"its name {self._host} cannot be looked up{resolver}: {answer}") from answer
        return answer

    def _ask(self, answers: queue.SimpleQueue[Sequence[Any] | OSError]) -> None:
        try:
            answers.put(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
        except UnicodeError as error:  # a label that is empty or too long
            answers.put(OSError(str(error)))
        except OSError as error:
            answers.put(error)


def _is_silent(error: OSError) -> bool:
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN


class Guest:
    """Any process but process 0, to which it comes.

    Args:
        me: This process.
        address: ``host:port`` of process 0.
        timeout_s: Seconds to wait for the others. None: no limit.
        exit_code: Exit code if they do not come.
    """

    def __init__(self, me: Introduction, address: str, timeout_s: float | None, exit_code: int) -> None:
        self._me = me
        self._address = address
        self._exit_code = exit_code
        self._lookup = Lookup(*split(address))
        self._waiting = _Waiting(me, timeout_s, exit_code)
        self._known = ""  # what is known of process 0
        self._tries = 0

    def gather(self) -> Line:
        """Waits until all processes are there. Returns the connection to process 0.

        Raises:
            AgreementError: A process cannot train with the others.
            NotJoined: This process is of an earlier attempt, or another one has taken its place; or the others do not
                come in time.
        """
        next_s = pauses()
        while True:
            try:
                line = Line(self._connected(), time.monotonic())
            except OSError as error:  # the name does not exist yet, refused, no route, timeout
                self._known = str(error)
            else:
                try:
                    if self._converse(line):
                        return line
                except BaseException:
                    line.close()
                    raise
                line.close()
            self._waiting.look(self._missing)
            time.sleep(self._waiting.pause_s(next_s(self._waiting.waited_s)))

    def _missing(self) -> str:
        return f"process 0 at {self._address}: {self._known}"

    def _connected(self) -> socket.socket:
        addresses = self._lookup(_LOOKUP_S)
        # One after the other: of a pod that was replaced, the old address may be listed, too.
        family, kind, protocol, _, where = addresses[self._tries % len(addresses)]
        self._tries += 1
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(where)
        except BaseException:
            sock.close()
            raise
        return sock

    def _converse(self, line: Line) -> bool:
        """Talks to whoever is at process 0's address. Returns whether all are there; if not, the next try follows."""
        line.send(**dataclasses.asdict(self._me))
        with selectors.DefaultSelector() as selector:
            selector.register(line.sock, selectors.EVENT_READ)
            silent_since_s = time.monotonic()
            while True:
                if selector.select(self._waiting.pause_s(1.0 if line.who is None else SAY_EVERY_S)):
                    messages = line.receive()
                    if messages is None:
                        self._known = "it has gone again" if line.who else _stranger(line)
                        return False
                    silent_since_s = time.monotonic()
                    for message in messages:
                        if (is_all_there := self._heard(line, message)) is not None:
                            return is_all_there
                elif line.who is None and time.monotonic() - silent_since_s > INTRODUCTION_S:
                    self._known = "something answers there that says nothing"
                    return False
                elif time.monotonic() - silent_since_s > SILENT_S:
                    self._known = "it has fallen silent"
                    return False
                self._waiting.look(self._missing)

    def _heard(self, line: Line, message: Mapping[str, Any]) -> bool | None:
        """Acts on a message of process 0. Returns None if the conversation continues, else as ``_converse``."""
        if line.who is None:
            return None if self._meets(line, message) else False
        if "begin" in message:
            return True
        if "failed" in message:
            raise AgreementError(str(message["failed"]))
        if "ends" in message:
            raise not_joined(f"{self._me} leaves: {message['ends']}", self._exit_code)
        if "missing" in message:
            self._known = f"it is here, and waits for {message['missing']}"
        return None

    def _meets(self, line: Line, message: Mapping[str, Any]) -> bool:
        """Reads the introduction of process 0. Returns whether it is the one that this process looks for."""
        try:
            line.who = Introduction.read(message)
        except ValueError:
            self._known = "something answers there that is not process 0"
            return False
        verdict = compare(line.who, self._me)
        if verdict is Comparison.SECOND_IS_OLD:
            raise not_joined(outdated(self._me, line.who), self._exit_code)
        if verdict is Comparison.DIFFERS:
            raise AgreementError(difference(line.who, self._me))
        if verdict is not Comparison.FITS:
            mismatch = (
                f"of job {line.who.job}; this is job {self._me.job}" if verdict is Comparison.OTHER_JOB else "old"
            )
            sighting = f"{line.who} is there, which is {mismatch}"
            if sighting != self._known:
                logger.warning("%s still waits for its own process 0: %s", self._me, sighting)
            self._known = sighting
            return False
        self._known = "it is here, and waits for others"
        return True


def _stranger(line: Line) -> str:
    if not line.unread:
        return "the connection was closed at once"
    return (
        "another server answers there: JAX's coordination service, if a cluster has begun without this process, or "
        "another program"
    )


_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.01, 5.0


def pauses() -> Callable[[float], float]:
    """Returns a function that returns, by the seconds waited so far, how many to pause before the next look.

    Most processes come just before or after process 0, so pauses begin short and grow to 0.1 s. Each look is up to ten
    requests to the cluster's DNS, so a large job would send thousands of them in a second. Therefore a pause in a long
    wait is a twentieth of the time waited so far, and at most a second; after an hour 5 s.
    """
    backoff = Backoff(_FIRST_PAUSE_S, _MOST_PAUSE_S, jitter=0.0)
    return lambda waited_s: backoff.next_s(max(0.1, min(waited_s / 20, max(1.0, waited_s / 720))))
