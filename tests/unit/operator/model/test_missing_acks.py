"""Who of a gang has not acknowledged, and the lines by which replicas tell one another who has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX
from gracepoint_operator.model.preemption_record import Places, missing, place_of
from gracepoint_operator.resources import Replica
from gracepoint_operator.workloads import read_pod
from tests.unit.operator.fakes import objects


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        ([], []),
        (["llm-workers-0-7"], ["llm-workers-0-7"]),
        (["llm-workers-0-1", "llm-workers-0-0"], ["llm-workers-0-[0-1]"]),
        ([f"llm-a-0-{index}" for index in (5, 10, 3, 4, 0)], ["llm-a-0-[0,3-5,10]"]),
        (["llm-a-1-0", "llm-a-0-0"], ["llm-a-0-0", "llm-a-1-0"]),
        (["llm-a-0-bcdfg", "llm-a-0-024", "lone"], ["llm-a-0-024", "llm-a-0-bcdfg", "lone"]),
    ],
)
def test_places_are_written_as_ranges(places: list[str], lines: list[str]) -> None:
    assert Places(places).lines() == lines


@given(st.sets(st.tuples(st.sampled_from(["a-b-0", "a-b-1", "c"]), st.integers(0, 5000)), max_size=300))
def test_what_is_written_is_read_again(found: set[tuple[str, int]]) -> None:
    places = {f"{job}-{index}" for job, index in found}
    written = Places(places).lines()
    assert same(Places(written), places)
    assert Places(written).lines() == written


def test_lines_of_a_large_gang_are_accepted_by_the_api_server() -> None:
    places = {f"{'j' * 63}-{index}" for index in range(0, 40_000, 2)}  # as scattered as can be
    lines = Places(places).lines()
    Replica(name="op", acknowledged_pods=lines)
    assert same(Places(lines), places)


@pytest.mark.parametrize(
    "line",
    [
        *("w-[0-99999999999]", "w-[3-1]", "w-[1,,2]", "w-[-]", "w-[1-2-3]", "w-99999999999", "w-007", "w-"),
        *("w-\u0663", "w-[\u00b2]", "", "-", "-5"),
    ],
)
def test_a_line_that_nobody_wrote_this_way_stays_as_it_is(line: str) -> None:
    found = Places([line, "w-1"])
    assert found.lines() == sorted([line, "w-1"])
    assert len(found) == 2
    assert line in found
    assert "w-2" not in found


def test_places_of_two_replicas_are_joined() -> None:
    both = Places(["w-0-[0-2]", "lone"]) | Places(["w-0-[2-3]", "w-1-0"])
    assert both.lines() == ["lone", "w-0-[0-3]", "w-1-0"]
    assert len(both) == 6


def test_a_place_that_is_added_later_is_written_too() -> None:
    found = Places(["w-0"])
    assert found.lines() == ["w-0"]
    found.add("w-1")
    assert found.lines() == ["w-[0-1]"]


def test_a_pod_without_an_index_has_its_own_place() -> None:
    body = objects.pod(3)
    assert place_of(read_pod(body)) == "train-workers-0-3"
    del body["metadata"]["labels"][LABEL_COMPLETION_INDEX]
    assert place_of(read_pod(body)) == "train-workers-0-3-0xyz"


def test_each_pod_lags_in_what_it_has_not_done_yet() -> None:
    names = ["w-0-0-x", "w-0-1-x", "w-0-2-x", "w-0-bcdfg"]
    found = missing(names, notified={"w-0-0", "w-0-1", "w-0-bcdfg"}, acknowledging={"w-0-0", "w-0-bcdfg"})
    assert shown(found) == [("w-0-1-x", "NotAcknowledged"), ("w-0-2-x", "NotConnected")]


def test_no_more_than_fifty_are_named() -> None:
    found = missing([f"w-0-{index:03}-x" for index in range(200)], notified=set(), acknowledging={"w-0-000"})
    assert [name for name, _ in shown(found)] == [f"w-0-{index:03}-x" for index in range(1, 51)]


def shown(found: Any) -> list[tuple[str, str]]:
    return [(item.pod, str(item.lags)) for item in found]


def same(found: Places, expected: set[str]) -> bool:
    return len(found) == len(expected) and all(place in found for place in expected)
