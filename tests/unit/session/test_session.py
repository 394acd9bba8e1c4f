"""A session of one process, as on a laptop: nothing is set, everything works, SIGTERM saves."""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.schedule import SaveInterval
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.deadline import Deadline
from gracepoint.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointRefused,
    ForkedChild,
    HostStateLost,
    NotJoined,
    Preempted,
    SaveFailed,
    SettingsError,
)
from gracepoint.multihost import distributed
from gracepoint.multihost.rendezvous import Guest, Line
from gracepoint.multihost.utilities import reached_preemption_hook
from gracepoint.preemption import forecast
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.forecast import Figures
from gracepoint.preemption.reporter import Reporter
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.session import attach, sync_points
from gracepoint.session import session as session_module
from gracepoint.session.sync_points import RunAhead
from gracepoint.wire.messages import TroubleKind
from gracepoint.wire.names import Env
from tests.forked import forked
from tests.jax_settings import SETTINGS
from tests.unit.checkpoint.fakes.engine import assert_same, not_computed, sharding
from tests.waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> list[ProcessExit]:
    """How the processes of the test's sessions exit, the newest last. Nothing watches them."""
    made: list[ProcessExit] = []
    monkeypatch.setattr(ProcessExit, "start", lambda process_exit: made.append(process_exit))
    return made


@pytest.fixture(autouse=True)
def coordinators(monkeypatch: pytest.MonkeyPatch) -> list[Coordinator]:
    """The coordinators of the test's sessions, the newest last."""
    made: list[Coordinator] = []

    class Recorded(Coordinator):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            made.append(self)

    monkeypatch.setattr(session_module, "Coordinator", Recorded)
    return made


class Opened(gracepoint.Session):
    """A session in a process that goes on with another test where a real one ends."""

    def process_ends(self) -> None:
        """After Preempted nothing ends the threads but the process."""
        self._points.closed = False
        self._break_off("the process would have ended")


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    """The test's sessions, the newest last."""
    made: list[Opened] = []

    def opened(*arguments: Any, **keywords: Any) -> Opened:
        made.append(Opened(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(attach, "Session", opened)
    return made


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch, exits: list[ProcessExit], sessions: list[Opened]) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)
    yield
    for each in exits:
        each.cancel()
    try:
        session_module.check_none_is_open()
    except (Preempted, SettingsError):
        sessions[-1].process_ends()


def _the_process_would_have_ended(session: gracepoint.Session) -> None:
    assert isinstance(session, Opened)
    session.process_ends()


class Notices:
    """A receiver that posts what a test says."""

    mailbox: Mailbox

    def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def close(self) -> None:
        """Has no threads."""

    def post(self, preemption: str = "gpt-1", remaining_s: float = 20.0, *, drill: bool = False) -> None:
        self.mailbox.post(
            Disruption(preemption=preemption, cause="Spot", signal="taint", remaining_s=remaining_s, drill=drill)
        )


@pytest.fixture
def exit_handlers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What the interpreter would call at its end; the session's own is the last."""
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(atexit, "unregister", handlers.remove)
    return handlers


@pytest.fixture
def notices() -> Notices:
    return Notices()


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), float(step)), "step": jnp.int32(step)}


def train_until_preempted(session: gracepoint.Session, first: int = 1, number: Callable[[int], Any] = int) -> Preempted:
    with pytest.raises(Preempted) as caught:  # noqa: PT012
        for step in _count(first):
            session.step(number(step), state_of(step))
    return caught.value


def _poll_until_preempted(session: gracepoint.Session) -> Preempted:
    with pytest.raises(Preempted) as caught:  # noqa: PT012
        for _ in _count(1):
            session.poll(state_of(7))
    return caught.value


def _count(first: int) -> Iterator[int]:
    """Steps, for as long as a test may take."""
    until_s = time.monotonic() + 60
    for step in itertools.count(first):
        assert time.monotonic() < until_s, "what was waited for never came"
        yield step


def test_sigterm_saves_the_step_and_the_next_session_resumes(tmp_path: Path) -> None:
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
    _the_process_would_have_ended(session)

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


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loop_may_set_for_jax_what_it_wants(tmp_path: Path, name: str) -> None:
    states = [sharded_state(step) for step in range(6)]
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), states[0])
    with SETTINGS[name]():
        with gracepoint.attach(tmp_path, save_every_steps=2) as session:
            assert session.restore(like=states[0])[1] == 0
            for step in range(1, 4):
                session.step(step, states[step])
        session = gracepoint.attach(tmp_path)
        found = [session.restore(like=like)]
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted) as caught:  # noqa: PT012
            for step in _count(3):
                session.step(step, states[5])
        _the_process_would_have_ended(session)
        with gracepoint.attach(tmp_path) as session:
            found.append(session.restore(like=like))
    assert caught.value.saved
    for (state, _), expected in zip(found, (states[2], states[5]), strict=True):
        assert_same(state, expected)


def sharded_state(step: int) -> dict[str, Any]:
    """Returns arrays on several devices, on one, and a number that is none."""
    values = np.arange(16.0, dtype=np.float32).reshape(4, 4) + step
    return {
        "split": jax.device_put(values, sharding("x", "y")),
        "alone": jax.device_put(values, jax.devices()[1]),
        "key": jax.device_put(jax.random.key(step), sharding()),
        "nan": jax.device_put(np.float32("nan"), sharding()),
    }


