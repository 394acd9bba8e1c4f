"""The example saves with Orbax in a worker process, and what it saved can be restored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "orbax_in_a_worker" / "train.py"


@pytest.mark.timeout(180)
def test_checkpoints_of_orbax_are_written_by_a_worker(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path, "20"], capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == [f"saved {tmp_path / step}" for step in ("10", "20")]
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "20")
    assert restored["step"] == 20
    np.testing.assert_allclose(restored["w"], 1 - 0.99**20, rtol=1e-5)
