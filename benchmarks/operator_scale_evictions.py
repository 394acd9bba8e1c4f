"""Asks the eviction webhook again and again, as the API server does while nodes are drained.

Threads: one, with an event loop, while ``running``. It stands for API servers on other machines, so it gets a processor
before all that this machine runs at once, if the benchmark may have it so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

import aiohttp

from benchmarks.operator_scale_cluster import Certificate
from benchmarks.operator_scale_objects import Gang
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of

_EVERY_S = 0.25
_TIMEOUT_S = 10.0
_NICENESS = -10
#: Pods of so many JobSets are evicted, the big one among them.
_GANGS = 6


class Evictions:
    """Attempts to evict pods of a few JobSets.

    Args:
        certificate: The operator's.
        ports: Where the webhooks of the replicas listen. May be replaced.
        gangs: The JobSets.

    Attributes:
        took_s: How long each answer took.
        failed: How many attempts were not answered.
    """

    def __init__(self, certificate: Certificate, ports: Sequence[int], gangs: Sequence[Gang]) -> None:
        self.ports = ports
        self.took_s: list[float] = []
        self.failed = 0
        self._context = ssl.create_default_context(cadata=certificate.ca)
        self._path = path_of(PATH_EVICTIONS, certificate.webhook_token)
        self._gangs = gangs[1:_GANGS]  # the notices of the big one are measured
        self._ends = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="evictions", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join(2 * _TIMEOUT_S)

    async def _run(self) -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        chosen = random.Random(0)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._ends.is_set():
                await asyncio.sleep(_EVERY_S)
                gang, port = chosen.choice(self._gangs), chosen.choice(self.ports)
                url = f"https://localhost:{port}{self._path}"
                began_s = time.monotonic()
                try:
                    body = _review(gang, chosen.randrange(gang.count))
                    async with session.post(url, json=body, ssl=self._context) as answer:
                        answer.raise_for_status()
                        await answer.read()
                except (aiohttp.ClientError, TimeoutError):
                    self.failed += port in self.ports  # not if the replica was killed meanwhile
                else:
                    self.took_s.append(time.monotonic() - began_s)


def _review(gang: Gang, index: int) -> dict[str, object]:
    name = gang.pod_name(index)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"namespace": gang.namespace, "name": name}}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(uuid.uuid4()),
            "kind": {"group": "policy", "version": "v1", "kind": "Eviction"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": "eviction",
            "operation": "CREATE",
            "namespace": gang.namespace,
            "name": name,
            "object": eviction,
            "dryRun": False,
        },
    }
