"""Builds what a release publishes: ``python -m release``, by ``make release``.

A release is made of a commit, and never of files beside it: wheel, sdist, the contexts of both images, the chart, a
list of what the operator's image contains, the plugin for krew, and the checksums of all. Made again, each file has the
same bytes.

``python -m release version`` writes pyproject's version where it is repeated; ``python -m release sbom`` writes the
list alone. Processes: git, build, cyclonedx-py and helm, one at a time, each to its end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from release import krew
from release.krew import pack
from tests.chart.helm import helm_program
from tests.testcluster.api import ClusterError

ROOT = Path(__file__).parents[1]
SUMS = "SHA256SUMS"
#: The Dockerfile of each image. What it copies is all that the image's context has.
IMAGES = {"gracepoint-operator": "operator/Dockerfile", "gracepoint-transformer": "examples/transformer/Dockerfile"}
#: Where pyproject's version is repeated, for those who cannot read pyproject.toml: each pattern matches one line.
REPEATED = {
    "sidecar/gracepoint/version.py": (r'^(__version__ = )".*"$',),
    "charts/gracepoint/Chart.yaml": (r"^(version: ).*$", r"^(appVersion: ).*$"),
}
_TIMEOUT_S = 300


class ReleaseError(Exception):
    """A release cannot be made; the message says what was found and what was expected."""


def version_of(root: Path) -> str:
    """The one source of the version: pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def write_version(root: Path) -> None:
    """Writes the version where it is repeated."""
    version = version_of(root)
    for name, patterns in REPEATED.items():
        for pattern in patterns:
            quote = '"' if name.endswith(".py") else ""
            _replace(root / name, pattern, rf"\g<1>{quote}{version}{quote}")


def write_release(folder: Path, *, registry: str = "", digest: str = "", tag: str = "", uri: str = "") -> str:
    """Writes all files of the release of the present commit. Returns its version.

    Args:
        folder: Gets the files. An earlier release in it is deleted.
        registry: Where images are published, such as ``registry.example.com/team``: the chart's default.
        digest: Of the operator's image there, ``sha256:...``: the chart's default, in place of the version as a tag.
        tag: The tag of the commit, if it has one.
        uri: Where the files will be, an https folder, for krew's manifest. Empty: without that.

    Raises:
        ReleaseError: Something is not as a release needs it.
    """
    if digest and not (registry and re.fullmatch(r"sha256:[0-9a-f]{64}", digest)):
        raise ReleaseError(
            f"found digest {digest!r} in registry {registry!r}, expected sha256:<64 digits> in a registry"
        )
    if uri and not (uri.startswith("https://") and uri.endswith("/")):
        raise ReleaseError(f"found URI {uri!r}, expected an https folder: https://.../")
    if folder.exists() and any(folder.iterdir()) and not (folder / SUMS).exists():
        raise ReleaseError(f"found other files in {folder}, expected an empty folder or an earlier release")
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "source", Path(scratch) / "made"
        made.mkdir()
        commit_time = _take_commit(source)
        version = version_of(source)
        if tag and tag != f"v{version}":
            raise ReleaseError(f"found tag {tag} on a commit of version {version}, expected v{version}")
        write_version(source)
        for image, dockerfile in IMAGES.items():  # before a build leaves something there
            _write_context(made / f"{image}-{version}-context.tar.gz", source, dockerfile, commit_time)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_time)}
        _write_chart(made, source, registry, digest, environment)
        _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", made, source], environment)
        write_sbom(made / f"gracepoint-operator-{version}.cdx.json", source)
        for archive in (made / f"gracepoint-{version}.tar.gz", made / f"gracepoint-{version}.tgz"):
            _settle(archive, commit_time)
        plugin = krew.write_archive(made / f"gracepoint-{version}-py3-none-any.whl", source)
        if uri:
            krew.write_manifest(plugin, uri)
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(made.iterdir())]
        (made / SUMS).write_text("".join(sums))
        shutil.rmtree(folder, ignore_errors=True)  # nothing is lost if something above fails
        shutil.copytree(made, folder)
    return version


