"""Asks the eviction webhook again and again, as the API server does while nodes are drained.

It stands for API servers on other machines. So it is a process of its own, whose interpreter does nothing else, and
gets a processor before all that this machine runs at once, if the benchmark may have it so. It reads lines of JSON:
first what it needs, then the ports whenever others count. At the end of its input it prints what came of it, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.operator_scale_cluster import Certificate
from benchmarks.operator_scale_objects import Gang
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of

_EVERY_S = 0.25
_TIMEOUT_S = 10.0
_NICENESS = -10
#: Pods of so many JobSets are evicted, the big one among them.
_GANGS = 6
_ROOT = Path(__file__).parents[1]


class Evictions:
    """Attempts to evict pods of a few JobSets, and reads the node of each from the API server at the same time.

    Args:
        certificate: The operator's.
        kubeconfig: Of the API server.
        ports: Where the webhooks of the replicas listen.
        gangs: The JobSets.

    Attributes:
        took_s: How long each answer took. Filled once ``running`` is left.
        failed: How many attempts were not answered. Likewise.
        read_s: How long each node took to be read. Likewise.
    """

    def __init__(self, certificate: Certificate, kubeconfig: Path, ports: Sequence[int], gangs: Sequence[Gang]) -> None:
        self.took_s: list[float] = []
        self.failed = 0
        self.read_s: list[float] = []
        self._asked = {
            "ca": certificate.ca,
            "kubeconfig": str(kubeconfig),
            "path": path_of(PATH_EVICTIONS, certificate.webhook_token),
            # The notices of the big one are measured.
            "pods": [
                [gang.namespace, [(gang.pod_name(i), gang.node(i)) for i in range(gang.count)]]
                for gang in gangs[1:_GANGS]
            ],
        }
        self._ports = list(ports)
        self._child: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        command = [sys.executable, "-m", "benchmarks.operator_scale_evictions"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=_ROOT) as child:
            self._child = child
            try:
                self._tell(self._asked)
                self._tell(self._ports)
                yield
            except BaseException:
                child.kill()
                raise
            said, _ = child.communicate(timeout=2 * _TIMEOUT_S)
        self.took_s, self.failed, self.read_s = json.loads(said)

    def ask(self, ports: Sequence[int]) -> None:
        """From now on, these ports alone are asked."""
        self._tell(list(ports))

    def _tell(self, line: object) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        print(json.dumps(line), file=self._child.stdin, flush=True)


class _Asker:
    """The other process. A thread reads the ports while the event loop asks, and ends with the input."""

    def __init__(self, asked: dict[str, Any], ports: list[int]) -> None:
        self._context = ssl.create_default_context(cadata=asked["ca"])
        self._path = asked["path"]
        self._pods = asked["pods"]
        self._api = KubeClient.connect(asked["kubeconfig"])
        self._ports = ports
        self._ends = threading.Event()
        self.took_s: list[float] = []
        self.failed = 0
        self.read_s: list[float] = []

    def read_ports(self) -> None:
        for line in sys.stdin:
            self._ports = json.loads(line)
        self._ends.set()

    async def run(self) -> None:
        chosen = random.Random(0)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._ends.is_set():
                await asyncio.sleep(_EVERY_S)
                (namespace, pods), port = chosen.choice(self._pods), chosen.choice(self._ports)
                pod, node = chosen.choice(pods)
                await asyncio.gather(self._evict(session, namespace, pod, port), self._read(node))

    async def _evict(self, session: aiohttp.ClientSession, namespace: str, pod: str, port: int) -> None:
        url = f"https://localhost:{port}{self._path}"
        began_s = time.monotonic()
        try:
            async with session.post(url, json=_review(namespace, pod), ssl=self._context) as answer:
                answer.raise_for_status()
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            self.failed += port in self._ports  # not if the replica was killed meanwhile
        else:
            self.took_s.append(time.monotonic() - began_s)

    async def _read(self, node: str) -> None:
        began_s = time.monotonic()
        await self._api.get(objects.NODES, None, node)
        self.read_s.append(time.monotonic() - began_s)


def _review(namespace: str, name: str) -> dict[str, object]:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"namespace": namespace, "name": name}}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(uuid.uuid4()),
            "kind": {"group": "policy", "version": "v1", "kind": "Eviction"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": "eviction",
            "operation": "CREATE",
            "namespace": namespace,
            "name": name,
            "object": eviction,
            "dryRun": False,
        },
    }


def _main() -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    asker = _Asker(json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline()))
    threading.Thread(target=asker.read_ports, name="ports", daemon=True).start()
    asyncio.run(asker.run())
    print(json.dumps([asker.took_s, asker.failed, asker.read_s]))


if __name__ == "__main__":
    _main()
