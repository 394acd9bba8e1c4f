"""The channel's connections, from accept to close: how many are open, and for how long.

Every pod of the cluster can reach the channel, and a TLS connection costs memory and processor time before its caller
is known. So a connection is *pending* until ``keep`` is called, when its caller is authenticated. Pending connections
are limited in number, for each peer address and in all, and each is closed after a time. Kept connections are streams
of running pods, at most one for each pod. They are never closed to make room.

If all places are taken, the address with the most pending connections loses its oldest one. So an address that floods
the channel blocks only itself. If all addresses have about equally many, no connection is closed: new connections wait
in the kernel's queue until a place is free. Several pods can share an address (``hostNetwork``, address translation),
so the limit for an address must let all their handshakes through. A pod that is refused tries again.

Everything runs on the channel's event loop (``server_thread``): one task accepts, one short task for each connection
does the TLS handshake, and one timer for each pending connection ends it. ``close_pending`` ends all three, and
``close`` waits for the connections that were kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import ssl
import time
from collections.abc import Callable
from enum import Enum, StrEnum

from gracepoint_operator.channel.endpoint.runner_close import CLOSE_CONNECTIONS_S, CUT_OFF_S
from gracepoint_operator.channel.endpoint.tls_connection import ChannelConnection
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0  # for the peer to answer TLS's close
_CLOSE_S = 2.0
_ACCEPT_AGAIN_S = 0.5  # after the process ran out of file descriptors
_SAY_EVERY_S = 60.0


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits for connections whose callers are not authenticated.

    Attributes:
        handshake_s: Seconds for the TLS handshake.
        request_s: Seconds from the handshake until the first request's headers, and between two requests.
        pending_s: Seconds in all, from accept. It must be longer than the slowest answer.
        at_once: The largest number of pending connections.
        at_once_of_address: The largest number of pending connections of one peer address.
    """

    handshake_s: float = 10.0
    request_s: float = 10.0
    pending_s: float = 30.0
    at_once: int = 1024
    at_once_of_address: int = 256


class CloseReason(StrEnum):
    """Why the operator closed a connection whose caller was not authenticated. A label of the metric."""

    ADDRESS_FULL = "address_full"
    CROWDED = "crowded"
    HANDSHAKE = "handshake"  # the TLS handshake failed, or took too long
    TOO_SLOW = "too_slow"


class _Room(Enum):
    """Whether there is room for a new connection."""

    HELD = 1
    REFUSED = 2
    WAITS = 3