def test_snapshots_need_an_operator_and_without_one_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gracepoint.attach(tmp_path, snapshot_every_steps=1, save_every_steps=2) as session:
        for step in (1, 2):
            session.step(step, {"w": jnp.ones(4)})
    assert "there are no snapshots: the operator says which servers hold them" in caplog.text
    assert (tmp_path / "2").is_dir()


def test_there_being_no_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    like = state_of(0)
    with gracepoint.attach(tmp_path) as session:
        state, step = session.restore(like=like)
    assert state is like
    assert step == 0
    assert "no checkpoint was restored, training begins at step 0" in caplog.text


def test_missing_host_state_raises_with_both_names(tmp_path: Path) -> None:
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


def _fail_to_write(*arguments: Any, **keywords: Any) -> Any:
    raise OSError("disk full")


def test_emergency_that_cannot_save_leaves_with_unsaved_code_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = gracepoint.attach(tmp_path / "steps", unsaved_exit_code=99)
    session.step(1, state_of(1))
    monkeypatch.setattr(ChunkWriter, "write", _fail_to_write)
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=2)
    assert (preempted.code, preempted.saved) == (99, False)
    assert "disk full" in preempted.reason
    assert preempted.__cause__ is not None


def _broken_get() -> Any:
    raise RuntimeError("the loader is closed")


@pytest.mark.parametrize(
    ("get", "message"),
    [
        pytest.param(object, r"host_state\['bad'\]: cannot save a value of type object", id="type"),
        pytest.param(lambda: {"at": Path("x")}, r"host_state\['bad'\]\['at'\]: cannot save .* PosixPath", id="path"),
        pytest.param(lambda: np.ma.masked_array([1], [True]), r"host_state\['bad'\].*\.mask", id="mask"),
        pytest.param(_broken_get, "the loader is closed", id="raises"),
    ],
)
def test_a_host_state_that_cannot_be_saved_is_found_at_the_first_step(
    tmp_path: Path, get: Callable[[], Any], message: str
) -> None:
    with gracepoint.attach(tmp_path) as session:
        session.host_state("bad", get, lambda value: None)
        session.restore(like=state_of(0))
        with pytest.raises((CheckpointRefused, RuntimeError), match=message):
            session.step(1, state_of(1))


_slow_may_end = threading.Event()


def _slow() -> Any:
    return _slow_may_end.wait(60)


@pytest.mark.parametrize(
    ("get", "why"),
    [
        pytest.param(_broken_get, "RuntimeError: the loader is closed", id="raises"),
        pytest.param(object, "cannot save a value of type object", id="type"),
        pytest.param(_slow, "did not return within", id="too slow"),
        pytest.param(lambda: sys.exit(3), "SystemExit: 3", id="exits"),
    ],
)
def test_a_preemption_saves_the_state_without_a_host_state_that_fails_and_the_restore_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, get: Callable[[], Any], why: str
) -> None:
    fails = False
    _slow_may_end.clear()
    session = gracepoint.attach(tmp_path, grace_period_s=6.0)
    session.host_state("data", lambda: get() if fails else 1, lambda value: None)
    session.host_state("rng", lambda: (7,), lambda value: None)
    session.restore(like=state_of(0))
    session.step(1, state_of(1))
    fails = True
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=2)
    assert (preempted.code, preempted.saved) == (77, True)
    assert "WITHOUT host_state 'data'" in preempted.reason
    assert why in preempted.reason
    assert "the step is saved without a host_state name=data" in caplog.text
    _slow_may_end.set()
    metadata = json.loads((tmp_path / str(preempted.step) / "host_state" / "metadata").read_text())
    assert why in metadata["lost_in_process_0"]["data"]
    _the_process_would_have_ended(session)

    rng: list[Any] = []
    with gracepoint.attach(tmp_path) as again:
        again.host_state("data", lambda: 1, lambda value: None)
        again.host_state("rng", lambda: (7,), rng.append)
        with pytest.raises(HostStateLost, match=r"without host_state 'data' .*missing=\.\.\."):
            again.restore(like=state_of(0))
    began_at: list[int] = []
    with gracepoint.attach(tmp_path) as again:
        again.host_state("data", lambda: 1, lambda value: None, missing=began_at.append)
        again.host_state("rng", lambda: (7,), rng.append)
        state, step = again.restore(like=state_of(0))
    assert (step, began_at, rng) == (preempted.step, [preempted.step], [(7,)])
    assert (state["w"] == preempted.step).all()


def test_a_host_state_that_belongs_to_the_training_thread_is_saved(tmp_path: Path) -> None:
    owner = threading.current_thread()

    def get() -> int:
        if threading.current_thread() is not owner:
            raise RuntimeError("made in another thread")
        return 5

    session = gracepoint.attach(tmp_path)
    session.host_state("data", get, lambda value: None)
    session.step(1, state_of(1))
    os.kill(os.getpid(), signal.SIGTERM)
    preempted = train_until_preempted(session, first=2)
    assert preempted.saved
    assert "WITHOUT" not in preempted.reason


