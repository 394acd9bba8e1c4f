"""One TLS connection of the channel, from accept to close. Everything that it receives goes to aiohttp's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable


class ChannelConnection(asyncio.Protocol):
    """One connection: passes everything to aiohttp's protocol, and calls ``ended`` when it is lost."""

    def __init__(
        self, accepted: socket.socket, address: str, inner: asyncio.Protocol, ended: Callable[[ChannelConnection], None]
    ) -> None:
        self.address = address
        self.inner = inner
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self._accepted = accepted
        self._ended = ended

    def abort(self) -> None:
        """Closes the connection at once, in any state."""
        if self.transport is not None:
            self.transport.abort()
        # A TLS transport that was closed twice ignores abort(), and a cancelled handshake does not always close the
        # socket. The end of the stream ends both.
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)

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
