"""What gets from devices to host memory when, how much of it at once, and who is told."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer
from gracepoint.checkpoint.format.array_spec import Chunk
from gracepoint.checkpoint.memory import ByteLimiter
from gracepoint.checkpoint.options import TransferPriority, WriteOptions
from gracepoint.checkpoint.saving import device_copy
from gracepoint.checkpoint.saving.device_copy import Pull, has_pinned_memory
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.planner import SavePlanner, SaveSettings
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.writing import tensorstore_writer
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.process_group import ProcessGroup, SingleProcess
from tests.unit.checkpoint.fakes.engine import assert_same, engine, in_gang, restore, rich_state, save
from tests.unit.checkpoint.fakes.transfer_recorder import Recorder

LEAF_BYTES = 4096


def state_of(*names: str) -> dict[str, jax.Array]:
    return {name: jnp.full(LEAF_BYTES // 4, ord(name[-1]), jnp.float32) for name in names}


def transfer_of(state: Any, options: WriteOptions, *, in_background: bool) -> Transfer:
    planner = SavePlanner(SingleProcess(), "job-0-a", SaveSettings(options))
    leaves, prepared = planner.plan(state)
    memory = planner.snapshot(leaves, prepared, "a save") if in_background else None
    return Transfer(leaves, prepared.specs, prepared.plan, options, memory)


def deadline(timeout_s: float = 30.0) -> Deadline:
    return Deadline.after(timeout_s, time.monotonic)


def test_leaves_are_copied_by_priority_and_synchronous_ones_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    recorder = Recorder()
    options = WriteOptions(device_host_max_bytes=10 * LEAF_BYTES, callback=recorder)
    transfer = transfer_of(state_of("d1", "p1", "s1", "d2", "p2", "s2"), options, in_background=True)
    assert recorder.events == [("transferred", "s1"), ("transferred", "s2")]
    assert "4 of 6 leaves are copied from their devices in the background, at most 40960 bytes" in caplog.text
    for chunk, _ in transfer.chunks(deadline()):
        transfer.written(chunk)
    assert recorder.names("transferred") == ["s1", "s2", "p1", "p2", "d1", "d2"]
    assert recorder.names("written") == ["s1", "s2", "p1", "p2", "d1", "d2"]


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "in the background"])
def test_every_process_hears_of_every_leaf_also_of_those_that_others_write(tmp_path: Path, waits: bool) -> None:
    heard: dict[int, list[tuple[str, str]]] = {}
    tree = {"s1": jnp.ones(2), "s2": jnp.zeros((0, 2)), "s3": 7, "s4": None, "s5": "text"}

    def run(gang: ProcessGroup) -> None:
        recorder = Recorder()
        with AsyncCheckpointer(gang=gang, options=WriteOptions(callback=recorder)) as checkpointer:
            (checkpointer.save_and_wait if waits else checkpointer.save)(tmp_path / "a", tree)
        heard[gang.process_index] = recorder.events

    in_gang(3, run)  # more processes than leaves with values
    for events in heard.values():
        for name in ("s1", "s2", "s3"):
            assert [event for event, leaf in events if leaf == name] == ["transferred", "written"]
        assert len(events) == 6


def test_each_leaf_s_priority_is_asked_for_once_a_save(tmp_path: Path) -> None:
    asked: list[str] = []

    class Asked(Recorder):
        def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
            asked.append(keypath[0].key)
            return super().key_priority(keypath)

    with AsyncCheckpointer(options=WriteOptions(device_host_max_bytes=LEAF_BYTES, callback=Asked())) as checkpointer:
        for number in range(2):
            checkpointer.save(tmp_path / str(number), state_of("d1", "s1"))
            assert asked == ["d1", "s1"] * (number + 1)


def test_priorities_that_change_between_saves_count_for_the_next(tmp_path: Path) -> None:
    answers = iter([TransferPriority.ASYNCHRONOUS_PRIORITIZED, TransferPriority.SYNCHRONOUS])

    class Changing(Recorder):
        def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
            return next(answers)

    with AsyncCheckpointer(options=WriteOptions(device_host_max_bytes=LEAF_BYTES, callback=Changing())) as checkpointer:
        for number in range(2):
            checkpointer.save(tmp_path / str(number), state_of("a"))
    for number in range(2):
        assert_same(checkpoint.restore(tmp_path / str(number)), state_of("a"))


def test_no_limit_copies_everything_at_once_without_priorities() -> None:
    recorder = Recorder()
    recorder.key_priority = None  # type: ignore[assignment,method-assign]
    transfer_of(state_of("d1", "p1"), WriteOptions(callback=recorder), in_background=True)
    assert recorder.names("transferred") == ["d1", "p1"]


@pytest.mark.parametrize("in_background", [True, False], ids=["deferred leaves", "a save that streams"])
def test_bytes_in_flight_reach_the_limit_and_never_exceed_it(
    monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    limit, in_flight, most = 3 * LEAF_BYTES, 0, 0
    start = device_copy.start

    def counted(pull: Pull, data: Any, options: WriteOptions) -> Any:
        nonlocal in_flight, most
        in_flight += pull.bytes
        most = max(most, in_flight)
        return start(pull, data, options)

    monkeypatch.setattr(device_copy, "start", counted)
    options = WriteOptions(device_host_max_bytes=limit, callback=Recorder())
    transfer = transfer_of(state_of(*(f"d{i}" for i in range(10))), options, in_background=in_background)
    for chunk, values in transfer.chunks(deadline()):
        assert in_flight <= limit
        in_flight -= values.nbytes
        transfer.written(chunk)
    assert (most, in_flight) == (limit, 0)


def test_bytes_between_transfer_and_disk_stay_below_the_limit(tmp_path: Path) -> None:
    recorder = Recorder()
    options = WriteOptions(device_host_max_bytes=2 * LEAF_BYTES, callback=recorder)
    state = state_of(*(f"d{i}" for i in range(20)), "s")
    checkpointer = engine(tmp_path, options=options)
    checkpointer.save_in_background(1, state, {})
    checkpointer.close(30)
    in_flight = 0
    for event, name in recorder.events:
        in_flight += {"transferred": 1, "written": -1}[event] if name != "s" else 0
        assert in_flight <= 2
    assert sorted(recorder.names("written")) == sorted(state)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


@pytest.mark.parametrize(
    "options", [WriteOptions(device_host_max_bytes=8 << 20), WriteOptions(pinned_host_transfer=True)], ids=str
)
def test_large_host_values_are_saved_with_device_values(tmp_path: Path, options: WriteOptions) -> None:
    values = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    state = {"numpy": values, "turned": values.T, "jax": jnp.asarray(values)}
    save(engine(tmp_path, options=options), 1, state)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_the_memory_of_devices_is_never_viewed_as_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viewed: list[Any] = []

    def noting(array: Any) -> Any:
        viewed.append(array)
        return array

    monkeypatch.setattr(device_copy, "as_it_lies", noting)
    save(engine(tmp_path, options=WriteOptions(pinned_host_transfer=True)), 1, state_of("d1", "s1"))
    assert viewed == []


def test_a_leaf_that_is_larger_than_the_limit_goes_alone() -> None:
    transfer = transfer_of(state_of("d1", "d2"), WriteOptions(device_host_max_bytes=1), in_background=False)
    found = []
    for chunk, _ in transfer.chunks(deadline()):
        found.append(chunk.file)
        transfer.written(chunk)
    assert found == ["d1/0", "d2/0"]


def test_transfer_timeout_says_what_it_waited_for() -> None:
    transfer = transfer_of(state_of("d1", "d2"), WriteOptions(device_host_max_bytes=LEAF_BYTES), in_background=False)
    with pytest.raises(SaveFailed, match=r"d2/0 was not copied from its device within 0\.0 s: device_host_max_bytes"):
        list(transfer.chunks(deadline(0.0)))


@pytest.mark.parametrize("express", [True, False], ids=["express", "TensorStore"])
def test_no_more_bytes_are_written_at_once_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, express: bool
) -> None:
    limit, lock, in_flight, most = 2 * LEAF_BYTES, threading.Lock(), 0, 0
    writing, write, end = tensorstore_writer._Store.writing, PosixPath.write_large, Transfer.written

    def count(size_bytes: int) -> None:
        nonlocal in_flight, most
        with lock:
            in_flight += size_bytes
            most = max(most, in_flight)

    def begun_by_tensorstore(self: Any, chunk: Chunk, spec: Any, values: Any) -> Any:
        start = writing(self, chunk, spec, values)

        def counted() -> Any:
            count(chunk.bytes)
            return start()

        return counted

    def begun(path: Any, data: Any, *rest: Any, **named: Any) -> Any:
        if len(data) == LEAF_BYTES:  # others describe the arrays
            count(len(data))
        return write(path, data, *rest, **named)

    def ended(self: Transfer, chunk: Chunk) -> None:
        nonlocal in_flight
        with lock:
            in_flight -= chunk.bytes
        end(self, chunk)

    monkeypatch.setattr(tensorstore_writer._Store, "writing", begun_by_tensorstore)
    monkeypatch.setattr(PosixPath, "write_large", begun)
    monkeypatch.setattr(Transfer, "written", ended)
    options = WriteOptions(write_limit_bytes=limit, express=express)
    save(engine(tmp_path, options=options), 1, state_of(*(f"d{i}" for i in range(20))))
    assert 0 < most <= limit
    assert in_flight == 0


def test_an_error_of_a_callback_fails_the_save(tmp_path: Path) -> None:
    class Failing(Recorder):
        def on_write_end(self, keypath: tuple[Any, ...]) -> None:
            raise ValueError("the callback's own")

    checkpointer = engine(tmp_path, options=WriteOptions(callback=Failing()))
    with pytest.raises(SaveFailed, match="the callback's own"):
        save(checkpointer, 1, state_of("s1"))


def test_a_save_through_pinned_memory_comes_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pinned_memory(jax.devices()[0]):
        pytest.skip("the devices of this platform have no pinned host memory")
    kinds, start = set(), device_copy.start

    def noted(pull: Pull, data: Any, options: WriteOptions) -> Any:
        transfer = start(pull, data, options)
        if isinstance(transfer, jax.Array):
            kinds.add(transfer.sharding.memory_kind)
        return transfer

    monkeypatch.setattr(device_copy, "start", noted)
    state = rich_state()
    checkpointer = engine(tmp_path, options=WriteOptions(pinned_host_transfer=True))
    checkpointer.save_in_background(1, state, {})
    checkpointer.close(30)
    assert kinds == {"pinned_host"}
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_nothing_is_compiled_in_a_save_with_options_once_it_was_prepared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"unseen": jnp.ones((22, 26)), "half": jax.random.split(jax.random.key(5), 11)}
    options = WriteOptions(pinned_host_transfer=True, target_chunk_bytes=64, device_host_max_bytes=1 << 10)
    checkpointer = engine(tmp_path, options=options)
    checkpointer.prepare(state)
    with jax.log_compiles():
        jax.jit(lambda x: x - 1)(state["unseen"])
        assert "Compiling" in caplog.text  # else this tests nothing
        caplog.clear()
        save(checkpointer, 1, state)
        checkpointer.save_in_background(2, state, {})
        checkpointer.close(30)
    assert "Compiling" not in caplog.text


def test_arrays_are_let_go_once_they_are_copied() -> None:
    state = state_of("s1")
    transfer = transfer_of(state, WriteOptions(), in_background=True)
    state["s1"].delete()  # as a donating step does
    ((_, values),) = transfer.chunks(deadline())
    assert values[0] == ord("1")


def test_a_limit_is_shared_by_threads() -> None:
    limit = ByteLimiter(10)
    assert limit.take(10, deadline())
    assert not limit.take_if_room(1)
    assert not limit.take(1, deadline(0.0))
    taken = threading.Event()

    def take() -> None:
        if limit.take(10, deadline()):
            taken.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    limit.give_back(10)
    assert taken.wait(30)
    waiting.join(30)
