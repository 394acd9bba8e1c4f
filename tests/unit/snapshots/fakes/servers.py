"""A real snapshot server on loopback with certificates and keys of its own, and clients and bare sockets to it."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trustme

from gracepoint.deadline import Deadline
from gracepoint.snapshots.exchange import frame, read_frame
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer
from gracepoint.wire.capability import Capability, Right, write_capability

NAME = "snapshots.gracepoint.test"
KEY = bytes(range(32))
MIB = 1 << 20
OWN = frozenset({Right.WRITE, Right.READ, Right.DROP})


def deadline(timeout_s: float = 60.0) -> Deadline:
    return Deadline.after(timeout_s, time.monotonic)


def capability(workload: str = "uid-1", **changes: Any) -> Capability:
    fields: dict[str, Any] = {
        "namespace": "research",
        "workload": workload,
        "attempt": 1,
        "rights": OWN,
        "until": 10_000,
        "max_bytes": 1 << 40,
    }
    return Capability(**fields | changes)


def shown(workload: str = "uid-1", *, key_id: str = "a", key: bytes = KEY, **changes: Any) -> str:
    """The text of a capability."""
    return write_capability(capability(workload, **changes), key_id, key)


class Served:
    """A server with virtual clocks: ``age_s`` for ages, ``epoch_s`` for the end of capabilities."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.age_s = 0.0
        self.epoch_s = 1000.0
        self.files = SnapshotFiles(
            certificate=folder / "tls.crt", key=folder / "tls.key", capability_keys=folder / "keys"
        )
        self.authority = trustme.CA()
        self.certify(self.authority)
        self.set_keys(a=KEY)
        patient: dict[str, Any] = {"handshake_s": 30.0, "header_s": 30.0, "stall_s": 30.0}
        self._limits = SnapshotLimits(**patient | {"capacity_bytes": 64 * MIB, "workload_bytes": 32 * MIB} | limits)
        self._clients = contextlib.ExitStack()
        self.server = SnapshotServer(
            self.files, self._limits, "127.0.0.1", clock=lambda: self.age_s, now=lambda: self.epoch_s
        )

    def certify(self, authority: trustme.CA) -> None:
        """Gives the server a new certificate."""
        made = authority.issue_cert(NAME)
        made.cert_chain_pems[0].write_to_path(self.files.certificate)
        made.private_key_pem.write_to_path(self.files.key)

    def set_keys(self, **keys: bytes) -> None:
        lines = (f"{name} {base64.b64encode(key).decode()}\n" for name, key in keys.items())
        self.files.capability_keys.write_text("".join(lines))

    def client(
        self, text: str | Callable[[], str] | None = None, *, authority: trustme.CA | None = None, **options: Any
    ) -> SnapshotClient:
        text = shown() if text is None else text
        pem = (authority or self.authority).cert_pem.bytes().decode()
        client = SnapshotClient(
            ("127.0.0.1", self.server.port),
            server_name=NAME,
            authorities=lambda: pem,
            capability=text if callable(text) else lambda: text,
            **options,
        )
        self._clients.callback(client.close)
        return client

    @contextlib.contextmanager
    def link(self, text: str | None = None, *, address: str = "127.0.0.1") -> Iterator[ssl.SSLSocket]:
        """A connection of its own, which has said hello if there is a text."""
        context = ssl.create_default_context(cadata=self.authority.cert_pem.bytes().decode())
        with self.bare(address) as raw, context.wrap_socket(raw, server_hostname=NAME) as link:
            if text is not None:
                assert asked(link, op="hello", capability=text) == {}
            yield link

    @contextlib.contextmanager
    def bare(self, address: str = "127.0.0.1") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30, source_address=(address, 0)) as raw:
            yield raw

    def used_bytes(self) -> int:
        return int(self.server.figures()["used_bytes"])

    def close(self) -> None:
        self._clients.close()
        self.server.close()


def asked(link: ssl.SSLSocket, **request: object) -> dict[str, Any]:
    """Sends a request, and returns the header of its answer."""
    link.sendall(frame(**request))
    return read_frame(link, 30.0)


def ends(link: socket.socket) -> bool:
    """Whether the server ends a connection. Waits for it."""
    try:
        while link.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
