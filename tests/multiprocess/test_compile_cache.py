"""The second start of two real JAX processes compiles nothing, also where a process has programs of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracepoint.compile_cache.program_file import is_file_name
from tests.multiprocess import compile_cache_process
from tests.multiprocess.launcher import Processes

pytestmark = pytest.mark.multiprocess

COUNT = 2


def start(directory: str) -> tuple[list[dict[str, Any]], str]:
    """Runs one start of the job. Returns what each process counted, and what all of them printed."""
    script = Path(compile_cache_process.__file__)
    with Processes.start(script, COUNT, arguments=[directory], devices=2) as processes:
        results = processes.wait(110)
    outputs = [result.output for result in results]
    assert [result.code for result in results] == [0] * COUNT, "\n\n".join(outputs)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("counted ")]
    return [json.loads(line.removeprefix("counted ")) for line in lines], "\n".join(outputs)


def programs(directory: Path) -> dict[str, list[Path]]:
    """Returns the programs by the folder of their processes."""
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*.program")):
        assert is_file_name(path.name)
        found.setdefault(path.parent.name, []).append(path)
    return found


def test_a_second_start_of_several_processes_compiles_nothing(tmp_path: Path) -> None:
    first, _ = start(str(tmp_path))
    assert all(counts["cache_misses"] > 0 for counts in first)
    kept = programs(tmp_path)
    assert {"process-0", "process-1"} <= set(kept)
    # Each process copies its slices of the array that all hold by a program for its own device.
    for own in ("process-0", "process-1"):
        assert any("slice" in path.name for path in kept[own])
    _start_from_cache(str(tmp_path), step=4)


def _start_from_cache(directory: str, step: int) -> None:
    second, output = start(directory)
    for counts in second:
        assert counts["step"] == step
        assert counts.get("cache_misses", 0) == 0, output
        assert 0 < counts["compile_requests_use_cache"] == counts["cache_hits"], output