def test_static_fields_that_have_no_equality_do_not_keep_a_preemption_from_saving(tmp_path: Path) -> None:
    def state(step: int) -> Any:
        return jax.tree_util.Partial(_Static(np.arange(3)), state_of(step))

    session = gracepoint.attach(tmp_path)
    session.restore(like=state(0))
    session.step(1, state(1))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted) as caught:  # noqa: PT012
        for step in _count(2):
            session.step(step, state(step))
    assert caught.value.saved


class _Static:
    """A function with an array: it is equal to nothing, and comparing it raises as numpy does."""

    def __init__(self, vocabulary: Any) -> None:
        self.vocabulary = vocabulary

    def __call__(self) -> None:
        """Is never called."""

    def __eq__(self, other: object) -> bool:
        return bool(self.vocabulary == other.vocabulary) if isinstance(other, _Static) else False

    def __hash__(self) -> int:
        return 1


def _break_collective(self: RunAhead, state: object, limit: int) -> None:
    """Where a dead peer shows first: waiting for an older step fails."""
    raise jax.errors.JaxRuntimeError("INTERNAL: connection closed by peer")


def test_a_device_error_in_a_preemption_leaves_with_the_unsaved_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = gracepoint.attach(tmp_path)
    session.step(1, state_of(1))
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: "the freeze begins" in caplog.text, "the freeze")
    monkeypatch.setattr(RunAhead, "throttle", _break_collective)
    with pytest.raises(Preempted) as caught:
        session.step(2, state_of(2))
    assert (caught.value.saved, caught.value.code) == (False, 78)
    assert "connection closed by peer" in caught.value.reason


def test_a_device_error_without_a_preemption_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gracepoint.attach(tmp_path) as session:
        monkeypatch.setattr(RunAhead, "throttle", _break_collective)
        with pytest.raises(jax.errors.JaxRuntimeError):
            session.step(1, state_of(1))


def test_a_state_that_cannot_be_computed_at_a_save_in_a_preemption_leaves_with_the_unsaved_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = gracepoint.attach(tmp_path, save_every_steps=10, grace_period_s=3600.0)
    for step in range(1, 10):
        session.step(step, state_of(step))
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: session.notice is not None, "the notice")
    with pytest.raises(Preempted) as caught:
        session.step(10, not_computed())
    assert (caught.value.saved, caught.value.code) == (False, 78)
    assert "connection reset by peer" in caught.value.reason
    assert "a periodic save failed" not in caplog.text


def test_a_state_that_cannot_be_computed_at_a_save_is_the_users(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        with pytest.raises(jax.errors.JaxRuntimeError, match="connection reset by peer"):
            session.step(1, not_computed())
        session.step(1, state_of(1))


def test_a_second_session_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path), pytest.raises(SettingsError, match="a session is open"):
        gracepoint.attach(tmp_path)


def test_a_session_of_the_parent_is_none_of_a_forked_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gracepoint.attach(tmp_path), monkeypatch.context() as in_child:
        in_child.setattr(os, "getpid", lambda: -1)
        session_module.check_none_is_open()


def test_default_directory_of_a_laptop_is_below_the_current_one(
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


def test_operator_address_without_a_pod_name_is_a_settings_error(
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
    session.close()
    with pytest.raises(Preempted) as attached:
        gracepoint.attach(tmp_path)
    assert stepped.value is polled.value is attached.value is preempted


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda session, state: session.step(state, 1), id="step(state, n)"),
        pytest.param(lambda session, state: session.step(1, 1), id="step(n, n)"),
        pytest.param(lambda session, state: session.step(1, None), id="step(n, None)"),
        pytest.param(lambda session, state: session.poll(1), id="poll(n)"),
        pytest.param(lambda session, state: session.saved(state), id="saved(state)"),
        pytest.param(lambda session, state: session.reached_preemption(state), id="reached_preemption(state)"),
        pytest.param(lambda session, state: session.own_save_took(state, 1), id="own_save_took(state)"),
        pytest.param(lambda session, state: session.restore("/checkpoints"), id="restore(path)"),
        pytest.param(lambda session, state: session.restore(state, options=state), id="restore(options=state)"),
        pytest.param(lambda session, state: session.restore(state, from_=state), id="restore(from_=state)"),
        pytest.param(lambda session, state: session.host_state(print, "name", print), id="host_state(get, name)"),
        pytest.param(lambda session, state: session.host_state("name", state, state), id="host_state(name, value)"),
        pytest.param(lambda session, state: session.compile(state, print), id="compile(state, function)"),
    ],
)
def test_an_argument_in_the_place_of_another_is_refused_in_short(tmp_path: Path, call: Callable[..., Any]) -> None:
    state = {"w": jnp.zeros((100, 100))}
    with gracepoint.attach(tmp_path) as session:
        with pytest.raises(SettingsError, match="expected .* found ") as caught:
            call(session, state)
        assert len(str(caught.value)) < 200


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
    tmp_path: Path, notices: Notices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path, receiver=notices)
    session.step(1, state_of(1))

    close = StepCheckpointer.close

    def close_slowly(checkpointer: StepCheckpointer, timeout_s: float) -> None:
        notices.post()
        until(lambda: "phase=Retracted" in caplog.text, "the end as Retracted")
        close(checkpointer, timeout_s)

    monkeypatch.setattr(StepCheckpointer, "close", close_slowly)
    session.close()
    assert "phase=Retracted preemption=gpt-1" in caplog.text


