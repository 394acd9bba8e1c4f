"""A release: the wheel is the same each time it is built, and each extra brings what it needs and nothing else."""

from __future__ import annotations

import email
import hashlib
import re
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
from tests.built_wheel import build

pytestmark = pytest.mark.integration

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
    manifest = yaml.safe_load(krew.write(wheel, "https://releases.example/0.2/", tmp_path).read_text())
    (platform,) = manifest["spec"]["platforms"]
    archive = tmp_path / platform["uri"].removeprefix("https://releases.example/0.2/")
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
    again = krew.write(wheel, "https://releases.example/0.2/", tmp_path / "again").with_name(archive.name)
    assert again.read_bytes() == archive.read_bytes()


def test_the_plugin_of_krew_says_which_python_it_needs(wheel: Path, tmp_path: Path) -> None:
    plugin = tmp_path / krew.LAUNCHER.name
    plugin.write_bytes(krew.LAUNCHER.read_bytes())
    plugin.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"}
    done = subprocess.run([plugin], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Python 3.11 or newer" in done.stderr) == (3, True), done
    with pytest.raises(ValueError, match="expected the folder"):
        krew.write(wheel, "https://releases.example/0.2", tmp_path)
