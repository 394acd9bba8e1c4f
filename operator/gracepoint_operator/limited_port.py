"""A port of the operator: an aiohttp application behind limits for connections, which anybody in the cluster can open.

A connection costs memory, a TLS handshake costs processor time, and both come before the caller is known. So a
connection is *pending* until ``keep`` is called for its request, when its caller is known. Pending connections are
limited in number, for each peer address and in all, and in what they may have sent, and each is closed after a time.
They are also limited in how often an address may open one, and in how many of them shake hands at a time. Kept
connections have a separate limit, if any: beyond, one that rests is closed, and never one with a request.

If all places are taken, the address with the most of them loses its oldest one. So an address that floods a port blocks
only itself. If all addresses have about equally many, no connection is closed: new connections wait in the kernel's
queue until a place is free. Several clients can share an address (``hostNetwork``, address translation), so the limit
for an address must let all their handshakes through. A client that is refused tries again.

An address is *known* for an hour after a connection of it was kept: it may have all places, comes first when a
handshake begins, and its connections are the last to be closed.

An accepted connection is a socket and little else until its first bytes are there. Then it waits for its turn: one in
each turn of the event loop, by turns between addresses, and of each address so many in a second. So what else runs on
the loop is delayed by one handshake and not by hundreds, and connections that say nothing cost no handshake.

Everything runs on the event loop that calls ``start``: one task accepts, another one gives turns, one short task for
each connection ends its handshake, and one timer for each pending connection ends it. ``close`` ends all of them, and
waits for the connections that were kept, for a bounded time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final

from aiohttp import hdrs, web

from gracepoint_operator.logs import about, seldom

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # as many as the kernel allows (net.core.somaxconn): a gang's pods connect at once
#: Seconds for clients to answer the end of a connection.
CLOSE_CONNECTIONS_S: Final = 1.0
#: Seconds for the event loop to close sockets that were shut down.
_CUT_OFF_S = 1.0
_SHUTDOWN_S = 2.0  # for the peer to answer TLS's close
_CLOSE_S = 2.0
_ACCEPT_AGAIN_S = 0.5  # after the process ran out of file descriptors
#: So many connections are accepted in one turn of the event loop. Each takes 0.1 ms, and an answer to the API server
#: takes ten turns.
_ACCEPTED_A_TURN = 8
#: Addresses whose rates are remembered, and addresses that are known. Each takes some hundred bytes.
_ADDRESSES = 10_000
_KNOWN_S = 3600.0
#: So many times as many as an address may begin with may come at once.
_BURST = 4.0
#: Of connections that are only accepted, so many times as many as of those that may begin. More are refused.
_ACCEPTED = 10.0
#: An address that is known may begin with so many times as many.
_OF_KNOWN = 4.0
#: aiohttp keeps the headers of a request until they are complete.
_HEADERS = 64


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits for connections whose callers are not known.

    Attributes:
        handshake_s: Seconds from accept to the end of the TLS handshake, or to the first bytes where there is no TLS.
        request_s: Seconds from the handshake until the first request's headers, and between two requests.
        pending_s: Seconds in all, from accept. It must be longer than the slowest answer.
        at_once: The largest number of pending connections.
        at_once_of_address: The largest number of pending connections of one peer address that is not known.
        handshakes: The largest number of TLS handshakes that have begun and not ended, half of them of one address.
        a_second_of_address: How many connections of an address begin in a second, with a handshake or a request, on
            average. Four times as many may come at once. More wait for their turn. Ten times as many are accepted.
        bytes: How much a pending connection may send until its request is answered.
        bytes_at_once: The same for all pending connections together.
        replaces: What happens to another connection of an address that has all of its places. True: it takes the place
            of the address's oldest one, which suits callers that are served at once. False: it is refused.
        crowded_s: Seconds that a handshake has at least, although others wait for its place.
        kept: The largest number of connections whose callers are known. Beyond, the address with the most loses the one
            that has rested the longest. None: any number.
    """

    handshake_s: float = 10.0
    request_s: float = 10.0
    pending_s: float = 30.0
    at_once: int = 1024
    at_once_of_address: int = 256
    handshakes: int = 64
    a_second_of_address: float = 50.0
    bytes: int = 320 * 1024
    bytes_at_once: int = 8 * 1024 * 1024
    replaces: bool = False
    crowded_s: float = 1.0
    kept: int | None = None


