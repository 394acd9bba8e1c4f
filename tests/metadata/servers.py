"""Small metadata servers of the three clouds: real HTTP, and of the vendors' services what their documents say.

They refuse what the real ones refuse (a missing header, a token that is over), as a client that the real ones would
refuse must not pass here. A test changes what is to be seen with ``set``; ``clock_ahead_s`` puts the server's clock
apart from the machine's, by which all times that a server tells are to be understood.

One thread a connection; all state is guarded by ``changed``.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.server
import json
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

WAIT_S = 60.0


class MetadataServer:
    """Use as a context manager.

    Attributes:
        requests: "METHOD path" of every request that came, in order.
        clock_ahead_s: Of the ``Date`` header, against this machine's.
        failing: Answer everything with HTTP 500.
        garbled: Answer every GET with this body in place of the right one.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.changed = threading.Condition()
        self.requests: list[str] = []
        self._changed_at = 0  # how many requests had come at the test's last change
        self.clock_ahead_s = 0.0
        self.failing = False
        self.garbled: str | None = None
        self._values: dict[str, str | None] = {}
        self._ended = False
        self._server = _Server((address, 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update(lambda: setattr(self, "_ended", True))
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def set(self, path: str, value: str | None) -> None:
        """What is there from now on; None: nothing."""
        self.update(lambda: self._values.__setitem__(path, value))

    def update(self, change: Callable[[], object]) -> None:
        with self.changed:
            change()
            self._changed_at = len(self.requests)
            self.changed.notify_all()

    def now_s(self) -> float:
        """Seconds since the epoch by the server's clock."""
        return time.time() + self.clock_ahead_s

    def wait_for_requests(self, text: str, number: int = 1) -> None:
        """Waits until ``number`` requests whose line contains ``text`` have come since the test's last change."""
        with self.changed:

            def come() -> bool:
                return sum(text in line for line in self.requests[self._changed_at :]) >= number

            assert self.changed.wait_for(come, WAIT_S), f"no {number} requests of {text}: {self.requests[-20:]}"

    def answer(self, method: str, path: str, query: dict[str, str], headers: dict[str, str]) -> _Answer:
        """What the cloud would say; called with ``changed`` held."""
        raise NotImplementedError

    def respond(self, method: str, target: str, headers: dict[str, str]) -> _Answer:
        parts = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        with self.changed:
            self.requests.append(f"{method} {target}")
            self.changed.notify_all()
            if self.failing:
                return _Answer(500, "out of order")
            answer = self.answer(method, parts.path, query, headers)
            if self.garbled is not None and method == "GET" and answer.status == 200:
                answer.text = self.garbled
            return answer


class _Answer:
    def __init__(self, status: int, text: str = "", **headers: str) -> None:
        self.status = status
        self.text = text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class GceServer(MetadataServer):
    """Google's: cloud.google.com/compute/docs/metadata/querying-metadata.

    Paths are below ``/computeMetadata/v1/``. ``upcoming-maintenance`` is a directory, named with a slash at its end.

    Attributes:
        waits: How many requests are held at this moment, by path.
    """

    _ROOT = "/computeMetadata/v1/"
    _DIRECTORIES = frozenset({"instance/upcoming-maintenance"})

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__(address)
        self.waits: dict[str, int] = {}
        self.set("instance/preempted", "FALSE")
        self.set("instance/maintenance-event", "NONE")
        self.set("instance/upcoming-maintenance/", None)
        self.set("instance/scheduling/on-host-maintenance", "TERMINATE")

    def answer(self, method: str, path: str, query: dict[str, str], headers: dict[str, str]) -> _Answer:
        if headers.get("metadata-flavor") != "Google":
            return _Answer(403, "Missing required header: Metadata-Flavor")
        if path == "/":
            return _Answer(200, "computeMetadata/\n", Metadata_Flavor="Google")
        key = path.removeprefix(self._ROOT)
        if key in self._DIRECTORIES:
            where = f"{self.url}{path}/?{urllib.parse.urlencode(query)}"
            return _Answer(301, "moved", Metadata_Flavor="Google", Location=where)
        if query.get("wait_for_change") == "true":
            self.waits[key] = self.waits.get(key, 0) + 1
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self._ended or self.failing or _etag(self._values[key]) != query.get("last_etag"),
                float(query.get("timeout_sec", WAIT_S)),
            )
            self.waits[key] -= 1
        value = self._values.get(key)
        if value is None:
            missing = json.dumps({"error": "no notifications have been received yet, try again later"})
            return _Answer(503, missing, Metadata_Flavor="Google", ETag=_etag(value))
        return _Answer(200, value, Metadata_Flavor="Google", ETag=_etag(value))

    def wait_until_held(self, *keys: str) -> None:
        """Waits until a request for each of the keys is held back."""
        with self.changed:
            held = self.changed.wait_for(lambda: all(self.waits.get(key) for key in keys), WAIT_S)
            assert held, f"held: {self.waits}"


class AwsServer(MetadataServer):
    """Amazon's, version 2 only: docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html.

    Paths are below ``/latest/meta-data/``.
    """

    _ROOT = "/latest/meta-data/"

    def __init__(self) -> None:
        super().__init__()
        self._tokens: set[str] = set()
        self.set("autoscaling/target-lifecycle-state", "InService")
        self.set("events/maintenance/scheduled", "[]")

    def forget_tokens(self) -> None:
        """All tokens are over, as after their time."""
        self.update(self._tokens.clear)

    def answer(self, method: str, path: str, query: dict[str, str], headers: dict[str, str]) -> _Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return _Answer(400, "<h1>400 - Bad Request</h1>")
            token = secrets.token_urlsafe(40) + "=="
            self._tokens.add(token)
            return _Answer(200, token, X_aws_ec2_metadata_token_ttl_seconds=ttl)
        if headers.get("x-aws-ec2-metadata-token") not in self._tokens:
            return _Answer(401, "<h1>401 - Unauthorized</h1>")
        value = self._values.get(path.removeprefix(self._ROOT))
        return _Answer(404, "<h1>404 - Not Found</h1>") if value is None else _Answer(200, value)


class AzureServer(MetadataServer):
    """Microsoft's: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.

    Attributes:
        approved: Bodies of the approvals that were asked for.
    """

    VM = "aks-train-12345-vmss_3"

    def __init__(self) -> None:
        super().__init__()
        self.approved: list[str] = []
        self._incarnation = 0
        self._events: list[dict[str, Any]] = []

    def schedule(self, *events: dict[str, Any]) -> None:
        """The events from now on."""

        def change() -> None:
            self._incarnation += 1
            self._events = list(events)

        self.update(change)

    def event(self, kind: str, *, in_s: float | None, **changes: Any) -> dict[str, Any]:
        """An event for this VM, as in the document's examples."""
        begins = "" if in_s is None else email.utils.formatdate(self.now_s() + in_s, usegmt=True)
        return {
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "EventStatus": "Started" if in_s is None else "Scheduled",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [self.VM],
            "NotBefore": begins,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
            **changes,
        }

    def answer(self, method: str, path: str, query: dict[str, str], headers: dict[str, str]) -> _Answer:
        if headers.get("metadata") != "true":
            return _Answer(400, '{"error": "Bad request. Required metadata header not specified"}')
        if "api-version" not in query:
            return _Answer(400, '{"error": "Bad request. api-version was not specified in the request"}')
        if method == "POST":
            self.approved.append(path)
            return _Answer(200)
        if path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return _Answer(200, self.VM)
        if path == "/metadata/scheduledevents" and query["api-version"] == "2020-07-01":
            return _Answer(200, json.dumps({"DocumentIncarnation": self._incarnation, "Events": self._events}))
        return _Answer(404, '{"error": "Not found"}')


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of something is a part of the tests."""


def _etag(value: str | None) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _handler(server: MetadataServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = server.respond(self.command, self.path, headers)
            body = answer.text.encode()
            with contextlib.suppress(OSError):
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = _serve

        def date_time_string(self, timestamp: float | None = None) -> str:
            return email.utils.formatdate(server.now_s(), usegmt=True)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
