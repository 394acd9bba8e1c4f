"""A proxy in front of an object store: it is slow as a network is, does faults on command, and counts requests.

It passes on what clients send as it is, with their Host header: signatures stay good, and addresses in replies lead to
the proxy. It speaks HTTP/1.1 without TLS.

Threads: one accepts connections; one serves each of them, request after request, with a connection of its own to the
server. ``close`` closes every socket, which ends all of them. ``_lock`` guards the list of exchanges, the numbers,
the rules and the sockets; a thread touches nothing else of another one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from tests.object_stores.faults import (
    Asked,
    Count,
    Exchange,
    Fault,
    How,
    Rule,
    Shape,
    counts,
    is_conditional,
    kind_of,
)
from tests.object_stores.http_messages import Closed, Head, Reader
from tests.object_stores.pace import Pace

_IDLE_S = 600.0
_CONNECT_S = 10.0
_JOIN_S = 10.0
_SETTLES_S = 1.0
_RESET = struct.pack("ii", 1, 0)


class _Reset(Exception):
    """A fault resets the connection."""


class FaultProxy:
    """See the module.

    Args:
        target: The server, such as ``http://127.0.0.1:4443``.
        shape: How slow the network is.
        address: Where to listen.
        port: Its port; 0 lets the kernel choose.

    Attributes:
        url: Where the proxy listens.
        passed: Returns the head that is passed on in place of a request's, or the reply to it.
    """

    def __init__(self, target: str, shape: Shape | None = None, *, address: str = "127.0.0.1", port: int = 0) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._recorded = threading.Condition(self._lock)
        self._under_way = 0
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._exchanges: list[Exchange] = []
        self._number = 0
        self._rules: list[tuple[Rule, list[int]]] = []
        self._ended = False
        self.passed: Callable[[Head], Head | bytes] = lambda head: head
        self.shape = shape or Shape()
        self._listener = socket.create_server((address, port), backlog=256)
        self.url = f"http://{address}:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._acceptor.start()

    @property
    def shape(self) -> Shape:
        """How slow the network is; a new one is for the requests that come after it."""
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._shape = shape
        self._total_sent, self._total_received = Pace(shape.total_rate), Pace(shape.total_rate)

    def set_rules(self, *rules: Rule) -> None:
        """Replaces the rules. The first that fits a request counts."""
        with self._lock:
            self._rules = [(rule, [0]) for rule in rules]

    @contextlib.contextmanager
    def rules(self, *rules: Rule) -> Iterator[None]:
        """The rules hold inside of this; before and after there are none."""
        self.set_rules(*rules)
        try:
            yield
        finally:
            self.set_rules()

    def reset(self) -> None:
        """Forgets the exchanges; the next request has number 1."""
        with self._lock:
            self._exchanges = []
            self._number = 0

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """The requests that have ended, in the order of their ends.

        A client has its reply a moment before the request is recorded, so this waits for requests that are under way;
        not for long, as they may stall.
        """
        with self._lock:
            self._recorded.wait_for(lambda: not self._under_way, _SETTLES_S)
            return list(self._exchanges)

    @property
    def number(self) -> int:
        """How many requests have come."""
        return self._number

    def counts(self) -> dict[str, Count]:
        """The requests that have ended, by method and kind."""
        return counts(self.exchanges)

    @property
    def connections(self) -> int:
        """How many connections clients have now."""
        with self._lock:
            return len(self._threads)

    def cut(self) -> None:
        """Resets every connection that clients have now."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends everything."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(_JOIN_S)
        self._listener.close()
        self.cut()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(_JOIN_S)
        alive = [thread.name for thread in threads if thread.is_alive()]
        if alive:
            raise TimeoutError(f"waited {_JOIN_S:g} s for the fault proxy's connections to end: {', '.join(alive)}")

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="fault-proxy-connection", daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with self._known(client):
                time.sleep(self._shape.round_trip_s)  # the handshake's
                with socket.create_connection(self._target, timeout=_CONNECT_S) as server, self._known(server):
                    connection = _Connection(self, client, server)
                    while connection.serve_one():
                        pass
        except (_Reset, OSError, ValueError):
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except Closed:
            pass
        finally:
            client.close()
            with self._lock:
                self._threads.discard(threading.current_thread())

    @contextlib.contextmanager
    def _known(self, each: socket.socket) -> Iterator[None]:
        each.settimeout(_IDLE_S)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets.add(each)
        try:
            if self._ended:
                raise _Reset
            yield
        finally:
            with self._lock:
                self._sockets.discard(each)

    def _ask(self, head: Head) -> tuple[Asked, Fault | None]:
        method, target, _ = head.first.split(" ", 2)
        with self._lock:
            self._number += 1
            self._under_way += 1
            asked = Asked(self._number, method, target, kind_of(method, target), is_conditional(target, head.headers))
            for rule, used in self._rules:
                if (rule.times is None or used[0] < rule.times) and rule.fits(asked):
                    used[0] += 1
                    return asked, rule.fault
        return asked, None

    def _record(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)
            self._under_way -= 1
            self._recorded.notify_all()