class CloseReason(StrEnum):
    """Why the operator closed a connection. A label of metrics."""

    ADDRESS_FULL = "address_full"
    CROWDED = "crowded"
    HANDSHAKE = "handshake"  # the TLS handshake failed, or took too long
    RESTED = "rested"  # its caller was known, and there were too many
    TOO_LARGE = "too_large"
    TOO_OFTEN = "too_often"
    TOO_SLOW = "too_slow"


class _Connection(asyncio.Protocol):
    """One connection: passes everything to aiohttp's protocol, and notifies ``port`` of each receipt and of its end.

    Attributes:
        inner: aiohttp's protocol. None before its turn.
        turn: What it waits for once its first bytes are there. None before that.
        shaking_since: When its handshake began, by the loop's clock.
        received: Bytes since it was accepted, or since its last request was answered.
    """

    def __init__(self, accepted: socket.socket, address: str, port: LimitedPort) -> None:
        self.address = address
        self.accepted = accepted
        self.inner: asyncio.Protocol | None = None
        self.turn: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self.shaking_since = 0.0
        self.received = 0
        self._port = port

    def abort(self) -> None:
        """Closes the connection at once, in any state."""
        if self.transport is not None:
            self.transport.abort()
        # A TLS transport that was closed twice ignores abort(), and a cancelled handshake does not always close the
        # socket. The end of the stream ends both.
        with contextlib.suppress(OSError):
            self.accepted.shutdown(socket.SHUT_RDWR)

    @property
    def waits(self) -> bool:
        """True if it waits for its turn. False if it has had it, or has ended."""
        return self.turn is not None and not self.turn.done()

    @property
    def _served(self) -> asyncio.Protocol:
        assert self.inner is not None, "a connection is handed over in its turn"
        return self.inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._served.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._port.takes(self, len(data)):
            self._served.data_received(data)

    def eof_received(self) -> bool | None:
        return self._served.eof_received()

    def pause_writing(self) -> None:
        self._served.pause_writing()

    def resume_writing(self) -> None:
        self._served.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.ended(self)
        self._served.connection_lost(exc)


class _Places:
    """Who has places of some kind: by address, oldest first."""

    def __init__(self) -> None:
        self._of: dict[str, dict[_Connection, None]] = {}
        self._all: set[_Connection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, connection: _Connection) -> bool:
        return connection in self._all

    def of_address(self, address: str) -> int:
        return len(self._of.get(address, ()))

    def add(self, connection: _Connection) -> None:
        self._of.setdefault(connection.address, {})[connection] = None
        self._all.add(connection)

    def remove(self, connection: _Connection) -> bool:
        """Returns whether it had a place."""
        if connection not in self._all:
            return False
        self._all.remove(connection)
        of_address = self._of[connection.address]
        del of_address[connection]
        if not of_address:
            del self._of[connection.address]
        return True

    def oldest(self, address: str) -> _Connection:
        """The oldest connection of an address that has some."""
        return next(iter(self._of[address]))

    def most(self, counts: Callable[[str], int] | None = None) -> str:
        """The address with the most.

        Args:
            counts: How much an address has, if that is not the number of its connections.
        """
        return max(self._of, key=counts or self.of_address)

    def all(self) -> list[_Connection]:
        return list(self._all)