def test_a_notice_that_stands_when_training_ends_ends_as_retracted(
    tmp_path: Path, notices: Notices, caplog: pytest.LogCaptureFixture, coordinators: list[Coordinator]
) -> None:
    caplog.set_level(logging.INFO)
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        train_slowly(session, until=lambda: "forecast state_bytes=" in caplog.text)
        notices.post(remaining_s=3600)
        until(lambda: coordinators[-1].noticed, "the notice")
    assert "phase=Retracted preemption=gpt-1" in caplog.text
    assert "message=training finished" in caplog.text


def train_slowly(session: gracepoint.Session, until: Callable[[], bool], first: int = 1) -> int:
    """Trains until something is the case; returns the last step."""
    for step in _count(first):
        session.step(step, state_of(step))
        if until():
            return step
        time.sleep(0.001)
    raise AssertionError


def test_notice_is_acted_upon_by_the_head_start_before_its_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, notices: Notices, coordinators: list[Coordinator]
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path, head_start_s=3590.0, save_every_steps=2, receiver=notices)
    step = train_slowly(session, until=lambda: "forecast state_bytes=" in caplog.text)
    notices.post(remaining_s=3600.0)
    until(lambda: coordinators[-1].noticed, "the notice")
    session.step(step + 1, state_of(step + 1))  # 10 s are left for training
    notices.post(remaining_s=3591.0)  # the deadline moves: now 1 s is
    preempted = train_until_preempted(session, first=step + 2)
    assert preempted.saved
    assert "before the deadline" in preempted.reason


def test_newest_committed_step_is_reported(tmp_path: Path, coordinators: list[Coordinator]) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=2) as session:
        spent = coordinators[-1].reporter.time_spent.spent
        assert spent().saved_s is None
        train_slowly(session, until=lambda: spent().saved_s is not None)
        first_s = spent().saved_s or 0.0
        train_slowly(session, until=lambda: (spent().saved_s or 0.0) > first_s, first=1000)
        assert (spent().saved_s or 0.0) <= spent().now_s


def test_own_save_of_a_loop_is_reported(tmp_path: Path, coordinators: list[Coordinator]) -> None:
    with gracepoint.attach(tmp_path) as session:
        spent = coordinators[-1].reporter.time_spent.spent
        for step in range(1, 10):
            assert not session.reached_preemption(step)
        assert spent().saved_s is None
        session.own_save_took(0.1, 9)
        assert spent().saved_s is not None


def test_a_notice_that_is_retracted_before_the_freeze_changes_nothing(
    tmp_path: Path, notices: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        step = train_slowly(session, until=lambda: "forecast state_bytes=" in caplog.text)
        notices.post(remaining_s=3600.0)
        notices.mailbox.retract("gpt-1", "the taint is gone")
        until(lambda: "phase=Retracted" in caplog.text, "the end as Retracted")
        session.step(step + 1, state_of(step + 1))
    assert "message=the taint is gone" in caplog.text
    assert caplog.text.count("phase=") == 1


def test_a_drill_saves_and_training_continues(
    tmp_path: Path, notices: Notices, caplog: pytest.LogCaptureFixture, coordinators: list[Coordinator]
) -> None:
    caplog.set_level(logging.INFO)
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        notices.post("drill-1", drill=True)
        step = train_slowly(session, until=lambda: "phase=Committed preemption=drill-1" in caplog.text)
        until(lambda: not coordinators[-1].noticed, "the end of the notice")
        assert (tmp_path / str(step)).is_dir()
        notices.post("drill-2", drill=True)
        step = train_slowly(session, until=lambda: "phase=Committed preemption=drill-2" in caplog.text, first=step + 1)
        until(lambda: not coordinators[-1].noticed, "the end of the notice")
        notices.post("gpt-1")
        preempted = train_until_preempted(session, first=step + 1)
    assert (preempted.code, preempted.saved) == (77, True)
    assert "message=drill: step" in caplog.text


def test_a_drill_that_cannot_save_fails_and_training_continues(
    tmp_path: Path, notices: Notices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ChunkWriter, "write", _fail_to_write)
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        notices.post("drill-1", drill=True)
        step = train_slowly(session, until=lambda: "phase=Failed preemption=drill-1" in caplog.text)
        session.step(step + 1, state_of(step + 1))
    assert "disk full" in caplog.text


def test_loop_with_own_saves_gets_the_stop_and_ends_with_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path)
    hook = reached_preemption_hook()
    assert hook is not None
    asked = 0
    with pytest.raises(Preempted) as caught:  # noqa: PT012
        for step in _count(1):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if hook(step):
                asked = step
                assert session.reached_preemption(step)  # asked again: the same answer
                session.saved(step)
    assert (caught.value.code, caught.value.saved, caught.value.step) == (77, True, asked)
    assert "phase=Committed" in caplog.text


