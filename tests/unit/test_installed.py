"""The wheel as a user installs it, in new virtual environments: what comes along, and that it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from gracepoint import __version__
from release import krew
from tests.built_wheel import ROOT, build

pytestmark = [pytest.mark.installs, pytest.mark.timeout(900)]

#: Of the operator, which a training image must not have.
OPERATOR = {"kopf", "kubernetes", "pydantic", "aiohttp", "prometheus-client"}
COMMAND_LINE = {"typer", "rich", "vl-convert-python"}
LIBRARY = {"jax", "jaxlib", "tensorstore", "numpy"}


class Environment:
    """A new virtual environment with the wheel and one extra. Nothing of this one is seen from there."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        subprocess.run([sys.executable, "-m", "venv", str(folder)], timeout=120, check=True)
        # The versions that were tested; pip's own index and certificates.
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        self.run("-m", "pip", "install", "--quiet", "--no-compile", *constraints, f"{wheel}{extra}", timeout_s=600)

    def run(self, *words: str, timeout_s: float = 120) -> str:
        done = subprocess.run(
            [str(self.folder / "bin" / "python"), *words],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def distributions(self) -> set[str]:
        """Names of what is installed."""
        listed = json.loads(self.run("-m", "pip", "list", "--format=json"))
        return {one["name"].lower().replace("_", "-") for one in listed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_the_library_alone_brings_nothing(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env", wheel, "")
    assert environment.distributions() - {"pip", "setuptools"} == {"gracepoint"}
    assert environment.run("-c", "import gracepoint; print(gracepoint.__version__)").strip() == __version__


def test_a_training_environment_trains_without_kopf_and_kubernetes(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env", wheel, "[jax]")
    installed = environment.distributions()
    assert installed >= LIBRARY
    assert not installed & (OPERATOR | COMMAND_LINE)
    words = ("--steps", "5", "--width", "32", "--layers", "1", "--save-every", "5")
    places = ("--directory", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "output"))
    environment.run(str(ROOT / "examples" / "transformer" / "train.py"), *words, *places)
    environment.run("-m", "gracepoint", "verify", str(tmp_path / "checkpoints"))
    assert (tmp_path / "checkpoints" / "5").is_dir()


def test_the_plugin_of_krew_installs_itself_once(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(krew.write_archive(Path(shutil.copy(wheel, tmp_path)), ROOT)) as tar:
        tar.extractall(tmp_path / "store", filter="data")
    for says in (True, False):
        command = [str(tmp_path / "store" / krew.LAUNCHER.name), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert (done.returncode, __version__ in done.stdout) == (0, True), done
        assert ("once" in done.stderr) is says
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == sorted(
        ["LICENSE", "constraints.txt", "environment", krew.LAUNCHER.name, wheel.name]
    )


def test_the_command_line_comes_without_jax(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env", wheel, "[cli]")
    installed = environment.distributions()
    assert installed >= COMMAND_LINE
    assert not installed & LIBRARY
    script = (environment.folder / "bin" / "gracepoint", "--version")
    assert __version__ in subprocess.run(script, capture_output=True, text=True, timeout=60, check=True).stdout
