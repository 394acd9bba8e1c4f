"""The clients that stand for pods: their tokens, their processes, and what they say.

Processes: some of clients, which end with their ``with`` block. Threads: one that reads each of these processes, until
it ends.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from benchmarks.clients import start_client
from benchmarks.operator_scale_cluster import Replica
from benchmarks.operator_scale_objects import ACCOUNT, Gang, uid_of
from gracepoint.wire.names import TOKEN_AUDIENCE
from tests.testcluster.shell import wait_until

_ISSUER = "https://kubernetes.default.svc.cluster.local"
_CLIENT_PROCESSES = 2
_TOKEN_S = 3_600


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

    def wait_until_fewer(self, count: int, timeout_s: float) -> None:
        """Returns once fewer clients than that are connected."""
        wait_until(f"fewer than {count} clients to be connected", lambda: self.connected < count, timeout_s=timeout_s)

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
            child = start_client("benchmarks.operator_scale_clients", given, folder / f"clients-{part}.json", log)
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
