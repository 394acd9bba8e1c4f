"""The subscription against servers that are down, silent, wrong or hostile: it comes back, and is heard of once."""

from __future__ import annotations

import dataclasses
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from gracepoint.deadline import Backoff
from gracepoint.receivers import OperatorConnection, OperatorSubscriber, channel
from gracepoint.wire.frames import Ping
from gracepoint.wire.messages import Acknowledgement, Subscription
from gracepoint.wire.names import PATH_SUBSCRIBE
from tests.unit.receivers.fakes.heard import Heard
from tests.unit.receivers.fakes.server import WHO, OperatorServer, notice
from tests.waiting import until

pytestmark = pytest.mark.integration

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes the pauses short; says which were taken ("pause") and where they began anew ("reset")."""
    taken: list[str] = []

    class Impatient(Backoff):
        def next_s(self, most_s: float = math.inf) -> float:
            super().next_s(most_s)
            taken.append("pause")
            return 0.01

        def reset(self) -> None:
            taken.append("reset")

    monkeypatch.setattr(channel, "Backoff", Impatient)
    return taken


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def subscribe(tmp_path: Path, heard: Heard, server: OperatorServer) -> Iterator[Callable[..., OperatorSubscriber]]:
    """Subscribes; ends with the test, and before the server does."""
    token = tmp_path / "token"
    token.write_text("a token\n")
    made: list[OperatorSubscriber] = []

    def start(
        url: str, ca_certificate: str, receipts: list[Acknowledgement] | None = None, **more: Any
    ) -> OperatorSubscriber:
        acknowledge = (lambda receipt: None) if receipts is None else receipts.append
        connection = OperatorConnection(url, ca_certificate, str(token))
        made.append(OperatorSubscriber(connection, WHO, heard, acknowledge, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


class RawServer:
    """Accepts connections with or without TLS and sends what a test says, whatever was asked."""

    def __init__(self, says: bytes, *, tls: bool = True, hangs_up: bool = True) -> None:
        authority = trustme.CA()
        self.ca_certificate = authority.cert_pem.bytes().decode()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self._context)
        self._says, self._tls, self._hangs_up = says, tls, hangs_up
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._kept: list[socket.socket] = []
        self.changed = threading.Condition()
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self._socket.getsockname()[1]}"

    def wait_for_connections(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.connections >= number, 60), self.connections

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(60)
        for each in self._kept:
            each.close()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return
            try:
                accepted.settimeout(10)
                if self._tls:
                    accepted = self._context.wrap_socket(accepted, server_side=True)
                    accepted.recv(65536)
                accepted.sendall(self._says)
                if self._hangs_up:
                    accepted.close()
                else:
                    self._kept.append(accepted)
            except OSError:
                accepted.close()
            with self.changed:
                self.connections += 1
                self.changed.notify_all()


def chunk(text: str) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text.encode()), text.encode())


HELLO = '{"type":"hello","version":1,"replica":"replica-a","heartbeat_s":100.0}\n'


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(b"\x16\x03\x01garbage" * 100, id="no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n<html>sign in</html>\n<!--  -->\n", id="a portal"),
        pytest.param(b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", id="a redirection"),
        pytest.param(HEAD + chunk('{"type":"ping","version":1}\n'), id="no hello first"),
        pytest.param(HEAD + chunk(HELLO) + b"zz\r\n", id="broken chunks"),
        pytest.param(HEAD + chunk(HELLO) + chunk("nonsense\n" * 500), id="nothing that can be read"),
        pytest.param(HEAD + chunk("x" * 70_000) * 20, id="a line without end"),
        pytest.param(HEAD + chunk(HELLO), id="it hangs up after its hello"),
        pytest.param(b"", id="it hangs up at once"),
    ],
)
def test_server_that_is_not_the_operator_is_retried_with_backoff(
    says: bytes,
    subscribe: Callable[..., OperatorSubscriber],
    pauses: list[str],
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = RawServer(says)
    try:
        subscriber = subscribe(raw.url, raw.ca_certificate)
        raw.wait_for_connections(4)
        subscriber.close()
    finally:
        raw.close()
    assert "reset" not in pauses
    assert heard.posts == []
    told = [r.getMessage() for r in caplog.records if "trying again" in r.getMessage()]
    assert len(set(told)) == len(told), "each reason once, however often it is tried"
    unreadable = [r for r in caplog.records if "cannot be read" in r.getMessage()]
    assert len(unreadable) <= 20 * 5, "a stream without a good frame is given up"


@pytest.mark.parametrize(
    ("says", "tls"),
    [
        pytest.param(b"", False, id="no TLS handshake"),
        pytest.param(b"", True, id="no answer"),
        pytest.param(HEAD, True, id="no hello"),
    ],
)
def test_a_server_that_accepts_and_says_nothing_is_left_after_a_while(
    says: bytes,
    tls: bool,
    subscribe: Callable[..., OperatorSubscriber],
    pauses: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gracepoint.receivers import channel

    monkeypatch.setattr(channel, "STREAM_TIMEOUT_S", 0.2)
    raw = RawServer(says, tls=tls, hangs_up=False)
    try:
        subscriber = subscribe(raw.url, raw.ca_certificate)
        raw.wait_for_connections(3)
        subscriber.close()
    finally:
        raw.close()
    assert pauses.count("pause") >= 2


def test_operator_outage_is_reported_once_and_reconnected(
    subscribe: Callable[..., OperatorSubscriber],
    server: OperatorServer,
    pauses: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    server.refuse[PATH_SUBSCRIBE] = 503
    subscriber = subscribe(server.url, server.ca_certificate)
    server.wait_until(lambda: len(server.refused) >= 50)
    assert caplog.text.count("not subscribed to the operator, trying again") == 1
    server.refuse.clear()
    assert subscriber.wait_until_connected(60)


def test_a_second_outage_is_reported_again(
    subscribe: Callable[..., OperatorSubscriber],
    server: OperatorServer,
    pauses: list[str],
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscribe(server.url, server.ca_certificate)
    for number in (1, 2):
        stream = server.wait_for_stream(number=number)
        stream.send_frame(Ping())
        stream.send_frame(notice(stream, preemption=f"gpt-{number}"))
        heard.wait_for_posts(number)  # so the ping was read too
        stream.end()
    server.wait_for_stream(number=3)
    assert caplog.text.count("not subscribed to the operator, trying again") == 2
    assert "reset" in pauses, "a stream that has proved itself is looked for quickly again"


def test_notice_repeated_after_reconnection_is_the_same(
    subscribe: Callable[..., OperatorSubscriber], server: OperatorServer, pauses: list[str], heard: Heard
) -> None:
    receipts: list[Acknowledgement] = []
    subscribe(server.url, server.ca_certificate, receipts)
    first = server.wait_for_stream()
    first.send_frame(notice(first, remaining_s=100.0, revision=7))
    heard.wait_for_posts()
    deadline_s = time.monotonic() + heard.remaining_s()
    first.end()
    again = server.wait_for_stream(number=2)
    again.send_frame(notice(again, remaining_s=deadline_s - time.monotonic(), revision=7))
    heard.wait_for_posts(2)
    assert {(post.origin, post.revision) for post in heard.posts} == {("gpt-1", 7)}
    assert heard.remaining_s() == pytest.approx(deadline_s - time.monotonic(), abs=5)
    assert len(receipts) == 2, "the first may have been lost with its stream"


def test_each_connection_says_for_how_long_training_has_stalled(
    subscribe: Callable[..., OperatorSubscriber], server: OperatorServer, pauses: list[str]
) -> None:
    stalled_s = iter([None, 42.0])

    def as_of_now(first: Subscription) -> Subscription:
        return dataclasses.replace(first, stalled_s=next(stalled_s))

    subscribe(server.url, server.ca_certificate, as_of_now=as_of_now)
    first = server.wait_for_stream()
    first.end()
    again = server.wait_for_stream(number=2)
    assert (first.who.stalled_s, again.who.stalled_s) == (None, 42.0)


def test_certificate_of_the_new_authority_is_trusted_during_rotation(
    subscribe: Callable[..., OperatorSubscriber], server: OperatorServer
) -> None:
    before = trustme.CA().cert_pem.bytes().decode()
    subscriber = subscribe(server.url, before + server.ca_certificate)
    assert subscriber.wait_until_connected(60)


def test_certificate_of_another_authority_is_refused_and_logged(
    subscribe: Callable[..., OperatorSubscriber],
    server: OperatorServer,
    pauses: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscriber = subscribe(server.url, trustme.CA().cert_pem.bytes().decode())
    until(lambda: pauses.count("pause") >= 3, "three pauses")
    subscriber.close()
    assert server.streams == []
    assert caplog.text.count("CERTIFICATE_VERIFY_FAILED") == 1
