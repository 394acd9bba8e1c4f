"""File systems without hard links hold checkpoints; those that cannot commit are refused before the first save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage import posix
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointError
from tests import limited_mount
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save, small_state

needs_fuse = pytest.mark.skipif(bool(limited_mount.why_not()), reason=limited_mount.why_not())


@pytest.mark.integration
@needs_fuse
def test_checkpoints_need_no_hard_links(tmp_path: Path) -> None:
    with limited_mount.mounted(tmp_path, "links") as mount:
        (mount / "file").touch()
        with pytest.raises(OSError):  # noqa: PT011  whatever the kernel makes of it
            os.link(mount / "file", mount / "link")
        root = mount / "run"
        checkpointer = engine(root)
        checkpointer.access.claim("job-0", timeout_s=30)
        for step in (1, 2):
            save(checkpointer, step, small_state(step))
        checkpointer.close(30)
        restored = restore(root, small_state())
        assert restored is not None
        assert_same(restored.state, small_state(2))


@pytest.mark.integration
@needs_fuse
@pytest.mark.parametrize(
    ("subtype", "said"),
    [
        pytest.param("gcsfuse", r"is the bucket my-bucket, .* Use gs://my-bucket/\.\.\. in place", id="a known bucket"),
        pytest.param("other", "does not rename a folder .* use its gs:// or s3:// URI", id="no renames of folders"),
    ],
)
def test_mounts_that_cannot_commit_are_refused_at_the_start(tmp_path: Path, subtype: str, said: str) -> None:
    with limited_mount.mounted(tmp_path, "links", "renames", subtype=subtype, source="my-bucket") as mount:
        checkpointer = engine(mount / "run")
        with pytest.raises(CheckpointError, match=said):
            checkpointer.access.claim("job-0", timeout_s=30)
        checkpointer.close(30)
        assert list((mount / "run").iterdir()) == []


def test_an_ordinary_folder_is_usable_and_stays_empty(tmp_path: Path) -> None:
    storage_path(tmp_path).check_usable()
    assert list(tmp_path.iterdir()) == []


def test_the_innermost_and_latest_mount_counts(tmp_path: Path) -> None:
    told = tmp_path / "mountinfo"
    inner = str(tmp_path).replace("-", "\\055")
    told.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:1 / {inner} rw - nfs4 server:/x rw\n"
        f"3 2 0:2 / {inner} rw,nosuid shared:1 - fuse.gcsfuse my-bucket rw\n"
        f"4 1 0:3 / {inner}x rw - tmpfs tmpfs rw\n"
    )
    assert posix.mounted_at(str(tmp_path / "run"), told) == ("fuse.gcsfuse", "my-bucket")
    assert posix.mounted_at("/", told) == ("ext4", "/dev/a")
    assert posix.mounted_at("/", tmp_path / "absent") == ("", "")
