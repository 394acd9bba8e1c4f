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


def start(directory: Path, keys: str) -> tuple[list[dict[str, Any]], str]:
    """Runs one start of the job. Returns what each process counted, and what all of them printed."""
    script = Path(compile_cache_process.__file__)
    with Processes.start(script, COUNT, arguments=[str(directory), keys], devices=2) as processes:
        results = processes.wait(110)
    outputs = [result.output for result in results]
    assert [result.code for result in results] == [0] * COUNT, "\n\n".join(outputs)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("counted ")]
    return [json.loads(line.removeprefix("counted ")) for line in lines], "\n".join(outputs)


def programs(directory: Path) -> dict[str, set[str]]:
    """Returns the names of programs, by the folder that they are in."""
    found: dict[str, set[str]] = {}
    for path in directory.rglob("*.program"):
        assert is_file_name(path.name)
        found.setdefault(path.parent.name, set()).add(path.name.partition("-")[0])
    return found


#: Programs of each process's own devices. The saves slice arrays that all processes hold.
OF_ONE = {"jit__part", "jit_copy_first", "jit__lambda"}
OF_ALL = {"jit_first", "jit_train_step"}


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ("equal", {"all": OF_ALL, "process-0": OF_ONE, "process-1": OF_ONE}),
        ("different", {"all": OF_ALL, "process-0": OF_ONE, "process-1": OF_ONE | OF_ALL}),
    ],
)
def test_a_second_start_of_several_processes_compiles_nothing(
    tmp_path: Path, keys: str, kept: dict[str, set[str]]
) -> None:
    first, output = start(tmp_path, keys)
    assert not any("cache_hits" in counts for counts in first), output
    assert programs(tmp_path) == kept
    second, output = start(tmp_path, keys)
    assert [counts["step"] for counts in second] == [4, 4]
    for counts in second:
        assert "cache_misses" not in counts, output
        assert 0 < counts["compile_requests_use_cache"] == counts["cache_hits"], output
    assert output.count(" compiled=0 kept=0 ") == COUNT
    assert len({counts["result"] for counts in second}) == 1
