"""What the client of object stores makes of faults: lost replies, stalls, refusals, errors that users must mend."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.saving import operation
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.storage.buffers import Buffer
from gracepoint.checkpoint.storage.checks import check_contents, read_checked
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.objects import provider
from gracepoint.checkpoint.storage.objects import requests as object_reader
from gracepoint.checkpoint.storage.objects.http import STALL_S, Connections, Exchange
from gracepoint.checkpoint.storage.objects.persistence import Pace
from gracepoint.checkpoint.storage.objects.provider import Transient
from gracepoint.checkpoint.storage.storage_path import StaleGeneration, StoragePath
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, CheckpointError, SaveFailed
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Fault, How, Rule, Shape
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save, small_state
from tests.unit.checkpoint.steps.fakes.bucket_machine import VirtualPath, store_of
from tests.waiting import until_no_thread

WRITES = ("write",)
STALLS = Fault(How.SLOW_REPLY)
MANIFEST = "_GRACEPOINT($|[?&])"


@pytest.fixture
def top(far: Bucket) -> StoragePath:
    return VirtualPath(store_of(far, patience_s=5.0, hedges=True), "top")


@pytest.mark.parametrize("how", [How.LOST_REPLY, How.CUT_REPLY, How.CUT_REQUEST, How.REFUSE])
def test_a_writer_that_won_knows_it_whatever_becomes_of_the_reply(
    top: StoragePath, store_proxy: FaultProxy, how: How
) -> None:
    with store_proxy.rules(Rule(Fault(how), kinds=WRITES, times=1)):
        first = (top / "v").create(b"1")
    assert (top / "v").read().generation == first
    with store_proxy.rules(Rule(Fault(how), kinds=WRITES, times=1)):
        second = (top / "v").replace(b"2", first)
    assert (top / "v").read().generation == second != first
    assert (top / "v").read().data == b"2"
    with pytest.raises(FileExistsError), store_proxy.rules(Rule(Fault(how), kinds=WRITES, times=1)):
        (top / "v").create(b"3")


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_an_error_that_passes_is_tried_again(top: StoragePath, store_proxy: FaultProxy, status: int) -> None:
    with store_proxy.rules(Rule(Fault(How.ANSWER, status=status), times=2)):
        (top / "v").create(b"1")
    with store_proxy.rules(Rule(Fault(How.ANSWER, status=status), times=2)):
        assert (top / "v").read().data == b"1"
    with store_proxy.rules(Rule(Fault(How.ANSWER, status=status), times=2)):
        assert [entry.key for entry in top.entries()] == ["v"]


def test_an_error_that_stays_says_what_was_tried(far: Bucket, store_proxy: FaultProxy) -> None:
    top = VirtualPath(store_of(far, patience_s=1.0, hedges=True), "top")
    with (
        pytest.raises(TimeoutError, match=r"PUT .*/top/v: \d+ requests in .* s failed, the last with: .*503"),
        store_proxy.rules(Rule(Fault(How.ANSWER))),
    ):
        (top / "v").create(b"1")


@pytest.mark.parametrize("how", [How.STALL_REQUEST, How.STALL_REPLY, How.SLOW_REPLY])
def test_a_stalled_write_is_made_on_another_connection(top: StoragePath, store_proxy: FaultProxy, how: How) -> None:
    data = np.arange(100_000, dtype=np.uint8)
    for number in range(20):  # what writes take is learned
        (top / f"v{number}").put(b"x")
    began_s = time.monotonic()
    with store_proxy.rules(Rule(Fault(how, seconds=30.0), kinds=WRITES, times=1)):
        (top / "w").write_large(ArrayBytes(data, data.dtype), Buffer(), lambda: None, direct=False)
    assert time.monotonic() - began_s < 8.0
    assert (top / "w").read_bytes() == data.tobytes()


@pytest.mark.parametrize("how", [How.CUT_REPLY, How.LOST_REPLY])
def test_a_read_continues_where_it_was_cut(top: StoragePath, store_proxy: FaultProxy, how: How) -> None:
    data = np.random.default_rng(3).integers(0, 256, 3_000_000, np.uint8)
    (top / "w").write_large(ArrayBytes(data, data.dtype), Buffer(), lambda: None, direct=False)
    out = bytearray(len(data))
    with (
        store_proxy.rules(Rule(Fault(how, after_bytes=1_000_000), kinds=("read",), times=2)),
        (top / "w").open() as reader,
    ):
        assert reader.read_into(memoryview(out), 0) == len(data)
    assert bytes(out) == data.tobytes()


def test_replies_that_break_late_are_asked_for_again(far: Bucket, store_proxy: FaultProxy) -> None:
    top = VirtualPath(store_of(far, patience_s=1.0), "top")
    data = bytes(3_000_000)
    (top / "w").put(data)
    store_proxy.shape = Shape(connection_rate=1e6)  # each time, later than a request is repeated
    out = bytearray(len(data))
    with (
        store_proxy.rules(Rule(Fault(How.CUT_REPLY, after_bytes=1_300_000), kinds=("read",), times=2)),
        (top / "w").open() as reader,
    ):
        assert reader.read_into(memoryview(out), 0) == len(data)
    assert bytes(out) == data


def large_value(top: StoragePath, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Writes a value that is read in twelve parts."""
    monkeypatch.setattr(object_reader, "READ_PART_BYTES", 1 << 18)
    data = np.random.default_rng(3).integers(0, 256, 3_000_000, np.uint8).tobytes()
    (top / "w").put(data)
    return data


