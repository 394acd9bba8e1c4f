"""Copies in several threads: the same bytes whatever the type, order and size; errors and ends."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from gracepoint.checkpoint import memory
from gracepoint.checkpoint.memory import Copies
from tests.unit.checkpoint.fakes.thread_limit import allow_threads

VALUES: dict[str, npt.NDArray[Any]] = {
    "small": np.arange(10, dtype=np.int16),
    "without axes": np.array(3.5),
    "without elements": np.zeros((0, 4)),
    "of several blocks and a part": np.arange((5 << 20) + 3, dtype=np.float32),
    "bfloat16": np.arange(1 << 20).astype(ml_dtypes.bfloat16).reshape(1 << 10, -1),
    "transposed": np.arange(1 << 18, dtype=np.float32).reshape(1 << 8, -1).T,
    "every other": np.arange(1 << 20, dtype=np.int32)[::2],
}


@pytest.mark.parametrize("threads", [1, 4])
def test_all_values_are_copied(threads: int) -> None:
    into = {name: np.zeros(values.shape, values.dtype) for name, values in VALUES.items()}
    with Copies(threads) as copies:
        for name, values in VALUES.items():
            copies.add(values, into[name])
    for name, values in VALUES.items():
        assert into[name].tobytes() == values.tobytes(), name


def test_values_are_cast_to_memory_types_and_misfits_fail_nothing() -> None:
    values = np.full(1 << 18, 1e30, np.float32)
    values[0] = 1.5
    into = np.zeros(values.shape, np.float16)
    with Copies(2) as copies:
        copies.add(values, into)
    assert into[0] == 1.5
    assert np.isinf(into[1:]).all()


def copy_in_three_threads(error: Exception | None = None) -> None:
    large = np.zeros(8 << 20, np.uint8)
    with Copies(3) as copies:
        for _ in range(3):
            copies.add(large, np.empty_like(large))
        if error is not None:
            raise error


def copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gracepoint: copying"]


def test_an_error_in_any_thread_is_raised_and_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(memory, "copy", fail)
    with pytest.raises(MemoryError, match="no memory"):
        copy_in_three_threads()
    assert copying_threads() == []


def test_an_error_of_the_caller_leaves_no_thread_behind() -> None:
    with pytest.raises(RuntimeError, match="deleted"):
        copy_in_three_threads(RuntimeError("deleted"))
    assert copying_threads() == []


@pytest.mark.parametrize("allowed", [0, 1])
def test_values_are_copied_by_as_many_threads_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    allow_threads(monkeypatch, allowed, name="gracepoint: copying")
    values = [np.arange(2 << 20, dtype=np.float32) + number for number in range(4)]
    into = [np.zeros_like(each) for each in values]
    with Copies(4) as copies:
        for source, target in zip(values, into, strict=True):
            copies.add(source, target)
    for source, target in zip(values, into, strict=True):
        np.testing.assert_array_equal(target, source)
    assert caplog.text.count(f"in {allowed + 1} threads and not 4: can't start new thread") == 1
    assert copying_threads() == []
