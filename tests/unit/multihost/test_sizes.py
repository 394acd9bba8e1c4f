"""Which number of processes is accepted when they meet."""

from __future__ import annotations

import logging

import pytest

from gracepoint.errors import AgreementError
from gracepoint.multihost import meet
from gracepoint.settings import Settings


@pytest.mark.parametrize(
    ("injected", "least", "words"),
    [
        pytest.param(4, 0, "counted 4 training processes", id="the size is fixed"),
        pytest.param(4, 2, "expected as many processes as the policy's spec.training.minProcesses", id="too few"),
        pytest.param(None, 2, "GRACEPOINT_MIN_PROCESSES=2", id="too few, and none counted"),
    ],
)
def test_another_number_of_processes_is_refused(injected: int | None, least: int, words: str) -> None:
    with pytest.raises(AgreementError, match=words):
        meet(Settings(process_count=injected, min_processes=least))


def test_a_number_that_is_allowed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gracepoint"):
        meeting = meet(Settings(process_count=4, completion_index=0, pods_per_job=4, min_processes=1))
    assert meeting.gang.process_count == 1
    assert [record.getMessage() for record in caplog.records] == ["the size of the job was changed injected=4 joined=1"]
