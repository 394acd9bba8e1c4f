"""Runs of ``checkpoint_process``, and what they must have printed and saved."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess import checkpoint_process
from tests.multiprocess.launcher import Processes, Result
from tests.unit.checkpoint.fakes.engine import assert_same, engine

SCRIPT = Path(checkpoint_process.__file__)


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
