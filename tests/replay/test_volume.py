"""What is done to the volume of the checkpoints, and that it is undone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import limits
from tests.replay import volume


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if reason := limits.cannot_mount():
        pytest.skip(reason)
    with limits.small_disk(tmp_path / "disk", 8 << 20):
        yield tmp_path / "disk"


def test_a_volume_that_is_filled_takes_nothing_until_it_has_room_again(disk: Path) -> None:
    with volume.filled(disk):
        for what in (lambda: (disk / "file").write_bytes(b"x"), (disk / "folder").mkdir):
            with pytest.raises(OSError, match="No space left on device"):
                what()
    (disk / "file").write_bytes(b"x" * (1 << 20))
    assert {path.name for path in disk.iterdir()} - {"lost+found"} == {"file"}


def test_a_slow_volume_holds_up_what_is_written_and_takes_it_in_the_end(disk: Path) -> None:
    slow = threading.Thread(target=volume.slow, args=(disk, 2))
    slow.start()
    longest_s = 0.0
    while slow.is_alive():
        began_s = time.monotonic()
        (disk / "file").write_bytes(b"x")
        longest_s = max(longest_s, time.monotonic() - began_s)
    slow.join()
    assert longest_s > 0.5
    (disk / "file").write_bytes(b"y")


def test_a_folder_of_the_machines_own_disk_is_never_filled_or_held_up(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a volume of its own"), volume.filled(tmp_path):
        pass
    with pytest.raises(AssertionError, match="a volume of its own"):
        volume.slow(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
