"""An HTTP proxy in front of an API server that does on command what networks and API servers do in an outage.

Thread: one with an event loop, which owns everything but ``_fault``; ``close`` ends it. Every other method is called
from the test's thread; a fault is one object that is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path

import aiohttp
from aiohttp import web


class How(Enum):
    """What becomes of a request."""

    ANSWER_500 = auto()
    ANSWER_503 = auto()
    ANSWER_404 = auto()
    ANSWER_401 = auto()
    ABORT = auto()  # the connection is closed without an answer
    HANG = auto()  # nothing is answered; streams stay open, and nothing comes on them
    ERROR_EVENT = auto()  # a watch brings an error that is no 410
    GONE_EVENT = auto()  # a watch brings a 410
    CUT_JSON = auto()  # the answer ends in the middle of an object
    STALE = auto()  # documents are answered as they were before; one that nobody had asked for is not found


_STATUS = {How.ANSWER_500: 500, How.ANSWER_503: 503, How.ANSWER_404: 404, How.ANSWER_401: 401}
_EVENTS = {How.ERROR_EVENT: 500, How.GONE_EVENT: 410}
#: Which groups there are, and which kinds a version of a group has.
_DOCUMENT = re.compile(r"/apis(/[^/?]+/[^/?]+)?")


_BACKLOG = 128
_CLOSED = -1
#: How long it takes until connections that were accepted are known to the server.
_ACCEPTED_S = 0.05


@dataclasses.dataclass(frozen=True)
class _Fault:
    how: How
    paths: re.Pattern[str]


class FaultProxy:
    """See the module.

    Args:
        target: The API server.
        ca: Of its certificate.

    Attributes:
        url: Where the proxy listens, without TLS.
        paths: Method and path of each request, with its query.
    """

    def __init__(self, target: str, ca: Path) -> None:
        self._target = target
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._fault: _Fault | None = None
        self._streams: dict[asyncio.Task[None], str] = {}
        self._documents: dict[str, str] = {}  # what answers held before a fault, by path
        self._connections: set[socket.socket] = set()  # to the API server
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._ended = asyncio.Event()
        self.paths: list[str] = []
        self.url = ""
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        if not self._listening.wait(60):
            raise TimeoutError("waited 60 s for the fault proxy to listen")

    @contextlib.contextmanager
    def fault(self, how: How, paths: str = "") -> Iterator[None]:
        """Inside of this, requests whose path matches fail so; streams that match are ended first, or freeze."""
        self._fault = _Fault(how, re.compile(paths))
        if how is not How.HANG:
            self.cut(paths)
        try:
            yield
        finally:
            self._fault = None

    def has_seen(self, path: str) -> bool:
        """True if something was asked for whose path begins so."""
        return any(f" {path}" in seen for seen in self.paths)

    def cut(self, paths: str = "") -> None:
        """Ends the streams whose path matches."""
        asyncio.run_coroutine_threadsafe(self._cut(re.compile(paths)), self._loop).result(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.close()

    async def _cut(self, paths: re.Pattern[str]) -> None:
        for task, path in list(self._streams.items()):
            if paths.search(path):
                task.cancel()

    async def _run(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls, socket_factory=self._new_connection)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            await runner.setup()
            listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            await web.SockSite(runner, listener).start()
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._listening.set()
            await self._ended.wait()
            # asyncio's server loses connections that it has accepted in the turn of the loop in which it is closed.
            self._loop.remove_reader(listener.fileno())
            await asyncio.sleep(_ACCEPTED_S)
            await self._cut(re.compile(""))
            await runner.cleanup()
            await connector.close(abort_ssl=True)
            await self._connections_end()

    def _new_connection(self, address: aiohttp.AddrInfoType) -> socket.socket:
        self._connections = {connection for connection in self._connections if connection.fileno() != _CLOSED}
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._connections.add(made)
        return made

    async def _connections_end(self) -> None:
        """Ends all, also those of requests that were given up, on which TLS still waits for a goodbye."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(10):
            while any(connection.fileno() != _CLOSED for connection in self._connections):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def _fault_of(self, path: str) -> How | None:
        fault = self._fault
        return fault.how if fault is not None and fault.paths.search(path) else None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path_qs
        self.paths.append(f"{request.method} {path}")
        fault = self._fault_of(path)
        if fault in _STATUS:
            return web.json_response({"kind": "Status", "message": "a fault"}, status=_STATUS[fault])
        if fault is How.ABORT:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault is How.HANG:
            await self._thaws(path)
        if fault in _EVENTS and "watch=true" in path:
            status = {"kind": "Status", "apiVersion": "v1", "code": _EVENTS[fault], "message": "a fault"}
            return web.json_response({"type": "ERROR", "object": status})
        if fault is How.CUT_JSON:
            return web.Response(text='{"type": "ADDED", "obj', content_type="application/json")
        if fault is How.STALE and path not in self._documents:
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        if fault is How.STALE:
            return web.Response(text=self._documents[path], content_type="application/json")
        headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Accept-Encoding")}
        body = await request.read()
        async with self._session.request(
            *(request.method, self._target + path),
            headers=headers,
            skip_auto_headers=["Accept-Encoding"],  # what is compressed would not be told as such
            data=body or None,
            timeout=aiohttp.ClientTimeout(),
        ) as found:
            if self._fault_of(path) not in (None, How.HANG) and request.transport is not None:
                request.transport.abort()  # the fault began meanwhile, when there was no stream yet to be cut
            if found.status == 200 and _DOCUMENT.fullmatch(path):
                self._documents[path] = await found.text()
                return web.Response(text=self._documents[path], content_type="application/json")
            answer = web.StreamResponse(status=found.status)
            answer.content_type = found.content_type
            await answer.prepare(request)
            task = asyncio.create_task(self._forward(found, answer, path))
            self._streams[task] = path
            try:
                await asyncio.wait([task])
            finally:
                del self._streams[task]
                if task.cancelled() or not task.done():
                    task.cancel()
                    if request.transport is not None:
                        request.transport.abort()
            return answer

    async def _forward(self, found: aiohttp.ClientResponse, answer: web.StreamResponse, path: str) -> None:
        async for chunk in found.content.iter_any():
            if self._fault_of(path) is How.HANG:
                await asyncio.Event().wait()  # until it is cut: what came meanwhile is lost with the connection
            try:
                await answer.write(chunk)
            except ConnectionError:
                return  # who asked has gone
        with contextlib.suppress(ConnectionError):
            await answer.write_eof()

    async def _thaws(self, path: str) -> None:
        while self._fault_of(path) is How.HANG:  # noqa: ASYNC110  the test's thread ends it
            await asyncio.sleep(0.02)
