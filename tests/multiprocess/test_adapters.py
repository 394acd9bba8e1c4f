"""The examples of other libraries: each is preempted, and goes on from the very step with the very losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import xla

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "adapters"
STEPS, PREEMPT_AT = 24, 7
#: Lines that belong to Gracepoint, beside its import.
LINES = 3
NAMES = ["grain_data", "keras_fit", "linen", "maxtext_shaped", "nnx", "orbax_manager", "worker_processes"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def run(name: str, folder: Path, preempt_at: int) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRACEPOINT_")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "KERAS_BACKEND": "jax",
        "KERAS_HOME": str(folder),
        "XLA_FLAGS": xla.FLAGS,
        "PYTHONPATH": str(EXAMPLES),
    }
    argv = [sys.executable, "-m", "tests.multiprocess.adapter_process", name, str(folder), str(STEPS), str(preempt_at)]
    # A group of its own gets the SIGTERM, as from a launcher.
    return subprocess.run(
        argv,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        start_new_session=True,
        check=False,
    )


def losses(file: Path) -> list[tuple[int, str]]:
    return [(step, loss) for step, loss in map(json.loads, file.read_text().splitlines())]


@pytest.mark.parametrize("name", NAMES)
def test_a_preempted_example_continues_with_the_very_losses(name: str, tmp_path: Path) -> None:
    first = run(name, tmp_path, PREEMPT_AT)
    assert first.returncode == 77, first.stderr[-4000:]
    saved = losses(tmp_path / "run.jsonl")[-1][0]
    assert PREEMPT_AT <= saved < STEPS
    second = run(name, tmp_path, 0)
    assert second.returncode == 0, second.stderr[-4000:]
    run_losses, reference = losses(tmp_path / "run.jsonl"), losses(tmp_path / "reference.jsonl")
    # No step is done twice, none is left out, and each has the loss of a run that nobody disturbed.
    assert run_losses == reference
    assert [step for step, _ in run_losses] == list(range(1, STEPS + 1))


def test_every_example_is_run() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "model") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_few_lines_of_gracepoint(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count("  # +\n") <= LINES
    # Keras's callback has a session of its own. All others close theirs at the end of a run that nobody interrupted.
    unmarked = [line.strip() for line in text.splitlines() if "session." in line and not line.endswith("# +")]
    assert {line for line in unmarked if "self._session" not in line} <= {"session.close()"}


@pytest.mark.parametrize("name", NAMES)
def test_without_gracepoints_lines_an_example_is_whole(name: str) -> None:
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F404,F821,F823",
        "--stdin-filename",
        "x.py",
        "-",
    ]
    done = subprocess.run(ruff, input=without(name), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def without(name: str) -> str:
    """Returns an example as it was before Gracepoint: without its lines, and with those that they replace."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines(keepends=True)
    # Keras's callback stays, and is used no more.
    of_ours = {"session.close()"} | ({"import gracepoint"} if name != "keras_fit" else set())
    kept = [line for line in lines if not line.endswith("# +\n") and line.strip() not in of_ours]
    return "".join(line.replace("# - ", "", 1) for line in kept)


def test_grains_batches_are_the_same_for_any_number_of_processes() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(EXAMPLES)!r})
from grain_data import records, BATCH, RECORDS
def batches(processes, count, state=None):
    parts = [records(process, processes) for process in range(processes)]
    if state is not None:
        for part in parts: part.set_state(state)
    done = [sorted(int(r) for part in parts for r in next(part)) for _ in range(count)]
    states = [part.get_state() for part in parts]
    assert all(state == states[0] for state in states), states
    return done, states[0]
whole, _ = batches(1, RECORDS // BATCH)
assert sorted(r for batch in whole for r in batch) == list(range(RECORDS))  # each once
before, state = batches(2, 5)
for processes in (1, 2, 4, 8):
    after, _ = batches(processes, 3, state)
    assert before + after == whole[:8], processes
print("same")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]
