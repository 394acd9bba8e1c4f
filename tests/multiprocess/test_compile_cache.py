"""The second start of two real JAX processes compiles nothing, also where a process has programs of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import PROGRAMS_FOLDER
from tests.multiprocess import compile_cache_process
from tests.multiprocess.launcher import Processes

pytestmark = pytest.mark.multiprocess

COUNT = 2


def start(*arguments: Path) -> tuple[list[dict[str, Any]], str]:
    """Runs one start of the job. Returns what each process counted, and what all of them printed."""
    script = Path(compile_cache_process.__file__)
    with Processes.start(script, COUNT, arguments=[str(path) for path in arguments], devices=2) as processes:
        results = processes.wait(110)
    outputs = [result.output for result in results]
    assert [result.code for result in results] == [0] * COUNT, "\n\n".join(outputs)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("counted ")]
    return [json.loads(line.removeprefix("counted ")) for line in lines], "\n".join(outputs)


#: Programs on the devices of both processes, and of each process's own. The saves slice arrays that both hold.
KEPT = {"jit_first", "jit_train_step", "jit__part", "jit_copy_first", "jit__lambda"}


@pytest.mark.parametrize("jax_is_set", [False, True])
def test_a_second_start_of_several_processes_compiles_nothing(tmp_path: Path, jax_is_set: bool) -> None:
    directory = tmp_path / "checkpoints"
    folder = tmp_path / "elsewhere" if jax_is_set else directory / PROGRAMS_FOLDER
    arguments = [directory, folder] if jax_is_set else [directory]
    first, output = start(*arguments)
    assert not any("cache_hits" in counts for counts in first), output
    assert {path.name.partition("-")[0] for path in folder.glob("*-cache")} >= KEPT
    second, output = start(*arguments)
    assert [counts["step"] for counts in second] == [4, 4]
    for counts in second:
        assert 0 < counts["compile_requests_use_cache"] == counts["cache_hits"], output
    assert output.count("programs until the first step compiled=0 ") == COUNT, output
    assert len({counts["result"] for counts in second}) == 1
