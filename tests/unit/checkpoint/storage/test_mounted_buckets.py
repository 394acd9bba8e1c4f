"""A bucket that is mounted over a real server is refused at the start, whatever the settings of the mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage import posix
from gracepoint.errors import CheckpointError
from tests.object_stores.servers import Bucket, Server
from tests.testcluster import parts
from tests.testcluster.shell import log_tail, wait_until
from tests.unit.checkpoint.fakes.engine import engine

pytestmark = pytest.mark.mounts
MOUNTED_S = 60.0
ENDED_S = 30.0


@contextlib.contextmanager
def mounted(server: Server, bucket: str, folder: Path, *flags: str) -> Iterator[Path]:
    """Mounts a flat bucket of ``server`` with Cloud Storage FUSE."""
    # gcsfuse asks which kind of bucket this is by gRPC, which the server does not speak: the bucket is flat.
    where = ["--anonymous-access", f"--custom-endpoint={server.url}/storage/v1/", "--enable-hns=false"]
    argv = [str(parts.program("gcsfuse")), "--foreground", "--implicit-dirs", *where, *flags, bucket]
    with serving(argv, folder, {}) as place:
        yield place


@contextlib.contextmanager
def mounted_by_s3fs(server: Server, bucket: Bucket, folder: Path) -> Iterator[Path]:
    """Mounts a bucket of ``server`` with s3fs."""
    if shutil.which("s3fs") is None:
        pytest.skip("no s3fs; run: make mount-tools")
    environment = server.environment()
    keys = {"AWSACCESSKEYID": "AWS_ACCESS_KEY_ID", "AWSSECRETACCESSKEY": "AWS_SECRET_ACCESS_KEY"}
    options = f"url={server.url},use_path_request_style,endpoint={environment['AWS_REGION']}"
    argv = ["s3fs", "-f", "-o", options, bucket.name]
    with serving(argv, folder, {name: environment[theirs] for name, theirs in keys.items()}) as place:
        yield place


@contextlib.contextmanager
def serving(argv: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Runs a program that serves a mount until it is killed. The place of the mount is added to its arguments."""
    place, log = folder / "mount", folder / "mount.log"
    place.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, str(place)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        wait_until(
            f"{argv[0]} to mount the bucket",
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
    monkeypatch.setattr(posix, "_BUCKETS", {})
    with mounted(gcs, gcs.bucket().name, tmp_path) as mount:
        checkpointer = engine(mount / "run")
        with pytest.raises(CheckpointError, match=r"does not rename a folder .* use its gs:// or s3:// URI"):
            checkpointer.access.claim("job-0", timeout_s=60)
        checkpointer.close(30)


def test_a_mounted_bucket_has_no_links_but_exclusive_creation(gcs: Server, tmp_path: Path) -> None:
    """The rows of the table of file systems in docs/guarantees.md."""
    with mounted(gcs, gcs.bucket().name, tmp_path) as mount:
        (mount / "file").write_bytes(b"x")
        with pytest.raises(OSError):  # noqa: PT011  whatever the kernel makes of it
            os.link(mount / "file", mount / "link")
        (mount / "made").touch(exist_ok=False)
        with pytest.raises(FileExistsError):
            (mount / "made").touch(exist_ok=False)
        assert (mount / "file").read_bytes() == b"x"


def test_a_bucket_that_s3fs_mounts_is_refused_at_the_start(s3: Server, tmp_path: Path) -> None:
    """s3fs does not tell the bucket's name, so that the error cannot name its URI."""
    with mounted_by_s3fs(s3, s3.bucket(), tmp_path) as mount:
        checkpointer = engine(mount / "run")
        with pytest.raises(CheckpointError, match=r"is a bucket, mounted as fuse\.s3fs\. .* Use its s3:// URI"):
            checkpointer.access.claim("job-0", timeout_s=60)
        checkpointer.close(30)
