"""Real snapshot servers on loopback with certificates and keys of their own, and clients and bare sockets to them."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import trustme

from gracepoint.deadline import Deadline
from gracepoint.snapshots.exchange import frame, read_frame, receive
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer
from gracepoint.snapshots.snapshot_servers import ServerAt, ServerPlacement, SnapshotServers
from gracepoint.wire.snapshot_requests import Capability, Right, write_capability
from tests.waiting import until

NAME = "snapshots.gracepoint.test"
KEY = bytes(range(32))
MIB = 1 << 20
#: When capabilities end for servers that go by the real clock.
LATE = 1 << 40
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


class _Reached:
    """A server that listens on ``port`` with certificate and keys in files, and whoever speaks to it."""

    port: int

    def __init__(self, folder: Path) -> None:
        self._clients = contextlib.ExitStack()
        self.files = SnapshotFiles(
            certificate=folder / "tls.crt", key=folder / "tls.key", capability_keys=folder / "keys"
        )
        self.authority = trustme.CA()
        self.certify(self.authority)
        self.set_keys(a=KEY)

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
            ("127.0.0.1", self.port),
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
                assert "refused" not in asked(link, op="hello", capability=text)
            yield link

    @contextlib.contextmanager
    def bare(self, address: str = "127.0.0.1") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30, source_address=(address, 0)) as raw:
            yield raw


class Served(_Reached):
    """A server with virtual clocks: ``age_s`` for ages, ``epoch_s`` for the end of capabilities."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        super().__init__(folder)
        self.age_s = 0.0
        self.epoch_s = 1000.0
        patient: dict[str, Any] = {"handshake_s": 30.0, "header_s": 30.0, "stall_s": 30.0}
        self._limits = SnapshotLimits(**patient | {"capacity_bytes": 64 * MIB, "workload_bytes": 32 * MIB} | limits)
        self.server = self._started(0)
        self.port = self.server.port

    def _started(self, port: int) -> SnapshotServer:
        return SnapshotServer(
            self.files, self._limits, "127.0.0.1", port, clock=lambda: self.age_s, now=lambda: self.epoch_s
        )

    def used_bytes(self) -> int:
        return int(self.server.figures()["used_bytes"])

    @property
    def at(self) -> ServerAt:
        """Where it is, as the operator says it. Its node is named by its port."""
        return ServerAt(f"node-{self.port}", f"127.0.0.1:{self.port}")

    def restart(self) -> None:
        """Ends the server, and starts another one at its port: all that it had is lost."""
        self.server.close()
        self.server = self._started(self.port)

    def close(self) -> None:
        self._clients.close()
        self.server.close()


class ServedByProcess(_Reached):
    """``python -m gracepoint.snapshots`` with its own clocks. What it says is in the file ``log``.

    Args:
        folder: For its files.
        options: Of the command line.
        python: Options of Python.
    """

    def __init__(self, folder: Path, *options: str, python: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self.log = folder / "log"
        files = {"--certificate": self.files.certificate, "--key": self.files.key}
        named = files | {"--capability-keys": self.files.capability_keys, "--host": "127.0.0.1", "--port": 0}
        words = [str(word) for pair in named.items() for word in pair]
        command = [sys.executable, *python, "-m", "gracepoint.snapshots", *words, *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        try:
            until(lambda: self._said() or self.process.poll() is not None, "the server to serve, or to end")
            found = self._said()
            assert found is not None, self.log.read_text()
            self.port = int(found[1])
        except BaseException:
            self.close()
            raise

    def _said(self) -> re.Match[str] | None:
        return re.search(r"serving snapshots port=(\d+)", self.log.read_text())

    def resident_bytes(self, at_most: bool = False) -> int:
        """Memory that the process has now, or had at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kib,) = re.findall(rf"^{'VmHWM' if at_most else 'VmRSS'}:\s+(\d+) kB$", status, re.M)
        return int(kib) * 1024

    def figures(self) -> dict[str, Any]:
        """What the server says of itself to the operator."""
        with self.link(shown("operator", rights=frozenset({Right.STAT}), until=LATE)) as link:
            size_bytes = int(asked(link, op="stat")["bytes"])
            body = bytearray(size_bytes)
            receive(link, memoryview(body), 30.0)
        figures: dict[str, Any] = json.loads(body)
        return figures

    def close(self) -> None:
        self._clients.close()
        self.process.kill()
        self.process.wait(60)


_views: list[SnapshotServers] = []


def view(placement: ServerPlacement | None = None) -> SnapshotServers:
    """The servers as a process sees them. Its connections end with those of ``serving``."""
    made = SnapshotServers(placement)
    _views.append(made)
    return made


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Callable[..., Served]]:
    """Yields what starts servers, each with limits of its own. They end with the block."""
    with contextlib.ExitStack() as ended:

        def start(**limits: Any) -> Served:
            own = folder / f"server-{secrets.token_hex(4)}"
            own.mkdir()
            served = Served(own, **limits)
            ended.callback(served.close)
            return served

        yield start
        while _views:
            _views.pop().close()


def damage(served: Served, path: str, workload: str = "uid-1") -> None:
    """Flips a bit in the memory of a server, in all values whose keys end so."""
    values = served.server._held._workloads[workload].values
    for key, value in values.items():
        if key.endswith(path):
            value.memory[len(value.memory) // 2] ^= 1


def placed(write: Sequence[Served], read: Sequence[Served] = (), *, text: str | None = None) -> ServerPlacement:
    """What the operator says of these servers."""
    return ServerPlacement(
        capability=shown() if text is None else text,
        server_name=NAME,
        authorities="".join(served.authority.cert_pem.bytes().decode() for served in (*write, *read)),
        write=tuple(served.at for served in write),
        read=tuple(served.at for served in (*write, *read)),
    )


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
