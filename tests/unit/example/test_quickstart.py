"""The program of the quickstart does what the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]

PAGE = Path(__file__).parents[3] / "docs/quickstart.md"
_TIMEOUT_S = 120.0
STEPS = "1_000_000"


def start(program: Path) -> subprocess.Popen[str]:
    """Starts it as on a laptop: with one device, and without the operator's variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GRACEPOINT_", "JAX_", "XLA_"))}
    argv = [sys.executable, str(program)]
    return subprocess.Popen(
        argv, env=env | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_stopped_program_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert found is not None
    assert STEPS in found[1]
    first, text = tmp_path / "first.py", found[1].replace("/tmp/first", str(tmp_path / "steps"))
    first.write_text(text, encoding="utf-8")
    with start(first) as process:
        until_s = time.monotonic() + _TIMEOUT_S
        while not any((tmp_path / "steps").glob("[0-9]*000")) and process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 77, output
    newest = max(int(path.name) for path in (tmp_path / "steps").iterdir() if path.name.isdecimal())
    first.write_text(text.replace(STEPS, str(newest + 10)), encoding="utf-8")
    with start(first) as process:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    assert output.split() == [str(newest + 10), str(float(newest + 10))]
