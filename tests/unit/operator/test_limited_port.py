"""Places for connections and handshakes are given back, whatever their callers do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import ssl
import tracemalloc

import trustme
from aiohttp import web

from gracepoint_operator.limited_port import CloseReason, ConnectionLimits, LimitedPort
from tests.waiting import until


def _context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(made)
    return made


async def test_a_connection_that_ends_while_it_waits_for_a_handshake_takes_no_place_of_the_next() -> None:
    reasons: list[str] = []
    limits = ConnectionLimits(handshake_s=0.5, handshakes=1, crowded_s=0.45)
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


async def test_other_work_of_the_loop_comes_between_few_connections_of_a_flood() -> None:
    reasons: list[str] = []
    limits = ConnectionLimits(a_second_of_address=0.01)  # all are refused
    port = LimitedPort("test", web.Application(), None, limits, reasons.append)
    number = await port.start("127.0.0.1", 0)
    opened = [socket.create_connection(("127.0.0.1", number)) for _ in range(40)]
    accepting = asyncio.create_task(port.accept())
    refused_before = [0]
    try:
        async with asyncio.timeout(60):
            while len(reasons) < len(opened):
                await asyncio.sleep(0)
                refused_before.append(len(reasons))
        assert set(reasons) == {CloseReason.TOO_OFTEN}
        assert max(after - before for before, after in itertools.pairwise(refused_before)) <= 8
    finally:
        for one in opened:
            one.close()
        accepting.cancel()
        await port.close()


async def test_all_sockets_are_closed_however_far_their_connections_have_come() -> None:
    """Also those that were accepted in the last turn of the loop, or that shake hands."""
    limits = ConnectionLimits(handshakes=2, crowded_s=60.0)
    port = LimitedPort("test", web.Application(), _context(), limits, lambda reason: None)
    number = await port.start("127.0.0.1", 0)
    accepting = asyncio.create_task(port.accept())
    opened = [socket.create_connection(("127.0.0.1", number)) for _ in range(4)]
    try:
        for one in opened[1:]:
            one.send(b"\x16\x03\x01")  # begins a handshake, and says no more: one shakes hands, the others wait
        await asyncio.to_thread(until, lambda: port.pending == len(opened), "all to be accepted")
        opened.append(socket.create_connection(("127.0.0.1", number)))
        await asyncio.sleep(0)
        accepting.cancel()
        await port.close()
        for one in opened:
            one.settimeout(60)
            with contextlib.suppress(ConnectionError):  # it was not accepted any more
                assert one.recv(1) == b""
    finally:
        for one in opened:
            one.close()
    gc.collect()  # a socket that is not closed is an error here, and not in a later test


async def test_what_a_caller_sent_is_freed_as_soon_as_its_connection_is_closed() -> None:
    """Not at the next garbage collection, of which a flood of large bodies would be too large."""
    body_bytes, connections = 200_000, 10

    async def take(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.clone(client_max_size=10 * body_bytes).read())))

    app = web.Application()
    app.router.add_post("/", take)
    port = LimitedPort("test", app, None, ConnectionLimits(), lambda reason: None)
    number = await port.start("127.0.0.1", 0)
    accepting = asyncio.create_task(port.accept())
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {body_bytes + 1}\r\n\r\n".encode()

    async def flood() -> int:
        """Returns how many bytes are held once all have come, but the last."""
        opened = []
        for _ in range(connections):
            one = socket.create_connection(("127.0.0.1", number))
            opened.append(one)
            await asyncio.to_thread(one.sendall, head + b"x" * body_bytes)
        all_bytes = connections * body_bytes
        await asyncio.to_thread(until, lambda: tracemalloc.get_traced_memory()[0] >= all_bytes, "all bodies")
        held = tracemalloc.get_traced_memory()[0]
        for one in opened:
            one.close()
        await asyncio.to_thread(until, lambda: not port.pending, "the end of all connections")
        return held

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        held = await flood()
        assert tracemalloc.get_traced_memory()[0] < held / 4
    finally:
        tracemalloc.stop()
        gc.enable()
        accepting.cancel()
        await port.close()