def test_a_large_value_is_read_on_several_connections(
    top: StoragePath, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = large_value(top, monkeypatch)
    store_proxy.reset()
    store_proxy.shape = Shape(connection_rate=2e6)
    out = bytearray(len(data))
    read_checked(top / "w", len(data), crc32(data), memoryview(out))
    assert bytes(out) == data
    assert sum(exchange.asked.kind == "read" for exchange in store_proxy.exchanges) > 2
    assert sum(exchange.received for exchange in store_proxy.exchanges) < 2 * len(data)


@pytest.mark.parametrize("how", [How.CUT_REPLY, How.LOST_REPLY, How.REFUSE, How.ANSWER])
def test_parts_of_a_large_value_are_read_again(
    top: StoragePath, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    data = large_value(top, monkeypatch)
    out = bytearray(len(data))
    with store_proxy.rules(Rule(Fault(how, after_bytes=10_000), kinds=("read",), times=4)):
        read_checked(top / "w", len(data), crc32(data), memoryview(out))
    assert bytes(out) == data


def test_a_large_value_that_is_replaced_is_not_mixed(
    top: StoragePath, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = large_value(top, monkeypatch)
    with (top / "w").open() as reader:
        (top / "w").put(bytes(len(data)))
        store_proxy.shape = Shape(connection_rate=2e6)
        with pytest.raises(StaleGeneration, match="replaced or deleted while it was read"):
            reader.read_into(memoryview(bytearray(len(data))), 0)


def read_whole(path: StoragePath, size_bytes: int, checksum: int) -> None:
    read_checked(path, size_bytes, checksum, memoryview(bytearray(size_bytes)))


@pytest.mark.parametrize(
    "read", [pytest.param(read_whole, id="a restore"), pytest.param(check_contents, id="a verification")]
)
def test_a_file_that_is_replaced_while_it_is_read_is_damage(
    top: StoragePath,
    store_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[StoragePath, int, int], None],
) -> None:
    data, begin = large_value(top, monkeypatch), object_reader.ObjectReader.begin

    def begin_and_replace(reader: object_reader.ObjectReader) -> None:
        begin(reader)
        (top / "w").put(bytes(len(data)))
        store_proxy.shape = Shape(connection_rate=2e6)

    monkeypatch.setattr(object_reader.ObjectReader, "begin", begin_and_replace)
    with pytest.raises(CheckpointCorrupt, match="/w was replaced or deleted while it was read"):
        read(top / "w", len(data), crc32(data))


def test_what_is_replaced_while_it_is_read_is_not_mixed(top: StoragePath) -> None:
    (top / "v").put(b"a" * 2_000_000)
    with (top / "v").open() as reader:
        out = memoryview(bytearray(1_000_000))
        reader.read_into(out, 0)
        (top / "v").put(b"b" * 2_000_000)
        with pytest.raises(StaleGeneration, match="replaced or deleted while it was read"):
            reader.read_into(out, 500_000)


def test_a_save_succeeds_though_a_connection_stalls(far: Bucket, store_proxy: FaultProxy) -> None:
    root: Any = f"{far.uri}/run"
    checkpointer = engine(root)
    save(checkpointer, 1, small_state())
    with store_proxy.rules(Rule(Fault(How.STALL_REQUEST), kinds=WRITES, path="default.*w", times=1)):
        save(checkpointer, 2, small_state(2.0), timeout_s=20)
    checkpointer.close(5)
    restored = restore(root, small_state())
    assert restored is not None
    assert restored.step == 2
    assert_same(restored.state, small_state(2.0))


@pytest.fixture
def soon_hedged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hedges start after a quarter of the usual times, which are 2 and 6 s before anything is known of a store."""
    usual = Pace.hedge_after_s
    assert 3 * usual(Pace(), 0) < STALL_S
    monkeypatch.setattr(Pace, "hedge_after_s", lambda pace, size_bytes: usual(pace, size_bytes) / 4)


@pytest.mark.usefixtures("soon_hedged")
def test_a_request_succeeds_though_its_hedge_stalls_too(top: StoragePath, store_proxy: FaultProxy) -> None:
    began_s = time.monotonic()
    with store_proxy.rules(Rule(Fault(How.STALL_REQUEST), kinds=WRITES, times=2)):
        (top / "v").put(b"1")
    assert time.monotonic() - began_s < STALL_S
    assert (top / "v").read().data == b"1"


@pytest.mark.usefixtures("soon_hedged")
def test_a_hedge_finds_that_there_is_no_object(top: StoragePath, store_proxy: FaultProxy) -> None:
    began_s = time.monotonic()
    with (
        store_proxy.rules(Rule(Fault(How.STALL_REQUEST), kinds=("read",), times=1)),
        pytest.raises(FileNotFoundError),
    ):
        (top / "v").read()
    assert time.monotonic() - began_s < STALL_S


@pytest.mark.usefixtures("soon_hedged")
def test_a_hedge_finds_that_a_stalled_request_was_carried_out(top: StoragePath, store_proxy: FaultProxy) -> None:
    began_s = time.monotonic()
    with store_proxy.rules(Rule(Fault(How.SLOW_REPLY), kinds=WRITES, times=1)):
        generation = (top / "v").create(b"1")
    assert time.monotonic() - began_s < STALL_S
    assert (top / "v").read().generation == generation


@pytest.mark.usefixtures("unhedged")
def test_requests_of_a_restore_grow_no_faster_than_the_steps(far: Bucket, store_proxy: FaultProxy) -> None:
    requests = []
    for steps in (2, 4, 6):
        root: Any = f"{far.uri}/run-{steps}"
        checkpointer = engine(root, keep_last=8)
        for step in range(steps):
            save(checkpointer, step, small_state())
        another = engine(root, attempt="job-1-b", keep_last=8)
        assert store_proxy.exchanges  # which waits for those that are under way
        store_proxy.reset()
        assert another.restore(small_state(), timeout_s=60) is not None
        until_no_thread("deletion of trash")
        requests.append(len(store_proxy.exchanges))
        another.close(5)
        checkpointer.close(5)
    two, four, six = requests
    assert six - four <= four - two


def test_a_restore_that_must_not_tidy_deletes_nothing_of_others(far: Bucket, store_proxy: FaultProxy) -> None:
    root: Any = f"{far.uri}/run"
    checkpointer = engine(root)
    save(checkpointer, 1, small_state())
    another = engine(root, attempt="job-1-b")
    store_proxy.reset()
    assert another.restore(small_state(), timeout_s=60, tidy=False) is not None
    until_no_thread("deletion of trash")
    deleted = [exchange.asked.target for exchange in store_proxy.exchanges if exchange.asked.method == "DELETE"]
    assert [target for target in deleted if "gracepoint-reading" not in target] == []
    another.close(5)
    checkpointer.close(5)


def test_a_save_whose_connections_all_stall_ends_by_its_deadline(
    far: Bucket, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ManifestCommit, "quiet_s", 0.5)
    root: Any = f"{far.uri}/run"
    checkpointer = engine(root)
    save(checkpointer, 1, small_state())
    began_s = time.monotonic()
    with (
        pytest.raises(SaveFailed),
        store_proxy.rules(Rule(Fault(How.STALL_REQUEST), kinds=WRITES, path="default")),
    ):
        save(checkpointer, 2, small_state(2.0), timeout_s=2)
    assert time.monotonic() - began_s < 2 + 1.5
    checkpointer.close(5)
    restored = restore(root, small_state())
    assert restored is not None
    assert restored.step == 1


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Rule(STALLS, kinds=("list",)), id="the look at what is there"),
        pytest.param(Rule(STALLS, kinds=WRITES, path="begun"), id="the mark of the begin"),
        pytest.param(Rule(STALLS, kinds=WRITES, path="done.process"), id="the done-record"),
        pytest.param(Rule(STALLS, kinds=("read",), path="done.process"), id="the look at the done-records"),
        pytest.param(Rule(Fault(How.STALL_REQUEST), kinds=WRITES, path=MANIFEST), id="the manifest"),
    ],
)
def test_a_save_ends_by_its_deadline_whichever_request_stalls(
    far: Bucket, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    monkeypatch.setattr(operation, "SECONDS", 0.5)
    root: Any = f"{far.uri}/run"
    checkpointer = engine(root)
    save(checkpointer, 1, small_state())
    began_s = time.monotonic()
    with pytest.raises(SaveFailed), store_proxy.rules(rule):
        save(checkpointer, 2, small_state(2.0), timeout_s=1)
    assert time.monotonic() - began_s < 1 + 0.5 + 1.5
    save(checkpointer, 3, small_state(3.0))
    checkpointer.close(5)


def test_a_lost_reply_to_the_manifest_is_a_commit(far: Bucket, store_proxy: FaultProxy) -> None:
    root: Any = f"{far.uri}/run"
    with store_proxy.rules(Rule(Fault(How.LOST_REPLY), kinds=WRITES, path="_GRACEPOINT", times=1)):
        save(engine(root), 1, small_state())
    restored = restore(root, small_state())
    assert restored is not None
    assert restored.step == 1


def own_threads() -> int:
    return sum(thread.name.startswith("gracepoint") for thread in threading.enumerate())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def connections_to(bucket: Bucket) -> int:
    """How many connections this process has to the bucket's server."""
    port = urlsplit(bucket.url).port
    return sum(each.raddr[1:] == (port,) for each in psutil.Process().net_connections("tcp"))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("saves", [60, pytest.param(200, marks=pytest.mark.variant)])
def test_nothing_is_left_of_many_saves(bucket: Bucket, saves: int) -> None:
    root: Any = f"{bucket.uri}/run"
    checkpointer = engine(root, keep_last=2)
    state = {"w": np.arange(1000.0)}
    before_bytes = before_fds = most = 0
    for step in range(saves):
        checkpointer.save_in_background(step, state, {})
        if step == saves // 4:  # whatever is made once was made by now
            before_bytes, before_fds, most = resident_bytes(), len(os.listdir("/proc/self/fd")), own_threads()
    connected = connections_to(bucket)
    checkpointer.close(60)
    assert own_threads() <= most
    assert len(os.listdir("/proc/self/fd")) <= before_fds + 80
    assert 0 < connected <= 80
    assert resident_bytes() - before_bytes < 24 << 20
    near = storage_path(root)
    last, one_before = f"{saves - 1}/", f"{saves - 2}/"
    assert {key for entry in near.entries() if not (key := entry.key).startswith((last, one_before))} == set()


# --- what users must mend is said at the start


def begin(root: str) -> None:
    with CheckpointManager(root) as manager:
        manager.save(1, small_state())


def test_a_missing_bucket_is_said(bucket: Bucket) -> None:
    with pytest.raises((CheckpointError, OSError), match="bucket does not exist"):
        begin(f"{bucket.scheme}://no-such-bucket-{bucket.name}/run")


def test_wrong_keys_raise_an_error_about_credentials(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises((CheckpointError, OSError), match="Check this process's credentials"):
        begin(f"{s3_bucket.uri}/run")


@pytest.mark.parametrize(
    ("status", "says"), [(403, "Check this process's credentials"), (401, "credentials"), (507, "quota is used up")]
)
def test_a_refusal_is_explained(far: Bucket, store_proxy: FaultProxy, status: int, says: str) -> None:
    with (
        pytest.raises((CheckpointError, OSError), match=says),
        store_proxy.rules(Rule(Fault(How.ANSWER, status=status), kinds=WRITES)),
    ):
        begin(f"{far.uri}/run")


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "RequestTimeTooSkewed", "clock is wrong"),
        (403, "quotaExceeded", "quota is used up"),
        (404, "NoSuchBucket", "does not exist"),
        (403, "AccessDenied", "credentials"),
    ],
)
def test_codes_of_stores_are_explained(status: int, code: str, says: str) -> None:
    exchange = Exchange(Connections("http://127.0.0.1:1"))
    exchange.status = status
    assert says in str(provider.refused("PUT s3://bucket/key", exchange, code, "message", writes=True))
    exchange.status = 409
    assert isinstance(
        provider.refused("PUT s3://bucket/key", exchange, "ConditionalRequestConflict", "", writes=True), Transient
    )
