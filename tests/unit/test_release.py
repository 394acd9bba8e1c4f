"""A release is the same each time it is made, and what it has works. Each extra brings what it needs alone."""

from __future__ import annotations

import email
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from release import krew
from release.__main__ import IMAGES, ROOT, SUMS, ReleaseError, commands, write_release
from tests.built_wheel import build
from tests.chart.helm import helm_program
from tests.testcluster.api import ClusterError

pytestmark = pytest.mark.integration

DIGEST = f"sha256:{'5e' * 32}"
URI = "https://releases.example/0.2/"
OF_THE_OPERATOR = {"kopf", "kubernetes", "pydantic", "aiohttp", "prometheus-client", "cryptography"}
NOT_OF_GOOGLE = OF_THE_OPERATOR - {"cryptography"}
OF_THE_COMMAND_LINE = {"typer", "rich", "vl-convert-python"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("first"))


def test_a_wheel_is_the_same_each_time_it_is_built(wheel: Path, tmp_path: Path) -> None:
    again = build(tmp_path)
    assert again.name == wheel.name
    assert hashlib.sha256(again.read_bytes()).hexdigest() == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_wheel_contains_the_packages_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {"gracepoint", "gracepoint_operator", "gracepoint_cli"}


def test_a_wheel_names_what_users_need_and_nothing_of_developers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        extras = email.message_from_bytes(archive.read(name)).get_all("Provides-Extra")
    assert extras == ["jax", "gcs", "s3", "operator", "cli"]


