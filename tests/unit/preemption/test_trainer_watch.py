"""What a worker process says of a training process that gives no sign of life, on a virtual clock."""

from __future__ import annotations

import logging

import pytest

from gracepoint.async_calls import worker
from gracepoint.preemption.stall_detector import ProcessAt
from gracepoint.preemption.trainer_watch import SharedHeartbeat, TrainerWatch, Watched
from gracepoint.settings import Settings

LIMIT_S, LOOK_S = 100.0, 5.0


class Looking:
    """A worker that looks, and the heartbeat of its trainer, which is in another container."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.telling_s = 0.0
        self.heartbeat = SharedHeartbeat(step=lambda: 40)
        who = Watched(Settings(stall_after_s=LIMIT_S, pod_name="pod-3"), "session", 3, ProcessAt(1, 0, 1))
        self._beside = TrainerWatch(SharedHeartbeat(self.heartbeat.block), who, self._operator, lambda: self.now_s)

    def _operator(self) -> None:
        self.now_s += self.telling_s

    def for_s(self, seconds: float, *, beats: bool = False, look_s: float = LOOK_S) -> None:
        for _ in range(round(seconds / look_s)):
            self.now_s += look_s
            if beats:
                self.heartbeat.beat("training after step 40")
            self._beside.look()


@pytest.fixture
def looking(caplog: pytest.LogCaptureFixture) -> Looking:
    caplog.set_level(logging.WARNING)
    return Looking()


def test_a_process_without_heartbeat_is_named_at_its_limit(looking: Looking, caplog: pytest.LogCaptureFixture) -> None:
    looking.for_s(10 * LIMIT_S, beats=True)
    looking.for_s(LIMIT_S - LOOK_S)
    assert caplog.text == ""
    looking.for_s(LOOK_S)
    assert (
        "no progress part=process stage=training after step 40 seconds=100 process 3 (pod-3) does not run"
        in caplog.text
    )
    looking.for_s(LOOK_S, beats=True)
    assert "the training process runs again" in caplog.text


def test_a_look_that_takes_long_is_no_sign_of_life(looking: Looking, caplog: pytest.LogCaptureFixture) -> None:
    looking.for_s(LIMIT_S, beats=True)
    looking.telling_s = 10 * LOOK_S
    looking.for_s(3 * LIMIT_S)
    assert caplog.text.count("does not run") == 1
    assert "runs again" not in caplog.text


def test_nothing_is_said_of_a_process_that_has_ended_training(
    looking: Looking, caplog: pytest.LogCaptureFixture
) -> None:
    looking.for_s(LIMIT_S)  # it has not begun
    looking.for_s(LIMIT_S, beats=True)
    looking.heartbeat.end()
    looking.for_s(10 * LIMIT_S)
    assert caplog.text == ""


def test_nothing_is_said_of_a_process_that_has_died(
    looking: Looking, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking.for_s(LIMIT_S, beats=True)
    monkeypatch.setattr(worker, "trainer_has_died", lambda: True)
    looking.for_s(10 * LIMIT_S)
    assert caplog.text == ""


def test_nothing_is_said_if_the_whole_pod_was_stopped(looking: Looking, caplog: pytest.LogCaptureFixture) -> None:
    looking.for_s(LIMIT_S, beats=True)
    looking.for_s(50 * LIMIT_S, look_s=50 * LIMIT_S)  # one look, long after the one before
    looking.for_s(LIMIT_S - LOOK_S)
    assert caplog.text == ""
