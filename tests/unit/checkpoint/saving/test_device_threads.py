"""Several devices at once: their threads, how much of them is under way, and how the threads end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint import memory as parallel_copy
from gracepoint.checkpoint.memory import Copies, MemoryUser
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.saving import device_copy
from gracepoint.checkpoint.saving.device_copy import Pull, merged
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.planner import SavePlanner, SaveSettings
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.process_group import SingleProcess
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save
from tests.unit.checkpoint.fakes.thread_limit import allow_threads, refuse_threads
from tests.waiting import until

_TIMEOUT_S = 60.0
_DEVICES = 4
#: The values of CPU devices are copied as those of accelerators are.
OPTIONS = WriteOptions(pinned_host_transfer=True, target_chunk_bytes=1 << 10)


def soon(timeout_s: float = _TIMEOUT_S) -> Deadline:
    return Deadline.after(timeout_s, time.monotonic)


def state() -> dict[str, Any]:
    """Arrays over all devices, one on the first device alone, and one in host memory."""
    devices = np.array(jax.devices("cpu")[:_DEVICES])
    where = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    values = np.arange(1 << 12, dtype=np.float32).reshape(64, 64)
    split = {f"w{number}": jax.device_put(values + number, where) for number in range(6)}
    return {**split, "alone": jax.device_put(values, devices[0]), "numpy": np.arange(5)}


def transfer_of(saved: Any, *, in_background: bool, planner: SavePlanner | None = None) -> Transfer:
    planner = planner or SavePlanner(SingleProcess(), "job-0-a", SaveSettings(OPTIONS))
    leaves, prepared = planner.plan(saved)
    memory = planner.snapshot(leaves, prepared, "a save") if in_background else None
    return Transfer(leaves, prepared.specs, prepared.plan, OPTIONS, memory)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> dict[Any, threading.Thread]:
    """The first transfer of each device waits for the first ones of all others. Returns the thread of each device."""
    threads: dict[Any, threading.Thread] = {}
    all_here, start = threading.Barrier(_DEVICES, timeout=_TIMEOUT_S), device_copy.start

    def met(pull: Pull, data: Any, options: WriteOptions) -> Any:
        if isinstance(data, jax.Array):
            device = data.addressable_data(pull.shard.position).device
            if device not in threads:
                threads[device] = threading.current_thread()
                all_here.wait()
            assert threads[device] is threading.current_thread()
        return start(pull, data, options)

    monkeypatch.setattr(device_copy, "start", met)
    return threads


@pytest.mark.parametrize("in_background", [True, False], ids=["snapshot", "emergency"])
def test_all_devices_are_copied_from_at_once(
    tmp_path: Path, meeting: dict[Any, threading.Thread], in_background: bool
) -> None:
    saved, checkpointer = state(), engine(tmp_path, options=OPTIONS)
    if in_background:
        checkpointer.save_in_background(1, saved, {})
        checkpointer.close(_TIMEOUT_S)
    else:
        save(checkpointer, 1, saved)
    assert len(set(meeting.values())) == _DEVICES
    restored = restore(tmp_path, saved)
    assert restored is not None
    assert_same(restored.state, saved)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("in_background", [True, False], ids=["snapshot", "emergency"])
def test_threads_of_devices_may_come_to_an_array_at_once(monkeypatch: pytest.MonkeyPatch, in_background: bool) -> None:
    all_here, start = threading.Barrier(_DEVICES, timeout=_TIMEOUT_S), device_copy.start

    def met(pull: Pull, data: Any, options: WriteOptions) -> Any:
        if isinstance(data, jax.Array) and len(data.sharding.device_set) == _DEVICES:
            all_here.wait()
        return start(pull, data, options)

    monkeypatch.setattr(device_copy, "start", met)
    planner = SavePlanner(SingleProcess(), "job-0-a", SaveSettings(OPTIONS))
    for _ in range(20):  # each state is new, as after a step: nobody has asked for its shards yet
        saved = state()
        transfer = transfer_of(saved, in_background=in_background, planner=planner)
        found = []
        for chunk, _ in transfer.chunks(soon()):
            transfer.written(chunk)
            found.append(chunk)
        assert len(found) == planner.plan(saved)[1].plan.total_chunks
        assert [len(array.addressable_shards) for name, array in saved.items() if name[0] == "w"] == [_DEVICES] * 6


def test_a_snapshot_waits_for_the_threads_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    start, goes_on = device_copy.start, threading.Event()
    first = jax.devices("cpu")[0]

    def failing(pull: Pull, data: Any, options: WriteOptions) -> Any:
        if data.addressable_data(pull.shard.position).device != first:
            assert goes_on.wait(_TIMEOUT_S)
            return start(pull, data, options)
        threading.Timer(0.2, goes_on.set).start()
        raise ValueError("the device is gone")

    monkeypatch.setattr(device_copy, "start", failing)
    with pytest.raises(ValueError, match="the device is gone"):
        transfer_of({name: leaf for name, leaf in state().items() if name != "numpy"}, in_background=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gracepoint: device")]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_bound_on_bytes_holds_two_transfers_of_each_device(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(device_copy, "AHEAD_BYTES", 1 << 14)
    bound_bytes, started, start = (1 << 14) * max(2, devices) // 2, [], device_copy.start

    def noted(pull: Pull, data: Any, options: WriteOptions) -> Any:
        if isinstance(data, jax.Array):
            started.append(pull.bytes)
        return start(pull, data, options)

    monkeypatch.setattr(device_copy, "start", noted)
    where = NamedSharding(Mesh(np.array(jax.devices("cpu")[:devices]), ("x",)), PartitionSpec("x"))
    saved = {name: jax.device_put(np.zeros((64, 64), np.float32), where) for name in "uvwxyz"} | {"n": np.arange(5)}
    copied_bytes = 0
    for _, values in transfer_of(saved, in_background=False).chunks(soon()):
        if values.size > 5:
            copied_bytes += values.nbytes
        if copied_bytes == bound_bytes:  # nothing is written, so nothing makes room
            break
    assert sum(started) == bound_bytes


def counting(numbers: range) -> Any:
    def make(deadline: Deadline) -> Iterator[int]:
        yield from numbers

    return make


def waiting(begun: threading.Event | None = None) -> Any:
    """Waits for its deadline."""

    def make(deadline: Deadline) -> Iterator[int]:
        yield -1
        if begun is not None:
            begun.set()
        changed = threading.Condition()
        with changed:
            deadline.wait_for(changed, lambda: False)

    return make


def lent(threads: MemoryUser) -> None:
    """The threads write to memory that is used again."""


def until_ended() -> None:
    until(lambda: not any(thread.name.startswith("gracepoint: device") for thread in threading.enumerate()), "the end")


def test_every_value_of_every_device_comes_once() -> None:
    makes = [counting(range(100 * number, 100 * number + 100)) for number in range(5)]
    assert sorted(merged(makes, soon())) == list(range(500))
    until_ended()


def test_one_device_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    assert list(merged([counting(range(3))], soon(), lent)) == [0, 1, 2]


@pytest.mark.parametrize("allowed", [0, 2])
def test_devices_without_a_thread_are_copied_from_by_the_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    allow_threads(monkeypatch, allowed, name="gracepoint: device")
    makes = [counting(range(10 * number, 10 * number + 10)) for number in range(4)]
    assert sorted(merged(makes, soon(), lent)) == list(range(40))
    assert f"values of {4 - allowed} devices are copied by one thread: can't start new thread" in caplog.text


def test_an_error_of_one_device_ends_the_threads_of_all() -> None:
    def failing(deadline: Deadline) -> Iterator[int]:
        yield 1
        raise ValueError("the device is gone")

    with pytest.raises(ValueError, match="the device is gone"):
        list(merged([waiting(), failing, waiting()], soon(), lent))
    until_ended()


def test_a_caller_that_stops_ends_the_threads() -> None:
    pieces = merged([waiting(), waiting()], soon())
    assert next(pieces) == -1
    pieces.close()
    until_ended()


def test_a_device_that_never_answers_is_named_at_the_deadline() -> None:
    begun, answers = threading.Event(), threading.Event()

    def stuck(deadline: Deadline) -> Iterator[int]:
        begun.set()
        answers.wait(_TIMEOUT_S)
        yield 1

    deadline = soon()
    pieces = merged([stuck, counting(range(1))], deadline)
    assert next(pieces) == 0
    assert begun.wait(_TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "gracepoint: device 1":  # the one that counts
            thread.join(_TIMEOUT_S)
    deadline.cancel("the step can be saved instead")
    with pytest.raises(SaveFailed, match="values of 1 devices were not copied before it was stopped: the step can"):
        next(pieces)
    answers.set()
    until_ended()


def test_memory_is_touched_first_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    several, copy = threading.Barrier(2, timeout=_TIMEOUT_S), parallel_copy.copy

    def together(values: Any, into: Any) -> None:
        several.wait()
        copy(values, into)

    monkeypatch.setattr(parallel_copy, "copy", together)
    buffers: list[npt.NDArray[Any]] = [np.full(16 << 20, 7, np.uint8), np.full((2, 2 << 20), 7.0, np.float32)]
    with Copies(2) as copies:
        for buffer in buffers:
            copies.zero(buffer)
    assert not any(buffer.any() for buffer in buffers)
