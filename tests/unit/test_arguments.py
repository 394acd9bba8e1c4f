"""Arguments in the place of others are refused in a short error, and no error shows the values of a state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint import arguments, checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, CheckpointManager
from gracepoint.errors import SettingsError
from gracepoint.multihost import broadcast_one_to_all

STATE = {f"layer{number}": np.arange(200.0) for number in range(20)}
#: The longest error about one argument.
SHORT = 250

CALLS: dict[str, Callable[[Path], Any]] = {
    "save(tree, path)": lambda path: checkpoint.save(STATE, path),  # type: ignore[arg-type]
    "save(options=tree)": lambda path: checkpoint.save(path / "a", STATE, options=STATE),  # type: ignore[arg-type]
    "save(handlers=tree)": lambda path: checkpoint.save(path / "a", STATE, handlers=STATE),  # type: ignore[arg-type]
    "restore(like, path)": lambda path: checkpoint.restore(STATE, path),  # type: ignore[arg-type]
    "restore(options=tree)": lambda path: checkpoint.restore(path / "a", STATE, options=STATE),  # type: ignore[arg-type]
    "metadata(tree)": lambda path: AsyncCheckpointer().metadata(STATE),  # type: ignore[arg-type]
    "verify(tree)": lambda path: checkpoint.verify(STATE),  # type: ignore[arg-type]
    "all_steps(tree)": lambda path: checkpoint.all_steps(STATE),  # type: ignore[arg-type]
    "CheckpointManager(tree)": lambda path: CheckpointManager(STATE),  # type: ignore[arg-type]
    "save(tree, step)": lambda path: CheckpointManager(path).save(STATE, 3),  # type: ignore[arg-type]
    "save(-1)": lambda path: CheckpointManager(path).save(-1, STATE),
    "save(1.5)": lambda path: CheckpointManager(path).save(1.5, STATE),  # type: ignore[arg-type]
    "restore(like)": lambda path: CheckpointManager(path).restore(STATE),  # type: ignore[call-overload]
    "should_save(tree)": lambda path: CheckpointManager(path).should_save(STATE),  # type: ignore[arg-type]
    "metadata of a step": lambda path: CheckpointManager(path).metadata(STATE),  # type: ignore[arg-type]
    "broadcast(tree, tree)": lambda path: broadcast_one_to_all(STATE, STATE),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_in_the_place_of_another_is_refused_in_short(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    with pytest.raises((SettingsError, TypeError), match="expected .* found ") as caught:
        call(tmp_path)
    assert len(str(caught.value)) < SHORT


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        (None, "None"),
        ("x" * 300, "'" + "x" * 99 + "..."),
        (STATE, "a dict"),
        (np.zeros((4, 2)), "a ndarray of float64[4, 2]"),
        (jnp.zeros(3), "a jax.Array of float32[3]"),
    ],
)
def test_what_is_shown_of_a_value_is_short(value: Any, expected: str) -> None:
    assert arguments.shown(value) == expected


@pytest.mark.parametrize("step", [7, np.int64(7), jnp.int32(7)], ids=["Python", "numpy", "JAX"])
def test_a_step_is_an_integer_of_any_kind(step: Any) -> None:
    number = arguments.step_number("save(step)", step)
    assert (number, type(number)) == (7, int)


def test_a_step_on_a_device_is_warned_of_once_for_each_function(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for call in ("first(step)", "first(step)", "second(step)"):  # no other test has calls of these names
            arguments.step_number(call, jnp.int32(7))
    assert [message.split(": ")[0] for message in caplog.messages] == ["first(step)", "second(step)"]
    assert "count the steps with a Python int" in caplog.text
