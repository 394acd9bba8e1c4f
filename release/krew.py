"""Builds the plugin for krew: ``python -m release.krew WHEEL URI`` writes an archive and its manifest, gracepoint.yaml.

The archive holds the wheel, the versions that were tested, and a launcher, which installs the wheel into an environment
of its own at the first call. So it is the same on each processor and system that krew and Python know. The manifest has
the archive's SHA-256 (https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LAUNCHER = Path(__file__).with_name("kubectl-gracepoint")


def write(wheel: Path, uri: str, folder: Path) -> Path:
    """Writes the archive, which is the same each time, and the manifest. Returns the manifest.

    Args:
        wheel: The release's wheel.
        uri: Where the archive will be: a folder, ending with a slash.
        folder: Gets both files.

    Raises:
        ValueError: ``uri`` is no https folder, or the file is no wheel of this project.
    """
    name, _, rest = wheel.name.partition("-")
    version = rest.partition("-")[0]
    if (name, wheel.suffix) != ("gracepoint", ".whl") or not version:
        raise ValueError(f"found {wheel.name}, expected the project's wheel: gracepoint-VERSION-py3-none-any.whl")
    if not (uri.startswith("https://") and uri.endswith("/")):
        raise ValueError(f"found {uri}, expected the folder of the archive: https://.../")
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"kubectl-gracepoint-{version}.tar.gz"
    others = (wheel, ROOT / "constraints.txt", ROOT / "LICENSE")
    archive.write_bytes(pack([_entry(LAUNCHER, 0o755), *(_entry(path, 0o644) for path in others)]))
    manifest = folder / "gracepoint.yaml"
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m release.krew", description=__doc__)
    parser.add_argument("wheel", type=Path, help="the release's wheel")
    parser.add_argument("uri", help="the https folder in which the archive will be, ending with a slash")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "krew")
    given = parser.parse_args()
    print(write(given.wheel, given.uri, given.folder))
