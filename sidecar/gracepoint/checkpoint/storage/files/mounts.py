"""Checks whether a mounted file system can hold checkpoints: a commit is one rename of a folder.

Linux tells which file system is mounted where. On other systems only the renames are tried. This module has no threads
and no state.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from gracepoint.checkpoint.storage import undeleted

#: Types of mounts that are buckets, with the scheme of their URIs. A folder there is renamed object by object, or not.
_BUCKETS = {
    "fuse.gcsfuse": "gs",
    "fuse.mountpoint-s3": "s3",
    "fuse.s3fs": "s3",
    "fuse.goofys": "s3",
    "fuse.geesefs": "s3",
}
_MOUNTS = Path("/proc/self/mountinfo")


def check_mount(folder: str) -> None:
    """Checks that folders below ``folder``, which exists, can be renamed as a commit needs it.

    Raises:
        OSError: They cannot. The message says what to use instead.
    """
    kind, source = mounted_at(folder)
    if scheme := _BUCKETS.get(kind):
        # Some programs give their own name as the source of the mount.
        tells_bucket = source != kind.removeprefix("fuse.")
        raise OSError(
            errno.ENOTSUP,
            f"{folder} is {f'the bucket {source}' if tells_bucket else 'a bucket'}, mounted as {kind}. A crash in a "
            f"commit there could lose the save, as a folder is not renamed in one step. Use "
            f"{f'{scheme}://{source}/...' if tells_bucket else f'its {scheme}:// URI'} in place of the mount",
        )
    _check_renames(Path(folder))


def mounted_at(folder: str) -> tuple[str, str]:
    """Returns the type and the source of the mount that holds ``folder``. Empty where the system does not tell."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return "", ""
    found, longest = ("", ""), -1
    real = Path(os.path.realpath(folder))
    for line in lines:
        fields, _, rest = line.partition(" - ")
        # Spaces and some other characters are escaped as octal numbers.
        point = fields.split()[4].encode().decode("unicode_escape")
        if real.is_relative_to(point) and len(point) >= longest:  # of two at one point, the later hides the other
            kind, source = rest.split()[:2]
            found, longest = (kind, source), len(point)
    return found


def _check_renames(folder: Path) -> None:
    probe = folder / f".gracepoint-probe.{secrets.token_hex(8)}"
    try:
        (probe / "from").mkdir(parents=True)
        (probe / "from" / "file").write_bytes(b"probe")
        try:
            os.rename(probe / "from", probe / "to")
        except OSError as error:
            raise OSError(
                error.errno,
                f"{folder}: this file system does not rename a folder with a file in it ({error.strerror}), so no "
                "save could be committed. If it is a bucket, use its gs:// or s3:// URI in place of the mount",
            ) from error
    finally:
        with undeleted.telling(probe):
            shutil.rmtree(probe)
