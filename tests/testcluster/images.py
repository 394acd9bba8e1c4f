"""Container images without a registry: built by buildah, kept in an OCI layout in the cache.

buildah's layer cache decides what must be built again, and the id of the resulting image decides whether it
must be exported and sent to nodes again, so nothing here keeps books of its own. The base image stands in
for ``python:3.11-slim-bookworm``: a small Debian with Python, made by mmdebstrap.

Processes: mmdebstrap and buildah, to their ends. Threads: the progress one of ``parts``.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster import cache, parts, wheelhouse
from tests.testcluster.parts import progress
from tests.testcluster.shell import run
from tests.testcluster.versions import DEBIAN_SUITE

#: Layers in zstd are unpacked in a third of the time that those in gzip take.
_COMPRESSION = "zstd"
#: Part of the names of exported images, as earlier ones may be in another compression.
_EXPORTED = f"-{_COMPRESSION}"
_PACKAGES = ("python3", "python3-pip", "python3-venv", "ca-certificates")
_DOMAIN = "testcluster.gracepoint.dev"
PAUSE = f"{_DOMAIN}/pause:{parts.part('pause').version}"
COREDNS = f"{_DOMAIN}/coredns:{parts.part('coredns').version}"
JOBSET = f"{_DOMAIN}/jobset:{parts.part('jobset').version}"
BASE = f"{_DOMAIN}/python:{DEBIAN_SUITE}"
"""Image with Python 3 on Debian; also good for pods that only need a shell."""


@dataclass(frozen=True)
class Image:
    """A built image in the OCI layout of the cache.

    Attributes:
        name: What pods call it.
        manifest: Digest of its manifest, such as ``sha256:...``: two images with the same one are the same.
    """

    name: str
    manifest: str

    def blobs(self) -> list[str]:
        """Digests of all that it consists of."""
        content = json.loads(blob(self.manifest).read_text())
        return [self.manifest, content["config"]["digest"], *(layer["digest"] for layer in content["layers"])]

    def index(self) -> str:
        """An OCI index that names this image alone, for containerd."""
        entry = {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": self.manifest,
            "size": blob(self.manifest).stat().st_size,
            "annotations": {"io.containerd.image.name": self.name},
        }
        return json.dumps({"schemaVersion": 2, "manifests": [entry]})

    def to_json(self) -> str:
        """As text, for a note."""
        return json.dumps({"name": self.name, "manifest": self.manifest})

    @classmethod
    def from_json(cls, text: str) -> Image:
        """From such a text."""
        data = json.loads(text)
        return cls(data["name"], data["manifest"])


def layout() -> Path:
    """The OCI layout that holds all images; layers that images share are there once."""
    return cache.folder("oci")


def blob(digest: str) -> Path:
    """The file of a blob in the layout."""
    return layout() / "blobs" / digest.replace(":", "/", 1)


def canonical(tag: str) -> str:
    """The full name that a container runtime understands by a tag: with a registry, and with a version."""
    first, slash, _ = tag.partition("/")
    if not slash:
        tag = f"docker.io/library/{tag}"
    elif "." not in first and ":" not in first and first != "localhost":
        tag = f"docker.io/{tag}"
    return tag if ":" in tag.rsplit("/", 1)[1] else f"{tag}:latest"


def system_images() -> list[Image]:
    """The images that a cluster itself needs, built if need be."""
    return [
        of_program(PAUSE, "pause"),
        of_program(COREDNS, "coredns"),
        of_program(JOBSET, "jobset", entrypoint="/manager"),
        base(),
    ]


def base() -> Image:
    """The base image with Python, made if need be."""
    key = cache.digest(DEBIAN_SUITE, *_PACKAGES, platform.machine())
    tree = cache.folder("base") / f"{DEBIAN_SUITE}-{key}.tar"
    cache.once(tree, _bootstrap)
    text = f'FROM scratch\nADD {tree.name} /\nENV LANG=C.UTF-8\nCMD ["python3"]\n'
    return _build_text(BASE, text, tree)


def _bootstrap(tree: Path) -> None:
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_PACKAGES)}"]
    # mmdebstrap copies these from this machine
    argv += ['--customize-hook=rm -f "$1/etc/apt/sources.list" "$1/etc/resolv.conf" "$1/etc/hostname"']
    with progress(f"making the base image (Debian {DEBIAN_SUITE} with Python, once)"):
        run([*argv, DEBIAN_SUITE, tree], timeout_s=1200, env={"TMPDIR": str(cache.folder("tmp"))})


def build(
    tag: str,
    dockerfile: Path,
    context: Path,
    build_args: Mapping[str, str] | None = None,
    *,
    extras: Sequence[str] = (),
    requirements: Sequence[str] = (),
) -> Image:
    """Build a Dockerfile; see ``Cluster.build_image``."""
    wanted = list(requirements)
    if extras:
        wanted += wheelhouse.requirements_of(context / "pyproject.toml", extras)
    options = wheelhouse.prepare(wanted) if wanted else []
    arguments = {"BASE": base().name, **(build_args or {})}
    for name, value in arguments.items():
        options += ["--build-arg", f"{name}={value}"]
    return build_context(canonical(tag), dockerfile, context, options)


def of_program(name: str, program: str, entrypoint: str = "") -> Image:
    """An image with one program alone, built if need be."""
    inside = entrypoint or f"/{program}"
    source = parts.program(program)
    return _build_text(
        name, f'FROM scratch\nCOPY {source.name} {inside}\nUSER 65532\nENTRYPOINT ["{inside}"]\n', source
    )


def _build_text(name: str, text: str, source: Path) -> Image:
    """Build a Dockerfile given as text that copies one file, whose path says its version."""
    key = cache.digest(name, text, str(source))
    context = cache.folder("contexts", key)
    note = context / "image.json"
    with cache.lock(f"context-{key}"):  # it has the file only while the image is built
        if note.exists():
            image = Image.from_json(note.read_text())
            if blob(image.manifest).exists():
                return image
        shutil.copy2(source, context / source.name)
        dockerfile = context / "Dockerfile"
        dockerfile.write_text(text)
        image = build_context(name, dockerfile, context, [])
        note.write_text(image.to_json())
        (context / source.name).unlink()
        return image


def build_context(name: str, dockerfile: Path, context: Path, options: Sequence[str]) -> Image:
    """Build an image from a folder, with ``buildah``."""
    with cache.lock("images"):
        id_file = cache.folder("tmp") / f"{os.getpid()}.iid"
        argv: list[str | Path] = ["bud", "--layers", "--tag", name, "--iidfile", id_file, "--file", dockerfile]
        with progress(f"building image {name}"):
            _buildah(*argv, *options, context)
        image_id = id_file.read_text().strip().removeprefix("sha256:")
        id_file.unlink()
        manifest = _manifest_of(image_id)
        if not manifest:
            with progress(f"exporting image {name}"):
                # An OCI layout gets compressed layers whatever is asked for. Every node has to read them.
                level = (f"--compression-format={_COMPRESSION}", "--compression-level=1")
                _buildah("push", "--quiet", *level, image_id, f"oci:{layout()}:{image_id}{_EXPORTED}")
            manifest = _manifest_of(image_id)
    return Image(name, manifest)


def _manifest_of(image_id: str) -> str:
    """Digest of the manifest of an image that was exported to the layout; empty if there is none."""
    index = layout() / "index.json"
    if not index.exists():
        return ""
    for entry in json.loads(index.read_text())["manifests"]:
        if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == f"{image_id}{_EXPORTED}":
            return str(entry["digest"])
    return ""


def _buildah(*args: str | Path) -> str:
    storage = cache.folder("buildah")
    options: list[str | Path] = [
        "--root",
        storage / "root",
        "--runroot",
        storage / "run",
        "--storage-driver",
        "overlay",
    ]
    env = {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(cache.folder("tmp"))}
    return run(["buildah", *options, *args], timeout_s=1800, env=env).stdout