class _Connection:
    """A client's connection and the server's that belongs to it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._from_client, self._from_server = Reader(client), Reader(server)
        self._take_shape()

    def _take_shape(self) -> None:
        self._shape = self._proxy.shape
        self._sent = Pace(self._shape.connection_rate)
        self._received = Pace(self._shape.connection_rate)

    def serve_one(self) -> bool:
        """Serves one request; returns whether the connection goes on."""
        head = self._from_client.head()
        if self._shape is not self._proxy.shape:
            self._take_shape()
        asked, fault = self._proxy._ask(head)
        passed = self._proxy.passed(head)
        status: int | None = None
        counted = [0, 0]
        try:
            time.sleep(self._shape.round_trip_s)
            if fault is not None and fault.how in (How.ANSWER, How.REFUSE):
                status = self._answer(head, fault, counted)
                return True
            if isinstance(passed, bytes):
                for _ in self._from_client.body(head):
                    pass
                self._client.sendall(passed)
                status = int(passed.split(b" ", 2)[1])
                return True
            self._request(passed, fault, counted)
            reply, status = self._reply(asked, fault, counted)
            return not (head.closes or reply.closes)
        except BaseException:
            status = None
            raise
        finally:
            self._proxy._record(Exchange(asked, status, counted[0], counted[1], None if fault is None else fault.how))

    def _answer(self, head: Head, fault: Fault, counted: list[int]) -> int:
        if fault.how is How.REFUSE:
            raise _Reset
        self._expects(head)
        for piece in self._from_client.body(head):
            counted[0] += len(piece)
        retry = f"Retry-After: {fault.retry_after_s}\r\n" if fault.retry_after_s is not None else ""
        body = b"" if head.first.startswith("HEAD ") else b"a fault"
        lines = (
            f"HTTP/1.1 {fault.status} Fault\r\n{retry}Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._client.sendall(lines.encode() + body)
        return fault.status

    def _request(self, head: Head, fault: Fault | None, counted: list[int]) -> None:
        self._expects(head)
        self._server.sendall(head.without("expect") if "expect" in head.headers else head.raw)
        stop = fault if fault is not None and fault.how in (How.CUT_REQUEST, How.STALL_REQUEST) else None
        paces = (self._sent, self._proxy._total_sent)
        self._pass(self._from_client.body(head), self._server, stop, paces, counted, 0)

    def _reply(self, asked: Asked, fault: Fault | None, counted: list[int]) -> tuple[Head, int]:
        reply = self._from_server.head()
        while reply.status < 200:
            reply = self._from_server.head()
        if fault is not None and fault.how is How.LOST_REPLY:
            raise _Reset
        if fault is not None and fault.how is How.SLOW_REPLY:
            self._stall(fault.seconds)
        self._client.sendall(reply.raw)
        stop = fault if fault is not None and fault.how in (How.CUT_REPLY, How.STALL_REPLY) else None
        if asked.method != "HEAD" and reply.status not in (204, 304):
            until_closed = reply.length is None and not reply.chunked
            pieces = self._from_server.body(reply, until_closed=until_closed)
            paces = (self._received, self._proxy._total_received)
            self._pass(pieces, self._client, stop, paces, counted, 1)
            if until_closed:
                raise Closed
        elif stop is not None:
            raise _Reset
        return reply, reply.status

    def _pass(
        self,
        pieces: Iterable[bytes | memoryview],
        to: socket.socket,
        stop: Fault | None,
        paces: Sequence[Pace],
        counted: list[int],
        index: int,
    ) -> None:
        for piece in pieces:
            if stop is not None and counted[index] + len(piece) >= stop.after_bytes:
                keep = stop.after_bytes - counted[index]
                to.sendall(piece[:keep])
                counted[index] += keep
                self._stop(stop)
                stop, piece = None, piece[keep:]
            for pace in paces:
                pace.wait(len(piece))
            to.sendall(piece)
            counted[index] += len(piece)
        if stop is not None:
            self._stop(stop)

    def _stop(self, fault: Fault) -> None:
        if fault.how in (How.CUT_REQUEST, How.CUT_REPLY):
            raise _Reset
        self._stall(fault.seconds)

    def _stall(self, seconds: float | None) -> None:
        """Waits so long, or until a side closes the connection."""
        closed = select.poll()
        closed.register(self._client, select.POLLRDHUP)
        closed.register(self._server, select.POLLRDHUP)
        if closed.poll(1000 * (_IDLE_S if seconds is None else seconds)):
            raise _Reset

    def _expects(self, head: Head) -> None:
        if "expect" in head.headers:
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
