"""HTTPS to the operator with the standard library alone.

An ``OperatorConnection`` belongs to one thread. Other threads may only call ``interrupt`` and ``trust``. The token file
is read for every request, as the kubelet renews a projected token in place. Proxies of the environment are not used, as
the operator is inside the cluster.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import urllib.parse
from pathlib import Path

from gracepoint.errors import GracepointError
from gracepoint.forks import forget_in_child
from gracepoint.wire.codec import Message

CONNECT_TIMEOUT_S = 2.0
#: From the connection to the first frame of the stream. A thousand processes may connect at once. If they gave up and
#: tried again, each would cost the operator another handshake, which is the most expensive part.
STREAM_TIMEOUT_S = 15.0


class ChannelError(GracepointError, ConnectionError):
    """The operator could not be reached, or refused. ``status`` is its HTTP status. None if there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OperatorConnection:
    """One connection at a time to the operator.

    Args:
        url: ``https://host:port``.
        ca_certificate: PEM certificate of the authority to trust. None for the system's authorities.
        token_file: Path of the bearer token.
    """

    def __init__(self, url: str, ca_certificate: str | None, token_file: str) -> None:
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None, url  # checked by the settings
        self._host, self._port = parts.hostname, parts.port or 443
        self._base = parts.path.rstrip("/")
        self._ca_certificate = ca_certificate
        self._token_file = Path(token_file)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        # As long as a child has the connection, too, the operator takes a process that has died for connected.
        forget_in_child(self, OperatorConnection.close)

    def post(self, path: str, message: Message, *, timeout_s: float) -> bytes:
        """Sends a message and waits until the operator has taken it. Keeps the connection for the next message.

        Returns what the operator answers; mostly nothing.

        Raises:
            ChannelError: The operator was not reached, or did not take the message.
        """
        kept = self._connection is not None
        try:
            response = self._request(path, message, timeout_s)
        except ChannelError:
            if not kept:
                raise
            response = self._request(path, message, timeout_s)  # the server had closed the idle connection
        try:
            text = response.read(1000)
            response.close()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ChannelError(f"POST {path}: {error!r}") from error
        if response.will_close:
            self.close()
        self._check(path, response.status, text)
        return text

    def stream(self, path: str, message: Message) -> http.client.HTTPResponse:
        """Sends a message and returns the response, whose body is an open stream.

        Raises:
            ChannelError: The operator was not reached, or did not take the message.
        """
        response = self._request(path, message, STREAM_TIMEOUT_S)
        if response.status != 200:
            text = response.read(1000)
            self.close()
            self._check(path, response.status, text)
            raise ChannelError(f"POST {path}: expected HTTP 200, found {response.status}", response.status)
        return response

    def trust(self, authorities: str) -> None:
        """Trusts these authorities at the next connection. Callable from any thread.

        Args:
            authorities: PEM certificates.

        Raises:
            ssl.SSLError: They cannot be read. Those before stay.
        """
        ssl.create_default_context(cadata=authorities)
        self._ca_certificate = authorities

    def set_timeout_s(self, timeout_s: float) -> None:
        """Sets how long a read of the stream may take."""
        if self._socket is not None:
            self._socket.settimeout(timeout_s)

    def interrupt(self) -> None:
        """Ends a read or write in which this object's thread is blocked. Callable from any thread."""
        held = self._socket
        if held is not None:
            with contextlib.suppress(OSError):  # not connected any more, so no thread is blocked
                held.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection. Safe to repeat."""
        self._socket = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, path: str, message: Message, timeout_s: float) -> http.client.HTTPResponse:
        try:
            connection = self._connection or self._connect(timeout_s)
            if self._socket is not None:
                self._socket.settimeout(timeout_s)
            token = self._token_file.read_text().strip()
            connection.request(
                "POST",
                self._base + path,
                body=message.to_json().encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            return connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:  # a token that is no header's value, say
            self.close()
            what = f"{type(error).__name__}: {error}"
            raise ChannelError(f"POST {path} to {self._host}:{self._port}: {what}") from error

    def _connect(self, handshake_timeout_s: float) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cadata=self._ca_certificate)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        connection.connect()
        # Not by HTTPSConnection, which has one timeout for both: a server that accepts at once may take long for the
        # handshake.
        connection.sock.settimeout(handshake_timeout_s)
        try:
            connection.sock = context.wrap_socket(connection.sock, server_hostname=self._host)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        # Kept here, too: a response that ends with its connection takes the socket out of the connection.
        self._socket = connection.sock
        return connection

    def _check(self, path: str, status: int, text: bytes) -> None:
        if not 200 <= status < 300:
            raise ChannelError(f"POST {path}: HTTP {status} {text[:200].decode(errors='replace')!r}", status)
