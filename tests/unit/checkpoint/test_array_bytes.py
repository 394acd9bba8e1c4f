"""The bytes that are stored of values in any order and of any type, copied in parts."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from gracepoint.checkpoint.format.array_spec import as_bytes
from gracepoint.checkpoint.format.records import file_of
from gracepoint.checkpoint.memory import ArrayBytes, stored_values
from gracepoint.checkpoint.storage.buffers import BLOCK_BYTES, checksum_of
from tests.unit.checkpoint.fakes.watched_buffer import WatchedBuffer

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def counted(*shape: int, dtype: Any = FLOAT32) -> npt.NDArray[Any]:
    return (np.arange(np.prod(shape), dtype=np.float32) % 251).reshape(shape).astype(dtype)


def in_parts(data: ArrayBytes, part_bytes: int) -> bytes:
    found = b""
    for start in range(0, len(data), part_bytes):
        part = np.empty(min(part_bytes, len(data) - start), np.uint8)
        data.copy(start, part)
        found += part.tobytes()
    return found


@pytest.mark.parametrize("part_values", [1, 2, 5, 7, 12, 13, 1000])
def test_values_in_any_order_are_copied_in_parts_of_any_size(part_values: int) -> None:
    whole = counted(4, 3, 5)
    for axes in itertools.permutations(range(3)):
        values = whole.transpose(axes)
        for dtype in (FLOAT32, BFLOAT16):
            found = in_parts(ArrayBytes(values, dtype), part_values * dtype.itemsize)
            assert found == values.astype(dtype).tobytes()


@pytest.mark.parametrize(
    "values", [counted(9)[::-2], np.float32(3) * np.ones(()), counted(0, 3), counted(3, 0).T, counted(1, 7).T]
)
def test_values_of_any_shape_are(values: npt.NDArray[Any]) -> None:
    for dtype in (FLOAT32, np.dtype(np.float64)):
        data = ArrayBytes(values, dtype)
        expected = np.ascontiguousarray(values).astype(dtype).tobytes()
        assert (len(data), in_parts(data, 2 * dtype.itemsize)) == (len(expected), expected)


def test_values_that_lie_as_they_are_stored_are_not_copied() -> None:
    values = counted(3, 4)
    data = ArrayBytes(values, FLOAT32)
    assert data.in_place is not None
    assert np.shares_memory(data.in_place, values)
    assert stored_values(values, FLOAT32) is values
    assert ArrayBytes(values.T, FLOAT32).in_place is None
    assert ArrayBytes(values, BFLOAT16).in_place is None
    np.testing.assert_array_equal(stored_values(values.T, FLOAT32), values.T)


def test_values_that_do_not_fit_the_stored_type_are_converted() -> None:
    values, half = np.asarray([1.0, 1e300, np.nan]), np.dtype(np.float16)
    expected = np.asarray([1, np.inf, np.nan], half)
    np.testing.assert_array_equal(stored_values(values, half), expected)
    assert in_parts(ArrayBytes(values, half), 4) == expected.tobytes()


def test_a_checksum_needs_no_copy_of_all_values() -> None:
    values, buffer = counted(BLOCK_BYTES // 4 + 5, 2), WatchedBuffer()
    assert checksum_of(ArrayBytes(values, FLOAT32), buffer, lambda: None) == file_of(as_bytes(values)).crc32
    assert not buffer.used
    assert checksum_of(ArrayBytes(values.T, FLOAT32), buffer, lambda: None) == file_of(as_bytes(values.T)).crc32
