"""Requests to object stores: what any thread may end, what is trusted, and whom they name."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trustme

from gracepoint.checkpoint.storage.objects import persistence
from gracepoint.checkpoint.storage.objects.http import Connections, Exchange, Request, Unreachable
from gracepoint.checkpoint.storage.objects.persistence import ALARMS, Persistence
from tests.forked import forked
from tests.object_stores.scripted_server import Heard, Script, ScriptedServer, answer

pytestmark = pytest.mark.integration

Serve = Callable[..., ScriptedServer]
To = Callable[[str], Connections]
WAIT_S = 10.0


@pytest.fixture
def authority(monkeypatch: pytest.MonkeyPatch) -> Iterator[trustme.CA]:
    authority = trustme.CA()
    with authority.cert_pem.tempfile() as path:
        monkeypatch.setenv("SSL_CERT_FILE", path)
        yield authority


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ScriptedServer] = []

    def start(script: Script, authority: trustme.CA | None = None) -> ScriptedServer:
        servers.append(ScriptedServer(script, authority))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def to() -> Iterator[To]:
    """Returns connections to a server, which are closed at the end."""
    opened: list[Connections] = []

    def connect(url: str) -> Connections:
        opened.append(Connections(url))
        return opened[-1]

    yield connect
    for connections in opened:
        connections.close()


def head(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size


@pytest.fixture(params=["http", "https"])
def signed(request: pytest.FixtureRequest) -> trustme.CA | None:
    return request.getfixturevalue("authority") if request.param == "https" else None


def test_an_aborted_exchange_returns_nothing_that_came_after(serve: Serve, to: To, signed: trustme.CA | None) -> None:
    size, arrived = 60_000, threading.Event()

    def script(heard: Heard, sock: socket.socket) -> None:
        sock.sendall(head(size) + b"A" * size)
        arrived.set()

    server = serve(script, signed)
    with Exchange(to(server.url)) as exchange:
        exchange.send(Request("GET", "/x", {}))
        exchange.read_into(memoryview(bytearray(10_000)))
        assert arrived.wait(WAIT_S)
        exchange.abort()
        with pytest.raises(Unreachable):
            exchange.read()


def test_the_slower_of_two_requests_never_returns_other_bytes(serve: Serve, to: To, signed: trustme.CA | None) -> None:
    size, second = 60_000, threading.Event()

    def script(heard: Heard, sock: socket.socket) -> None:
        if heard.number == 0:
            sock.sendall(head(size) + b"A" * 10_000)
            assert second.wait(WAIT_S)
            sock.sendall(b"A" * (size - 10_000))
        else:
            sock.sendall(head(size) + b"A" * (size - 100))
            second.set()
            sock.sendall(b"A" * 100)

    server = serve(script, signed)
    connections = to(server.url)

    def act(exchange: Exchange) -> bytes:
        exchange.send(Request("GET", "/x", {}))
        return exchange.read()

    data = Persistence(lambda: Exchange(connections), patience_s=5).run("GET", act, kind="read")
    assert data == b"A" * size


class Blocks:
    """A body that an abort meets after its first block."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between

    def __len__(self) -> int:
        return 20

    def blocks(self) -> Iterator[memoryview]:
        yield memoryview(b"1" * 10)
        self._between()
        yield memoryview(b"2" * 10)


def test_an_aborted_exchange_sends_nothing_more(serve: Serve, to: To, signed: trustme.CA | None) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200)), signed)
    with Exchange(to(server.url)) as exchange:
        with pytest.raises(Unreachable):
            exchange.send(Request("PUT", "/x", {}, Blocks(exchange.abort)))
        assert b"2" not in b"".join(heard.body for heard in server.heard)


def test_a_connection_that_was_kept_is_not_ended_by_a_late_abort(serve: Serve, to: To) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200, b"x")))
    connections = to(server.url)
    first = Exchange(connections)
    for exchange in (first, Exchange(connections)):
        exchange.send(Request("GET", "/x", {}))
        if exchange is not first:
            first.abort()
        assert exchange.read() == b"x"
        exchange.close()


def ask(exchange: Exchange) -> bytes:
    exchange.send(Request("GET", "/x", {}))
    return exchange.read()


class Enough(Exception):
    pass


def after(seconds: float) -> Callable[[], None]:
    until_s = time.monotonic() + seconds

    def go_on() -> None:
        if time.monotonic() > until_s:
            raise Enough

    return go_on


@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 200 OK\r\n", head(100) + b"A", None],
    ids=["no reply", "a part of a head", "a part of a body", "a byte at a time"],
)
def test_a_caller_without_time_does_not_wait_for_a_reply(
    serve: Serve, to: To, signed: trustme.CA | None, sent: bytes | None
) -> None:
    ended = threading.Event()

    def script(heard: Heard, sock: socket.socket) -> None:
        if sent is not None:
            sock.sendall(sent)
        while sent is None and not ended.wait(0.02):
            sock.sendall(b"H")
        ended.wait(WAIT_S)

    server = serve(script, signed)
    exchange = Exchange(to(server.url))
    exchange.go_on = after(0.3)
    began_s = time.monotonic()
    with exchange, pytest.raises(Enough):
        ask(exchange)
    ended.set()
    assert time.monotonic() - began_s < 3


