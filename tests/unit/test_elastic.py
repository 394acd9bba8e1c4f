"""Data and host states that fit another number of processes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import grain  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.checkpoint.restoring.restore_tree import Form
from gracepoint.elastic import ElasticData, Share, dealt_out, same_in_all
from gracepoint.errors import CheckpointMismatch, SettingsError

RECORDS = 240


def slices(share: Share) -> Iterator[list[int]]:
    mine = list(range(RECORDS))[share.begins :: share.processes]
    return iter([mine[start : start + share.batch] for start in range(0, len(mine), share.batch)])


def grain_batches(share: Share) -> Iterator[np.ndarray]:
    source = grain.MapDataset.source(range(RECORDS)).shuffle(seed=7).repeat()
    return iter(source[share.begins :: share.processes].batch(share.batch).to_iter_dataset())


def gang(processes: int, open_at: Any = slices, **batch: int) -> list[ElasticData[Any]]:
    return [ElasticData(open_at, process=index, processes=processes, **batch) for index in range(processes)]


def steps(of: list[ElasticData[Any]], count: int) -> list[list[int]]:
    """The records of each global batch, over all processes."""
    return [sorted(int(record) for data in of for record in next(data)) for _ in range(count)]


def moved(before: list[ElasticData[Any]], after: list[ElasticData[Any]]) -> None:
    """Restores a gang from the state of another."""
    states = [data.get_state() for data in before]
    for index, data in enumerate(after):
        data.set_state(same_in_all(states, index, len(after)))


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=5), done=st.lists(st.integers(0, 4)))
def test_a_kept_global_batch_is_the_same_records_for_any_size(sizes: list[int], done: list[int]) -> None:
    found: list[list[int]] = []
    running = gang(sizes[0], global_batch=12)
    for size, count in itertools.zip_longest(sizes, done[: len(sizes)], fillvalue=2):
        fresh = gang(size, global_batch=12)
        moved(running, fresh)
        running = fresh
        found += steps(running, count)
    assert found == [list(range(first, first + 12)) for first in range(0, 12 * len(found), 12)]


def test_a_scaled_batch_continues_at_the_next_record() -> None:
    four, three = gang(4, batch_per_process=5), gang(3, batch_per_process=5)
    before = steps(four, 3)
    moved(four, three)
    after = steps(three, 4)
    assert sorted(record for batch in before + after for record in batch) == list(range(3 * 20 + 4 * 15))
    assert [len(batch) for batch in after] == [15] * 4
    assert {data.scale for data in three} == {0.75}
    two = gang(2, batch_per_process=5)
    moved(three, two)
    assert {data.scale for data in two} == {0.5}  # of the batch with which the run began


@pytest.mark.integration
def test_grain_uses_each_record_once_when_the_batch_is_scaled() -> None:
    four, three = gang(4, grain_batches, batch_per_process=5), gang(3, grain_batches, batch_per_process=5)
    before = steps(four, 3)
    moved(four, three)
    after = steps(three, 12)
    assert sorted(record for batch in before + after for record in batch) == list(range(RECORDS))  # one epoch


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param((4, {"global_batch": 12}), (4, {"global_batch": 12}), "", id="nothing"),
        pytest.param(
            (4, {"global_batch": 12}),
            (2, {"global_batch": 12}),
            "global batch: 12 (kept), batch of a process: 3 -> 6",
            id="fewer processes",
        ),
        pytest.param(
            (2, {"batch_per_process": 5}),
            (3, {"batch_per_process": 5}),
            "global batch: 10 -> 15, batch of a process: 5 (kept)",
            id="scaled",
        ),
        pytest.param(
            (2, {"global_batch": 12}),
            (2, {"global_batch": 24}),
            "global batch: 12 -> 24, batch of a process: 6 -> 12",
            id="edited",
        ),
    ],
)
def test_data_says_what_has_changed(
    before: tuple[int, dict[str, int]], after: tuple[int, dict[str, int]], words: str
) -> None:
    old, new = gang(before[0], **before[1]), gang(after[0], **after[1])
    assert new[0].changed == ""
    moved(old, new)
    assert new[0].changed == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        pytest.param({"global_batch": 10}, "found 10. Take 9 or 12", id="no multiple"),
        pytest.param({"global_batch": 2}, "found 2. Take 3 or 6", id="less than one each"),
        pytest.param({}, "found neither", id="no batch"),
        pytest.param({"global_batch": 3, "batch_per_process": 1}, "found both", id="two batches"),
        pytest.param({"batch_per_process": 0}, "expected at least 1, found 0", id="empty batch"),
        pytest.param({"global_batch": 3, "process": 3}, "found 3 of 3", id="no such process"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ElasticData(slices, **{"process": 0, "processes": 3, **numbers})


@pytest.mark.parametrize("state", [{"next_index": 4}, None, {"records": "many"}], ids=["other", "none", "words"])
def test_the_state_of_another_iterator_is_refused(state: Any) -> None:
    (data,) = gang(1, global_batch=4)
    with pytest.raises(CheckpointMismatch, match="expected a state of ElasticData"):
        data.set_state(state)


def test_an_iterator_that_can_be_closed_is_closed_before_another_is_opened() -> None:
    closed = []

    class Reader:
        def __iter__(self) -> Reader:
            return self

        def __next__(self) -> int:
            return 1

        def close(self) -> None:
            closed.append(self)

    data = ElasticData(lambda share: Reader(), process=0, processes=1, global_batch=1)
    next(data)
    data.set_state(data.get_state())
    next(data)
    assert len(closed) == 1


@given(parts=st.integers(1, 20), before=st.integers(1, 6), after=st.integers(1, 6))
def test_parts_are_dealt_out_to_one_process_each(parts: int, before: int, after: int) -> None:
    names = [f"part-{number:02}" for number in range(parts)]
    values = [{name: {"read": name} for name in names[index::before]} for index in range(before)]
    if parts < after:
        with pytest.raises(CheckpointMismatch, match=f"found {parts} parts for {after} processes"):
            dealt_out(values, 0, after)
        return
    dealt = [dealt_out(values, index, after) for index in range(after)]
    assert sorted(name for part in dealt for name in part) == names
    assert all(value == {"read": name} for part in dealt for name, value in part.items())
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_part_in_two_processes_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="'a' in processes 0 and 1"):
        dealt_out([{"a": 1}, {"a": 2}], 0, 1)


def test_values_that_differ_are_not_the_same_in_all() -> None:
    array = np.arange(3)
    assert same_in_all([{"at": array}, {"at": array.copy()}], 0, 5)["at"] is array
    with pytest.raises(CheckpointMismatch, match="process 1 was not at the state of process 0"):
        same_in_all([{"at": 1}, {"at": 2}], 0, 3)


FOUR = Form(4, (("data", 4), ("model", 2)))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        pytest.param(FOUR, (), id="nothing"),
        pytest.param(
            Form(2, (("data", 2), ("model", 2))),
            ("processes: 4 -> 2", "devices: 8 -> 4", "mesh: data=4xmodel=2 -> data=2xmodel=2"),
            id="fewer processes",
        ),
        pytest.param(Form(4, (("data", 8),)), ("mesh: data=4xmodel=2 -> data=8",), id="the same devices"),
        pytest.param(dataclasses.replace(FOUR, mesh=None), (), id="the mesh is not known"),
        pytest.param(Form(None, None), (), id="nothing is known"),
    ],
)
def test_a_form_says_what_is_different(now: Form, words: tuple[str, ...]) -> None:
    assert FOUR.changes(now) == words


def test_what_is_not_a_number_is_the_same_in_all() -> None:
    values = [{"best": float("nan"), "losses": np.array([1.0, np.nan])} for _ in range(3)]
    assert same_in_all(values, 0, 2) is values[0]
