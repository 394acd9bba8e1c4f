"""Places for connections and handshakes are given back, whatever their callers do."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
from aiohttp import web

from gracepoint_operator import limited_port
from gracepoint_operator.limited_port import CloseReason, ConnectionLimits, LimitedPort
from tests.waiting import until


async def test_a_connection_that_ends_while_it_waits_for_a_handshake_takes_no_place_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limited_port, "_CROWDED_S", 0.45)
    reasons: list[str] = []
    limits = ConnectionLimits(handshake_s=0.5, handshakes=1)
    # Without a certificate each handshake fails, once a client has said all that it says first.
    port = LimitedPort("test", web.Application(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), limits, reasons.append)
    number = await port.start("127.0.0.1", 0)
    accepting = asyncio.create_task(port.accept())
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", number)))
        return opened[-1]

    try:
        waits = connect()
        await asyncio.sleep(0.2)
        connect().send(b"\x16")  # begins a handshake, and says no more
        await asyncio.sleep(0.1)
        waits.send(b"\x16")  # its time ends before the place is free
        await asyncio.to_thread(until, lambda: len(reasons) >= 2, "the end of both")
        connect().send(b"no TLS at all")
        await asyncio.to_thread(until, lambda: len(reasons) >= 3, "the end of the third")
        assert reasons[2] == CloseReason.HANDSHAKE
    finally:
        for one in opened:
            one.close()
        accepting.cancel()
        await port.close()
