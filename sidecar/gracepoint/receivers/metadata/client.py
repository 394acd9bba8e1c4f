"""Plain HTTP to a cloud's metadata server, with the standard library alone.

An object of this class belongs to one thread; ``interrupt`` is the one call that another may make. Each request
has a connection of its own: the server is on the same machine, and nothing idle can go stale. Proxies of the
environment are not used: the address is only valid here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http.client
import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping

from gracepoint.errors import GracepointError

CONNECT_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
_REDIRECTS = frozenset({301, 302, 307, 308})


class MetadataError(GracepointError, ConnectionError):
    """The metadata server could not be reached, or what it said cannot be understood: nothing is known."""


@dataclasses.dataclass(frozen=True)
class MetadataResponse:
    """What the server said.

    Attributes:
        status: HTTP status.
        text: The body.
        headers: By lower-case name.
        server_time_s: When, by the server's own clock (its ``Date`` header; this machine's clock where it has
            none): what its times are to be held against.
    """

    status: int
    text: str
    headers: Mapping[str, str]
    server_time_s: float


class MetadataClient:
    """Requests to one metadata server.

    Args:
        base_url: ``http://host[:port]``.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, base_url: str, wall_clock: Callable[[], float]) -> None:
        parts = urllib.parse.urlsplit(base_url)
        assert parts.scheme == "http", base_url
        assert parts.hostname is not None, base_url
        self._host, self._port = parts.hostname, parts.port or 80
        self._wall_clock = wall_clock
        self._socket: socket.socket | None = None
        self._interrupted = threading.Event()

    def request(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float, method: str = "GET"
    ) -> MetadataResponse:
        """Asks, and follows one redirection on the same server (a directory that was named without its slash).

        Args:
            path: With its query.
            headers: That the server insists on.
            timeout_s: How long the server may be silent.
            method: The HTTP method.

        Raises:
            MetadataError: No answer.
        """
        answer = self._request(path, headers, timeout_s, method)
        if answer.status in _REDIRECTS and "location" in answer.headers:
            target = urllib.parse.urlsplit(answer.headers["location"])
            answer = self._request(target._replace(scheme="", netloc="").geturl(), headers, timeout_s, method)
        return answer

    def interrupt(self) -> None:
        """Ends a request that another thread is blocked in, and all later ones."""
        self._interrupted.set()
        held = self._socket
        if held is not None:
            with contextlib.suppress(OSError):  # not connected any more: nobody is blocked
                held.shutdown(socket.SHUT_RDWR)

    def _request(self, path: str, headers: Mapping[str, str], timeout_s: float, method: str) -> MetadataResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._interrupted.is_set():  # looked at after the socket is known to interrupt()
                raise MetadataError(f"{method} {path}: interrupted")
            connection.sock.settimeout(timeout_s)
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(_MOST_BYTES).decode(errors="replace")
            found = {name.lower(): value for name, value in response.getheaders()}
            return MetadataResponse(response.status, text, found, self._server_time_s(found))
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise MetadataError(f"{method} {path} at {self._host}:{self._port}: {what}") from error
        finally:
            self._socket = None
            connection.close()

    def _server_time_s(self, headers: Mapping[str, str]) -> float:
        try:
            return email.utils.parsedate_to_datetime(headers["date"]).timestamp()
        except (KeyError, ValueError):
            return self._wall_clock()
