"""Closes aiohttp's own sites, and waits until their sockets are closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

from aiohttp import web

_LOOK_EVERY_S = 0.01
#: Seconds for clients to answer the end of a connection, on every port.
CLOSE_CONNECTIONS_S = 1.0
#: Seconds for the event loop to close sockets that were shut down.
CUT_OFF_S = 1.0


async def close_runner(runner: web.AppRunner) -> None:
    """Stops listening, and returns when all connections of aiohttp's own sites are closed.

    aiohttp only begins to close them, and TLS waits for the client's answer. The loop ends next, and would leave their
    sockets to the garbage collector. A client that does not answer in time is cut off.
    """
    server = runner.server
    assert server is not None
    for site in list(runner.sites):
        await site.stop()
    # TLS forgets a transport's socket when it is closed, so each is noted while its connection is open.
    sockets: dict[asyncio.Transport, Any] = {}

    def note() -> None:
        for connection in server.connections:
            transport = connection.transport
            if transport is not None and transport not in sockets and not transport.is_closing():
                sockets[transport] = transport.get_extra_info("socket")

    note()
    await runner.cleanup()
    for timeout_s in (CLOSE_CONNECTIONS_S, CUT_OFF_S):
        give_up_at_s = time.monotonic() + timeout_s
        while left := [transport for transport, its in sockets.items() if its is not None and its.fileno() >= 0]:
            note()  # a handshake may have ended since
            if time.monotonic() > give_up_at_s:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        for transport in left:
            transport.abort()
            with contextlib.suppress(OSError):  # as in ChannelConnection.abort
                sockets[transport].shutdown(socket.SHUT_RDWR)
