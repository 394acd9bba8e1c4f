"""Values go to a snapshot server and come back, from several threads, within a time."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from gracepoint.checksum import crc32
from gracepoint.deadline import Deadline
from gracepoint.snapshots.exchange import (
    Refusal,
    SnapshotDamaged,
    SnapshotRefused,
    SnapshotReplaced,
    SnapshotsFull,
    SnapshotsUnavailable,
    ValuePlace,
)
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.wire.snapshot_requests import Right
from tests.unit.snapshots.fakes.servers import MIB, Served, deadline, shown
from tests.waiting import until

pytestmark = pytest.mark.integration

KEY = "120/1/0/params/d/c0"


def of(data: bytes) -> list[memoryview]:
    return [memoryview(data)]


def read(client: Any, key: str, size: int, **options: Any) -> bytes:
    out = bytearray(size)
    client.get_into(key, memoryview(out), deadline(), **options)
    return bytes(out)


def test_a_value_comes_back_whole_and_in_ranges(served: Served) -> None:
    client, data = served.client(), os.urandom(3 * MIB + 17)
    stored = client.put(KEY, [memoryview(data)[:1000], memoryview(b""), memoryview(data)[1000:]], deadline())
    assert (stored.key, stored.bytes, stored.checksum) == (KEY, len(data), crc32(data))
    assert read(client, KEY, len(data)) == data
    assert read(client, KEY, 5000, start=MIB - 3, generation=stored.generation) == data[MIB - 3 : MIB + 4997]
    assert client.entry(KEY, deadline()) == client.entries("", deadline())[0] == stored
    assert stored.place == ValuePlace(120, 1, 0, "params/d/c0")


def test_a_value_without_bytes_is_a_value(served: Served) -> None:
    client = served.client()
    client.put(KEY, [], deadline())
    assert read(client, KEY, 0) == b""
    assert client.entry(KEY, deadline()) is not None


def test_a_read_beyond_the_end_says_what_is_there(served: Served) -> None:
    client = served.client()
    client.put(KEY, of(b"12345"), deadline())
    with pytest.raises(ValueError, match="expected 4 bytes from 3, found 2: it has 5"):
        read(client, KEY, 4, start=3)
    assert read(client, KEY, 2, start=3) == b"45"  # on the same connection
    assert served.server.figures()["connections"] == 1


def test_a_value_that_is_not_there_is_distinguished(served: Served) -> None:
    client = served.client()
    with pytest.raises(FileNotFoundError, match=KEY):
        read(client, KEY, 1)
    assert client.entry(KEY, deadline()) is None
    assert client.drop("120", deadline()) == 0


def test_only_the_first_write_that_must_be_the_first_succeeds(served: Served) -> None:
    client = served.client()
    client.put(KEY, of(b"first"), deadline(), if_absent=True)
    with pytest.raises(FileExistsError):
        client.put(KEY, of(b"other"), deadline(), if_absent=True)
    assert read(client, KEY, 5) == b"first"


def test_a_range_of_a_value_that_was_replaced_is_refused(served: Served) -> None:
    client = served.client()
    old = client.put(KEY, of(b"old"), deadline())
    new = client.put(KEY, of(b"new"), deadline())
    with pytest.raises(SnapshotReplaced):
        read(client, KEY, 3, generation=old.generation)
    assert read(client, KEY, 3, generation=new.generation) == b"new"


def test_a_list_says_which_steps_attempts_and_parts_are_there_and_old_steps_are_dropped(served: Served) -> None:
    client = served.client()
    keys = [f"{step}/1/{part}/done" for step in (7, 12, 120) for part in (0, 1)]
    for key in keys:
        client.put(key, of(b"."), deadline())
    assert {(e.place.step, e.place.attempt, e.place.part) for e in client.entries("", deadline())} == {
        (step, 1, part) for step in (7, 12, 120) for part in (0, 1)
    }
    assert [e.key for e in client.entries("12", deadline())] == ["12/1/0/done", "12/1/1/done"]  # and not those of 120
    assert client.drop_before(12, deadline()) == 2
    assert client.drop("12/1/0", deadline()) == 1
    assert [e.key for e in client.entries("", deadline())] == ["12/1/1/done", "120/1/0/done", "120/1/1/done"]


def test_many_threads_write_and_read_at_once_over_a_few_connections(served: Served) -> None:
    client = served.client(connections=3)
    values = {f"1/1/{number}/v": os.urandom(200_000 + number) for number in range(12)}

    def there_and_back(key: str) -> None:
        client.put(key, of(values[key]), deadline())
        half = len(values[key]) // 2
        assert read(client, key, half) + read(client, key, len(values[key]) - half, start=half) == values[key]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(there_and_back, values))
    assert served.server.figures()["connections"] <= 3


def test_a_server_without_memory_says_so_and_continues(serve: Callable[..., Served]) -> None:
    served = serve(capacity_bytes=MIB)
    client = served.client()
    client.put("1/1/0/a", of(bytes(MIB // 2)), deadline())
    with pytest.raises(SnapshotsFull) as error:
        client.put("1/1/0/b", of(bytes(MIB // 2)), deadline())
    assert error.value.errno == errno.ENOSPC
    client.put("1/1/0/b", of(bytes(1000)), deadline())
    assert served.server.figures()["connections"] == 1


def test_a_server_that_does_not_answer_costs_the_time_of_the_deadline() -> None:
    authority = trustme.CA()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SnapshotClient(
            silent.getsockname()[:2],
            server_name="silent.test",
            authorities=authority.cert_pem.bytes().decode,
            capability=shown,
        )
        began_s = time.monotonic()
        with pytest.raises(SnapshotsUnavailable, match="put 1/1/0/a"):
            client.put("1/1/0/a", of(b"data"), deadline(0.3))
        assert time.monotonic() - began_s < 30
    with pytest.raises(SnapshotsUnavailable, match="127.0.0.1"):
        client.put("1/1/0/a", of(b"data"), deadline())


def test_a_call_that_waits_for_a_connection_ends_when_its_deadline_is_cancelled(served: Served) -> None:
    waiting = Deadline.after(600, time.monotonic)
    begun, go_on = threading.Event(), threading.Event()

    def capability() -> str:
        begun.set()
        assert go_on.wait(60)
        return shown()

    client = served.client(capability, connections=1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.put, KEY, of(b"data"), deadline())
        assert begun.wait(60)
        second = pool.submit(client.put, KEY, of(b"data"), waiting)
        waiting.cancel("another one is nearer")
        with pytest.raises(SnapshotsUnavailable, match="another one is nearer"):
            second.result(30)
        go_on.set()
        assert first.result(30).bytes == 4


def test_a_call_that_waits_for_the_server_ends_when_its_deadline_is_cancelled(served: Served) -> None:
    data = bytes(16 * MIB)
    client = served.client()
    client.put(KEY, of(b"data"), deadline())
    moved = iter(range(1000))

    def left_s() -> float:
        if next(moved) == 20:  # in the middle of the bytes
            waiting.cancel("another one is nearer")
        return 600.0

    waiting = Deadline.following(left_s, time.monotonic)
    with pytest.raises(SnapshotsUnavailable, match="another one is nearer"):
        client.put("1/1/0/a", of(data), waiting)
    until(lambda: served.used_bytes() == 4 + 4096, "the memory to be free")
    assert read(client, KEY, 4) == b"data"


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(serve: Callable[..., Served]) -> None:
    served = serve(idle_s=1.0)
    client = served.client()
    for _ in range(2):
        client.put(KEY, of(b"data"), deadline())
        until(lambda: served.server.figures()["connections"] == 0, "the server to close the connection")
    assert read(client, KEY, 4) == b"data"


def test_a_server_whose_certificate_is_not_trusted_is_shown_nothing(served: Served) -> None:
    asked = []
    client = served.client(lambda: asked.append(1) or shown(), authority=trustme.CA())  # type: ignore[func-returns-value]
    with pytest.raises(SnapshotsUnavailable, match="certificate verify failed"):
        client.put(KEY, of(b"data"), deadline())
    assert asked == []


def test_a_capability_is_renewed_on_connections_that_are_open(served: Served) -> None:
    text = [shown(until=2000)]
    client = served.client(lambda: text[0])
    client.put(KEY, of(b"data"), deadline())
    served.epoch_s = 2001.0
    with pytest.raises(SnapshotRefused, match="has ended 1 s ago") as error:
        read(client, KEY, 4)
    assert error.value.refusal is Refusal.EXPIRED
    text[0] = shown(until=3000)
    assert read(client, KEY, 4) == b"data"
    assert served.server.figures()["connections"] == 1


def test_the_operator_learns_what_a_server_has_and_pods_do_not(served: Served) -> None:
    served.client().put(KEY, of(b"data"), deadline())
    operator = served.client(shown("operator", rights=frozenset({Right.STAT})))
    figures = operator.stat(deadline())
    assert figures["workloads"]["uid-1"] == {
        "namespace": "research",
        "attempt": 1,
        "values": 1,
        "used_bytes": 4 + 4096,
        "age_s": 0.0,
    }
    assert (figures["capacity_bytes"], figures["used_bytes"], figures["puts"]) == (64 * MIB, 4100, 1)
    with pytest.raises(SnapshotRefused):
        served.client().stat(deadline())


def test_a_damaged_copy_is_noticed_when_all_of_it_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served.client()
    client.put(KEY, of(b"data"), deadline())
    monkeypatch.setattr("gracepoint.snapshots.snapshot_client.crc32", lambda data, start: crc32(b"dbta", start))
    with pytest.raises(SnapshotDamaged, match="read another copy"):
        read(client, KEY, 4)


def test_calls_of_a_closed_client_end(served: Served) -> None:
    client = served.client()
    client.put(KEY, of(b"data"), deadline())
    client.close()
    with pytest.raises(SnapshotsUnavailable, match="closed"):
        read(client, KEY, 4)
    until(lambda: served.server.figures()["connections"] == 0, "the connection to end")


def test_two_values_share_bytes_which_count_once_until_both_are_gone(served: Served) -> None:
    client, data = served.client(), os.urandom(MIB)
    first = client.put(KEY, of(data), deadline())
    linked = client.link("121/1/0/w", KEY, first.generation, deadline())
    assert (linked.bytes, linked.checksum) == (MIB, crc32(data))
    assert linked.generation != first.generation
    assert served.used_bytes() == MIB + 2 * 4096
    client.drop_before(121, deadline())
    assert served.used_bytes() == MIB + 4096
    assert read(client, "121/1/0/w", MIB) == data
    client.put("121/1/0/w", of(b"new"), deadline())
    assert served.used_bytes() == 3 + 4096
    assert served.server.figures()["links"] == 1


def test_a_value_is_linked_to_an_exact_version_of_the_own_workload_alone(served: Served) -> None:
    client = served.client()
    old = client.put(KEY, of(b"old"), deadline())
    client.put(KEY, of(b"new"), deadline())
    with pytest.raises(SnapshotReplaced):
        client.link("121/1/0/w", KEY, old.generation, deadline())
    with pytest.raises(FileNotFoundError):
        client.link("121/1/0/w", "120/1/0/none", "", deadline())
    with pytest.raises(FileNotFoundError):
        served.client(shown("uid-2")).link("121/1/0/w", KEY, "", deadline())
    with pytest.raises(SnapshotRefused, match="may write its own values"):
        client.link("121/2/0/w", KEY, "", deadline())
    with pytest.raises(SnapshotRefused, match="expected read"):
        served.client(shown(rights=frozenset({Right.WRITE}))).link("121/1/0/w", KEY, "", deadline())
    assert served.used_bytes() == 3 + 4096
