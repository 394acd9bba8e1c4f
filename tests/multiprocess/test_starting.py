"""How sessions of three real JAX processes start: who reads, and which states are refused at the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess import starting_process
from tests.multiprocess.launcher import Processes

pytestmark = pytest.mark.multiprocess

COUNT = 3


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each process has printed."""
    root = tmp_path_factory.mktemp("starting")
    script = Path(starting_process.__file__)
    with Processes.start(script, COUNT, arguments=[str(root)], devices=2) as processes:
        results = processes.wait(110)
    assert [result.code for result in results] == [0] * COUNT, "\n\n".join(result.output for result in results)
    return [result.output for result in results]


@pytest.mark.parametrize("act", [act.__name__ for act in starting_process.ACTS])
def test_every_process_finds_what_it_expects(outputs: list[str], act: str) -> None:
    assert all(f"did {act}\n" in output for output in outputs)
