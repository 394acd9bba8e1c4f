"""Two processes restore from a bucket: each array that both need is read by one of them, and sent to the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multiprocess import turns_process
from tests.multiprocess.launcher import Processes
from tests.object_stores.servers import Bucket

pytestmark = pytest.mark.multiprocess


def test_replicas_take_turns_to_read_from_a_bucket(gs_bucket: Bucket) -> None:
    script, environment = Path(turns_process.__file__), gs_bucket.environment
    with Processes.start(script, 2, arguments=[gs_bucket.uri], environment=environment) as processes:
        results = processes.wait(110)
    for result in results:
        assert result.code == 0
    lines = [result.output.splitlines() for result in results]

    def read(asked: bool | None) -> list[list[str]]:
        begin = f"read once {asked}: "
        return [json.loads(line.removeprefix(begin)) for own in lines for line in own if line.startswith(begin)]

    once, each = read(None), read(False)
    for chunks in once:
        assert any(chunk.startswith("replicated.") for chunk in chunks)
    assert len({*once[0], *once[1]}) == len(once[0]) + len(once[1])  # no chunk is read twice
    assert {*once[0], *once[1]} == {*each[0], *each[1]}
    assert len(each[0]) + len(each[1]) > len(once[0]) + len(once[1])
    # Process 1 finds damage. Process 0 does not wait for what process 1 was to send.
    for own in lines:
        (failed,) = [line for line in own if line.startswith("damaged: ")]
        assert failed.startswith("damaged: CheckpointCorrupt: ")
        assert "is damaged" in failed
