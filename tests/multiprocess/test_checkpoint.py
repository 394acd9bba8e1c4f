"""The checkpoint engine in real JAX processes, killed at named points."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.multiprocess import checkpoint_process
from tests.multiprocess.launcher import Processes, Result
from tests.unit.checkpoint.support import assert_same, engine, flip_bit, save

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(checkpoint_process.__file__)
KILLED = -9


def run(root: Path, *actions: str, count: int = 2, attempt: str = "job-0-a", timeout_s: float = 90) -> list[Result]:
    with Processes.start(SCRIPT, count, arguments=[str(root), attempt, *actions]) as processes:
        return processes.wait(timeout_s)


def expect(results: list[Result], *lines: str) -> None:
    for result in results:
        assert result.code == 0, result.output
        for line in lines:
            assert line in result.output.splitlines(), result.output


def restore_here(root: Path) -> int:
    """Restores in this one process with its four devices, compares, and returns the step."""
    like = checkpoint_process.with_keys(checkpoint_process.make_state(0), 0)
    restored = engine(root, attempt="job-1-b").restore(like, timeout_s=30)
    assert restored is not None
    expected = checkpoint_process.with_keys(checkpoint_process.make_state(restored.step), restored.step)
    assert_same(restored.state, expected)
    return restored.step


def test_what_two_processes_save_they_and_orbax_restore(tmp_path: Path) -> None:
    expect(run(tmp_path, "save:1", "orbax-restore:1"), "written", "durable", "committed", "saved 1", "Orbax restored 1")
    results = run(tmp_path, "restore:1", "background:2", "restore:2", attempt="job-1-b")
    expect(results, "restored 1 with {}", "saved 2")
    for process, result in enumerate(results):
        assert f"restored 2 with {{'process': {process}}}" in result.output
    files = [set((tmp_path / "1" / f"done.process_{i}.json").read_text().split('"')) for i in range(2)]
    replicated = [{f"default/layers.{i}.replicated/0" for i in range(checkpoint_process.LAYERS)} & f for f in files]
    assert all(replicated), "replicated arrays are written by one process only"


def test_a_checkpoint_moves_between_numbers_of_processes(tmp_path: Path) -> None:
    state = checkpoint_process.with_keys(checkpoint_process.make_state(3), 3)
    save(engine(tmp_path), 3, state)
    expect(run(tmp_path, "restore:3", "save:4", attempt="job-1-b"), "restored 3 with {}", "saved 4")
    assert restore_here(tmp_path) == 4


def test_a_step_that_orbax_wrote_in_two_processes_is_restored_in_two(tmp_path: Path) -> None:
    expect(run(tmp_path, "orbax-save:5", "restore-without-keys:5"), "Orbax saved 5", "restored 5, by Orbax: True")


def test_damage_seen_by_one_process_sends_both_to_the_older_step(tmp_path: Path) -> None:
    expect(run(tmp_path, "save:1", "save:2"), "saved 1", "saved 2")
    flip_bit(tmp_path / "2" / "default" / "layers.0.both" / "1.1")  # on a device of process 1
    results = run(tmp_path, "restore:1", attempt="job-1-b")
    expect(results, "restored 1 with {}")


def test_this_process_has_the_devices_that_the_tests_above_restore_to() -> None:
    assert jax.device_count() == 4