class _Rates:
    """How often addresses do something: a bucket of tokens for each."""

    def __init__(self, a_second: float) -> None:
        self._a_second = a_second
        self._tokens: dict[str, tuple[float, float]] = {}  # what is left, and when that was

    def wait_s(self, address: str, times: float = 1.0) -> float:
        """Returns in how many seconds the address may do it.

        Args:
            address: The address.
            times: It may do it so many times as often as others.
        """
        return max(0.0, 1.0 - self._tokens_now(address, times)) / (self._a_second * times)

    def take(self, address: str, times: float = 1.0) -> bool:
        """Returns whether the address may do it now; then it has done it."""
        tokens = self._tokens_now(address, times)
        if tokens < 1.0:
            return False
        self._tokens.pop(address, None)
        if len(self._tokens) >= _ADDRESSES:
            del self._tokens[next(iter(self._tokens))]  # the one that has not come for the longest time
        self._tokens[address] = (tokens - 1.0, time.monotonic())
        return True

    def _tokens_now(self, address: str, times: float) -> float:
        a_second = self._a_second * times
        tokens, at = self._tokens.get(address, (math.inf, 0.0))
        return min(_BURST * a_second, tokens + (time.monotonic() - at) * a_second)


class LimitedPort:
    """A port behind limits for connections. It must be created and used on one event loop.

    Args:
        name: For the log.
        app: The application.
        context: The server's TLS context. None: plain HTTP.
        limits: Limits for connections.
        count_closed: Called with the reason for each connection that is closed here.
        keepalive: False: each connection serves one request.
    """

    def __init__(
        self,
        name: str,
        app: web.Application,
        context: ssl.SSLContext | None,
        limits: ConnectionLimits,
        count_closed: Callable[[str], None],
        *,
        keepalive: bool = True,
    ) -> None:
        self._name = name
        self._context = context
        self._limits = limits
        self._count_closed = count_closed
        self._keepalive = keepalive
        app.on_response_prepare.append(self._answers)
        app.middlewares.append(_end_without_traceback)
        # No access log: the paths of webhooks are secret. A handler is cancelled when its client disconnects, so that
        # what it holds is released at once.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_CONNECTIONS_S,
            # It also counts from the handshake to the first request.
            keepalive_timeout=limits.request_s,
            max_headers=_HEADERS,
            auto_decompress=False,  # nobody compresses requests
        )
        self._listener: socket.socket | None = None
        self._pending = _Places()
        self._shaking = _Places()
        self._kept: set[_Connection] = set()  # if they are limited
        self._none_kept = asyncio.Event()
        self._none_kept.set()
        self._resting = _Places()  # those of them that have no request
        self._known: dict[str, float] = {}  # addresses, and when one of their connections was last kept
        self._accepts = _Rates(limits.a_second_of_address * _ACCEPTED)
        self._begins = _Rates(limits.a_second_of_address)
        self._received = 0  # of all pending connections
        self._by_protocol: dict[asyncio.BaseProtocol, _Connection] = {}  # pending and kept ones, by aiohttp's protocol
        self._open: set[_Connection] = set()  # all, until their sockets are closed
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        #: Whose first bytes are there, by address, oldest first. Some may have ended.
        self._hellos: dict[str, collections.deque[_Connection]] = {}
        self._known_turn = False  # whose turn it is: of an address that is known, or of one that is not
        self._turn_possible = asyncio.Event()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._place_free = asyncio.Event()

    @property
    def pending(self) -> int:
        """The number of connections whose callers are not known."""
        return len(self._pending)

    def keep(self, request: web.Request) -> None:
        """Keeps the connection of a request whose caller is known, until one of the two sides ends it."""
        connection = self._by_protocol.get(request.protocol)
        if connection is None:
            return
        self._known.pop(connection.address, None)
        if len(self._known) >= _ADDRESSES:
            del self._known[next(iter(self._known))]
        self._known[connection.address] = time.monotonic()
        if connection in self._pending:
            self._settle(connection)
            if self._limits.kept is None:
                del self._by_protocol[request.protocol]
                return
            while len(self._kept) >= self._limits.kept and len(self._resting):
                self._end(self._resting.oldest(self._resting.most()), CloseReason.RESTED)
            self._kept.add(connection)
            self._none_kept.clear()
        self._resting.remove(connection)

    async def _answers(self, request: web.Request, response: web.StreamResponse) -> None:
        """aiohttp begins to answer a request."""
        if not self._keepalive:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"  # aiohttp has made the headers already
        connection = self._by_protocol.get(request.protocol)
        if connection is None:
            return
        if connection in self._pending:
            self._received -= connection.received
            connection.received = 0
        elif connection in self._kept:
            self._resting.add(connection)

    def takes(self, connection: _Connection, number: int) -> bool:
        """Called with the number of bytes that a connection has received. Returns whether it stays open."""
        if connection not in self._pending:
            return connection in self._open
        connection.received += number
        self._received += number
        if connection.received > self._limits.bytes:
            self._end(connection, CloseReason.TOO_LARGE)
        while self._received > self._limits.bytes_at_once:
            self._end(self._largest(), CloseReason.TOO_LARGE)
        return connection in self._pending

    def _largest(self) -> _Connection:
        """The pending connection that has sent the most, of the address that has."""
        by_address: collections.Counter[str] = collections.Counter()
        for one in self._pending.all():
            by_address[one.address] += one.received
        address = max(by_address, key=lambda one: by_address[one])
        return max((one for one in self._pending.all() if one.address == address), key=lambda one: one.received)

    async def start(self, host: str | None, port: int) -> int:
        """Listens. Returns the port.

        Args:
            host: Address to listen on. None: all addresses.
            port: 0: the kernel chooses one.

        Raises:
            OSError: It cannot be listened on.
        """
        await self._runner.setup()
        self._listener = _listener(host, port)
        return int(self._listener.getsockname()[1])

    async def accept(self) -> None:
        """Accepts connections until cancelled."""
        assert self._listener is not None, "accept() is called after start()"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._give_turns(), name=f"turns: {self._name}")
            await self._accept(self._listener)

    async def send_on(self, seconds: float) -> None:
        """Serves each client once more, and tells it to connect again, by which it comes to another replica.

        A client that sends a request while its kept connection is being closed does not know whether it was served, so
        an API server fails the call. Returns when no kept connection is left, at the latest after so many seconds.
        """
        self._keepalive = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none_kept.wait()

    async def close(self) -> None:
        """Stops listening, and returns when every socket is closed. Waits for a bounded time.

        Call it when ``accept`` has ended. aiohttp does not wait for the client's answer to TLS's close. A client that
        does not answer in time is cut off.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in self._pending.all():
            self._settle(connection)
            connection.abort()
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=_CLOSE_S)
        await self._runner.cleanup()
        for timeout_s in (CLOSE_CONNECTIONS_S, _CUT_OFF_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_closed.wait()
                    return
            for connection in list(self._open):
                connection.abort()
        fields = about(port=self._name, number=len(self._open), waited_s=_CUT_OFF_S)
        logger.error("connections could not be closed", extra=fields)

    async def _accept(self, listener: socket.socket) -> None:
        for number in itertools.count(1):
            if number % _ACCEPTED_A_TURN == 0:
                await asyncio.sleep(0)  # an accept that does not wait lets no other task run
            try:
                # Not loop.sock_accept: when it is cancelled, it loses a connection that it has just accepted.
                accepted, peer = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:  # no file descriptor is left, or the peer has gone again
                extra = seldom(type(error).__name__, port=self._name, error=repr(error))
                logger.warning("a connection could not be accepted", extra=extra)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if self._accepts.take(str(peer[0])):
                accepted.setblocking(False)
                await self._take(accepted, str(peer[0]))
            else:  # as most of them in a flood
                self._refuse(accepted, str(peer[0]), CloseReason.TOO_OFTEN)

    def _refuse(self, accepted: socket.socket, address: str, reason: CloseReason) -> None:
        self._closed(address, reason)  # before the close: a peer that sees it finds it counted
        accepted.close()

    async def _take(self, accepted: socket.socket, address: str) -> None:
        """Gives the connection a place, or refuses it."""
        refusal = None
        try:
            while not self._makes_room(address):
                if self._is_full(address):
                    refusal = CloseReason.ADDRESS_FULL
                    break
                self._place_free.clear()
                await self._place_free.wait()  # every pending connection ends in pending_s at the latest
        except asyncio.CancelledError:
            accepted.close()
            raise
        if refusal is not None:
            self._refuse(accepted, address, refusal)
            return
        connection = _Connection(accepted, address, self)
        self._open.add(connection)
        self._all_closed.clear()
        self._pending.add(connection)
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(self._limits.pending_s, self._end, connection, CloseReason.TOO_SLOW)
        task = asyncio.create_task(self._serve(connection), name="connection")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _is_known(self, address: str) -> bool:
        return time.monotonic() - self._known.get(address, -math.inf) < _KNOWN_S

    def _is_full(self, address: str) -> bool:
        places = self._limits.at_once if self._is_known(address) else self._limits.at_once_of_address
        return self._pending.of_address(address) >= places

    def _counts(self, address: str) -> int:
        """How many places of an address count when one is taken away."""
        return self._pending.of_address(address) - self._is_known(address) * self._limits.at_once_of_address

    def _makes_room(self, address: str) -> bool:
        """Makes room for another connection of the address. Returns whether there is some."""
        if self._is_full(address):
            if not self._limits.replaces:
                return False
            self._end(self._pending.oldest(address), CloseReason.ADDRESS_FULL)
        if len(self._pending) < self._limits.at_once:
            return True
        most = self._pending.most(self._counts)
        if not self._limits.replaces and self._counts(most) <= self._counts(address) + 1:
            return False
        self._end(self._pending.oldest(most), CloseReason.CROWDED)
        return True

    async def _serve(self, connection: _Connection) -> None:
        """Hands the connection to aiohttp in its turn, if there is TLS after the handshake."""
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        try:
            async with asyncio.timeout(self._limits.handshake_s) as limit:
                await _readable(connection.accepted)
                if not connection.accepted.recv(1, socket.MSG_PEEK):
                    return  # it has ended without sending anything
                await self._turn(connection)
                end = limit.when()
                assert end is not None
            connection.inner = server()
            self._by_protocol[connection.inner] = connection
            tls = self._context is not None
            await loop.connect_accepted_socket(
                lambda: connection,
                connection.accepted,
                ssl=self._context,
                ssl_handshake_timeout=max(0.01, end - loop.time()) if tls else None,
                ssl_shutdown_timeout=_SHUTDOWN_S if tls else None,
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are subclasses
            if connection in self._pending:
                slow = self._context is None and isinstance(error, TimeoutError)
                self._closed(connection.address, CloseReason.TOO_SLOW if slow else CloseReason.HANDSHAKE)
        finally:
            if self._shaking.remove(connection):
                self._turn_possible.set()
            if connection.transport is None:  # it was never made, so asyncio does not notify its protocol of the end
                connection.accepted.close()
                self.ended(connection)

    async def _turn(self, connection: _Connection) -> None:
        """Waits until the connection may shake hands.

        Raises:
            ConnectionAbortedError: It has ended meanwhile.
        """
        if connection not in self._pending:
            raise ConnectionAbortedError
        connection.turn = asyncio.get_running_loop().create_future()
        self._hellos.setdefault(connection.address, collections.deque()).append(connection)
        self._turn_possible.set()
        await connection.turn
        if connection not in self._pending:
            raise ConnectionAbortedError

    async def _give_turns(self) -> None:
        """Lets connections shake hands, by turns between addresses, until cancelled."""
        while True:
            self._turn_possible.clear()
            wait_s = self._give_turn()
            if wait_s == 0.0:
                await asyncio.sleep(0)  # one handshake in each turn of the loop
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                    await self._turn_possible.wait()

    def _give_turn(self) -> float:
        """Gives one connection its turn. Returns 0, or after how many seconds one may have it."""
        soonest_s = math.inf
        self._known_turn = not self._known_turn
        for of_known in (self._known_turn, not self._known_turn):
            for address in [one for one in self._hellos if self._is_known(one) is of_known]:
                if not self._waits(address):
                    continue
                wait_s = self._begins.wait_s(address, _OF_KNOWN if of_known else 1.0) or self._make_handshake_place(
                    address
                )
                if wait_s == 0.0:
                    self._begin(address, _OF_KNOWN if of_known else 1.0)
                    return 0.0
                soonest_s = min(soonest_s, wait_s)
        return soonest_s

    def _waits(self, address: str) -> bool:
        """Returns whether a connection of the address waits for its turn. Those that ended meanwhile are forgotten."""
        waiting = self._hellos[address]
        # Those in between are forgotten when they are first or last: in a flood there are many, and many turns.
        while waiting and not waiting[0].waits:
            waiting.popleft()
        while waiting and not waiting[-1].waits:
            waiting.pop()
        if not waiting:
            del self._hellos[address]
        return bool(waiting)

    def _begin(self, address: str, times: float) -> None:
        waiting = self._hellos.pop(address)
        # Where another connection takes the oldest one's place, the newest is the likeliest to be of a caller that is
        # served at once.
        connection = waiting.pop() if self._limits.replaces else waiting.popleft()
        if waiting:
            self._hellos[address] = waiting  # at the end
        self._begins.take(address, times)
        connection.shaking_since = asyncio.get_running_loop().time()
        self._shaking.add(connection)
        _end_wait(connection)

    def _make_handshake_place(self, address: str) -> float:
        """Makes a place among the handshakes for the address. Returns 0, or when to try again, in seconds."""
        if self._shaking.of_address(address) >= max(1, self._limits.handshakes // 2):
            crowding, fair = self._shaking.oldest(address), True
        elif len(self._shaking) >= self._limits.handshakes:
            most = self._shaking.most()
            crowding = self._shaking.oldest(most)
            fair = self._shaking.of_address(most) <= self._shaking.of_address(address) + 1
        else:
            return 0.0
        had_s = asyncio.get_running_loop().time() - crowding.shaking_since
        if fair and not self._limits.replaces and had_s < self._limits.crowded_s:
            return self._limits.crowded_s - had_s
        self._shaking.remove(crowding)
        self._end(crowding, CloseReason.CROWDED)
        return 0.0

    def _end(self, connection: _Connection, reason: CloseReason) -> None:
        self._forget(connection)
        connection.abort()
        self._closed(connection.address, reason)

    def ended(self, connection: _Connection) -> None:
        """Called when the socket of a connection is closed."""
        self._forget(connection)
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()

    def _forget(self, connection: _Connection) -> None:
        """Removes a connection from the pending and the kept ones."""
        self._settle(connection)
        self._kept.discard(connection)
        if not self._kept:
            self._none_kept.set()
        self._resting.remove(connection)
        if connection.inner is not None:
            self._by_protocol.pop(connection.inner, None)

    def _settle(self, connection: _Connection) -> None:
        """Removes a connection from the pending ones."""
        if not self._pending.remove(connection):
            return
        self._received -= connection.received
        if connection.timer is not None:
            connection.timer.cancel()
        _end_wait(connection)
        self._place_free.set()

    def _closed(self, address: str, reason: CloseReason) -> None:
        self._count_closed(reason)
        if reason not in (CloseReason.HANDSHAKE, CloseReason.RESTED):
            logger.warning(
                "connections of unknown callers are closed",
                extra=seldom(reason, port=self._name, peer=address, pending=self.pending),
            )


def _end_wait(connection: _Connection) -> None:
    """Wakes a connection that waits for its turn: it has it, or has ended."""
    if connection.turn is not None and not connection.turn.done():
        connection.turn.set_result(None)


@web.middleware
async def _end_without_traceback(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Ends a request whose client has gone, by an answer that nobody gets.

    The task of a cancelled request refers to the error, the error by its traceback to the request with what was read of
    its body, and the request to the task. All that would live until the next garbage collection.
    """
    try:
        return await handler(request)
    except asyncio.CancelledError:
        pass
    return web.Response(status=499)


async def _readable(its: socket.socket) -> None:
    """Waits until something can be read or accepted."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(its, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(its)


def _listener(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel supports IPv6, but this network does not
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            listener.setblocking(False)
            return listener
    listener = socket.create_server((host or "", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