class ChannelConnections:
    """Accepts, limits and closes connections. It must be created and used on one event loop.

    Args:
        make: Creates aiohttp's protocol for a new connection.
        context: The server's TLS context.
        limits: Limits for pending connections.
        count_closed: Called with the reason for each connection that is closed here.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        limits: ConnectionLimits,
        count_closed: Callable[[str], None],
    ) -> None:
        self._make = make
        self._context = context
        self._limits = limits
        self._count_closed = count_closed
        self._pending: dict[str, dict[ChannelConnection, None]] = {}  # by address, oldest first
        self._by_protocol: dict[asyncio.BaseProtocol, ChannelConnection] = {}  # the pending ones, by aiohttp's protocol
        self._open: set[ChannelConnection] = set()  # pending and kept ones, until their sockets are closed
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._place_free = asyncio.Event()
        self._say_after = 0.0

    @property
    def pending(self) -> int:
        """The number of connections whose callers are not authenticated."""
        return len(self._by_protocol)

    def keep(self, protocol: asyncio.BaseProtocol) -> None:
        """Keeps a connection whose caller is authenticated, until one of the two sides ends it.

        Args:
            protocol: aiohttp's protocol of the request.
        """
        connection = self._by_protocol.get(protocol)
        if connection is not None:
            self._forget(connection)

    async def accept(self, listener: socket.socket) -> None:
        """Accepts connections until cancelled.

        Args:
            listener: A non-blocking socket that listens.
        """
        while True:
            try:
                # Not loop.sock_accept: when it is cancelled, it loses a connection that it has just accepted.
                accepted, peer = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:  # no file descriptor is left, or the peer has gone again
                log.warning("a connection could not be accepted", extra=about(error=repr(error)))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            accepted.setblocking(False)
            await self._take(accepted, str(peer[0]))
            await asyncio.sleep(0)  # an accept that does not wait lets no other task run

    async def close_pending(self) -> None:
        """Ends all pending connections. Waits for a bounded time until their handshakes have ended."""
        for connection in list(self._by_protocol.values()):
            connection.abort()
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=_CLOSE_S)

    async def close(self) -> None:
        """Waits until every socket is closed, for a bounded time.

        Call it after aiohttp was told to close its connections. aiohttp does not wait for the client's answer to TLS's
        close. A client that does not answer in time is cut off.
        """
        for timeout_s in (CLOSE_CONNECTIONS_S, CUT_OFF_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_closed.wait()
                    return
            for connection in list(self._open):
                connection.abort()
        log.error("connections could not be closed", extra=about(number=len(self._open), waited_s=CUT_OFF_S))

    async def _take(self, accepted: socket.socket, address: str) -> None:
        try:
            while (room := self._room(address)) is _Room.WAITS:
                self._place_free.clear()
                await self._place_free.wait()  # every pending connection ends in pending_s at the latest
        except asyncio.CancelledError:
            accepted.close()
            raise
        if room is _Room.REFUSED:
            self._closed(address, CloseReason.ADDRESS_FULL)  # before the close: a peer that sees it finds it counted
            accepted.close()
            return
        loop = asyncio.get_running_loop()
        connection = ChannelConnection(accepted, address, self._make(), self._ended)
        self._open.add(connection)
        self._all_closed.clear()
        self._pending.setdefault(address, {})[connection] = None
        self._by_protocol[connection.inner] = connection
        connection.timer = loop.call_later(self._limits.pending_s, self._end, connection, CloseReason.TOO_SLOW)
        handshake = asyncio.create_task(self._shake_hands(connection, accepted), name="handshake")
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    def _room(self, address: str) -> _Room:
        """Makes room for another connection of the address, if it may have one more."""
        own = len(self._pending.get(address, ()))
        if own >= self._limits.at_once_of_address:
            return _Room.REFUSED
        if self.pending < self._limits.at_once:
            return _Room.HELD
        most = max(self._pending.values(), key=len)
        if len(most) <= own + 1:
            return _Room.WAITS
        self._end(next(iter(most)), CloseReason.CROWDED)
        return _Room.HELD

    async def _shake_hands(self, connection: ChannelConnection, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # ssl.SSLError and TimeoutError are subclasses
            was_pending = connection.inner in self._by_protocol
            self._ended(connection)  # asyncio tells a protocol only of the end of a connection that was made
            if was_pending:
                self._closed(connection.address, CloseReason.HANDSHAKE)

    def _end(self, connection: ChannelConnection, why: CloseReason) -> None:
        self._forget(connection)
        connection.abort()
        self._closed(connection.address, why)

    def _ended(self, connection: ChannelConnection) -> None:
        """Removes a connection whose socket is closed."""
        self._forget(connection)
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()

    def _forget(self, connection: ChannelConnection) -> None:
        """Removes a connection from the pending ones."""
        if self._by_protocol.pop(connection.inner, None) is None:
            return
        if connection.timer is not None:
            connection.timer.cancel()
        of_address = self._pending[connection.address]
        del of_address[connection]
        if not of_address:
            del self._pending[connection.address]
        self._place_free.set()

    def _closed(self, address: str, why: CloseReason) -> None:
        self._count_closed(why)
        now = time.monotonic()
        if why is not CloseReason.HANDSHAKE and now >= self._say_after:
            self._say_after = now + _SAY_EVERY_S
            log.warning(
                "connections are closed whose callers have not shown who they are",
                extra=about(peer=address, reason=why, pending=self.pending),
            )


async def _readable(listener: socket.socket) -> None:
    """Waits until a connection can be accepted."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)
