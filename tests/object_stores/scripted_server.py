"""A server that does what a test tells it, on HTTP or HTTPS: it answers wrongly, slowly, or with what is not HTTP.

Threads: one accepts connections, and one serves each of them until it is closed. ``close`` closes all sockets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
from collections.abc import Callable

import trustme

_WAIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Heard:
    """A request that arrived.

    Attributes:
        number: Its number, from 0.
        method: The method.
        target: Path and query.
        headers: The headers, with names in lower case.
        body: What was sent.
    """

    number: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Heard, socket.socket], None]


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Returns a reply. An underscore in a header's name stands for a hyphen."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} Reason\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


class ScriptedServer:
    """See the module.

    Args:
        script: Called for each request, in the thread of its connection. It sends the reply.
        authority: Who signs the server's certificate. None: plain HTTP.

    Attributes:
        port: Where it listens on the loopback.
        heard: The requests, in the order in which they arrived.
    """

    def __init__(self, script: Script, authority: trustme.CA | None = None) -> None:
        self._script = script
        self._tls: ssl.SSLContext | None = None
        if authority is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert("localhost", "127.0.0.1").configure_cert(self._tls)
        self.heard: list[Heard] = []
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'http' if authority is None else 'https'}://localhost:{self.port}"
        threading.Thread(target=self._accept, name="scripted-server", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted,), name="scripted-server", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            sock.settimeout(_WAIT_S)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            with self._lock:
                self._sockets.append(sock)
            with sock, sock.makefile("rb") as stream:
                while line := stream.readline():
                    method, target, _ = line.decode().split(" ")
                    headers = {}
                    while (header := stream.readline().decode().strip()) != "":
                        name, _, value = header.partition(":")
                        headers[name.lower()] = value.strip()
                    body = stream.read(int(headers.get("content-length", "0")))
                    with self._lock:
                        heard = Heard(len(self.heard), method, target, headers, body)
                        self.heard.append(heard)
                    self._script(heard, sock)
