"""Checkpoints with a path of their own: saved in the background, whole or not there, restored by all or none."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath  # type: ignore[import-untyped]
from flax import nnx

from gracepoint import checkpoint
from gracepoint.checkpoint import verification
from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.checkpoint_manager import CheckpointManager
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.options import SaveArgs, WriteOptions
from gracepoint.checkpoint.saving.executor import SaveExecutor
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.deadline import Deadline
from gracepoint.errors import (
    BarrierError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    SaveFailed,
    SettingsError,
)
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    flip_bit,
    in_gang,
    not_computed,
    outcomes_in_gang,
    rich_state,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.failures import DyingGang, break_writer
from tests.unit.checkpoint.fakes.transfer_recorder import AtWrites
from tests.waiting import until_no_thread

pytestmark = pytest.mark.integration


@pytest.fixture
def checkpointer() -> Iterator[AsyncCheckpointer]:
    with AsyncCheckpointer() as made:
        yield made


def hold_commit(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes every commit wait for the event that is returned."""
    go, real = threading.Event(), RenameCommit.finalize

    def late(*arguments: Any, **options: Any) -> bool:
        assert go.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(RenameCommit, "finalize", late)
    return go


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Saving.


def test_save_returns_after_the_copy_and_appears_atomically(
    tmp_path: Path, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = hold_commit(monkeypatch)
    values = np.arange(1000.0)
    checkpointer.save(tmp_path / "a", {"w": values})
    values[:] = -1  # it was copied
    assert not (tmp_path / "a").exists()
    go.set()
    checkpointer.wait_until_finished()
    assert names(tmp_path) == ["a"]
    np.testing.assert_array_equal(checkpointer.restore(tmp_path / "a")["w"], np.arange(1000.0))


def test_leaves_of_every_kind_come_back(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    state = rich_state()
    checkpointer.save(tmp_path / "a", state)
    assert_same(checkpointer.restore(tmp_path / "a", state), state)


@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_state_that_the_devices_of_one_process_cannot_compute_is_an_error_in_all(
    tmp_path: Path, fails_in: int
) -> None:
    def run(gang: ProcessGroup) -> None:
        with AsyncCheckpointer(gang=gang) as checkpointer:
            state = not_computed() if gang.process_index == fails_in else small_state()
            with pytest.raises(SaveFailed, match="the devices have failed to compute the state"):  # noqa: PT012
                checkpointer.save(tmp_path / "a", state)
                checkpointer.wait_until_finished()

    in_gang(2, run)
    assert not (tmp_path / "a").exists()


def test_a_save_waits_for_the_one_before_it(
    tmp_path: Path, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = hold_commit(monkeypatch)
    checkpointer.save(tmp_path / "a", small_state())
    seen: list[bool] = []

    def save_second() -> None:
        checkpointer.save(tmp_path / "b", small_state())
        seen.append((tmp_path / "a").exists())

    second = threading.Thread(target=save_second)
    second.start()
    go.set()
    second.join(30)
    assert seen == [True]


def test_what_is_there_is_replaced_only_on_request(
    tmp_path: Path, checkpointer: AsyncCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer.save(tmp_path / "a", small_state(1))
    with pytest.raises(CheckpointExists, match="a exists already: .* force=True") as caught:
        checkpointer.save(tmp_path / "a", small_state(2))
    assert isinstance(caught.value, ValueError)  # as Orbax raises
    assert_same(checkpointer.restore(tmp_path / "a", small_state()), small_state(1))
    checkpointer.save(tmp_path / "a", small_state(2), force=True)
    assert_same(checkpointer.restore(tmp_path / "a", small_state()), small_state(2))
    assert names(tmp_path) == ["a"]
    assert f"is saved again: {tmp_path / 'a'} is replaced" in caplog.text


def test_a_save_that_shall_replace_another_and_fails_leaves_the_other_whole(
    tmp_path: Path, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "a", small_state(1))
    with monkeypatch.context() as patch:
        break_writer(patch)
        checkpointer.save(tmp_path / "a", small_state(2), force=True)
        with pytest.raises(SaveFailed, match="No space left"):
            checkpointer.wait_until_finished()
    assert_same(checkpointer.restore(tmp_path / "a", small_state()), small_state(1))


def test_force_replaces_checkpoints_alone(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointExists, match="home is not a checkpoint, and force=True replaces nothing else"):
        checkpointer.save(tmp_path / "home", small_state(), force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointExists, match="file is not a folder"):
        checkpointer.save(tmp_path / "file", small_state(), force=True)
    (tmp_path / "empty").mkdir()
    checkpointer.save(tmp_path / "empty", small_state(), force=True)
    checkpointer.wait_until_finished()
    assert names(tmp_path / "home") == ["thesis.tex"]
    assert_same(checkpointer.restore(tmp_path / "empty", small_state()), small_state())


def test_what_came_to_its_path_meanwhile_is_not_replaced(
    tmp_path: Path, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = hold_commit(monkeypatch)
    checkpointer.save(tmp_path / "a", small_state(1))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    go.set()
    with pytest.raises(SaveFailed, match="a already exists"):
        checkpointer.wait_until_finished()
    assert names(tmp_path / "a") == ["file"]


NEXT_CALLS: dict[str, Callable[[AsyncCheckpointer, Path], object]] = {
    "save": lambda made, path: made.save(path / "next", small_state()),
    "restore": lambda made, path: made.restore(path / "next"),
    "check_for_errors": lambda made, path: made.check_for_errors(),
    "wait_until_finished": lambda made, path: made.wait_until_finished(),
    "close": lambda made, path: made.close(),
}


@pytest.mark.parametrize("call", NEXT_CALLS.values(), ids=NEXT_CALLS)
def test_an_error_of_the_background_surfaces_at_the_next_call_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[AsyncCheckpointer, Path], object]
) -> None:
    checkpointer = AsyncCheckpointer()
    with monkeypatch.context() as patch:
        break_writer(patch)
        checkpointer.save(tmp_path / "a", small_state())
        until_no_thread("gracepoint: the save")
    with pytest.raises(SaveFailed, match="No space left on device"):
        call(checkpointer, tmp_path)
    assert not (tmp_path / "next").exists()
    checkpointer.close()


def test_a_context_that_an_error_leaves_raises_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_writer(monkeypatch)
    with pytest.raises(ZeroDivisionError), AsyncCheckpointer() as checkpointer:  # noqa: PT012
        checkpointer.save(tmp_path / "a", small_state())
        raise ZeroDivisionError


def test_a_closed_one_says_so_and_waiting_for_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = AsyncCheckpointer()
    break_writer(monkeypatch)
    checkpointer.save(tmp_path / "a", small_state())
    with pytest.raises(SaveFailed, match="No space left on device"):
        checkpointer.close()
    for harmless in (checkpointer.close, checkpointer.wait_until_finished, checkpointer.check_for_errors):
        harmless()
    calls: list[Callable[[], object]] = [
        lambda: checkpointer.save(tmp_path / "a", small_state()),
        lambda: checkpointer.save_and_wait(tmp_path / "a", small_state()),
        lambda: checkpointer.prepare(small_state()),
        lambda: checkpointer.restore(tmp_path / "a"),
        lambda: checkpointer.metadata(tmp_path / "a"),
    ]
    for call in calls:
        with pytest.raises(SettingsError, match="the checkpointer is closed"):
            call()


def test_a_program_that_ends_with_a_save_in_progress_waits_for_it(tmp_path: Path) -> None:
    code = (
        "import sys, numpy; from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer;"
        "checkpointer = AsyncCheckpointer();"
        "checkpointer.save(sys.argv[1], {'w': numpy.zeros(1 << 22)})"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        check=True,
        timeout=100,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert checkpoint.restore(tmp_path / "a")["w"].shape == (1 << 22,)


UNUSABLE: dict[str, tuple[object, str]] = {
    "relative": ("relative/path", "'relative/path': expected an absolute path, or a URI as gs://bucket/name"),
    "of another store": ("ftp://host/path", "ftp:// is not known; expected .*file://, gs://, memory://, s3://"),
    "the top of the disk": ("/", "checkpoint path '/': expected a folder's name at its end"),
    "no bucket": ("gs://b/path", "expected gs://bucket/name, found bucket 'b'"),
    "no name in the bucket": ("s3://a-bucket//path", "expected no empty part"),
    "no path": (7, "expected an absolute path, or a URI as gs://bucket/name, found 7"),
    "of another store, of etils": (epath.Path("az://account/path"), "az:// is not known; expected"),
    "no bucket, of etils": (epath.Path("gs://b/path"), "expected gs://bucket/name, found bucket 'b'"),
}


@pytest.mark.parametrize(("path", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_paths_that_cannot_be_saved_to_are_refused(checkpointer: AsyncCheckpointer, path: Any, message: str) -> None:
    for call in (lambda: checkpointer.save(path, small_state()), lambda: checkpointer.restore(path, small_state())):
        with pytest.raises(SettingsError, match=message):
            call()


def test_a_uri_and_a_trailing_slash_are_paths_like_others(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(f"file://{tmp_path}/a/", small_state())
    checkpointer.wait_until_finished()
    assert names(tmp_path) == ["a"]


def test_names_of_its_own_files_are_no_names_for_leaves(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    for name in ("_GRACEPOINT", "_CHECKPOINT_METADATA", "done.process_0.json", "commit_success.txt"):
        with pytest.raises(CheckpointError, match="the name is reserved"):
            checkpointer.save(tmp_path / "a", {name: np.ones(2)})
    checkpointer.save(tmp_path / "a", {"default": np.ones(2), "host_state": np.ones(3)})  # there are no items
    assert checkpointer.restore(tmp_path / "a")["host_state"].shape == (3,)


def test_listeners_hear_blocking_times_and_background_events(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    with Heard() as heard:
        chunks = {"w": SaveArgs(chunk_byte_size=200), "b": SaveArgs()}  # four chunks, and one
        checkpointer.save(tmp_path / "a", {"w": np.zeros(100), "b": np.zeros(2)}, save_args=chunks)
        checkpointer.wait_until_finished()
    events = "/jax/checkpoint/write/async"
    assert heard.scalars[f"{events}/bytes"] == 816
    assert heard.scalars[f"{events}/commit_future_count"] == heard.durations[f"{events}/commit_future_count"] == 5
    blocked_s, total_s, thread_s, commit_s = (
        heard.durations[f"{events}/{name}"]
        for name in ("blocking_duration_secs", "total_duration_secs", "thread_duration_sec", "commit_duration_sec")
    )
    assert 0 < blocked_s < total_s
    assert 0 < commit_s < thread_s < total_s
    stats = checkpointer.last_save
    assert stats is not None
    assert (stats.bytes, stats.blocked_s, stats.committed_s) == (816, blocked_s, thread_s)
    assert stats.durable_s == commit_s


class Heard:
    """What listeners of ``jax.monitoring`` hear while a block runs."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.durations: dict[str, float] = {}
        self.scalars: dict[str, float] = {}
        self.labels: dict[str, dict[str, Any]] = {}  # of durations and scalars

    def __enter__(self) -> Heard:
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_scalar_listener(self._scalar)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._event)
        jax.monitoring.unregister_event_duration_listener(self._duration)
        jax.monitoring.unregister_scalar_listener(self._scalar)

    def _event(self, event: str, **_: Any) -> None:
        self.events.append(event)

    def _duration(self, event: str, duration_secs: float, **labels: Any) -> None:
        self.durations[event] = duration_secs
        self.labels[event] = labels

    def _scalar(self, event: str, value: float, **labels: Any) -> None:
        self.scalars[event] = value
        self.labels[event] = labels


def test_new_checkpointer_records_orbaxs_event_and_logs_its_settings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    with Heard() as heard:
        AsyncCheckpointer(timeout_s=7).close()
    assert heard.events == ["/jax/orbax/async_checkpointer/init"]
    assert "timeout_s=7 primary_host=0 active_processes=all, barrier built in" in caplog.text
    AsyncCheckpointer(primary_host=None, active_processes={2, 0}, barrier_sync_fn=SyncFn(2)).close()
    assert "timeout_s=900 primary_host=None active_processes=[0, 2], barrier barrier_sync_fn" in caplog.text


@pytest.mark.parametrize("in_background", [True, False], ids=["in the background", "waited for"])
def test_saves_are_recorded_by_orbaxs_names(
    tmp_path: Path, checkpointer: AsyncCheckpointer, in_background: bool
) -> None:
    events = "/jax/orbax/write" + ("/async" if in_background else "")
    with Heard() as heard:
        (checkpointer.save if in_background else checkpointer.save_and_wait)(tmp_path / "a", {"w": np.zeros(1 << 20)})
        checkpointer.wait_until_finished()
    assert [event for event in heard.events if "/write" in event] == [f"{events}/start", "/jax/orbax/write/success"]
    assert heard.durations[f"{events}/blocking_duration_secs"] > 0
    assert heard.durations[f"{events}/blocking_duration_secs"] <= heard.durations[f"{events}/total_duration_secs"]
    assert heard.durations["/jax/orbax/write/worker/total_duration_secs"] > 0
    assert heard.scalars["/jax/orbax/write/worker/io/requested/gbytes"] == 8 / 1024
    assert heard.scalars["/jax/orbax/write/worker/io/requested/throughput/gbytes_per_sec"] > 0


def test_restores_are_recorded_by_orbaxs_names(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save_and_wait(tmp_path / "a", {"w": np.zeros(1 << 20)})
    with Heard() as heard:
        checkpointer.restore(tmp_path / "a")
    assert [event for event in heard.events if "/read" in event] == ["/jax/orbax/read/start", "/jax/orbax/read/success"]
    total_s = heard.durations["/jax/orbax/read/total_duration_secs"]
    assert 0 < heard.durations["/jax/orbax/read/worker/total_duration_secs"] <= total_s
    assert heard.scalars["/jax/orbax/read/worker/io/requested/gbytes"] == 8 / 1024
    assert heard.scalars["/jax/checkpoint/read/gbytes"] == 8 / 1024
    assert heard.scalars["/jax/orbax/read/worker/io/requested/throughput/gbytes_per_sec"] > 0
    three = ("total_duration_secs", "io/requested/gbytes", "io/requested/throughput/gbytes_per_sec")
    assert [heard.labels[f"/jax/orbax/read/worker/{name}"] for name in three] == [{"storage_type": "other"}] * 3


def test_speed_of_each_read_is_logged_with_its_process(
    tmp_path: Path, checkpointer: AsyncCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer.save_and_wait(tmp_path / "a", {"w": np.zeros(3)})
    caplog.set_level(logging.INFO, "gracepoint")
    checkpointer.restore(tmp_path / "a")
    assert re.search(rf"process 0 read 24 bytes of {re.escape(str(tmp_path / 'a'))} in .* bytes/s", caplog.text)


@pytest.mark.parametrize("in_background", [True, False], ids=["in the background", "waited for"])
def test_path_of_every_save_is_logged_from_begin_to_end(
    tmp_path: Path, checkpointer: AsyncCheckpointer, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    (checkpointer.save if in_background else checkpointer.save_and_wait)(tmp_path / "a", {"w": np.zeros(3)})
    checkpointer.wait_until_finished()
    where = re.escape(str(tmp_path / "a"))
    begin = rf"process 0 of 1 saves {where} .*, through {where}\.gracepoint-tmp\S+; .* meet at 'checkpoint/"
    assert re.search(begin, caplog.text)
    assert re.search(rf"process 0 wrote 24 bytes in .* to {where}\.gracepoint-tmp", caplog.text)
    assert re.search(rf"saved {where} step=None bytes=24", caplog.text)


@pytest.mark.parametrize("when", ["after it failed", "while it is under way"])
def test_a_failed_save_of_a_checkpointer_that_is_dropped_is_logged(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing = threading.Event()

    def fail() -> None:
        assert failing.wait(60)
        raise RuntimeError("the callback broke")

    gc.collect()  # what other tests have dropped
    caplog.clear()
    checkpointer = AsyncCheckpointer(post_finalization_callback=fail)
    checkpointer.save(tmp_path / "a", {"w": np.zeros(3)})
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("gracepoint: the save of")]
    if when == "after it failed":
        failing.set()
        thread.join(60)
    del checkpointer
    gc.collect()
    failing.set()
    thread.join(60)
    del thread
    gc.collect()
    (record,) = [record for record in caplog.records if "the caller never waited for it" in record.message]
    assert record.levelno == logging.ERROR
    assert str(tmp_path / "a") in record.message
    assert "the callback broke" in record.message


def test_a_failed_save_that_was_raised_is_not_logged_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the callback broke")

    checkpointer = AsyncCheckpointer(post_finalization_callback=fail)
    checkpointer.save(tmp_path / "a", {"w": np.zeros(3)})
    with pytest.raises(SaveFailed, match="the callback broke"):
        checkpointer.close()
    del checkpointer
    gc.collect()
    assert "never waited for it" not in caplog.text


def test_orbaxs_second_argument_is_the_timeout_and_a_handler_is_refused() -> None:
    AsyncCheckpointer(None, 30).close()
    with pytest.raises(ValueError, match="handler: expected None, found a dict: trees are saved without one"):
        AsyncCheckpointer({})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="timeout_secs is 3 and timeout_s is 4: give one"):
        AsyncCheckpointer(timeout_secs=3, timeout_s=4)


# Several processes.


def test_keys_in_the_store_do_not_grow_with_saves(tmp_path: Path) -> None:
    store = InMemoryStore()

    def run(process: int) -> None:
        with AsyncCheckpointer(
            gang=StoreProcessGroup(store, process, 2), post_finalization_callback=lambda: None
        ) as checkpointer:
            for number in range(8):
                checkpointer.save(tmp_path / str(number), small_state(number))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2), timeout=60))
    saves = {key.split("/")[2] for key in store.list("checkpoint") if key.split("/")[1] == "save"}
    assert saves <= {"7", "8"}


def test_several_that_are_alive_at_once_never_meet_each_others_keys(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        made = [AsyncCheckpointer(gang=gang) for _ in range(3)]
        for number in range(2):
            for name, checkpointer in zip("abc", made, strict=True):
                checkpointer.save(tmp_path / f"{name}{number}", small_state(number))
        for checkpointer in made:
            checkpointer.close()

    in_gang(2, run)
    assert names(tmp_path) == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_processes_that_name_different_paths_get_an_error(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        with AsyncCheckpointer(gang=gang) as checkpointer:
            checkpointer.save(tmp_path / f"process-{gang.process_index}", small_state())
            checkpointer.wait_until_finished()

    first, second = outcomes_in_gang(2, run)
    assert "the processes save to different paths" in str(second)
    assert isinstance(first, SaveFailed)
    assert not any(tmp_path.glob("process-[01]"))


def test_missing_process_is_named_at_the_timeout(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        if gang.process_index == 0:
            with AsyncCheckpointer(gang=gang, timeout_s=1) as checkpointer:
                checkpointer.save(tmp_path / "a", small_state())

    alone, _ = outcomes_in_gang(2, run)
    assert isinstance(alone, BarrierError)
    assert re.search(r"gave up after [\d.]+ s, without process 1 of 2", str(alone))
    assert not (tmp_path / "a").exists()


def test_a_save_has_900_seconds_by_default(tmp_path: Path) -> None:
    given: dict[str, list[int]] = {}
    barrier = SyncFn(2)

    def run(gang: ProcessGroup) -> None:
        def wait(*, key: str, timeout_ms: int) -> None:
            given.setdefault(name, []).append(timeout_ms)
            barrier(key=key, timeout_ms=timeout_ms)

        made: dict[str, Callable[[], AsyncCheckpointer]] = {
            "default": lambda: AsyncCheckpointer(gang=gang, barrier_sync_fn=wait),
            "timeout_s": lambda: AsyncCheckpointer(gang=gang, barrier_sync_fn=wait, timeout_s=70),
            "timeout_secs": lambda: AsyncCheckpointer(None, 80, gang=gang, barrier_sync_fn=wait),
        }
        for name, make in made.items():
            with make() as checkpointer:
                checkpointer.save(tmp_path / name, small_state())

    in_gang(2, run)
    for name, timeout_s in {"default": 900, "timeout_s": 70, "timeout_secs": 80}.items():
        assert len(given[name]) == 4
        # What has passed since the begin of the save is taken off.
        assert all((timeout_s - 60) * 1000 < ms <= timeout_s * 1000 for ms in given[name]), name


def test_what_stands_in_the_way_is_found_by_all_processes_alike(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", small_state())

    def run(gang: ProcessGroup) -> None:
        with AsyncCheckpointer(gang=gang) as checkpointer:
            checkpointer.save(tmp_path / "a", small_state())

    assert [type(error) for error in outcomes_in_gang(3, run)] == [CheckpointExists] * 3


@pytest.mark.parametrize(("primary_host", "callers"), [(0, [0]), (1, [1]), (None, [0, 1, 2])])
def test_callback_is_called_in_its_process_before_the_commit_is_known(
    tmp_path: Path, primary_host: int | None, callers: list[int]
) -> None:
    called: list[int] = []

    def run(gang: ProcessGroup) -> list[int]:
        def callback() -> None:
            assert (tmp_path / "a").is_dir()
            called.append(gang.process_index)

        with AsyncCheckpointer(
            gang=gang, primary_host=primary_host, post_finalization_callback=callback
        ) as checkpointer:
            checkpointer.save(tmp_path / "a", small_state())
            checkpointer.wait_until_finished()
            return sorted(called)

    assert in_gang(3, run) == [callers] * 3


def test_failing_callback_fails_the_save_in_all_processes(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        def callback() -> None:
            raise ZeroDivisionError("in the callback")

        with AsyncCheckpointer(gang=gang, post_finalization_callback=callback) as checkpointer:
            checkpointer.save(tmp_path / "a", small_state())

    for error in outcomes_in_gang(2, run):
        assert isinstance(error, SaveFailed)
        assert "in the callback" in str(error)
    assert_same(checkpoint.restore(tmp_path / "a", small_state()), small_state())


class SyncFn:
    """A barrier of threads, as a caller's own."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._barriers: dict[str, threading.Barrier] = {}
        self.keys: list[str] = []

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        with self._lock:
            self.keys.append(key)
            barrier = self._barriers.setdefault(key, threading.Barrier(self._count))
        barrier.wait(timeout_ms / 1000)


def test_custom_barrier_is_called_twice_a_save_with_unique_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    sync = SyncFn(2)

    def run(gang: ProcessGroup) -> None:
        with AsyncCheckpointer(gang=gang, barrier_sync_fn=sync, primary_host=1) as checkpointer:
            for name in ("a", "b"):
                checkpointer.save(tmp_path / name, small_state())

    in_gang(2, run)
    assert names(tmp_path) == ["a", "b"]
    assert len(sync.keys) == 8
    assert len(set(sync.keys)) == 4
    assert [key.rpartition("/")[2] for key in sync.keys[::2]] == ["write_complete", "commit_complete"] * 2
    for key in sync.keys:
        for line in (f"at barrier {key!r} of barrier_sync_fn", f"passed barrier {key!r} of barrier_sync_fn"):
            assert caplog.text.count(line) == 2, line


def fail(*, key: str, timeout_ms: int) -> None:
    raise RuntimeError("DEADLINE_EXCEEDED")


def test_custom_barrier_is_not_called_with_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with AsyncCheckpointer(barrier_sync_fn=fail) as checkpointer:
        checkpointer.save(tmp_path / "a", small_state())
        checkpointer.wait_until_finished()
        checkpointer.save_and_wait(tmp_path / "b", small_state())
    assert names(tmp_path) == ["a", "b"]
    assert "DEADLINE_EXCEEDED" not in caplog.text


def test_save_whose_custom_barrier_fails_is_committed_with_a_warning_if_it_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    all_have_written = threading.Barrier(2)

    def fail_late(*, key: str, timeout_ms: int) -> None:
        all_have_written.wait(timeout_ms / 1000)
        fail(key=key, timeout_ms=timeout_ms)

    def run(gang: ProcessGroup) -> None:
        with AsyncCheckpointer(gang=gang, barrier_sync_fn=fail_late, timeout_s=30) as checkpointer:
            checkpointer.save(tmp_path / "a", small_state())

    in_gang(2, run)
    assert_same(checkpoint.restore(tmp_path / "a", small_state()), small_state())
    assert "RuntimeError: DEADLINE_EXCEEDED" in caplog.text


def test_custom_barrier_failure_fails_a_save_that_is_not_durable(tmp_path: Path) -> None:
    def no_space(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def run(gang: ProcessGroup) -> None:
        options = WriteOptions(callback=AtWrites(no_space if gang.process_index == 1 else None))
        with AsyncCheckpointer(gang=gang, barrier_sync_fn=fail, timeout_s=5, options=options) as checkpointer:
            checkpointer.prepare(small_state())
            checkpointer.save(tmp_path / "a", small_state())

    assert [type(each) for each in outcomes_in_gang(2, run)] == [SaveFailed, SaveFailed]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("barrier_sync_fn", [None, SyncFn(2)], ids=["built in", "of its own"])
def test_several_processes_without_a_cluster_are_a_value_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, barrier_sync_fn: SyncFn | None
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    checkpointer = AsyncCheckpointer(barrier_sync_fn=barrier_sync_fn)
    with pytest.raises(ValueError, match="but there is no coordination service to meet at"):
        checkpointer.save(tmp_path / "a", small_state())
    checkpointer.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("primary_host", [0, 1, None])
def test_first_process_records_the_total_duration_for_any_primary_host(
    tmp_path: Path, primary_host: int | None
) -> None:
    barrier = SyncFn(2)
    heard: list[tuple[int, str]] = []
    process_of: dict[int, int] = {}  # by the thread that runs its save

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if threading.get_ident() in process_of:
            heard.append((process_of[threading.get_ident()], event))

    def run(gang: ProcessGroup) -> None:
        def wait(*, key: str, timeout_ms: int) -> None:
            process_of[threading.get_ident()] = gang.process_index
            barrier(key=key, timeout_ms=timeout_ms)

        with AsyncCheckpointer(gang=gang, primary_host=primary_host, barrier_sync_fn=wait) as checkpointer:
            checkpointer.save(tmp_path / "a", small_state())

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        in_gang(2, run)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    for name, processes in (("thread_duration_sec", [0, 1]), ("total_duration_secs", [0])):
        event = f"/jax/checkpoint/write/async/{name}"
        assert sorted(process for process, each in heard if each == event) == processes
    assert sorted(process for process, each in heard if each == "/jax/orbax/write/async/total_duration_secs") == [0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"timeout_s": 0}, "timeout_s: expected", id="no time"),
        pytest.param({"active_processes": {1}}, "active_processes: expected some of .* found 1", id="not this one"),
        pytest.param(
            {"primary_host": 3}, "primary_host is process 3; expected one of those that save, 0", id="primary"
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said), AsyncCheckpointer(**options) as checkpointer:
        checkpointer.save(tmp_path / "a", small_state())


def test_a_wrong_primary_process_is_refused_each_time(tmp_path: Path) -> None:
    gang = StoreProcessGroup(InMemoryStore(), 0, 1)
    with AsyncCheckpointer(gang=gang, primary_host=3) as checkpointer:
        for _ in range(2):
            with pytest.raises(SettingsError, match="primary_host is process 3"):
                checkpointer.save(tmp_path / "a", small_state())


# Restoring.


def test_a_step_and_its_items_are_paths_of_checkpoints_too(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    save(engine(tmp_path), 7, small_state(7))
    for path in (tmp_path / "7", tmp_path / "7" / "default"):
        assert_same(checkpointer.restore(path, small_state()), small_state(7))
    flip_bit(next((tmp_path / "7" / "default" / "w").glob("[0-9]*")))
    with pytest.raises(CheckpointCorrupt, match="checksum"):  # those of the step's manifest
        checkpointer.restore(tmp_path / "7" / "default", small_state())


def test_where_there_is_no_checkpoint_the_error_says_what_is_there(
    tmp_path: Path, checkpointer: AsyncCheckpointer
) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        checkpointer.restore(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointNotFound, match="a is not a checkpoint: it has neither _GRACEPOINT"):
        checkpointer.restore(tmp_path / "a")
    with pytest.raises(CheckpointNotFound):
        checkpointer.metadata(tmp_path / "a")


def test_damage_and_misfits_are_reported_with_the_leaf(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    checkpointer.save(tmp_path / "a", small_state())
    with pytest.raises(CheckpointMismatch, match=rf"^{tmp_path}/a cannot be restored: leaf 'w'"):
        checkpointer.restore(tmp_path / "a", {**small_state(), "w": jnp.zeros(3)})
    flip_bit(next((tmp_path / "a" / "w").glob("[0-9]*")))
    with pytest.raises(CheckpointCorrupt, match=r"w/.*checksum"):
        checkpointer.restore(tmp_path / "a", small_state())


def test_all_processes_restore_or_none_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "a", small_state())

    def run(gang: ProcessGroup) -> Any:
        like = small_state() if gang.process_index else {"w": jnp.zeros(3)}
        with AsyncCheckpointer(gang=gang) as checkpointer:
            return checkpointer.restore(tmp_path / "a", like)

    for error in outcomes_in_gang(2, run):
        assert isinstance(error, CheckpointMismatch)
        assert "process 0: " in str(error)


def leave_uncommitted(path: Path, *processes: int) -> None:
    """Leaves what two processes' save of ``small_state(3)`` leaves if these wrote their part and all were killed."""
    paths = Layout(storage_path(path.parent), name=path.name)
    for process in processes:
        saver = SaveExecutor(DyingGang(process), "local-dead", clock=time.monotonic)
        deadline = Deadline.after(30, time.monotonic)
        with pytest.raises(SystemExit):
            saver.now(saver.begin(paths, None), small_state(3), {}, deadline=deadline, on_stage=lambda _: None)


def test_finished_uncommitted_save_is_committed_by_restore(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    leave_uncommitted(tmp_path / "a", 0, 1)
    assert names(tmp_path) == ["a.gracepoint-tmp.local-dead.1"]
    assert_same(checkpointer.restore(tmp_path / "a", small_state()), small_state(3))
    assert names(tmp_path) == ["a"]


def test_a_save_that_somebody_did_not_finish_is_no_checkpoint(
    tmp_path: Path, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)
    leave_uncommitted(tmp_path / "a", 1)
    with pytest.raises(CheckpointNotFound):
        checkpointer.restore(tmp_path / "a")


def test_left_overs_of_one_path_are_not_those_of_another(tmp_path: Path, checkpointer: AsyncCheckpointer) -> None:
    leave_uncommitted(tmp_path / "a.b", 0, 1)
    with pytest.raises(CheckpointNotFound):
        checkpointer.restore(tmp_path / "a")
    assert_same(checkpointer.restore(tmp_path / "a.b", small_state()), small_state(3))


def test_what_is_still_being_written_by_another_is_waited_for(
    tmp_path: Path, checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), ChunkWriter.write

    def slowly(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        finally:
            assert go.wait(30)

    monkeypatch.setattr(ChunkWriter, "write", slowly)
    with AsyncCheckpointer() as other:
        other.save(tmp_path / "a", small_state(5))
        while not any(tmp_path.glob("a.gracepoint-tmp.*")):
            threading.Event().wait(0.01)
        last_change_s = RenameCommit.last_change_s

        def look(way: RenameCommit, temporary: Temporary) -> float:
            changed_s = last_change_s(way, temporary)
            go.set()  # it goes on only when it was found alive
            return changed_s

        monkeypatch.setattr(RenameCommit, "last_change_s", look)
        assert_same(checkpointer.restore(tmp_path / "a", small_state()), small_state(5))


def test_the_first_save_after_prepare_reserves_no_memory(tmp_path: Path, reserved: list[object]) -> None:
    with AsyncCheckpointer() as checkpointer:
        checkpointer.prepare(small_state())
        assert len(reserved) == 1
        checkpointer.save(tmp_path / "a", small_state())
        checkpointer.save(tmp_path / "b", small_state(2))
    assert len(reserved) == 1


def test_prepared_for_other_save_args_is_not_prepared(tmp_path: Path, reserved: list[object]) -> None:
    with AsyncCheckpointer() as checkpointer:
        checkpointer.prepare(small_state(), save_args=SaveArgs(dtype=jnp.bfloat16))
        checkpointer.save(tmp_path / "a", small_state(), save_args=SaveArgs(dtype=jnp.bfloat16))
        assert len(reserved) == 1
        checkpointer.save(tmp_path / "b", small_state())
    assert len(reserved) == 2


def test_saving_and_restoring_in_one_call_needs_no_copy_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gracepoint.checkpoint.saving.planner.HostSnapshot", None)
    checkpoint.save(tmp_path / "a", small_state())
    assert_same(checkpoint.restore(tmp_path / "a", small_state()), small_state())
    with pytest.raises(CheckpointExists):
        checkpoint.save(tmp_path / "a", small_state())
    checkpoint.save(tmp_path / "a", small_state(2), force=True)
    assert_same(checkpoint.restore(tmp_path / "a", small_state()), small_state(2))


def test_a_path_may_begin_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint.save("~/a", {"w": jnp.ones(2)})
    assert (tmp_path / "a").is_dir()
    assert_same(checkpoint.restore("~/a"), {"w": jnp.ones(2)})
    assert verification.verify("~/a").damage == ()
    with CheckpointManager(Path("~/steps")) as manager:
        manager.save(7, {"w": jnp.ones(2)})
    assert checkpoint.latest_step("~/steps") == 7
    assert (tmp_path / "steps/7").is_dir()


@pytest.mark.parametrize("path", ["$HOME/a", "${HOME}/a", "/data/$(RUN)/a", "gs://$BUCKET/a"])
def test_a_variable_in_a_path_is_refused_by_its_name(path: str) -> None:
    for call in (
        lambda: checkpoint.save(path, {"w": 1}),
        lambda: checkpoint.restore(path),
        lambda: verification.verify(path),
    ):
        with pytest.raises(SettingsError, match=r"\$.* is not replaced: .* os.path.expandvars"):
            call()


@pytest.mark.parametrize("writer", ["thread", "worker"])
def test_a_dollar_sign_in_a_name_is_written_as_in_uris(tmp_path: Path, writer: Any) -> None:
    with AsyncCheckpointer(options=WriteOptions(writer=writer)) as checkpointer:
        checkpointer.save_and_wait(f"file://{tmp_path}/%24HOME", {"w": jnp.ones(2)})
        assert_same(checkpointer.restore(f"file://{tmp_path}/%24HOME"), {"w": jnp.ones(2)})
    assert (tmp_path / "$HOME").is_dir()


class Mixed:
    """A node whose children have positions, beside one that has a name, as flax's ``nnx.List``."""

    def __init__(self, items: Sequence[Any], more: Any) -> None:
        self.items, self.more = list(items), more


jax.tree_util.register_pytree_with_keys(
    Mixed,
    lambda node: (
        [
            *((jax.tree_util.SequenceKey(index), item) for index, item in enumerate(node.items)),
            (jax.tree_util.GetAttrKey("more"), node.more),
        ],
        None,
    ),
    lambda _, children: Mixed(list(children)[:-1], list(children)[-1]),
)


def test_a_node_with_names_and_positions_is_restored_as_a_dict(tmp_path: Path) -> None:
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save_and_wait(tmp_path / "a", {"layers": Mixed([jnp.ones(2), {"w": jnp.zeros(3)}], None)})
        found = checkpointer.restore(tmp_path / "a")
        assert_same(found, {"layers": {"0": jnp.ones(2), "1": {"w": jnp.zeros(3)}, "more": None}})
        assert checkpointer.metadata(tmp_path / "a").tree["layers"]["0"].shape == (2,)


def test_a_module_of_flax_nnx_is_restored_without_its_form(tmp_path: Path) -> None:
    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(number)) for number in range(2)])

    model = Model()
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save_and_wait(tmp_path / "a", model)
        found = checkpointer.restore(tmp_path / "a")
    assert_same(found["layers"]["1"]["kernel"]["value"], model.layers[1].kernel[...])