def write_sbom(path: Path, root: Path) -> None:
    """Writes a CycloneDX list of what the operator's image contains beside its base."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("cyclonedx-py")
    options = [f"--pyproject={root}/pyproject.toml", "--output-reproducible", "--of=JSON", f"--output-file={path}"]
    _run([program, "requirements", *options, root / "operator" / "requirements.txt"])


def commands(folder: Path, version: str, registry: str) -> str:
    """What publishes the files of a release, in the order in which it must happen."""
    place = registry or "$REGISTRY"
    lines = []
    for image, dockerfile in IMAGES.items():
        named, context = f"{place}/{image}:{version}", f"{folder}/{image}-{version}-context.tar.gz"
        lines.append(f"docker build --file {dockerfile} --tag {named} - < {context} && docker push {named}")
    lines += [
        "# with the digest of the operator's image, for the chart:",
        f"make release REGISTRY={place} DIGEST=sha256:...",
        f"helm push {folder}/gracepoint-{version}.tgz oci://{place}/charts",
        "# both images and the chart, each by the digest that its push has printed:",
        f"cosign sign {place}/NAME@sha256:...",
        f"python -m twine upload {folder}/gracepoint-{version}-py3-none-any.whl {folder}/gracepoint-{version}.tar.gz",
    ]
    return "\n".join(f"    {line}" for line in lines)


def _take_commit(target: Path) -> int:
    """Copies the files of the present commit. Returns the commit's time."""
    if changed := _run(["git", "status", "--porcelain"]).splitlines():
        print(f"a release is a commit: {len(changed)} changed files are not in it", file=sys.stderr)
    archive = target.with_suffix(".tar")
    # Modes as they are in git, whatever the user's umask.
    _run(["git", "-c", "tar.umask=0022", "archive", "--format=tar", f"--output={archive}", "HEAD"])
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return int(_run(["git", "log", "-1", "--format=%ct"]))


def _write_context(path: Path, source: Path, dockerfile: str, time: int) -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (source / dockerfile).read_text(), re.M)
    places = [source / name for name in (dockerfile, *" ".join(copied).split())]
    files = {file for place in places for file in (place, *place.rglob("*")) if file.is_file()}
    path.write_bytes(pack(_entry(file, str(file.relative_to(source)), time) for file in sorted(files)))


def _entry(file: Path, name: str, time: int) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = file.stat().st_size, time, file.stat().st_mode & 0o755
    return entry, file.read_bytes()


def _write_chart(folder: Path, source: Path, registry: str, digest: str, environment: dict[str, str]) -> None:
    chart = source / "charts" / "gracepoint"
    for key, value in (("registry", registry), ("digest", digest)):
        _replace(chart / "values.yaml", rf'^(  {key}: )""$', rf'\g<1>"{value}"')
    try:
        helm = helm_program()
    except ClusterError as error:
        raise ReleaseError(f"no helm: HELM is not set, none is on the PATH, and {error}") from error
    _run([helm, "package", chart, "--destination", folder], environment)


def _replace(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, file.read_text(), flags=re.M)
    if count != 1:
        raise ReleaseError(f"found {count} lines like {pattern} in {file}, expected one")
    file.write_text(text)


def _settle(archive: Path, time: int) -> None:
    """Packs an archive again, with one time and no user in it: neither setuptools nor helm leave these out."""
    entries = []
    with tarfile.open(archive) as tar:
        for packed in tar:
            entry = tarfile.TarInfo(packed.name)
            entry.type, entry.size, entry.mtime, entry.mode = packed.type, packed.size, time, packed.mode & 0o755
            content = tar.extractfile(packed)
            entries.append((entry, content.read() if content else b""))
    archive.write_bytes(pack(entries))


def _run(argv: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            umask=0o022,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise ReleaseError(f"{' '.join(words)}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["release", "version", "sbom"], default="release")
    parser.add_argument("--folder", type=Path, default=Path("build/release"), help="gets the files (%(default)s)")
    parser.add_argument("--registry", default="", help="where images are published: the chart's default")
    parser.add_argument("--digest", default="", help="of the operator's image there: the chart's default")
    parser.add_argument("--tag", default="", help="of the commit; v and the version is expected")
    parser.add_argument("--uri", default="", help="the https folder of the files, for the manifest of krew")
    given = parser.parse_args()
    try:
        if given.command == "version":
            write_version(ROOT)
        elif given.command == "sbom":
            write_sbom(ROOT / "build" / "operator-sbom.json", ROOT)
        else:
            names = {"registry": given.registry, "digest": given.digest, "tag": given.tag, "uri": given.uri}
            version = write_release(ROOT / given.folder, **names)
            print((ROOT / given.folder / SUMS).read_text())
            print(
                f"Publish version {version} (release/README.md):\n\n{commands(given.folder, version, given.registry)}"
            )
    except ReleaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