def test_drill_of_a_loop_with_own_saves_returns_from_saved(tmp_path: Path, notices: Notices) -> None:
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        notices.post("drill-1", drill=True)
        step = _asked(session)
        session.saved(step)
        assert not session.reached_preemption(step + 1)


def test_own_saves_of_known_duration_begin_as_late_as_possible(tmp_path: Path, notices: Notices) -> None:
    with gracepoint.attach(tmp_path, receiver=notices, head_start_s=0) as session:
        for step in range(1, 10):
            assert not session.reached_preemption(step)
        session.own_save_took(0.1, 9)
        notices.post(remaining_s=1000.0)
        _until(lambda: session.notice is not None)
        for step in range(10, 200):
            assert not session.reached_preemption(step)
        notices.post(remaining_s=3.0)
        with pytest.raises(Preempted):
            session.saved(_asked(session, first=200))


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_of_an_own_save_is_a_positive_number(tmp_path: Path, duration_s: float) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError, match="expected seconds above 0"):
        session.own_save_took(duration_s, 1)


def test_a_session_says_which_preemption_is_in_progress_and_how_long(tmp_path: Path, notices: Notices) -> None:
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        assert session.notice is None
        notices.post("drill-1", drill=True)
        assert session.notice is None
        notices.post(remaining_s=20.0)
        found = session.notice
        assert found is not None
        assert (found.cause, found.signal) == ("Spot", "taint")
        assert 0 < found.deadline_s <= 20.0
        notices.mailbox.retract("gpt-1")
        _until(lambda: session.notice is None)
        notices.mailbox.retract("drill-1")


def _until(true: Callable[[], bool]) -> None:
    next(step for step in _count(1) if true())


def _asked(session: gracepoint.Session, first: int = 1) -> int:
    return next(step for step in _count(first) if session.reached_preemption(step))


@pytest.mark.parametrize("how", ["close", "step", "ask", "poll"])
def test_leaving_the_agreed_point_without_saved_is_a_failure(
    tmp_path: Path, notices: Notices, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    session = gracepoint.attach(tmp_path, receiver=notices)
    notices.post()
    step = _asked(session)
    leave: dict[str, Callable[[], object]] = {
        "close": session.close,
        "step": lambda: session.step(step + 1, state_of(step + 1)),
        "ask": lambda: session.reached_preemption(step + 1),
        "poll": lambda: session.poll(state_of(step)),
    }
    with pytest.raises(Preempted, match=rf"without saved\({step}\)") as caught:
        leave[how]()
    assert (caught.value.code, caught.value.saved) == (78, False)


def test_error_during_own_save_exits_with_the_unsaved_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: Notices, exit_handlers: list[Callable[[], None]]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(OSError, match="disk full"), gracepoint.attach(tmp_path, receiver=notices) as session:  # noqa: PT012
        notices.post()
        _asked(session)
        raise OSError("disk full")
    exit_handlers[-1]()
    assert codes == [78]


def test_a_preempted_process_leaves_the_directory_to_other_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: Notices, exit_handlers: list[Callable[[], None]]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    session = gracepoint.attach(tmp_path, receiver=notices)
    lease = Layout(storage_path(tmp_path)).lease()
    notices.post()
    train_until_preempted(session)
    assert lease.entry() is not None, "until the process exits"
    exit_handlers[-1]()
    assert codes == [77]
    assert lease.entry() is None


def test_saved_is_for_what_was_asked(tmp_path: Path, notices: Notices) -> None:
    with gracepoint.attach(tmp_path, receiver=notices) as session:
        with pytest.raises(SettingsError, match=r"saved\(1\): .* found that nowhere"):
            session.saved(1)
        notices.post("drill-1", drill=True)
        step = _asked(session)
        with pytest.raises(SettingsError, match=f"found that at step {step}"):
            session.saved(step + 1)
        session.saved(step)


def test_loop_without_restore_cannot_train_below_a_newer_step(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=5) as session:
        for step in range(1, 11):
            session.step(step, state_of(step))
    with (
        gracepoint.attach(tmp_path) as session,
        pytest.raises(CheckpointError, match=r"complete step 10, and restore\(\) was not called"),
    ):
        session.step(1, state_of(1))
    with gracepoint.attach(tmp_path) as session:  # who restored in another way goes on from there
        session.step(11, state_of(11))


@pytest.mark.long
@pytest.mark.parametrize("ends", [True, False], ids=["that_can_be_stopped", "stuck_in_the_kernel"])
def test_blocking_periodic_save_does_not_delay_a_preemption(
    tmp_path: Path, notices: Notices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path, save_every_steps=1, head_start_s=10.0, receiver=notices)
    step = train_slowly(session, until=lambda: "forecast state_bytes=" in caplog.text)
    until(lambda: (tmp_path / str(step)).is_dir(), "the save")
    write, over = ChunkWriter.write, threading.Event()

    def hang(*arguments: Any, **keywords: Any) -> Any:
        deadline = next(each for each in arguments if isinstance(each, Deadline))
        monkeypatch.setattr(ChunkWriter, "write", write)
        while not over.wait(0.01) and not (ends and deadline.passed()):
            pass
        raise SaveFailed("it hung")

    monkeypatch.setattr(ChunkWriter, "write", hang)
    session.step(step + 1, state_of(step + 1))
    is_due = SaveInterval.is_due

    def preempted_meanwhile(interval: SaveInterval, number: int) -> bool:
        notices.post(remaining_s=11.0)  # 1 s is left for training
        until(lambda: "the freeze begins" in caplog.text, "the freeze")
        return is_due(interval, number)

    monkeypatch.setattr(SaveInterval, "is_due", preempted_meanwhile)
    session.step(step + 2, state_of(step + 2))
    assert ("a periodic save is left out" in caplog.text) is not ends
    try:
        preempted = train_until_preempted(session, first=step + 3)
    finally:
        over.set()
    assert (preempted.saved, preempted.step, preempted.steps_lost) == (True, step + 3, 0)


def test_failing_periodic_save_is_logged_and_does_not_delay_the_emergency(
    tmp_path: Path,
    notices: Notices,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    coordinators: list[Coordinator],
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path, save_every_steps=1, head_start_s=10.0, receiver=notices)
    step = train_slowly(session, until=lambda: "forecast state_bytes=" in caplog.text)
    until(lambda: (tmp_path / str(step)).is_dir(), "the save")
    write = ChunkWriter.write

    monkeypatch.setattr(ChunkWriter, "write", _fail_to_write)
    session.step(step + 1, state_of(step + 1))  # its save fails in the background
    notices.post(remaining_s=3600.0)
    until(lambda: coordinators[-1].noticed, "the notice")
    session.step(step + 2, state_of(step + 2))
    assert "a periodic save failed; the first was that of step" in caplog.text
    notices.post(remaining_s=10.0)
    until(lambda: "the freeze begins" in caplog.text, "the freeze")
    monkeypatch.setattr(ChunkWriter, "write", write)
    assert train_until_preempted(session, first=step + 3).saved


def test_what_cannot_be_deleted_is_reported_while_the_session_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[TroubleKind, bool]] = []
    monkeypatch.setattr(Reporter, "trouble", lambda self, kind, message, *, over, **known: told.append((kind, over)))
    undeleted.end()
    undeleted.failed("/elsewhere/1", OSError("before the session"))
    with gracepoint.attach(tmp_path):
        undeleted.gone("/elsewhere/1")
        undeleted.failed("/elsewhere/2", OSError("locked"))
    undeleted.failed("/elsewhere/3", OSError("after the session"))
    undeleted.end()
    assert told == [(TroubleKind.DELETIONS, over) for over in (False, True, False)]


