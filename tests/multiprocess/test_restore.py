"""Checkpoints move between numbers of processes and shardings; one replica reads for all; Orbax does its part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess import restore_process
from tests.multiprocess.launcher import Processes, Result

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(restore_process.__file__)


def run(root: Path, count: int, *actions: str) -> list[list[str]]:
    """Runs the actions in ``count`` processes with four devices together; returns each one's lines."""
    with Processes.start(SCRIPT, count, arguments=[str(root), *actions], devices=4 // count) as processes:
        results: list[Result] = processes.wait(110)
    for result in results:
        assert result.code == 0, result.output
    return [result.output.splitlines() for result in results]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two processes: step 1 by us, and states of Orbax in several forms."""
    root = tmp_path_factory.mktemp("root")
    lines = run(root, 2, "save:1", "restore:1:same", "restore:1:turned", "orbax-save", "restore-orbax:turned")
    for process in range(2):
        own = {"rows": [process * 10, process * 10 + 1], "fixed": process}
        assert f"restored 1 same with {own}" in lines[process]
        assert f"restored 1 turned with {own}" in lines[process]
        assert "restored Orbax's turned" in lines[process]
    return root


@pytest.mark.parametrize("count", [1, 4])
def test_what_two_processes_saved_is_restored_by_other_numbers_of_them(saved: Path, count: int) -> None:
    actions = ["restore:1:same", "restore:1:turned", "restore-orbax:same", "restore-orbax:turned"]
    lines = run(saved, count, *actions, "orbax-restore:1:same", "orbax-restore:1:turned")
    for process in range(count):
        # The host state is made to fit by the values' own functions, which are given what all processes had.
        own = {"rows": [0, 1, 10, 11][process::count], "fixed": [0, 1]}
        assert f"restored 1 same with {own}" in lines[process]
        assert "restored Orbax's same" in lines[process]
        assert "restored Orbax's turned" in lines[process]
        assert "Orbax restored 1 same" in lines[process]
        assert "Orbax restored 1 turned" in lines[process]


def test_what_one_process_saved_is_restored_by_two(tmp_path: Path) -> None:
    run(tmp_path, 1, "save:3", "orbax-save")
    lines = run(tmp_path, 2, "restore:3:same", "restore-orbax:turned", "orbax-restore:3:turned")
    for process in range(2):
        assert f"restored 3 same with {{'rows': [{process}], 'fixed': [0]}}" in lines[process]
        assert "restored Orbax's turned" in lines[process]
        assert "Orbax restored 3 turned" in lines[process]


@pytest.mark.parametrize("count", [2, 4])
def test_one_replica_s_processes_read_for_all(saved: Path, count: int) -> None:
    damage = ["damaged-for:1:chunk:0", f"damaged-for:1:metadata:{count - 1}"]
    lines = run(saved, count, "one-replica:1:0", "one-replica:1:1", "handler", *damage, "restore:1:by-one-replica")
    for process in range(count):
        mine = 0 if process < count // 2 else 1
        for replica in (0, 1):
            read = "some" if replica == mine else "nothing"
            assert f"replica {replica} gave all; read {read} here" in lines[process], lines[process]
        assert "the handler restored them" in lines[process]
        assert any(line.startswith("restored 1 by-one-replica") for line in lines[process])
        # Who fails, and where: in the primary replica while it reads, in another before anything is read.
        for what, path, failing in (("chunk", "replicated.all/0", 0), ("metadata", "_METADATA", count - 1)):
            (failed,) = [line for line in lines[process] if line.startswith(f"{what} damaged")]
            assert failed.startswith(f"{what} damaged: CheckpointCorrupt: ")
            assert f"/1/default/{path} is damaged" in failed
            assert (f"process {failing} could not read its part" in failed) == (process != failing)
