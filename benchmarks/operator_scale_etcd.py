"""Writes many objects into etcd, through the JSON gateway of its own port.

The API server stores built-in kinds as protobuf, and reads JSON as well. To create 50,000 pods through the API server
would take most of the time of the benchmark, and would measure the API server.

Threads: some that each send transactions, until all are sent.
"""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import TypeVar

#: For etcd, which otherwise accepts 1.5 MiB a request and 2 GiB in all.
FLAGS = ("--max-request-bytes=33554432", "--quota-backend-bytes=8589934592", "--max-txn-ops=1024")
_AT_ONCE = 64
_THREADS = 2
_TIMEOUT_S = 60.0

_T = TypeVar("_T")


def fill(url: str, objects: Iterable[tuple[str, bytes]]) -> int:
    """Writes the objects. Returns how many bytes they have.

    Args:
        url: Where etcd listens.
        objects: Key and value of each.

    Raises:
        RuntimeError: etcd refused a transaction.
    """
    local = threading.local()
    connections: list[http.client.HTTPConnection] = []

    def send(batch: list[tuple[str, bytes]]) -> int:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=_TIMEOUT_S)
            connections.append(local.connection)
        puts = [{"request_put": {"key": _text(key.encode()), "value": _text(value)}} for key, value in batch]
        local.connection.request("POST", "/v3/kv/txn", json.dumps({"success": puts}))
        answer = local.connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"etcd at {url} refused {len(batch)} objects: HTTP {answer.status} {said[:500]!r}")
        return sum(len(value) for _, value in batch)

    try:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
            # A few at a time, so that only these are in memory.
            groups = _batched(_batched(objects, _AT_ONCE), 4 * _THREADS)
            return sum(sum(threads.map(send, group)) for group in groups)
    finally:
        for connection in connections:
            connection.close()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _batched(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
