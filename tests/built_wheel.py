"""The project's wheel, built from a copy of the sources. Starts one process at a time and waits for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What a wheel is made of.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "sidecar", "operator")


def build(folder: Path) -> Path:
    """Builds the wheel from a copy of the sources, which no earlier build has touched."""
    source, out = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}  # a release takes the time of its commit
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = out.iterdir()
    return wheel
