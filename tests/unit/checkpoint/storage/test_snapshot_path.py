"""Files of snapshots: written as parts, read by their names, and told apart by more than their CRC-32."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gracepoint.checkpoint.memory import ArrayBytes, bytes_of
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.snapshot_path import FoundStep, FoundSteps, OwnPart, SnapshotPath, fingerprint
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt
from tests.unit.snapshots.fakes.servers import Served, damage, placed, serving, view

MIB = 1 << 20


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with serving(tmp_path) as start:
        yield start


def go_on() -> None:
    pass


def found(served: list[Served], files: dict[str, int]) -> SnapshotPath:
    """What a later start reads: the files of step 7, each with the part that has it."""
    step = FoundStep(1, "a.1", b"the manifest", [[each.at for each in served]] * 2, files.__getitem__)
    return SnapshotPath(FoundSteps(view(placed([], served)), {7: step}, "_M"), "")


@pytest.mark.integration
def test_files_of_several_parts_are_read_as_one_step(serve: Callable[..., Served]) -> None:
    pair = [serve(), serve()]
    data = np.frombuffer(os.urandom(MIB), np.uint8)
    for part in range(2):
        own = OwnPart(view(placed(pair)), part)
        root = SnapshotPath(own, "")
        folder = root.at(own.begin(7, "a.1"))
        (folder / f"own-{part}").send(ArrayBytes(data, data.dtype), crc32(data), go_on)
        turned = data.reshape(1024, 1024).T  # not in the order of the bytes
        (folder / f"turned-{part}").send(ArrayBytes(turned, data.dtype), crc32(turned.tobytes()), go_on)
        (folder / f"small-{part}").put(b"{}")
        own.finish(folder.key, b"done", go_on)
    root = found(pair, {f"{kind}-{part}": part for kind in ("own", "turned", "small") for part in range(2)})
    step = root / "7"
    assert (step.is_folder(), step.exists(), (root / "8").exists()) == (True, True, False)
    assert (step / "_M").read_bytes() == b"the manifest"
    assert (step / "small-1").read_bytes() == b"{}"
    assert not (step / "other").is_value()
    with pytest.raises(FileNotFoundError):
        (step / "other").read_bytes()
    with pytest.raises(FileNotFoundError):
        (root / "8" / "own-0").read_bytes()
    out = bytearray(MIB)
    damage(pair[0], "own-1")
    read_checked(step / "own-1", MIB, crc32(data), memoryview(out))
    assert bytes(out) == data.tobytes()
    read_checked(step / "turned-0", MIB, crc32(turned.tobytes()), memoryview(out))
    with (step / "own-0").open() as reader:  # a range
        part_of_it = bytearray(100)
        assert reader.read_into(memoryview(part_of_it), MIB - 40) == 40
        assert bytes(part_of_it[:40]) == data.tobytes()[-40:]
    damage(pair[1], "own-1")
    with pytest.raises(CheckpointCorrupt, match="own-1 is missing"):
        read_checked(step / "own-1", MIB, crc32(data), memoryview(out))


@pytest.mark.integration
def test_a_part_that_has_ended_takes_nothing_more(serve: Callable[..., Served]) -> None:
    own = OwnPart(view(placed([serve()])), 0)
    root = SnapshotPath(own, "")
    left, dropped = root.at(own.begin(7, "a.1")), root.at(own.begin(8, "a.2"))
    (left / "w").put(b"x")
    (dropped / "w").put(b"x")
    own.end(left.key)
    own.drop(dropped.key)
    for folder in (left, dropped):  # by a thread that a failed save has left behind
        with pytest.raises(FileNotFoundError, match="is not written any more"):
            (folder / "late").send(bytes_of(b"x"), crc32(b"x"), go_on)


def test_nothing_but_parts_is_written_and_nothing_but_files_is_read() -> None:
    root = SnapshotPath(OwnPart(view(), 0), "")
    for act in (root.delete_folder, root.children, root.touch, root.kvstore_spec, root.entries):
        with pytest.raises(TypeError, match="written as a part and read by its files"):
            act()
    with pytest.raises(FileNotFoundError):
        (root / "7" / "w").read_bytes()
    with pytest.raises(TypeError, match="is only read"):
        (found([], {}) / "w").put(b"x")
    assert root.niceness > 0
    assert found([], {}).niceness == 0
    root.own.is_urgent = True
    assert root.niceness == 0


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 3 * MIB + 5])
def test_a_fingerprint_changes_with_any_bit_and_with_the_order(size: int) -> None:
    data = bytearray(os.urandom(size))
    own = fingerprint(memoryview(bytes(data)))
    assert fingerprint(memoryview(bytes(data))) == own
    assert fingerprint(memoryview(bytes(data) + b"\0")) != own
    for position in {0, size // 3, size - 1} if size else set():
        other = bytearray(data)
        other[position] ^= 1
        assert fingerprint(memoryview(other)) != own
    if size > 3 * MIB:
        for first, second, width in ((0, 8, 8), (0, 8192, 8192), (16, 2 * MIB, 8), (8, 256 * 8192 + 8, 8)):
            other = bytearray(data)
            other[first : first + width], other[second : second + width] = (
                data[second : second + width],
                data[first : first + width],
            )
            assert fingerprint(memoryview(other)) != own
