"""How fast TensorStore and obstore write and read whole objects: ``python -m benchmarks.object_store_clients``.

Both do the same by turns in one process, on versitygw and (TensorStore alone) on fake-gcs-server, directly and through
the proxy at 50 ms a round trip and 40 MB/s a connection, with so many requests at a time. The limit of the proxy is
the bytes by all connections' bandwidth, plus two round trips (a connection's and a request's).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import tensorstore as ts
from obstore.store import S3Store

from benchmarks import report
from benchmarks.report import Figure
from tests.object_stores.faults import Shape
from tests.object_stores.proxy_process import open_proxy
from tests.object_stores.servers import Bucket, Server, open_gcs, open_s3

SHAPE = Shape(round_trip_s=0.05, connection_rate=40e6)
MEMORY = Path("/dev/shm")


class Client:
    """Writes and reads objects of a bucket, by so many requests at once."""

    def __init__(self, bucket: Bucket, at_once: int) -> None:
        raise NotImplementedError

    def write(self, key: str, value: memoryview) -> None:
        """Creates an object if it is absent."""
        raise NotImplementedError

    def read(self, key: str, begin: int, end: int) -> int:
        """Reads a range; returns its length."""
        raise NotImplementedError


class ByTensorStore(Client):
    """TensorStore's key-value stores."""

    def __init__(self, bucket: Bucket, at_once: int) -> None:
        limit = {"limit": at_once}
        context = ts.Context({"gcs_request_concurrency": limit, "s3_request_concurrency": limit})
        self._store = ts.KvStore.open(bucket.kvstore(), context=context).result()
        self._absent = self._store.read("absent").result().stamp.generation

    def write(self, key: str, value: memoryview) -> None:
        assert self._store.write(key, bytes(value), if_equal=self._absent).result().generation

    def read(self, key: str, begin: int, end: int) -> int:
        read = self._store.read(key, byte_range=slice(begin, end))
        return len(read.result().value)


class ByObstore(Client):
    """obstore."""

    def __init__(self, bucket: Bucket, at_once: int) -> None:
        self._store = S3Store(bucket.name)

    def write(self, key: str, value: memoryview) -> None:
        obstore.put(self._store, key, value, mode="create", use_multipart=False)

    def read(self, key: str, begin: int, end: int) -> int:
        return len(obstore.get_range(self._store, key, start=begin, end=end))


def measure(client: Client, data: memoryview, size: int, at_once: int, name: str) -> dict[str, float]:
    """Writes the data as objects, and reads them by ranges of 8 MiB; seconds, and processor seconds."""
    pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    piece = min(size, 8 << 20)
    ranges = [(index, begin) for index in range(len(pieces)) for begin in range(0, size, piece)]
    found: dict[str, float] = {}
    with ThreadPoolExecutor(at_once) as pool, memory_peak() as peak:
        with timed(found, "write"):
            list(pool.map(lambda index: client.write(f"{name}-{index}", pieces[index]), range(len(pieces))))
        with timed(found, "read"):
            read = pool.map(lambda each: client.read(f"{name}-{each[0]}", each[1], each[1] + piece), ranges)
            assert sum(read) == len(data)
    return {**found, "peak MiB": peak[0] / (1 << 20)}


@contextlib.contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    begin, used = time.perf_counter(), time.process_time()
    yield
    found[f"{name} s"] = time.perf_counter() - begin
    found[f"{name} processor s"] = time.process_time() - used


@contextlib.contextmanager
def memory_peak() -> Iterator[list[int]]:
    """The most memory that the process has beyond what it had."""
    peak, ended = [0], threading.Event()
    before = resident()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], resident() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    ended.set()
    thread.join()


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def clients(server: Server) -> list[type[Client]]:
    return [ByTensorStore] if server.scheme == "gs" else [ByTensorStore, ByObstore]


def compare(server: Server, through: str, url: str, data: memoryview, options: Any) -> Iterator[Figure]:
    """The figures of one server."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for turn in range(options.rounds):
        for size in (16 << 20, 64 << 20):
            for client in clients(server):
                bucket = server.bucket(url=url)
                os.environ.update(bucket.environment)
                values = measure(client(bucket, options.at_once), data, size, options.at_once, f"{turn}")
                for what, value in values.items():
                    found.setdefault((client.__name__, size >> 20, what), []).append(value)
    for (client_name, size, what), seconds in found.items():
        unit = "MiB" if what.endswith("MiB") else "s"
        name = f"{server.scheme} {through}, objects of {size} MiB, {client_name}: {what}"
        yield Figure(name, statistics.median(seconds), unit)


def main() -> None:
    """Measures and tells."""
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="how much is written (%(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="requests at a time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    data = memoryview(np.random.default_rng(0).bytes(options.mib << 20))
    figures = []
    servers: list[Callable[[Path], contextlib.AbstractContextManager[Server]]] = [open_s3, open_gcs]
    for opened in servers:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder, opened(Path(folder)) as server:
            figures += list(compare(server, "directly", server.url, data, options))
            with open_proxy(server.url) as proxy:
                figures += list(compare(server, "through an idle proxy", proxy.url, data, options))
                used = proxy.processor_s
                proxy.set_shape(SHAPE)
                figures += list(compare(server, "at 50 ms and 40 MB/s", proxy.url, data, options))
                figures.append(Figure(f"{server.scheme}: the proxy's processor s, fast", used, "s"))
                figures.append(Figure(f"{server.scheme}: the proxy's processor s, slow", proxy.processor_s - used, "s"))
    assert SHAPE.connection_rate is not None
    limit_s = len(data) / (SHAPE.connection_rate * options.at_once) + 2 * SHAPE.round_trip_s
    figures.append(Figure("limit at 50 ms and 40 MB/s", limit_s, "s"))
    report.publish(figures, options.json)


if __name__ == "__main__":
    main()