def test_a_request_ends_though_its_reply_never_does(serve: Serve, to: To, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "STALL_S", 0.2)
    ended = threading.Event()

    def script(heard: Heard, sock: socket.socket) -> None:
        while not ended.wait(0.02):
            sock.sendall(b"H")

    connections = to(serve(script).url)
    asking = Persistence(lambda: Exchange(connections), hedges=False, patience_s=0.1)
    with pytest.raises(TimeoutError, match=r"GET of a test: not done after 0\.\d s"):
        asking.run("GET of a test", ask, kind="read")
    ended.set()


def test_a_caller_without_time_does_not_wait_for_a_connection() -> None:
    # A listener whose queue is full leaves a connection unanswered.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        full = []
        for _ in range(4):
            full.append(socket.socket())
            full[-1].setblocking(False)
            full[-1].connect_ex(listener.getsockname())
        exchange = Exchange(Connections(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        exchange.go_on = after(0.3)
        began_s = time.monotonic()
        with exchange, pytest.raises(Enough):
            exchange.send(Request("GET", "/x", {}))
        assert time.monotonic() - began_s < 3
        for each in full:
            each.close()


def test_a_server_that_closes_after_its_reply_is_read_to_the_end(
    serve: Serve, to: To, signed: trustme.CA | None
) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200, b"x" * 100_000, Connection="close")), signed)
    for _ in range(2):
        with Exchange(to(server.url)) as exchange:
            exchange.send(Request("GET", "/x", {}))
            assert exchange.read() == b"x" * 100_000


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://minio.example:443", "minio.example"),
        ("http://MinIO.example:9000", "minio.example:9000"),
        ("http://minio.example:80/", "minio.example"),
        ("http://[::1]:9000", "[::1]:9000"),
    ],
)
def test_a_server_has_one_name(url: str, host: str) -> None:
    assert Connections(url).host == host


def test_the_name_that_is_signed_is_sent(serve: Serve, to: To) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200)))
    connections = to(f"http://LocalHost:{server.port}")
    with Exchange(connections) as exchange:
        exchange.send(Request("GET", "/x", {}))
        exchange.read()
    assert server.heard[0].headers["host"] == connections.host == f"localhost:{server.port}"


@pytest.mark.parametrize(
    "url", ["https://proxy.example/s3", "https://a:b@store.example", "ftp://store.example", "https://store.example?x=1"]
)
def test_an_endpoint_that_is_more_than_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Connections(url)


def test_requests_go_through_the_proxy_that_the_environment_names(
    serve: Serve, to: To, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200, b"x")), authority)

    def tunnel(heard: Heard, sock: socket.socket) -> None:
        name, _, port = heard.target.rpartition(":")
        assert (heard.method, name) == ("CONNECT", "store.localhost")
        with socket.create_connection(("127.0.0.1", int(port))) as far:
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=pump, args=(far, sock), daemon=True)
            back.start()
            pump(sock, far)
            back.join(WAIT_S)

    proxy = serve(tunnel)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    for bypass, expected in (("", 1), ("localhost", 0)):
        monkeypatch.setenv("NO_PROXY", bypass)
        proxy.heard.clear()
        name = "localhost" if bypass else "store.localhost"
        with Exchange(to(f"https://{name}:{server.port}")) as exchange:
            if bypass:
                exchange.send(Request("GET", "/x", {}))
                assert exchange.read() == b"x"
            else:
                with pytest.raises(Unreachable, match="Hostname mismatch"):  # it was reached
                    exchange.send(Request("GET", "/x", {}))
        assert len(proxy.heard) == expected


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_forked_child_makes_its_own_connections(serve: Serve, to: To) -> None:
    def script(heard: Heard, sock: socket.socket) -> None:
        sock.sendall(head(2) + b"of")

    connections = to(serve(script).url)
    with Exchange(connections) as exchange:
        exchange.send(Request("GET", "/x", {}))
        assert exchange.read() == b"of"
    with connections._lock:  # as if another thread held it at the fork
        assert forked(lambda: connections.take()[1]) == "False"
    connection, was_used = connections.take()
    connections.give_back(connection)
    assert was_used, "the parent keeps its connection"


def test_alarms_of_the_parent_do_not_ring_in_a_forked_child() -> None:
    rung, at_s = threading.Event(), time.monotonic() + 0.3
    ALARMS.at(at_s, rung.set)

    def in_child() -> bool:
        own = threading.Event()
        ALARMS.at(at_s + 0.1, own.set)
        assert own.wait(WAIT_S)
        return rung.is_set()

    assert forked(in_child) == "False"
    assert rung.wait(WAIT_S)
