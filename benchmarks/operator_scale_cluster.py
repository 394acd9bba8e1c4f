"""The API server with a large cluster in it, and the replicas of the operator, as processes.

Processes: etcd and the API server, which end with their ``with`` block; one for each replica, which ends when it is
stopped or killed. Threads: those of ``snapshot_servers``, which end with its block.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import trustme
import yaml

from benchmarks import operator_scale_etcd
from benchmarks.operator_scale_bodies import SERVERS
from benchmarks.operator_scale_objects import Size, stored
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.trust.bundle import KEY_KNOWN_S, CapabilityKey, capability_keys_text
from tests.testcluster import addons
from tests.testcluster.api_server import ApiServer, open_api_server
from tests.testcluster.shell import log_tail

_ROOT = Path(__file__).parents[1]
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0
_LOOK_S = 0.05
CAPACITY_BYTES = 64 << 30


@contextlib.contextmanager
def filled_api_server(folder: Path, size: Size, *, snapshots: bool = False) -> Iterator[ApiServer]:
    """Runs etcd and the API server with all objects of that size, and snapshot servers if they are wanted."""
    (_, jobset) = addons.render(folder / "manifests")
    found = [item for item in yaml.safe_load_all(jobset.read_text()) if item["kind"] == "CustomResourceDefinition"]

    def fill(url: str) -> None:
        operator_scale_etcd.fill(url, stored(size, time.time(), snapshots=snapshots))

    flags = operator_scale_etcd.FLAGS
    with open_api_server(
        folder, service_accounts=True, etcd_flags=flags, fill=fill, ready_s=_START_TIMEOUT_S
    ) as server:
        server.define(bodies=(*found, *definitions().values()))
        yield server


def processor_s(*names: str) -> float:
    """The CPU seconds of the child processes of these names."""
    found = [child for child in psutil.Process().children() if child.name() in names]
    return sum(sum(child.cpu_times()[:2]) for child in found)


class Certificate:
    """The operator's certificate, with the authority that signed it."""

    def __init__(self, folder: Path) -> None:
        self.authority = authority = trustme.CA()
        certificate = authority.issue_cert("localhost")  # with an ECDSA key, as the chart makes it
        self.directory = folder / "tls"
        self.directory.mkdir()
        certificate.private_key_pem.write_to_path(str(self.directory / "tls.key"))
        certificate.cert_chain_pems[0].write_to_path(str(self.directory / "tls.crt"))
        authority.cert_pem.write_to_path(str(self.directory / "ca.crt"))
        self.ca = authority.cert_pem.bytes().decode()
        self.webhook_token = secrets.token_hex()
        self.token_file = folder / "webhook-token"
        self.token_file.write_text(self.webhook_token)


@contextlib.contextmanager
def snapshot_servers(folder: Path, api: KubeClient, certificate: Certificate) -> Iterator[Sequence[str]]:
    """Answers at the addresses of all snapshot servers, in threads of this process, and makes their Secret.

    Yields:
        What the operator is given.
    """
    key = CapabilityKey(f"{time.time() - KEY_KNOWN_S:.0f}-1", secrets.token_bytes(32))
    text = capability_keys_text([key])
    data = {"keys": base64.b64encode(text.encode()).decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SERVERS}, "data": data}
    asyncio.run(api.create(objects.SECRETS, "default", secret))
    files = SnapshotFiles(
        certificate=folder / "servers.crt", key=folder / "servers.key", capability_keys=folder / "servers.keys"
    )
    leaf = certificate.authority.issue_cert(f"{SERVERS}.default.svc")
    leaf.cert_chain_pems[0].write_to_path(str(files.certificate))
    leaf.private_key_pem.write_to_path(str(files.key))
    files.capability_keys.write_text(text)
    # The operator has one address for all of them, and each has these limits.
    many = {"connections_of_address": 512, "pending": 512, "pending_of_address": 512}
    limits = SnapshotLimits(capacity_bytes=CAPACITY_BYTES, workload_bytes=CAPACITY_BYTES, **many)
    server = SnapshotServer(files, limits, "0.0.0.0")
    try:
        port = f"--snapshot-port={server.port}"
        yield [f"--snapshot-servers={SERVERS}", "--snapshot-certificate=false", port, "--namespace=default"]
    finally:
        server.close()


class Blocked(NamedTuple):
    """A callback that blocked an event loop."""

    at: float
    thread: str
    took_s: float
    worked_s: float
    what: str


class Replica:
    """One replica of the operator. ``start`` returns before it is ready.

    Args:
        name: The replica's name.
        folder: For its log.
        ports: Of the channel, the webhooks and the probes.
        kubeconfig: An administrator's.
        certificate: Its certificate.
        flags: More of its arguments.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        ports: Sequence[int],
        kubeconfig: Path,
        certificate: Certificate,
        flags: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.https, self.webhooks, self.health = ports
        self._log = folder / f"{name}.log"
        self._blocked = folder / f"{name}.blocked"
        self._argv: list[str | Path] = [
            *(sys.executable, "-m", "benchmarks.operator_scale_process", self._blocked),
            *(f"--kubeconfig={kubeconfig}", f"--tls-directory={certificate.directory}", f"--replica={name}"),
            *(f"--service-url=https://localhost:{self.https}", f"--https-port={self.https}", "--replicas=2"),
            *(f"--webhook-token={certificate.token_file}", f"--webhook-port={self.webhooks}"),
            f"--health-port={self.health}",
            *flags,
        ]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._blocked.touch()
        with self._log.open("ab") as sink:
            self._child = subprocess.Popen(self._argv, stdout=sink, stderr=sink, cwd=_ROOT)

    def wait_until_ready(self) -> float:
        """Returns how long it took, in seconds from now."""
        began_s = time.monotonic()
        child = self._running()
        while not self._is_ready():
            if child.poll() is not None or time.monotonic() - began_s > _START_TIMEOUT_S:
                took_s = time.monotonic() - began_s
                raise TimeoutError(f"replica {self.name}: not ready after {took_s:.0f} s{log_tail(self._log)}")
            time.sleep(_LOOK_S)
        return time.monotonic() - began_s

    @property
    def pid(self) -> int:
        return self._running().pid

    def cpu_s(self) -> float:
        return float(sum(psutil.Process(self.pid).cpu_times()[:2]))

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Its resident memory. ``VmHWM``: the most that it has been."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:"))

    def blocked(self, since: float) -> list[Blocked]:
        """What blocked its event loops since then."""
        lines = self._blocked.read_text().splitlines()
        found = [Blocked(**json.loads(line)) for line in lines if line.endswith("}")]
        return [item for item in found if item.at >= since]

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self._child is not None:
            self._end(signal.SIGTERM)

    def _end(self, by: signal.Signals) -> None:
        child = self._running()
        child.send_signal(by)
        try:
            child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError(f"replica {self.name} does not run")
        return self._child

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.health, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
