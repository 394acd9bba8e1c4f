"""A real HTTPS server that speaks the operator's side of the channel, for the library's tests.

It decides nothing: a test says what is sent down the streams and what is refused, and reads what arrived. One
thread a connection (the standard library's ThreadingHTTPServer); what they share is guarded by ``changed``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trustme

from gracepoint.wire.frames import Hello, Notice
from gracepoint.wire.messages import (
    Acknowledgement,
    Confidence,
    Forecast,
    Message,
    Mode,
    Report,
    Resumption,
    SnapshotReport,
    Stall,
    Subscription,
    Trouble,
)
from gracepoint.wire.names import (
    PATH_ACKNOWLEDGE,
    PATH_FORECAST,
    PATH_REPORT,
    PATH_RESUMPTION,
    PATH_SNAPSHOT,
    PATH_STALL,
    PATH_SUBSCRIBE,
    PATH_TROUBLE,
    Env,
)

_TYPES: dict[str, type[Message]] = {
    PATH_SUBSCRIBE: Subscription,
    PATH_ACKNOWLEDGE: Acknowledgement,
    PATH_REPORT: Report,
    PATH_FORECAST: Forecast,
    PATH_RESUMPTION: Resumption,
    PATH_SNAPSHOT: SnapshotReport,
    PATH_STALL: Stall,
    PATH_TROUBLE: Trouble,
}

#: Process 0 of two, as it subscribes.
WHO = Subscription(
    namespace="default",
    pod_name="gpt-workers-0-0",
    pod_uid="pod-uid-0",
    session="session-0",
    workload_uid="jobset-uid",
    restart_attempt=0,
    process_index=0,
    process_count=2,
    library_version="0.1.0",
)


@dataclasses.dataclass
class Stream:
    """An open subscription."""

    who: Subscription
    token: str
    handler: http.server.BaseHTTPRequestHandler
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    def send(self, text: str) -> None:
        data = text.encode()
        self.handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.handler.wfile.flush()

    def send_frame(self, frame: Message) -> None:
        self.send(frame.to_json() + "\n")

    def end(self) -> None:
        self.ended.set()


class OperatorServer:
    """Use as a context manager.

    Attributes:
        received: All messages but subscriptions, with the token, in the order in which they came.
        streams: All subscriptions there ever were.
        connections: How many connections there ever were.
        refuse: Status by path, given in place of taking the message.
        answers: What is answered to a message that is taken, by path.
        heartbeat_s: Said in the hello; nothing is sent in between unless a test does.
        authority: Signs its certificate.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.received: list[tuple[str, Message]] = []
        self.streams: list[Stream] = []
        self.connections = 0
        self.refuse: dict[str, int] = {}
        self.refused: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.heartbeat_s = 100.0
        self.authority = trustme.CA()
        self.ca_certificate = self.authority.cert_pem.bytes().decode()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("localhost").configure_cert(context)
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"https://localhost:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self.streams:
            stream.end()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def environment(self, index: int, count: int, folder: Path) -> dict[str, str]:
        """What the webhook would write into pod ``index``."""
        token = folder / f"token-{index}"
        token.write_text(f"token-{index}\n")
        return {
            Env.NAMESPACE: "default",
            Env.POD_NAME: f"gpt-workers-0-{index}",
            Env.POD_UID: f"pod-uid-{index}",
            Env.JOBSET_NAME: "gpt",
            Env.JOBSET_UID: "jobset-uid",
            Env.RESTART_ATTEMPT: "0",
            Env.OPERATOR_URL: self.url,
            Env.CA_CERTIFICATE: self.ca_certificate,
            Env.TOKEN_FILE: str(token),
        }

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), f"{self.received} {self.streams}"

    def wait_for_stream(self, process_index: int = 0, number: int = 1) -> Stream:
        """The ``number``-th subscription of a process."""

        def found() -> list[Stream]:
            return [s for s in self.streams if s.who.process_index == process_index]

        self.wait_until(lambda: len(found()) >= number)
        return found()[number - 1]

    def messages(self, kind: type[Message]) -> list[Any]:
        with self.changed:
            return [m for _, m in self.received if isinstance(m, kind)]

    def wait_for(self, kind: type[Message], number: int = 1) -> list[Any]:
        self.wait_until(lambda: sum(isinstance(m, kind) for _, m in self.received) >= number)
        return self.messages(kind)


def notice(stream: Stream, **changes: Any) -> Notice:
    """A notice for whoever listens on the stream."""
    fields: dict[str, Any] = {
        "preemption": "gpt-1",
        "pod_uid": stream.who.pod_uid,
        "session": stream.who.session,
        "workload_uid": stream.who.workload_uid,
        "cause": "SpotTermination",
        "signal": "taint cloud.google.com/impending-node-termination",
        "confidence": Confidence.SURE,
        "nodes": ["node-1"],
        "remaining_s": 20.0,
        "deadline": "2026-01-01T00:00:00Z",
        "mode": Mode.ENFORCE,
        **changes,
    }
    return Notice(**fields)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of something is a part of the tests."""


def _handler(server: OperatorServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            with server.changed:
                server.connections += 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            token = self.headers["Authorization"].removeprefix("Bearer ")
            if self.path in server.refuse:
                with server.changed:
                    server.refused.append(self.path)
                    server.changed.notify_all()
                return self._answer(server.refuse[self.path], b"refused by the test")
            message = _TYPES[self.path].from_json(body)
            if isinstance(message, Subscription):
                return self._stream(message, token)
            with server.changed:
                server.received.append((token, message))
                server.changed.notify_all()
            answer = server.answers.get(self.path, b"")
            self._answer(200 if answer else 204, answer)

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, who: Subscription, token: str) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            stream = Stream(who, token, self)
            stream.send_frame(Hello(replica="replica-a", heartbeat_s=server.heartbeat_s))
            with server.changed:
                server.streams.append(stream)
                server.changed.notify_all()
            stream.ended.wait()
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
