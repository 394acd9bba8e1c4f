"""The example, preempted by a SIGTERM of one process and started again, against the example undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import records
from gracepoint.wire.names import DEFAULT_SAVED_EXIT_CODE
from tests.multiprocess.launcher import Processes

TRAIN = Path(__file__).parents[2] / "examples" / "transformer" / "train.py"
SCRIPT = """
import os, runpy, signal, sys
import jax
from gracepoint.session.session import Session
from tests.multiprocess.launcher import here

here().initialize_jax()
step = Session.step

def terminated(self, number, state):
    if number == int(os.environ.get("TEST_SIGTERM_AT", "0")) and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    step(self, number, state)

Session.step = terminated
sys.path.insert(0, {folder!r})
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""
STEPS, SIGTERM_AT = 40, 10


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(TRAIN.parent), train=str(TRAIN)))
    return path


def start(script: Path, output: Path, checkpoints: Path, **environment: str) -> Processes:
    flags = {
        "steps": STEPS,
        "output": output,
        "directory": checkpoints,
        "print-every": 10,
        "width": 32,
        "layers": 1,
        "text-bytes": 100_000,
    }
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    return Processes.start(script, 2, arguments=arguments, environment=environment, devices=1)


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_a_preempted_and_resumed_run_equals_an_undisturbed_one_bit_for_bit(script: Path, tmp_path: Path) -> None:
    with start(script, tmp_path / "undisturbed", tmp_path / "checkpoints-1") as processes:
        assert [result.code for result in processes.wait(timeout_s=100)] == [0, 0], processes.output()

    disturbed = tmp_path / "disturbed"
    with start(script, disturbed, tmp_path / "checkpoints-2", TEST_SIGTERM_AT=str(SIGTERM_AT)) as processes:
        codes = [result.code for result in processes.wait(timeout_s=60)]
        assert codes == [DEFAULT_SAVED_EXIT_CODE] * 2, processes.output()
    saved = records.newest(disturbed)
    assert saved is not None
    assert SIGTERM_AT <= saved.step < STEPS
    with start(script, disturbed, tmp_path / "checkpoints-2") as processes:
        processes[0].wait_for_line(f"restored step={saved.step}")
        assert [result.code for result in processes.wait(timeout_s=100)] == [0, 0], processes.output()

    comparison = records.compare(tmp_path / "undisturbed", disturbed, steps=STEPS, processes=2)
    assert comparison.differences == ()
    assert comparison.losses_equal
    assert comparison.data_equal
    assert comparison.parameters_equal
    steps = [step.step for step in records.read(disturbed) if step.process == 0]
    assert steps == list(range(1, STEPS + 1)), "no step was lost or done twice"
