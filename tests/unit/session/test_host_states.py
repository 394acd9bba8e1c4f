"""A data iterator's state when the number of processes has changed."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint.checkpoint.format import host_state
from gracepoint.errors import CheckpointMismatch, SettingsError
from gracepoint.session.starting_point import HostStates


class Iterator:
    """Like Grain's: its place is a value that it gives and takes."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_an_iterator_continues_where_it_was(tmp_path: Path) -> None:
    iterator = Iterator({"taken": 0})
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.restore(like={"w": jnp.zeros(4)}, data=iterator)
        for step in (1, 2):
            iterator.state = {"taken": step}
            session.step(step, {"w": jnp.full(4, float(step))})
    again = Iterator()
    with gracepoint.attach(tmp_path) as session:
        assert session.restore(like={"w": jnp.zeros(4)}, data=again)[1] == 2
    assert again.state == {"taken": 2}


def with_iterator() -> HostStates:
    values = HostStates()
    values.register_iterator(Iterator())
    return values


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(7, id="number"),
        pytest.param(b"place", id="bytes"),
        pytest.param({"at": [1, {"of": "two"}], "done": None}, id="nested"),
        pytest.param({"order": np.arange(4), "at": np.int64(2)}, id="arrays"),
        pytest.param({1: {"a", "b"}, "kept": collections.deque([np.arange(2)])}, id="containers"),
        pytest.param({"key": jax.random.key(1)}, id="key"),
    ],
)
def test_one_state_in_all_processes_is_every_processs(state: Any) -> None:
    assert with_iterator().reshard["data"]([state, state, state], 1, 2) is state


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(7, 8, id="numbers"),
        pytest.param({"at": 1}, {"at": 1, "of": 2}, id="names"),
        pytest.param({"at": [1, 2]}, {"at": [1]}, id="lengths"),
        pytest.param({"order": np.arange(4)}, {"order": np.arange(4)[::-1]}, id="arrays"),
        pytest.param({"order": np.arange(4)}, {"order": np.arange(3)}, id="shapes"),
        pytest.param([1], 1, id="kinds"),
        pytest.param(
            {"kept": collections.deque([np.arange(2)])}, {"kept": collections.deque([np.ones(2)])}, id="deque"
        ),
        pytest.param({"key": jax.random.key(1)}, {"key": jax.random.key(2)}, id="keys"),
    ],
)
def test_states_that_differ_are_refused_with_the_process(one: Any, other: Any) -> None:
    with pytest.raises(
        CheckpointMismatch, match=r"3 processes, of which process 2 was not at .* 2 processes now"
    ) as error:
        with_iterator().reshard["data"]([one, one, other], 0, 2)
    assert "host_state('data', ..., reshard=...)" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((5, int, int, None), "expected a name, found 5", id="name"),
        pytest.param(("a", 1, int, None), "functions that get and set", id="get"),
        pytest.param(("a", int, int, 3), "reshard=...): expected a function, found 3", id="reshard"),
        pytest.param(("a", int, int, None, "skip"), "missing=...): expected a function, found 'skip'", id="missing"),
    ],
)
def test_what_is_registered_must_be_functions_with_a_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        HostStates().register(*arguments)
    assert message in str(caught.value)


def test_the_name_of_the_iterators_item_is_taken_once() -> None:
    with pytest.raises(SettingsError, match="'data'"):
        with_iterator().register("data", lambda: 1, lambda value: None, None)


def test_values_that_are_kept_stay_as_they_were_and_one_that_fails_is_marked() -> None:
    values, position, order = HostStates(), [3], np.arange(3)

    def fail() -> None:
        raise RuntimeError("no position")

    values.register("data", lambda: {"position": position, "order": order}, print, None)
    values.register("loader", fail, print, None)
    kept = values.get_now()
    position[0] += 1
    order += 1
    found = host_state.decode(host_state.encode(kept))
    assert found["data"]["position"] == [3]
    np.testing.assert_array_equal(found["data"]["order"], [0, 1, 2])
    assert str(found["loader"]) == "RuntimeError: no position"
