"""One attacker: keeps as many connections to a port of the operator as it can, and shows no token.

    python -m benchmarks.operator_floods_attacker KIND PORT COUNT ADDRESS...

It connects from the addresses by turns. Whatever the operator closes is opened anew, so it is always busy. It ends when
standard input does. Then it prints one line of JSON: how many connections it opened, how many were refused or closed,
and how many were open at most. One thread, which polls.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator

_OPENED_A_TURN = 64
_TRICKLE_S = 1.0
_PRIORITY = 10
_HOST = "127.0.0.1"
_REQUEST = b"POST /v1/reports HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

#: What a connection does: each step sends bytes ("send", again and again as they are taken), or waits.
Step = tuple[str, bytes]


def _hello() -> bytes:
    """The first message of a TLS handshake, which costs nothing to send again."""
    sent = ssl.MemoryBIO()
    one = _context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        one.do_handshake()
    return sent.read()


def _context() -> ssl.SSLContext:
    made = ssl.create_default_context()
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def _nothing() -> Iterator[bytes]:
    yield from ()


def _half_closed() -> Iterator[bytes]:
    yield b""  # the end of what the client sends


def _half_a_hello() -> Iterator[bytes]:
    yield b"\x16\x03\x01\x02\x00\x01"


def _hello_alone() -> Iterator[bytes]:
    yield _HELLO


def _slow_headers() -> Iterator[bytes]:
    yield b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
    while True:
        yield b"a: b\r\n"


def _big_headers() -> Iterator[bytes]:
    yield b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
    for number in itertools.count():
        yield b"h%d: " % number + b"x" * 8000 + b"\r\n"


def _big_body() -> Iterator[bytes]:
    yield _REQUEST + b"Content-Length: 260000\r\nAuthorization: Bearer x\r\n\r\n"
    yield b"[" * 259_000  # never all of it
    while True:
        yield b""


def _pipelined() -> Iterator[bytes]:
    while True:
        yield b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200


def _unread() -> Iterator[bytes]:
    yield b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


_HELLO = _hello()
#: By name: whether there is a TLS handshake first (on ports that have TLS), what is sent, and whether slowly.
KINDS: dict[str, tuple[bool, Callable[[], Iterator[bytes]], bool]] = {
    "idle": (False, _nothing, False),
    "half-closed": (False, _half_closed, False),
    "half-hello": (False, _half_a_hello, False),
    "hello": (False, _hello_alone, False),
    "handshake": (True, _nothing, False),
    "slow-headers": (True, _slow_headers, True),
    "big-headers": (True, _big_headers, False),
    "big-body": (True, _big_body, False),
    "pipelined": (True, _pipelined, False),
    "unread": (True, _unread, False),
}


class Attacker:
    """See the module.

    Args:
        kind: One of ``KINDS``.
        port: The port.
        count: How many connections to keep open.
        addresses: Where to connect from.
        tls: Whether the port has TLS.
    """

    def __init__(self, kind: str, port: int, count: int, addresses: list[str], *, tls: bool) -> None:
        handshakes, self._says, self._slowly = KINDS[kind]
        self._tls = _context() if handshakes and tls else None
        self._port, self._count = port, count
        self._addresses = itertools.cycle(addresses)
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, Iterator[bytes]]] = {}
        self._left: dict[int, bytes] = {}
        self._shaking: set[int] = set()
        self.opened = self.closed = self.most = 0

    def run(self) -> None:
        """Until standard input ends."""
        self._poll.register(0, select.EPOLLIN | select.EPOLLHUP)
        trickled_at = 0.0
        while True:
            for _ in range(min(_OPENED_A_TURN, self._count - len(self._open))):
                self._connect()
            self.most = max(self.most, len(self._open))
            for number, _ in self._poll.poll(0.0 if len(self._open) < self._count else 0.05, 1024):
                if number == 0:
                    return
                self._go_on(number)
            if self._slowly and time.monotonic() - trickled_at > _TRICKLE_S:
                trickled_at = time.monotonic()
                for number in list(self._open):
                    if number not in self._shaking:
                        self._send(number)

    def _connect(self) -> None:
        one = socket.socket()
        one.setblocking(False)
        try:
            one.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: more connections than ports
            one.bind((next(self._addresses), 0))
            one.connect_ex((_HOST, self._port))
        except OSError as error:
            one.close()
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EMFILE):
                raise
            return
        self.opened += 1
        number = one.fileno()
        if self._tls is not None:
            self._shaking.add(number)
        self._open[number] = (one, self._says())
        self._poll.register(number, select.EPOLLIN | select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR)

    def _go_on(self, number: int) -> None:
        if number not in self._open:
            return
        one, _ = self._open[number]
        try:
            if number in self._shaking:
                assert self._tls is not None
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise ConnectionError
                if not isinstance(one, ssl.SSLSocket):
                    one = self._tls.wrap_socket(one, do_handshake_on_connect=False, server_hostname="localhost")
                    self._open[number] = (one, self._open[number][1])
                try:
                    one.do_handshake()
                except ssl.SSLWantReadError:
                    self._poll.modify(number, select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR)
                    return
                self._shaking.discard(number)
            if self._says is not _unread and self._is_ended(one):
                raise ConnectionError
            self._send(number)
        except (OSError, ValueError):
            self._forget(number)

    def _is_ended(self, one: socket.socket) -> bool:
        try:
            return one.recv(4096) == b""
        except (BlockingIOError, ssl.SSLWantReadError):
            return False

    def _send(self, number: int) -> None:
        if number not in self._open:
            return
        one, says = self._open[number]
        try:
            data = self._left.pop(number, None) or next(says)
            if data == b"":
                if self._says is _half_closed:
                    one.shutdown(socket.SHUT_WR)
                self._quiet(number)
                return
            sent = one.send(data)
            if sent < len(data):
                self._left[number] = data[sent:]
            if self._slowly:
                self._quiet(number)
        except StopIteration:
            self._quiet(number)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._left[number] = data
        except OSError:
            self._forget(number)

    def _quiet(self, number: int) -> None:
        events = select.EPOLLHUP | select.EPOLLERR
        self._poll.modify(number, events if self._says is _unread else events | select.EPOLLIN)

    def _forget(self, number: int) -> None:
        one, _ = self._open.pop(number)
        self._left.pop(number, None)
        self._shaking.discard(number)
        self.closed += 1
        with contextlib.suppress(OSError):
            self._poll.unregister(number)
        one.close()


def main() -> None:
    kind, port, tls, count, *addresses = sys.argv[1:]
    os.nice(_PRIORITY)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(kind, int(port), int(count), addresses, tls=tls == "tls")
    attacker.run()
    print(json.dumps({"opened": attacker.opened, "closed": attacker.closed, "most": attacker.most}))


if __name__ == "__main__":
    main()
