"""What was handed to the last sync point is given back as it was then, or it is said why it is gone."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.errors import AgreementError
from gracepoint.session.sync_points import LastState

# Compiles programs.
pytestmark = pytest.mark.integration


@dataclasses.dataclass
class Loop:
    """A training loop's side: a clock, a notice, host state."""

    now_s: float = 0.0
    pressing: bool = False
    signalled: bool = False
    keeping_takes_s: float = 0.0
    host_state: dict[str, Any] = dataclasses.field(default_factory=dict)

    def get(self) -> dict[str, Any]:
        self.now_s += self.keeping_takes_s
        return copy.deepcopy(self.host_state)

    def last_state(self) -> LastState:
        return LastState(self.get, lambda: self.pressing, lambda: self.signalled, lambda: self.now_s)


def test_what_was_handed_last_is_given_back() -> None:
    last, state = Loop(host_state={"data": {"position": 3}}).last_state(), {"w": jnp.arange(3.0), "n": 5}
    last.keep(7, 70, state)
    assert last.has(7)
    assert last.lost(7) == ""
    found = last.take(7)
    assert (found.step, found.host_state) == (70, {"data": {"position": 3}})
    np.testing.assert_array_equal(found.state["w"], state["w"])
    assert found.state["n"] == 5


def test_state_that_changes_in_place_is_given_back_as_it_was() -> None:
    loop = Loop(host_state={"data": {"position": [3], "rng": np.arange(3)}})
    last, weights = loop.last_state(), jnp.zeros(3)
    state: dict[str, Any] = {"w": weights, "seen": np.array([1, 2])}
    last.keep(7, 70, state)
    state["w"] = jnp.ones(3)
    state["seen"] += 1
    loop.host_state["data"]["position"][0] = 4
    loop.host_state["data"]["rng"] += 1
    found = last.take(7)
    assert found.state["w"] is weights
    np.testing.assert_array_equal(found.state["seen"], [1, 2])
    assert found.host_state["data"]["position"] == [3]
    np.testing.assert_array_equal(found.host_state["data"]["rng"], [0, 1, 2])


def test_large_arrays_of_numpy_are_not_copied_and_that_is_said() -> None:
    last = Loop().last_state()
    last.keep(7, 70, {"w": np.zeros(1 << 20, np.uint8)})
    assert last.lost(7) == ""
    last.keep(8, 80, {"w": np.broadcast_to(np.uint8(0), (300 << 20,)), "n": np.zeros(1)})
    assert last.lost(8) == (
        "the state of step 80 was not kept: it has 300 MiB in arrays of numpy, and no more than 256 are copied"
    )


def test_state_that_was_donated_is_gone() -> None:
    last, state = Loop(pressing=True).last_state(), {"w": jnp.zeros(3)}
    last.keep(7, 70, state)
    jax.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)(state)
    assert last.lost(7) == "the state of step 70 is gone: it was donated to the next step, or deleted"
    with pytest.raises(AgreementError, match="it was donated to the next step"):
        last.take(7)


@pytest.mark.parametrize("noticed", ["never", "before", "after"])
def test_arrays_that_the_loop_drops_stay_after_a_notice_only(noticed: str) -> None:
    loop = Loop(pressing=noticed == "before")
    last, state = loop.last_state(), {"w": jnp.zeros(3)}
    last.keep(7, 70, state)
    if noticed == "after":
        last.hold()
    del state
    assert (last.lost(7) == "") is (noticed != "never")


def test_older_and_later_sync_points_are_distinguished() -> None:
    last = Loop().last_state()
    assert last.lost(7) == ""
    last.keep(7, 70, state := {"w": jnp.zeros(3)})
    assert last.lost(6) == "it was at sync point 7 already, and the state of sync point 6 is gone"
    assert last.lost(8) == "", "it may come to that"
    with pytest.raises(AgreementError, match="no state was handed to sync point 8"):
        last.take(8)
    last.saves_at = 8
    assert last.lost(7) == "it saves at sync point 8 already, not 7"
    assert last.lost(8) == ""
    del state


def test_slow_keeping_is_left_out_until_there_is_a_notice() -> None:
    loop = Loop(keeping_takes_s=0.01, host_state={"data": 1})
    last, state = loop.last_state(), {"w": jnp.zeros(3)}

    def keep(ordinal: int, step_s: float) -> str:
        loop.now_s += step_s
        last.keep(ordinal, ordinal * 10, state)
        return last.lost(ordinal)

    assert [keep(1, 0.1), keep(1, 0.1)] == ["", ""], "one time is not enough to say"
    why = "the state of step 20 was not kept: nothing pressed then, and to keep it takes 10 ms of a step of 1e+02 ms"
    assert keep(2, 0.09) == why
    assert keep(3, 0.09) == "", "it is measured again"
    assert keep(4, 0.09) != ""
    assert keep(5, 5.0) == "", "a two-hundredth of that step is enough"
    assert keep(6, 0.1) != ""
    loop.pressing = True
    assert keep(7, 0.1) == ""
    loop.pressing, loop.keeping_takes_s = False, 0.0
    assert [keep(ordinal, 0.1) for ordinal in range(8, 80)][-1] == "", "it is quick now"


def test_to_keep_thousands_of_arrays_calls_no_function_of_python_for_each() -> None:
    last, state = Loop().last_state(), {f"layer{number}": jnp.zeros(()) for number in range(1000)}
    last.keep(1, 10, state)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        last.keep(2, 20, state)
    finally:
        sys.setprofile(None)
    assert last.lost(2) == ""
    assert calls < 100


def test_host_state_that_cannot_be_had_does_not_break_the_training() -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no position")

    last = LastState(fail, lambda: False, lambda: False, lambda: 0.0)
    last.keep(7, 70, {"w": jnp.zeros(3)})
    assert last.lost(7) == "the state of step 70 was not kept: RuntimeError: no position"


def test_only_after_a_signal_a_loop_waits_for_others_to_break_off() -> None:
    assert Loop().last_state().linger_s() == 0.0
    assert Loop(signalled=True).last_state().linger_s() == 0.2
