"""A process writes its part to the servers that it was told, and reads parts from the nearest copy that is whole."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

import pytest

from gracepoint.checksum import crc32
from gracepoint.snapshots.exchange import SnapshotDamaged, SnapshotsUnavailable
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.snapshots.snapshot_servers import (
    PartCopies,
    PartName,
    SentFile,
    ServerAt,
    ServerPlacement,
    SnapshotServers,
)
from tests.unit.snapshots.fakes.servers import Served, damage, placed, shown, view
from tests.unit.snapshots.fakes.servers import deadline as in_time

pytestmark = pytest.mark.integration

BIG = 128 << 10
RECORD = b"all of it is there"


def go_on() -> None:
    pass


def put(part: PartCopies, path: str, data: bytes) -> None:
    part.put(path, memoryview(data), crc32(data), go_on)


def written(
    servers: SnapshotServers,
    step: int,
    files: dict[str, bytes],
    before: dict[str, SentFile] | None = None,
    part: int = 0,
) -> PartCopies:
    copies = servers.begin(step, part, f"a.{step}", before or {})
    for path, data in files.items():
        put(copies, path, data)
    copies.finish(RECORD, go_on)
    return copies


def read(servers: SnapshotServers, key: str, size: int, *at: ServerAt) -> bytes:
    out = bytearray(size)
    servers.read_into(key, memoryview(out), at)
    return bytes(out)


@pytest.fixture
def pair(serve: Callable[..., Served]) -> tuple[Served, Served]:
    return serve(), serve()


def test_a_part_goes_to_all_servers_and_is_found_by_its_done_record(pair: tuple[Served, Served]) -> None:
    servers, data = view(placed(pair)), os.urandom(BIG)
    part = written(servers, 7, {"default/w/0.0": data, "host state/process ü.json": b"{}"})
    assert part.nodes == tuple(served.at.node for served in pair)
    assert (part.sent_bytes, part.total_bytes) == (2 * (BIG + 2), BIG + 2)
    (found,) = view(placed([], pair)).find(30.0)
    assert found.name == PartName(7, 1, 0, "a.7")
    assert found.record_bytes == len(RECORD)
    assert {server.node for server in found.servers} == {served.at.node for served in pair}
    for served in pair:
        assert read(servers, found.name.file("default/w/0.0"), BIG, served.at) == data
        assert read(servers, found.name.file("host state/process ü.json"), 2, served.at) == b"{}"


def test_files_go_to_another_server_first_by_turns_so_that_all_links_are_busy(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, asked = view(placed(pair)), list[str]()
    part, client = servers.begin(7, 0, "a.7", {}), servers.client

    def noted(server: ServerAt) -> SnapshotClient:
        asked.append(server.node)
        return client(server)

    monkeypatch.setattr(servers, "client", noted)
    for path in ("x", "y"):
        put(part, path, b"12")
    one, other = (served.at.node for served in pair)
    assert asked == [one, other, other, one]
    assert part.nodes == (one, other)


def test_a_part_without_its_done_record_is_not_found(pair: tuple[Served, Served]) -> None:
    servers = view(placed(pair))
    for step in range(3):
        written(servers, step, {f"file-{number}": b"x" for number in range(5)}, part=step)
    unfinished = servers.begin(2, 7, "a.9", {})
    put(unfinished, "file", b"x")
    assert sorted(found.name.part for found in servers.find(30.0)) == [0, 1, 2]


def test_a_file_is_named_by_a_key_whatever_its_path() -> None:
    name = PartName(1, 2, 3, "a.4")
    keys = {name.file(path) for path in ("a/b", "a//b", "a b", "a%20b", "ä" * 300, "ä" * 301, "/a", "a" * 400)}
    assert len(keys) == 8
    assert all(key.startswith(name.folder) and len(key) < 400 and key.isascii() for key in keys)


def test_what_has_not_changed_is_not_sent_again(pair: tuple[Served, Served]) -> None:
    servers, frozen = view(placed(pair)), os.urandom(9 * BIG)
    first = written(servers, 1, {"frozen": frozen, "w": os.urandom(BIG)})
    data = os.urandom(BIG)
    second = written(servers, 2, {"frozen": frozen, "w": data}, first.sent)
    assert second.sent_bytes == 2 * BIG
    assert second.total_bytes == 10 * BIG
    servers.drop(before_step=2)
    for served in pair:
        assert read(servers, second.name.file("frozen"), len(frozen), served.at) == frozen
        assert served.used_bytes() < 10 * BIG + 5 * 4096
    third = written(servers, 3, {"frozen": frozen, "w": data}, second.sent)
    assert third.sent_bytes == 2 * BIG  # w changed before, so it is compared by more than its CRC from now on
    assert written(servers, 4, {"frozen": frozen, "w": data}, third.sent).sent_bytes == 0


def test_equal_checksums_alone_do_not_make_a_file_unchanged(served: Served) -> None:
    """Two contents with one CRC-32: the second must arrive."""
    servers = view(placed([served]))
    data = bytearray(os.urandom(BIG))
    other = bytearray(data)
    for position, bits in enumerate((0x104C11DB7).to_bytes(5, "big")):  # CRC-32 is linear, and 0 for its polynomial
        other[1000 + position] ^= int(f"{bits:08b}"[::-1], 2)
    assert other != data
    assert crc32(other) == crc32(data)
    first = written(servers, 1, {"w": bytes(data)})
    second = written(servers, 2, {"w": bytes(other)}, first.sent)
    assert read(servers, second.name.file("w"), BIG, served.at) == bytes(other)


def test_a_server_that_was_started_anew_gets_what_has_not_changed(pair: tuple[Served, Served]) -> None:
    servers, frozen = view(placed(pair)), os.urandom(BIG)
    first = written(servers, 1, {"frozen": frozen})
    pair[1].restart()
    second = written(servers, 2, {"frozen": frozen}, first.sent)
    assert second.nodes == tuple(served.at.node for served in pair)
    assert second.sent_bytes == BIG
    assert read(servers, second.name.file("frozen"), BIG, pair[1].at) == frozen


def test_a_part_goes_on_without_a_server_that_fails(pair: tuple[Served, Served]) -> None:
    servers = view(placed(pair))
    part = servers.begin(1, 0, "a.1", {})
    put(part, "w", os.urandom(BIG))
    pair[1].server.close()
    put(part, "v", os.urandom(BIG))
    assert part.finish(RECORD, go_on) == (pair[0].at.node,)
    assert list(part.problems) == [pair[1].at.node]
    (found,) = servers.find(30.0)
    assert found.servers == (pair[0].at,)
    pair[0].server.close()
    both = f"no snapshot server takes the part: node {pair[0].at.node}: .*; node {pair[1].at.node}: "
    with pytest.raises(SnapshotsUnavailable, match=both):
        written(servers, 2, {"w": b"x"})


@pytest.mark.parametrize("before_the_last", [False, True])
def test_a_server_that_lost_files_meanwhile_never_says_that_it_has_all(
    pair: tuple[Served, Served], *, before_the_last: bool
) -> None:
    servers = view(placed(pair))
    part = servers.begin(1, 0, "a.1", {})
    put(part, "w", os.urandom(BIG))
    if not before_the_last:
        pair[1].restart()
    put(part, "v", os.urandom(BIG))
    if before_the_last:
        pair[1].restart()
    assert part.finish(RECORD, go_on) == (pair[0].at.node,)
    (found,) = servers.find(30.0)
    assert found.servers == (pair[0].at,)


def test_a_full_server_is_left_out(serve: Callable[..., Served]) -> None:
    roomy, narrow = serve(), serve(capacity_bytes=BIG)
    part = written(view(placed([roomy, narrow])), 1, {"w": os.urandom(2 * BIG)})
    assert part.nodes == (roomy.at.node,)
    assert "drop older steps, or raise the limit" in part.problems[narrow.at.node]


def test_bytes_that_change_while_they_are_sent_fail_the_part(served: Served) -> None:
    part = view(placed([served])).begin(1, 0, "a.1", {})
    with pytest.raises(SnapshotDamaged, match="were changed while they were sent"):
        part.put("w", memoryview(bytes(BIG)), 1, go_on)


def test_an_error_of_the_caller_ends_a_part_and_blames_no_server(served: Served) -> None:
    part = view(placed([served])).begin(1, 0, "a.1", {})

    def stop() -> None:
        raise InterruptedError("training ends")

    with pytest.raises(InterruptedError, match="training ends"):
        part.put("w", memoryview(bytes(BIG)), crc32(bytes(BIG)), stop)
    assert part.problems == {}


def test_a_damaged_copy_and_one_that_is_away_are_passed_over(serve: Callable[..., Served]) -> None:
    first, second, third = serve(), serve(), serve()
    servers, data = view(placed([first, second, third])), os.urandom(BIG)
    name = written(servers, 1, {"w": data}).name
    damage(first, name.file("w"))
    second.server.close()
    at = [served.at for served in (first, second, third)]
    assert read(servers, name.file("w"), BIG, *at) == data
    damage(third, name.file("w"))
    with pytest.raises(FileNotFoundError, match="no copy can be read.*read another copy"):
        read(servers, name.file("w"), BIG, *at)
    with pytest.raises(FileNotFoundError, match="there is none"):
        read(servers, name.file("w"), BIG)


def test_the_own_node_is_asked_first(pair: tuple[Served, Served]) -> None:
    key = PartName(1, 1, 0, "a.1").file("w")
    for number, served in enumerate(pair):  # so that it can be told which one answers
        served.client().put(key, [memoryview(b"%d" % number)], in_time())
    for own, other, answer in ((*pair, b"0"), (*pair[::-1], b"1")):
        assert read(view(placed([own], [other])), key, 1, other.at, own.at) == answer


def test_older_steps_are_dropped_where_they_were_written_also_if_the_placement_has_changed(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = serve(), serve()
    servers = view(placed([old], [new]))
    written(servers, 1, {"w": os.urandom(BIG)})
    servers.place(placed([new], [old]))
    written(servers, 2, {"w": os.urandom(BIG)})
    servers.drop(before_step=2)
    assert old.used_bytes() == 0
    assert [found.name.step for found in servers.find(30.0)] == [2]
    old.server.close()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            servers.drop(before_step=3)
    assert caplog.text.count("keeps what is not needed") == 1  # it does not answer, and is not asked again
    assert new.used_bytes() == 0


@pytest.mark.parametrize(
    ("part", "leaving", "goes_to"),
    [
        pytest.param(0, "", "ab", id="nobody goes"),
        pytest.param(0, "c", "ab", id="another one goes"),
        pytest.param(0, "a", "bc", id="the first other one takes the part"),
        pytest.param(1, "a", "bd", id="each part goes to another one"),
        pytest.param(0, "ab", "cd", id="both go"),
        pytest.param(0, "acd", "b", id="too few stay"),
        pytest.param(0, "abcd", "ab", id="all are named, as the notice is about the workload"),
    ],
)
def test_a_part_goes_to_other_servers_if_their_nodes_go_away(part: int, leaving: str, goes_to: str) -> None:
    a, b, c, d = (ServerAt(node, f"10.0.0.{number}:9470") for number, node in enumerate("abcd"))
    placement = ServerPlacement(capability=shown(), server_name="", authorities="", write=(a, b), read=(a, b, c, d))
    assert "".join(server.node for server in placement.staying(part, set(leaving))) == goes_to


def test_a_placement_comes_later_and_may_name_no_server(served: Served) -> None:
    servers = view()
    assert not servers.wait(0.0)
    assert servers.find(1.0) == []
    with pytest.raises(SnapshotsUnavailable, match="has named no snapshot server"):
        servers.begin(1, 0, "a.1", {})
    servers.place(dataclasses.replace(placed([]), capability=""))  # as the operator says that there is no server at all
    assert servers.wait(0.0)
    assert servers.find(1.0) == []
    servers.place(placed([], [served]))
    with pytest.raises(SnapshotsUnavailable, match="has named no snapshot server"):
        servers.begin(1, 0, "a.1", {})
    servers.place(placed([served]))
    assert written(servers, 1, {"w": b"x"}).nodes == (served.at.node,)


def test_a_renewed_capability_is_shown(served: Served) -> None:
    servers = view(placed([served]))
    written(servers, 1, {"w": b"x"})
    served.epoch_s = 20_000
    with pytest.raises(OSError, match="has ended"):
        written(servers, 2, {"w": b"x"})
    servers.place(placed([served], text=shown(until=30_000)))
    written(servers, 3, {"w": b"x"})


def test_another_attempt_reads_and_drops_and_the_old_one_writes_no_more(pair: tuple[Served, Served]) -> None:
    old, data = view(placed(pair)), os.urandom(BIG)
    name = written(old, 1, {"w": data}).name
    new = view(placed(pair, text=shown(attempt=2)))
    (found,) = new.find(30.0)
    assert (found.name, read(new, name.file("w"), BIG, *found.servers)) == (name, data)
    written(new, 2, {"w": data})
    with pytest.raises(OSError, match="attempt 1 of the workload is over"):
        written(old, 3, {"w": data})
    new.drop(before_step=2)
    assert [each.name.step for each in new.find(30.0)] == [2]


def test_a_server_that_does_not_answer_is_left_out_of_the_search(pair: tuple[Served, Served]) -> None:
    servers = view(placed(pair))
    written(servers, 1, {"w": b"x"})
    pair[0].server.close()
    (found,) = servers.find(30.0)
    assert found.servers == (pair[1].at,)


def test_a_client_of_a_server_without_values_sees_none(served: Served) -> None:
    assert served.client().page("", "", in_time()) == []
