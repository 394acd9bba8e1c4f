"""A port of the operator: an aiohttp application behind limits for connections, which anybody in the cluster can open.

A connection costs memory, a TLS handshake costs processor time, and both come before the caller is known. So a
connection is *pending* until ``keep`` is called for its request, when its caller is known. Pending connections are
limited in number, for each peer address and in all, and each is closed after a time. They are also limited in how
often an address may open one, and in how many of them shake hands at a time. Kept connections have a limit of their
own, if any.

If all places are taken, the address with the most of them loses its oldest one. So an address that floods a port blocks
only itself. If all addresses have about equally many, no connection is closed: new connections wait in the kernel's
queue until a place is free. Several clients can share an address (``hostNetwork``, address translation), so the limit
for an address must let all their handshakes through. A client that is refused tries again.

A TLS handshake begins once its first bytes are there, one in each turn of the event loop and by turns between
addresses, so that what else runs on the loop is delayed by one handshake and not by hundreds.

Everything runs on the event loop that calls ``start``: one task accepts, another one begins handshakes, one short task
for each connection ends its handshake, and one timer for each pending connection ends it. ``close`` ends all of them,
and waits for the connections that were kept, for a bounded time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from aiohttp import web

from gracepoint_operator.observability.logs import about, seldom

log = logging.getLogger(__name__)

_BACKLOG = 4096  # as many as the kernel allows (net.core.somaxconn): a gang's pods connect at once
#: Seconds for clients to answer the end of a connection.
CLOSE_CONNECTIONS_S: Final = 1.0
#: Seconds for the event loop to close sockets that were shut down.
_CUT_OFF_S = 1.0
_SHUTDOWN_S = 2.0  # for the peer to answer TLS's close
_CLOSE_S = 2.0
_ACCEPT_AGAIN_S = 0.5  # after the process ran out of file descriptors
#: If every address has its share of the handshakes and others wait, the oldest one has had this long.
_CROWDED_S = 1.0
#: So many connections are refused in one turn of the event loop; to refuse one takes some ten microseconds.
_REFUSED_A_TURN = 32
#: Addresses whose rates are remembered. Each takes some hundred bytes.
_RATES = 10_000


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits for connections whose callers are not known.

    Attributes:
        handshake_s: Seconds from accept to the end of the TLS handshake.
        request_s: Seconds from the handshake until the first request's headers, and between two requests.
        pending_s: Seconds in all, from accept. It must be longer than the slowest answer.
        at_once: The largest number of pending connections.
        at_once_of_address: The largest number of pending connections of one peer address.
        handshakes: The largest number of TLS handshakes that have begun and not ended.
        a_second_of_address: How many connections an address may open in a second, on average. Four times as many may
            come at once. None: any number.
        replaces: What happens to another connection of an address that has all of its places. True: it takes the place
            of the address's oldest one, which suits callers that are served at once. False: it is refused.
        kept: The largest number of connections whose callers are known. Beyond, the address with the most loses its
            oldest one. None: any number.
    """

    handshake_s: float = 10.0
    request_s: float = 10.0
    pending_s: float = 30.0
    at_once: int = 1024
    at_once_of_address: int = 256
    handshakes: int = 64
    a_second_of_address: float | None = None
    replaces: bool = False
    kept: int | None = None


class CloseReason(StrEnum):
    """Why the operator closed a connection whose caller was not known. A label of metrics."""

    ADDRESS_FULL = "address_full"
    CROWDED = "crowded"
    HANDSHAKE = "handshake"  # the TLS handshake failed, or took too long
    TOO_OFTEN = "too_often"
    TOO_SLOW = "too_slow"


class _Connection(asyncio.Protocol):
    """One connection: passes everything to aiohttp's protocol, and calls ``ended`` when it is lost."""

    def __init__(
        self, accepted: socket.socket, address: str, inner: asyncio.Protocol, ended: Callable[[_Connection], None]
    ) -> None:
        self.address = address
        self.inner = inner
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self.accepted = accepted
        self._ended = ended

    def abort(self) -> None:
        """Closes the connection at once, in any state."""
        if self.transport is not None:
            self.transport.abort()
        # A TLS transport that was closed twice ignores abort(), and a cancelled handshake does not always close the
        # socket. The end of the stream ends both.
        with contextlib.suppress(OSError):
            self.accepted.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(self)
        self.inner.connection_lost(exc)


