"""The checkpoint engine in real JAX processes, killed at named points."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.multiprocess import checkpoint_process
from tests.multiprocess.checkpoint_runs import expect, restore_here, run
from tests.unit.checkpoint.fakes.engine import engine, flip_bit, save

pytestmark = pytest.mark.multiprocess

KILLED = -9


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