def test_impossible_deadline_is_reported_at_the_start_and_the_end(
    tmp_path: Path, notices: Notices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = gracepoint.attach(tmp_path, receiver=notices)
    train_slowly(session, until=lambda: "forecast state_bytes=" in caplog.text)
    monkeypatch.setattr(ChunkWriter, "write", _fail_to_write)
    hour = Figures(state_bytes=1, step_s=10.0, wait_s=10.0, drain_s=30.0, save_s=3600.0)
    monkeypatch.setattr(forecast, "figures", lambda *arguments: hour)
    notices.post(remaining_s=5.0)
    until(lambda: "the deadline cannot be met by what is known" in caplog.text, "the warning")
    preempted = train_until_preempted(session, first=100)
    assert "a step takes 10.0 s, drain and save are predicted to take 3630.0 s" in preempted.reason


def test_a_forked_child_that_ends_leaves_the_session_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_handlers: list[Callable[[], None]]
) -> None:
    with gracepoint.attach(tmp_path) as session:
        with monkeypatch.context() as in_child:
            in_child.setattr(os, "getpid", lambda: -1)
            exit_handlers[-1]()
        session.step(1, state_of(1))


def test_an_error_of_training_passes_and_ends_all_threads(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), gracepoint.attach(tmp_path) as session:  # noqa: PT012
        session.step(1, state_of(1))
        raise ZeroDivisionError("the user's own")
    until(lambda: not _own_threads(), "the threads to end")


def test_an_error_of_training_lets_the_save_in_progress_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broke_off, write = threading.Event(), ChunkWriter.write

    def write_late(*arguments: Any, **keywords: Any) -> Any:
        assert broke_off.wait(30)
        return write(*arguments, **keywords)

    with pytest.raises(ZeroDivisionError), gracepoint.attach(tmp_path, save_every_steps=1) as session:  # noqa: PT012
        session.step(1, state_of(1))  # warms the writer
        until(lambda: (tmp_path / "1").is_dir(), "the first save")
        monkeypatch.setattr(ChunkWriter, "write", write_late)
        session.step(2, state_of(2))
        threading.Timer(0.2, broke_off.set).start()
        raise ZeroDivisionError("the user's own")
    assert (tmp_path / "2").is_dir()
    until(lambda: not _own_threads(), "the threads to end")


def test_closing_may_be_repeated_and_ends_all_threads(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    session = gracepoint.attach(tmp_path)
    session.close()
    session.close()
    until(lambda: not _own_threads(), "the threads to end")
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
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(Guest, "gather", lambda self: Line(ours, 0.0))
    monkeypatch.setattr(distributed, "wait_for_coordinator", lambda address, timeout_s: None)
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
    with theirs, pytest.raises(Joined) as caught:
        gracepoint.attach(tmp_path)
    args, kwargs = json.loads(str(caught.value))
    assert args == ["gpt-workers-0-0.gpt:8476", 4, 3]
    assert kwargs["cluster_detection_method"] == "deactivate"


def _storage_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: PosixPath) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "as the storage says")

    monkeypatch.setattr(PosixPath, "make_folder_durably", away)