class _Places:
    """A limited number of places, and who has them: by address, oldest first."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
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

    def oldest(self, address: str | None = None) -> _Connection:
        """The oldest connection of an address. None: of the address with the most."""
        of_address = max(self._of.values(), key=len) if address is None else self._of[address]
        return next(iter(of_address))

    def is_fair(self, address: str) -> bool:
        """Whether no address has at least two places more than this one."""
        return max(map(len, self._of.values()), default=0) <= self.of_address(address) + 1

    def all(self) -> list[_Connection]:
        return list(self._all)


class _Rates:
    """How often addresses open connections: a bucket of tokens for each."""

    def __init__(self, a_second: float) -> None:
        self._a_second = a_second
        self._burst = 4 * a_second
        self._tokens: dict[str, tuple[float, float]] = {}  # what is left, and when that was

    def take(self, address: str) -> bool:
        """Returns whether the address may open one now."""
        now = time.monotonic()
        left, at = self._tokens.pop(address, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._a_second)
        if len(self._tokens) >= _RATES:
            del self._tokens[next(iter(self._tokens))]  # the one that has not come for the longest time
        self._tokens[address] = (max(0.0, left - 1.0), now)
        return left >= 1.0


class LimitedPort:
    """See the module. It must be created and used on one event loop.

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
        if not keepalive:
            app.on_response_prepare.append(_close_after)
        # No access log: the paths of webhooks are secret. A handler is cancelled when its client disconnects, so that
        # what it holds is released at once.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_CONNECTIONS_S,
            # It also counts from the handshake to the first request.
            keepalive_timeout=limits.request_s,
        )
        self._listener: socket.socket | None = None
        self._pending = _Places(limits.at_once)
        self._shaking = _Places(limits.handshakes)
        self._kept = _Places(limits.at_once if limits.kept is None else limits.kept)
        self._rates = None if limits.a_second_of_address is None else _Rates(limits.a_second_of_address)
        self._by_protocol: dict[asyncio.BaseProtocol, _Connection] = {}  # the pending ones, by aiohttp's protocol
        self._open: set[_Connection] = set()  # all, until their sockets are closed
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        #: Whose first bytes are there, by address, and what each waits for.
        self._hellos: dict[str, collections.deque[tuple[_Connection, asyncio.Future[None]]]] = {}
        self._hello = asyncio.Event()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._place_free = asyncio.Event()
        self._handshake_free = asyncio.Event()

    @property
    def pending(self) -> int:
        """The number of connections whose callers are not known."""
        return len(self._pending)

    def keep(self, request: web.Request) -> None:
        """Keeps the connection of a request whose caller is known, until one of the two sides ends it."""
        connection = self._by_protocol.get(request.protocol)
        if connection is None:
            return
        self._forget(connection)
        if self._limits.kept is None:
            return
        if len(self._kept) >= self._kept.at_once:
            self._end(self._kept.oldest(), CloseReason.CROWDED)
        self._kept.add(connection)

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
            if self._context is not None:
                tasks.create_task(self._give_turns(), name=f"handshakes: {self._name}")
            await self._accept(self._listener)

    async def close(self) -> None:
        """Stops listening, and returns when every socket is closed. Waits for a bounded time.

        Call it when ``accept`` has ended. aiohttp does not wait for the client's answer to TLS's close. A client that
        does not answer in time is cut off.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in self._pending.all():
            self._forget(connection)
            connection.abort()
        for _, turn in itertools.chain.from_iterable(self._hellos.values()):
            turn.cancel()
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
        log.error("connections could not be closed", extra=fields)

    async def _accept(self, listener: socket.socket) -> None:
        refused = 0
        while True:
            try:
                # Not loop.sock_accept: when it is cancelled, it loses a connection that it has just accepted.
                accepted, peer = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:  # no file descriptor is left, or the peer has gone again
                extra = seldom(type(error).__name__, port=self._name, error=repr(error))
                log.warning("a connection could not be accepted", extra=extra)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            accepted.setblocking(False)
            refused = 0 if await self._take(accepted, str(peer[0])) else refused + 1
            if refused % _REFUSED_A_TURN == 0:
                await asyncio.sleep(0)  # an accept that does not wait lets no other task run

    async def _take(self, accepted: socket.socket, address: str) -> bool:
        """Returns whether the connection has got a place."""
        try:
            refusal = None if self._rates is None or self._rates.take(address) else CloseReason.TOO_OFTEN
            while refusal is None and not self._makes_room(address):
                if self._pending.of_address(address) >= self._limits.at_once_of_address:
                    refusal = CloseReason.ADDRESS_FULL
                    break
                self._place_free.clear()
                await self._place_free.wait()  # every pending connection ends in pending_s at the latest
        except asyncio.CancelledError:
            accepted.close()
            raise
        if refusal is not None:
            self._closed(address, refusal)  # before the close: a peer that sees it finds it counted
            accepted.close()
            return False
        server = self._runner.server
        assert server is not None
        connection = _Connection(accepted, address, server(), self._ended)
        self._open.add(connection)
        self._all_closed.clear()
        self._pending.add(connection)
        self._by_protocol[connection.inner] = connection
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(self._limits.pending_s, self._end, connection, CloseReason.TOO_SLOW)
        task = asyncio.create_task(self._serve(connection), name="connection")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        return True

    def _makes_room(self, address: str) -> bool:
        """Makes room for another connection of the address. Returns whether there is some."""
        if self._pending.of_address(address) >= self._limits.at_once_of_address:
            if not self._limits.replaces:
                return False
            self._end(self._pending.oldest(address), CloseReason.ADDRESS_FULL)
        if len(self._pending) < self._limits.at_once:
            return True
        if self._pending.is_fair(address):
            return False
        self._end(self._pending.oldest(), CloseReason.CROWDED)
        return True

    async def _serve(self, connection: _Connection) -> None:
        """Hands the connection to aiohttp, if there is TLS after the handshake."""
        loop = asyncio.get_running_loop()
        try:
            if self._context is None:
                await loop.connect_accepted_socket(lambda: connection, connection.accepted)
                return
            async with asyncio.timeout(self._limits.handshake_s) as limit:
                await _readable(connection.accepted)
                await self._turn(connection)
                end = limit.when()
                assert end is not None
            await loop.connect_accepted_socket(
                lambda: connection,
                connection.accepted,
                ssl=self._context,
                ssl_handshake_timeout=max(0.01, end - loop.time()),
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # ssl.SSLError and TimeoutError are subclasses
            if connection in self._pending:
                self._closed(connection.address, CloseReason.HANDSHAKE)
        finally:
            if self._shaking.remove(connection):
                self._handshake_free.set()
            if connection.transport is None:  # asyncio tells a protocol only of the end of a connection that was made
                connection.accepted.close()
                self._ended(connection)

    async def _turn(self, connection: _Connection) -> None:
        """Waits until the connection may shake hands.

        Raises:
            ConnectionAbortedError: It was ended meanwhile.
        """
        if connection not in self._pending:
            raise ConnectionAbortedError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hellos.setdefault(connection.address, collections.deque()).append((connection, turn))
        self._hello.set()
        await turn
        if connection not in self._pending:
            raise ConnectionAbortedError

    async def _give_turns(self) -> None:
        """Lets connections shake hands, by turns between addresses, until cancelled."""
        while True:
            await self._hello.wait()
            address, waiting = next(iter(self._hellos.items()))
            # Where another connection takes the oldest one's place, the newest is the likeliest to be of a caller that
            # is served at once.
            connection, turn = waiting.pop() if self._limits.replaces else waiting.popleft()
            del self._hellos[address]  # and, if more of its connections wait, to the end
            if waiting:
                self._hellos[address] = waiting
            if not self._hellos:
                self._hello.clear()
            if turn.done() or connection not in self._pending:
                if not turn.done():
                    turn.set_result(None)
                continue
            await self._handshake_place(address)
            if turn.done():
                continue  # its time is over, so nobody would give the place back
            self._shaking.add(connection)
            turn.set_result(None)
            await asyncio.sleep(0)  # one handshake in each turn of the loop

    async def _handshake_place(self, address: str) -> None:
        """Waits for a place among the handshakes, not longer than ``_CROWDED_S``: then the oldest handshake ends."""
        if len(self._shaking) < self._shaking.at_once:
            return
        if self._shaking.is_fair(address) and not self._limits.replaces:
            self._handshake_free.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CROWDED_S):
                    await self._handshake_free.wait()
        if len(self._shaking) >= self._shaking.at_once:
            crowding = self._shaking.oldest()
            self._shaking.remove(crowding)
            self._end(crowding, CloseReason.CROWDED)

    def _end(self, connection: _Connection, why: CloseReason) -> None:
        self._forget(connection)
        connection.abort()
        self._closed(connection.address, why)

    def _ended(self, connection: _Connection) -> None:
        """Removes a connection whose socket is closed."""
        self._forget(connection)
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()

    def _forget(self, connection: _Connection) -> None:
        """Removes a connection from the pending and the kept ones."""
        self._kept.remove(connection)
        if not self._pending.remove(connection):
            return
        del self._by_protocol[connection.inner]
        if connection.timer is not None:
            connection.timer.cancel()
        self._place_free.set()

    def _closed(self, address: str, why: CloseReason) -> None:
        self._count_closed(why)
        if why is not CloseReason.HANDSHAKE:
            log.warning(
                "connections are closed whose callers have not shown who they are",
                extra=seldom(why, port=self._name, peer=address, pending=self.pending),
            )


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()


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
