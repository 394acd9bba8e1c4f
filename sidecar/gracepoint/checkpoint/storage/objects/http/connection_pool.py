"""The connections to one server that are kept open, with the server's name, its proxy and the authorities it needs.

A ``Connections`` belongs to one server, and any thread uses it. It has no threads.

``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` are honoured for HTTPS, which goes through a tunnel.
Requests by plain HTTP go to the server directly.
"""

from __future__ import annotations

import atexit
import base64
import http.client
import os
import ssl
import threading
import time
import urllib.request
from urllib.parse import SplitResult, unquote, urlsplit

from gracepoint.forks import forget_in_child

#: Bytes of one send or read.
BLOCK_BYTES = 1 << 18
_CONNECT_S = 3.0  # for one address: a server can have several, of which some do not answer
# Servers close connections that are idle for longer. A request on a closed connection costs a round trip.
_IDLE_S = 20.0
_KEPT = 64
_PORTS = {"http": 80, "https": 443}


class Connections:
    """The connections to one server.

    Args:
        url: Scheme, host and port of the server.
        authorities: A file of the certificates to trust. None: those of the system, or of ``SSL_CERT_FILE``.

    Attributes:
        host: Host and port as they stand in the header ``Host``: in lower case, and without the default port.
        url: Scheme, host and port.
    """

    def __init__(self, url: str, authorities: str | None = None) -> None:
        self._where: SplitResult = urlsplit(url)
        scheme, hostname = self._where.scheme, self._where.hostname
        if scheme not in _PORTS or not hostname:
            raise ValueError(f"{url!r}: expected http:// or https:// with a host")
        if self._where.path not in ("", "/") or self._where.query or self._where.fragment:
            raise ValueError(f"{url!r}: expected a server alone, without a path: requests could not be signed")
        if self._where.username is not None:
            raise ValueError("the URL of a server has a user: expected it without, as credentials have settings")
        name = f"[{hostname}]" if ":" in hostname else hostname
        port = self._where.port
        self.host = name if port in (None, _PORTS[scheme]) else f"{name}:{port}"
        self.url = f"{scheme}://{self.host}"
        self._authorities = authorities
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None
        forget_in_child(self, Connections._forget)

    def _forget(self) -> None:
        """In a forked child: the idle connections are its parent's, whose requests would get the child's replies."""
        self._lock = threading.Lock()
        self.close()

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Returns a connection, and whether it was used before. If it was not, it is not connected yet."""
        with self._lock:
            while self._idle:
                since_s, connection = self._idle.pop()
                if time.monotonic() - since_s < _IDLE_S:
                    return connection, True
                connection.close()
        return self.new(), False

    def new(self) -> http.client.HTTPConnection:
        """Returns a connection that is not connected yet."""
        hostname, port = str(self._where.hostname), self._where.port
        if self._where.scheme == "http":
            return http.client.HTTPConnection(hostname, port, timeout=_CONNECT_S, blocksize=BLOCK_BYTES)
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._authorities)
        proxies = {} if urllib.request.proxy_bypass(self.host) else urllib.request.getproxies()
        proxy = proxies.get("https") or proxies.get("all")
        if not proxy:
            return http.client.HTTPSConnection(hostname, port, timeout=_CONNECT_S, context=self._tls)
        way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if way.scheme != "http" or not way.hostname:
            raise ValueError("HTTPS_PROXY: expected http:// with a host and a port")
        connection = http.client.HTTPSConnection(way.hostname, way.port or 80, timeout=_CONNECT_S, context=self._tls)
        headers = {}
        if way.username is not None:
            user = f"{unquote(way.username)}:{unquote(way.password or '')}"
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        connection.set_tunnel(hostname, port or _PORTS["https"], headers)
        return connection

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keeps a connection for the next request. Its reply must have been read to the end."""
        with self._lock:
            if len(self._idle) < _KEPT:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Closes the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


_servers: dict[tuple[str, str | None], Connections] = {}
_servers_lock = threading.Lock()


def connections_to(url: str, authorities: str | None = None) -> Connections:
    """Returns the connections of this process to a server. They are closed at the end of the process."""
    with _servers_lock:
        if not _servers:
            atexit.register(_close_all)
        if (url, authorities) not in _servers:
            _servers[url, authorities] = Connections(url, authorities)
        return _servers[url, authorities]


def _close_all() -> None:
    for connections in list(_servers.values()):
        connections.close()


def _renew_lock() -> None:
    global _servers_lock
    _servers_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it
