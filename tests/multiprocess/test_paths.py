"""The public checkpoint API in three real JAX processes: paths, parts of the processes, steps by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gracepoint.checkpoint.async_checkpointer import all_steps, restore
from tests.multiprocess import paths_process
from tests.multiprocess.launcher import Processes

pytestmark = pytest.mark.multiprocess

COUNT = 3


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that the processes have saved to, and what each has printed."""
    root = tmp_path_factory.mktemp("paths")
    with Processes.start(Path(paths_process.__file__), COUNT, arguments=[str(root)]) as processes:
        results = processes.wait(110)
    for result in results:
        assert result.code == 0, result.output
    return root, [result.output for result in results]


def said(outputs: list[str], what: str) -> list[list[str]]:
    """Returns, for each process, what follows the word ``what`` at the beginning of its lines."""
    return [
        [line.removeprefix(f"{what} ") for line in output.splitlines() if line.startswith(f"{what} ")]
        for output in outputs
    ]


@pytest.mark.parametrize("act", [act.__name__ for act in paths_process.ACTS])
def test_every_process_finds_what_it_expects(done: tuple[Path, list[str]], act: str) -> None:
    assert all(act in found for found in said(done[1], "did"))


def test_a_checkpoint_of_several_processes_is_restored_in_one(done: tuple[Path, list[str]]) -> None:
    values = np.random.default_rng(11).standard_normal((12, 8)).astype(np.float32)
    like = {"split": np.zeros_like(values), "whole": np.zeros(100, np.float32), "step": 0}
    found = restore(done[0] / "two-1", like)
    np.testing.assert_array_equal(found["split"], values)
    assert found["step"] == 11


def test_inactive_processes_are_named_and_their_own_data_is_refused(done: tuple[Path, list[str]]) -> None:
    refused = [" ".join(found) for found in said(done[1], "refused:")]
    assert "active_processes: expected some of the process indices 0 to 2 with 1" in refused[1]
    for taking_part in (refused[0], refused[2]):
        assert "leaf 'split': no process of those that save, 0, 2, holds its shard at" in taking_part
    assert not (done[0] / "too-much").exists()


def test_the_callback_is_called_in_the_primary_process_of_the_part(done: tuple[Path, list[str]]) -> None:
    assert said(done[1], "called") == [[], [], ["back in 2"]]


def test_by_the_clock_all_processes_save_the_same_steps(done: tuple[Path, list[str]]) -> None:
    (first,), *others = said(done[1], "steps")
    assert others == [[first]] * 2
    saved, restored = json.loads(first)
    assert len(saved) > 3
    assert (restored, all_steps(done[0] / "steps")) == (saved[-1], saved[-2:])


def test_timed_saves_are_the_same_steps_in_all_processes(done: tuple[Path, list[str]]) -> None:
    (first,), *others = said(done[1], "session")
    assert others == [[first]] * 2
    assert json.loads(first)
    assert all_steps(done[0] / "session") == json.loads(first)[-1:]


def test_nothing_unfinished_is_left(done: tuple[Path, list[str]]) -> None:
    assert not [path for path in done[0].rglob("*gracepoint-*") if "tmp" in path.name or "trash" in path.name]
    hidden = {path.name for path in done[0].rglob(".gracepoint-*")}
    assert hidden <= {".gracepoint-throughput"}, "which is kept for the next start"
