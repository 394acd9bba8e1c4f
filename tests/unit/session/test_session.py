"""A session of one process, as on a laptop: nothing is set, everything works, SIGTERM saves."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint import session as session_module
from gracepoint.checkpoint.writer import Writer
from gracepoint.errors import CheckpointMismatch, Preempted, SettingsError
from gracepoint.leaving import Leaving
from gracepoint.wire.names import Env


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)
    yield
    if session_module._open is not None:
        # A test that ended in Preempted: the process would have ended.
        session_module._open._leaving.cancel()
        session_module._open._closed = False
        session_module._open._break_off("the test is over")


@pytest.fixture(autouse=True)
def _nobody_ends_the_test_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaving, "watch", lambda self, left_s, code: None)


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), float(step)), "step": jnp.int32(step)}


def train_until_preempted(session: gracepoint.Session, first: int = 1, number: Callable[[int], Any] = int) -> Preempted:
    try:
        for step in range(first, first + 10_000):
            session.step(number(step), state_of(step))
    except Preempted as preempted:
        return preempted
    raise AssertionError("never preempted")


def _poll_until_preempted(session: gracepoint.Session) -> Preempted:
    try:
        for _ in range(1_000_000):
            session.poll(state_of(7))
    except Preempted as preempted:
        return preempted
    raise AssertionError("never preempted")


def test_a_sigterm_saves_the_step_and_the_next_session_goes_on_from_it(tmp_path: Path) -> None:
    session = gracepoint.attach(tmp_path)
    data = {"position": 0}
    session.host_state("data", lambda: data, data.update)
    assert session.restore(like=state_of(0))[1] == 0
    for step in range(1, 4):
        data["position"] = step
        session.step(step, state_of(step))
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=4)
    assert (preempted.code, preempted.saved) == (77, True)
    session._leaving.cancel()
    session._closed = False
    session._break_off("the process would have ended")

    again = gracepoint.attach(tmp_path)
    position: dict[str, int] = {}
    again.host_state("data", lambda: position, position.update)
    state, step = again.restore(like=state_of(0))
    assert step == preempted.step
    assert (state["w"] == step).all()
    assert position == {"position": 3}
    again.close()


def test_periodic_saves_are_restored_and_kept_to_the_last_few(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=2, keep_last=2) as session:
        for step in range(1, 10):
            session.step(step, state_of(step))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["6", "8"]
    with gracepoint.attach(tmp_path) as session:
        assert session.restore(like=state_of(0))[1] == 8


def test_there_being_no_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    like = state_of(0)
    with gracepoint.attach(tmp_path) as session:
        state, step = session.restore(like=like)
    assert state is like
    assert step == 0
    assert "no checkpoint was restored, training begins at step 0" in caplog.text


def test_a_host_state_that_the_checkpoint_lacks_is_an_error_with_both_names(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.host_state("loader", lambda: 1, lambda value: None)
        session.step(1, state_of(1))
    with gracepoint.attach(tmp_path) as session:
        session.host_state("data", lambda: 1, lambda value: None)
        with pytest.raises(CheckpointMismatch, match=r"'data' is not in the checkpoint of step 1, .*'loader'"):
            session.restore(like=state_of(0))


def test_a_host_state_that_is_not_registered_any_more_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.host_state("loader", lambda: 1, lambda value: None)
        session.step(1, state_of(1))
    with gracepoint.attach(tmp_path) as session:
        session.restore(like=state_of(0))
    assert "was dropped name=loader" in caplog.text


def test_a_host_state_is_registered_once_and_in_time(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session:
        session.host_state("data", lambda: 1, lambda value: None)
        with pytest.raises(SettingsError, match="registered before"):
            session.host_state("data", lambda: 1, lambda value: None)
        session.step(1, state_of(1))
        with pytest.raises(SettingsError, match=r"before restore\(\) and step\(\)"):
            session.host_state("more", lambda: 1, lambda value: None)


def test_an_emergency_that_cannot_save_leaves_with_the_unsaved_code_and_the_reason(tmp_path: Path) -> None:
    session = gracepoint.attach(tmp_path / "steps", unsaved_exit_code=99)
    session.step(1, state_of(1))
    session._host_state["bad"] = (object, lambda value: None)  # a getter that gives what cannot be saved
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=2)
    assert (preempted.code, preempted.saved) == (99, False)
    assert "host_state['bad']" in preempted.reason
    assert preempted.__cause__ is not None


class _BrokenCollective:
    """Where a dead peer shows first: waiting for an older step fails."""

    def throttle(self, state: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: connection closed by peer")

    def forget(self) -> None:
        """Nothing is kept."""


def test_a_device_error_in_a_preemption_leaves_with_the_unsaved_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = gracepoint.attach(tmp_path)
    session.step(1, state_of(1))
    os.kill(os.getpid(), signal.SIGTERM)
    deadline_s = time.monotonic() + 30
    while not session._agreement.in_epoch and time.monotonic() < deadline_s:
        time.sleep(0.001)
    monkeypatch.setattr(session, "_run_ahead", _BrokenCollective())
    with pytest.raises(Preempted) as caught:
        session.step(2, state_of(2))
    assert (caught.value.saved, caught.value.code) == (False, 78)
    assert "connection closed by peer" in caught.value.reason


def test_a_device_error_without_a_preemption_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gracepoint.attach(tmp_path) as session:
        monkeypatch.setattr(session, "_run_ahead", _BrokenCollective())
        with pytest.raises(jax.errors.JaxRuntimeError):
            session.step(1, state_of(1))


def test_a_second_session_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path), pytest.raises(SettingsError, match="a session is open"):
        gracepoint.attach(tmp_path)


def test_without_a_directory_a_laptop_saves_below_the_current_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with gracepoint.attach(save_every_steps=1) as session:
        session.step(1, state_of(1))
    assert (tmp_path / "gracepoint-checkpoints" / "1").is_dir()
    assert str(tmp_path / "gracepoint-checkpoints") in caplog.text


def test_an_argument_overrides_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.SAVE_EVERY_STEPS, "1")
    with gracepoint.attach(tmp_path, save_every_steps=0) as session:
        session.step(1, state_of(1))
    assert not (tmp_path / "1").exists()


def test_an_operator_without_a_name_for_this_pod_is_a_setting_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.OPERATOR_URL, "https://gracepoint.system.svc:8443")
    with pytest.raises(SettingsError, match=f"{Env.NAMESPACE}: expected a value, as {Env.OPERATOR_URL} is set"):
        gracepoint.attach(tmp_path)


def test_poll_saves_the_last_step_in_an_evaluation(tmp_path: Path) -> None:
    session = gracepoint.attach(tmp_path)
    session.step(7, state_of(7))
    os.kill(os.getpid(), signal.SIGTERM)
    preempted_at_poll = _poll_until_preempted(session)
    assert (preempted_at_poll.saved, preempted_at_poll.step) == (True, 7)
    assert (tmp_path / "7").is_dir()


def test_code_that_swallows_preempted_gets_it_again(tmp_path: Path) -> None:
    session = gracepoint.attach(tmp_path)
    session.step(1, state_of(1))
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=2)
    with pytest.raises(Preempted) as stepped:
        session.step(preempted.step + 1, state_of(1))
    with pytest.raises(Preempted) as polled:
        session.poll(state_of(1))
    assert stepped.value is polled.value is preempted


def test_a_closed_session_takes_no_step(tmp_path: Path) -> None:
    session = gracepoint.attach(tmp_path)
    session.close()
    with pytest.raises(SettingsError, match="the session is closed"):
        session.step(1, state_of(1))


@pytest.mark.parametrize("number", [np.int64, jnp.int32])
def test_a_step_may_be_an_integer_of_numpy_or_jax(tmp_path: Path, number: Callable[[int], Any]) -> None:
    session = gracepoint.attach(tmp_path, save_every_steps=1)
    session.step(number(1), state_of(1))
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=2, number=number)
    assert preempted.saved, preempted.reason


@pytest.mark.parametrize("step", [-1, 1.5, "1", None])
def test_a_step_that_is_no_number_of_steps_is_refused(tmp_path: Path, step: Any) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError, match="an integer from 0, found"):
        session.step(step, state_of(1))


def test_a_notice_while_the_last_save_is_waited_for_ends_as_retracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path)
    session.step(1, state_of(1))

    def close_slowly(timeout_s: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline_s = time.monotonic() + 30
        while "phase=Agreed" not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.001)

    monkeypatch.setattr(session._checkpointer, "close", close_slowly)
    session.close()
    assert "phase=Agreed" in caplog.text
    assert "phase=Retracted" in caplog.text


def test_a_forked_child_that_ends_leaves_the_session_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gracepoint.attach(tmp_path) as session:
        with monkeypatch.context() as in_child:
            in_child.setattr(os, "getpid", lambda: -1)
            session._at_exit()
        session.step(1, state_of(1))


def test_an_error_of_training_passes_and_ends_all_threads(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), gracepoint.attach(tmp_path) as session:  # noqa: PT012
        session.step(1, state_of(1))
        raise ZeroDivisionError("the user's own")
    assert _own_threads() == []


def test_an_error_of_training_lets_the_save_under_way_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broke_off, write = threading.Event(), Writer.write

    def write_late(self: Writer, *arguments: Any) -> Any:
        assert broke_off.wait(30)
        return write(self, *arguments)

    with pytest.raises(ZeroDivisionError), gracepoint.attach(tmp_path, save_every_steps=1) as session:  # noqa: PT012
        session.step(1, state_of(1))  # warms the writer
        session._checkpointer.wait_until_finished(30)
        monkeypatch.setattr(Writer, "write", write_late)
        session.step(2, state_of(2))
        threading.Timer(0.2, broke_off.set).start()
        raise ZeroDivisionError("the user's own")
    assert (tmp_path / "2").is_dir()
    assert _own_threads() == []


def test_closing_may_be_repeated_and_ends_all_threads(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    session = gracepoint.attach(tmp_path)
    session.close()
    session.close()
    assert _own_threads() == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_pod_of_an_indexed_job_that_was_not_injected_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    with pytest.raises(SettingsError, match=r"JOB_COMPLETION_INDEX=1 .* not injected: label the JobSet"):
        gracepoint.attach(tmp_path)


def test_an_injected_pod_joins_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Joined(Exception):
        pass

    def initialize(*args: object, **kwargs: object) -> None:
        raise Joined(json.dumps([args, kwargs]))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name, value in {
        Env.JOBSET_NAME: "gpt",
        Env.PROCESS_COUNT: "4",
        Env.PODS_PER_JOB: "2",
        Env.JOB_INDEX: "1",
        "JOB_COMPLETION_INDEX": "1",
        Env.COORDINATOR_JOB: "workers",
        Env.COORDINATOR_PORT: "8476",
        Env.SUBDOMAIN: "gpt",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Joined) as caught:
        gracepoint.attach(tmp_path)
    args, kwargs = json.loads(str(caught.value))
    assert args == ["gpt-workers-0-0.gpt:8476", 4, 3]
    assert kwargs["cluster_detection_method"] == "deactivate"


def test_the_library_installs_no_log_handlers(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path):
        pass
    assert logging.getLogger("gracepoint").handlers == []


def _own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gracepoint")]
