"""States that differ between processes are found when saves are prepared, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.errors import BarrierFailed, CheckpointError, CheckpointRefused
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import engine, in_gang, outcomes_in_gang

COUNT = 4


def state(process: int) -> dict[str, Any]:
    return {"w": jnp.arange(6.0), "numbers": np.arange(3), "rate": 0.5, "name": "a run", "none": None}


def prepare(root: Path, states: Callable[[int], Any]) -> Callable[[ProcessGroup], int]:
    return lambda gang: engine(root, gang).prepare(states(gang.process_index), in_background=False)


def changed(process: int, **leaves: Any) -> Callable[[int], Any]:
    """Returns states of which one process's has other leaves."""
    return lambda index: state(index) | (leaves if index == process else {})


def test_states_that_are_alike_are_prepared(tmp_path: Path) -> None:
    assert len(set(in_gang(COUNT, prepare(tmp_path, state)))) == 1


@pytest.mark.parametrize(
    ("states", "message"),
    [
        pytest.param(
            changed(2, numbers=np.arange(3) + 1), r"leaf 'numbers': values .* in process 2", id="a numpy array's value"
        ),
        pytest.param(
            changed(3, rate=0.25), r"'rate': 0.5 .* in process 0, 0.25 .* in process 3", id="a number's value"
        ),
        pytest.param(changed(1, name="b"), r"'name': 'a run' in process 0, 'b' in process 1", id="a string"),
        pytest.param(changed(1, w=jnp.arange(6.0) + 1), r"'w': values .* in process 1", id="a local array's value"),
        pytest.param(changed(1, w=jnp.arange(7.0)), r"'w': .*\[6\] .* in process 0, .*\[7\]", id="a shape"),
        pytest.param(changed(1, rate=1), r"'rate': .* in process 1", id="a type"),
        pytest.param(changed(3, more=1), r"'more': nothing in process 0, .* in process 3", id="a leaf too many"),
        pytest.param(
            lambda i: state(i) | ({} if i else {"more": 1}),
            r"'more': .* in process 0, nothing in process 1-3",
            id="a leaf too few",
        ),
    ],
)
def test_states_that_cannot_be_saved_fail_at_the_first_step(
    tmp_path: Path, states: Callable[[int], Any], message: str
) -> None:
    outcomes = outcomes_in_gang(COUNT, prepare(tmp_path, states))
    assert {type(outcome) for outcome in outcomes} == {CheckpointError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    with pytest.raises(CheckpointError, match=message):
        raise outcomes[0]  # type: ignore[misc]


def test_all_processes_learn_of_a_state_that_one_cannot_save(tmp_path: Path) -> None:
    outcomes = outcomes_in_gang(COUNT, prepare(tmp_path, changed(1, rate=object())))
    assert [type(outcome) for outcome in outcomes] == [
        BarrierFailed,
        CheckpointRefused,
        BarrierFailed,
        BarrierFailed,
    ]
    assert "state['rate']: cannot save" in str(outcomes[0])


def test_large_leaves_are_not_compared_value_by_value(tmp_path: Path) -> None:
    in_gang(2, prepare(tmp_path, lambda process: {"w": np.full(100_000, process)}))


def prepare_with(root: Path, host_state: Callable[[int], dict[str, Any]]) -> Callable[[ProcessGroup], int]:
    return lambda gang: engine(root, gang).prepare(
        state(0), in_background=False, host_state=lambda: host_state(gang.process_index)
    )


def test_values_of_the_host_state_are_each_processs_own(tmp_path: Path) -> None:
    in_gang(COUNT, prepare_with(tmp_path, lambda index: {"data": index}))


def test_host_states_of_other_names_are_found_at_the_first_step_with_the_processes(tmp_path: Path) -> None:
    def names(index: int) -> dict[str, Any]:
        return {"data": 1} if index < 2 else {"loader": 1}

    for error in outcomes_in_gang(COUNT, prepare_with(tmp_path, names)):
        assert isinstance(error, CheckpointError)
        assert "host_state('data')\": registered in process 0, nothing in process 2-3" in str(error)


def test_a_host_state_that_one_process_cannot_save_fails_the_first_step_in_all(tmp_path: Path) -> None:
    found = outcomes_in_gang(COUNT, prepare_with(tmp_path, lambda index: {"data": object() if index == 1 else 1}))
    assert "host_state['data']: cannot save a value of type object" in str(found[1])
    assert all("process 1 reported" in str(error) for error in (found[0], found[2], found[3]))