def test_storage_that_is_away_at_the_start_of_a_pod_is_no_failure_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _storage_is_away(monkeypatch)
    monkeypatch.setenv(Env.POD_NAME, "gpt-w-0-0")
    with pytest.raises(NotJoined) as caught:
        gracepoint.attach(tmp_path, join_timeout_s=1, not_joined_exit_code=80)
    assert caught.value.code == 80
    assert f"does not reach {tmp_path}: [Errno 110] as the storage says" in caught.value.reason
    assert "attach waits for storage" in caplog.text


def test_storage_that_is_away_is_an_error_at_once_where_somebody_looks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _storage_is_away(monkeypatch)
    with pytest.raises(CheckpointError, match="does not reach"):
        gracepoint.attach(tmp_path)


def test_the_library_installs_no_log_handlers(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path):
        pass
    assert logging.getLogger("gracepoint").handlers == []


def _own_threads() -> list[str]:
    """Returns the threads of sessions. The one of object stores serves all of the process, and stays."""
    own = [t.name for t in threading.enumerate() if t.name.startswith("gracepoint")]
    return [name for name in own if name != "gracepoint: hedges"]


@pytest.fixture
def _keeping_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of these loops take no time, and the machine may be busy."""

    class Quick(sync_points.LastState):
        def __init__(
            self,
            host_state: Callable[[], Mapping[str, Any]],
            pressing: Callable[[], bool],
            signalled: Callable[[], bool],
            clock: Callable[[], float],
        ) -> None:
            super().__init__(host_state, pressing, signalled, clock=lambda: 0.0)

    monkeypatch.setattr(session_module, "LastState", Quick)


class Loader:
    """A data loader whose workers a SIGTERM to the process group has ended."""

    def __init__(self, error: BaseException) -> None:
        self.position = 0
        self._error = error

    def next(self) -> None:
        self.position += 1  # it is ahead of the sync point then
        if self.position == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            raise self._error


def _train_with(session: gracepoint.Session, loader: Loader, *, in_place: bool = False) -> None:
    session.host_state("data", lambda: {"position": loader.position}, lambda value: None)
    state = state_of(0)
    with session:
        for step in _count(1):
            loader.next()
            new = state_of(step)
            if in_place:
                state["w"], state["step"] = new["w"], new["step"]
            else:
                state = new
            session.step(step, state)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader worker exited unexpectedly"),
        StopIteration(),
        KeyboardInterrupt(),
        SystemExit(0),
        MemoryError(),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("_keeping_is_quick")
def test_loop_that_breaks_off_after_a_notice_saves_what_it_handed_last(
    tmp_path: Path,
    error: BaseException,
    exits: list[ProcessExit],
    sessions: list[Opened],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(type(error)) as caught:
        _train_with(gracepoint.attach(tmp_path), Loader(error))
    assert caught.value is error, "the user's error is not masked"
    assert "gracepoint: the process exits with code 77: step 3 is committed" in error.__notes__[0]
    assert exits[-1].decided
    assert f"the training of process 0 broke off after it: {type(error).__name__}" in caplog.text
    sessions[-1].process_ends()
    again = gracepoint.attach(tmp_path)
    position: dict[str, int] = {}
    again.host_state("data", lambda: position, position.update)
    state, step = again.restore(like=state_of(0))
    assert step == 3
    assert (state["w"] == 3).all()
    assert position == {"position": 3}, "and not where the loader is now"
    again.close()


@pytest.mark.usefixtures("_keeping_is_quick")
def test_data_that_just_ends_after_a_sigterm_is_no_end_of_training(tmp_path: Path, sessions: list[Opened]) -> None:
    def batches() -> Iterator[int]:
        yield from (1, 2, 3)
        os.kill(os.getpid(), signal.SIGTERM)  # whoever fed it is gone, and it says so by an end

    with pytest.raises(Preempted) as preempted, gracepoint.attach(tmp_path) as session:  # noqa: PT012  one loop
        for step in batches():
            session.step(step, state := state_of(step))  # as a real loop, which holds its state
        assert state
    assert (preempted.value.saved, preempted.value.step, preempted.value.code) == (True, 3, 77)
    assert "close() was called after a SIGTERM" in preempted.value.reason
    sessions[-1].process_ends()
    with gracepoint.attach(tmp_path) as again:
        assert again.restore(like=state_of(0))[1] == 3


@pytest.mark.usefixtures("_keeping_is_quick")
def test_training_that_ends_after_a_sigterm_with_its_state_dropped_has_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with gracepoint.attach(tmp_path) as session:
        session.step(1, state := state_of(1))
        state["w"].delete()  # donated to a step that is no sync point
        os.kill(os.getpid(), signal.SIGTERM)
    assert re.search("(reason|message)=training finished", caplog.text)
    phases = re.findall(r"preemption phase=(\w+)", caplog.text)
    assert phases[-1:] in ([], ["Retracted"]), "the operator hears of the end if it heard of a beginning"


@pytest.mark.usefixtures("_keeping_is_quick")
def test_close_in_a_finally_block_saves_what_the_loop_that_broke_off_handed_last(
    tmp_path: Path, exits: list[ProcessExit], sessions: list[Opened]
) -> None:
    session = gracepoint.attach(tmp_path)
    error = RuntimeError("DataLoader worker exited unexpectedly")
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012  one loop
        try:
            for step in (1, 2, 3):
                session.step(step, state := state_of(step))
            os.kill(os.getpid(), signal.SIGTERM)
            assert state
            raise error
        finally:
            session.close()
    assert caught.value is error, "the user's error is not masked"
    assert "gracepoint: the process exits with code 77: step 3 is committed" in error.__notes__[0]
    assert exits[-1].decided
    sessions[-1].process_ends()
    with gracepoint.attach(tmp_path) as again:
        assert again.restore(like=state_of(0))[1] == 3


def test_close_in_an_except_block_without_a_notice_ends_the_session(tmp_path: Path, exits: list[ProcessExit]) -> None:
    session = gracepoint.attach(tmp_path)
    try:
        session.step(1, state_of(1))
        raise StopIteration
    except StopIteration:
        session.close()
    assert not exits[-1].decided
    gracepoint.attach(tmp_path).close()


@pytest.mark.usefixtures("_keeping_is_quick")
def test_loop_that_changes_its_state_in_place_saves_no_mixture(tmp_path: Path, sessions: list[Opened]) -> None:
    def changes_before_it_fails() -> None:
        state = state_of(0)
        arrays = []  # whoever changes state in place may well hold the old arrays
        with gracepoint.attach(tmp_path) as session:
            for step in _count(1):
                state["w"] = state_of(step)["w"]
                arrays.append(state["w"])
                if step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                    raise RuntimeError("between two arrays")
                state["step"] = state_of(step)["step"]
                session.step(step, state)

    with pytest.raises(RuntimeError, match="between two arrays"):
        changes_before_it_fails()
    sessions[-1].process_ends()
    with gracepoint.attach(tmp_path) as again:
        state, step = again.restore(like=state_of(0))
    assert step == 3
    assert (state["w"] == 3).all()
    assert int(state["step"]) == 3


@pytest.mark.usefixtures("_keeping_is_quick")
def test_loop_that_breaks_off_with_its_state_donated_says_that_nothing_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_step = jax.jit(lambda state: {"w": state["w"] + 1, "step": state["step"] + 1}, donate_argnums=0)

    def fails_in_a_step() -> None:
        with gracepoint.attach(tmp_path) as session:
            state = state_of(0)
            for step in _count(1):
                state = train_step(state)
                if step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                    raise RuntimeError("after the step")
                session.step(step, state)

    with pytest.raises(RuntimeError, match="after the step"):
        fails_in_a_step()
    assert "the state of step 3 is gone: it was donated to the next step, or deleted" in caplog.text
    assert not [path for path in tmp_path.iterdir() if path.name.isdigit()]


def test_interrupt_within_a_sync_point_saves_what_is_handed_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, throttle = gracepoint.attach(tmp_path), RunAhead.throttle

    def interrupt(self: RunAhead, state: Any, limit: int) -> None:
        throttle(self, state, limit)
        if int(state["step"]) == 3:  # as torch's data loader does when a worker dies, in whatever the main thread does
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("a worker was killed")

    monkeypatch.setattr(RunAhead, "throttle", interrupt)

    def train() -> None:
        with session:
            for step in _count(1):
                session.step(step, state_of(step))

    with pytest.raises(RuntimeError, match="a worker was killed"):
        train()
    assert (tmp_path / "3").is_dir()


def _fail_after_a_step(session: gracepoint.Session, before: Callable[[], None] = lambda: None) -> None:
    with session:
        session.step(1, state_of(1))
        before()
        raise RuntimeError("of its own")


def test_loop_that_breaks_off_without_a_notice_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of its own"):
        _fail_after_a_step(gracepoint.attach(tmp_path))
    assert not (tmp_path / "1").exists()


def test_loop_that_breaks_off_in_a_drill_saves_nothing(tmp_path: Path, notices: Notices) -> None:
    session = gracepoint.attach(tmp_path, receiver=notices)
    with pytest.raises(RuntimeError, match="of its own"):
        _fail_after_a_step(session, lambda: notices.post(drill=True))
    assert not (tmp_path / "1").exists()


def test_a_real_forked_child_leaves_the_session_to_its_parent(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.step(1, state_of(1))

        def in_child() -> None:
            for call in (lambda: session.step(2, {}), lambda: session.poll({}), session.restore):
                with pytest.raises(ForkedChild, match="the session belongs to process"):
                    call()
            assert reached_preemption_hook() is None
            session.close()
            with session:
                raise SystemExit(3)  # as a child does that is told to end

        assert forked(in_child) == "SystemExit: 3"
        assert Layout(storage_path(tmp_path)).lease().exists()
        session.step(2, state_of(2))
    assert not Layout(storage_path(tmp_path)).lease().exists()