def test_a_wheel_runs_where_nothing_else_is_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gracepoint; print(gracepoint.__file__)"
    argv = [sys.executable, "-S", "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(str(tmp_path))
    # The console scripts are there with any extra, and say what they lack.
    code = code.replace(
        "import gracepoint; print(gracepoint.__file__)", "from gracepoint_cli.__main__ import main; main()"
    )
    done = subprocess.run([*argv[:-1], code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "gracepoint[cli]" in done.stderr) == (3, True), done.stderr


def brought(wheel: Path, *extras: str) -> set[str]:
    """Names of all distributions that the wheel with these extras brings, as the installed ones require each other."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        own = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    seen: set[tuple[str, str]] = set()
    waiting = [("gracepoint", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            requires = own if name == "gracepoint" else metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                normal = re.sub(r"[-_.]+", "-", requirement.name).lower()
                waiting += [(normal, wanted) for wanted in ("", *requirement.extras)]
    return {name for name, _ in seen} - {"gracepoint"}


@pytest.mark.parametrize(
    ("extras", "has", "lacks"),
    [
        pytest.param([], set(), OF_THE_OPERATOR | OF_THE_COMMAND_LINE | {"jax", "numpy"}, id="library alone"),
        pytest.param(["jax"], {"jax", "tensorstore"}, OF_THE_OPERATOR | OF_THE_COMMAND_LINE, id="training image"),
        # Google's credentials bring cryptography.
        pytest.param(["jax", "gcs", "s3"], {"botocore"}, NOT_OF_GOOGLE | OF_THE_COMMAND_LINE, id="with buckets"),
        pytest.param(["operator"], OF_THE_OPERATOR, OF_THE_COMMAND_LINE | {"jax", "numpy"}, id="operator's image"),
        pytest.param(["cli"], OF_THE_OPERATOR | OF_THE_COMMAND_LINE, {"jax", "tensorstore"}, id="command line"),
    ],
)
def test_an_extra_brings_what_it_needs_and_nothing_else(
    wheel: Path, extras: list[str], has: set[str], lacks: set[str]
) -> None:
    found = brought(wheel, *extras)
    assert has <= found
    assert not found & lacks


def test_the_plugin_of_krew_is_the_wheel_with_a_launcher(wheel: Path, tmp_path: Path) -> None:
    archive = krew.write_archive(Path(shutil.copy(wheel, tmp_path)), ROOT)
    manifest = yaml.safe_load(krew.write_manifest(archive, URI).read_text())
    (platform,) = manifest["spec"]["platforms"]
    assert platform["uri"] == f"{URI}{archive.name}"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert manifest["spec"]["version"] == f"v{metadata.version('gracepoint')}"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "store", filter="data")
    plugin = tmp_path / "bin" / platform["bin"]
    plugin.parent.mkdir()
    plugin.symlink_to(tmp_path / "store" / platform["bin"])
    assert (tmp_path / "store" / wheel.name).read_bytes() == wheel.read_bytes()
    # The environment is there: the launcher runs it, under the name by which kubectl calls it.
    python = tmp_path / "store" / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shown = subprocess.run([plugin, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "kubectl gracepoint" in shown


def test_the_plugin_of_krew_says_which_python_it_needs(tmp_path: Path) -> None:
    plugin = tmp_path / krew.LAUNCHER.name
    plugin.write_bytes((ROOT / krew.LAUNCHER).read_bytes())
    plugin.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"}
    done = subprocess.run([plugin], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Python 3.11 or newer" in done.stderr) == (3, True), done


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the present commit, for a registry, with the digest of an image."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    try:
        helm_program()
    except ClusterError as error:
        pytest.skip(f"no helm: HELM is not set, none is on the PATH, and {error}")
    folder = tmp_path_factory.mktemp("release")
    write_release(folder, registry="registry.example.com/team", digest=DIGEST, uri=URI)
    return folder


def sums(folder: Path) -> dict[str, str]:
    lines = [line.split("  ") for line in (folder / SUMS).read_text().splitlines()]
    return {name: digest for digest, name in lines}


def published(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_a_release_has_every_file_that_is_published_with_its_checksum(release: Path) -> None:
    version = metadata.version("gracepoint")
    images = [f"{image}-{version}-context.tar.gz" for image in IMAGES]
    others = [f"gracepoint-operator-{version}.cdx.json", f"gracepoint-{version}.tgz"]
    package = [f"gracepoint-{version}-py3-none-any.whl", f"gracepoint-{version}.tar.gz"]
    plugin = [f"kubectl-gracepoint-{version}.tar.gz", "gracepoint.yaml"]
    assert sorted(sums(release)) == sorted([*images, *others, *package, *plugin])
    for name, digest in sums(release).items():
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest
    told = commands(release, version, "registry.example.com/team")
    assert [name for name in (*images, others[1], *package) if name not in told] == []


def test_a_release_is_the_same_each_time_it_is_made_whatever_lies_beside_the_commit(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], timeout=60, check=True)
    for name in ("constraints.txt", "LICENSE", str(krew.LAUNCHER), "operator/requirements.txt", "README.md"):
        (clone / name).write_text("not in the commit\n")
    (clone / "sidecar" / "gracepoint" / "mine.py").touch()
    monkeypatch.setattr("release.__main__.ROOT", clone)
    write_release(tmp_path / "again", registry="registry.example.com/team", digest=DIGEST, uri=URI)
    assert sums(tmp_path / "again") == sums(release)


def test_the_wheel_of_a_release_says_its_version_in_a_new_environment(release: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], timeout=60, check=True)
    wheel = published(release, "*.whl")
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-index", str(wheel)]
    subprocess.run(pip, timeout=110, check=True)
    code = "import gracepoint; print(gracepoint.__version__, gracepoint.__file__)"
    said = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split()[0] == wheel.name.split("-")[1]
    assert said.split()[1].startswith(str(tmp_path))


def test_the_chart_of_a_release_is_without_faults_and_names_the_image_by_its_digest(release: Path) -> None:
    chart = published(release, "*.tgz")
    subprocess.run([helm_program(), "lint", "--strict", chart], capture_output=True, timeout=60, check=True)
    argv = [helm_program(), "template", str(chart), "--set=admission.token=0123456789abcdef", "--kube-version=1.30.0"]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    images = {line.split()[-1].strip('"') for line in shown.splitlines() if line.strip().startswith("image: ")}
    assert images == {f"registry.example.com/team/gracepoint-operator@{DIGEST}"}


@pytest.mark.parametrize("image", IMAGES)
def test_the_context_of_an_image_has_all_that_its_dockerfile_copies_and_nothing_else(
    release: Path, image: str, tmp_path: Path
) -> None:
    with tarfile.open(published(release, f"{image}-*-context.tar.gz")) as tar:
        tar.extractall(tmp_path, filter="data")
    dockerfile = (tmp_path / IMAGES[image]).read_text()
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", dockerfile, re.M)).split()
    assert [name for name in copied if not (tmp_path / name).exists()] == []
    tops = {name.partition("/")[0] for name in (*copied, IMAGES[image])}
    assert {path.name for path in tmp_path.iterdir()} == tops
    assert [
        path for path in tmp_path.rglob("*") if path.name in ("__pycache__", "tests") or "egg-info" in path.name
    ] == []


def test_a_release_is_refused_where_its_names_do_not_agree(release: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"found tag v0\.0\.1 on a commit of version"):
        write_release(tmp_path / "release", tag="v0.0.1")
    with pytest.raises(ReleaseError, match="expected sha256"):
        write_release(tmp_path / "release", digest=DIGEST)
    with pytest.raises(ReleaseError, match="expected an https folder"):
        write_release(tmp_path / "release", uri=URI.removesuffix("/"))
    (tmp_path / "mine").touch()
    with pytest.raises(ReleaseError, match="found other files"):
        write_release(tmp_path)
