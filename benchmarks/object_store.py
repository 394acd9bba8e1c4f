"""Saving to and restoring from an object store, beside Orbax in the same run, and with requests that fail.

    python -m benchmarks.object_store [--short] [--mib 512] [--repeats 5] [--faulty-saves 20] [--connections 4]
                                      [--slower 16] [--schemes gs s3] [--parts saves-and-restores many-connections
                                      faults] [--json FILE]

``--short`` is for a first look in about two minutes: 64 MiB, two repeats, five saves while requests fail, and the
bandwidth of two connections.

Two JAX processes of four CPU devices each save to a server on this machine through a proxy, at 50 ms a round trip, 40
MB/s a connection, and so much in all as ``--connections`` of them have. The servers are fake-gcs-server and versitygw,
which keep in memory what they get. The engines take turns (``object_store_process``); Orbax has no ``s3://``. A
turn's time is that of the process that took longest, a figure the median over the turns.

In the part ``many-connections``, nothing limits all connections together: as in a real store, each engine has as much
bandwidth as it opens connections. This machine cannot pass the bytes of so many connections. So there the network is
``--slower`` times as slow in every respect (time of a round trip, bandwidth of a connection), and all times are divided
by that. This is what a machine that is so many times as fast would measure at 50 ms and 40 MB/s a connection.

The limit is the time of the bytes at the bandwidth of all connections, and two round trips: one of the data, one of the
commit. The ceiling of the proxy and the server, without a shape, is measured first: if it is not well above the
bandwidth, this machine is too slow for these figures. Requests that fail are drawn with a seed: half of them are
answered with 503, the others stall.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import object_store_process, report
from benchmarks.checkpoint_engines import GRACEPOINT, ORBAX, ORBAX_PLAIN
from benchmarks.object_store_process import MEASURED, Measured, Settings
from benchmarks.report import Better, Figure
from tests.multiprocess.launcher import Processes, close_nursery
from tests.object_stores.faults import Count, Fault, How, Rule, Shape
from tests.object_stores.proxy_process import ProxyProcess, open_proxy
from tests.object_stores.servers import Bucket, Server, open_gcs, open_s3

_PROCESSES, _DEVICES = 2, 4
_MIB = 1 << 20
_MEMORY = Path("/dev/shm")
_TIMEOUT_S = 1800.0
_ROUND_TRIP_S, _CONNECTION_RATE = 0.05, 40e6
_PARTS = ("saves-and-restores", "many-connections", "faults")
_FAILING_SHARE = 0.02
_CEILING_MIB = 256
_CEILING_PIECE = 16 * _MIB

_AHEAD_GOAL = 1.5
_LIMIT_GOAL = 1.3
_TAIL_GOAL = 2.0
_MEMORY_GOAL_MIB = 256
_CEILING_GOAL = 1.5
_OPENED: dict[str, Callable[[Path], contextlib.AbstractContextManager[Server]]] = {"gs": open_gcs, "s3": open_s3}


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--short", action="store_true", help="a small state, and few repeats")
    parser.add_argument("--mib", type=int, default=512, help="the state (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="saves and restores by each engine (%(default)s)")
    parser.add_argument("--faulty-saves", type=int, default=20, help="saves while requests fail (%(default)s)")
    parser.add_argument("--connections", type=int, default=4, help="how many have full bandwidth at once (%(default)s)")
    parser.add_argument("--slower", type=float, default=16.0, help="of many connections, how many times (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--schemes", nargs="+", choices=_OPENED, default=list(_OPENED))
    flags = parser.parse_args()
    if flags.short:
        parser.set_defaults(mib=64, repeats=2, faulty_saves=5, connections=2)
        flags = parser.parse_args()
    load = os.getloadavg()[0]
    told: list[Figure] = []
    try:
        for scheme in flags.schemes:
            with tempfile.TemporaryDirectory(dir=_MEMORY) as folder, _OPENED[scheme](Path(folder)) as server:
                told += _Bench(server, flags).measure()
    finally:
        close_nursery()
    print(f"load average before: {load:.1f}")
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


class _Bench:
    """All figures of one server."""

    def __init__(self, server: Server, flags: Any) -> None:
        self._server = server
        self._flags = flags
        self._rate = flags.connections * _CONNECTION_RATE
        self._shape = Shape(_ROUND_TRIP_S, _CONNECTION_RATE, self._rate)
        self._thin = Shape(_ROUND_TRIP_S * flags.slower, _CONNECTION_RATE / flags.slower)

    def measure(self) -> list[Figure]:
        scheme, flags = self._server.scheme, self._flags
        names = [GRACEPOINT, ORBAX, ORBAX_PLAIN] if scheme == "gs" else [GRACEPOINT]
        began_s = time.monotonic()

        def say(what: str) -> None:
            print(f"{scheme}: {time.monotonic() - began_s:.0f} s: {what}", flush=True)

        say("the ceiling of proxy and server")
        with open_proxy(self._server.url) as proxy:
            ceiling = self._ceiling(proxy)
        told = [
            Figure("proxy and server without a shape / bandwidth", ceiling / self._rate, "", _CEILING_GOAL, Better.MORE)
        ]
        if "saves-and-restores" in flags.parts:
            say(f"saves and restores: {', '.join(names)}")
            with open_proxy(self._server.url, self._shape) as proxy:
                found = self._run(proxy, names, flags.repeats, restores=True)
                counts = proxy.counts()
            told += self._saves(found, names)
            told += self._restores(found, names)
            told.append(Figure("extra memory of a process", _extra_mib(found), "MiB", _MEMORY_GOAL_MIB))
            told += _requests(counts, len(names), flags.repeats)
        if "many-connections" in flags.parts:
            say(f"many connections: {', '.join(names)}")
            with open_proxy(self._server.url, self._thin) as proxy:
                told += self._many_connections(self._run(proxy, names, flags.repeats, restores=True), names)
        if "faults" in flags.parts:
            say("saves while requests fail")
            with open_proxy(self._server.url, self._shape) as proxy:
                stall, answer = Fault(How.STALL_REQUEST), Fault(How.ANSWER, 503)
                half = _FAILING_SHARE / 2
                proxy.set_rules(Rule(stall, share=half, seed=1), Rule(answer, share=half, seed=2))
                told += self._faulty(self._run(proxy, [GRACEPOINT], flags.faulty_saves, restores=False))
        return [dataclasses.replace(figure, name=f"{scheme}: {figure.name}") for figure in told]

    def _saves(self, found: Sequence[Measured], names: list[str]) -> list[Figure]:
        seconds = {name: statistics.median(_slowest([m.committed_s[name] for m in found])) for name in names}
        limit_s = self._limit_s(found)
        told = [Figure(f"save, {name}", value, "s") for name, value in seconds.items()]
        told.append(Figure("limit of a save", limit_s, "s"))
        told.append(Figure("save / limit", seconds[GRACEPOINT] / limit_s, "", _LIMIT_GOAL))
        return told + _ahead("save", seconds)

    def _restores(self, found: Sequence[Measured], names: list[str]) -> list[Figure]:
        seconds = {name: statistics.median(_slowest([m.restore_s[name] for m in found])) for name in names}
        told = [Figure(f"restore, {name}", value, "s") for name, value in seconds.items()]
        told.append(Figure("restore / limit of a save", seconds[GRACEPOINT] / self._limit_s(found), ""))
        if len(names) > 1:
            others_s = min(value for name, value in seconds.items() if name != GRACEPOINT)
            told.append(Figure("restore: the better of Orbax / limit of a save", others_s / self._limit_s(found), ""))
        return told + _ahead("restore", seconds)

    def _many_connections(self, found: Sequence[Measured], names: list[str]) -> list[Figure]:
        told, what = list[Figure](), "many connections"
        taken = {"save": [m.committed_s for m in found], "restore": [m.restore_s for m in found]}
        for act, of_processes in taken.items():
            seconds = {
                name: statistics.median(_slowest([each[name] for each in of_processes])) / self._flags.slower
                for name in names
            }
            told += [Figure(f"{what}: {act}, {name}", value, "s") for name, value in seconds.items()]
            told += _ahead(f"{what}: {act}", seconds, goal=_AHEAD_GOAL if act == "restore" else None)
        return told

    def _limit_s(self, found: Sequence[Measured]) -> float:
        return float(found[0].bytes / self._rate + 2 * _ROUND_TRIP_S)

    def _faulty(self, found: Sequence[Measured]) -> list[Figure]:
        turns = sorted(_slowest([m.committed_s[GRACEPOINT] for m in found]))
        failed = max(len(m.failed) for m in found)
        for message in {message for m in found for message in m.failed}:
            print(f"failed: {message}", flush=True)
        median = statistics.median(turns) if turns else None
        tail = turns[min(len(turns) - 1, int(len(turns) * 0.99))] / median if median else None
        return [
            Figure("2% of requests fail or stall: save", median, "s"),
            Figure("2% of requests fail or stall: p99 / median", tail, "", _TAIL_GOAL),
            Figure("2% of requests fail or stall: failed saves", failed, "", 0),
        ]

    def _run(self, proxy: ProxyProcess, engines: list[str], repeats: int, *, restores: bool) -> list[Measured]:
        bucket = self._server.bucket(url=proxy.url)
        settings = Settings(
            root=f"{bucket.uri}/run",
            engines=engines,
            state_bytes=self._flags.mib * _MIB,
            repeats=repeats,
            restores=restores,
        )
        environment = {
            **bucket.environment,
            # Compiled as in any program, unlike in tests, as Orbax compiles when it saves.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}",
        }
        arguments = [json.dumps(dataclasses.asdict(settings))]
        script = Path(object_store_process.__file__)
        with Processes.start(script, _PROCESSES, arguments=arguments, environment=environment) as processes:
            results = processes.wait(_TIMEOUT_S)
        if any(result.code for result in results):
            raise RuntimeError("\n".join(f"--- ended with {result.code}\n{result.output}" for result in results))
        return [_measured(result.output) for result in results]

    def _ceiling(self, proxy: ProxyProcess) -> float:
        """Bytes a second that reach the server through the proxy when nothing slows them."""
        bucket = self._server.bucket(url=proxy.url)
        data = os.urandom(_CEILING_PIECE)
        with _environment(bucket):
            import tensorstore as ts

            store = ts.KvStore.open(bucket.kvstore("ceiling/")).result()
            begin = time.perf_counter()
            with ThreadPoolExecutor(self._flags.connections) as pool:
                names = [str(index) for index in range(_CEILING_MIB * _MIB // _CEILING_PIECE)]
                list(pool.map(lambda name: store.write(name, data).result(), names))
            seconds = time.perf_counter() - begin
            store.delete_range(ts.KvStore.KeyRange()).result()
        return _CEILING_MIB * _MIB / seconds


def _ahead(what: str, seconds: dict[str, float], *, goal: float | None = _AHEAD_GOAL) -> list[Figure]:
    others = [value for name, value in seconds.items() if name != GRACEPOINT]
    if not others:
        return []
    return [Figure(f"{what}: the better of Orbax / ours", min(others) / seconds[GRACEPOINT], "", goal, Better.MORE)]


def _requests(counts: dict[str, Count], engines: int, repeats: int) -> list[Figure]:
    """Requests of one save and one restore, where only ours were made."""
    if engines > 1:
        return []
    return [
        Figure(f"requests a save and a restore: {key}", count.requests / repeats, "") for key, count in counts.items()
    ]


def _extra_mib(found: Sequence[Measured]) -> float:
    return max(measured.extra_bytes[GRACEPOINT] for measured in found) / _MIB


def _slowest(of_processes: Sequence[Sequence[float]]) -> list[float]:
    """Returns each turn's time, that of the process that took longest."""
    return [max(times) for times in zip(*of_processes, strict=True)]


def _measured(output: str) -> Measured:
    line = next(line for line in output.splitlines() if line.startswith(MEASURED))
    return Measured(**json.loads(line.removeprefix(MEASURED)))


@contextlib.contextmanager
def _environment(bucket: Bucket) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(bucket.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    sys.exit(main())
