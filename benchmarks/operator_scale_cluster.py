"""The API server with a large cluster in it, the replicas of the operator, and the clients, as processes.

Processes: etcd, the API server, one for each replica, some of clients. All end with their ``with`` block. Threads: one
that reads each process of clients, until that process ends.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import trustme
import yaml
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from benchmarks import operator_scale_etcd
from benchmarks.operator_scale_objects import ACCOUNT, Gang, Size, stored, uid_of
from gracepoint.wire.names import TOKEN_AUDIENCE
from gracepoint_operator.resources.crds import definitions
from tests.testcluster import addons
from tests.testcluster.api_server import ApiServer, free_ports, open_api_server
from tests.testcluster.shell import log_tail, wait_until

_ROOT = Path(__file__).parents[1]
_ISSUER = "https://kubernetes.default.svc.cluster.local"
_CLIENT_PROCESSES = 2
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0
_TOKEN_S = 3_600
_LOOK_S = 0.05


@contextlib.contextmanager
def filled_api_server(folder: Path, size: Size) -> Iterator[ApiServer]:
    """Runs etcd and the API server with all objects of that size."""
    (_, jobset) = addons.render(folder / "manifests")
    found = [item for item in yaml.safe_load_all(jobset.read_text()) if item["kind"] == "CustomResourceDefinition"]

    def fill(url: str) -> None:
        operator_scale_etcd.fill(url, stored(size, time.time()))

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
        authority = trustme.CA()
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
        kubeconfig: An administrator's.
        certificate: Its certificate.
    """

    def __init__(self, name: str, folder: Path, kubeconfig: Path, certificate: Certificate) -> None:
        self.name = name
        self.https, self.webhooks, self.health = free_ports(3)
        self._log = folder / f"{name}.log"
        self._blocked = folder / f"{name}.blocked"
        self._argv: list[str | Path] = [
            *(sys.executable, "-m", "benchmarks.operator_scale_process", self._blocked),
            *(f"--kubeconfig={kubeconfig}", f"--tls-directory={certificate.directory}", f"--replica={name}"),
            *(f"--service-url=https://localhost:{self.https}", f"--https-port={self.https}", "--replicas=2"),
            *(f"--webhook-token={certificate.token_file}", f"--webhook-port={self.webhooks}"),
            f"--health-port={self.health}",
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

    def cpu_s(self) -> float:
        return float(sum(psutil.Process(self._running().pid).cpu_times()[:2]))

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Its resident memory. ``VmHWM``: the most that it has been."""
        status = Path(f"/proc/{self._running().pid}/status").read_text()
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


class Signer:
    """Signs the tokens of pods, with the key of the API server.

    Args:
        folder: Where the API server's keys are.
    """

    def __init__(self, folder: Path) -> None:
        key = serialization.load_pem_private_key((folder / "service-accounts.key").read_bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        self._key = key

    def token(self, gang: Gang, index: int) -> str:
        """A token that is bound to a pod."""
        now = int(time.time())
        account = {"name": ACCOUNT, "uid": uid_of("account", gang.namespace, ACCOUNT)}
        pod = {"name": gang.pod_name(index), "uid": gang.pod_uid(index)}
        claims = {
            "iss": _ISSUER,
            "sub": f"system:serviceaccount:{gang.namespace}:{ACCOUNT}",
            "aud": [TOKEN_AUDIENCE],
            "iat": now,
            "nbf": now,
            "exp": now + _TOKEN_S,
            "kubernetes.io": {"namespace": gang.namespace, "pod": pod, "serviceaccount": account},
        }
        text = ".".join(_coded(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
        return f"{text}.{_coded(self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _coded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclasses.dataclass(frozen=True)
class Member:
    """A pod with a client: its gang and its place in it."""

    gang: Gang
    index: int


class Word(NamedTuple):
    """What a client said; see ``operator_scale_clients``."""

    what: str
    pod_uid: str
    preemption: str
    at: float


class Clients:
    """The clients of some pods. ``open_clients`` starts and ends them.

    Attributes:
        words: What they say.
    """

    def __init__(self) -> None:
        self.words: queue.Queue[Word] = queue.Queue()
        self._connected: dict[int, int] = {}  # by process

    @property
    def connected(self) -> int:
        return sum(self._connected.values())

    def wait_until_connected(self, count: int, timeout_s: float) -> float:
        """Returns how long it took, in seconds from now."""
        began_s = time.monotonic()
        wait_until(f"{count} clients to be connected", lambda: self.connected >= count, timeout_s=timeout_s)
        return time.monotonic() - began_s

    def listen(self, count: int, what: str, gang: Gang | None, timeout_s: float) -> list[Word]:
        """Returns the words of a kind, until there are so many or time is over. Others are dropped."""
        found: list[Word] = []
        uids = None if gang is None else {gang.pod_uid(index) for index in range(gang.count)}
        until_s = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < until_s:
            with contextlib.suppress(queue.Empty):
                word = self.words.get(timeout=max(until_s - time.monotonic(), 0.0))
                if word.what == what and (uids is None or word.pod_uid in uids):
                    found.append(word)
        return found

    def read(self, child: subprocess.Popen[str]) -> None:
        """Reads one process of clients to its end."""
        assert child.stdout is not None
        for line in child.stdout:
            what, *rest = json.loads(line)
            if what == "connected":
                self._connected[child.pid] = rest[0]
            else:
                self.words.put(Word(what, *rest))


@contextlib.contextmanager
def open_clients(
    folder: Path, members: Sequence[Member], replicas: Sequence[Replica], signer: Signer, ca: str
) -> Iterator[Clients]:
    """Starts a client for each of these pods, half of them at each replica."""
    clients, children = Clients(), []
    log = folder / "clients.log"
    entries = [_entry(number, member, len(replicas), signer) for number, member in enumerate(members)]
    try:
        for part in range(_CLIENT_PROCESSES):
            given = {"ca": ca, "ports": [item.https for item in replicas], "clients": entries[part::_CLIENT_PROCESSES]}
            path = folder / f"clients-{part}.json"
            path.write_text(json.dumps(given))
            with log.open("a") as sink:
                child = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.operator_scale_clients", str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                    cwd=_ROOT,
                )
            children.append(child)
            threading.Thread(target=clients.read, args=(child,), daemon=True).start()
        yield clients
    finally:
        for child in children:
            child.kill()
            child.wait()


def _entry(number: int, member: Member, replicas: int, signer: Signer) -> dict[str, Any]:
    gang, index = member.gang, member.index
    return {
        "namespace": gang.namespace,
        "pod_name": gang.pod_name(index),
        "pod_uid": gang.pod_uid(index),
        "workload_uid": gang.uid,
        "index": index,
        "count": gang.count,
        "token": signer.token(gang, index),
        "address": f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}",
        "first_port": number // _CLIENT_PROCESSES % replicas,
    }
