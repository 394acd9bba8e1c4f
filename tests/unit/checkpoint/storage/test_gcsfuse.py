"""A flat bucket that Cloud Storage FUSE mounts over a real server is refused at the start, whatever its settings."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage import mounts
from gracepoint.errors import CheckpointError
from tests.object_stores.servers import Server
from tests.testcluster import parts
from tests.testcluster.shell import log_tail, wait_until
from tests.unit.checkpoint.fakes.engine import engine

pytestmark = pytest.mark.gcsfuse
MOUNTED_S = 60.0
ENDED_S = 30.0


@contextlib.contextmanager
def mounted(server: Server, bucket: str, folder: Path, *flags: str) -> Iterator[Path]:
    """Mounts a bucket of ``server``."""
    place, log = folder / "mount", folder / "gcsfuse.log"
    place.mkdir()
    # gcsfuse asks which kind of bucket this is by gRPC, which the server does not speak: the bucket is flat.
    where = ["--anonymous-access", f"--custom-endpoint={server.url}/storage/v1/", "--enable-hns=false"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [parts.program("gcsfuse"), "--foreground", "--implicit-dirs", *where, *flags, bucket, str(place)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            f"gcsfuse to mount {bucket}",
            lambda: process.poll() is not None or os.path.ismount(place),
            timeout_s=MOUNTED_S,
            every_s=0.05,
            hint=lambda: log_tail(log),
        )
        assert process.poll() is None, log_tail(log)
        yield place
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(place)], check=False, timeout=ENDED_S)
        process.terminate()
        process.wait(ENDED_S)


@pytest.mark.parametrize("flags", [[], ["--rename-dir-limit=1000"]], ids=["as it is", "renames folders"])
def test_a_mounted_bucket_is_refused_at_the_start(gcs: Server, tmp_path: Path, flags: list[str]) -> None:
    bucket = gcs.bucket()
    with mounted(gcs, bucket.name, tmp_path, *flags) as mount:
        checkpointer = engine(mount / "run")
        with pytest.raises(CheckpointError, match=rf"Use gs://{bucket.name}/\.\.\. in place of the mount"):
            checkpointer.access.claim("job-0", timeout_s=60)
        checkpointer.close(30)


def test_a_mounted_bucket_is_refused_if_its_kind_is_hidden(
    gcs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GKE's driver mounts it as plain ``fuse``: then it is known by the rename that it refuses."""
    monkeypatch.setattr(mounts, "_BUCKETS", {})
    with mounted(gcs, gcs.bucket().name, tmp_path) as mount:
        checkpointer = engine(mount / "run")
        with pytest.raises(CheckpointError, match=r"does not rename a folder .* use its gs:// or s3:// URI"):
            checkpointer.access.claim("job-0", timeout_s=60)
        checkpointer.close(30)


def test_a_mounted_bucket_has_no_links_but_exclusive_creation(gcs: Server, tmp_path: Path) -> None:
    """The rows of the table of file systems in docs/durability.md."""
    with mounted(gcs, gcs.bucket().name, tmp_path) as mount:
        (mount / "file").write_bytes(b"x")
        with pytest.raises(OSError):  # noqa: PT011  whatever the kernel makes of it
            os.link(mount / "file", mount / "link")
        (mount / "made").touch(exist_ok=False)
        with pytest.raises(FileExistsError):
            (mount / "made").touch(exist_ok=False)
        assert (mount / "file").read_bytes() == b"x"
