"""Snapshots in the memory of another process: how fast, and how much processor time they take.

    python -m benchmarks.snapshots [--mib 256] [--values 8] [--threads 2] [--rounds 5] [--trained 24] [--evacuations 5]
        [--json FILE]

Two processes on loopback. One has a snapshot server, and a port that only receives and sends bytes over TLS, from its
memory into that of the other one. That writes values and reads them, and copies as many bytes over as many plain TLS
connections, by turns: so whatever else the machine does meets both. The ratios are of one round, and the median of all
rounds is told. The processor time is of each process for itself, with the kernel's part.

After that the trainer's engine takes snapshots of a state of as many bytes, of which a tenth changes at each step: how
long training is blocked, against a copy of the same arrays in memory, and how many bytes are sent.

Then it trains in steps of a second that keep all processors busy, as no training with an accelerator does. Of five
steps, one begins with a snapshot of 64 MiB that have all changed; five steps without come next. A machine that others
use computes the same step in times that differ by a fifth, so what a snapshot costs is what the steps in which it is
sent take longer than the others of the same five, less what the first of five steps takes longer without one: the
medians of all. The server has as little of the processors as a pod that requests 100m, beside one that requests 7.

At last it sends 300 MiB at once, as before a deadline, to two servers. Each is in a process of its own, behind a link
that lets 100 MB/s through: how long it takes until both have all, and how much of what the links can do that is.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trustme

from benchmarks.report import Better, Figure, parser, publish
from gracepoint.deadline import Deadline
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer
from gracepoint.snapshots.snapshot_servers import ServerAt, ServerPlacement, SnapshotServers
from gracepoint.wire.snapshot_requests import Capability, Right, write_capability
from tests.object_stores.pace import Pace

if TYPE_CHECKING:
    from gracepoint.checkpoint.saving.memory_snapshots import MemorySnapshots

_NAME = "snapshots.benchmark.test"
_MIB, _GIB = 1 << 20, 1 << 30
_BLOCK_BYTES = 256 * 1024
_TIMEOUT_S = 300.0
#: Processor time, in times of what plain TLS needs for as many bytes: with a checksum; with a copy and two checksums.
_CPU_COPYING, _CPU_SNAPSHOT = 1.2, 2.0
#: What each call is held against.
_PLAIN = {"put": "plain sending", "get": "plain receiving"}
#: What the plain port is asked: 0 receive, 1 send, 2 processor time; and how many bytes.
_ASK = struct.Struct(">BQ")
_SECONDS = struct.Struct(">d")
_RECEIVE, _SEND, _CPU = range(3)
#: What each of the servers gets that a doomed host sends to, and what the host has to send.
_LINK_BYTES_PER_S = 100e6
_DOOMED_MIB = 300
_NOTICE_S = 8.0
#: The training that is measured with snapshots and without.
_STEP_S = 1.0
_EVERY_STEPS = 5
_TRAINED_MIB = 64
# Of a thread of this niceness, as the kernel weighs it against a thread of niceness 0: 15 to 1024.
_NICENESS_OF_A_SMALL_POD = 19


@dataclasses.dataclass(frozen=True)
class Other:
    """The other process.

    Attributes:
        port: The port of its server.
        plain_port: The port for plain copying.
        link_port: A port of which a slow link leads to the server.
        authority: The authority of its certificate, as PEM.
        key: The key of capabilities.
    """

    port: int
    plain_port: int
    link_port: int
    authority: str
    key: bytes


@dataclasses.dataclass
class Round:
    """Seconds, and processor seconds of both processes, of one way to move the bytes."""

    wall_s: float
    own_cpu_s: float
    other_cpu_s: float


class Plain:
    """Bytes over plain TLS connections to the other process."""

    def __init__(self, port: int, context: ssl.SSLContext, threads: int) -> None:
        self._links = [
            context.wrap_socket(
                socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S), server_hostname=_NAME
            )
            for _ in range(threads)
        ]

    def close(self) -> None:
        for link in self._links:
            link.close()

    def send(self, number: int, data: memoryview) -> None:
        link = self._links[number]
        link.sendall(_ASK.pack(_RECEIVE, len(data)))
        for start in range(0, len(data), _BLOCK_BYTES):
            link.sendall(data[start : start + _BLOCK_BYTES])
        link.recv(1)

    def receive(self, number: int, out: memoryview) -> None:
        link = self._links[number]
        link.sendall(_ASK.pack(_SEND, len(out)))
        _fill(link, out)

    def other_cpu_s(self) -> float:
        self._links[0].sendall(_ASK.pack(_CPU, 0))
        data = bytearray(_SECONDS.size)
        _fill(self._links[0], memoryview(data))
        (seconds,) = _SECONDS.unpack(data)
        return float(seconds)


def _fill(link: ssl.SSLSocket, out: memoryview) -> None:
    position = 0
    while position < len(out):
        count = link.recv_into(out[position:], len(out) - position)
        if count == 0:
            raise ConnectionError("the other process ended the connection")
        position += count


def serve(folder: Path, capacity_bytes: int) -> None:
    """The other process: both ports, until its standard input ends."""
    logging.disable(logging.INFO)
    files = SnapshotFiles(certificate=folder / "crt", key=folder / "key", capability_keys=folder / "keys")
    server = SnapshotServer(
        files, SnapshotLimits(capacity_bytes=capacity_bytes, workload_bytes=capacity_bytes), "127.0.0.1"
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    listener = socket.create_server(("127.0.0.1", 0))
    link = socket.create_server(("127.0.0.1", 0))
    print(json.dumps([server.port, listener.getsockname()[1], link.getsockname()[1]]), flush=True)
    threading.Thread(target=_accept, args=(listener, context), daemon=True).start()
    threading.Thread(target=_link, args=(link, server.port), daemon=True).start()
    sys.stdin.read()
    server.close()


def _accept(listener: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        accepted, _ = listener.accept()
        accepted.settimeout(_TIMEOUT_S)
        link = context.wrap_socket(accepted, server_side=True)
        threading.Thread(target=_copy, args=(link,), daemon=True).start()


def _link(listener: socket.socket, port: int) -> None:
    """Leads all connections to a port, which share what the link lets through to it."""
    pace = Pace(_LINK_BYTES_PER_S)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for source, target, limit in ((near, far, pace), (far, near, Pace(None))):
            threading.Thread(target=_pass_on, args=(source, target, limit), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, pace: Pace) -> None:
    block = memoryview(bytearray(_BLOCK_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(block):
            pace.wait(count)
            target.sendall(block[:count])
        target.shutdown(socket.SHUT_WR)


def _copy(link: ssl.SSLSocket) -> None:
    memory = memoryview(bytearray())
    ask = memoryview(bytearray(_ASK.size))
    with contextlib.suppress(ConnectionError):
        while True:
            _fill(link, ask)
            what, size_bytes = _ASK.unpack(ask)
            if what == _CPU:
                link.sendall(_SECONDS.pack(time.process_time()))
                continue
            if len(memory) < size_bytes:
                memory = memoryview(bytearray(size_bytes))
            for start in range(0, size_bytes, _BLOCK_BYTES):
                part = memory[start : min(start + _BLOCK_BYTES, size_bytes)]
                if what == _RECEIVE:
                    _fill(link, part)
                else:
                    link.sendall(part)
            if what == _RECEIVE:
                link.sendall(b".")


@contextlib.contextmanager
def other_process(capacity_bytes: int, key: bytes, niceness: int = 0) -> Iterator[Other]:
    """Starts the other process, whose server takes capabilities of that key."""
    authority = trustme.CA()
    pair = authority.issue_cert(_NAME)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair.cert_chain_pems[0].write_to_path(folder / "crt")
        pair.private_key_pem.write_to_path(folder / "key")
        (folder / "keys").write_text(f"a {base64.b64encode(key).decode()}\n")
        command = ["nice", "-n", str(niceness)]
        command += [sys.executable, "-m", "benchmarks.snapshots", "--serve", name, str(capacity_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port, plain_port, link_port = json.loads(process.stdout.readline())
            yield Other(port, plain_port, link_port, authority.cert_pem.bytes().decode(), key)
        finally:
            process.stdin.close()
            process.wait(_TIMEOUT_S)
            process.stdout.close()


def measure(mib: int, values: int, threads: int, rounds: int) -> list[Figure]:
    """Moves ``values`` values, of ``mib`` MiB together, in ``threads`` threads, ``rounds`` times."""
    size_bytes = mib * _MIB // values
    data = memoryview(bytearray(os.urandom(_MIB) * (size_bytes // _MIB + 1)))[:size_bytes]
    outs = [memoryview(bytearray(size_bytes)) for _ in range(threads)]
    took: dict[str, list[Round]] = {}
    key = secrets.token_bytes(32)
    with other_process((2 * mib + 64) * _MIB, key) as other:
        text = _capability(key)
        client = SnapshotClient(
            ("127.0.0.1", other.port),
            server_name=_NAME,
            authorities=lambda: other.authority,
            capability=lambda: text,
            connections=threads,
        )
        plain = Plain(other.plain_port, ssl.create_default_context(cadata=other.authority), threads)
        pool = concurrent.futures.ThreadPoolExecutor(threads)

        def deadline() -> Deadline:
            return Deadline.after(_TIMEOUT_S, time.monotonic)

        def put(thread: int, number: int) -> None:
            client.put(f"1/1/0/v{number}", [data], deadline())

        def get(thread: int, number: int) -> None:
            client.get_into(f"1/1/0/v{number}", outs[thread], deadline())

        ways: dict[str, Callable[[int, int], None]] = {
            "plain sending": lambda thread, number: plain.send(thread, data),
            "put": put,
            "plain receiving": lambda thread, number: plain.receive(thread, outs[thread]),
            "get": get,
        }
        for _ in range(rounds + 1):  # the first one only warms up
            client.drop("", deadline())
            for name, move in ways.items():
                took.setdefault(name, []).append(_timed(pool, threads, values, move, plain))
        pool.shutdown()
        client.drop("", deadline())
        client.close()
        plain.close()
        warm = {name: each[1:] for name, each in took.items()}
        plain_s = statistics.median(each.own_cpu_s for each in warm["plain sending"]) / (mib * _MIB / _GIB)
        servers = SnapshotServers(_placement(text, (other.port, other.authority)))
        return _figures(warm, mib * _MIB / _GIB) + _snapshots(servers, mib, rounds, plain_s)


def _capability(key: bytes) -> str:
    given = Capability(
        namespace="benchmark",
        workload="benchmark",
        attempt=1,
        rights=frozenset({Right.WRITE, Right.READ, Right.DROP}),
        until=int(time.time()) + 86400,
        max_bytes=1 << 50,
    )
    return write_capability(given, "a", key)


def _placement(capability: str, *servers: tuple[int, str]) -> ServerPlacement:
    at = tuple(ServerAt(f"node-{number}", f"127.0.0.1:{port}") for number, (port, _) in enumerate(servers))
    authorities = "".join(authority for _, authority in servers)
    return ServerPlacement(capability=capability, server_name=_NAME, authorities=authorities, write=at, read=at)


@contextlib.contextmanager
def _taking_snapshots(
    servers: SnapshotServers, state: dict[str, Any], *, every_steps: int, copies: int
) -> Iterator[MemorySnapshots]:
    """An engine that is prepared for the state, and takes its snapshots to these servers."""
    # The other process, which also runs this module, has no use for them.
    from gracepoint.checkpoint.engine import StepCheckpointer
    from gracepoint.checkpoint.format.layout import Layout
    from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings
    from gracepoint.checkpoint.saving.schedule import SaveSchedule
    from gracepoint.checkpoint.storage.locations import storage_path
    from gracepoint.process_group import SingleProcess

    with tempfile.TemporaryDirectory() as root:
        engine = StepCheckpointer(
            Layout(storage_path(root)),
            gang=SingleProcess(),
            attempt="benchmark",
            memory=MemorySettings(servers, SaveSchedule(every_steps=every_steps), copies=copies),
        )
        try:
            engine.prepare(state)
            assert engine.memory is not None
            yield engine.memory
        finally:
            engine.close(_TIMEOUT_S)


def evacuate(times: int) -> list[Figure]:
    """Sends a doomed host's part to two servers behind slow links, as often as that."""
    import jax.numpy as jnp

    key, capacity_bytes = secrets.token_bytes(32), (2 * _DOOMED_MIB + 64) * _MIB
    with contextlib.ExitStack() as until_it_ends:
        others = [until_it_ends.enter_context(other_process(capacity_bytes, key)) for _ in range(2)]
        servers = SnapshotServers(_placement(_capability(key), *((each.link_port, each.authority) for each in others)))
        state = {f"leaf{number}": jnp.zeros(_DOOMED_MIB * _MIB // 40, jnp.float32) for number in range(10)}
        memory = until_it_ends.enter_context(_taking_snapshots(servers, state, every_steps=1000, copies=2))
        took = []
        for step in range(1, times + 1):
            servers.drop(before_step=step, everywhere=True)
            state = {name: (leaf + 1).block_until_ready() for name, leaf in state.items()}
            began_s = time.monotonic()
            sent = memory.send_now(step, state, {}, deadline=Deadline.after(_NOTICE_S, time.monotonic))
            took.append(time.monotonic() - began_s)
            if sent.copies != 2:
                raise RuntimeError(f"step {step} is in {sent.copies} servers instead of 2")
    fastest_s = _DOOMED_MIB * _MIB / _LINK_BYTES_PER_S
    return [
        Figure("evacuation: speed, of the links", fastest_s / statistics.median(took), "", 0.8, Better.MORE),
        Figure(f"evacuation: until {_DOOMED_MIB} MiB are in 2 servers", statistics.median(took), "s", fastest_s / 0.8),
        Figure(f"evacuation: the longest of {times}", max(took), "s", _NOTICE_S),
    ]


def _snapshots(servers: SnapshotServers, mib: int, rounds: int, plain_s: float) -> list[Figure]:
    """Takes snapshots of ``mib`` MiB in ten leaves, at first of which all change, then one of them.

    ``plain_s`` is the processor time of sending a GiB over plain TLS.
    """
    import jax.numpy as jnp

    values = mib * _MIB // 40
    state = {f"leaf{number}": jnp.full(values, float(number), jnp.float32) for number in range(10)}
    with _taking_snapshots(servers, state, every_steps=1, copies=1) as memory:
        blocked, sent, cpu = dict[str, list[float]](), dict[str, list[float]](), list[float]()
        step = 0
        for kind, changing in (("all change", 10), ("90% frozen", 1)):
            for turn in range(rounds + 2):  # the first two only find out what does not change
                step += 1
                changed = {name: leaf + 1 for name, leaf in list(state.items())[:changing]}
                state = {name: leaf.block_until_ready() for name, leaf in (state | changed).items()}
                copy_s, began_s = _copied_s(state), time.perf_counter()
                if not memory.begins(step, sync_point=step):
                    raise RuntimeError(f"no snapshot began: {memory.skips.reason}")
                memory.begin(step, state, {})
                blocked_s, cpu_s = time.perf_counter() - began_s, time.process_time()
                while memory.busy:
                    time.sleep(0.01)
                cpu_s = time.process_time() - cpu_s
                newest = memory.newest
                if newest is None or newest.step != step:
                    raise RuntimeError(f"step {step} is not safe: {memory.skips.reason}")
                if turn >= 2:
                    blocked.setdefault(kind, []).append(blocked_s / copy_s)
                    sent.setdefault(kind, []).append(newest.sent_bytes / newest.part_bytes)
                    if changing == 10:
                        cpu.append(cpu_s / (newest.sent_bytes / _GIB))
    median = statistics.median
    return [
        Figure("snapshot: training is blocked, of a copy in memory", median(blocked["all change"]), "", 1.2),
        Figure("snapshot: bytes sent of a state of which 90% is frozen", median(sent["90% frozen"]), "", 0.11),
        Figure("snapshot: processor time of the trainer", median(cpu), "s/GiB"),
        Figure(
            "snapshot: processor time of the trainer, of plain TLS sending", median(cpu) / plain_s, "", _CPU_SNAPSHOT
        ),
    ]


def train(turns: int) -> list[Figure]:
    """Trains five steps with a snapshot, and five without, as often as that."""
    import jax
    import jax.numpy as jnp

    def work(times: Any, state: dict[str, Any]) -> dict[str, Any]:
        square = jnp.ones((256, 256))
        end = jax.lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ square) * 0.5, square)
        return {name: leaf + end[0, 0] for name, leaf in state.items()}

    step_of = jax.jit(work, donate_argnums=1)
    leaves = 8
    state = {f"leaf{number}": jnp.zeros(_TRAINED_MIB * _MIB // 4 // leaves, jnp.float32) for number in range(leaves)}
    times, took_s = 100, 0.0
    for _ in range(5):  # the first one compiles
        began_s = time.perf_counter()
        state = jax.block_until_ready(step_of(times, state))
        took_s = time.perf_counter() - began_s
        times = max(1, round(times * min(_STEP_S / took_s, 10.0)))
    key, capacity_bytes = secrets.token_bytes(32), (2 * _TRAINED_MIB + 64) * _MIB
    step, longer_s, others_s = 0, dict[bool, list[float]](), list[float]()
    with other_process(capacity_bytes, key, _NICENESS_OF_A_SMALL_POD) as other:
        servers = SnapshotServers(_placement(_capability(key), (other.port, other.authority)))
        with _taking_snapshots(servers, state, every_steps=_EVERY_STEPS, copies=1) as memory:
            for turn in range(2 * (turns + 1)):
                is_with = turn % 2 == 0
                steps_s, sending = list[float](), 0
                for number in range(_EVERY_STEPS):
                    began_s = time.perf_counter()
                    step += 1
                    if is_with and number == 0:
                        if not memory.begins(step, sync_point=step):
                            raise RuntimeError(f"no snapshot began: {memory.skips.reason}")
                        memory.begin(step, state, {})
                    sending += number == 0 or memory.busy
                    state = jax.block_until_ready(step_of(times, state))
                    steps_s.append(time.perf_counter() - began_s)
                if memory.busy or sending == _EVERY_STEPS:
                    raise RuntimeError(f"step {step}: the snapshot is still sent")
                if is_with and (memory.newest is None or memory.newest.step != step - _EVERY_STEPS + 1):
                    raise RuntimeError(f"step {step}: the newest safe one is {memory.newest}: {memory.skips.reason}")
                if turn < 2:  # they only warm up
                    continue
                other_s = statistics.mean(steps_s[sending:])
                longer_s.setdefault(is_with, []).append(sum(steps_s[:sending]) - sending * other_s)
                others_s.append(other_s)
    cost_s = statistics.median(longer_s[True]) - statistics.median(longer_s[False])
    step_s = statistics.median(others_s)
    return [
        Figure("steps: without a snapshot", step_s, "s"),
        Figure(f"steps: a snapshot of {_TRAINED_MIB} MiB costs", cost_s, "s"),
        Figure(
            f"steps of 1 s, {_TRAINED_MIB} MiB sent every {_EVERY_STEPS}, of steps alone",
            1 + cost_s / (_EVERY_STEPS * step_s),
            "",
            1.02,
        ),
    ]


_copies: dict[str, Any] = {}


def _copied_s(state: dict[str, Any]) -> float:
    """Returns how long a copy takes to memory that was touched before, as fast as the engine can."""
    import numpy as np

    from gracepoint.checkpoint.memory import Copies

    for name, leaf in state.items():
        _copies.setdefault(name, np.ones(leaf.shape, leaf.dtype))
    began_s = time.perf_counter()
    with Copies() as copies:
        for name, leaf in state.items():
            copies.add(np.asarray(leaf), _copies[name])
    return time.perf_counter() - began_s


def _timed(
    pool: concurrent.futures.Executor, threads: int, values: int, move: Callable[[int, int], None], plain: Plain
) -> Round:
    def several(thread: int) -> None:
        for number in range(thread, values, threads):
            move(thread, number)

    other_s, own_s, began_s = plain.other_cpu_s(), time.process_time(), time.perf_counter()
    for each in [pool.submit(several, thread) for thread in range(threads)]:
        each.result(_TIMEOUT_S)
    wall_s = time.perf_counter() - began_s
    return Round(wall_s, time.process_time() - own_s, plain.other_cpu_s() - other_s)


def _figures(took: dict[str, list[Round]], gib: float) -> list[Figure]:
    made = []
    for name, plain in _PLAIN.items():
        pairs = list(zip(took[name], took[plain], strict=True))
        ratio = statistics.median(other.wall_s / own.wall_s for own, other in pairs)
        made.append(Figure(f"{name}: speed, of plain TLS copying", ratio, "", 0.8, Better.MORE))
    for name, rounds in took.items():
        made.append(Figure(f"{name}: speed", statistics.median(gib / each.wall_s for each in rounds), "GiB/s"))
    for name, rounds in took.items():
        own = statistics.median(each.own_cpu_s / gib for each in rounds)
        made.append(Figure(f"{name}: processor time of the trainer", own, "s/GiB"))
    for name, plain in _PLAIN.items():
        pairs = list(zip(took[name], took[plain], strict=True))
        ratio = statistics.median(own.own_cpu_s / other.own_cpu_s for own, other in pairs)
        made.append(Figure(f"{name}: processor time of the trainer, of plain TLS copying", ratio, "", _CPU_COPYING))
    for name, rounds in took.items():
        other = statistics.median(each.other_cpu_s / gib for each in rounds)
        made.append(Figure(f"{name}: processor time of the server", other, "s/GiB"))
    return made


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
        return
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--mib", type=int, default=256, help="all values together")
    options.add_argument("--values", type=int, default=8)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--trained", type=int, default=24, help="times five steps with a snapshot; 0: none")
    options.add_argument("--evacuations", type=int, default=5, help="0: none")
    given: Any = options.parse_args()
    figures = measure(given.mib, given.values, given.threads, given.rounds) if given.rounds else []
    figures += train(given.trained) if given.trained else []
    figures += evacuate(given.evacuations) if given.evacuations else []
    publish(figures, given.json, mib=given.mib, values=given.values, threads=given.threads)


if __name__ == "__main__":
    main()
