"""A server process under attack: its memory stays bounded, and who may use it does not notice.

``make hostile-snapshots`` has the long form of it, with 10,000 connections of each kind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracepoint.snapshots.exchange import LONGEST_HEADER_BYTES, MAGIC, SnapshotRefused, SnapshotsFull, frame
from gracepoint.snapshots.snapshot_client import SnapshotClient
from tests.unit.snapshots.fakes.servers import LATE, MIB, NAME, ServedByProcess, asked, deadline, shown
from tests.waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all addresses of 127.0.0.0/8, and /proc"),
]

IS_LONG = os.environ.get("SNAPSHOTS") == "hostile"
CONNECTIONS = 10_000 if IS_LONG else 500
CAPACITY = 64 * MIB
#: What the chart reserves beside the values, without their page tables.
OVERHEAD = 256 * MIB


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedByProcess]:
    served = ServedByProcess(tmp_path, "--capacity-bytes", str(CAPACITY), "--workload-bytes", str(CAPACITY // 2))
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))  # of the attacker alone
    try:
        yield served
    finally:
        served.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))


class Honest:
    """A job that goes on to write and to read."""

    def __init__(self, client: SnapshotClient) -> None:
        self._client = client
        self._step = 0

    def work(self) -> None:
        self._step += 1
        key, data, out = f"{self._step}/1/0/a", os.urandom(100_000), bytearray(100_000)
        self._client.put(key, [memoryview(data)], deadline(20.0))
        self._client.get_into(key, memoryview(out), deadline(20.0))
        assert out == data
        self._client.drop_before(self._step, deadline(20.0))


@pytest.fixture
def honest(served: ServedByProcess) -> Honest:
    honest = Honest(served.client(shown("honest", namespace="honest", until=LATE)))
    honest.work()
    return honest


class Attack:
    """Opens connections from many addresses, and keeps them as long as the server does."""

    def __init__(self, served: ServedByProcess, kept: contextlib.ExitStack) -> None:
        self._port = served.port
        self._kept = kept
        self._context = ssl.create_default_context(cadata=served.authority.cert_pem.bytes().decode())

    def bare(self, number: int) -> socket.socket:
        address = f"127.0.{1 + number // 32 % 250}.{1 + number // 8000}"  # 32 connections of each
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=30, source_address=(address, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._kept.enter_context(connection)

    def link(self, number: int) -> ssl.SSLSocket:
        return self._kept.enter_context(self._context.wrap_socket(self.bare(number), server_hostname=NAME))


def says_nothing(attack: Attack, number: int) -> None:
    attack.bare(number)


def shakes_hands_and_says_half(attack: Attack, number: int) -> None:
    attack.link(number).sendall(frame(op="hello", capability=shown(until=LATE))[:-9])


def shows_a_forged_capability(attack: Attack, number: int) -> None:
    assert asked(attack.link(number), op="hello", capability=shown(key=bytes(32)))["refused"] == "not admitted"


def shows_an_old_capability(attack: Attack, number: int) -> None:
    assert asked(attack.link(number), op="hello", capability=shown(until=1))["refused"] == "expired"


def sends_the_longest_header_without_end(attack: Attack, number: int) -> None:
    attack.link(number).sendall(struct.pack(">4sI", MAGIC, LONGEST_HEADER_BYTES) + b"[" * (LONGEST_HEADER_BYTES - 1))


def sends_a_header_that_is_too_long(attack: Attack, number: int) -> None:
    attack.link(number).sendall(struct.pack(">4sI", MAGIC, 1 << 31) + b"{" * 50_000)


def of_a_tenant_that_only_stays(attack: Attack, number: int) -> None:
    """With a capability of its own."""
    text = shown(f"uid-{number}", namespace="greedy", until=LATE)
    assert asked(attack.link(number), op="hello", capability=text).get("refused") in (None, "busy")


def of_a_tenant_that_begins_to_write(attack: Attack, number: int) -> None:
    """All of them together ask for far more than there is, and send half of it."""
    link = attack.link(number)
    said = asked(link, op="hello", capability=shown("greedy", namespace="greedy", until=LATE))
    assert said.get("refused") in (None, "busy")
    if not said and asked(link, op="put", key=f"1/1/{number}/a", bytes=MIB) == {}:
        link.sendall(bytes(MIB // 2))


ATTACKS = [
    says_nothing,
    shakes_hands_and_says_half,
    shows_a_forged_capability,
    shows_an_old_capability,
    sends_the_longest_header_without_end,
    sends_a_header_that_is_too_long,
    of_a_tenant_that_only_stays,
    of_a_tenant_that_begins_to_write,
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", ATTACKS)
def test_many_connections_cost_bounded_memory_and_others_go_on(
    served: ServedByProcess, honest: Honest, attack: Callable[[Attack, int], None]
) -> None:
    with contextlib.ExitStack() as kept:
        attacker = Attack(served, kept)
        for number in range(CONNECTIONS):
            with contextlib.suppress(OSError):  # the server has closed it, which it may
                attack(attacker, number)
            if number % (CONNECTIONS // 20) == 0:
                honest.work()
        figures = served.figures()
        assert figures["connections"] <= 1024
        assert figures["pending"] <= 128
        assert figures["workloads"]["honest"]["values"] == 1
        assert served.resident_bytes(at_most=True) <= figures["capacity_bytes"] + OVERHEAD
        honest.work()
    until(lambda: served.figures()["connections"] <= 3, "the attacker's connections to be forgotten")
    assert "failed" not in served.figures(), served.log.read_text()
    assert len(served.log.read_text().splitlines()) < 40, "strangers cannot fill the log"


def written(put: Callable[[int], object]) -> int:
    """How many values a server takes until it has no place for more."""
    for number in itertools.count():
        try:
            put(number)
        except SnapshotsFull:
            return number
    raise AssertionError


def test_a_workload_that_writes_without_end_is_stopped_at_its_part(served: ServedByProcess, honest: Honest) -> None:
    greedy = served.client(shown("greedy", namespace="greedy", until=LATE))
    value = [memoryview(bytes(MIB))]
    assert written(lambda number: greedy.put(f"{number}/1/0/a", value, deadline())) < CAPACITY // 2 // MIB
    # Values without bytes cost something, too.
    assert written(lambda number: greedy.put(f"{number}/1/1/a", [], deadline())) < MIB // 4096
    assert served.figures()["workloads"]["greedy"]["used_bytes"] <= CAPACITY // 2
    assert served.resident_bytes() <= CAPACITY + OVERHEAD
    honest.work()


def test_an_attempt_that_is_over_and_another_namespace_reach_nothing(served: ServedByProcess, honest: Honest) -> None:
    new = served.client(shown("honest", namespace="honest", attempt=2, until=LATE))
    new.put("9/2/0/a", [memoryview(b"data")], deadline())
    old = served.client(shown("honest", namespace="honest", until=LATE))
    other = served.client(shown("honest", namespace="other", until=LATE))
    for act in (
        lambda: old.put("9/1/0/a", [memoryview(b"evil")], deadline()),
        lambda: old.put("9/2/0/a", [memoryview(b"evil")], deadline()),
        lambda: old.drop("", deadline()),
        lambda: other.put("9/1/0/a", [memoryview(b"evil")], deadline()),
        lambda: other.drop("", deadline()),
    ):
        with pytest.raises(SnapshotRefused):
            act()
    out = bytearray(4)
    for stranger in (old, other):
        with pytest.raises((FileNotFoundError, SnapshotRefused)):
            stranger.get_into("9/2/0/a", memoryview(out), deadline())
    new.get_into("9/2/0/a", memoryview(out), deadline())
    assert out == b"data"
