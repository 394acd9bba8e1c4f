"""Nobody gets in who may not, nobody takes what is another's, and a server ends and changes its keys in order."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from gracepoint.checksum import crc32
from gracepoint.snapshots.exchange import (
    CHECKSUM,
    LONGEST_HEADER_BYTES,
    MAGIC,
    Refusal,
    SnapshotDamaged,
    SnapshotRefused,
    SnapshotsFull,
    SnapshotsUnavailable,
    frame,
    read_frame,
)
from gracepoint.wire.snapshot_requests import Right
from tests.unit.snapshots.fakes.servers import (
    KEY,
    LATE,
    MIB,
    Served,
    ServedByProcess,
    asked,
    capability,
    deadline,
    ends,
    serving,
    shown,
)
from tests.waiting import until

pytestmark = pytest.mark.integration

OTHER_KEY = bytes(reversed(KEY))


def of(data: bytes) -> list[memoryview]:
    return [memoryview(data)]


def refused_as(refusal: Refusal, act: Callable[[], object]) -> None:
    with pytest.raises(SnapshotRefused) as error:
        act()
    assert error.value.refusal is refusal


def test_a_workload_neither_sees_nor_drops_nor_replaces_another_s_values(served: Served) -> None:
    mine, other = served.client(), served.client(shown("uid-2", namespace="research"))
    mine.put("1/1/0/a", of(b"mine"), deadline())
    assert other.entries("", deadline()) == []
    assert other.drop("", deadline()) == other.drop_before(100, deadline()) == 0
    with pytest.raises(FileNotFoundError):
        other.get_into("1/1/0/a", memoryview(bytearray(4)), deadline())
    other.put("1/1/0/a", of(b"not!"), deadline())
    out = bytearray(4)
    mine.get_into("1/1/0/a", memoryview(out), deadline())
    assert out == b"mine"


def test_the_uid_of_a_workload_in_another_namespace_opens_nothing(served: Served) -> None:
    served.client().put("1/1/0/a", of(b"mine"), deadline())
    with served.link() as link:
        answer = asked(link, op="hello", capability=shown(namespace="other"))
        assert answer["refused"] == Refusal.NOT_ADMITTED
    reader = served.client(shown(namespace="other", rights=frozenset({Right.READ})))
    assert reader.entries("", deadline()) == []
    with pytest.raises(FileNotFoundError):
        reader.get_into("1/1/0/a", memoryview(bytearray(4)), deadline())


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        pytest.param("", Refusal.NOT_ADMITTED, id="none"),
        pytest.param(shown(key=OTHER_KEY), Refusal.NOT_ADMITTED, id="of another key"),
        pytest.param(shown(key_id="b"), Refusal.NOT_ADMITTED, id="of a key that is not known"),
        pytest.param(shown()[:-4] + "AAAA", Refusal.NOT_ADMITTED, id="with another MAC"),
        pytest.param(shown(until=1000), Refusal.EXPIRED, id="that has ended"),
    ],
)
def test_a_capability_that_does_not_hold_opens_nothing(served: Served, text: str, refusal: Refusal) -> None:
    refused_as(refusal, lambda: served.client(text).put("1/1/0/a", of(b"data"), deadline()))
    assert (served.used_bytes(), served.server.figures()["workloads"]) == (0, {})


def test_a_capability_is_judged_at_each_request(served: Served) -> None:
    with served.link(shown(until=2000)) as link:
        assert asked(link, op="list", under="", after="")["bytes"] == 2
        assert link.recv(2) == b"[]"
        served.epoch_s = 2000.0
        assert asked(link, op="list", under="", after="")["refused"] == Refusal.EXPIRED


def test_nothing_is_answered_before_the_hello(served: Served) -> None:
    for request in ({"op": "put", "key": "1/1/0/a", "bytes": 1}, {"op": "stat"}, {"op": "list", "under": ""}):
        with served.link() as link:
            assert asked(link, **request)["refused"] == Refusal.NOT_ADMITTED
            assert ends(link)


def test_an_attempt_writes_its_own_values_alone(served: Served) -> None:
    client = served.client(shown(attempt=2))
    for attempt in (1, 3):
        refused_as(
            Refusal.NOT_ADMITTED,
            lambda attempt=attempt: client.put(f"1/{attempt}/0/a", of(b"data"), deadline()),  # type: ignore[misc]
        )


def test_a_newer_attempt_reads_what_an_earlier_one_wrote_and_ends_its_writes(served: Served) -> None:
    old, new = served.client(shown(attempt=1)), served.client(shown(attempt=2))
    old.put("1/1/0/a", of(b"data"), deadline())
    out = bytearray(4)
    new.get_into("1/1/0/a", memoryview(out), deadline())
    assert out == b"data"
    refused_as(Refusal.SUPERSEDED, lambda: old.put("2/1/0/a", of(b"data"), deadline()))
    refused_as(Refusal.SUPERSEDED, lambda: old.drop("", deadline()))
    new.put("2/2/0/a", of(b"data"), deadline())
    assert [each.key for each in old.entries("", deadline())] == ["1/1/0/a"]  # none of an attempt after it
    with pytest.raises(FileNotFoundError):
        old.get_into("2/2/0/a", memoryview(out), deadline())
    assert new.drop("1", deadline()) == 1


def test_a_write_that_began_before_the_newer_attempt_came_is_not_seen(served: Served) -> None:
    with served.link(shown(attempt=1)) as link:
        assert asked(link, op="put", key="1/1/0/a", bytes=4) == {}
        served.client(shown(attempt=2)).entries("", deadline())
        link.sendall(b"data" + CHECKSUM.pack(crc32(b"data")))
        assert read_frame(link, 30)["refused"] == Refusal.SUPERSEDED
        assert served.client(shown(attempt=2)).entries("", deadline()) == []
    until(lambda: served.used_bytes() == 0, "the memory to be free")


def test_a_value_is_seen_once_all_of_it_is_there(served: Served) -> None:
    client = served.client()
    with served.link(shown()) as link:
        assert asked(link, op="put", key="1/1/0/a", bytes=4) == {}
        assert served.used_bytes() == 4 + 4096
        link.sendall(b"dat")
        assert client.entries("", deadline()) == []
        link.sendall(b"a" + CHECKSUM.pack(crc32(b"data")))
        assert read_frame(link, 30)["checksum"] == crc32(b"data")
        assert [each.key for each in client.entries("", deadline())] == ["1/1/0/a"]


def test_a_byte_that_was_damaged_on_the_way_is_refused_and_the_earlier_value_stays(served: Served) -> None:
    client = served.client()
    client.put("1/1/0/a", of(b"good"), deadline())
    with served.link(shown()) as link:
        assert asked(link, op="put", key="1/1/0/a", bytes=4) == {}
        link.sendall(b"dbta" + CHECKSUM.pack(crc32(b"data")))
        assert read_frame(link, 30)["refused"] == Refusal.DAMAGED
        assert asked(link, op="put", key="1/1/0/a", bytes=4, if_absent=True)["refused"] == Refusal.EXISTS
    out = bytearray(4)
    client.get_into("1/1/0/a", memoryview(out), deadline())
    assert out == b"good"
    assert served.used_bytes() == 4 + 4096


def test_a_client_whose_memory_changes_while_it_is_sent_learns_it(served: Served) -> None:
    data = bytearray(b"data")
    client = served.client()

    def late(block: memoryview, start: int) -> int:
        data[0] = 0
        return crc32(block, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gracepoint.snapshots.snapshot_client.crc32", late)
        with pytest.raises(SnapshotDamaged):
            client.put("1/1/0/a", [memoryview(data)], deadline())
    assert served.used_bytes() == 0


@pytest.mark.parametrize(
    ("limits", "max_bytes", "may_have"),
    [
        ({}, 1 << 40, 32 << 20),
        ({"namespace_bytes": 16 << 20}, 1 << 40, 16 << 20),
        ({"workload_bytes": 1 << 40}, 1 << 40, 64 << 20),
        ({}, 8 << 20, 8 << 20),
    ],
    ids=["of one job", "of its namespace", "of all", "of its capability"],
)
def test_a_workload_learns_what_it_may_have(
    tmp_path: Path, limits: dict[str, int], max_bytes: int, may_have: int
) -> None:
    with serving(tmp_path) as serve:
        client = serve(**limits).client(shown(max_bytes=max_bytes))
        assert client.limit_bytes(deadline()) == may_have
        assert client.limit_bytes(deadline()) == may_have  # the second time by the same connection


def test_a_workload_fills_its_own_part_and_no_more(served: Served) -> None:
    greedy, other = served.client(shown(max_bytes=MIB)), served.client(shown("uid-2"))
    with pytest.raises(SnapshotsFull, match=str(MIB)):
        greedy.put("1/1/0/a", of(bytes(MIB)), deadline())
    for number in range(MIB // 4096):  # empty values cost something, too
        greedy.put(f"1/1/{number}/a", [], deadline())
    with pytest.raises(SnapshotsFull):
        greedy.put("2/1/0/a", [], deadline())
    assert served.used_bytes() <= MIB
    other.put("1/1/0/a", of(bytes(8 * MIB)), deadline())


def test_all_workloads_of_a_namespace_together_fill_its_part_and_no_more(serve: Callable[..., Served]) -> None:
    served = serve(namespace_bytes=MIB)
    for number in range(4):
        served.client(shown(f"uid-{number}", namespace="greedy")).put("1/1/0/a", of(bytes(MIB // 5)), deadline())
    another = served.client(shown("uid-4", namespace="greedy"))
    with pytest.raises(SnapshotsFull, match=f"the namespace has .* of {MIB} bytes"):
        another.put("1/1/0/a", of(bytes(MIB // 4)), deadline())
    served.client(shown("uid-5", namespace="other")).put("1/1/0/a", of(bytes(MIB // 2)), deadline())
    served.client(shown("uid-0", namespace="greedy")).drop("", deadline())
    another.put("1/1/0/a", of(bytes(MIB // 4)), deadline())


def test_a_size_that_no_memory_has_is_refused_before_a_byte_is_sent(served: Served) -> None:
    with served.link(shown()) as link:
        assert asked(link, op="put", key="1/1/0/a", bytes=(1 << 63) - 1)["refused"] == Refusal.FULL
        assert asked(link, op="list", under="", after="") == {"bytes": 2}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack(">4sI", MAGIC, LONGEST_HEADER_BYTES + 1), id="a header that is too long"),
        pytest.param(struct.pack(">4sI", MAGIC, 2) + b"[]", id="no object"),
        pytest.param(struct.pack(">4sI", MAGIC, 8000) + b"[" * 8000, id="deep brackets"),
        pytest.param(frame(op="put", key="1/1/0/a", bytes=-1), id="a negative size"),
        pytest.param(frame(op="put", key="1/1/0/a", bytes=1e30), id="a size that is no integer"),
        pytest.param(frame(op="put", key="1/1/0/a", bytes=True), id="a size that is a truth"),
        pytest.param(frame(op="put", key="../1/0/a", bytes=1), id="a key that is none"),
        pytest.param(frame(op="put", key="1/1/0/" + "a" * 600, bytes=1), id="a key that is too long"),
        pytest.param(frame(op="put", key="1/1/0/\n2026 ERROR", bytes=1), id="a key with a line break"),
        pytest.param(frame(op="get", key="1/1/0/a", start=0), id="a field is missing"),
        pytest.param(frame(op="own"), id="another request"),
    ],
)
def test_what_is_no_request_ends_its_connection_and_harms_no_other(served: Served, sent: bytes) -> None:
    client = served.client()
    client.put("1/1/0/z", of(b"data"), deadline())
    with served.link(shown()) as link:
        link.sendall(sent)
        with contextlib.suppress(ConnectionError):
            assert read_frame(link, 30)["refused"] == Refusal.MALFORMED
        assert ends(link)
    client.put("1/1/0/z", of(b"data"), deadline())
    assert served.used_bytes() == 4 + 4096


def test_random_bytes_never_end_the_server(served: Served) -> None:
    bytes_of = random.Random(4)
    for number in range(60):
        data = bytes_of.randbytes(bytes_of.randrange(1, 400))
        with contextlib.suppress(OSError), served.bare() if number % 3 else served.link(shown()) as link:
            link.sendall(data)
    served.client().put("1/1/0/a", of(b"data"), deadline())
    assert "failed" not in served.server.figures()


def test_half_a_value_whose_sender_goes_is_forgotten(served: Served) -> None:
    for sent in (b"", b"x" * 1000, b"x" * MIB + b"123"):
        with served.link(shown()) as link:
            assert asked(link, op="put", key="1/1/0/a", bytes=MIB) == {}
            link.sendall(sent)
        until(lambda: served.used_bytes() == 0, "the memory to be free")
    assert served.client().entries("", deadline()) == []


def test_a_slow_sender_loses_its_connection_and_its_memory_and_others_continue(serve: Callable[..., Served]) -> None:
    served = serve(stall_s=2.0)
    other = served.client(shown("uid-2"))
    with served.link(shown()) as link:
        assert asked(link, op="put", key="1/1/0/a", bytes=MIB) == {}
        while served.used_bytes() >= MIB:
            with contextlib.suppress(OSError):  # one byte now and then does not help
                link.sendall(b"x")
            other.put("1/1/0/b", of(b"data"), deadline())
            time.sleep(0.05)
        until(lambda: served.server.figures()["refused"] == {"slow": 1}, "the slow one to be counted")
        assert ends(link)
    assert served.used_bytes() == 4 + 4096


def test_a_slow_reader_does_not_keep_what_was_dropped(serve: Callable[..., Served]) -> None:
    served = serve(stall_s=2.0)
    client = served.client()
    client.put("1/1/0/a", of(bytes(24 * MIB)), deadline())
    with served.link(shown()) as link:
        assert asked(link, op="get", key="1/1/0/a", start=0, bytes=24 * MIB, generation="")["bytes"] == 24 * MIB
        client.drop("", deadline())
        assert served.used_bytes() == 24 * MIB + 4096  # it is still being read
        until(lambda: served.used_bytes() == 0, "the reader to be cut off")
    client.put("1/1/0/a", of(bytes(24 * MIB)), deadline())


@pytest.mark.parametrize("says", ["nothing", "half a header", "one byte now and then"])
def test_who_does_not_say_hello_is_cut_off(serve: Callable[..., Served], says: str) -> None:
    served = serve(handshake_s=2.0, header_s=1.0)
    with served.bare() as silent, served.link() as link:
        with contextlib.suppress(OSError):
            if says == "half a header":
                link.sendall(frame(op="hello")[:5])
            while says == "one byte now and then" and served.server.figures()["pending"]:
                link.sendall(b"G")
                time.sleep(0.02)
        assert ends(silent)
        assert ends(link)
    until(lambda: served.server.figures()["pending"] == 0, "both to be forgotten")


@pytest.fixture
def flood() -> Iterator[Callable[[Served, str, int], None]]:
    """Opens connections that say nothing, and keeps them."""
    with contextlib.ExitStack() as kept:

        def begin(served: Served, address: str, count: int) -> None:
            for _ in range(count):
                kept.enter_context(served.bare(address))

        yield begin


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all addresses of 127.0.0.0/8")
def test_a_flood_of_connections_crowds_out_itself_alone(
    serve: Callable[..., Served], flood: Callable[[Served, str, int], None]
) -> None:
    served = serve(pending=40, pending_of_address=10, connections=4, handshake_s=60.0, header_s=60.0)
    client = served.client()
    client.put("1/1/0/a", of(b"data"), deadline())

    def closed() -> int:
        figures = served.server.figures()
        return int(figures.get("crowded out", 0) + figures.get("not begun", 0))

    with served.link(address="127.0.0.9") as slow:
        flood(served, "127.0.0.2", 60)
        until(lambda: closed() == 50, "one address to have its 10 places", timeout_s=20)
        for number in range(3, 7):
            flood(served, f"127.0.0.{number}", 60)
        until(lambda: closed() >= 5 * 60 - 40, "all to be accepted")
        assert served.server.figures()["pending"] <= 40
        # Its place was not the one that was taken.
        assert "refused" not in asked(slow, op="hello", capability=shown("uid-2"))
        client.put("1/1/0/a", of(b"data"), deadline())
        with served.link(shown("uid-3"), address="127.0.0.8") as link:
            assert asked(link, op="put", key="1/1/0/a", bytes=4) == {}


def test_connections_beyond_their_number_are_refused_and_others_continue(serve: Callable[..., Served]) -> None:
    served = serve(connections=3, connections_of_address=2)
    with served.link(shown()) as first, served.link(shown()), served.link() as third:
        assert asked(third, op="hello", capability=shown())["refused"] == Refusal.BUSY
        assert ends(third)
        assert asked(first, op="list", under="", after="") == {"bytes": 2}
        with pytest.raises(SnapshotsUnavailable, match="2 of this address"):
            served.client().entries("", deadline())


def test_a_namespace_with_many_connections_keeps_no_other_out(serve: Callable[..., Served]) -> None:
    served = serve(connections=4, connections_of_address=8)
    with contextlib.ExitStack() as kept:
        greedy = shown("uid-1", namespace="greedy")
        busy, *resting = (kept.enter_context(served.link(greedy)) for _ in range(4))
        assert asked(busy, op="put", key="1/1/0/a", bytes=4) == {}
        other = kept.enter_context(served.link(shown("uid-2", namespace="other")))
        assert ends(resting[0])  # the oldest that rests
        with served.link() as link:
            assert asked(link, op="hello", capability=greedy)["refused"] == Refusal.BUSY
        busy.sendall(b"data" + CHECKSUM.pack(crc32(b"data")))
        assert read_frame(busy, 30)["key"] == "1/1/0/a"
        assert asked(other, op="list", under="", after="") == {"bytes": 2}


def test_strangers_cannot_fill_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        with served.link() as link:
            assert asked(link, op="hello", capability="v1.a.b.c")["refused"] == Refusal.NOT_ADMITTED
    lines = [record for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 1
    assert served.server.figures()["refused"] == {"not admitted": 30}


def test_values_of_a_workload_that_writes_no_more_are_dropped_by_their_age(serve: Callable[..., Served]) -> None:
    served = serve(age_s=100.0)
    client = served.client()
    client.put("1/1/0/a", of(b"data"), deadline())
    served.age_s = 99.0
    served.server.look()
    assert served.used_bytes() == 4100
    served.age_s = 100.0
    served.server.look()
    assert (served.used_bytes(), served.server.figures()["workloads"]) == (0, {})


def test_keys_of_capabilities_are_rotated_without_a_restart(served: Served) -> None:
    old, new = shown(), shown(key_id="b", key=OTHER_KEY)
    served.client(old).put("1/1/0/a", of(b"data"), deadline())
    refused_as(Refusal.NOT_ADMITTED, lambda: served.client(new).entries("", deadline()))
    served.set_keys(a=KEY, b=OTHER_KEY)
    served.server.look()
    for text in (old, new):
        assert len(served.client(text).entries("", deadline())) == 1
    served.set_keys(b=OTHER_KEY)
    served.server.look()
    refused_as(Refusal.NOT_ADMITTED, lambda: served.client(old).entries("", deadline()))
    assert len(served.client(new).entries("", deadline())) == 1


def test_a_certificate_of_another_authority_is_served_without_a_restart(served: Served) -> None:
    served.client().put("1/1/0/a", of(b"data"), deadline())
    kept = served.client()
    assert len(kept.entries("", deadline())) == 1
    authority = trustme.CA()
    served.certify(authority)
    served.server.look()
    assert len(served.client(authority=authority).entries("", deadline())) == 1
    assert len(kept.entries("", deadline())) == 1  # connections that are open go on


def test_files_that_cannot_be_read_change_nothing(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for content in ("", "a too-short\n", "a AAAA\n", "\xff"):
        served.files.capability_keys.write_text(content)
        served.server.look()
    served.files.certificate.write_text("-----BEGIN CERTIFICATE-----\n")
    served.server.look()
    served.client().put("1/1/0/a", of(b"data"), deadline())
    assert "going on with what was read before" in caplog.text
    assert "AAAA" not in caplog.text
    served.files.certificate.unlink()
    served.set_keys(b=OTHER_KEY)  # is read, although the certificate cannot be
    served.server.look()
    served.client(shown(key_id="b", key=OTHER_KEY)).entries("", deadline())


def test_a_server_that_ends_answers_what_was_asked_and_accepts_nothing_more(served: Served) -> None:
    with served.link(shown()) as busy, served.link(shown()) as idle:
        assert asked(busy, op="put", key="1/1/0/a", bytes=4) == {}
        closing = threading.Thread(target=served.server.close, args=(30.0,), daemon=True)
        closing.start()
        assert ends(idle)
        with pytest.raises(OSError, match=r"refused|reset|EOF|timed out"):
            socket.create_connection(("127.0.0.1", served.server.port), timeout=5).recv(1)
        busy.sendall(b"data" + CHECKSUM.pack(crc32(b"data")))
        assert read_frame(busy, 30)["key"] == "1/1/0/a"
        assert ends(busy)
        closing.join(30)
        assert not closing.is_alive()


def test_a_server_that_ends_does_not_wait_for_ever(served: Served) -> None:
    with served.link(shown()) as busy:
        assert asked(busy, op="put", key="1/1/0/a", bytes=4) == {}
        served.server.close(0.1)
        assert ends(busy)
    assert served.used_bytes() == 0


@pytest.fixture
def serve_by_process(tmp_path: Path) -> Iterator[Callable[..., ServedByProcess]]:
    with contextlib.ExitStack() as ended:

        def start(*options: str, python: Sequence[str] = ()) -> ServedByProcess:
            served = ServedByProcess(tmp_path, "--capacity-bytes", str(8 * MIB), *options, python=python)
            ended.callback(served.close)
            return served

        yield start


def test_the_process_serves_and_ends_by_sigterm_and_loads_no_numpy(
    serve_by_process: Callable[..., ServedByProcess],
) -> None:
    served = serve_by_process(python=["-X", "importtime"])
    client = served.client(shown(until=LATE))
    client.put("1/1/0/a", of(b"data"), deadline())
    client.drop("", deadline())
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    imported = {line.rpartition("|")[2].strip() for line in served.log.read_text().splitlines()}
    assert "gracepoint.snapshots.snapshot_server" in imported
    assert not {"jax", "numpy", "tensorstore", "gracepoint.checkpoint"} & imported


def test_a_process_that_is_to_end_gives_what_it_has_and_ends_when_it_is_dropped(
    serve_by_process: Callable[..., ServedByProcess],
) -> None:
    """As in a rolling update: the job sends its part elsewhere meanwhile, and then drops it here."""
    served = serve_by_process("--drain-s", "3600")
    client = served.client(shown(until=LATE))
    client.put("1/1/0/a", of(b"data"), deadline())
    served.process.send_signal(signal.SIGTERM)
    until(lambda: "ending within" in served.log.read_text(), "the process to begin to end")

    def is_refused() -> bool:
        try:
            client.put("2/1/0/a", of(b"data"), deadline())
        except SnapshotsUnavailable as error:
            return "about to end" in str(error)
        return False

    until(is_refused, "new values to be refused")
    out = bytearray(4)
    served.client(shown(until=LATE)).get_into("1/1/0/a", memoryview(out), deadline())  # on a new connection
    assert out == b"data"
    client.drop_before(3, deadline())
    assert served.process.wait(60) == 0


@pytest.mark.parametrize("again", [[], [signal.SIGTERM]], ids=["its time is over", "it is told again"])
def test_a_process_that_is_to_end_does_not_wait_for_ever(
    serve_by_process: Callable[..., ServedByProcess], again: list[signal.Signals]
) -> None:
    served = serve_by_process("--drain-s", "3600" if again else "0.1")
    client = served.client(shown(until=LATE))
    client.put("1/1/0/a", of(b"data"), deadline())
    served.process.send_signal(signal.SIGTERM)
    until(lambda: "ending within" in served.log.read_text(), "the process to begin to end")
    for number in again:
        served.process.send_signal(number)
    assert served.process.wait(60) == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--capacity-bytes", str(1 << 60), "can still have"),
        ("--connections", str(1 << 30), "as this process may open"),
        ("--capability-keys", "/nowhere", "cannot serve snapshots"),
    ],
)
def test_the_process_refuses_what_it_cannot_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    made = Served(tmp_path)
    made.close()
    arguments: dict[str, Any] = {
        "--certificate": made.files.certificate,
        "--key": made.files.key,
        "--capability-keys": made.files.capability_keys,
        "--capacity-bytes": MIB,
        "--port": 0,
    }
    words = [str(word) for pair in (arguments | {option: value}).items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "gracepoint.snapshots", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert capability().workload not in done.stderr
