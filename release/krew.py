"""The plugin for krew: an archive, which is the same on each processor and system that krew and Python know.

It holds the wheel, the versions that were tested, and a launcher, which installs the wheel into an environment of its
own at the first call. The manifest, gracepoint.yaml, says where the archive is, and has its SHA-256
(https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import yaml

#: Below the project's root.
LAUNCHER = Path("release/kubectl-gracepoint")


def write_archive(wheel: Path, root: Path) -> Path:
    """Writes the archive beside the wheel, the same each time.

    Args:
        wheel: The release's wheel.
        root: Has everything else: the sources of that wheel.
    """
    version = wheel.name.split("-")[1]
    archive = wheel.with_name(f"kubectl-gracepoint-{version}.tar.gz")
    others = (wheel, root / "constraints.txt", root / "LICENSE")
    archive.write_bytes(pack([_entry(root / LAUNCHER, 0o755), *(_entry(path, 0o644) for path in others)]))
    return archive


def write_manifest(archive: Path, uri: str) -> Path:
    """Writes the manifest beside the archive.

    Args:
        archive: As ``write_archive`` wrote it.
        uri: Where the archive will be: an https folder, ending with a slash.
    """
    version = archive.name.removeprefix("kubectl-gracepoint-").removesuffix(".tar.gz")
    manifest = archive.with_name("gracepoint.yaml")
    manifest.write_text(yaml.safe_dump(_manifest(version, uri + archive.name, archive.read_bytes()), sort_keys=False))
    return manifest


def pack(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Returns a compressed archive of files, the same each time."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for entry, content in entries:
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _entry(path: Path, mode: int) -> tuple[tarfile.TarInfo, bytes]:
    content = path.read_bytes()
    entry = tarfile.TarInfo(path.name)
    entry.size, entry.mode = len(content), mode
    return entry, content


def _manifest(version: str, uri: str, archive: bytes) -> dict[str, object]:
    platform = {
        "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["darwin", "linux"]}]},
        "uri": uri,
        "sha256": hashlib.sha256(archive).hexdigest(),
        "bin": LAUNCHER.name,
        "files": [{"from": "*", "to": "."}],
    }
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "gracepoint"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "Shows and rehearses preemptions of training jobs",
            "description": "Shows what Gracepoint does in a cluster, rehearses preemptions, and checks\n"
            "manifests and installations.\n",
            "caveats": "Needs Python 3.11 or newer with venv. The first call installs it with pip, once.\n",
            "platforms": [platform],
        },
    }
