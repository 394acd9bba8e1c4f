"""Objects of ``s3://`` that are written in parts: conditions, lost replies, and what stays of uploads that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import Buffer
from gracepoint.checkpoint.storage.objects import requests
from gracepoint.checkpoint.storage.objects.s3 import S3Uploads
from gracepoint.checkpoint.storage.storage_path import Generation, StaleGeneration, StoragePath
from gracepoint.checksum import crc32
from gracepoint.errors import SaveFailed
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Fault, How, Rule
from tests.object_stores.servers import Bucket, Server
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save
from tests.unit.checkpoint.steps.fakes.bucket_machine import VirtualPath, store_of

MIB = 1 << 20
PART = 5 * MIB  # the least that S3 allows
ENDS = ("end",)


@pytest.fixture
def object_server(s3: Server) -> Server:
    return s3


@pytest.fixture
def far(far: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Objects of 6 MiB are large there."""
    monkeypatch.setattr(S3Uploads, "from_bytes", 6 * MIB)
    monkeypatch.setattr(requests, "WRITE_PART_BYTES", PART)
    return far


@pytest.fixture
def top(far: Bucket) -> StoragePath:
    return VirtualPath(store_of(far, patience_s=5.0), "top")


@pytest.fixture
def left(s3: Server, far: Bucket) -> Callable[[], list[str]]:
    """Returns a function that lists what the store keeps of uploads that have not ended."""

    def look() -> list[str]:
        assert s3.buckets is not None
        return [path.name for path in (s3.buckets / far.name).glob(".sgwtmp/multipart/*/*")]

    return look


def values(seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, 12 * MIB + 17, np.uint8)


def write(
    place: StoragePath,
    data: np.ndarray[Any, np.dtype[np.uint8]],
    only_if: Generation | None = None,
    go_on: Callable[[], None] | None = None,
) -> Generation:
    return place.write_if(ArrayBytes(data, data.dtype), crc32(data.data), only_if, "", go_on)


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        pytest.param(1, 64 * MIB, id="small"),
        pytest.param(10_000 * 64 * MIB, 64 * MIB, id="as many parts as are allowed"),
        pytest.param(10_000 * 64 * MIB + 1, 65 * MIB, id="one byte more"),
        pytest.param(5 << 40, 525 * MIB, id="5 TiB"),
    ],
)
def test_there_are_never_more_parts_than_s3_allows(size_bytes: int, expected: int) -> None:
    assert requests.part_bytes(size_bytes) == expected
    assert -(-size_bytes // expected) <= 10_000


def test_a_large_object_is_written_in_parts(
    top: StoragePath, store_proxy: FaultProxy, left: Callable[[], list[str]]
) -> None:
    data = values()
    generation = write(top / "w", data)
    assert [exchange.sent for exchange in store_proxy.exchanges if "partNumber" in exchange.asked.target].count(
        PART
    ) == 2
    entry = (top / "w").entry()
    assert entry is not None
    assert (entry.bytes, entry.generation) == (len(data), generation)
    assert (top / "w").read_bytes() == data.tobytes()
    assert left() == []


def test_values_in_another_order_are_written_in_parts(top: StoragePath) -> None:
    data = np.arange(3 * MIB, dtype=np.float32).reshape(1024, -1).T
    (top / "w").write_large(ArrayBytes(data, data.dtype), Buffer(), lambda: None, direct=False)
    assert (top / "w").read_bytes() == data.tobytes()


def test_conditions_hold_for_large_objects(top: StoragePath, left: Callable[[], list[str]]) -> None:
    first = write(top / "w", values(1))
    with pytest.raises(FileExistsError):
        write(top / "w", values(2))
    second = write(top / "w", values(2), first)
    with pytest.raises(StaleGeneration):
        write(top / "w", values(3), first)
    assert second != first
    assert (top / "w").read_bytes() == values(2).tobytes()
    assert left() == []


def test_a_lost_reply_to_the_end_of_an_upload_is_success(
    top: StoragePath, store_proxy: FaultProxy, left: Callable[[], list[str]]
) -> None:
    with store_proxy.rules(Rule(Fault(How.LOST_REPLY), kinds=ENDS, times=1)):
        generation = write(top / "w", values())
    entry = (top / "w").entry()
    assert entry is not None
    assert entry.generation == generation
    assert left() == []


@pytest.mark.parametrize(
    "fault",
    [Fault(How.ANSWER, 409), Fault(How.ANSWER, 503), Fault(How.CUT_REQUEST), Fault(How.REFUSE)],
    ids=lambda fault: f"{fault.how.value} {fault.status}",
)
@pytest.mark.parametrize("kind", ["begin", "part", "end"])
def test_an_upload_outlives_errors_that_pass(
    top: StoragePath, store_proxy: FaultProxy, left: Callable[[], list[str]], kind: str, fault: Fault
) -> None:
    with store_proxy.rules(Rule(fault, kinds=(kind,), times=1)):
        write(top / "w", values())
    assert (top / "w").read_bytes() == values().tobytes()
    if (kind, fault.how) != ("begin", How.CUT_REQUEST):  # what begins an upload has no body: the reply alone is lost
        assert left() == []


def test_an_upload_whose_time_is_over_leaves_nothing(
    top: StoragePath, store_proxy: FaultProxy, left: Callable[[], list[str]]
) -> None:
    def go_on() -> None:
        if store_proxy.number > 2:
            raise SaveFailed("the time is over")

    with pytest.raises(SaveFailed, match="the time is over"):
        write(top / "w", values(), go_on=go_on)
    assert not (top / "w").exists()
    assert left() == []


def test_an_array_that_is_one_large_chunk_is_saved_and_restored(far: Bucket, left: Callable[[], list[str]]) -> None:
    root: Any = f"{far.uri}/run"
    state = {"w": np.arange(2 * MIB, dtype=np.float64)}
    save(engine(root), 1, state)
    restored = restore(root, state)
    assert restored is not None
    assert_same(restored.state, state)
    assert left() == []
