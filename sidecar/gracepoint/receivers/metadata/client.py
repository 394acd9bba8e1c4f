"""An HTTP client of a cloud's metadata server, with the standard library alone.

A ``MetadataClient`` belongs to one thread. Another thread may only call ``interrupt``. Each request uses a new
connection: the server is on the same machine, and no idle connection can break. The proxies of the environment are not
used, because the address is valid only on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping

from gracepoint.errors import GracepointError

CONNECT_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
_REDIRECTS = frozenset({301, 302, 307, 308})


class MetadataError(GracepointError, ConnectionError):
    """The metadata server could not be reached, or its answer cannot be read."""


@dataclasses.dataclass(frozen=True)
class MetadataResponse:
    """An answer of the server.

    Attributes:
        status: The HTTP status.
        text: The body.
        headers: The headers, by lower-case name.
        server_time_s: The time of the answer, in seconds since the epoch, by the server's own clock (its ``Date``
            header). If it has no such header, by this machine's clock. Times in the answer are compared with it.
    """

    status: int
    text: str
    headers: Mapping[str, str]
    server_time_s: float


class MetadataClient:
    """Sends requests to one metadata server.

    Args:
        base_url: The server, ``http://host[:port]``.
    """

    def __init__(self, base_url: str) -> None:
        parts = urllib.parse.urlsplit(base_url)
        assert parts.scheme == "http", base_url
        assert parts.hostname is not None, base_url
        self._host, self._port = parts.hostname, parts.port or 80
        self._socket: socket.socket | None = None
        self._interrupted = threading.Event()

    def request(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float, method: str = "GET"
    ) -> MetadataResponse:
        """Sends a request. Follows one redirect on the same server (to a directory that was named without its slash).

        Args:
            path: The path with its query.
            headers: The headers that the server requires.
            timeout_s: How many seconds the server may send nothing.
            method: The HTTP method.

        Raises:
            MetadataError: There is no answer.
        """
        answer = self._request(path, headers, timeout_s, method)
        if answer.status in _REDIRECTS and "location" in answer.headers:
            target = urllib.parse.urlsplit(answer.headers["location"])
            answer = self._request(target._replace(scheme="", netloc="").geturl(), headers, timeout_s, method)
        return answer

    def interrupt(self) -> None:
        """Ends the request in which another thread is blocked. All later requests fail."""
        self._interrupted.set()
        held = self._socket
        if held is not None:
            with contextlib.suppress(OSError):  # not connected any more, so no thread is blocked
                held.shutdown(socket.SHUT_RDWR)

    def _request(self, path: str, headers: Mapping[str, str], timeout_s: float, method: str) -> MetadataResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._interrupted.is_set():  # checked after interrupt() can see the socket
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
            return time.time()
